"""Every memory layout of x, mask and gradient gives the bits of the dense one, and no memory beside is touched."""

from __future__ import annotations

import layouts
import pytest
import torch
from checks import DTYPES, mask_kinds, normal, random_mask, same_bits, short, verify

import scaled_mask_softmax as sms

SHAPES = [(2, 3, 5, 33), (3, 1, 7, 64), (1, 2, 4, 257), (4, 9), (70,), (2, 1, 2, 3, 16)]


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("shape", SHAPES, ids=short)
@pytest.mark.parametrize("layout", layouts.ALL)
def test_x(device: str, layout: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = layouts.ALL[layout](normal(shape, dtype, device))
    for kind in mask_kinds(dtype):
        mask = random_mask(kind, shape[-2:], dtype, device)
        y, dx = verify(x, mask, 0.7, is_causal=kind != "bool", diagonal=shape[-1] // 2)
        y_dense, dx_dense = verify(layouts.dense(x), mask, 0.7, is_causal=kind != "bool", diagonal=shape[-1] // 2)
        assert same_bits(y, y_dense)
        assert same_bits(dx, dx_dense)


@pytest.mark.parametrize("shape", SHAPES, ids=short)
@pytest.mark.parametrize("layout", layouts.ALL)
def test_mask(device: str, layout: str, shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        for kind in mask_kinds(dtype)[1:]:
            x = normal(shape, dtype, device)
            mask = layouts.ALL[layout](random_mask(kind, shape, dtype, device))
            y, _ = verify(x, mask, 0.7)
            assert same_bits(y, verify(x, layouts.dense(mask), 0.7)[0])


@pytest.mark.parametrize(
    "mask_shape", [(33,), (5, 33), (2, 1, 1, 33), (2, 1, 5, 1), (2, 5, 33), (1, 3, 1, 33)], ids=short
)
@pytest.mark.parametrize("layout", layouts.ALL)
def test_broadcast_mask(device: str, layout: str, mask_shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        for kind in mask_kinds(dtype)[1:]:
            x = normal((2, 3, 5, 33), dtype, device)
            mask = layouts.ALL[layout](random_mask(kind, mask_shape, dtype, device))
            y, _ = verify(x, mask, 0.7, is_causal=True, diagonal=20)
            assert same_bits(y, verify(x, layouts.dense(mask), 0.7, is_causal=True, diagonal=20)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("shape", SHAPES, ids=short)
@pytest.mark.parametrize("layout", layouts.ALL)
def test_grad(device: str, layout: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = normal(shape, dtype, device)
    grad = layouts.ALL[layout](normal(shape, dtype, device, 8))
    for is_causal in (False, True):
        _, dx = verify(x, None, 0.7, is_causal, diagonal=3, grad=grad)
        _, dx_dense = verify(x, None, 0.7, is_causal, diagonal=3, grad=layouts.dense(grad))
        assert same_bits(dx, dx_dense)


def test_grad_of_sum_is_read_in_place(device: str) -> None:
    """.sum() sends back one element, expanded over all dimensions."""
    for dtype in DTYPES:
        x = normal((2, 3, 5, 33), dtype, device).requires_grad_()
        y = sms.scaled_mask_softmax(x, None, 0.7)
        (dx,) = torch.autograd.grad(y.sum(), x)
        ones = torch.ones_like(y)
        assert same_bits(dx, torch.autograd.grad(sms.scaled_mask_softmax(x, None, 0.7), x, ones)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("shape", SHAPES, ids=short)
@pytest.mark.parametrize("layout", layouts.SEPARATE)
def test_in_place(device: str, layout: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Written where x lies, and nowhere else."""
    for kind in mask_kinds(dtype):
        x = layouts.SEPARATE[layout](normal(shape, dtype, device))
        mask = random_mask(kind, shape, dtype, device)
        expected = sms.scaled_mask_softmax(x, mask, 0.7, True, diagonal=4)
        strides, pointer = x.stride(), x.data_ptr()
        assert sms.scaled_mask_softmax_(x, mask, 0.7, True, diagonal=4) is x
        assert (x.stride(), x.data_ptr()) == (strides, pointer)
        assert same_bits(x, expected)
        assert layouts.poison_intact(x)


def test_negated_views(device: str) -> None:
    """A lazily negated tensor is read, and written, as the numbers that it stands for."""
    x, mask = normal((3, 9), torch.float32, device), normal((3, 9), torch.float32, device, 2)
    expected = sms.scaled_mask_softmax(-x, -mask)
    assert same_bits(sms.scaled_mask_softmax(torch._neg_view(x), torch._neg_view(mask)), expected)
    negated = torch._neg_view(x.clone())
    sms.scaled_mask_softmax_(negated, -mask)
    assert torch.equal(negated, expected)
    imaginary = torch.complex(x, x).conj().imag
    assert same_bits(sms.scaled_mask_softmax(imaginary, -mask), expected)


def test_strides_past_32_bits(device: str) -> None:
    """Elements more than 2^31 apart; the memory between them is reserved, never touched."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GB of CUDA memory")
    step = 2**31 + 7
    shape = (2, 2, 33)
    for dtype, kind in ((torch.float16, "bool"), (torch.float16, "same")):
        apart = torch.empty(2 * step, dtype=dtype, device=device).as_strided(shape, (step, 40, 1))
        apart.copy_(normal(shape, dtype, device))
        mask = random_mask(kind, shape, dtype, device)
        dense = sms.scaled_mask_softmax(apart.contiguous(), mask, 0.7)
        assert same_bits(sms.scaled_mask_softmax(apart, mask, 0.7), dense)
        mask_apart = torch.empty(2 * step, dtype=mask.dtype, device=device).as_strided(shape, (step, 40, 1))
        mask_apart.copy_(mask)
        assert same_bits(sms.scaled_mask_softmax(apart.contiguous(), mask_apart, 0.7), dense)
        leaf = apart.contiguous().requires_grad_()
        grad = torch.autograd.grad(sms.scaled_mask_softmax(leaf), leaf, apart)[0]
        assert same_bits(grad, torch.autograd.grad(sms.scaled_mask_softmax(leaf), leaf, apart.contiguous())[0])
        sms.scaled_mask_softmax_(apart, mask, 0.7)
        assert same_bits(apart, dense)
        del apart, mask_apart
