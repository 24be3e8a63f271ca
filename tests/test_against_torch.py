"""Beside the oracle, plainly: the same result as scale, mask and torch.softmax on the same device."""

from __future__ import annotations

import oracle
import pytest
import tolerances
import torch
from checks import SIXTEEN_BIT, normal, short

import scaled_mask_softmax as sms

CASES = ["no mask", "additive mask", "causal", "causal and mask"]


def arguments(
    case: str, columns: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor | None, bool]:
    x = normal((2, 2, columns, columns), dtype, device, spread=3.0)
    mask = None
    if "mask" in case and case != "no mask":
        dead = torch.rand(2, 1, columns, columns, generator=torch.Generator().manual_seed(5)) < 0.3
        dead[..., 0] = False
        mask = torch.zeros(dead.shape, dtype=dtype).masked_fill(dead, -torch.inf).to(device)
    return x, mask, "causal" in case


def eager(x: torch.Tensor, mask: torch.Tensor | None, scale: float, is_causal: bool) -> torch.Tensor:
    """What a model does without the operator, each step in x's dtype."""
    s = x * scale
    if mask is not None:
        s = s + mask
    if is_causal:
        past = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        s = s.masked_fill(past, -torch.inf)
    return torch.softmax(s, -1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 1e-3)], ids=short)
@pytest.mark.parametrize("columns", [128, 512, 1024])
@pytest.mark.parametrize("case", CASES)
def test_equals_torch(device: str, case: str, columns: int, dtype: torch.dtype, tolerance: float) -> None:
    x, mask, is_causal = arguments(case, columns, dtype, device)
    y = sms.scaled_mask_softmax(x, mask, 1.0, is_causal)
    torch.testing.assert_close(y, eager(x, mask, 1.0, is_causal), rtol=0, atol=tolerance)


def largest_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return (actual.double() - expected).abs().max().item()


def mean_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return (actual.double() - expected).abs().mean().item()


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=short)
@pytest.mark.parametrize("scale", [1.0, 80**-0.5])
@pytest.mark.parametrize("columns", [128, 512, 1024])
@pytest.mark.parametrize("case", CASES)
def test_sixteen_bit_error_is_no_larger_than_eagers(
    device: str, case: str, columns: int, scale: float, dtype: torch.dtype
) -> None:
    x, mask, is_causal = arguments(case, columns, dtype, device)
    grad = normal(x.shape, dtype, device, 7, 1.0)
    x.requires_grad_()
    ours = sms.scaled_mask_softmax(x, mask, scale, is_causal)
    theirs = eager(x, mask, scale, is_causal)
    expected = oracle.forward(x, mask, scale, is_causal)
    assert largest_error(ours, expected) <= largest_error(theirs, expected) + tolerances.NOISE_16_BIT
    (ours_dx,) = torch.autograd.grad(ours, x, grad)
    (theirs_dx,) = torch.autograd.grad(theirs, x, grad)
    expected_dx = oracle.backward(grad, expected, scale, is_causal)
    # The largest error of a gradient hangs on how the largest y of its row happened to be rounded, for better or worse
    # in either chain, so compare the average.
    assert mean_error(ours_dx, expected_dx) <= 1.001 * mean_error(theirs_dx, expected_dx)
