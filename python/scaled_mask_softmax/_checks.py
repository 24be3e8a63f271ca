"""Argument checks in Python, for fake tensors, for devices without a native kernel and for wheels without the library.

The native twin is ``src/canonicalize.cpp``; ``tests/error_cases.py`` holds both to the same texts.
"""

from __future__ import annotations

import math

import torch

PREFIX = "scaled_mask_softmax: "
_SIXTEEN_BIT = (torch.float16, torch.bfloat16)
_SUPPORTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FLOAT32_MAX = torch.finfo(torch.float32).max


def number(value: float) -> str:
    """With as many digits as it takes to tell it from every other, and six at least, as C++ prints it too."""
    value = float(value)
    for digits in range(6, 17):
        text = f"{value:.{digits}g}"
        if float(text) == value:
            return text
    return f"{value:.17g}"


def is_per_sample(x: torch.Tensor, mask: torch.Tensor) -> bool:
    """A 3-D mask for a 4-D x has one entry per sample: dimension 0 is the batch, and heads broadcast."""
    return x.dim() == 4 and mask.dim() == 3


def _shape(tensor: torch.Tensor) -> str:
    return str(list(tensor.shape))


def _holds(condition: bool | torch.SymBool, undecided: bool) -> bool:
    """Whether `condition` holds; `undecided` if that follows from data that a program under trace has not seen yet.

    The kernel that finally runs checks again.
    """
    if isinstance(condition, bool):
        return condition
    # Not above: it imports much, and only traced programs come here.
    from torch.fx.experimental import symbolic_shapes

    return bool((symbolic_shapes.guard_or_true if undecided else symbolic_shapes.guard_or_false)(condition))


def _check_layout(tensor: torch.Tensor, name: str) -> None:
    if tensor.is_nested:
        raise ValueError(
            f"{PREFIX}{name} is a nested tensor; expected a dense (strided) tensor. Use "
            "torch.nested.to_padded_tensor, and a mask that is True at the padding."
        )
    if tensor.layout != torch.strided:
        raise ValueError(
            f"{PREFIX}{name} has layout {tensor.layout}; expected a dense (strided) tensor. Use {name}.to_dense()."
        )


def _check_element(x: torch.Tensor, name: str) -> None:
    if x.dtype not in _SUPPORTED:
        raise TypeError(
            f"{PREFIX}{name} has dtype {x.dtype}; expected torch.float16, torch.bfloat16, torch.float32 or "
            f"torch.float64. Convert it, for example with {name}.float()."
        )
    _check_layout(x, name)
    if x.dim() == 0:
        raise ValueError(
            f"{PREFIX}{name} has shape [] (rank 0); expected at least one dimension, [..., Sq, Sk]. "
            f"Use {name}.unsqueeze(0) for a row of one score."
        )


def _check_vector(
    x: torch.Tensor, x_name: str, vector: torch.Tensor, name: str, dim: int, x_shape: str, role: str
) -> None:
    """An operand with one element for each index of x's dimension `dim`."""
    if vector.device != x.device:
        raise ValueError(
            f"{PREFIX}{name} is on {vector.device}; expected {x.device}, the device of {x_name}. "
            f"Use {name}.to({x_name}.device)."
        )
    _check_layout(vector, name)
    if x.dim() < 3:
        raise ValueError(
            f"{PREFIX}{name} is given for {x_name} of shape {_shape(x)}; expected {x_shape}. Use {x_name}[None]."
        )
    if vector.dim() != 1 or not _holds(vector.shape[0] == x.shape[dim], True):
        raise ValueError(
            f"{PREFIX}{name} has shape {_shape(vector)} for {x_name} of shape {_shape(x)}; "
            f"expected [{x.shape[dim]}], {role}."
        )


def _check_key_lengths(x: torch.Tensor, name: str, key_lengths: torch.Tensor) -> None:
    if key_lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{PREFIX}key_lengths has dtype {key_lengths.dtype}; expected torch.int32 or torch.int64. "
            "Use key_lengths.long()."
        )
    _check_vector(
        x,
        name,
        key_lengths,
        "key_lengths",
        0,
        "three dimensions or more, [B, ..., Sq, Sk]",
        "one length for each entry of the first dimension",
    )


def _check_sink(x: torch.Tensor, sink: torch.Tensor) -> None:
    half = x.dtype in _SIXTEEN_BIT
    if not (sink.dtype == x.dtype or (half and sink.dtype == torch.float32)):
        raise TypeError(
            f"{PREFIX}sink has dtype {sink.dtype} for x of dtype {x.dtype}; expected {x.dtype}"
            f"{' or torch.float32' if half else ''}. Use sink.to(x.dtype)."
        )
    _check_vector(
        x,
        "x",
        sink,
        "sink",
        -3,
        "three dimensions or more, [..., H, Sq, Sk]",
        "one logit for each head, an entry of dimension -3",
    )


def check_scale(scale: float) -> None:
    """Raise ValueError unless the argument is finite."""
    if not isinstance(scale, torch.SymFloat) and not math.isfinite(scale):
        raise ValueError(
            f"{PREFIX}scale is {number(scale)}; expected a finite number. Check how it is computed, for example "
            "d_k ** -0.5."
        )


def check_window(window: int | None) -> None:
    """Raise ValueError unless the argument is None or a number of columns."""
    if window is not None and not _holds(window >= 1, True):
        raise ValueError(
            f"{PREFIX}window is {window}; expected at least 1, the number of columns from the diagonal back, that one "
            "included. Use window=None for no window."
        )


def _check_options(
    x: torch.Tensor, name: str, scale: float, window: int | None, key_lengths: torch.Tensor | None
) -> None:
    check_scale(scale)
    # A symbolic scale has no value yet: the kernel that finally runs checks it.
    if not isinstance(scale, torch.SymFloat) and x.dtype != torch.float64 and abs(scale) > _FLOAT32_MAX:
        raise ValueError(
            f"{PREFIX}scale is {number(scale)}; expected a number in the range of float32, in which scores of dtype "
            f"{x.dtype} are computed. Use float64 scores or a smaller scale."
        )
    check_window(window)
    if key_lengths is not None:
        _check_key_lengths(x, name, key_lengths)


def _broadcasts(x: torch.Tensor, mask: torch.Tensor) -> bool:
    if mask.dim() > x.dim():
        return False
    x_shape = list(x.shape)
    if is_per_sample(x, mask):
        del x_shape[1]
    pairs = zip(reversed(mask.shape), reversed(x_shape), strict=False)
    return all(_holds(mask_size == 1, False) or _holds(mask_size == x_size, True) for mask_size, x_size in pairs)


def _check_mask(x: torch.Tensor, mask: torch.Tensor) -> None:
    if mask.device != x.device:
        raise ValueError(
            f"{PREFIX}mask is on {mask.device}; expected {x.device}, the device of x. Use mask.to(x.device)."
        )
    half = x.dtype in _SIXTEEN_BIT
    if not (mask.dtype in (torch.bool, x.dtype) or (half and mask.dtype == torch.float32)):
        integral = not (mask.dtype.is_floating_point or mask.dtype.is_complex)
        raise TypeError(
            f"{PREFIX}mask has dtype {mask.dtype} for x of dtype {x.dtype}; expected torch.bool (True = masked out) "
            f"or {x.dtype}{' or torch.float32' if half else ''}"
            f"{'. Use mask.bool() if nonzero means masked out.' if integral else '. Use mask.to(x.dtype).'}"
        )
    _check_layout(mask, "mask")
    if _holds(mask.numel() == 0, False) and _holds(x.numel() != 0, False):
        raise ValueError(
            f"{PREFIX}mask has shape {_shape(mask)} (no elements) for x of shape {_shape(x)}; expected a shape that "
            "broadcasts to x. Use mask=None for no mask."
        )
    if _broadcasts(x, mask):
        return
    if is_per_sample(x, mask):
        hint = (
            "For a mask per head use mask[None]."
            if mask.shape[0] == x.shape[1]
            else "Insert dimensions of size 1 so that it broadcasts to x."
        )
        raise ValueError(
            f"{PREFIX}mask has shape {_shape(mask)} for x of shape {_shape(x)}; a 3-D mask for 4-D x is per sample, "
            f"expected [{x.shape[0]} or 1, {x.shape[2]} or 1, {x.shape[3]} or 1]. {hint}"
        )
    padding = (
        x.dim() == 4
        and mask.dim() == 2
        and _holds(mask.shape[0] == x.shape[0], False)
        and _holds(mask.shape[1] == x.shape[3], False)
    )
    hint = (
        "For a mask of keys, [B, Sk], use mask[:, None, None, :]."
        if padding
        else "Make each of its trailing dimensions equal to x's or 1."
    )
    raise ValueError(
        f"{PREFIX}mask has shape {_shape(mask)} for x of shape {_shape(x)}; expected a shape that broadcasts to x "
        f"without enlarging it. {hint}"
    )


def check_forward(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    window: int | None,
    key_lengths: torch.Tensor | None,
    sink: torch.Tensor | None,
) -> None:
    """Raise TypeError, ValueError or NotImplementedError unless the arguments are those of a forward call."""
    _check_element(x, "x")
    _check_options(x, "x", scale, window, key_lengths)
    if sink is not None:
        _check_sink(x, sink)
    if mask is not None:
        _check_mask(x, mask)


def check_dropout(dropout_p: float) -> None:
    """Raise ValueError unless the argument is a probability."""
    # A symbolic one has no value yet: the kernel that finally runs checks it.
    if not isinstance(dropout_p, torch.SymFloat) and not 0.0 <= dropout_p <= 1.0:
        raise ValueError(
            f"{PREFIX}dropout_p is {number(dropout_p)}; expected a probability, 0 <= dropout_p <= 1. Use 0 for no "
            "dropout."
        )


def check_in_place_dropout(dropout_p: float, *tensors: torch.Tensor | None) -> None:
    """Raise NotImplementedError where the in-place form with dropout would need a gradient."""
    if any(
        (torch.is_grad_enabled() and tensor.requires_grad)
        or torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
        if tensor is not None
    ):
        raise NotImplementedError(
            f"{PREFIX}dropout_p is {number(dropout_p)} for scaled_mask_softmax_ where a gradient is needed; expected "
            "0, as the gradient needs the probabilities before dropout. Use scaled_mask_softmax."
        )


def check_keep(x: torch.Tensor, keep: torch.Tensor) -> None:
    """Raise ValueError unless `keep` says of each cell of x whether dropout keeps it."""
    if keep.device != x.device or keep.dtype != torch.bool or keep.shape != x.shape:
        raise ValueError(
            f"{PREFIX}keep has shape {_shape(keep)} and dtype {keep.dtype} on {keep.device}; expected what "
            "dropout_keep returns for x."
        )


def check_random_state(x: torch.Tensor, state: torch.Tensor) -> None:
    """Raise ValueError unless `state` is a seed and an offset beside x."""
    if state.device != x.device or state.dtype != torch.int64 or list(state.shape) != [2] or state.stride(0) != 1:
        raise ValueError(
            f"{PREFIX}state has shape {_shape(state)} and dtype {state.dtype} on {state.device}; expected what "
            "scaled_mask_softmax.dropout_with_y returns."
        )


def _storage_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    offset = int(tensor.storage_offset())
    return offset * tensor.element_size(), (offset + last + 1) * tensor.element_size()


def _may_overlap_itself(x: torch.Tensor) -> bool:
    extent = 0
    dims = [(stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    for stride, size in sorted(dims):
        if stride <= extent:
            return True
        extent += stride * (size - 1)
    return False


def check_in_place(
    x: torch.Tensor, mask: torch.Tensor | None, key_lengths: torch.Tensor | None, sink: torch.Tensor | None
) -> None:
    """Raise ValueError where elements of x may share memory with one another or with another argument."""
    if x.numel() == 0:
        return
    if _may_overlap_itself(x):
        raise ValueError(
            f"{PREFIX}x has shape {_shape(x)} and strides {list(x.stride())}, so elements may share memory; expected "
            "separate memory for each, as scaled_mask_softmax_ overwrites x. Use x.contiguous() or "
            "scaled_mask_softmax."
        )
    for name, other in (("mask", mask), ("key_lengths", key_lengths), ("sink", sink)):
        if other is None or other.untyped_storage()._cdata != x.untyped_storage()._cdata:
            continue
        x_begin, x_end = _storage_bytes(x)
        begin, end = _storage_bytes(other)
        if begin < x_end and x_begin < end:
            raise ValueError(
                f"{PREFIX}{name} may share memory with x; expected separate memory, as scaled_mask_softmax_ "
                f"overwrites x. Use {name}.clone() or scaled_mask_softmax."
            )


def check_backward(
    grad: torch.Tensor, y: torch.Tensor, scale: float, window: int | None, key_lengths: torch.Tensor | None
) -> None:
    """Raise TypeError, ValueError or NotImplementedError unless the arguments are those of a backward call."""
    _check_element(y, "y")
    _check_options(y, "y", scale, window, key_lengths)
    if grad.device != y.device:
        raise ValueError(
            f"{PREFIX}grad is on {grad.device}; expected {y.device}, the device of y. Use grad.to(y.device)."
        )
    _check_layout(grad, "grad")
    if grad.dtype != y.dtype:
        raise TypeError(
            f"{PREFIX}grad has dtype {grad.dtype}; expected {y.dtype}, the dtype of y. Use grad.to(y.dtype)."
        )
    if grad.shape != y.shape:
        raise ValueError(
            f"{PREFIX}grad has shape {_shape(grad)}; expected {_shape(y)}, the shape of y. Use grad.expand_as(y) if "
            "it broadcasts."
        )
