"""Dropout of the probabilities: which cells it keeps, and everything else with it."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import layouts
import oracle
import pytest
import tolerances
import torch
import torch.utils.checkpoint
from checks import (
    DTYPES,
    DTYPES_AND_KINDS,
    SIXTEEN_BIT,
    assert_are_gradients,
    assert_is_forward,
    assert_within,
    memory_before,
    normal,
    peak_beyond,
    random_mask,
    same_bits,
    short,
)
from test_properties import calls
from test_thresholds import capability, short_name, switches
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import scaled_mask_softmax as sms
from scaled_mask_softmax import _composite

OPS = torch.ops.scaled_mask_softmax

# Rows of part of a warp, a warp, a block, and streamed; odd, so that a row's first four is not the one after another's.
COLUMNS = [1, 3, 7, 67, 300, 1029, 4099, 17_001, 70_003]

NO_OPTIONS: dict[str, Any] = {"diagonal": 0, "window": None, "key_lengths": None}

# torch compiles its own formulas with torch.jit the first time that it differentiates forward.
forward_mode = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)


def drop(x: torch.Tensor, *arguments: Any, seed: int = 5, p: float = 0.3, **options: Any) -> torch.Tensor:
    """The operator's result after torch.manual_seed(seed)."""
    torch.manual_seed(seed)
    return sms.scaled_mask_softmax(x, *arguments, dropout_p=p, **options)


def kept(x: torch.Tensor, seed: int = 5, p: float = 0.3) -> torch.Tensor:
    """The cells that drop() keeps."""
    torch.manual_seed(seed)
    return OPS.dropout_keep(x, p)


def state_of(device: str, *numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, device=device)


# ---- The pattern ----


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_the_oracle_knows_the_published_answers(counter: str, key: str, words: str) -> None:
    """Those that the authors of Philox publish."""
    parsed = [[int(word, 16) for word in text.split()] for text in (counter, key, words)]
    assert oracle.philox(parsed[0], parsed[1]) == parsed[2]


@pytest.mark.sanitizer
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 4), (2, 3, 5, 33), (3, 130), (2, 4097)], ids=short)
def test_the_pattern_is_philox(device: str, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, device=device)
    states = [(0, 0), (1, 4), (-1, 2**40 + 8), (2**63 - 1, 2**62), (-(2**63), 12)]
    for p, state in itertools.product((0.0, 2.0**-33, 0.1, 0.5, 0.999, 1.0), states):
        expected = oracle.dropout_keep(shape, list(state), p)
        for got in (
            OPS.dropout_keep.of_state(x, state_of(device, *state), p),
            _composite.dropout_keep_of_state(x, state_of(device, *state), p),
        ):
            assert got.dtype == torch.bool
            assert torch.equal(got.cpu(), expected)


def test_the_generator_gives_the_state(device: str) -> None:
    """torch's seed and offset on a CUDA device, a seed drawn from the generator on the CPU."""
    x = torch.zeros(2, 3, 5, 9, device=device)
    torch.manual_seed(11)
    first, _, state, _ = OPS.scaled_mask_softmax.dropout_with_y(
        x, None, 1.0, False, **NO_OPTIONS, sink=None, dropout_p=0.5, with_sink_probability=False
    )
    after = sms.scaled_mask_softmax(x, dropout_p=0.5)
    assert state.dtype == torch.int64
    assert torch.equal((first != 0).cpu(), oracle.dropout_keep(tuple(x.shape), state.tolist(), 0.5))
    if device == "cuda":
        assert state.tolist() == [11, 0]
        assert torch.equal((after != 0).cpu(), oracle.dropout_keep(tuple(x.shape), [11, 4], 0.5))
    else:
        torch.manual_seed(11)
        (drawn,) = torch.empty(1, dtype=torch.int64).random_(-(2**63), None).tolist()
        assert state.tolist() == [drawn, 0]
    assert not torch.equal(first, after)
    torch.manual_seed(11)
    assert same_bits(sms.scaled_mask_softmax(x, dropout_p=0.5), first)
    assert same_bits(sms.scaled_mask_softmax(x, dropout_p=0.5), after)


def test_each_way_to_draw_advances_the_generator_alike(device: str) -> None:
    x = normal((3, 5), torch.float32, device)
    ways: list[Callable[[], object]] = [
        lambda: sms.scaled_mask_softmax(x, dropout_p=0.5),
        lambda: sms.scaled_mask_softmax(x.clone().requires_grad_(), dropout_p=0.5),
        lambda: sms.scaled_mask_softmax_(x.clone(), dropout_p=0.5),
        lambda: OPS.dropout_keep(x, 0.5),
    ]
    following = []
    for way in ways:
        torch.manual_seed(7)
        way()
        following.append(torch.rand(4, device=device))
    torch.manual_seed(7)
    assert not torch.equal(following[0], torch.rand(4, device=device))
    for other in following[1:]:
        assert torch.equal(other, following[0])


def lengths(device: str, dtype: torch.dtype, kind: str) -> list[int]:
    """On either side of each switch between plans with dropout, and of the CPU's vectors and chunks."""
    found = {1, 2, 3, 5, 8, 17, 33, 64, 65, 1000, 65_536, 65_537}
    for direction, mask in (("forward", kind), ("backward", "none")):
        for start in switches(direction, short_name(dtype), mask, False, capability(device), dropout=True):
            found |= {start - 1, start, start + 1}
    return sorted(found)


@pytest.mark.sanitizer
@pytest.mark.parametrize(("dtype", "kind"), DTYPES_AND_KINDS, ids=short)
def test_every_plan_keeps_the_same_cells(device: str, dtype: torch.dtype, kind: str) -> None:
    """Forward and backward, aligned or not: those of dropout_keep, whose result test_the_pattern_is_philox knows."""
    for columns in lengths(device, dtype, kind):
        shape = (3 if columns < 20_000 else 2, columns)
        x = torch.zeros(shape, dtype=dtype, device=device)
        mask = None if kind == "none" else random_mask(kind, shape, dtype, device)
        if mask is not None:
            mask.zero_()
        keep = kept(x)
        for layout in (layouts.dense, layouts.offset):
            leaf = layout(x).detach().requires_grad_()
            y = drop(leaf, mask, 0.7)
            if 1 / columns > torch.finfo(dtype).smallest_normal:
                assert torch.equal(y != 0, keep)
            # dx is negative where a cell was dropped and some other was kept, and positive where it was kept.
            (dx,) = torch.autograd.grad(y, leaf, layout(torch.ones_like(x)))
            if dtype in (torch.float32, torch.float64) and columns > 2:
                mixed = keep.any(-1) & ~keep.all(-1)
                assert torch.equal(dx[mixed] > 0, keep[mixed])


def test_the_pattern_follows_from_the_place_alone(device: str) -> None:
    """Not from dtype, values, masks, exclusions, or dimensions merged or moved in memory."""
    shape = (2, 3, 5, 33)
    keep = kept(torch.empty(shape, device=device))
    for dtype in DTYPES:
        x = normal(shape, dtype, device)
        assert torch.equal(kept(x), keep)
        live = torch.ones(5, 33, dtype=torch.bool, device=device).tril(20)
        y = drop(x, None, 0.5, True, diagonal=20, sink=torch.zeros(3, dtype=dtype, device=device))
        assert torch.equal(y != 0, keep & live)
    flat = drop(torch.zeros(30, 33, device=device)) != 0
    assert torch.equal(flat, keep.view(30, 33))
    # More dimensions than a launch takes, walked in an order of their own.
    many = (2, 3, 2, 2, 3, 2, 3, 9)
    keep = kept(torch.empty(many, device=device))
    for order in itertools.islice(itertools.permutations(range(7)), 0, None, 611):
        inverse = [order.index(dim) for dim in range(7)]
        x = torch.zeros([many[dim] for dim in order] + [9], device=device).permute(*inverse, 7)
        assert x.shape == many
        mask = torch.zeros(2, 1, 3, 1, 1, 9, dtype=torch.bool, device=device)
        assert torch.equal(drop(x, mask) != 0, keep)


def test_instruction_sets_agree() -> None:
    """In one process: each vector width against the oracle is test_the_pattern_is_philox under ATEN_CPU_CAPABILITY."""
    x = torch.empty(5, 1003)
    state = state_of("cpu", 2**33 + 7, 2**35)
    whole = OPS.dropout_keep.of_state(x, state, 0.4)
    for columns in range(1, 80):
        part = OPS.dropout_keep.of_state(x[:1, :columns], state, 0.4)
        assert torch.equal(part, whole[:1, :columns])


def five_sigma(count: int, probability: float) -> float:
    return 5 * math.sqrt(count * probability * (1 - probability))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_statistics(device: str, p: float) -> None:
    """Counts within five standard deviations of those of independent cells: the whole, each row, head, column and
    position within a four, and pairs of neighbours in every direction, calls and seeds included."""
    shape = (4, 8, 64, 1000)
    x = torch.zeros(shape, device=device)
    keep = [kept(x, seed, p) for seed in (1, 2)]
    keep.append(OPS.dropout_keep(x, p))
    for pattern in keep:
        total = pattern.double().sum().item()
        assert abs(total - x.numel() * (1 - p)) < five_sigma(x.numel(), p)
        for dims in ((3,), (2, 3), (0, 1, 2), (0, 2, 3)):
            counts = pattern.double().sum(dims)
            each = x.numel() // counts.numel()
            # Of thousands of counts some exceed five: six and a half are a chance of 1e-10 each.
            assert ((counts - each * (1 - p)).abs() < 1.3 * five_sigma(each, p)).all()
        fours = pattern.view(-1, 4).double().sum(0)
        assert ((fours - x.numel() / 4 * (1 - p)).abs() < five_sigma(x.numel() // 4, p)).all()
    alike = p * p + (1 - p) * (1 - p)
    pairs = [(keep[0], keep[1]), (keep[0], keep[2])]
    for dim in range(4):
        for step in (1, 2, 4):
            if step < shape[dim]:
                size = shape[dim] - step
                pairs.append((keep[0].narrow(dim, 0, size), keep[0].narrow(dim, step, size)))
    for one, other in pairs:
        count = (one == other).double().sum().item()
        assert abs(count - one.numel() * alike) < five_sigma(one.numel(), alike)


def test_run_to_run_and_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        for shape in ((1, 2, 3, 140_001), (40, 8, 7, 33)):
            results = []
            for threads in (1, 2, 3, 1):
                torch.set_num_threads(threads)
                leaf = normal(shape, torch.float32, "cpu").requires_grad_()
                y = drop(leaf)
                (dx,) = torch.autograd.grad(y, leaf, normal(shape, torch.float32, "cpu", 2))
                results.append((y, dx, kept(leaf)))
            for other in results[1:]:
                assert same_bits(other[0], results[0][0])
                assert same_bits(other[1], results[0][1])
                assert torch.equal(other[2], results[0][2])
    finally:
        torch.set_num_threads(before)


# ---- Results and gradients, given the pattern ----


def verify(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float = 0.7,
    p: float = 0.3,
    sink: torch.Tensor | None = None,
    grad: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Result and every gradient against the oracle, given the cells that were kept."""
    options = {"is_causal": False, **NO_OPTIONS, **options}
    device = str(x.device)
    grad = normal(x.shape, x.dtype, device, 99, 1.0) if grad is None else grad
    leaves = {"x": x.detach().requires_grad_()}
    if mask is not None and mask.dtype != torch.bool:
        leaves["mask"] = mask.detach().requires_grad_()
    if sink is not None:
        leaves["sink"] = sink.detach().requires_grad_()
    keep = kept(x, p=p)
    result = drop(leaves["x"], leaves.get("mask", mask), scale, p=p, sink=leaves.get("sink"), **options)
    assert result.dtype == x.dtype
    assert result.is_contiguous()
    assert same_bits(drop(x.detach(), mask, scale, p=p, sink=sink, **options), result), "without a gradient"

    torch.manual_seed(5)
    again, y, state, _ = OPS.scaled_mask_softmax.dropout_with_y(
        x,
        mask,
        scale,
        options["is_causal"],
        **{name: options[name] for name in NO_OPTIONS},
        sink=sink,
        dropout_p=p,
        with_sink_probability=sink is not None,
    )
    assert same_bits(again, result)
    assert torch.equal(OPS.dropout_keep.of_state(x, state, p), keep)
    assert_is_forward(y, x, mask, scale, sink=sink, **options)
    # Of y as it was rounded, in the type that rows are computed in.
    factor = 0.0 if p == 1 else 1 / (1 - p)
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    assert same_bits(result, torch.where(keep, (y.to(compute) * factor).to(x.dtype), 0.0))

    gradients = dict(zip(leaves, torch.autograd.grad(result, list(leaves.values()), grad), strict=True))
    of_y = oracle.dropout(grad, keep, p)
    expected = oracle.backward(of_y, y, scale, **options)
    bound = tolerances.backward_bound(x.dtype, scale, of_y, y, expected)
    assert_within(gradients["x"], expected, bound, "backward")
    assert_are_gradients(gradients, of_y, x, mask, scale, sink=sink, **options)
    return result, gradients["x"]


@pytest.mark.sanitizer
@pytest.mark.parametrize(("dtype", "kind"), DTYPES_AND_KINDS, ids=short)
@pytest.mark.parametrize("columns", COLUMNS)
def test_with_everything_else(device: str, columns: int, dtype: torch.dtype, kind: str) -> None:
    x = normal((2, 3, 2, columns), dtype, device)
    key_lengths = torch.tensor([columns // 2, columns - 1], device=device)
    sink = normal((3,), torch.float32 if dtype in SIXTEEN_BIT else dtype, device, 11)
    banded: dict[str, Any] = {
        "is_causal": True,
        "diagonal": columns // 2,
        "window": columns // 3 + 1,
        "key_lengths": key_lengths,
    }
    verify(x, random_mask(kind, (2, 1, 1, columns), dtype, device))
    verify(x, random_mask(kind, (1, 3, 2, columns), dtype, device), p=0.9, sink=sink, **banded)


@pytest.mark.parametrize("shape", [(2, 3, 5, 33), (2, 1, 1, 33), (2, 5, 33), (1, 3, 5, 1), (33,), ()], ids=short)
def test_gradients_of_a_mask_that_broadcasts(device: str, shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = normal((2, 3, 5, 33), dtype, device)
        mask = normal(shape, dtype, device, 4)
        sink = normal((3,), dtype, device, 11)
        verify(x, mask)
        verify(x, mask, 1.0, sink=sink, is_causal=True, diagonal=20)
        leaf = mask.clone().requires_grad_()
        (alone,) = torch.autograd.grad(drop(x, leaf), leaf, torch.ones_like(x))
        both = torch.autograd.grad(drop(x.requires_grad_(), leaf), (x, leaf), torch.ones_like(x))
        assert same_bits(alone, both[1])


@pytest.mark.parametrize("p", [1 - 2.0**-34, 1.0 - 1e-16, 1.0])
def test_what_is_nearest_to_one_drops_all(device: str, p: float) -> None:
    """The one cell in 2**32 whose random number is the largest would otherwise be multiplied by up to 1e16."""
    x = normal((2, 3, 40), torch.float32, device).requires_grad_()
    result = sms.scaled_mask_softmax(x, dropout_p=p)
    assert not result.any()
    assert not torch.autograd.grad(result.sum(), x)[0].any()
    assert _composite.dropout_factor(p) == 0
    assert _composite.dropout_factor(1 - 2.0**-31) == 2.0**31


@pytest.mark.parametrize("p", [False, torch.tensor(0.0), 0j, 10**400, -1])
def test_what_is_no_probability_is_refused_by_name(p: Any) -> None:
    """What equals 0 but is no number, too: a tensor would have the host wait for its device."""
    for call in (sms.scaled_mask_softmax, sms.scaled_mask_softmax_):
        with pytest.raises((TypeError, ValueError), match="dropout_p is"):
            call(torch.zeros(2, 3), dropout_p=p)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_all_and_none(device: str, dtype: torch.dtype) -> None:
    """p = 1 gives zeros and zero gradients, and what is next to 0 everything."""
    for columns in (5, 300, 5000):
        x = normal((2, 3, 4, columns), dtype, device)
        sink = normal((3,), dtype, device, 2)
        mask = random_mask("same", (4, columns), dtype, device)
        result, dx = verify(x, mask, p=1.0, sink=sink)
        assert not result.any()
        assert not dx.any()
        assert_is_forward(drop(x, mask, 0.7, p=1e-20), x, mask, 0.7)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("columns", [9, 300, 5000, 70_003])
def test_rows_of_nan_and_dead_rows(device: str, columns: int, dtype: torch.dtype) -> None:
    """Dropped cells are 0 in a row of NaN too, excluded ones included; a dead row stays 0, with zero gradients."""
    x = normal((4, columns), dtype, device)
    x[0, 0] = math.nan
    mask = torch.zeros(4, columns, dtype=torch.bool, device=device)
    mask[0, 2:] = True
    mask[2] = True
    keep = kept(x)
    for options in ({}, {"is_causal": True, "diagonal": columns // 2}):
        leaf = x.detach().requires_grad_()
        y = drop(leaf, mask, **options)
        assert torch.equal(y[0].isnan(), keep[0])
        assert not y[0][~keep[0]].any()
        assert not y[2].any()
        assert y[1:].isfinite().all()
        (dx,) = torch.autograd.grad(y, leaf, torch.full_like(x, math.nan))
        assert not dx[2].any()


def test_a_gradient_of_a_dropped_cell_does_not_matter(device: str) -> None:
    """NaN included."""
    for dtype in DTYPES:
        x = normal((3, 4, 67), dtype, device)
        grad = normal(x.shape, dtype, device, 3)
        keep = kept(x)
        leaf = x.requires_grad_()
        got, expected = (
            torch.autograd.grad(drop(leaf), leaf, given)[0] for given in (grad.masked_fill(~keep, math.nan), grad)
        )
        assert same_bits(got, expected)


@pytest.mark.parametrize("layout", layouts.ALL)
def test_layouts(device: str, layout: str) -> None:
    """Any strides and addresses of x, mask and gradient."""
    for dtype in DTYPES:
        x, grad, mask = (layouts.ALL[layout](normal((2, 3, 5, 33), dtype, device, seed)) for seed in (0, 1, 2))
        y, dx = verify(x, mask, grad=grad, is_causal=True, diagonal=20)
        dense = [layouts.dense(tensor) for tensor in (x, mask, grad)]
        dense_y, dense_dx = verify(dense[0], dense[1], grad=dense[2], is_causal=True, diagonal=20)
        assert same_bits(y, dense_y)
        assert same_bits(dx, dense_dx)


def test_expanded_gradients(device: str) -> None:
    for dtype, columns in itertools.product(DTYPES, (33, 2000)):
        x = normal((2, 3, 5, columns), dtype, device).requires_grad_()
        one = torch.full((), 0.5, dtype=dtype, device=device).expand(x.shape)
        got, expected = (torch.autograd.grad(drop(x), x, grad)[0] for grad in (one, one.clone()))
        assert same_bits(got, expected)


@pytest.mark.parametrize("shape", [(5,), (1,), (0, 5), (3, 0), (2, 0, 4), (2, 3, 0, 4)], ids=short)
def test_ranks_and_empty_shapes(device: str, shape: tuple[int, ...]) -> None:
    x = normal(shape, torch.float32, device)
    verify(x)
    if x.numel() == 0:
        before = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
        sms.scaled_mask_softmax(x, dropout_p=0.5)
        assert torch.equal(before, torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state())


@hypothesis.given(data=st.data())
def test_any_call(device: str, data: st.DataObject) -> None:
    call = data.draw(calls(device))
    p = data.draw(st.sampled_from([0.1, 0.5, 0.75, 1.0]) | st.floats(1e-6, 1.0))
    verify(**call, p=p)


# ---- Derivatives ----


def test_saved_for_backward(device: str) -> None:
    """The probabilities before dropout, two numbers, and a number a row where sink has a gradient: no pattern."""
    x = normal((2, 3, 5, 9), torch.float16, device).requires_grad_()
    sink = normal((3,), torch.float16, device)
    for needs in (False, True):
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, saved=saved: saved.append(tensor) or tensor, lambda tensor: tensor
        ):
            y = drop(x, sink=sink.detach().requires_grad_(needs))
        assert [(tensor.dtype, list(tensor.shape)) for tensor in saved] == [
            (torch.float16, list(y.shape)),
            *([(torch.float32, list(y.shape[:-1]))] if needs else []),
            (torch.int64, [2]),
        ]


class Operators(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_what_runs(device: str) -> None:
    """p = 0 is the plain operator, without a tag of random numbers; else one operator forward and one backward, and one
    more for the gradient of a mask."""
    x = normal((2, 3, 5, 9), torch.float32, device).requires_grad_()
    mask = normal((1, 3, 1, 9), torch.float32, device, 2).requires_grad_()
    prefix = "scaled_mask_softmax.scaled_mask_softmax"
    for p, given, expected in (
        (0.0, None, [f"{prefix}.default", f"{prefix}_backward.default"]),
        (0.5, None, [f"{prefix}.dropout_with_y", f"{prefix}_backward.dropout"]),
        (0.5, mask, [f"{prefix}.dropout_with_y", f"{prefix}_backward.dropout", f"{prefix}_mask_backward.dropout"]),
    ):
        with Operators() as operators:
            y = sms.scaled_mask_softmax(x, given, dropout_p=p)
            torch.autograd.grad(y, [x] if given is None else [x, given], torch.ones_like(y))
        assert [name for name in operators.names if name.startswith("scaled_mask_softmax.")] == expected
    with Operators() as operators, torch.no_grad():
        sms.scaled_mask_softmax(x, dropout_p=0.5)
    assert operators.names == [f"{prefix}.dropout"]
    seeded = torch.Tag.nondeterministic_seeded
    assert seeded not in OPS.scaled_mask_softmax.default.tags
    assert seeded in OPS.scaled_mask_softmax.dropout.tags
    before = torch.get_rng_state()
    assert same_bits(sms.scaled_mask_softmax(x, dropout_p=0.0), sms.scaled_mask_softmax(x))
    assert torch.equal(torch.get_rng_state(), before)


def double(shape: tuple[int, ...], device: str, seed: int) -> torch.Tensor:
    return normal(shape, torch.float64, device, seed, 1.0).requires_grad_()


def test_derivatives(device: str) -> None:
    """First and second, of every argument, the seed set anew before each evaluation."""
    x, sink = double((2, 3, 4, 5), device, 0), double((3,), device, 4)
    options: dict[str, Any] = {"diagonal": 2, "window": 4, "key_lengths": torch.tensor([4, 5], device=device)}
    for shape in ((1, 3, 4, 5), (2, 1, 1, 5), (4, 1), (2, 3, 4, 5)):
        mask = double(shape, device, 5)

        def of(x: torch.Tensor, mask: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
            return drop(x, mask, -0.7, True, sink=sink, **options)

        assert gradcheck(of, (x, mask, sink))
        assert gradgradcheck(of, (x, mask, sink))
        assert gradcheck(functools.partial(of, sink=None), (x, mask), check_batched_grad=True)
        assert gradgradcheck(functools.partial(of, sink=None), (x, mask))
        assert gradcheck(functools.partial(of, x.detach(), sink=None), mask)
        assert gradcheck(functools.partial(of, x.detach(), mask.detach()), sink)


@forward_mode
def test_derivatives_in_forward_mode(device: str) -> None:
    x, mask, sink = double((2, 3, 4), device, 0), double((3, 4), device, 1), double((2,), device, 4)

    def of(x: torch.Tensor, mask: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        return drop(x, mask, 0.7, True, diagonal=1, sink=sink)

    assert gradcheck(of, (x, mask, sink), check_forward_ad=True)
    assert gradgradcheck(of, (x, mask, sink), check_fwd_over_rev=True)
    # The same cells as without a tangent.
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
        y, tangent = torch.autograd.forward_ad.unpack_dual(drop(dual))
    assert torch.equal(y != 0, kept(x))
    assert not tangent[y == 0].any()


def test_gradients_of_a_graph_used_twice(device: str) -> None:
    """retain_graph, create_graph without a further derivative, and grads of grads that the first result also feeds."""
    x = double((2, 5, 9), device, 0)
    y = drop(x)
    grad = normal(y.shape, torch.float64, device, 3)
    first, second, created = (
        torch.autograd.grad(y, x, grad, retain_graph=True, create_graph=create)[0] for create in (False, False, True)
    )
    assert same_bits(first, second)
    torch.testing.assert_close(created, first, rtol=1e-12, atol=1e-15)
    (mixed,) = torch.autograd.grad((created.square().sum() + (y * grad).sum()), x)
    keep = kept(x)

    def reference(x: torch.Tensor) -> torch.Tensor:
        y = torch.where(keep, torch.softmax(x, -1) / 0.7, 0.0)
        (dx,) = torch.autograd.grad(y, x, grad, create_graph=True)
        return dx.square().sum() + (y * grad).sum()

    leaf = x.detach().requires_grad_()
    (expected,) = torch.autograd.grad(reference(leaf), leaf)
    torch.testing.assert_close(mixed, expected, rtol=1e-10, atol=1e-12)


@forward_mode
def test_transforms_of_torch_func(device: str) -> None:
    x = normal((4, 3, 5), torch.float64, device)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return drop(x).square().sum()

    keep = kept(x)

    def reference(x: torch.Tensor) -> torch.Tensor:
        return torch.where(keep, torch.softmax(x, -1) / 0.7, 0.0).square().sum()

    forward = functools.partial(torch.func.jacfwd, randomness="same")  # by vmap

    def hessian(function: Any) -> Any:
        return forward(torch.func.jacrev(function))

    for transform in (torch.func.grad, torch.func.jacrev, forward, hessian):
        torch.testing.assert_close(transform(loss)(x), transform(reference)(x))
    nested = torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum())
    torch.testing.assert_close(nested(x), torch.func.grad(lambda x: torch.func.grad(reference)(x).square().sum())(x))


def derivatives_of(function: Callable[..., torch.Tensor], *given: torch.Tensor) -> dict[str, Callable[..., Any]]:
    """Ways to the gradient of function(*given), each for a gradient that arrives."""

    def by_autograd(grad: torch.Tensor, create_graph: bool = False) -> Any:
        return torch.autograd.grad(function(*given), given, grad, create_graph=create_graph)

    def outside_vmap(grad: torch.Tensor) -> Any:
        y = torch.vmap(lambda _: function(*given), randomness="same")(torch.zeros(2))
        return torch.autograd.grad(y[0], given, grad)

    def inside_vmap(grad: torch.Tensor) -> Any:
        pull_back = torch.vmap(lambda _: torch.func.vjp(function, *given)[1](grad), randomness="same")
        return [gradients[0] for gradients in pull_back(torch.zeros(2))]

    def nested(grad: torch.Tensor) -> Any:
        """Of a function that is itself a derivative: that of its result, where it counts once."""
        lifted = torch.func.vjp(lambda *given: torch.func.vjp(function, *given)[0], *given)
        return lifted[1](grad)

    return {
        "first order": by_autograd,
        "create_graph": functools.partial(by_autograd, create_graph=True),
        "torch.func": lambda grad: torch.func.vjp(function, *given)[1](grad),
        "nested": nested,
        "outside vmap": outside_vmap,
        "inside vmap": inside_vmap,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("options", ["x", "masks of x", "wide mask", "sink"])
def test_the_factor_overflows_nothing(device: str, dtype: torch.dtype, options: str) -> None:
    """Gradients near the largest number of their type, that 1 / (1 - p) alone would take past it: by every way what the
    kernels return, which multiply by the probabilities first."""
    x = normal((2, 3, 4, 40), dtype, device, spread=0.1).requires_grad_()
    given = [x]
    scale = 1e-30 if dtype in (torch.float32, torch.bfloat16) else 1.0
    if options == "masks of x":
        given = [normal(shape, dtype, device, 2, 0.1).requires_grad_() for shape in ((2, 3, 4, 40), (40,))]
    elif options == "wide mask":
        given += [torch.zeros(1, 4, 40, device=device, dtype=wide(dtype)).requires_grad_()]
    elif options == "sink":
        given += [torch.zeros(3, device=device, dtype=wide(dtype)).requires_grad_()]

    def function(softmax: Callable[..., torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        if options == "masks of x":
            return softmax(x.detach(), given[0], scale, dropout_p=0.9) + softmax(
                x.detach(), given[1], scale, dropout_p=0.9
            )
        name = "sink" if options == "sink" else "mask"
        return softmax(given[0], scale=scale, dropout_p=0.9, **dict(zip([name], given[1:])))

    grad = torch.full_like(x, torch.finfo(dtype).max / 4)
    for softmax in (sms.scaled_mask_softmax, _composite.forward_dropout):
        ways = derivatives_of(functools.partial(function, softmax), *given)
        expected = ways.pop("first order")(grad)
        assert all(gradient.isfinite().all() and gradient.any() for gradient in expected)
        if options == "sink":  # not supported: it says so
            del ways["nested"]
        for name, way in ways.items():
            for got, want in zip(way(grad), expected):
                largest = want.abs().max().item()
                bound = 16 * torch.finfo(got.dtype).eps * largest
                assert_within(got, want.double(), torch.full_like(want, bound, dtype=torch.float64), name)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Of masks and sinks for 16-bit scores."""
    return torch.float32 if dtype in SIXTEEN_BIT else dtype


@forward_mode
def test_forward_transforms_of_torch_func(device: str) -> None:
    x = normal((3, 5), torch.float64, device)
    keep = kept(x)
    got = torch.func.jvp(drop, (x,), (torch.ones_like(x) * x,))
    expected = torch.func.jvp(
        lambda x: torch.where(keep, torch.softmax(x, -1) / 0.7, 0.0), (x,), (torch.ones_like(x) * x,)
    )
    torch.testing.assert_close(got, expected)


def test_vmap(device: str) -> None:
    """As its randomness says, whichever arguments are batched; gradients inside and outside."""
    x = normal((4, 2, 3, 9), torch.float32, device)
    mask = random_mask("same", (4, 3, 9), torch.float32, device)
    assert mask is not None
    for dims in ((0, 0), (0, None), (None, 0)):
        given = [tensor if dim == 0 else tensor[0] for tensor, dim in zip((x, mask), dims)]
        samples = [[tensor[index] if dim == 0 else tensor for tensor, dim in zip(given, dims)] for index in range(4)]

        def of(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return sms.scaled_mask_softmax(x, mask, 0.5, dropout_p=0.3)

        with pytest.raises(RuntimeError, match=r"within torch.vmap with randomness='error'"):
            torch.vmap(of, in_dims=dims)(*given)
        for randomness in ("same", "different"):
            torch.manual_seed(5)
            got = torch.vmap(of, in_dims=dims, randomness=randomness)(*given)
            keep = kept(x[0]).expand(4, 2, 3, 9) if randomness == "same" else kept(x)
            plain = torch.stack([sms.scaled_mask_softmax(*one, 0.5) for one in samples])
            torch.testing.assert_close(got, torch.where(keep, plain / 0.7, 0.0))

            def loss(x: torch.Tensor, mask: torch.Tensor, of: Any = of) -> torch.Tensor:
                return of(x, mask).square().sum()

            def reference(x: torch.Tensor, mask: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
                probabilities = torch.softmax(x * 0.5 + mask, -1).nan_to_num(0.0)
                return torch.where(keep, probabilities / 0.7, 0.0).square().sum()

            torch.manual_seed(5)
            inside = torch.vmap(torch.func.grad(loss), in_dims=dims, randomness=randomness)(*given)
            expected = torch.stack(
                [torch.func.grad(reference)(*one, keep[index]) for index, one in enumerate(samples)]
            ).nan_to_num(0.0)
            torch.testing.assert_close(inside, expected)
            leaf = given[0].detach().requires_grad_()
            torch.manual_seed(5)
            vmapped = torch.vmap(of, in_dims=dims, randomness=randomness)(leaf, given[1])
            (outside,) = torch.autograd.grad(vmapped.square().sum(), leaf)
            torch.testing.assert_close(outside, expected if dims[0] == 0 else expected.sum(0))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_of_no_samples(device: str, randomness: str) -> None:
    """As torch's own dropout: empty results, and nothing is drawn."""
    mask = torch.zeros(0, 3, 9, device=device)
    lengths = torch.zeros(0, 2, dtype=torch.int64, device=device)
    sink = torch.zeros(0, 2, device=device)
    x = torch.zeros(0, 2, 3, 9, device=device).requires_grad_()
    before = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    for dims in ((0, 0, 0, 0), (None, 0, 0, 0), (0, None, None, None)):
        given = [
            tensor if dim == 0 else tensor.new_zeros(tensor.shape[1:])
            for tensor, dim in zip((x, mask, lengths, sink), dims)
        ]

        def of(x: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
            return sms.scaled_mask_softmax(x, mask, 0.5, True, key_lengths=lengths, sink=sink, dropout_p=0.3)

        y = torch.vmap(of, in_dims=dims, randomness=randomness)(*given)
        assert y.shape == x.shape
        inside = torch.vmap(
            torch.func.grad(lambda *given, of=of: of(*given).sum()), in_dims=dims, randomness=randomness
        )(*given)
        assert inside.shape == x.shape
    assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape
    assert torch.equal(before, torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state())


def test_vmap_of_what_is_not_batched(device: str) -> None:
    x = normal((3, 9), torch.float32, device)
    anything = torch.zeros(4, device=device)
    for randomness in ("same", "different"):
        got = torch.vmap(lambda number: sms.scaled_mask_softmax(x, dropout_p=0.5) + number, randomness=randomness)(
            anything
        )
        assert all(torch.equal(got[0], other) for other in got) == (randomness == "same")
    with pytest.raises(RuntimeError, match=r"randomness='error'"):
        torch.vmap(lambda number: sms.scaled_mask_softmax(x, dropout_p=0.5) + number)(anything)


def test_vmap_in_vmap_and_in_place(device: str) -> None:
    x = normal((4, 3, 2, 9), torch.float32, device)
    once = functools.partial(sms.scaled_mask_softmax, dropout_p=0.3)
    torch.manual_seed(5)
    got = torch.vmap(torch.vmap(once, randomness="different"), randomness="different")(x)
    torch.testing.assert_close(got, torch.where(kept(x), sms.scaled_mask_softmax(x) / 0.7, 0.0))
    torch.manual_seed(5)
    written = x.clone()
    torch.vmap(lambda x: sms.scaled_mask_softmax_(x, dropout_p=0.3), randomness="different")(written)
    torch.testing.assert_close(written, got)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(device: str, use_reentrant: bool) -> None:
    """Draws the same again."""
    x = normal((2, 5, 33), torch.float32, device)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return sms.scaled_mask_softmax(x * 2, dropout_p=0.5).square()

    results = []
    for function in (
        layer,
        lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=use_reentrant, preserve_rng_state=True),
    ):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(3)
        y = function(leaf)
        torch.rand(7, device=device)
        y.sum().backward()
        results.append((y.detach(), leaf.grad))
    for a, b in zip(*results):
        assert same_bits(a, b)


# ---- Forms ----


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_in_place(device: str, dtype: torch.dtype) -> None:
    x = normal((2, 3, 5, 33), dtype, device)
    sink = normal((3,), dtype, device, 3)
    expected = drop(x, None, 0.7, True, diagonal=20, sink=sink)
    for layout in ("dense", "offset", "padded_rows", "transposed_leading", "transposed_last", "every_other_column"):
        written = getattr(layouts, layout)(x)
        version = written._version
        torch.manual_seed(5)
        result = sms.scaled_mask_softmax_(written, None, 0.7, True, diagonal=20, sink=sink, dropout_p=0.3)
        assert result is written
        assert written._version == version + 1
        assert same_bits(written, expected)
    with torch.no_grad():
        leaf = x.clone().requires_grad_()
        torch.manual_seed(5)
        sms.scaled_mask_softmax_(leaf, None, 0.7, True, diagonal=20, sink=sink, dropout_p=0.3)
    assert same_bits(leaf, expected)


def test_in_place_in_transforms(device: str) -> None:
    x = normal((2, 3, 5, 33), torch.float32, device)
    expected = drop(x, None, 0.7, True)
    for transform in (torch.func.functionalize, functools.partial(torch.vmap, randomness="different")):
        written = x.clone()
        torch.manual_seed(5)
        result = transform(lambda x: sms.scaled_mask_softmax_(x, None, 0.7, True, dropout_p=0.3))(written)
        assert same_bits(result, expected)
        assert same_bits(written, expected)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return sms.scaled_mask_softmax_(x * 2, dropout_p=0.3).sum()

    refused = "for scaled_mask_softmax_ where a gradient is needed"
    with pytest.raises(NotImplementedError, match=refused):
        torch.func.grad(loss)(x)
    with pytest.raises(NotImplementedError, match=refused):
        torch.func.jvp(loss, (x,), (x,))
    with pytest.raises(NotImplementedError, match=refused), torch.autograd.forward_ad.dual_level():
        loss(torch.autograd.forward_ad.make_dual(x, x))
    with pytest.raises(NotImplementedError, match=refused), torch.autograd.forward_ad.dual_level():
        _composite.forward_in_place_dropout(torch.autograd.forward_ad.make_dual(x, x), dropout_p=0.3)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_the_composite(device: str, dtype: torch.dtype) -> None:
    """Of its own random numbers without the library, differentiable; and what serves the operators elsewhere."""
    x = normal((2, 3, 64, 65), dtype, device).requires_grad_()
    mask = normal((3, 1, 65), dtype, device, 2).requires_grad_()
    grad = normal(x.shape, dtype, device, 3)
    torch.manual_seed(5)
    y = _composite.forward_dropout(x, mask[None], 0.7, True, dropout_p=0.25)
    torch.manual_seed(5)
    keep = torch.rand(x.shape, device=device) >= 0.25
    plain = _composite.forward(x, mask[None], 0.7, True)
    assert same_bits(y, torch.where(keep, plain * (1 / 0.75), 0.0))
    # The factor multiplies what has been multiplied by the probabilities.
    eps = torch.finfo(dtype).eps
    expected = torch.autograd.grad(plain, (x, mask), torch.where(keep, grad, 0.0))
    for got, want in zip(torch.autograd.grad(y, (x, mask), grad), expected):
        torch.testing.assert_close(got, want * (1 / 0.75), rtol=2 * eps, atol=2 * eps * torch.finfo(dtype).tiny)
    for p, zeros in ((1.0, True), (1e-20, False)):
        assert _composite.forward_dropout(x, dropout_p=p).any() != zeros

    state = state_of(device, 17, 8)
    y = sms.scaled_mask_softmax(x.detach(), None, 0.7)
    options = {"diagonal": 3, "window": None, "key_lengths": torch.tensor([40, 65], device=device)}
    arguments = (grad, y, state, 0.25, 0.7, True)
    got = _composite.backward_dropout(*arguments, True, True, **options)
    want = OPS.scaled_mask_softmax_backward.dropout(*arguments, True, True, **options)
    tight = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    for a, b in zip(got, want):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, **(tight if a is got[0] else {"rtol": 1e-5, "atol": 1e-6}))
    for with_dx, with_dots in itertools.product((False, True), repeat=2):
        shapes = [
            [tuple(result.shape) for result in backward(*arguments, with_dx, with_dots, **options)]
            for backward in (_composite.backward_dropout, OPS.scaled_mask_softmax_backward.dropout)
        ]
        assert shapes[0] == shapes[1] == [x.shape if with_dx else (0,), x.shape[:-1] if with_dots else (0,)]
    sizes = ([1, 3, 1, 65], [2, 1, 64, 65])
    for size in sizes:
        arguments = (grad, y, want[1], state, 0.25, size, dtype, True)
        a, b = (
            function(*arguments, **options)
            for function in (_composite.mask_backward_dropout, OPS.scaled_mask_softmax_mask_backward.dropout)
        )
        torch.testing.assert_close(a, b, rtol=1e-3 if dtype in SIXTEEN_BIT else 1e-5, atol=tight["atol"] * 8)

    torch.manual_seed(5)
    sink = torch.zeros(3, dtype=dtype, device=device)
    result, y, state, probability = _composite.forward_dropout_with_y(
        x.detach(), None, 0.7, False, **NO_OPTIONS, sink=sink, dropout_p=0.25, with_sink_probability=True
    )
    keep = OPS.dropout_keep.of_state(y, state, 0.25)
    assert same_bits(result, torch.where(keep, y * (1 / 0.75), 0.0))
    assert probability.shape == x.shape[:-1]
    torch.manual_seed(5)
    assert same_bits(_composite.forward_dropout_alone(x.detach(), None, 0.7, sink=sink, dropout_p=0.25), result)
    written = x.detach().clone()
    torch.manual_seed(5)
    _composite.forward_in_place_dropout_alone(written, None, 0.7, sink=sink, dropout_p=0.25)
    assert same_bits(written, result)


def test_dtensors_are_refused() -> None:
    class Sharded(torch.Tensor):
        pass

    Sharded.__name__ = "DTensor"
    Sharded.__module__ = "torch.distributed.tensor"
    x = torch.zeros(3, 4).as_subclass(Sharded)
    with pytest.raises(NotImplementedError, match=r"dropout_p is 0.5 for x that is a DTensor"):
        sms.scaled_mask_softmax(x, dropout_p=0.5)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device: str, dynamic: bool) -> None:
    """One graph, forward and backward; the same seed draws what eager draws, and backward regenerates it."""

    def attend(x: torch.Tensor, mask: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        return sms.scaled_mask_softmax(x * 2, mask, 0.5, True, diagonal=3, sink=sink, dropout_p=0.3) * -4

    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic)
    for batch, columns in ((2, 9), (5, 33)):
        x = normal((batch, 3, 7, columns), torch.float32, device).requires_grad_()
        mask = normal((3, 1, columns), torch.float32, device, 2)[None].requires_grad_()
        sink = normal((3,), torch.float32, device, 3).requires_grad_()
        grad = normal(x.shape, torch.float32, device, 4)
        results = []
        for function in (attend, compiled, compiled):
            torch.manual_seed(3)
            y = function(x, mask, sink)
            results.append((y, *torch.autograd.grad(y, (x, mask, sink), grad)))
        for other in results[1:]:
            torch.testing.assert_close(other, results[0])
        with torch.no_grad():
            torch.manual_seed(3)
            torch.testing.assert_close(compiled(x, mask, sink), results[0][0])
            assert not torch.equal(compiled(x, mask, sink), results[0][0])


def test_compile_in_place_and_module(device: str) -> None:
    def overwrite(x: torch.Tensor) -> torch.Tensor:
        hidden = x * 2
        sms.scaled_mask_softmax_(hidden, dropout_p=0.3)
        return hidden + 1

    x = normal((2, 7, 33), torch.float32, device)
    module = sms.ScaledMaskSoftmax(0.5, dropout_p=0.5)
    for function in (overwrite, module, copy.deepcopy(module).eval()):
        compiled = torch.compile(function, fullgraph=True)
        torch.manual_seed(3)
        expected = function(x)
        torch.manual_seed(3)
        torch.testing.assert_close(compiled(x), expected)


# torch's own, while it takes its arguments over.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_autograd(device: str) -> None:
    x = normal((3, 4, 9), torch.float32, device).requires_grad_()
    mask = normal((4, 1), torch.float32, device, 2).requires_grad_()

    def step() -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x.grad = mask.grad = None
        drop(x * 2, mask, 0.5, True, diagonal=3).square().sum().backward()
        return x.grad, mask.grad

    expected = step()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        got = step()
    torch.testing.assert_close(got, expected)


def test_compile_with_checkpoint(device: str) -> None:
    """What is computed again draws the same."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        return sms.scaled_mask_softmax(x * 2, dropout_p=0.5).square()

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = normal((2, 5, 33), torch.float32, device).requires_grad_()
    y = compiled(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    keep = y != 0
    probabilities = torch.softmax(x.detach().double() * 2, -1).requires_grad_()
    expected = oracle.backward(2 * oracle.dropout(probabilities, keep, 0.5) * keep / 0.5, probabilities, 2.0)
    torch.testing.assert_close(dx.double(), expected, rtol=1e-4, atol=1e-6)


# torch's own, while it clones arguments that require gradients.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_opcheck(device: str) -> None:
    """p of 0 and 1 where random numbers would differ from run to run."""
    options: dict[str, Any] = {"diagonal": 1, "window": None, "key_lengths": torch.tensor([4, 9], device=device)}
    check = torch.library.opcheck
    for dtype, p in itertools.product((torch.float32, torch.float16), (0.0, 1.0)):
        for requires_grad in (False, True):
            x = normal((2, 3, 5, 9), dtype, device).requires_grad_(requires_grad)
            sink = normal((3,), torch.float32, device, 7)
            bias = normal((2, 1, 1, 9), dtype, device, 8)
            given = {**options, "sink": sink, "dropout_p": p}
            check(OPS.scaled_mask_softmax.dropout, (x, bias, 0.5, True), given)
            check(OPS.scaled_mask_softmax.dropout, (x,), {"dropout_p": p})
        x = x.detach()
        check(OPS.scaled_mask_softmax_.dropout, (x.clone(), bias, 0.5, True), given)
        check(OPS.dropout_keep.default, (x, p))
        # The state that it returns is drawn anew each time, so all but the comparison of results.
        for with_sink_probability in (False, True):
            check(
                OPS.scaled_mask_softmax.dropout_with_y,
                (x, bias, 0.5, True),
                {**given, "with_sink_probability": with_sink_probability},
                test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
            )
    for dtype, requires_grad, with_sink_probability in itertools.product(
        (torch.float32, torch.float16), (False, True), (False, True)
    ):
        x, bias = (normal(shape, dtype, device, 7).requires_grad_(requires_grad) for shape in ((2, 3, 5, 9), (9,)))
        given = {
            **options,
            "sink": normal((3,), torch.float32, device, 7).requires_grad_(requires_grad),
            "keep": kept(x),
            "dropout_p": 0.3,
            "with_sink_probability": with_sink_probability,
        }
        check(OPS.scaled_mask_softmax.dropout_of_keep, (x, bias, 0.5, True), given)
    state = state_of(device, 3, 4)
    for dtype in (torch.float32, torch.float16, torch.float64):
        grad, x = (normal((2, 3, 5, 9), dtype, device, seed) for seed in (0, 1))
        y = sms.scaled_mask_softmax(x)
        check(OPS.dropout_keep.of_state, (x, state, 0.5))
        for with_dx, with_dots in itertools.product((False, True), repeat=2):
            check(
                OPS.scaled_mask_softmax_backward.dropout,
                (grad, y, state, 0.5, 0.7, True, with_dx, with_dots),
                options,
            )
        _, dots = OPS.scaled_mask_softmax_backward.dropout(grad, y, state, 0.5, 0.7, True, False, True, **options)
        for size in ((2, 3, 5, 9), (2, 1, 1, 9), (1, 3, 5, 9), (1, 1, 1, 9)):
            arguments = (grad, y, dots, state, 0.5, size, dtype, True)
            check(OPS.scaled_mask_softmax_mask_backward.dropout, arguments, options)


def test_states_of_another_kind_are_refused(device: str) -> None:
    x = torch.zeros(3, 4, device=device)
    for state in (torch.zeros(2, device=device), state_of(device, 1), state_of(device, 1, 2, 3, 4)[::2]):
        for function in (OPS.dropout_keep.of_state, _composite.dropout_keep_of_state):
            with pytest.raises(ValueError, match=r"expected what scaled_mask_softmax.dropout_with_y returns"):
                function(x, state, 0.5)
    for keep in (torch.zeros(3, 4, device=device), torch.zeros(4, device=device, dtype=torch.bool)):
        for given in (x, x.to("meta")):
            with pytest.raises(ValueError, match="expected what dropout_keep returns for x"):
                OPS.scaled_mask_softmax.dropout_of_keep(
                    given,
                    None,
                    1.0,
                    False,
                    **NO_OPTIONS,
                    sink=None,
                    keep=keep,
                    dropout_p=0.5,
                    with_sink_probability=False,
                )


# ---- Of a CUDA device ----


@pytest.mark.parametrize("columns", [7, 128, 1000, 8192, 40_000])
def test_graph_replays_draw_anew(cuda: str, columns: int) -> None:
    """Each replay another pattern, the one that an eager call of the same state draws, forward and backward."""
    x, grad = normal((4, 5, columns), torch.float32, cuda), normal((4, 5, columns), torch.float32, cuda, 2)
    # A leaf for each stream: torch warns where a gradient meets the stream of an earlier graph, which may outlive it.
    leaf = x.detach().requires_grad_()
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        torch.autograd.grad(sms.scaled_mask_softmax(leaf, dropout_p=0.5), leaf, grad)
    torch.cuda.current_stream().wait_stream(warm)
    leaf = x.detach().requires_grad_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sms.scaled_mask_softmax(leaf, dropout_p=0.5)
        (dx,) = torch.autograd.grad(y, leaf, grad)
        second = sms.scaled_mask_softmax(leaf.detach(), dropout_p=0.5)
    patterns = []
    torch.manual_seed(9)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        patterns += [(y.detach().clone(), dx.clone()), (second.clone(), None)]
    torch.manual_seed(9)
    leaf = x.detach().requires_grad_()
    for replayed, replayed_dx in patterns:
        eager = sms.scaled_mask_softmax(leaf, dropout_p=0.5)
        assert same_bits(replayed, eager)
        if replayed_dx is not None:
            assert same_bits(replayed_dx, torch.autograd.grad(eager, leaf, grad)[0])
    for (one, _), (other, _) in itertools.combinations(patterns, 2):
        assert not torch.equal(one, other)


def test_memory(cuda: str) -> None:
    """Forward: the result, and with a gradient one tensor more; backward the gradient."""
    x = normal((8, 16, 128, 512), torch.float16, cuda)
    size = x.numel() * x.element_size()
    grad = torch.ones_like(x)
    small = 4096
    for requires_grad, tensors in ((False, 1), (True, 2)):
        leaf = x.detach().requires_grad_(requires_grad)
        before = memory_before()
        y = sms.scaled_mask_softmax(leaf, dropout_p=0.5)
        assert peak_beyond(before) <= tensors * size + small
        if requires_grad:
            torch.autograd.grad(y, leaf, grad)
            assert peak_beyond(before) <= (tensors + 1) * size + small
        del y


def test_cpu_and_cuda_draw_the_same_for_a_state(cuda: str) -> None:
    for columns in (1, 33, 1000, 5001):
        x = torch.empty(3, 5, columns)
        state = state_of("cpu", -12345, 2**34 + 4)
        on_cpu = OPS.dropout_keep.of_state(x, state, 0.4)
        assert torch.equal(OPS.dropout_keep.of_state(x.to(cuda), state.to(cuda), 0.4).cpu(), on_cpu)
