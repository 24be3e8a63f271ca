"""Exclusions by position beside causality: window and key_lengths, alone and with everything else."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from typing import Any

import layouts
import oracle
import pytest
import torch
from checks import DTYPES, DTYPES_AND_KINDS, normal, random_mask, same_bits, short, verify

import scaled_mask_softmax as sms
from scaled_mask_softmax import _composite

# Rows of part of a warp, a warp, a block, and streamed; odd, so that alignment varies.
COLUMNS = [7, 67, 300, 1029, 4099, 17_001, 70_003]


def lengths(values: list[int], device: str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def test_which_cells_a_window_leaves(device: str) -> None:
    """Row i sees columns i + diagonal - window + 1 on, and up to i + diagonal if causal."""
    x = torch.zeros(4, 6, device=device)

    def seen(**options: Any) -> list[list[int]]:
        y, _ = verify(x, **options)
        return [row.nonzero().flatten().tolist() for row in y]

    assert seen(is_causal=True, window=2) == [[0], [0, 1], [1, 2], [2, 3]]
    assert seen(is_causal=True, window=1) == [[0], [1], [2], [3]]
    assert seen(is_causal=True, window=2, diagonal=2) == [[1, 2], [2, 3], [3, 4], [4, 5]]
    assert seen(window=2) == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [2, 3, 4, 5]]
    assert seen(window=1, diagonal=4) == [[4, 5], [5], [], []]
    assert seen(is_causal=True, window=1, diagonal=-1) == [[], [0], [1], [2]]


def test_which_cells_key_lengths_leave(device: str) -> None:
    x = torch.zeros(5, 2, 3, 4, device=device)
    for dtype in (torch.int32, torch.int64):
        y, _ = verify(x, key_lengths=lengths([3, 0, 9, -2, 4], device, dtype))
        assert [sample[1, 2].count_nonzero().item() for sample in y] == [3, 0, 4, 0, 4]
    extreme = lengths([2**63 - 1, -(2**63), 2**32, -(2**32) + 1, 1], device)
    y, _ = verify(x, key_lengths=extreme)
    assert [sample[0, 0].count_nonzero().item() for sample in y] == [4, 0, 4, 0, 1]


@pytest.mark.sanitizer
@pytest.mark.parametrize(("dtype", "kind"), DTYPES_AND_KINDS, ids=short)
@pytest.mark.parametrize("columns", COLUMNS)
def test_with_masks_and_each_other(device: str, columns: int, dtype: torch.dtype, kind: str) -> None:
    x = normal((3, 1, 2, columns), dtype, device)
    mask = random_mask(kind, (3, 1, 1, columns), dtype, device)
    given = lengths([columns // 2, 1, columns - 1], device, torch.int32)
    for is_causal, window, key_lengths in [
        (False, columns // 3 + 1, None),
        (True, columns // 3 + 1, None),
        (True, 1, given),
        (False, None, given),
        (False, columns // 3 + 1, given),
    ]:
        verify(x, mask, 0.7, is_causal, diagonal=columns // 2, window=window, key_lengths=key_lengths)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("columns", COLUMNS)
def test_what_lies_outside_is_ignored(device: str, columns: int, dtype: torch.dtype) -> None:
    """In x, in the mask and in the gradient, and gets a gradient of exactly zero even in a row of NaN."""
    shape = (2, 1, 3, columns)
    options: dict[str, Any] = {
        "is_causal": False,
        "window": 2,
        "diagonal": columns // 3,
        "key_lengths": lengths([columns - columns // 4, columns // 2], device),
    }
    x, grad = normal(shape, dtype, device), normal(shape, dtype, device, 3)
    mask = normal(shape, dtype, device, 4)
    excluded = oracle.excluded_by_position(x, **options)
    y, dx = verify(x, mask, 0.5, grad=grad, **options)
    for value in (math.nan, math.inf, -math.inf):
        x_bad, mask_bad, grad_bad = (tensor.masked_fill(excluded, value) for tensor in (x, mask, grad))
        got_y, got_dx = verify(x_bad, mask_bad, 0.5, grad=grad_bad, from_x=False, **options)
        assert same_bits(got_y, y)
        assert same_bits(got_dx, dx)
    first_live = (~excluded).int().argmax(-1, keepdim=True)
    y, dx = verify(x.scatter(-1, first_live, math.nan), mask, 0.5, grad=grad, from_x=False, **options)
    alive = ~excluded.all(-1)
    assert y[alive].isnan().all()
    assert dx[alive].masked_select(~excluded[alive]).isnan().all()
    assert not dx.masked_select(excluded).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("columns", COLUMNS)
def test_an_option_that_excludes_nothing_changes_no_bit(device: str, columns: int, dtype: torch.dtype) -> None:
    x, grad = normal((2, 1, 3, columns), dtype, device), normal((2, 1, 3, columns), dtype, device, 3)
    for is_causal in (False, True):
        y, dx = verify(x, None, 0.7, is_causal, columns // 2, grad=grad)
        for options in (
            {"window": columns + 5},
            {"window": 2**63 - 1},
            {"key_lengths": lengths([columns, columns + 7], device)},
        ):
            got_y, got_dx = verify(x, None, 0.7, is_causal, columns // 2, grad=grad, **options)
            assert same_bits(got_y, y)
            assert same_bits(got_dx, dx)


@pytest.mark.parametrize("layout", layouts.ALL)
def test_layouts(device: str, layout: str) -> None:
    """Of x, the mask, the gradient; of key_lengths any stride."""
    every_other = lengths([5, 99, 20, 99, 33, 99], device)[::2]
    one = lengths([17], device).expand(3)
    for dtype, key_lengths in itertools.product(DTYPES, (every_other, one)):
        x, grad = (layouts.ALL[layout](normal((3, 2, 5, 33), dtype, device, seed)) for seed in (0, 1))
        mask = layouts.ALL[layout](random_mask("bool", (3, 1, 5, 33), dtype, device))
        options: dict[str, Any] = {"is_causal": True, "diagonal": 20, "window": 19}
        y, dx = verify(x, mask, 0.7, grad=grad, key_lengths=key_lengths, **options)
        dense = [layouts.dense(tensor) for tensor in (x, mask)]
        dense_y, dense_dx = verify(
            *dense, 0.7, grad=layouts.dense(grad), key_lengths=layouts.dense(key_lengths), **options
        )
        assert same_bits(y, dense_y)
        assert same_bits(dx, dense_dx)


@pytest.mark.parametrize(
    "shape", [(3, 5, 9), (3, 1, 9), (3, 2, 2, 5, 9), (1, 4, 9), (2, 1, 1, 1), (0, 2, 3), (2, 3, 0)]
)
def test_ranks_and_sizes(device: str, shape: tuple[int, ...]) -> None:
    x = normal(shape, torch.float32, device)
    given = lengths([4, 7, 1][: shape[0]], device)
    verify(x, key_lengths=given)
    verify(x, None, 0.5, True, 2, window=3, key_lengths=given)


def test_window_of_few_dimensions(device: str) -> None:
    for shape in ((9,), (4, 9), (0,), (0, 4), (3, 0)):
        x = normal(shape, torch.float32, device)
        for diagonal in (-3, 0, 2**63 - 1, -(2**63)):
            for window in (1, 3, 2**63 - 1):
                for is_causal in (False, True):
                    verify(x, None, 0.5, is_causal, diagonal, window=window)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_in_place(device: str, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"is_causal": True, "diagonal": 9, "window": 12, "key_lengths": lengths([33, 7], device)}
    x = normal((2, 5, 33), dtype, device).requires_grad_()
    grad = normal(x.shape, dtype, device, 3)
    expected = sms.scaled_mask_softmax(x * 2, None, 0.7, **options)
    hidden = x * 2
    y = sms.scaled_mask_softmax_(hidden, None, 0.7, **options)
    assert same_bits(y, expected)
    assert same_bits(*(torch.autograd.grad(result, x, grad)[0] for result in (y, expected)))


def test_gradcheck(device: str) -> None:
    x = normal((2, 2, 4, 6), torch.float64, device, spread=1.0).requires_grad_()
    mask = random_mask("bool", (2, 4, 6), torch.float64, device)
    for is_causal, key_lengths in itertools.product((False, True), (None, lengths([3, 5], device))):
        options = {"is_causal": is_causal, "diagonal": 1, "window": 3, "key_lengths": key_lengths}
        for function in (sms.scaled_mask_softmax, _composite.forward):
            assert torch.autograd.gradcheck(functools.partial(function, mask=mask, scale=-0.6, **options), x)


def test_saved_for_backward(device: str) -> None:
    """y and the lengths; lengths changed before backward are noticed."""
    given = lengths([3, 5], device)
    saved: list[torch.Tensor] = []
    x = normal((2, 3, 9), torch.float32, device).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = sms.scaled_mask_softmax(x, key_lengths=given)
    assert [tensor.data_ptr() for tensor in saved] == [y.data_ptr(), given.data_ptr()]
    y = sms.scaled_mask_softmax(x, key_lengths=given)
    given.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_the_composite_agrees(device: str, dtype: torch.dtype) -> None:
    x = normal((2, 3, 5, 17), dtype, device)
    grad = normal(x.shape, dtype, device, 2)
    for is_causal, window, key_lengths in itertools.product(
        (False, True), (None, 1, 4), (None, lengths([0, 12], device, torch.int32))
    ):
        options: dict[str, Any] = {"diagonal": 3, "window": window, "key_lengths": key_lengths}
        y, dx = verify(x, None, 0.7, is_causal, grad=grad, **options)
        got = _composite.forward(x, None, 0.7, is_causal, **options)
        got_dx = _composite.backward(grad, y.detach(), 0.7, is_causal, **options)
        torch.testing.assert_close(got, y.detach())
        torch.testing.assert_close(got_dx, dx)


def test_number_of_threads() -> None:
    before = torch.get_num_threads()
    options: dict[str, Any] = {"window": 900, "diagonal": 40_000, "key_lengths": lengths([60_000, 70_001, 7], "cpu")}
    try:
        for shape in ((3, 1, 70_001), (3, 40, 333)):
            x, grad = normal(shape, torch.float32, "cpu"), normal(shape, torch.float32, "cpu", 2)
            torch.set_num_threads(1)
            y, dx = verify(x, grad=grad, **options)
            for threads in (2, 3, 7):
                torch.set_num_threads(threads)
                got_y, got_dx = verify(x, grad=grad, **options)
                assert same_bits(got_y, y)
                assert same_bits(got_dx, dx)
    finally:
        torch.set_num_threads(before)


def attend(x: torch.Tensor, key_lengths: torch.Tensor, window: int, diagonal: int) -> torch.Tensor:
    return (
        sms.scaled_mask_softmax(x * 2, None, 0.5, True, diagonal=diagonal, window=window, key_lengths=key_lengths) * -4
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device: str, dynamic: bool) -> None:
    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic)
    for batch, columns in ((2, 9), (3, 33), (5, 65)):
        x = normal((batch, 2, 7, columns), torch.float32, device).requires_grad_()
        given = torch.arange(batch, device=device) * 3
        grad = normal(x.shape, torch.float32, device, 4)
        expected = attend(x, given, columns // 2, columns - 7)
        got = compiled(x, given, columns // 2, columns - 7)
        assert same_bits(got, expected)
        assert same_bits(*(torch.autograd.grad(y, x, grad)[0] for y in (got, expected)))


def test_graph_replays_with_new_lengths(cuda: str) -> None:
    x = normal((3, 4, 5, 300), torch.float16, cuda)
    given = lengths([1, 2, 3], cuda)
    sms.scaled_mask_softmax(x, key_lengths=given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sms.scaled_mask_softmax(x, key_lengths=given)
    given.copy_(lengths([300, 17, 0], cuda))
    graph.replay()
    assert same_bits(y, sms.scaled_mask_softmax(x, key_lengths=given))


def test_does_not_wait_for_the_device(cuda: str) -> None:
    x = normal((3, 4, 5, 300), torch.float16, cuda)
    given = lengths([1, 2, 3], cuda)
    sms.scaled_mask_softmax(x, key_lengths=given)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype feature")
        torch.cuda.set_sync_debug_mode("error")
    try:
        sms.scaled_mask_softmax(x, None, 0.5, True, window=100, key_lengths=given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("columns", [100, 1024, 5000, 70000])
def test_rows_whose_window_begins_past_their_keys(device: str, columns: int, dtype: torch.dtype) -> None:
    x = normal((2, 1, 2, columns), dtype, device)
    for begin in (columns // 2, columns // 2 + 30):
        lengths = torch.tensor([begin - 40, begin - 1], device=device)
        for dropout_p in (0.0, 0.5):
            y = sms.scaled_mask_softmax(x, diagonal=begin, window=1, key_lengths=lengths, dropout_p=dropout_p)
            assert (y == 0).all()
