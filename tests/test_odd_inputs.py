"""Inputs and situations that are legal, odd, and easy to get wrong."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from checks import normal, same_bits

import scaled_mask_softmax as sms


@pytest.mark.parametrize(
    "view",
    [
        lambda hidden: hidden[1:3],
        lambda hidden: hidden.view(2, 2, 6),
        lambda hidden: hidden.t(),
        lambda hidden: hidden[:, 1:4].unsqueeze(1),
    ],
    ids=["slice", "reshaped", "transposed", "unsqueezed"],
)
def test_a_graph_over_a_view_written_in_place_is_freed(device: str, view: Callable[..., torch.Tensor]) -> None:
    """Whether or not backward ever runs: the view's history holds the operator's node, which must not hold the view."""
    leaf = normal((4, 6), torch.float64, device).requires_grad_()

    def run(backward: bool) -> weakref.ref[torch.Tensor]:
        hidden = leaf * 1
        part = view(hidden)
        sms.scaled_mask_softmax_(part, None, 0.5)
        if backward:
            torch.autograd.grad(hidden.sum(), leaf, retain_graph=True)
        return weakref.ref(part)

    for backward in (False, True):
        kept = run(backward)
        gc.collect()
        assert kept() is None, "the graph is still alive"


def test_a_view_written_in_place_counts_versions(device: str) -> None:
    leaf = normal((4, 6), torch.float32, device).requires_grad_()
    for spoil in (lambda hidden, part: hidden.mul_(2), lambda hidden, part: part[0].zero_()):
        hidden = leaf * 1
        part = hidden[1:3]
        sms.scaled_mask_softmax_(part, None, 0.5)
        spoil(hidden, part)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            hidden.sum().backward()


def test_a_second_derivative_through_a_view_written_in_place_raises(device: str) -> None:
    """Also where the incoming gradient is constant, so that only y leads back to x."""
    x = normal((4, 6), torch.float64, device).requires_grad_()
    hidden = x * 1
    sms.scaled_mask_softmax_(hidden[1:3])
    with pytest.raises(NotImplementedError, match="second derivative"):
        (dx,) = torch.autograd.grad(hidden, x, normal((4, 6), torch.float64, device, 2), create_graph=True)
        (dx.square().sum() + x.square().sum()).backward()


def test_a_view_written_in_place_compiles(device: str) -> None:
    x = normal((4, 6), torch.float64, device, spread=1.0).requires_grad_()

    def of(x: torch.Tensor) -> torch.Tensor:
        hidden = x * 2
        sms.scaled_mask_softmax_(hidden[1:].t(), None, -0.5, True)
        return hidden * hidden

    assert torch.autograd.gradcheck(of, x)
    compiled = torch.compile(of, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(x), of(x))
    grad = normal((4, 6), torch.float64, device, 2)
    assert same_bits(torch.autograd.grad(compiled(x), x, grad)[0], torch.autograd.grad(of(x), x, grad)[0])
