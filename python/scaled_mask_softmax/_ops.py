"""Python parts of the native operators: fake kernels for tracing, and the composite for other devices.

Imported once, after the native library has registered the schemas.
"""

from __future__ import annotations

import torch

from . import _checks, _composite, _vmap  # noqa: F401  (_vmap registers)

_NAMESPACE = "scaled_mask_softmax"
# Below autograd, which records the graph of the whole operator.
_without_graph = torch.no_grad()

_library = torch.library.Library(_NAMESPACE, "IMPL", "CompositeExplicitAutograd")
_library.impl("scaled_mask_softmax", _without_graph(_composite.forward))
_library.impl("scaled_mask_softmax_", _without_graph(_composite.forward_in_place))
_library.impl("scaled_mask_softmax_backward", _without_graph(_composite.backward))


@torch.library.register_fake(f"{_NAMESPACE}::scaled_mask_softmax")
def _(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    *,
    diagonal: int = 0,
    window: int | None = None,
    key_lengths: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    _checks.check_forward(x, mask, scale, window, key_lengths, sink)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake(f"{_NAMESPACE}::scaled_mask_softmax_")
def _(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    *,
    diagonal: int = 0,
    window: int | None = None,
    key_lengths: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
) -> None:
    _checks.check_forward(x, mask, scale, window, key_lengths, sink)
    # Not above: it imports much, and only traced programs come here.
    from torch.fx.experimental import symbolic_shapes

    # Sizes that follow from data cannot be compared yet: the kernel that finally runs checks x then.
    if not symbolic_shapes.free_unbacked_symbols((x, mask)):
        _checks.check_in_place(x, mask)


@torch.library.register_fake(f"{_NAMESPACE}::scaled_mask_softmax_backward")
def _(
    grad: torch.Tensor,
    y: torch.Tensor,
    scale: float,
    is_causal: bool,
    *,
    diagonal: int = 0,
    window: int | None = None,
    key_lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    _checks.check_backward(grad, y, scale, window, key_lengths)
    return torch.empty_like(y, memory_format=torch.contiguous_format)
