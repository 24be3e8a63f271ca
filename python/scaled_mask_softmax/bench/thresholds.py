"""The lengths of rows at which the policy for CUDA takes another kernel, or another shape of one.

Those of a row's own plan: where causal rows are taken in pairs is not among them, as that depends on more than the row.
"""

from __future__ import annotations

import importlib
from functools import cache

import torch

from scaled_mask_softmax import _build

SHORTEST, LONGEST = 128, 131072
STEP = 8  # columns: a whole number of vectors in every dtype
PUBLISHED = 90  # the compute capability of the published figures


def known() -> bool:
    """Whether this build can tell: the policy is a part of the native library, with CUDA kernels or without."""
    return _build.NATIVE


def capability() -> int:
    """10 * major + minor, of the CUDA device or, to list cases without one, PUBLISHED."""
    if not torch.cuda.is_available() or torch.cuda.device_count() == 0:
        return PUBLISHED
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


@cache
def lengths(direction: str, dtype_name: str, mask: str, band: bool, capability: int) -> tuple[int, ...]:
    """Each multiple of STEP whose rows and those of STEP more columns have different kernels."""
    plan = importlib.import_module("scaled_mask_softmax._C").plan

    def kernel(columns: int) -> tuple[object, ...]:
        chosen = plan(direction, columns, dtype_name, mask, band, capability)
        # Warps of a block are as many as the row needs, which is no threshold.
        lanes = chosen["lanes"] if chosen["strategy"] == "warp_rows" else None
        return chosen["strategy"], lanes, chosen["vectors"], chosen["rows"], chosen["blocks"]

    kernels = {columns: kernel(columns) for columns in range(SHORTEST, LONGEST + 1, STEP)}
    return tuple(columns for columns in kernels if columns < LONGEST and kernels[columns] != kernels[columns + STEP])
