"""Scale, mask and softmax of attention scores as one PyTorch operator, forward and backward, on CUDA and CPU."""

import torch  # noqa: F401  (brings the libraries that ours is linked to)

from . import _build
from ._build import build_info, library_path

# Before the rest: functional.py and _ops.py need to know whether the operators exist.
_build.load()

from .functional import scaled_mask_softmax, scaled_mask_softmax_  # noqa: E402
from .modules import ScaledMaskSoftmax  # noqa: E402

if _build.NATIVE:
    from . import _ops  # noqa: F401

__version__ = _build.version(_build.RECORD)

__all__ = [
    "ScaledMaskSoftmax",
    "__version__",
    "build_info",
    "library_path",
    "scaled_mask_softmax",
    "scaled_mask_softmax_",
]
