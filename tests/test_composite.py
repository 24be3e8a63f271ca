"""The composite: the operator in plain torch operators, for other devices and for wheels without the library."""

from __future__ import annotations

import math
from collections.abc import Callable

import oracle
import pytest
import tolerances
import torch
from checks import (
    DTYPES,
    DTYPES_AND_KINDS,
    SIXTEEN_BIT,
    assert_is_forward,
    assert_within,
    normal,
    random_mask,
    same_bits,
    short,
)
from torch.autograd import gradcheck, gradgradcheck

from scaled_mask_softmax import _composite

SHAPES = [(7,), (3, 5), (2, 3, 5, 7), (2, 2, 1, 3, 4), (4, 1), (2, 3, 6, 1)]

# torch compiles its own formulas with torch.jit the first time that it differentiates forward.
forward_mode = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")


def mask_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Broadcast in the first dimension; rank 4 gives a mask per sample."""
    return (shape[0], *shape[2:]) if len(shape) == 4 else (*(1 for _ in shape[:-1]), shape[-1])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=short)
@pytest.mark.parametrize(("dtype", "kind"), DTYPES_AND_KINDS, ids=short)
def test_values_and_gradients(
    device: str, dtype: torch.dtype, kind: str, shape: tuple[int, ...], is_causal: bool
) -> None:
    x = normal(shape, dtype, device).requires_grad_()
    grad = normal(shape, dtype, device, 5)
    mask = random_mask(kind, mask_shape(shape), dtype, device)
    y = _composite.forward(x, mask, -0.7, is_causal, diagonal=1)
    assert y.is_contiguous()
    assert_is_forward(y, x, mask, -0.7, is_causal, 1)
    (dx,) = torch.autograd.grad(y, x, grad)
    assert dx.dtype == dtype
    expected = oracle.backward(grad, y, -0.7, is_causal, 1)
    assert_within(dx, expected, tolerances.backward_bound(dtype, -0.7, grad, y, expected), "gradient")
    assert same_bits(dx, _composite.backward(grad, y.detach(), -0.7, is_causal, diagonal=1))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4), (2, 0, 4), (2, 3, 0, 0)], ids=short)
@pytest.mark.parametrize("is_causal", [False, True])
def test_empty(device: str, shape: tuple[int, ...], is_causal: bool) -> None:
    x = torch.empty(shape, dtype=torch.float16, device=device, requires_grad=True)
    y = _composite.forward(x, torch.zeros(shape, dtype=torch.bool, device=device), 0.5, is_causal)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    (dx,) = torch.autograd.grad(y, x, torch.empty_like(y))
    assert dx.shape == x.shape


def test_rows_without_a_live_cell_stay_zero_whatever_arrives(device: str) -> None:
    """Row 0 by the mask, row 1 by x; row 2 by causality and the mask together."""
    x = normal((4, 4), torch.float32, device)
    x[1] = -math.inf
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.bool, device=device)
    x.requires_grad_()
    y = _composite.forward(x, mask, 1.0, True)
    assert not y[:3].any()
    assert y[3].sum().item() == pytest.approx(1, abs=1e-6)
    grad = torch.full_like(y, math.nan)
    grad[3] = 1.0
    (dx,) = torch.autograd.grad(y, x, grad)
    assert not dx[:3].any()
    assert not dx[3].isnan().any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_stays_out_of_cells_of_probability_zero(device: str, bad: float) -> None:
    """Zero because masked, because x is -inf, and because the exponential underflows."""
    x = torch.tensor([[1.0, 2.0, 0.0, -math.inf, -1e4]], device=device, requires_grad=True)
    mask = torch.tensor([[False, False, True, False, False]], device=device)
    y = _composite.forward(x, mask)
    assert y[0, 2:].tolist() == [0, 0, 0]
    (dx,) = torch.autograd.grad(y, x, torch.tensor([[1.0, 2.0, bad, bad, bad]], device=device), retain_graph=True)
    assert dx[0, 2:].tolist() == [0, 0, 0]
    assert dx[0, :2].isfinite().all()
    assert dx[0, :2].all()
    (dx,) = torch.autograd.grad(y, x, torch.tensor([[1.0, bad, 0.0, 0.0, 0.0]], device=device))
    assert dx[0, 2:].tolist() == [0, 0, 0]
    assert not dx[0, :2].isfinite().all()


def test_nan_takes_the_whole_row_and_no_other(device: str) -> None:
    x = normal((3, 4), torch.float32, device)
    x[0, 1] = math.nan
    x[1, 2] = math.inf
    x[2, 3] = math.nan
    mask = torch.zeros(3, 4, dtype=torch.bool, device=device)
    mask[2, 3] = mask[0, 0] = True
    y = _composite.forward(x, mask)
    assert y[:2].isnan().all()
    assert_is_forward(y, x, mask)
    assert not y[2].isnan().any()


@pytest.mark.parametrize("diagonal", [-(2**63), -3, 2**63 - 1])
def test_any_diagonal(device: str, diagonal: int) -> None:
    x = normal((2, 5, 7), torch.float32, device)
    assert_is_forward(_composite.forward(x, None, 1.0, True, diagonal=diagonal), x, None, 1.0, True, diagonal)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=short)
def test_16_bit_scores_are_computed_in_float32(device: str, dtype: torch.dtype) -> None:
    """In 16 bits these scores would be infinite, and the scale another number. In float32 all products are exact."""
    x = torch.tensor([60_000.0, 59_968.0, 0.0], dtype=torch.float32).to(dtype).to(device)
    scale = 1.0009765625 + 2.0**-12
    assert_is_forward(_composite.forward(x, None, scale), x, None, scale)
    assert_is_forward(_composite.forward(x, x.float() * -0.5, 0.5 + 2**-12), x, x.float() * -0.5, 0.5 + 2**-12)


@pytest.mark.parametrize("strided_columns", [False, True])
def test_in_place(device: str, strided_columns: bool) -> None:
    base = normal((2, 5, 5), torch.float32, device)
    x = base.mT if strided_columns else base
    mask = random_mask("bool", (5,), torch.float32, device)
    expected = _composite.forward(x, mask, 0.5, True)
    version = x._version
    assert _composite.forward_in_place(x, mask, 0.5, True) is None
    assert x._version > version
    assert torch.equal(x, expected)

    leaf = normal((2, 5, 5), torch.float32, device, 3).requires_grad_()
    scores = leaf * 1.0
    _composite.forward_in_place(scores, mask, 0.5, True)
    grad = normal((2, 5, 5), torch.float32, device, 4)
    (dx,) = torch.autograd.grad(scores, leaf, grad)
    (wanted,) = torch.autograd.grad(_composite.forward(leaf, mask, 0.5, True), leaf, grad)
    assert torch.equal(dx, wanted)
    with pytest.raises(RuntimeError, match="leaf"):
        _composite.forward_in_place(leaf)


def test_in_place_refuses_overlapping_memory(device: str) -> None:
    x = normal((3, 3), torch.float32, device)
    with pytest.raises(ValueError, match="mask may share memory with x"):
        _composite.forward_in_place(x, x[0])
    with pytest.raises(ValueError, match="may share memory"):
        _composite.forward_in_place(x[:1].expand(3, 3))


def test_arguments_are_never_written(device: str) -> None:
    x, grad = normal((2, 4, 6), torch.float32, device), normal((2, 4, 6), torch.float32, device, 2)
    mask = random_mask("same", (4, 6), torch.float32, device)
    assert mask is not None
    y = _composite.forward(x, mask, 1.0, True)
    before = [tensor.clone() for tensor in (x, mask, y, grad)]
    dx = _composite.backward(grad, y, 1.0, True)
    for tensor, copy in zip((x, mask, y, grad), before):
        assert torch.equal(tensor, copy)
        for result in (y, dx):
            assert result is tensor or result.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def scores_and_masks() -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Float64 scores that need grad, with no mask, a bool mask that kills one row, and a float mask."""
    x = normal((2, 3, 4), torch.float64, "cpu").requires_grad_()
    boolean = random_mask("bool", (3, 4), torch.float64, "cpu")
    assert boolean is not None
    boolean[1] = True
    return [(x, None), (x, boolean), (x, normal((3, 4), torch.float64, "cpu", 8))]


@forward_mode
@pytest.mark.parametrize(("x", "mask"), scores_and_masks(), ids=["none", "bool", "float"])
def test_first_and_second_derivatives(x: torch.Tensor, mask: torch.Tensor | None) -> None:
    def function(scores: torch.Tensor) -> torch.Tensor:
        return _composite.forward(scores, mask, -0.7, True, diagonal=1)

    assert gradcheck(
        function, (x,), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True, fast_mode=False
    )
    assert gradgradcheck(function, (x,), check_fwd_over_rev=True, check_rev_over_rev=True)


def squares(row: torch.Tensor) -> torch.Tensor:
    return _composite.forward(row, None, 0.5, True, diagonal=2).square().sum()


@forward_mode
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd, torch.func.jacrev, torch.func.hessian])
def test_vmap_of_a_transform_is_that_of_each_sample(transform: Callable[..., Callable[..., torch.Tensor]]) -> None:
    x = normal((3, 5), torch.float64, "cpu")
    batched = torch.vmap(transform(squares))(x)
    assert batched.any()
    torch.testing.assert_close(batched, torch.stack([transform(squares)(row) for row in x]))


def test_vmap_batches_x_or_mask_or_both() -> None:
    """A sample of rank 1 stays one row, and a mask of rank 3 stays one for each sample of a rank-4 x."""
    row, rows = normal((5,), torch.float64, "cpu"), normal((3, 5), torch.float64, "cpu", 1)
    x = normal((3, 2, 2, 4, 5), torch.float64, "cpu", 2)
    mask = torch.rand(3, 2, 4, 5, generator=torch.Generator().manual_seed(0)) < 0.3
    one_row_mask = mask[:, 0, 0]

    def function(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return _composite.forward(scores, mask, 0.5, True, diagonal=1)

    for scores, given, dims in [
        (rows, None, (0, None)),
        (rows, one_row_mask, (0, 0)),
        (row, one_row_mask, (None, 0)),
        (rows, one_row_mask[0], (0, None)),
        (x, mask, (0, 0)),
        (x, mask[0], (0, None)),
        (x[0], mask, (None, 0)),
        (x.movedim(0, 3), mask.movedim(0, 3), (3, 3)),
    ]:
        expected = [
            function(
                scores if dims[0] is None else scores.select(dims[0], index),
                given if given is None or dims[1] is None else given.select(dims[1], index),
            )
            for index in range(3)
        ]
        torch.testing.assert_close(torch.vmap(function, in_dims=dims)(scores, given), torch.stack(expected))


@forward_mode
def test_tangents_of_the_mask() -> None:
    x, mask = normal((2, 3), torch.float32, "cpu"), normal((3,), torch.float32, "cpu")
    _, by_mask = torch.func.jvp(lambda value: _composite.forward(x, value, 0.5, True), (mask,), (mask,))
    _, by_sum = torch.func.jvp(lambda value: _composite.forward(x * 0.5 + value, None, 1.0, True), (mask,), (mask,))
    assert by_mask.any()
    torch.testing.assert_close(by_mask, by_sum)


def contiguous(x: torch.Tensor) -> torch.Tensor:
    return x


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-1, -2)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool) -> None:
    def function(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        doubled = scores * 2
        _composite.forward_in_place(doubled, mask, 0.5)
        return _composite.forward(scores, mask, 0.5, True, diagonal=scores.shape[-1] - scores.shape[-2]) + doubled

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for columns in (4, 6):
        x = normal((2, 3, columns), torch.float32, "cpu").requires_grad_()
        mask = random_mask("bool", (3, columns), torch.float32, "cpu")
        assert mask is not None
        grad = normal(x.shape, torch.float32, "cpu", 4)
        y, expected = compiled(x, mask), function(x, mask)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(torch.autograd.grad(y, x, grad), torch.autograd.grad(expected, x, grad))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("layout", [contiguous, transposed])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_compiled_gradient(dtype: torch.dtype, layout: Callable[[torch.Tensor], torch.Tensor], in_place: bool) -> None:
    """Whether or not the conversions to and from the dtype and layout of the computation change anything."""

    def function(x: torch.Tensor) -> torch.Tensor:
        scores = layout(x * 2)
        if not in_place:
            return _composite.forward(scores, None, 0.5, True)
        _composite.forward_in_place(scores, None, 0.5, True)
        return scores

    torch.compiler.reset()
    x = normal((2, 3, 4), dtype, "cpu").requires_grad_()
    y, expected = torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x)
    torch.testing.assert_close(y, expected)
    grad = normal(y.shape, dtype, "cpu", 4)
    torch.testing.assert_close(torch.autograd.grad(y, x, grad), torch.autograd.grad(expected, x, grad))
