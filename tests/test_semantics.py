"""Each line of the decision table about values: dead rows, NaN, infinities, finite minima, scales, offsets."""

from __future__ import annotations

import math

import pytest
import torch
from checks import DTYPES, DTYPES_AND_KINDS, SIXTEEN_BIT, mask_kinds, normal, same_bits, short, verify
from tolerances import TOLERANCES

import scaled_mask_softmax as sms

# One row length for each way to hold a row: part of a warp, a warp, a block, streamed; odd, so that alignment varies.
LANES = [7, 67, 300, 1029]
LONG = [4099, 17_001, 70_003]


def positions(columns: int) -> torch.Tensor:
    """Every column of a short row; of a longer one both ends, where a power of two begins, and a random few."""
    if columns <= 310:
        return torch.arange(columns)
    chosen = [0, 1, 31, 32, 255, 256, 1023, 1024, 4095, 4096, 8191, 8192, 16_383, 16_384, 65_535, 65_536]
    drawn = torch.randint(columns, (6,), generator=torch.Generator().manual_seed(0)).tolist()
    chosen += [columns // 2, columns - 256, columns - 17, columns - 2, columns - 1, *drawn]
    return torch.tensor(sorted({column for column in chosen if column < columns}))


def at_every_position(
    columns: int, value: float, dtype: torch.dtype, device: str, background: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that hold `value` in one column each, and the bool mask of those cells."""
    where = positions(columns).to(device)
    x = normal((len(where), columns), dtype, device)
    if background is not None:
        x.fill_(background)
    marked = torch.zeros(x.shape, dtype=torch.bool, device=device).scatter_(1, where[:, None], True)
    return x.masked_fill(marked, value), marked


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("columns", [*LANES, *LONG])
def test_nan_or_infinity_in_one_live_cell_makes_the_row_nan(
    device: str, columns: int, value: float, dtype: torch.dtype
) -> None:
    x, _ = at_every_position(columns, value, dtype, device)
    y, dx = verify(x, from_x=False)
    assert y.isnan().all()
    assert dx.isnan().all()
    with_neighbour = torch.stack([x, torch.zeros_like(x)], dim=1)
    y, _ = verify(with_neighbour, from_x=False)
    assert not y[:, 1].isnan().any(), "NaN leaked into the row beside"


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("columns", [*LANES, *LONG])
def test_what_an_excluded_cell_holds_is_ignored(device: str, columns: int, value: float, dtype: torch.dtype) -> None:
    x, marked = at_every_position(columns, value, dtype, device)
    y, dx = verify(x, marked)
    clean, clean_dx = verify(x.masked_fill(marked, 1.0), marked)
    assert same_bits(y, clean)
    assert same_bits(dx, clean_dx)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_lies_past_the_diagonal_is_ignored(device: str, value: float, dtype: torch.dtype) -> None:
    for columns in (1, 5, 64, 129):
        x = normal((2, columns, columns), dtype, device)
        past = torch.ones(columns, columns, dtype=torch.bool, device=device).triu(1)
        y, dx = verify(x.masked_fill(past, value), None, 1.0, True)
        clean, clean_dx = verify(x, None, 1.0, True)
        assert same_bits(y, clean)
        assert same_bits(dx, clean_dx)
        # The mask too is ignored there.
        mask = torch.zeros_like(x[0]).masked_fill(past, value)
        assert same_bits(verify(x, mask, 1.0, True)[0], verify(x, torch.zeros_like(mask), 1.0, True)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("columns", [*LANES, *LONG])
def test_one_live_cell_anywhere_takes_everything(device: str, columns: int, dtype: torch.dtype) -> None:
    """The rest of the row is -inf, in x or by either mask: no lane's empty share may turn into NaN."""
    x, alive = at_every_position(columns, 3.0, dtype, device, background=-math.inf)
    for y, _ in (
        verify(x),
        verify(torch.zeros_like(x), ~alive),
        verify(torch.zeros_like(x), torch.zeros_like(x).masked_fill(~alive, -math.inf)),
    ):
        assert torch.equal(y, alive.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("columns", [2, 64, 129, 1000, 5000, 30_000])
def test_first_or_last_part_without_live_cell(device: str, columns: int, dtype: torch.dtype) -> None:
    cuts = sorted({1, 2, columns // 4, columns // 2, columns - columns // 3, columns - 1})
    j = torch.arange(columns, device=device)
    excluded = torch.stack([part for cut in cuts for part in (j < cut, j >= cut)])
    x = normal(excluded.shape, dtype, device)
    verify(x.masked_fill(excluded, -math.inf))
    verify(x, excluded)
    verify(x, torch.zeros_like(x).masked_fill(excluded, -math.inf))


@pytest.mark.parametrize(("dtype", "kind"), DTYPES_AND_KINDS, ids=short)
@pytest.mark.parametrize("columns", [1, 5, 64, 257, 1025, 9001, 40_003])
def test_dead_rows_are_zero(device: str, columns: int, dtype: torch.dtype, kind: str) -> None:
    """Rows 0 and 2 are dead, rows 1 and 3 are not; gradients of NaN cannot revive them."""
    x = normal((4, columns), dtype, device)
    mask = None
    dead = torch.tensor([True, False, True, False], device=device)[:, None]
    if kind == "none":
        x = x.masked_fill(dead, -math.inf)
    elif kind == "bool":
        mask = dead
    else:
        mask_dtype = dtype if kind == "same" else torch.float32
        mask = torch.zeros(4, 1, dtype=mask_dtype, device=device).masked_fill(dead, -math.inf)
    grad = normal(x.shape, dtype, device, 3).masked_fill(dead, math.nan)
    y, dx = verify(x, mask, grad=grad, from_x=False)
    assert not y[::2].any()
    assert not dx[::2].any()
    assert y[1::2].any(dim=-1).all()
    z = x.clone()
    sms.scaled_mask_softmax_(z, mask)
    assert same_bits(z, y)


def test_exclusions_intersect_into_dead_rows(device: str) -> None:
    """Neither causality nor the mask alone kills row 2; together they do."""
    for dtype in DTYPES:
        x = normal((4, 6), dtype, device)
        mask = torch.zeros(4, 6, dtype=torch.bool, device=device)
        mask[2, :3] = True
        y, dx = verify(x, mask, 1.0, True)
        assert not y[2].any()
        assert not dx[2].any()
        assert y[[0, 1, 3]].any(dim=-1).all()
        additive = torch.zeros(4, 6, dtype=dtype, device=device).masked_fill(mask, -math.inf)
        assert same_bits(verify(x, additive, 1.0, True)[0], y)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_rows_above_the_diagonal_are_dead(device: str, dtype: torch.dtype) -> None:
    for columns in (9, 1000, 5000):
        y, dx = verify(normal((2, 7, columns), dtype, device), None, 1.0, True, diagonal=-3)
        assert not y[:, :3].any()
        assert not dx[:, :3].any()
        assert y[:, 3:].any(dim=-1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_gradient_of_an_excluded_cell_is_zero_whatever_arrives(device: str, value: float, dtype: torch.dtype) -> None:
    for columns in (5, 64, 300, 2050, 20_001):
        x = normal((3, columns), dtype, device)
        excluded = torch.rand(x.shape, generator=torch.Generator().manual_seed(4)).to(device) < 0.5
        excluded[:, 0] = False
        grad = normal(x.shape, dtype, device, 6)
        _, dx = verify(x, excluded, 0.5, grad=grad.masked_fill(excluded, value), from_x=False)
        assert same_bits(dx, verify(x, excluded, 0.5, grad=grad.masked_fill(excluded, 0.25))[1])
        past = torch.ones(3, columns, dtype=torch.bool, device=device).triu(1)
        _, dx = verify(x, None, 0.5, True, grad=grad.masked_fill(past, value), from_x=False)
        assert same_bits(dx, verify(x, None, 0.5, True, grad=grad.masked_fill(past, 0.25))[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_gradient_of_a_live_cell_reaches_its_whole_row_and_no_other(
    device: str, value: float, dtype: torch.dtype
) -> None:
    for columns in (5, 67, 1029, 5003):
        grad, _ = at_every_position(columns, value, dtype, device)
        x = torch.full_like(grad, 0.5)
        verify(torch.stack([x, x], 1), grad=torch.stack([grad, torch.ones_like(grad)], 1), from_x=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_nan_row_under_causality(device: str, dtype: torch.dtype) -> None:
    """Forward: the whole row is NaN, as torch.softmax of a filled row. Backward: cells past the diagonal get zero."""
    for columns in (8, 65, 3000):
        x = normal((5, columns), dtype, device)
        x[2, 1] = math.nan
        y, dx = verify(x, None, 1.0, True, from_x=False)
        assert y[2].isnan().all()
        assert dx[2, :3].isnan().all()
        assert not dx[2, 3:].any()
        assert not y[[0, 1, 3, 4]].isnan().any()


@pytest.mark.parametrize(
    ("dtype", "kind"), [pair for pair in DTYPES_AND_KINDS if pair[1] in ("same", "float32")], ids=short
)
def test_nan_and_infinity_in_a_float_mask(device: str, dtype: torch.dtype, kind: str) -> None:
    x = normal((4, 37), dtype, device)
    mask = torch.zeros(4, 37, dtype=dtype if kind == "same" else torch.float32, device=device)
    mask[0, 20] = math.nan
    mask[1, 20] = math.inf
    mask[2, 20] = -math.inf
    x[3, 20] = math.inf
    mask[3, 20] = -math.inf  # inf - inf: a live NaN, not an exclusion
    y, _ = verify(x, mask, from_x=False)
    assert y.isnan().all(dim=-1).tolist() == [True, True, False, True]


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_infinities_times_scale(device: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, math.inf, 0.0], [1.0, -math.inf, 0.0], [1.0, 2.0, 0.0]], dtype=dtype, device=device)
    y, _ = verify(x, None, -1.0, from_x=False)
    assert y.isnan().all(dim=-1).tolist() == [False, True, False]
    assert y[0, 1] == 0
    y, dx = verify(x, None, 0.0, from_x=False)
    assert y.isnan().all(dim=-1).tolist() == [True, True, False]
    assert not dx[2].any()


@pytest.mark.parametrize(
    ("dtype", "kind"), [pair for pair in DTYPES_AND_KINDS if pair[1] in ("same", "float32")], ids=short
)
@pytest.mark.parametrize("columns", [3, 64, 1000, 5001, 30_001])
def test_a_row_at_the_finite_minimum_is_uniform(device: str, columns: int, dtype: torch.dtype, kind: str) -> None:
    """finfo.min is a number like any other. Where it swallows the score, as in float32 and up, the row is uniform; a
    float16 minimum keeps the score's leading bits."""
    mask_dtype = dtype if kind == "same" else torch.float32
    minimum = torch.finfo(mask_dtype).min
    x = normal((3, columns), dtype, device)
    if mask_dtype == torch.float16:
        x = (x * 128).round() / 128  # so that the sum is exact in float32
    mask = torch.zeros(3, columns, dtype=mask_dtype, device=device)
    mask[1] = minimum
    mask[2, columns // 2] = minimum
    y, _ = verify(x[:1], mask[:1], 1.0)
    shifted, _ = verify(x[2:], mask[2:], 1.0, from_x=False)
    assert shifted[0, columns // 2] == 0
    whole = sms.scaled_mask_softmax(x, mask, 1.0)
    assert same_bits(whole[:1], y)
    if mask_dtype == torch.float16:
        verify(x[1:2], mask[1:2], 1.0, exact_scores=True)
    else:
        uniform = torch.full((columns,), 1 / columns, dtype=torch.float64, device=device).to(dtype)
        torch.testing.assert_close(whole[1], uniform, rtol=2 * torch.finfo(dtype).eps, atol=0)
        assert (whole[1] == whole[1, 0]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_the_finite_minimum_twice(device: str, dtype: torch.dtype) -> None:
    """x and mask both at the minimum: -inf in float32, so a dead row; an ordinary number for float16."""
    minimum = torch.finfo(dtype).min
    x = torch.full((2, 9), minimum, dtype=dtype, device=device)
    mask = torch.full((2, 9), minimum, dtype=dtype, device=device)
    x[1, 4] = 0
    mask[1, 4] = 0
    y, _ = verify(x, mask, from_x=False, exact_scores=True)
    one_hot = torch.zeros(9, dtype=dtype, device=device)
    one_hot[4] = 1
    assert torch.equal(y[1], one_hot)
    if dtype == torch.float16:
        torch.testing.assert_close(y[0], torch.full_like(y[0], 1 / 9), rtol=torch.finfo(dtype).eps, atol=0)
    else:
        assert not y[0].any()


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=short)
def test_sixteen_bit_minimum_twice_in_a_float32_mask(device: str, dtype: torch.dtype) -> None:
    """Two maskings added up beforehand, finite in float32: never below a live cell's reach, never NaN."""
    twice = torch.tensor(2.0 * torch.finfo(torch.float16).min, device=device)
    x = normal((2, 33), dtype, device)
    mask = torch.zeros(2, 33, device=device)
    mask[0] = twice
    mask[1, 5:] = twice
    y, _ = verify((x * 16).round() / 16, mask, exact_scores=True)
    assert not y[1, 5:].any()
    assert y[0].all()


@pytest.mark.parametrize("sentinel", [-1e4, -1e9, -3e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_no_number_is_a_sentinel(device: str, dtype: torch.dtype, sentinel: float) -> None:
    """Scores at and below -10,000 are ordinary: a row made of them is no dead row."""
    info = torch.finfo(dtype)
    base = max(sentinel, float(info.min) / 4)
    x = torch.full((3, 40), base, dtype=dtype, device=device)
    x[1] *= torch.linspace(1, 2, 40, dtype=torch.float64, device=device).to(dtype)
    x[2, ::2] = -math.inf
    y, _ = verify(x, exact_scores=True)
    torch.testing.assert_close(y[0], torch.full_like(y[0], 1 / 40), rtol=info.eps, atol=0)
    torch.testing.assert_close(y[2, 1::2], torch.full_like(y[2, 1::2], 1 / 20), rtol=info.eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=short)
@pytest.mark.parametrize("columns", [7, 128, 1000, 5000])
def test_a_common_offset_of_ten_million(device: str, columns: int, dtype: torch.dtype) -> None:
    """Whole numbers around +-1e7 are exact in float32, so only their differences may count."""
    steps = torch.randint(-8, 9, (3, columns), generator=torch.Generator().manual_seed(1)).to(device)
    for offset in (1e7, -1e7):
        if dtype == torch.bfloat16:  # bfloat16 cannot hold the sum: the offset comes from a float32 mask
            x, mask = steps.to(dtype), torch.full((columns,), offset, device=device)
        else:
            x, mask = (steps + offset).to(dtype), None
        y, _ = verify(x, mask, exact_scores=True, from_x=False)
        plain = torch.softmax(steps.double(), -1).to(dtype)
        # 4 eps32 of 16, the largest distance from the maximum.
        torch.testing.assert_close(y, plain, rtol=torch.finfo(dtype).eps + 7.7e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_the_maximum_is_subtracted_before_any_other_factor(device: str, dtype: torch.dtype) -> None:
    """Scores near the end of float32's range: times log2(e) first, they would overflow."""
    big = 3.0e38
    x = torch.tensor([[big, big, -big], [-big, -big, -big]], device=device)
    if dtype == torch.float64:
        x = x.double()
    elif dtype in SIXTEEN_BIT:
        x = torch.tensor([[1.0, 1.0, -1.0], [-1.0, -1.0, -1.0]], dtype=dtype, device=device)
    scale = big if dtype in SIXTEEN_BIT else 1.0
    expected = torch.tensor([[0.5, 0.5, 0.0], [1 / 3] * 3], dtype=torch.float64, device=device).to(dtype)
    y = sms.scaled_mask_softmax(x, None, scale)
    torch.testing.assert_close(y, expected, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_scale_is_not_rounded_to_the_dtype(device: str, dtype: torch.dtype) -> None:
    """float16 knows neither 1e5, nor 1e-9, nor 1/3 to eleven bits."""
    tiny = torch.tensor([[0.0, 1e-5, 3e-5, 2e-5]], dtype=dtype, device=device)
    verify(tiny, None, 1e5)
    verify(tiny * 2.0**10, None, 1e-9)
    verify(normal((5, 64), dtype, device, spread=40.0), None, 1 / 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("columns", [50, 1001, 5000, 40000])
def test_scale_that_overflows_sixteen_bits_only(device: str, columns: int, dtype: torch.dtype) -> None:
    x = normal((4, columns), dtype, device, spread=0.3).clamp(-1, 1)
    if dtype not in SIXTEEN_BIT:  # of so many wider numbers the best are closer
        x = (x * 64).round() / 64
    # With 1.2e7 some parts of a row, and not others, are so far from 0 that 16-bit kernels shift them otherwise.
    for scale in (1e5, -1e5, 1.2e7, -1.2e7, 1e30, -3.4e38):
        y = sms.scaled_mask_softmax(x, None, scale)
        assert y.isfinite().all()
        signed = x.double() * math.copysign(1.0, scale)
        best = (signed == signed.amax(-1, keepdim=True)).double()
        # The second best is at least one step of the dtype behind, and loses by a factor of e to the power of that.
        torch.testing.assert_close(y.double(), best / best.sum(-1, keepdim=True), rtol=1e-2, atol=1e-3)


def test_float64_is_not_computed_in_float32(device: str) -> None:
    x = torch.tensor([[1.0, 1.0 + 1e-12, 1.0 - 1e-12]], dtype=torch.float64, device=device)
    y, _ = verify(x * 1e3)
    assert y[0, 1] > y[0, 0] > y[0, 2]
    verify(x, x, scale=1e300, from_x=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("columns", [256, 257, 511, 4096, 65_537, 1_048_583])
def test_sums_do_not_stall(device: str, columns: int, dtype: torch.dtype) -> None:
    """Equal scores: a sum kept in 16 bits stops at 256 or 2,048, one kept badly in float32 drifts."""
    x = torch.full((1, columns), 1.5, dtype=dtype, device=device)
    y, _ = verify(x, grad=torch.ones((), dtype=dtype, device=device).expand(x.shape))
    exact = torch.full((), 1 / columns, dtype=torch.float64, device=device)
    step = torch.finfo(dtype).eps if columns < 2**14 or dtype != torch.float16 else 0.01
    torch.testing.assert_close(y, exact.to(dtype).expand(x.shape), rtol=step, atol=0)
    # A gradient that is the same everywhere cancels, if the dot product with y does not drift either.
    _, dx = verify(x, grad=torch.full_like(x, 2.0))
    assert dx.abs().max() <= 2 * y.max() * (torch.finfo(dtype).eps + TOLERANCES[dtype].backward)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_one_column_gives_exactly_one(device: str, dtype: torch.dtype) -> None:
    x = normal((3, 5, 1), dtype, device, spread=100.0)
    for kind in mask_kinds(dtype):
        mask = (
            None if kind == "none" else torch.zeros(5, 1, dtype=torch.bool if kind == "bool" else dtype, device=device)
        )
        y, dx = verify(x, mask, 0.3)
        assert (y == 1).all()
        assert not dx.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_probabilities_far_below_the_largest(device: str, dtype: torch.dtype) -> None:
    """Exponents from 0 to -800: through subnormals to exact zeros, without NaN."""
    for columns in (64, 1025):
        x = -torch.linspace(0, 800, columns, dtype=torch.float64, device=device).to(dtype)[None]
        verify(x)
        verify(x.flip(-1))
        verify(x[:, torch.randperm(columns, generator=torch.Generator().manual_seed(0)).to(device)])
