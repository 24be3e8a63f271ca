"""Python parts of the native operators: fake kernels for tracing, the composite for other devices, and the in-place
forms within the transforms of torch.func.

Imported once, after the native library has registered the schemas.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from . import _checks, _composite, _vmap  # noqa: F401  (_vmap registers)

_NAMESPACE = "scaled_mask_softmax"
# Below autograd, which records the graph of the whole operator.
_without_graph = torch.no_grad()

_library = torch.library.Library(_NAMESPACE, "IMPL", "CompositeExplicitAutograd")
_library.impl("scaled_mask_softmax", _without_graph(_composite.forward))
_library.impl("scaled_mask_softmax_", _without_graph(_composite.forward_in_place))
_library.impl("scaled_mask_softmax_backward", _without_graph(_composite.backward))
_library.impl("scaled_mask_softmax.with_sink_probability", _composite.forward_with_sink_probability)
_library.impl("scaled_mask_softmax_.with_sink_probability", _composite.forward_in_place_with_sink_probability)
_library.impl("scaled_mask_softmax_backward.with_dots", _without_graph(_composite.backward_with_dots))
_library.impl("scaled_mask_softmax_mask_backward", _without_graph(_composite.mask_backward))
_library.impl("scaled_mask_softmax.dropout", _composite.forward_dropout_alone)
_library.impl("scaled_mask_softmax.dropout_with_y", _composite.forward_dropout_with_y)
_library.impl("scaled_mask_softmax_.dropout", _without_graph(_composite.forward_in_place_dropout_alone))
_library.impl("scaled_mask_softmax_backward.dropout", _without_graph(_composite.backward_dropout))
_library.impl("scaled_mask_softmax_mask_backward.dropout", _without_graph(_composite.mask_backward_dropout))
_library.impl("dropout_keep", _composite.dropout_keep)
_library.impl("dropout_keep.of_state", _composite.dropout_keep_of_state)


def _row_values(x: torch.Tensor) -> torch.Tensor:
    """One number for each row of x, in the dtype that rows are accumulated in."""
    return x.new_empty(x.shape[:-1], dtype=_composite.accumulate_dtype(x.dtype))


def _check_in_place(x: torch.Tensor, *others: torch.Tensor | None) -> None:
    # Not above: it imports much, and only traced programs come here.
    from torch.fx.experimental import symbolic_shapes

    # Sizes that follow from data cannot be compared yet: the kernel that finally runs checks x then.
    if not symbolic_shapes.free_unbacked_symbols((x, *others)):
        _checks.check_in_place(x, *others)


@torch.library.register_fake(f"{_NAMESPACE}::scaled_mask_softmax")
def _(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    *,
    diagonal: int = 0,
    window: int | None = None,
    key_lengths: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    _checks.check_forward(x, mask, scale, window, key_lengths, sink)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake(f"{_NAMESPACE}::scaled_mask_softmax_")
def _(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    *,
    diagonal: int = 0,
    window: int | None = None,
    key_lengths: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
) -> None:
    _checks.check_forward(x, mask, scale, window, key_lengths, sink)
    _check_in_place(x, mask, key_lengths, sink)


@torch.library.register_fake(f"{_NAMESPACE}::scaled_mask_softmax.with_sink_probability")
def _(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    *,
    diagonal: int,
    window: int | None,
    key_lengths: torch.Tensor | None,
    sink: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    _checks.check_forward(x, mask, scale, window, key_lengths, sink)
    return torch.empty_like(x, memory_format=torch.contiguous_format), _row_values(x)


@torch.library.register_fake(f"{_NAMESPACE}::scaled_mask_softmax_.with_sink_probability")
def _(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    *,
    diagonal: int,
    window: int | None,
    key_lengths: torch.Tensor | None,
    sink: torch.Tensor,
) -> torch.Tensor:
    _checks.check_forward(x, mask, scale, window, key_lengths, sink)
    _check_in_place(x, mask, key_lengths, sink)
    return _row_values(x)


@torch.library.register_fake(f"{_NAMESPACE}::scaled_mask_softmax_backward")
def _(
    grad: torch.Tensor,
    y: torch.Tensor,
    scale: float,
    is_causal: bool,
    *,
    diagonal: int = 0,
    window: int | None = None,
    key_lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    _checks.check_backward(grad, y, scale, window, key_lengths)
    return torch.empty_like(y, memory_format=torch.contiguous_format)


@torch.library.register_fake(f"{_NAMESPACE}::scaled_mask_softmax_backward.with_dots")
def _(
    grad: torch.Tensor,
    y: torch.Tensor,
    scale: float,
    is_causal: bool,
    with_dx: bool,
    *,
    diagonal: int,
    window: int | None,
    key_lengths: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _checks.check_backward(grad, y, scale, window, key_lengths)
    dx = torch.empty_like(y, memory_format=torch.contiguous_format) if with_dx else y.new_empty(0)
    return dx, _row_values(y)


@torch.library.register_fake(f"{_NAMESPACE}::scaled_mask_softmax_mask_backward")
def _(
    grad: torch.Tensor,
    y: torch.Tensor,
    dots: torch.Tensor,
    size: list[int],
    dtype: torch.dtype,
    is_causal: bool,
    *,
    diagonal: int = 0,
    window: int | None = None,
    key_lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    _checks.check_backward(grad, y, 1.0, window, key_lengths)
    return y.new_empty(size, dtype=dtype)


@torch.library.register_fake(f"{_NAMESPACE}::scaled_mask_softmax.dropout")
def _(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    *,
    diagonal: int = 0,
    window: int | None = None,
    key_lengths: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    dropout_p: float,
) -> torch.Tensor:
    _checks.check_forward(x, mask, scale, window, key_lengths, sink)
    _checks.check_dropout(dropout_p)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake(f"{_NAMESPACE}::scaled_mask_softmax_.dropout")
def _(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    *,
    diagonal: int = 0,
    window: int | None = None,
    key_lengths: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    dropout_p: float,
) -> None:
    _checks.check_forward(x, mask, scale, window, key_lengths, sink)
    _checks.check_dropout(dropout_p)
    _check_in_place(x, mask, key_lengths, sink)


@torch.library.register_fake(f"{_NAMESPACE}::scaled_mask_softmax.dropout_with_y")
def _(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    *,
    diagonal: int,
    window: int | None,
    key_lengths: torch.Tensor | None,
    sink: torch.Tensor | None,
    dropout_p: float,
    with_sink_probability: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    _checks.check_forward(x, mask, scale, window, key_lengths, sink)
    _checks.check_dropout(dropout_p)
    result, y = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    of_rows = _row_values(x) if with_sink_probability else x.new_empty(0, dtype=_composite.accumulate_dtype(x.dtype))
    return result, y, x.new_empty(2, dtype=torch.int64), of_rows


@torch.library.register_fake(f"{_NAMESPACE}::scaled_mask_softmax.dropout_of_keep")
def _(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    *,
    diagonal: int,
    window: int | None,
    key_lengths: torch.Tensor | None,
    sink: torch.Tensor | None,
    keep: torch.Tensor,
    dropout_p: float,
    with_sink_probability: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _checks.check_forward(x, mask, scale, window, key_lengths, sink)
    _checks.check_dropout(dropout_p)
    _checks.check_keep(x, keep)
    result, y = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    of_rows = _row_values(x) if with_sink_probability else x.new_empty(0, dtype=_composite.accumulate_dtype(x.dtype))
    return result, y, of_rows


@torch.library.register_fake(f"{_NAMESPACE}::scaled_mask_softmax_backward.dropout")
def _(
    grad: torch.Tensor,
    y: torch.Tensor,
    state: torch.Tensor,
    dropout_p: float,
    scale: float,
    is_causal: bool,
    with_dx: bool,
    with_dots: bool,
    *,
    diagonal: int,
    window: int | None,
    key_lengths: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _checks.check_backward(grad, y, scale, window, key_lengths)
    _checks.check_dropout(dropout_p)
    _checks.check_random_state(y, state)
    dx = torch.empty_like(y, memory_format=torch.contiguous_format) if with_dx else y.new_empty(0)
    return dx, _row_values(y) if with_dots else y.new_empty(0, dtype=_composite.accumulate_dtype(y.dtype))


@torch.library.register_fake(f"{_NAMESPACE}::scaled_mask_softmax_mask_backward.dropout")
def _(
    grad: torch.Tensor,
    y: torch.Tensor,
    dots: torch.Tensor,
    state: torch.Tensor,
    dropout_p: float,
    size: list[int],
    dtype: torch.dtype,
    is_causal: bool,
    *,
    diagonal: int,
    window: int | None,
    key_lengths: torch.Tensor | None,
) -> torch.Tensor:
    _checks.check_backward(grad, y, 1.0, window, key_lengths)
    _checks.check_dropout(dropout_p)
    _checks.check_random_state(y, state)
    return y.new_empty(size, dtype=dtype)


@torch.library.register_fake(f"{_NAMESPACE}::dropout_keep")
def _(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
    _checks.check_dropout(dropout_p)
    return x.new_empty(x.shape, dtype=torch.bool)


@torch.library.register_fake(f"{_NAMESPACE}::dropout_keep.of_state")
def _(x: torch.Tensor, state: torch.Tensor, dropout_p: float) -> torch.Tensor:
    _checks.check_dropout(dropout_p)
    _checks.check_random_state(x, state)
    return x.new_empty(x.shape, dtype=torch.bool)


# Within any transform of torch.func an in-place form is the functional one and a copy, before the transform sees it:
# torch.func.functionalize takes no operator that writes. (A kernel for functionalization itself would also replace the
# in-place form in programs of torch.compile.) The result is whole before it is copied, so it may share memory with the
# other arguments, whose storages cannot be compared here.
_OPERATORS = torch.ops.scaled_mask_softmax


def _forward_in_place(x: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
    y = _OPERATORS.scaled_mask_softmax.default(x, *arguments, **keywords)
    _check_in_place(x, None, None, None)
    x.copy_(y)


def _forward_in_place_with_sink_probability(x: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
    y, sink_probability = _OPERATORS.scaled_mask_softmax.with_sink_probability(x, *arguments, **keywords)
    _check_in_place(x, None, None, None)
    x.copy_(y)
    return cast(torch.Tensor, sink_probability)


def _forward_in_place_dropout(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    *options: Any,
    sink: torch.Tensor | None = None,
    dropout_p: float,
    **keywords: Any,
) -> None:
    _checks.check_in_place_dropout(dropout_p, x, mask, sink)
    y = _OPERATORS.scaled_mask_softmax.dropout(x, mask, *options, sink=sink, dropout_p=dropout_p, **keywords)
    _check_in_place(x, None, None, None)
    x.copy_(y)


_transforms = torch.library.Library(_NAMESPACE, "IMPL", "FuncTorchDynamicLayerFrontMode")
_transforms.impl("scaled_mask_softmax_", _forward_in_place)
_transforms.impl("scaled_mask_softmax_.with_sink_probability", _forward_in_place_with_sink_probability)
_transforms.impl("scaled_mask_softmax_.dropout", _forward_in_place_dropout)
