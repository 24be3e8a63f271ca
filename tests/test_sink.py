"""The sink: a logit of each head that takes probability and has no column."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import layouts
import oracle
import pytest
import torch
from checks import DTYPES, DTYPES_AND_KINDS, SIXTEEN_BIT, assert_within, normal, random_mask, same_bits, short, verify
from torch.autograd import gradcheck, gradgradcheck

import scaled_mask_softmax as sms
from scaled_mask_softmax import _composite

OPS = torch.ops.scaled_mask_softmax

# Rows of part of a warp, a warp, a block, and streamed; odd, so that alignment varies.
COLUMNS = [1, 7, 67, 300, 1029, 4099, 17_001, 70_003]

# torch compiles its own formulas with torch.jit the first time that it differentiates forward.
forward_mode = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")


def sinks(dtype: torch.dtype, device: str, heads: int = 3) -> list[torch.Tensor]:
    dtypes = [dtype, torch.float32] if dtype in SIXTEEN_BIT else [dtype]
    return [normal((heads,), sink_dtype, device, 11) for sink_dtype in dtypes]


@pytest.mark.sanitizer
@pytest.mark.parametrize(("dtype", "kind"), DTYPES_AND_KINDS, ids=short)
@pytest.mark.parametrize("columns", COLUMNS)
def test_with_everything_else(device: str, columns: int, dtype: torch.dtype, kind: str) -> None:
    x = normal((2, 3, 2, columns), dtype, device)
    mask = random_mask(kind, (2, 1, 1, columns), dtype, device)
    lengths = torch.tensor([columns // 2, columns - 1], device=device)
    for sink, (is_causal, window, key_lengths) in itertools.product(
        sinks(dtype, device), [(False, None, None), (True, columns // 3 + 1, lengths)]
    ):
        verify(x, mask, 0.7, is_causal, diagonal=columns // 2, window=window, key_lengths=key_lengths, sink=sink + 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_is_one_column_more(device: str, dtype: torch.dtype) -> None:
    """That column of the softmax is what the sink takes."""
    x = normal((2, 3, 5, 33), dtype, device)
    (sink, *_) = sinks(dtype, device)
    columns = torch.cat([x * 0.5, sink[:, None, None].expand(2, 3, 5, 1)], -1)
    full = torch.softmax(columns.double(), -1)
    options: dict[str, Any] = {"diagonal": 0, "window": None, "key_lengths": None, "sink": sink}
    y, probability = OPS.scaled_mask_softmax.with_sink_probability(x, None, 0.5, False, **options)
    rounding = torch.full_like(full[..., :1], 2 * torch.finfo(dtype).eps)
    assert_within(y, full[..., :-1], rounding, "probabilities")
    assert probability.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # The score x * 0.5 is exact, so this is too, but for the arithmetic.
    exact = torch.full_like(full[..., 0], 1e-12 if dtype == torch.float64 else 2e-6)
    assert_within(probability, full[..., -1], exact, "the sink's probability")
    assert same_bits(y, sms.scaled_mask_softmax(x, None, 0.5, sink=sink))
    z = x.clone()
    assert same_bits(OPS.scaled_mask_softmax_.with_sink_probability(z, None, 0.5, False, **options), probability)
    assert same_bits(z, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("columns", COLUMNS)
def test_values_at_the_ends(device: str, columns: int, dtype: torch.dtype) -> None:
    """-inf takes nothing, a large one everything, +inf and NaN make the head's rows NaN; others keep to themselves."""
    x = normal((2, 5, 2, columns), dtype, device)
    plain = sms.scaled_mask_softmax(x)
    sink = torch.tensor([-math.inf, 60_000.0, math.inf, math.nan, -60_000.0], dtype=dtype, device=device)
    y, dx = verify(x, sink=sink, from_x=False)
    assert same_bits(y[:, 0], plain[:, 0])
    assert not y[:, 1].any()
    assert not dx[:, 1].any()
    assert y[:, 2:4].isnan().all()
    assert dx[:, 2:4].isnan().all()
    assert same_bits(y[:, 4], plain[:, 4])


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_dead_rows(device: str, dtype: torch.dtype) -> None:
    """Zeros and zero gradients whatever the sink is, unless that is NaN or +inf; the sink takes all that there is."""
    for columns in (5, 300, 5000):
        x = normal((2, 3, 4, columns), dtype, device)
        dead = torch.tensor([True, False, True, False], device=device)[:, None]
        grad = normal(x.shape, dtype, device, 3)
        for value in (0.0, -math.inf, 50.0):
            sink = torch.full((3,), value, dtype=dtype, device=device).requires_grad_()
            options: dict[str, Any] = {"diagonal": 0, "window": None, "key_lengths": None, "sink": sink.detach()}
            verify(x, dead, grad=grad.masked_fill(dead, math.nan), sink=sink.detach(), from_x=False)
            y, probability = OPS.scaled_mask_softmax.with_sink_probability(x, dead, 1.0, False, **options)
            assert not y[:, :, ::2].any()
            assert (probability[:, :, ::2] == (0 if value == -math.inf else 1)).all()
            result = sms.scaled_mask_softmax(x, dead, sink=sink)
            (dsink,) = torch.autograd.grad(result, sink, grad.masked_fill(dead, math.nan))
            assert dsink.isfinite().all()
        nan_sink = torch.full((3,), math.nan, dtype=dtype, device=device)
        assert sms.scaled_mask_softmax(x, dead, sink=nan_sink).isnan().all()


@pytest.mark.parametrize("layout", layouts.ALL)
def test_layouts(device: str, layout: str) -> None:
    """Of x and the gradient; of the sink any stride."""
    for dtype in DTYPES:
        x, grad = (layouts.ALL[layout](normal((2, 3, 5, 33), dtype, device, seed)) for seed in (0, 1))
        spaced = normal((6,), dtype, device, 5)[::2]
        one = normal((1,), dtype, device, 6).expand(3)
        for sink in (spaced, one):
            y, dx = verify(x, None, 0.7, True, 20, sink=sink, grad=grad)
            dense = [layouts.dense(tensor) for tensor in (x, sink, grad)]
            dense_y, dense_dx = verify(dense[0], None, 0.7, True, 20, sink=dense[1], grad=dense[2])
            assert same_bits(y, dense_y)
            assert same_bits(dx, dense_dx)


@pytest.mark.parametrize(
    "shape", [(3, 5, 9), (1, 5, 9), (2, 2, 3, 5, 9), (1, 3, 1, 9), (0, 3, 2, 4), (2, 3, 0, 4), (2, 3, 4, 0)], ids=short
)
def test_ranks_and_sizes(device: str, shape: tuple[int, ...]) -> None:
    x = normal(shape, torch.float32, device)
    verify(x, sink=normal((shape[-3],), torch.float32, device, 4))


def test_derivatives(device: str) -> None:
    x = normal((2, 3, 4, 5), torch.float64, device, spread=1.0).requires_grad_()
    sink = normal((3,), torch.float64, device, 4, 1.0).requires_grad_()
    mask = random_mask("bool", (2, 1, 4, 5), torch.float64, device)
    assert mask is not None
    mask[0, 0, 1] = True  # a row without a live cell
    options: dict[str, Any] = {"diagonal": 2, "window": 4, "key_lengths": torch.tensor([4, 5], device=device)}
    for function in (sms.scaled_mask_softmax, _composite.forward):

        def of(x: torch.Tensor, sink: torch.Tensor, function: Any = function) -> torch.Tensor:
            return function(x, mask, -0.7, True, sink=sink, **options)

        assert gradcheck(of, (x, sink), check_batched_grad=True)
        assert gradgradcheck(of, (x, sink), check_batched_grad=True)
        assert gradcheck(functools.partial(of, x.detach()), sink)
        assert gradcheck(lambda x, of=of: of(x, sink.detach()), x)


@forward_mode
def test_derivatives_in_forward_mode(device: str) -> None:
    x = normal((2, 3, 4), torch.float64, device, spread=1.0).requires_grad_()
    sink = normal((2,), torch.float64, device, 4, 1.0).requires_grad_()
    for function in (sms.scaled_mask_softmax, _composite.forward):

        def of(x: torch.Tensor, sink: torch.Tensor, function: Any = function) -> torch.Tensor:
            return function(x, None, 0.7, True, diagonal=1, sink=sink)

        assert gradcheck(of, (x, sink), check_forward_ad=True)
        assert gradgradcheck(of, (x, sink), check_fwd_over_rev=True)


def test_vmap(device: str) -> None:
    x = normal((4, 2, 3, 5, 9), torch.float32, device)
    sink = normal((4, 3), torch.float32, device, 4)
    lengths = torch.tensor([[3, 9], [1, 0], [5, 6], [9, 9]], device=device)

    def of(x: torch.Tensor, sink: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return sms.scaled_mask_softmax(x, None, 0.5, True, diagonal=4, key_lengths=lengths, sink=sink)

    def loss(x: torch.Tensor, sink: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return of(x, sink, lengths).square().sum()

    for dims in itertools.product((0, None), repeat=3):
        if dims == (None, None, None):
            continue
        given = [tensor if dim == 0 else tensor[0] for tensor, dim in zip((x, sink, lengths), dims)]
        samples = [[tensor[index] if dim == 0 else tensor for tensor, dim in zip(given, dims)] for index in range(4)]
        torch.testing.assert_close(torch.vmap(of, in_dims=dims)(*given), torch.stack([of(*one) for one in samples]))
        gradient = torch.func.grad(loss, argnums=(0, 1))
        got = torch.vmap(gradient, in_dims=dims)(*given)
        expected = [torch.stack(parts) for parts in zip(*(gradient(*one) for one in samples))]
        torch.testing.assert_close(list(got), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_in_place(device: str, dtype: torch.dtype) -> None:
    x = normal((2, 3, 5, 33), dtype, device).requires_grad_()
    grad = normal(x.shape, dtype, device, 3)
    for sink in sinks(dtype, device):
        sink.requires_grad_()
        expected = sms.scaled_mask_softmax(x * 2, None, 0.7, True, diagonal=20, sink=sink)
        hidden = x * 2
        y = sms.scaled_mask_softmax_(hidden, None, 0.7, True, diagonal=20, sink=sink)
        assert y is hidden
        assert same_bits(y, expected)
        for a, b in zip(*(torch.autograd.grad(result, (x, sink), grad) for result in (y, expected))):
            assert same_bits(a, b)


def test_saved_for_backward(device: str) -> None:
    """A number a row more than without the sink, and only if the sink has a gradient."""
    x = normal((2, 3, 5, 9), torch.float16, device).requires_grad_()
    sink = normal((3,), torch.float16, device)
    for needs in (False, True):
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, saved=saved: saved.append(tensor) or tensor, lambda tensor: tensor
        ):
            y = sms.scaled_mask_softmax(x, sink=sink.detach().requires_grad_(needs))
        assert [(tensor.dtype, tensor.shape) for tensor in saved] == [
            (torch.float16, y.shape),
            *([(torch.float32, y.shape[:-1])] if needs else []),
        ]


def test_overloads_refuse_gradients(device: str) -> None:
    x = normal((3, 5, 9), torch.float32, device).requires_grad_()
    with pytest.raises(NotImplementedError, match=r"with_sink_probability has no derivative.*create_graph=True"):
        OPS.scaled_mask_softmax.with_sink_probability(
            x, None, 1.0, False, diagonal=0, window=None, key_lengths=None, sink=torch.zeros(3, device=device)
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_the_composite_agrees(device: str, dtype: torch.dtype) -> None:
    x = normal((2, 3, 5, 17), dtype, device).requires_grad_()
    grad = normal(x.shape, dtype, device, 2)
    for sink in sinks(dtype, device):
        sink.requires_grad_()
        results = [
            function(x, None, 0.7, True, diagonal=3, sink=sink)
            for function in (sms.scaled_mask_softmax, _composite.forward)
        ]
        torch.testing.assert_close(*results)
        gradients = [torch.autograd.grad(y, (x, sink), grad) for y in results]
        for a, b in zip(*gradients):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("kind", ["none", "bool", "same"])
@pytest.mark.parametrize("columns", [0, 1, 67, 5000])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_the_composite_agrees_at_the_ends(device: str, dtype: torch.dtype, columns: int, kind: str) -> None:
    """Sinks that are infinite, NaN or the largest numbers, over dead rows, rows of NaN and rows without a column: what
    the operators return, what sinks take and every gradient."""
    for sink_dtype in [dtype, torch.float32] if dtype in SIXTEEN_BIT else [dtype]:
        largest = torch.finfo(sink_dtype).max
        values = torch.tensor([0.0, -math.inf, math.inf, math.nan, largest, -largest, 100.0], dtype=sink_dtype)
        x = normal((2, len(values), 6, columns), dtype, device)
        x[:, :, 1] = -math.inf
        x[:, :, 2, :1] = math.nan
        x[:, :, 3, :1] = math.inf
        x[:, :, 4, -1:] = -math.inf
        x[:, :, 5] = torch.finfo(dtype).min
        mask = None
        if kind != "none":
            mask = torch.zeros(2, 1, 6, columns, dtype=torch.bool if kind == "bool" else dtype, device=device)
            mask[1, :, 0] = True if kind == "bool" else -math.inf
            mask[0, :, 2:4, :1] = True if kind == "bool" else math.nan
        grad = normal(x.shape, dtype, device, 2)
        lengths = torch.tensor([0, columns // 2 + 1], device=device)
        for options in ({"is_causal": False}, {"is_causal": True, "diagonal": columns // 2, "key_lengths": lengths}):
            given = [x.clone().requires_grad_(), values.to(device).requires_grad_()]
            if mask is not None and kind == "same":
                given += [mask.clone().requires_grad_()]
            all_options = {"diagonal": 0, "window": None, "key_lengths": None, **options}
            results = []
            for function, with_probability in (
                (sms.scaled_mask_softmax, OPS.scaled_mask_softmax.with_sink_probability),
                (_composite.forward, _composite.forward_with_sink_probability),
            ):
                y = function(given[0], mask if len(given) == 2 else given[2], 0.5, sink=given[1], **options)
                again, probability = with_probability(x, mask, 0.5, **all_options, sink=given[1].detach())
                dx, *others = torch.autograd.grad(y, given, grad)
                assert same_bits(again, y.detach())
                if kind == "bool":  # of a row of NaN either
                    assert mask is not None
                    dx = dx.masked_fill(mask & y.isnan(), 0.0)
                results.append([y, probability, dx, *others])
            for got, want in zip(*results, strict=True):
                bound = max(16 * torch.finfo(dtype).eps, 1e-5 if dtype == torch.float32 else 1e-12)
                torch.testing.assert_close(got, want, rtol=bound, atol=bound, equal_nan=True)


def test_the_gradient_is_that_of_autograd(device: str) -> None:
    """By plain torch operators, in float64."""
    x = normal((2, 3, 4, 6), torch.float64, device).requires_grad_()
    sink = normal((3,), torch.float64, device, 3).requires_grad_()
    grad = normal(x.shape, torch.float64, device, 2)
    columns = torch.cat([x * 0.7, sink[:, None, None].expand(2, 3, 4, 1)], -1)
    expected = torch.autograd.grad(torch.softmax(columns, -1)[..., :-1], (x, sink), grad)
    got = torch.autograd.grad(sms.scaled_mask_softmax(x, None, 0.7, sink=sink), (x, sink), grad)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-14)
    full = torch.softmax(columns, -1)
    torch.testing.assert_close(oracle.sink_backward(grad, full[..., :-1].detach(), full[..., -1].detach()), got[1])


def test_run_to_run_and_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        for shape in ((1, 2, 3, 70_001), (40, 8, 7, 33)):
            x, grad = normal(shape, torch.float32, "cpu"), normal(shape, torch.float32, "cpu", 2)
            sink = normal(shape[1:2], torch.float32, "cpu", 3)
            torch.set_num_threads(1)
            y, dx = verify(x, sink=sink, grad=grad)
            for threads in (2, 3):
                torch.set_num_threads(threads)
                got_y, got_dx = verify(x, sink=sink, grad=grad)
                assert same_bits(got_y, y)
                assert same_bits(got_dx, dx)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device: str, dynamic: bool) -> None:
    def attend(x: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        hidden = x * 2
        sms.scaled_mask_softmax_(hidden, None, 0.5, sink=sink)
        return sms.scaled_mask_softmax(x * 2, None, 0.5, True, sink=sink) * -4 + hidden

    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic)
    for batch, columns in ((2, 9), (5, 33)):
        x = normal((batch, 3, 7, columns), torch.float32, device).requires_grad_()
        sink = normal((3,), torch.float32, device, 3).requires_grad_()
        grad = normal(x.shape, torch.float32, device, 4)
        expected, got = attend(x, sink), compiled(x, sink)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(*(torch.autograd.grad(y, (x, sink), grad) for y in (got, expected)))
