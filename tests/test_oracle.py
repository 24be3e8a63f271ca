"""The oracle agrees with plain torch wherever torch defines the result, and its gradient with autograd's."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from checks import normal, random_mask

SHAPE = (2, 3, 5, 7)


def alive(x: torch.Tensor, kind: str) -> torch.Tensor | None:
    """A mask that leaves the first column."""
    mask = random_mask(kind, SHAPE, torch.float64, "cpu")
    if mask is not None:
        mask[..., 0] = 0
    return mask


@pytest.mark.parametrize("diagonal", [0, 2, 9])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "bool", "same"])
def test_forward_and_backward_are_those_of_torch(kind: str, is_causal: bool, diagonal: int) -> None:
    x = normal(SHAPE, torch.float64, "cpu").requires_grad_()
    mask = alive(x, kind)
    grad = normal(SHAPE, torch.float64, "cpu", 5)
    s = x * -0.7
    if kind == "bool":
        s = s.masked_fill(mask, -torch.inf)
    elif kind == "same":
        s = s + mask
    if is_causal:
        s = s.masked_fill(~torch.ones(SHAPE[-2:], dtype=torch.bool).tril(diagonal), -torch.inf)
    y = torch.softmax(s, -1)
    (dx,) = torch.autograd.grad(y, x, grad)
    torch.testing.assert_close(oracle.forward(x, mask, -0.7, is_causal, diagonal), y.detach(), rtol=0, atol=1e-15)
    torch.testing.assert_close(oracle.backward(grad, y, -0.7, is_causal, diagonal), dx, rtol=0, atol=1e-15)


def test_a_dead_row_is_zero_and_its_gradient_too() -> None:
    x = normal((2, 3), torch.float64, "cpu")
    y = oracle.forward(x, torch.tensor([[True], [False]]))
    assert y[0].tolist() == [0, 0, 0]
    assert y[1].sum().item() == pytest.approx(1, abs=1e-15)
    assert oracle.backward(torch.full((2, 3), torch.nan), y)[0].tolist() == [0, 0, 0]


def test_a_three_dimensional_mask_is_per_sample_for_rank_four_only() -> None:
    x = torch.zeros(2, 2, 1, 2)
    mask = torch.tensor([[[False, True]], [[True, False]]])
    assert oracle.forward(x, mask)[:, :, 0].tolist() == [[[1, 0], [1, 0]], [[0, 1], [0, 1]]]
    assert oracle.forward(x[0], mask)[:, 0].tolist() == [[1, 0], [0, 1]]


def test_nan_and_infinities() -> None:
    nan, inf = math.nan, math.inf
    x = torch.tensor([[0.0, nan], [0.0, inf], [0.0, -inf], [-inf, -inf], [nan, 0.0]], dtype=torch.float64)
    y = oracle.forward(x, torch.tensor([[False, False]] * 4 + [[True, False]]))
    assert y[:2].isnan().all()
    assert y[2:].tolist() == [[1, 0], [0, 0], [0, 1]]


def test_scores_past_the_range_of_float32_are_infinite_except_in_float64() -> None:
    x = torch.tensor([1e30, 0.0])
    assert oracle.forward(x, scale=1e30).isnan().all()
    assert oracle.forward(x, scale=-1e30).tolist() == [0, 1]
    assert oracle.forward(x.double(), scale=1e30).tolist() == [1, 0]


def test_gradient_leaves_out_excluded_cells_whatever_they_hold() -> None:
    y = torch.tensor([[0.25, 0.75, 0.0]], dtype=torch.float64)
    dx = oracle.backward(torch.tensor([[1.0, 2.0, torch.nan]], dtype=torch.float64), y, 2.0)
    assert dx.tolist() == [[2 * 0.25 * (1 - 1.75), 2 * 0.75 * (2 - 1.75), 0]]
    nan_row = oracle.backward(torch.ones(1, 3), torch.full((1, 3), torch.nan), 1.0, True, 0)
    assert nan_row[0, 0].isnan()
    assert nan_row[0, 1:].tolist() == [0, 0]
