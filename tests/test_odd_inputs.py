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


def test_compile_where_sizes_follow_from_data(device: str) -> None:
    """The number of rows is known only while the program runs."""

    def select(x: torch.Tensor, mask: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        rows, rows_mask = x[keep] * 2, mask[keep]
        plain = sms.scaled_mask_softmax(rows, rows_mask, 0.5)
        sms.scaled_mask_softmax_(rows, mask[0], 0.5)
        return plain + rows + sms.scaled_mask_softmax(x[keep][:, None].transpose(0, 1), None, 0.5, True)

    x = normal((6, 4), torch.float32, device)
    mask = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)).to(device) < 0.3
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(select, fullgraph=True)
        for kept in ([0, 3, 4], [1, 2, 3, 5], [2], []):
            keep = torch.zeros(6, dtype=torch.bool, device=device)
            keep[kept] = True
            assert same_bits(compiled(x, mask, keep), select(x, mask, keep))


def test_errors_while_sizes_follow_from_data(device: str) -> None:
    """What is wrong whatever the data still raises while the program is traced."""
    # From one device to the next torch remembers that the mask's size varied, and names it s31 instead of 5.
    torch.compiler.reset()
    keep = torch.tensor([True, False, True], device=device)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(lambda x, mask: sms.scaled_mask_softmax(x[keep], mask), fullgraph=True)
        with pytest.raises(Exception, match=r"scaled_mask_softmax: mask has shape \[5\]"):
            compiled(torch.zeros(3, 4, device=device), torch.zeros(5, device=device))
        # Three rows for two: found by the kernel.
        with pytest.raises(ValueError, match=r"mask has shape \[3, 4\] for x of shape \[2, 4\]"):
            compiled(torch.zeros(3, 4, device=device), torch.zeros(3, 4, device=device))


def test_a_sparse_gradient_is_refused(device: str) -> None:
    y = torch.full((3, 4), 0.25, device=device)
    backward = torch.ops.scaled_mask_softmax.scaled_mask_softmax_backward
    with pytest.raises(ValueError, match=r"grad has layout torch.sparse_coo; expected a dense \(strided\) tensor"):
        backward(y.to_sparse(), y, 1.0, False)
