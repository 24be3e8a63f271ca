"""Sizes at the ends: empty, one, past 65,535, many dimensions, past 2^31 elements."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
from collections.abc import Iterator

import layouts
import oracle
import pytest
import torch
from checks import (
    DTYPES,
    MASK_KINDS,
    assert_is_forward,
    assert_within,
    mask_kinds,
    normal,
    random_mask,
    same_bits,
    short,
    verify,
)
from tolerances import gradient_bound

import scaled_mask_softmax as sms

EMPTY = [
    (0,),
    (0, 0),
    (0, 5),
    (5, 0),
    (0, 3, 5),
    (2, 0, 5),
    (2, 3, 0),
    *((0, 2, 3, 4), (2, 0, 3, 4)),
    (2, 3, 0, 4),
    (2, 3, 4, 0),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("shape", EMPTY, ids=short)
def test_empty_in_empty_out(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for kind in mask_kinds(dtype):
        for mask_shape in {shape, shape[-1:], ()}:
            mask = random_mask(kind, mask_shape, dtype, device)
            verify(torch.empty(shape, dtype=dtype, device=device), mask, 0.5, True)
            x = torch.empty(shape, dtype=dtype, device=device)
            assert sms.scaled_mask_softmax_(x, mask, 0.5, True, diagonal=1) is x


@pytest.mark.parametrize(
    "shape", [(70_001, 3), (66_000, 1, 5), (2, 66_000, 1, 3), (1, 2, 66_000, 3), (70_003, 1, 1, 2)], ids=short
)
@pytest.mark.parametrize("kind", MASK_KINDS)
def test_more_than_65535_in_any_dimension(device: str, shape: tuple[int, ...], kind: str) -> None:
    x = normal(shape, torch.float16, device)
    verify(x, random_mask(kind, shape, torch.float16, device), 0.5, True, diagonal=1)
    verify(layouts.padded_rows(x), None, 0.5)


@pytest.mark.parametrize("columns", [3, 1100])
def test_more_than_65535_rows_that_each_take_a_block(device: str, columns: int) -> None:
    x = normal((66_001, 1, columns), torch.bfloat16, device)
    mask = torch.zeros(66_001, 1, 1, dtype=torch.bool, device=device)
    mask[65_535] = True
    y = sms.scaled_mask_softmax(x, mask, 0.5)
    for rows in (slice(0, 4), slice(65_530, 65_541), slice(65_997, 66_001)):
        assert same_bits(y[rows], verify(x[rows], mask[rows], 0.5)[0])


RANK_7 = (2, 3, 2, 2, 3, 2, 19)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_many_leading_dimensions_that_cannot_be_merged(device: str, dtype: torch.dtype) -> None:
    x = layouts.odd_strides(normal(RANK_7, dtype, device))
    for kind in mask_kinds(dtype):
        mask = random_mask(kind, RANK_7, dtype, device)
        if mask is not None:
            mask = layouts.transposed_leading(mask)
        grad = layouts.transposed_leading(normal(RANK_7, dtype, device, 9))
        y, dx = verify(x, mask, 0.7, True, 11, grad=grad)
        dense_y, dense_dx = verify(
            x.contiguous(), None if mask is None else mask.contiguous(), 0.7, True, 11, grad=grad
        )
        assert same_bits(y, dense_y)
        assert same_bits(dx, dense_dx)
    for mask_shape in [(2, 1, 2, 1, 3, 1, 19), (1, 3, 1, 2, 1, 2, 1), (3, 2, 1, 1, 2, 1), (2, 19)]:
        verify(x, random_mask("bool", mask_shape, dtype, device), 0.7)


def test_rank_twelve(device: str) -> None:
    shape = (2,) * 11 + (5,)
    x = layouts.odd_strides(normal(shape, torch.float32, device))
    mask_shape = (*(2 if dim % 2 else 1 for dim in range(11)), 5)
    y, _ = verify(x, random_mask("same", mask_shape, torch.float32, device), 1.0, True, 2)
    z = x.clone()
    sms.scaled_mask_softmax_(x, random_mask("same", mask_shape, torch.float32, device), 1.0, True, diagonal=2)
    assert same_bits(x, y)
    assert not same_bits(z, y)


def test_sizes_of_one_everywhere(device: str) -> None:
    for rank in range(1, 9):
        y, dx = verify(normal((1,) * rank, torch.float32, device), torch.zeros((), dtype=torch.bool, device=device))
        assert y.item() == 1
        assert dx.item() == 0


@contextlib.contextmanager
def _alone(device: str, gigabytes: int, factory: pytest.TempPathFactory) -> Iterator[None]:
    """One large test at a time, whichever worker has it; skipped where the device is too small."""
    on_cpu = device == "cpu"
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if on_cpu else torch.cuda.mem_get_info()[1]
    if total < (gigabytes + 20) * 2**30:
        pytest.skip(f"needs {gigabytes} GB of {'memory' if on_cpu else 'CUDA memory'}, and 20 for the rest")
    # Workers of one run share the folder above their own.
    folder = factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()
    with open(folder / "large.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if not on_cpu:
                torch.cuda.empty_cache()


@pytest.fixture
def device_memory(cuda: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """50 GB of it."""
    with _alone(cuda, 50, tmp_path_factory):
        yield


@pytest.fixture
def memory(device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """12 GB of the device's."""
    with _alone(device, 12, tmp_path_factory):
        yield


@pytest.mark.large
@pytest.mark.parametrize("columns", [1000, 1024, 40_000])
def test_more_than_two_to_the_31_elements(cuda: str, device_memory: None, columns: int) -> None:
    """The first rows, the last, and those on either side of element 2^31, each as if it were alone."""
    rows = 2**31 // columns + 1500
    x = torch.randn(rows, 1, columns, dtype=torch.bfloat16, device=cuda)
    mask = torch.rand(rows, 1, columns, device=cuda, dtype=torch.bfloat16) < 0.25
    border = 2**31 // columns
    picked = torch.tensor([0, 1, border // 2, border - 1, border, border + 1, rows - 2, rows - 1], device=cuda)
    x.requires_grad_()
    y = sms.scaled_mask_softmax(x, mask, 0.5)
    (dx,) = torch.autograd.grad(y, x, x.detach())
    few = x.detach()[picked].requires_grad_()
    few_y = sms.scaled_mask_softmax(few, mask[picked], 0.5)
    assert_is_forward(few_y, few, mask[picked], 0.5)
    assert same_bits(y[picked], few_y)
    assert same_bits(dx[picked], torch.autograd.grad(few_y, few, few.detach())[0])
    sums = y.detach().sum(-1, dtype=torch.float32)
    assert (sums - 1).abs().max() < 8e-3
    z = x.detach()
    sms.scaled_mask_softmax_(z, mask, 0.5)
    assert torch.equal(z, y)


@pytest.mark.large
@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 3, 1), (1, 1, 1)], ids=short)
@pytest.mark.parametrize("columns", [1000, 40_000])
def test_mask_gradient_of_more_than_two_to_the_31_elements(
    device: str, memory: None, columns: int, shape: tuple[int, ...]
) -> None:
    """All weight of a row is in one cell, so that none has a gradient, but in a few rows about 0, 2^31 and the end."""
    leading = (2, 3, 2**31 // columns // 6 + 300)
    rows, border = math.prod(leading), 2**31 // columns
    picked = torch.tensor([0, 1, border // 2, border - 1, border, border + 1, rows - 2, rows - 1], device=device)
    few = normal((len(picked), columns), torch.float16, device)
    x = torch.zeros(*leading, columns, dtype=torch.float16, device=device)
    x[..., columns // 3] = 60_000.0
    x.view(rows, columns)[picked] = few
    mask = normal((*shape, columns), torch.float32, device, 1).requires_grad_()
    grad = normal((columns,), torch.float16, device, 2)
    # In place, so that scores and probabilities need memory once.
    nothing = torch.zeros((), dtype=torch.float16, device=device, requires_grad=True)
    x += nothing
    dx: list[torch.Tensor] = []
    x.register_hook(dx.append)
    sms.scaled_mask_softmax_(x, mask, 0.5)
    (dmask,) = torch.autograd.grad(x, mask, grad.expand_as(x), retain_graph=True)
    assert not dx
    (again, _) = torch.autograd.grad(x, (mask, nothing), grad.expand_as(x))
    assert same_bits(again, dmask)

    places = torch.unravel_index(picked, leading)
    masks = mask.detach().expand(*leading, columns)[places]
    y = oracle.forward(few, masks, 0.5)
    bound = gradient_bound(torch.float16, 0.5, grad.expand_as(y), oracle.scores(few, masks, 0.5)[0])
    assert_within(dx[0].view(rows, columns)[picked], oracle.backward(grad, y, 0.5), bound, "gradient")
    assert dx[0].count_nonzero() == dx[0].view(rows, columns)[picked].count_nonzero() > 0
    expected = torch.zeros_like(mask, dtype=torch.float64)
    for change, *place in zip(oracle.backward(grad, y, 1.0), *places, strict=True):
        expected[tuple(index if size > 1 else 0 for index, size in zip(place, shape, strict=True))] += change
    assert_within(dmask, expected, 2 * bound.sum(dim=0), "the mask's gradient")


@pytest.mark.large
@pytest.mark.parametrize("is_causal", [False, True])
def test_one_row_of_more_than_two_to_the_31_columns(cuda: str, device_memory: None, is_causal: bool) -> None:
    """Two cells share the weight, one of them past 2^31; under causality only the first is there."""
    columns = 2**31 + 1003
    x = torch.full((columns,), -math.inf, dtype=torch.bfloat16, device=cuda)
    x[5], x[2**31 + 900] = 0.0, 1.0
    y = sms.scaled_mask_softmax(x.requires_grad_(), None, 1.0, is_causal, diagonal=2**31)
    expected = torch.tensor([1.0, 0.0] if is_causal else [1 / (1 + math.e), math.e / (1 + math.e)], dtype=torch.float64)
    got = torch.stack([y[5], y[2**31 + 900]]).double().cpu()
    torch.testing.assert_close(got, expected, rtol=0, atol=8e-3)
    assert y.count_nonzero() == (1 if is_causal else 2)
    grad = torch.zeros_like(x)
    grad[5] = 1.0
    (dx,) = torch.autograd.grad(y, x, grad)
    slope = 0.0 if is_causal else (got[0] * got[1]).item()
    assert dx[5].item() == pytest.approx(slope, abs=8e-3)
    assert dx[2**31 + 900].item() == pytest.approx(-slope, abs=8e-3)
    assert dx.count_nonzero() == (0 if is_causal else 2)
