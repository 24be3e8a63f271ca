"""Whether a result is right, against float64 and plain torch. Nothing is timed that has not passed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .cases import DROPOUT_P
from .problems import SCALE, Problem

# Elements that are compared at a time, which bounds the memory of the float64 copies.
SLICE = 1 << 24
EPS32 = torch.finfo(torch.float32).eps


class WrongResult(Exception):
    """A result that differs from the reference by more than rounding."""


def scores(x: torch.Tensor, mask: torch.Tensor | None, scale: float, diagonal: int | None) -> torch.Tensor:
    """Float64 scores before the softmax. diagonal: the last column that row 0 sees; None without causality."""
    values = x.double() * scale
    if mask is not None:
        values = values.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else values + mask.double()
    if diagonal is not None:
        above = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(diagonal + 1)
        values = values.masked_fill(above, -torch.inf)
    return values


def _slices(problem: Problem) -> Iterator[tuple[slice, slice]]:
    """Batches and queries of slices of the scores."""
    case = problem.case
    queries = min(case.queries, max(1, SLICE // (case.heads * case.columns)))
    batches = max(1, SLICE // (case.heads * queries * case.columns))
    for batch in range(0, case.batch, batches):
        for query in range(0, case.queries, queries):
            yield slice(batch, batch + batches), slice(query, query + queries)


def _assert_within(actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor, what: str) -> None:
    error = (actual.detach().double() - expected).abs()
    wrong = ~(error <= bound)  # NaN is wrong
    if wrong.any():
        index = tuple(wrong.nonzero()[0].tolist())
        raise WrongResult(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} cells are wrong, the first {actual[index].item():.6g} "
            f"for {expected[index].item():.6g}"
        )


def _assert_is_drawn(keep: torch.Tensor) -> None:
    """As many cells as the probability says, within six standard deviations."""
    expected = (1 - DROPOUT_P) * keep.numel()
    allowed = 6 * (expected * DROPOUT_P) ** 0.5
    if not abs(int(keep.sum()) - expected) <= allowed:
        raise WrongResult(
            f"dropout keeps {int(keep.sum())} of {keep.numel()} cells, expected {expected:.0f} +- {allowed:.0f}"
        )


def _verify_operator(
    problem: Problem, results: tuple[torch.Tensor, ...], keep: torch.Tensor | None, alone: bool, rival: bool
) -> None:
    case = problem.case
    (x,) = problem.inputs
    if keep is not None:
        _assert_is_drawn(keep)
    scale = 1.0 if alone else SCALE
    mask = None if alone or problem.mask is None else problem.mask.expand(x.shape)
    info = torch.finfo(case.dtype)
    # Half precision rounds to its subnormals; a float32 subnormal may be flushed to zero.
    smallest = info.smallest_normal * (info.eps if case.dtype == torch.float16 else 1.0)
    for batches, queries in _slices(problem):
        part = (batches, slice(None), queries)
        diagonal = case.diagonal + queries.start if case.is_causal and not alone else None
        values = scores(x.detach()[part], None if mask is None else mask[part], scale, diagonal)
        y = values.softmax(-1)
        size = float(values.masked_fill(values == -torch.inf, 0.0).abs().max())
        relative = info.eps / 2 + 1e-6 + 4 * EPS32 * size
        if rival:  # the others may round between their steps, and need not sum a long row well
            relative = 1e-3 + info.eps * (1 + 2 * size)
        elif keep is not None:  # y is rounded before it is divided by 1 - p
            relative += info.eps / 2
        kept = 1.0 if keep is None else keep[part].double() / (1 - DROPOUT_P)
        _assert_within(results[0][part], y * kept, (relative * y + smallest) * kept, "forward")
        if problem.grad is not None:
            grad = problem.grad[part].double() * kept
            dx = scale * y * (grad - (grad * y).sum(-1, keepdim=True))
            largest = scale * float(grad.abs().max())
            # y was rounded in between: in the factor y, and in every term of the sum over the row.
            bound = (4 * relative + case.columns * smallest) * largest * y + info.eps * dx.abs()
            _assert_within(results[1][part], dx, bound + (1 + largest) * smallest, "gradient")


def _verify_attention(problem: Problem, results: tuple[torch.Tensor, ...]) -> None:
    case = problem.case
    assert problem.grad is not None
    # Products of float32 are summed in float32: what rounding adds grows as the root of the number of terms.
    terms = case.columns if case.dtype == torch.float32 else 1
    bound = max(8.0, terms**0.5 / 4) * torch.finfo(case.dtype).eps
    for item in range(case.batch):
        query, key, value = (tensor.detach()[item].double().requires_grad_() for tensor in problem.inputs)
        values = scores(query @ key.transpose(-2, -1), None, SCALE, case.diagonal if case.is_causal else None)
        output = values.softmax(-1) @ value
        gradients = torch.autograd.grad(output, (query, key, value), problem.grad[item].double())
        expected = (output.detach(), *gradients)
        for what, actual, right in zip(("output", "dq", "dk", "dv"), results, expected, strict=True):
            # Sums over rounded terms: each is wrong by a share of their size, not of its own.
            error = float((actual[item].detach().double() - right).norm() / right.norm())
            if not error <= bound:
                raise WrongResult(f"{what}: off by {error} of its norm, allowed {bound}")


def verify(
    problem: Problem,
    results: tuple[torch.Tensor, ...],
    keep: torch.Tensor | None = None,
    *,
    alone: bool = False,
    rival: bool = False,
) -> None:
    """Raise WrongResult unless results, as :func:`problems.run` gives them, are right.

    keep: the cells that dropout keeps, where there is dropout. alone: they are those of the softmax without scale and
    mask. rival: allow the rounding of a chain of operators.
    """
    if problem.case.suite == "attention":
        _verify_attention(problem, results)
    else:
        _verify_operator(problem, results, keep, alone, rival)
