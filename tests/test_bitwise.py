"""A row's bits follow from its own values alone, and are the same in every run."""

from __future__ import annotations

from typing import Any

import layouts
import pytest
import torch
from checks import DTYPES, mask_kinds, normal, random_mask, same_bits, short

import scaled_mask_softmax as sms

# Short, odd, a warp's, a block's, streamed; the last two are long enough for a CPU to share one row among threads.
COLUMNS = [1, 3, 31, 64, 65, 127, 500, 1000, 1025, 2049, 4097, 8191, 16_385, 33_000, 140_001]


def run(x: torch.Tensor, mask: torch.Tensor | None, grad: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    leaf = x.detach().requires_grad_()
    y = sms.scaled_mask_softmax(leaf, mask, 0.7, **options)
    (dx,) = torch.autograd.grad(y, leaf, grad)
    return y.detach(), dx


def assert_same(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], what: str) -> None:
    assert same_bits(got[0], expected[0]), f"y depends on {what}"
    assert same_bits(got[1], expected[1]), f"dx depends on {what}"


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("columns", COLUMNS)
def test_address(device: str, columns: int, dtype: torch.dtype) -> None:
    """Every alignment of x, mask and gradient within 16 bytes (32 elements for bytes), alone and together."""
    shape = (2, columns)
    x, grad = normal(shape, dtype, device), normal(shape, dtype, device, 2)
    for kind in mask_kinds(dtype):
        mask = random_mask(kind, shape, dtype, device)
        expected = run(x, mask, grad)
        for step in range(1, 17):
            moved_mask = None if mask is None else layouts.offset(mask, step)
            assert_same(run(x, moved_mask, grad), expected, f"the mask's address ({kind}, {step})")
            if step <= 16 // x.element_size():
                moved = layouts.offset(x, step), moved_mask, layouts.offset(grad, 2 * step + 1)
                assert_same(run(*moved), expected, f"addresses ({kind}, {step})")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("columns", COLUMNS)
def test_place_among_other_rows(device: str, columns: int, dtype: torch.dtype) -> None:
    """Each row of a batch alone, as one vector, with its part of the mask and its place on the diagonal."""
    shape = (2, 3, 5, columns) if columns < 5000 else (1, 1, 3, columns)
    x, grad = normal(shape, dtype, device), normal(shape, dtype, device, 2)
    middle = columns // 2
    for kind in mask_kinds(dtype):
        mask = random_mask(kind, shape[-2:], dtype, device)
        for options in ({}, {"is_causal": True, "diagonal": middle}):
            y, dx = run(x, mask, grad, **options)
            for b, h, i in torch.cartesian_prod(*(torch.tensor([0, size - 1]).unique() for size in shape[:3])).tolist():
                alone = {"is_causal": True, "diagonal": middle + i} if options else {}
                got = run(x[b, h, i].clone(), None if mask is None else mask[i].clone(), grad[b, h, i].clone(), **alone)
                assert_same(got, (y[b, h, i], dx[b, h, i]), f"the rows beside ({kind}, {[b, h, i]})")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("columns", [3, 65, 1000, 5000])
def test_number_of_rows(device: str, columns: int, dtype: torch.dtype) -> None:
    x, grad = normal((700, columns), dtype, device), normal((700, columns), dtype, device, 2)
    mask = random_mask("bool", (columns,), dtype, device)
    y, dx = run(x, mask, grad)
    for rows in (1, 2, 3, 4, 5, 7, 8, 31, 33, 130):
        assert_same(run(x[:rows], mask, grad[:rows]), (y[:rows], dx[:rows]), f"the number of rows ({rows})")
        assert_same(run(x[-rows:], mask, grad[-rows:]), (y[-rows:], dx[-rows:]), f"the first row ({rows})")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("columns", [1536, 2049, 4096, 7001, 16_384, 33_000])
def test_many_long_rows(device: str, columns: int, dtype: torch.dtype) -> None:
    """So many that CUDA kernels may hold two of them in one block, whose own bits are those of few rows."""
    batch, queries = 2, 300
    x = normal((batch, queries, columns), dtype, device)
    grad = normal((1, 1, 1), dtype, device, 2).expand_as(x)
    x[0, 3, columns // 3] = torch.nan
    x[1, 150, 0] = torch.inf
    x[1, 299] = -torch.inf
    middle = (columns - queries) // 2
    lengths = torch.tensor([columns, columns // 4], device=device)
    for kind in ("same", "float32") if dtype in (torch.float16, torch.bfloat16) else ("same",):
        mask = random_mask(kind, (queries, columns), dtype, device)
        for options in (
            {"is_causal": True, "diagonal": middle},
            {"is_causal": True, "diagonal": -150},
            {"window": 700, "is_causal": True, "diagonal": middle},
            {"is_causal": True, "diagonal": middle, "key_lengths": lengths},
        ):
            y, dx = run(x, mask, grad, **options)
            for b, first in ((0, 0), (0, 297), (1, 149), (1, 298)):
                rows = slice(first, first + 3)
                few = {**options, "diagonal": options["diagonal"] + first}
                if "key_lengths" in few:
                    few["key_lengths"] = lengths[b : b + 1]
                got = run(x[b : b + 1, rows], mask[rows], grad[b : b + 1, rows], **few)
                assert_same(got, (y[b : b + 1, rows], dx[b : b + 1, rows]), f"the number of rows ({kind}, {options})")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("columns", [5, 64, 1001, 6000])
def test_values_of_other_rows(device: str, columns: int, dtype: torch.dtype) -> None:
    """Rows of NaN, of infinities, and dead ones, above and below."""
    x, grad = normal((9, columns), dtype, device), normal((9, columns), dtype, device, 2)
    y, dx = run(x, None, grad)
    others = torch.arange(9, device=device) % 2 == 1
    for value in (torch.nan, torch.inf, -torch.inf, 60_000.0):
        got_y, got_dx = run(x.masked_fill(others[:, None], value), None, grad.masked_fill(others[:, None], torch.nan))
        assert_same((got_y[~others], got_dx[~others]), (y[~others], dx[~others]), f"rows of {value} beside it")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_number_of_threads(dtype: torch.dtype) -> None:
    """Long single rows are shared among threads; many short ones are dealt out."""
    before = torch.get_num_threads()
    try:
        for shape in ((1, 300_007), (3, 70_000), (40, 9000), (3000, 33), (5, 7, 1024)):
            x, grad = normal(shape, dtype, "cpu"), normal(shape, dtype, "cpu", 2)
            for kind in mask_kinds(dtype):
                mask = random_mask(kind, shape[-1:], dtype, "cpu")
                torch.set_num_threads(1)
                expected = run(x, mask, grad, is_causal=True, diagonal=shape[-1] // 2)
                for threads in (2, 3, 7):
                    torch.set_num_threads(threads)
                    got = run(x, mask, grad, is_causal=True, diagonal=shape[-1] // 2)
                    assert_same(got, expected, f"the number of threads ({threads})")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("columns", COLUMNS)
def test_in_place_gives_the_same_bits(device: str, columns: int, dtype: torch.dtype) -> None:
    x = normal((3, columns), dtype, device)
    for kind in mask_kinds(dtype):
        mask = random_mask(kind, x.shape, dtype, device)
        y = sms.scaled_mask_softmax(x, mask, 0.7)
        for step in (0, 1, 3):
            z = layouts.offset(x, step)
            sms.scaled_mask_softmax_(z, mask, 0.7)
            assert same_bits(z, y)
            assert layouts.poison_intact(z)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("shape", [(3000, 65), (64, 1000), (9, 5000), (2, 140_001)], ids=short)
def test_run_to_run(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, grad = normal(shape, dtype, device), normal(shape, dtype, device, 2)
    mask = random_mask("bool", shape, dtype, device)
    expected = run(x, mask, grad)
    for _ in range(10):
        assert_same(run(x, mask, grad), expected, "the run")
