"""Autograd as people use it. Second derivatives, forward mode and function transforms: test_derivatives.py."""

from __future__ import annotations

import layouts
import pytest
import torch
import torch.utils.checkpoint
from checks import DTYPES, normal, random_mask, same_bits, short

import scaled_mask_softmax as sms


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "bool", "same"])
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4, 6), (7,), (2, 33)], ids=short)
def test_gradcheck(device: str, shape: tuple[int, ...], kind: str, is_causal: bool) -> None:
    x = normal(shape, torch.float64, device, spread=1.0).requires_grad_()
    mask = random_mask(kind, shape, torch.float64, device)

    def of(x: torch.Tensor) -> torch.Tensor:
        return sms.scaled_mask_softmax(x, mask, -0.6, is_causal, diagonal=1)

    def in_place(x: torch.Tensor) -> torch.Tensor:
        return sms.scaled_mask_softmax_(x.clone(), mask, -0.6, is_causal, diagonal=1)

    assert torch.autograd.gradcheck(of, x)
    assert torch.autograd.gradcheck(in_place, x)


def test_gradcheck_of_strided_and_expanded_x(device: str) -> None:
    base = normal((3, 6), torch.float64, device, spread=1.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: sms.scaled_mask_softmax(x.t()), base)
    assert torch.autograd.gradcheck(
        lambda x: sms.scaled_mask_softmax(x[:, None].expand(3, 4, 6), None, 0.5, True), base
    )
    assert torch.autograd.gradcheck(lambda x: sms.scaled_mask_softmax(x[:, 1::2]), base)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("layout", layouts.ALL)
def test_the_incoming_gradient_is_kept(device: str, layout: str, dtype: torch.dtype) -> None:
    x = normal((2, 3, 5, 33), dtype, device).requires_grad_()
    grad = layouts.ALL[layout](normal(x.shape, dtype, device, 3))
    before = layouts.whole_storage(grad).clone()
    sms.scaled_mask_softmax(x, None, 0.7, True).backward(grad)
    assert same_bits(layouts.whole_storage(grad), before)


def test_retain_graph(device: str) -> None:
    for dtype in DTYPES:
        x = normal((3, 65), dtype, device).requires_grad_()
        grad = normal(x.shape, dtype, device, 3)
        y = sms.scaled_mask_softmax(x, None, 0.7, True, diagonal=30)
        first, second, third = (torch.autograd.grad(y, x, grad, retain_graph=True)[0] for _ in range(3))
        assert same_bits(first, second)
        assert same_bits(first, third)
        y.backward(grad)
        assert same_bits(x.grad, first)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.backward(grad)


def test_no_graph_where_nothing_needs_one(device: str) -> None:
    x = normal((3, 9), torch.float32, device)
    assert not sms.scaled_mask_softmax(x).requires_grad
    x.requires_grad_()
    with torch.no_grad():
        assert not sms.scaled_mask_softmax(x).requires_grad
    with torch.inference_mode():
        assert sms.scaled_mask_softmax(x).is_inference()
    assert sms.scaled_mask_softmax(x).requires_grad


def test_gradient_is_not_computed_for_a_result_nobody_used(device: str) -> None:
    x = normal((3, 9), torch.float32, device).requires_grad_()
    sms.scaled_mask_softmax(x)
    (x * 2).sum().backward()
    assert (x.grad == 2).all()


def test_y_modified_before_backward_raises(device: str) -> None:
    x = normal((3, 9), torch.float32, device).requires_grad_()
    y = sms.scaled_mask_softmax(x)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_y_overwritten_by_the_in_place_form_before_backward_raises(device: str) -> None:
    """The in-place form counts versions as torch's own in-place operators do."""
    x = normal((3, 9), torch.float32, device).requires_grad_()
    y = sms.scaled_mask_softmax(x)
    sms.scaled_mask_softmax_(y.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with torch.no_grad():
        version = y._version
        sms.scaled_mask_softmax_(y)
        assert y._version == version + 1


def test_x_modified_before_backward_is_no_matter(device: str) -> None:
    """Only y is saved."""
    x = normal((3, 9), torch.float32, device).requires_grad_()
    hidden = x * 1
    y = sms.scaled_mask_softmax(hidden, None, 0.5)
    (expected,) = torch.autograd.grad(y, x, y.detach(), retain_graph=True)
    hidden.detach().zero_()
    assert same_bits(torch.autograd.grad(y, x, y.detach())[0], expected)


def test_only_y_is_saved(device: str) -> None:
    saved: list[torch.Tensor] = []
    x = normal((3, 9), torch.float32, device).requires_grad_()
    mask = random_mask("same", (3, 9), torch.float32, device)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = sms.scaled_mask_softmax(x, mask, 0.5, True)
    assert [tensor.data_ptr() for tensor in saved] == [y.data_ptr()]


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_in_place_gradients(device: str, dtype: torch.dtype) -> None:
    x = normal((2, 5, 33), dtype, device).requires_grad_()
    grad = normal(x.shape, dtype, device, 3)
    mask = random_mask("bool", (33,), dtype, device)
    (expected,) = torch.autograd.grad(sms.scaled_mask_softmax(x * 2, mask, 0.7, True, diagonal=9), x, grad)
    hidden = x * 2
    y = sms.scaled_mask_softmax_(hidden, mask, 0.7, True, diagonal=9)
    assert y is hidden
    assert same_bits(torch.autograd.grad(y, x, grad)[0], expected)


def test_in_place_on_a_view_of_a_graph(device: str) -> None:
    """Gradients of the rest of the base go through, those of the view through the operator."""
    x = normal((4, 6), torch.float64, device).requires_grad_()

    def of(x: torch.Tensor) -> torch.Tensor:
        base = x * 2
        sms.scaled_mask_softmax_(base[1:3, 1:5], None, 0.5)
        return base

    assert torch.autograd.gradcheck(of, x)


def test_in_place_on_a_leaf_that_requires_grad_raises(device: str) -> None:
    x = normal((3, 9), torch.float32, device).requires_grad_()
    before = x.detach().clone()
    with pytest.raises(RuntimeError, match="leaf"):
        sms.scaled_mask_softmax_(x)
    assert torch.equal(x.detach(), before), "x was overwritten before the error"
    with torch.no_grad():
        sms.scaled_mask_softmax_(x)
    assert not torch.equal(x.detach(), before)


def test_gradient_checkpointing(device: str) -> None:
    x = normal((3, 65), torch.float32, device).requires_grad_()
    grad = normal(x.shape, torch.float32, device, 3)
    (expected,) = torch.autograd.grad(sms.scaled_mask_softmax(x, None, 0.5), x, grad)
    y = torch.utils.checkpoint.checkpoint(sms.scaled_mask_softmax, x, None, 0.5, use_reentrant=False)
    assert same_bits(torch.autograd.grad(y, x, grad)[0], expected)


def test_backward_from_other_threads(device: str) -> None:
    """Autograd's own device threads, and several users at once."""
    import threading

    x = normal((64, 300), torch.float32, device)
    expected = run(x)
    results: list[torch.Tensor | None] = [None] * 4

    def work(index: int) -> None:
        for _ in range(20):
            results[index] = run(x)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result is not None and same_bits(result, expected) for result in results)


def run(x: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().requires_grad_()
    y = sms.scaled_mask_softmax(leaf, None, 0.5, True)
    return torch.autograd.grad(y, leaf, y.detach())[0]
