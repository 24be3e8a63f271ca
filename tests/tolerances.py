"""Every tolerance of the suite: errors against the float64 oracle.

Forward bounds are absolute, `relative` also holds, and is the stricter one where a row is long and its probabilities
small. Gradients are proportional to `scale` and to the incoming gradient, so their bounds are for |scale| = 1 and a row
whose largest |grad| is 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    # Each probability, absolute.
    forward: float
    # Each probability, as a share of itself: half a unit in the last place of the dtype, and float32 arithmetic.
    relative: float
    # How many times max |s| of the row is added to `forward` and `relative`: scores are float32 numbers, and their
    # rounding error is a factor of the probability.
    forward_scores: float
    relative_scores: float
    # Each row's sum, against the sum of the oracle rounded to the dtype. 16-bit: the largest cell may round the other
    # way at a tie, which is one unit in the last place of a number below 1.
    row_sum: float
    # Each gradient, through autograd from x on: y was rounded to the dtype in between, once in the factor y and once
    # in the sum over the row. `gradient_scores` as above.
    gradient: float
    gradient_scores: float
    # The same of the backward operator alone, given y: as a share of y, and half a unit in the last place of the
    # result.
    backward: float
    backward_relative: float


EPS64 = torch.finfo(torch.float64).eps
EPS32 = torch.finfo(torch.float32).eps
EPS16 = torch.finfo(torch.float16).eps
EPSB16 = torch.finfo(torch.bfloat16).eps

TOLERANCES = {
    torch.float64: Tolerance(1e-12, 1e-12, 0.0, 4 * EPS64, 1e-12, 1e-12, 0.0, 1e-12, EPS64),
    torch.float32: Tolerance(1e-6, 1e-6, 4 * EPS32, 4 * EPS32, 1e-6, 2e-6, 8 * EPS32, 2e-6, EPS32),
    torch.float16: Tolerance(1e-3, EPS16 / 2 + 1e-6, 0.0, 4 * EPS32, 1e-3, 2e-3, 0.0, 2e-6, EPS16 / 2 + 1e-6),
    torch.bfloat16: Tolerance(8e-3, EPSB16 / 2 + 1e-6, 0.0, 4 * EPS32, 8e-3, 1.6e-2, 0.0, 2e-6, EPSB16 / 2 + 1e-6),
}

# Where a 16-bit error is compared with that of eager torch: both round one float32 number, which each knows to this.
NOISE_16_BIT = 1e-6


def smallest(dtype: torch.dtype) -> float:
    """What may be lost to underflow: a float32 subnormal may be flushed to zero, float16 rounds to its subnormals."""
    info = torch.finfo(dtype)
    return info.smallest_normal * (info.eps if dtype == torch.float16 else 1.0)


def largest(values: torch.Tensor) -> torch.Tensor:
    """Max of |values| over each row's finite cells, [..., 1]."""
    values = values.detach().double()
    if values.shape[-1] == 0:
        return values.new_zeros((*values.shape[:-1], 1))
    return values.abs().masked_fill(~values.isfinite(), 0.0).amax(dim=-1, keepdim=True)


def forward_bound(
    dtype: torch.dtype, scores: torch.Tensor, y: torch.Tensor, exact_scores: bool = False
) -> torch.Tensor:
    """Bound of each cell's error. y: the oracle's. exact_scores: x * scale + mask is exact in float32, so that only the
    distance from the maximum can be rounded, when the exponential is taken."""
    row = TOLERANCES[dtype]
    if exact_scores:
        size = (scores - scores.amax(dim=-1, keepdim=True)).abs().nan_to_num(0.0, 0.0, 0.0)
    else:
        size = largest(scores)
    absolute = row.forward + (0.0 if exact_scores else row.forward_scores * size)
    relative = (row.relative + row.relative_scores * size) * y + smallest(dtype)
    return relative.clamp(max=absolute)


def row_sum_bound(dtype: torch.dtype, scores: torch.Tensor, with_sink: bool) -> torch.Tensor:
    """Bound of the error of each row's sum: 1 however scores are rounded; beside a sink a probability like others."""
    row = TOLERANCES[dtype]
    return row.row_sum + (row.relative_scores if with_sink else 0.0) * largest(scores).squeeze(-1)


def backward_bound(
    dtype: torch.dtype, scale: float, grad: torch.Tensor, y: torch.Tensor, dx: torch.Tensor
) -> torch.Tensor:
    """Bound of each gradient's error, given the y that the operator was given. dx: the oracle's."""
    row = TOLERANCES[dtype]
    return (
        row.backward * abs(scale) * largest(grad) * y.detach().double()
        + row.backward_relative * dx.abs()
        + (1 + abs(scale)) * smallest(dtype)
    )


def gradient_bound(dtype: torch.dtype, scale: float, grad: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Bound of each gradient's error, from x on."""
    row = TOLERANCES[dtype]
    return (row.gradient + row.gradient_scores * largest(scores)) * abs(scale) * largest(grad) + (
        1 + abs(scale)
    ) * smallest(dtype)
