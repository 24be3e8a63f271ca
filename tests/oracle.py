"""What the operator must return, in float64 and plain torch.

Written from the definition of the operator alone. Nothing here is fast, and nothing here looks at a kernel.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

FLOAT32_MAX = torch.finfo(torch.float32).max


class Scores(NamedTuple):
    """Scores before the softmax.

    values: float64, x's shape; excluded cells hold -inf.
    by_position: bool, x's shape; True where causality, the window or a key length excludes the cell.
    """

    values: torch.Tensor
    by_position: torch.Tensor


def aligned_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mask with x's shape: torch's broadcasting, but a 3-D mask for a 4-D x is per sample."""
    if x.dim() == 4 and mask.dim() == 3:
        mask = mask[:, None]
    return mask.expand(x.shape)


def excluded_by_position(
    x: torch.Tensor,
    is_causal: bool,
    diagonal: int,
    window: int | None = None,
    key_lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Bool, x's shape: cell (i, j) is excluded if is_causal and j > i + diagonal, if j <= i + diagonal - window, or if
    j >= key_lengths[b], b the index along the first dimension. A rank-1 x is the row i = 0."""
    queries = x.shape[-2] if x.dim() > 1 else 1
    i = torch.arange(queries, device=x.device)[:, None]
    j = torch.arange(x.shape[-1], device=x.device)[None, :]
    outside = (j - i > diagonal) if is_causal else torch.zeros_like(j - i, dtype=torch.bool)
    if window is not None:
        outside = outside | (j - i <= max(diagonal - window, -(2**63)))  # of 64 bits, like the other side
    outside = outside.reshape(x.shape[-1:]).expand(x.shape) if x.dim() == 1 else outside.expand(x.shape)
    if key_lengths is not None:
        for b, length in enumerate(key_lengths.tolist()):
            outside = outside.clone()
            outside[b, ..., max(length, 0) :] = True
    return outside


def in_range(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scores of all dtypes but float64 live in float32: past its range they are infinite."""
    if dtype == torch.float64:
        return values
    return torch.where(values.abs() > FLOAT32_MAX, values.sign() * torch.inf, values)


def scores(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    diagonal: int = 0,
    window: int | None = None,
    key_lengths: torch.Tensor | None = None,
) -> Scores:
    values = in_range(x.detach().double() * scale, x.dtype)
    by_position = excluded_by_position(x, is_causal, diagonal, window, key_lengths)
    excluded = by_position
    if mask is not None:
        mask = aligned_mask(x, mask.detach())
        if mask.dtype == torch.bool:
            excluded = excluded | mask
        else:
            values = in_range(values + mask.double(), x.dtype)
    return Scores(values.masked_fill(excluded, -torch.inf), by_position)


def column_of_sinks(x: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """Float64, x's shape with one column: the logit of the row's head, which is its index along dimension -3."""
    return sink.detach().double()[:, None, None].expand(*x.shape[:-1], 1)


def softmax_with_sink(values: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax of float64 scores, and what the sink takes, without the last dimension: as one column more."""
    if sink is None:
        return softmax(values), values.new_zeros(values.shape[:-1])
    full = softmax(torch.cat([values, column_of_sinks(values, sink)], dim=-1))
    return full[..., :-1], full[..., -1]


def softmax(values: torch.Tensor) -> torch.Tensor:
    """Softmax of float64 scores; a row of -inf gives zeros, a row with NaN or +inf gives NaN."""
    if values.numel() == 0:
        return values.clone()
    maximum = values.amax(dim=-1, keepdim=True)
    invalid = values.isnan().any(dim=-1, keepdim=True) | (values == torch.inf).any(dim=-1, keepdim=True)
    dead = (values == -torch.inf).all(dim=-1, keepdim=True)
    weights = (values - maximum.masked_fill(dead, 0.0)).exp()
    y = weights / weights.sum(dim=-1, keepdim=True).masked_fill(dead, 1.0)
    return y.masked_fill(invalid, torch.nan)


def forward(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    diagonal: int = 0,
    window: int | None = None,
    key_lengths: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Float64 probabilities of x's shape."""
    values, _ = scores(x, mask, scale, is_causal, diagonal, window, key_lengths)
    return softmax_with_sink(values, sink)[0]


def backward(
    grad: torch.Tensor,
    y: torch.Tensor,
    scale: float = 1.0,
    is_causal: bool = False,
    diagonal: int = 0,
    window: int | None = None,
    key_lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Float64 gradient of x, given probabilities y: scale * y * (grad - sum(grad * y)).

    A cell with y == 0 counts as if its grad were 0, whatever grad holds; a cell excluded by position gets 0 even in a
    row of NaN.
    """
    grad, y = grad.detach().double(), y.detach().double()
    grad = grad.masked_fill(y == 0, 0.0)
    dx = scale * y * (grad - (grad * y).sum(dim=-1, keepdim=True))
    return dx.masked_fill((y == 0) | excluded_by_position(y, is_causal, diagonal, window, key_lengths), 0.0)


def sink_backward(grad: torch.Tensor, y: torch.Tensor, sink_probability: torch.Tensor) -> torch.Tensor:
    """Float64 gradient [H] of a sink, given what it takes of each row: minus that times sum(grad * y), summed."""
    grad = grad.detach().double().masked_fill(y == 0, 0.0)
    of_rows = -sink_probability * (grad * y.detach().double()).sum(dim=-1)
    return of_rows.movedim(-2, 0).flatten(1).sum(dim=1)


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 of Salmon, Moraes, Dror and Shaw (SC 2011): four words from a counter of four and a key of two."""
    c0, c1, c2, c3 = counter
    for turn in range(10):
        k0, k1 = ((word + turn * step) % 2**32 for word, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        (high0, low0), (high1, low1) = divmod(0xD2511F53 * c0, 2**32), divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return [c0, c1, c2, c3]


def dropout_keep(shape: tuple[int, ...], state: list[int], p: float) -> torch.Tensor:
    """Bool of this shape: the cells that dropout of probability p keeps, given a seed and an offset of 64 bits.

    Columns come in fours; the n-th of all rows' fours gets the n-th subsequence of torch's generator.
    """
    columns = shape[-1]
    fours = (columns + 3) // 4
    seed, offset = (number % 2**64 for number in state)
    words: list[int] = []
    for number in range(math.prod(shape[:-1]) * fours):
        counter = [offset // 4 % 2**32, offset // 4 >> 32, number % 2**32, number >> 32]
        words += philox(counter, [seed % 2**32, seed >> 32])
    numbers = torch.tensor(words, dtype=torch.int64).reshape(*shape[:-1], 4 * fours)[..., :columns]
    return numbers >= min(math.floor(p * 2**32 + 0.5), 2**32 - 1)


def dropout(values: torch.Tensor, keep: torch.Tensor, p: float) -> torch.Tensor:
    """Float64 values, probabilities or the gradients that arrive, with dropout."""
    kept = values.detach().double() * (0.0 if p == 1 else 1 / (1 - p))
    return torch.where(keep, kept, 0.0)


def mask_backward(
    grad: torch.Tensor, y: torch.Tensor, mask: torch.Tensor, **exclusions: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 gradient of a float mask, given probabilities y: that of the scores, summed where the mask broadcasts.

    The second result is the number of cells that share each element.
    """
    change = backward(grad, y, 1.0, **exclusions)
    shape = list(mask.shape)
    if y.dim() == 4 and mask.dim() == 3:
        shape.insert(1, 1)
    shape = [1] * (y.dim() - len(shape)) + shape
    share = y.numel() // max(mask.numel(), 1)
    return change.sum_to_size(shape).reshape(mask.shape), torch.full_like(mask, share, dtype=torch.float64)
