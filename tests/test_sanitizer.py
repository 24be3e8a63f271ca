"""The small set that sanitizers run: every kernel, mask, alignment and layout at least once, on few rows.

`make sanitize` runs it on the CPU, `make sanitize-gpu` on CUDA devices, with what is marked so in other files.
The comparison with the oracle is on the CPU, so that the device runs little else than our kernels.
"""

from __future__ import annotations

import layouts
import oracle
import pytest
import torch
from checks import DTYPES_AND_KINDS, assert_is_forward, assert_within, normal, random_mask, same_bits, short
from test_thresholds import capability, short_name, switches
from tolerances import backward_bound

import scaled_mask_softmax as sms
from scaled_mask_softmax import _C

pytestmark = pytest.mark.sanitizer

# Of the CPU: less than a vector, whole vectors, a tail, and rows long enough for several chunks.
CPU_LENGTHS = [1, 2, 7, 8, 15, 16, 17, 33, 64, 100, 255, 1000, 4097, 8193, 70_001]


def kernel(direction: str, columns: int, dtype: torch.dtype, kind: str, device: str) -> tuple[object, ...]:
    """What tells kernels apart; plans of one kernel may differ in their number of warps."""
    plan = _C.plan(direction, columns, short_name(dtype), kind, True, capability(device))
    lanes = plan["lanes"] if plan["strategy"] == "warp_rows" else 0
    return plan["strategy"], plan["blocks"], lanes, plan["vectors"]


def lengths(device: str, dtype: torch.dtype, kind: str) -> list[int]:
    """Of a CUDA device: about each length at which another kernel takes over, whole vectors and not."""
    if device == "cpu":
        return CPU_LENGTHS
    found = {1, 5}
    for direction, mask in (("forward", kind), ("backward", "none")):
        for start in switches(direction, short_name(dtype), mask, True, capability(device)):
            before, after = (kernel(direction, columns, dtype, mask, device) for columns in (start - 1, start))
            if before == after:
                continue
            if start < 120_000:
                found |= {start - 1, start, -(-start // 8) * 8, start + 9 | 1}
            elif after[0] == "stream_row":
                found |= {start}
    return sorted(found)


def compare(
    x: torch.Tensor, mask: torch.Tensor | None, grad: torch.Tensor, is_causal: bool, diagonal: int
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = x.detach().requires_grad_()
    y = sms.scaled_mask_softmax(leaf, mask, 0.7, is_causal, diagonal=diagonal)
    (dx,) = torch.autograd.grad(y, leaf, grad)
    y = y.detach()
    host_x, host_y, host_grad = x.cpu(), y.cpu(), grad.cpu()
    assert_is_forward(host_y, host_x, None if mask is None else mask.cpu(), 0.7, is_causal, diagonal)
    expected = oracle.backward(host_grad, host_y, 0.7, is_causal, diagonal)
    assert_within(dx.cpu(), expected, backward_bound(x.dtype, 0.7, host_grad, host_y, expected), "backward")
    return y, dx


@pytest.mark.parametrize(("dtype", "kind"), DTYPES_AND_KINDS, ids=short)
def test_every_kernel(device: str, dtype: torch.dtype, kind: str) -> None:
    """Dense tensors, whose last row ends where the allocation does, and misaligned ones."""
    for columns in lengths(device, dtype, kind):
        shape = (3 if columns < 20_000 else 2, columns)
        x, grad = normal(shape, dtype, device, columns), normal(shape, dtype, device, 2)
        mask = random_mask(kind, shape, dtype, device)
        for is_causal in (False, True):
            y, dx = compare(x, mask, grad, is_causal, columns // 2)
            moved = None if mask is None else layouts.offset(mask, 5)
            moved_y, moved_dx = compare(layouts.offset(x, 1), moved, layouts.offset(grad, 3), is_causal, columns // 2)
            assert same_bits(y, moved_y)
            assert same_bits(dx, moved_dx)
        z = x.clone()
        sms.scaled_mask_softmax_(z, mask, 0.7)
        assert_is_forward(z.cpu(), x.cpu(), None if mask is None else mask.cpu(), 0.7)


@pytest.mark.parametrize(("dtype", "kind"), DTYPES_AND_KINDS, ids=short)
def test_every_layout(device: str, dtype: torch.dtype, kind: str) -> None:
    shape = (2, 3, 5, 37)
    for layout in layouts.ALL.values():
        x, grad = layout(normal(shape, dtype, device)), layout(normal(shape, dtype, device, 2))
        for mask_shape in (shape, (2, 1, 1, 37), (2, 1, 5, 1), (5, 37), ()):
            mask = random_mask(kind, mask_shape, dtype, device)
            if mask is not None and mask.dim() > 1:
                mask = layout(mask)
            compare(x, mask, grad, True, 20)


def test_edges(device: str) -> None:
    for shape in ((0, 4), (3, 0), (1,), (1, 1), (2, 1, 2, 1, 2, 1, 3)):
        compare(*(torch.zeros(shape, device=device), None, torch.zeros(shape, device=device)), True, 0)
    dead = torch.ones(4, 1, dtype=torch.bool, device=device)
    for columns in (3, 70, 3000, 40_000):
        y, dx = compare(
            *(torch.zeros(4, columns, device=device), dead, torch.ones(4, columns, device=device)), False, 0
        )
        assert not y.any()
        assert not dx.any()
