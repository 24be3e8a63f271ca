"""Tensors of equal values laid out in memory in every way that torch allows.

Memory around and between the elements is poisoned with NaN (True for bool), so that reading a cell that is not the
tensor's own changes a result, and writing one is found by `poison_intact`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def poisoned(elements: int, like: torch.Tensor) -> torch.Tensor:
    value = True if like.dtype == torch.bool else float("nan")
    return torch.full((elements,), value, dtype=like.dtype, device=like.device)


def strided(source: torch.Tensor, strides: Sequence[int], offset: int = 0) -> torch.Tensor:
    """A tensor of source's values with these strides, in a poisoned buffer with room after the last element."""
    last = sum((size - 1) * stride for size, stride in zip(source.shape, strides, strict=True) if size > 0)
    view = poisoned(offset + last + 1 + 32, source).as_strided(source.shape, tuple(strides), offset)
    view.copy_(source)
    return view


def contiguous_strides(shape: Sequence[int], order: Sequence[int] | None = None, pad: int = 0) -> list[int]:
    """Strides of dense storage with dimensions outermost to innermost in `order`; `pad` elements after each row."""
    strides = [0] * len(shape)
    step = 1
    for position, dim in enumerate(reversed(order if order is not None else range(len(shape)))):
        strides[dim] = step
        step *= max(shape[dim], 1)
        if position == 0:
            step += pad
    return strides


def dense(source: torch.Tensor) -> torch.Tensor:
    return source.clone(memory_format=torch.contiguous_format)


def offset(source: torch.Tensor, elements: int = 1) -> torch.Tensor:
    return strided(source, contiguous_strides(source.shape), elements)


def padded_rows(source: torch.Tensor, pad: int = 3) -> torch.Tensor:
    return strided(source, contiguous_strides(source.shape, pad=pad), 1)


def aligned_padded_rows(source: torch.Tensor) -> torch.Tensor:
    return strided(source, contiguous_strides(source.shape, pad=-source.shape[-1] % 16 + 16))


def transposed_leading(source: torch.Tensor) -> torch.Tensor:
    """Dimensions before the last one stored in reverse order, as [B, Sq, H, Sk] for [B, H, Sq, Sk]."""
    leading = list(range(source.dim() - 1))
    return strided(source, contiguous_strides(source.shape, [*reversed(leading), *range(source.dim())[-1:]]))


def transposed_last(source: torch.Tensor) -> torch.Tensor:
    """The last dimension stored outermost."""
    return strided(source, contiguous_strides(source.shape, list(reversed(range(source.dim())))))


def every_other_column(source: torch.Tensor) -> torch.Tensor:
    return strided(source, [2 * stride for stride in contiguous_strides(source.shape)], 1)


def odd_strides(source: torch.Tensor) -> torch.Tensor:
    """Odd strides everywhere but the last dimension, and gaps between all dimensions."""
    strides = [1] * source.dim()
    step = 1
    for dim in range(source.dim() - 1, -1, -1):
        strides[dim] = step
        step = (step * max(source.shape[dim], 1) + 3) | 1
    return strided(source, strides, 5)


def odd_size_one(source: torch.Tensor) -> torch.Tensor:
    """Strides of size-1 dimensions mean nothing: give them odd values."""
    view = offset(source, 3)
    strides = [7 + 2 * dim if size == 1 else view.stride(dim) for dim, size in enumerate(source.shape)]
    return view.as_strided(source.shape, strides, view.storage_offset())


def expanded_first(source: torch.Tensor) -> torch.Tensor:
    """Stride 0 in the first dimension: the values of its first entry."""
    return offset(source[:1]).expand(source.shape) if source.dim() > 1 and source.shape[0] else dense(source)


def expanded_rows(source: torch.Tensor) -> torch.Tensor:
    """Stride 0 in every dimension but the last: the values of the first row."""
    if source.dim() < 2 or source.numel() == 0:
        return dense(source)
    return offset(source.flatten(0, -2)[0]).expand(source.shape)


def expanded_columns(source: torch.Tensor) -> torch.Tensor:
    """Stride 0 in the last dimension: the values of the first column."""
    return offset(source[..., :1]).expand(source.shape) if source.numel() else dense(source)


def expanded_all(source: torch.Tensor) -> torch.Tensor:
    """All strides 0, as the gradient that .sum() sends back."""
    return offset(source.flatten()[:1]).reshape(()).expand(source.shape) if source.numel() else dense(source)


def sliding_rows(source: torch.Tensor) -> torch.Tensor:
    """Rows that overlap in memory, each one element after the one before: a function may read it, never write it."""
    strides = contiguous_strides(source.shape)
    if source.dim() > 1:
        strides[-2] = 1
    return strided(source, strides, 2)


def channels_last(source: torch.Tensor) -> torch.Tensor:
    if source.dim() != 4:
        return transposed_last(source)
    return source.contiguous(memory_format=torch.channels_last)


Layout = Callable[[torch.Tensor], torch.Tensor]

# Every element has memory of its own.
SEPARATE: dict[str, Layout] = {
    "dense": dense,
    "offset": offset,
    "padded_rows": padded_rows,
    "aligned_padded_rows": aligned_padded_rows,
    "transposed_leading": transposed_leading,
    "transposed_last": transposed_last,
    "every_other_column": every_other_column,
    "odd_strides": odd_strides,
    "odd_size_one": odd_size_one,
    "channels_last": channels_last,
}

# Elements share memory, so values differ from the source's: read them back from the result.
OVERLAPPING: dict[str, Layout] = {
    "expanded_first": expanded_first,
    "expanded_rows": expanded_rows,
    "expanded_columns": expanded_columns,
    "expanded_all": expanded_all,
    "sliding_rows": sliding_rows,
}

ALL: dict[str, Layout] = {**SEPARATE, **OVERLAPPING}


def whole_storage(view: torch.Tensor) -> torch.Tensor:
    """All of the memory behind view, as one dimension."""
    elements = view.untyped_storage().nbytes() // view.element_size()
    return view.detach().as_strided((elements,), (1,), 0)


def poison_intact(view: torch.Tensor) -> bool:
    """True if every element of the storage that is not one of view's still holds its poison."""
    storage = whole_storage(view)
    own = torch.zeros(storage.shape, dtype=torch.bool, device=view.device)
    own.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    around = storage[~own]
    return bool(around.all() if around.dtype == torch.bool else around.isnan().all())
