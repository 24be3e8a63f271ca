"""The operator as functions. The docstring of :func:`scaled_mask_softmax` is the source of its semantics."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from . import _build, _checks, _composite
from ._checks import PREFIX

if TYPE_CHECKING:
    from typing import TypeGuard

    from torch.distributed.tensor import DTensor

_forward: Callable[..., torch.Tensor]
_forward_in_place: Callable[..., None]
_forward_dropout: Callable[..., torch.Tensor]
_forward_in_place_dropout: Callable[..., None]
if _build.NATIVE:
    _forward = torch.ops.scaled_mask_softmax.scaled_mask_softmax.default
    _forward_in_place = torch.ops.scaled_mask_softmax.scaled_mask_softmax_.default
    _forward_dropout = torch.ops.scaled_mask_softmax.scaled_mask_softmax.dropout
    _forward_in_place_dropout = torch.ops.scaled_mask_softmax.scaled_mask_softmax_.dropout
else:
    _forward = _composite.forward
    _forward_in_place = _composite.forward_in_place
    _forward_dropout = _composite.forward_dropout
    _forward_in_place_dropout = _composite.forward_in_place_dropout

# What torch's object for an operator calls in the end, where it has that: its __call__ is a tenth of a small call.
_forward_directly: Callable[..., torch.Tensor] = getattr(_forward, "_op", _forward)

_INT64_LIMIT = 2**63
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _is_sharded(x: object) -> TypeGuard[DTensor]:
    """Whether x is a DTensor, without importing what defines it."""
    return type(x).__name__ == "DTensor" and type(x).__module__.startswith("torch.distributed.")


def _is_tensor(value: object) -> bool:
    """Tensors, and what stands for one while a program is traced, such as torch.fx.Proxy."""
    return isinstance(value, torch.Tensor) or hasattr(type(value), "__torch_function__")


def _kind(value: object) -> str:
    """Such as `None`, `a str` or `an int`."""
    name = "None" if value is None else type(value).__name__
    return name if value is None else f"{'an' if name[0] in 'aeio' else 'a'} {name}"


def _check_tensor_types(x: object, **optional: object) -> None:
    """Raise for what the operator's own parser would reject less clearly."""
    if not _is_tensor(x):
        raise TypeError(f"{PREFIX}x is {_kind(x)}; expected a torch.Tensor. Use torch.as_tensor(x).")
    for name, tensor in optional.items():
        if tensor is not None and not _is_tensor(tensor):
            # Where others take the scale or is_causal second; as a tensor it would be a mask, which changes nothing.
            misplaced = name == "mask" and isinstance(tensor, (bool, int, float))
            use = "scale for a factor, or is_causal" if misplaced else f"torch.as_tensor({name})"
            raise TypeError(f"{PREFIX}{name} is {_kind(tensor)}; expected a torch.Tensor or None. Use {use}.")


def check_option_types(
    scale: object = 1.0, is_causal: object = False, diagonal: object = 0, window: object = None, dropout_p: object = 0.0
) -> None:
    """Raise for what the operator's own parser would convert, or reject less clearly."""
    if isinstance(scale, torch.Tensor):
        raise TypeError(f"{PREFIX}scale is a torch.Tensor; expected a Python number. Use scale.item(), or scale x.")
    if isinstance(scale, bool) or not (
        isinstance(scale, (int, float, torch.SymFloat, torch.SymInt)) or _is_tensor(scale)
    ):
        use = "is_causal for a causal mask" if isinstance(scale, bool) else "float(scale)"
        if scale is None:
            use = "1.0, or d_k ** -0.5 as attention does"
        raise TypeError(f"{PREFIX}scale is {_kind(scale)}; expected a Python number. Use {use}.")
    if isinstance(scale, int) and abs(scale) > sys.float_info.max:
        raise ValueError(
            f"{PREFIX}scale is an integer of {scale.bit_length()} bits; expected a number in float's range. "
            "Check how it is computed, for example d_k ** -0.5."
        )
    if not isinstance(is_causal, (bool, torch.SymBool)):
        # With its module, as NumPy has a bool too.
        module = type(is_causal).__module__
        kind = _kind(is_causal) if module == "builtins" else f"a {module}.{type(is_causal).__qualname__}"
        raise TypeError(f"{PREFIX}is_causal is {kind}; expected a bool. Use bool(is_causal).")
    for name, number in (("diagonal", diagonal), ("window", window)):
        if name == "window" and number is None:
            continue
        # True as a window would be one of a single column.
        refused = isinstance(number, (torch.Tensor, bool))
        if refused or not (isinstance(number, (int, torch.SymInt)) or _is_tensor(number)):
            use = f"int({name})" if number is not None else "0"
            if isinstance(number, (tuple, list)):
                use = "is_causal=True, diagonal=right and window=left + right + 1 for (left, right)"
            raise TypeError(f"{PREFIX}{name} is {_kind(number)}; expected an int. Use {use}.")
        if isinstance(number, int) and not -_INT64_LIMIT <= number < _INT64_LIMIT:
            raise ValueError(f"{PREFIX}{name} is {number}; expected an integer of 64 bits. Use one within x's shape.")
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float, torch.SymFloat)):
        use = "float(dropout_p)" if dropout_p is not None else "0 for no dropout"
        raise TypeError(f"{PREFIX}dropout_p is {_kind(dropout_p)}; expected a Python number. Use {use}.")
    if isinstance(dropout_p, int) and not 0 <= dropout_p <= 1:  # one that no float holds would not reach the operator
        raise ValueError(
            f"{PREFIX}dropout_p is {dropout_p}; expected a probability, 0 <= dropout_p <= 1. Use 0 for no dropout."
        )


def scaled_mask_softmax(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    *,
    diagonal: int = 0,
    window: int | None = None,
    key_lengths: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Turn attention scores into probabilities: scale, mask, softmax along the last dimension.

    With i the index along dim -2 of x and j the index along dim -1, computed in float32 (float64 for float64 x):

    1. ``s = x * scale``; a float mask is then added and not scaled: ``s = s + mask``.
    2. A cell is *excluded* where a bool mask is **True**, where ``is_causal`` and ``j > i + diagonal``, where a
       ``window`` is given and ``j <= i + diagonal - window``, or where ``j >= key_lengths[b]``. A cell is live if none
       of these excludes it. An excluded cell counts as -inf whatever x holds there, NaN included, and gets zero
       gradient.
    3. ``y = exp(s - m) / (sum(exp(s - m)) + exp(sink[h] - m))`` over each row, m the largest of s and ``sink[h]``; the
       terms of the sink only if one is given.
    4. A row whose ``s`` is -inf everywhere gives zeros, with zero gradients, wherever the -inf came from.
    5. With ``dropout_p`` = p > 0 each cell of y, in x's dtype, is kept with probability ``1 - p``, on its own, and then
       divided by ``1 - p``; the others become 0.

    Args:
        x: scores ``[..., Sq, Sk]``, usually ``[B, H, Sq, Sk]``, of rank 1 (one row, Sq = 1) or more; float16, bfloat16,
            float32 or float64. Any strides: rows are read in place; only a last dimension that is not contiguous costs
            a copy. Empty tensors give empty results.
        mask: None, or a tensor on x's device that broadcasts to x by torch's rules without enlarging it, read through
            its strides, never expanded or copied. For 4-D x a 3-D mask is per sample, ``[B or 1, Sq or 1, Sk or 1]``;
            for a mask per head pass ``mask[None]``. A padding mask ``[B, Sk]`` is ``mask[:, None, None, :]``: passed as
            it is, it broadcasts as ``[Sq, Sk]`` without an error where B happens to be Sq.
            A bool mask is **True where masked out**, as in ``Tensor.masked_fill`` and ``torch.nn.MultiheadAttention``;
            ``torch.nn.functional.scaled_dot_product_attention`` means the opposite: pass ``mask=~sdpa_mask``.
            A float mask is added; its dtype is x's, or float32 for float16 and bfloat16 x. Large finite values such as
            ``torch.finfo(dtype).min`` are ordinary numbers: a row of them is a uniform row. A float mask of zeros and
            ones adds 0 and 1: use ``mask.bool()``. ``mask.to(dtype) * -inf`` is NaN where mask is False.
        scale: any finite Python number, zero and negative included, never rounded to x's dtype; in float32's range
            unless x is float64. For attention pass ``scale=d_k**-0.5``.
        is_causal: exclude the cells with ``j > i + diagonal``.
        diagonal: shifts the causal boundary, as in ``torch.tril``. The default is top-left, as ``is_causal`` of
            ``scaled_dot_product_attention``; decoding with a cache is ``diagonal=Sk - Sq``. No effect without
            ``is_causal`` or ``window``.
        window: None, or how many columns a row sees back from its diagonal, that one included; at least 1. One-sided:
            columns past the diagonal stay unless ``is_causal``.
        key_lengths: None, or int32 or int64 of shape ``[B]``, one length for each entry of the first dimension of x,
            whose rank is then 3 or more. Lengths are clamped to [0, Sk] and read on x's device, without waiting for it.
            Columns past a length are not read.
        sink: None, or logits of shape ``[H]``, one for each entry of dimension -3 of x, whose rank is then 3 or more;
            its dtype is x's, or float32 for float16 and bfloat16 x. A sink takes probability without a column of its
            own, so a row sums to less than 1. It is neither scaled nor masked. One of NaN or +inf makes its rows NaN,
            those that point 4 speaks of too.
        dropout_p: probability that a cell is dropped, in [0, 1], to the nearest multiple of ``2**-32``; always applied,
            so pass 0 outside of training. Random numbers are those of torch's default generator of x's device, so
            ``torch.manual_seed`` repeats them, and a captured CUDA graph draws anew in each replay. Which cells are
            kept follows from the generator's state and a cell's place in x's shape: not from dtype, strides or values.

    Returns:
        Probabilities of x's shape and dtype, contiguous, in memory of their own. A row with a NaN or +inf in a live
        cell is NaN throughout, as in ``torch.softmax``. Results are bitwise equal from run to run, and a row's bits
        follow from its own values: not from its address, strides, neighbours or the number of threads.

    Gradients:
        With g the gradient of the result, ``dx = scale * y * (g - sum(g * y))`` over each row, from y alone. A cell
        with ``y == 0`` takes part as if its g were 0, so an excluded cell's gradient is 0 whatever g holds there. In a
        row of NaN, live cells get NaN and cells excluded by ``is_causal``, ``window`` or ``key_lengths`` still get 0;
        those excluded by a bool mask get either, as y does not tell them apart. Derivatives of every order, forward
        mode and the transforms of torch.func work, but for transforms of torch.func nested over sink, which raise;
        what they need beyond the first derivative runs in plain torch operators. With dropout g becomes 0 where a cell
        was dropped and ``g / (1 - p)`` elsewhere, y being the probabilities before dropout: they are kept for backward
        beside the seed, and which cells were dropped is computed again. The gradient of sink is the sum of
        ``-p * sum(g * y)`` over the rows of its head, p being what the
        sink takes of the row; that of a float mask is the gradient of s, not scaled, summed over the dimensions in
        which the mask broadcasts.

    Raises:
        TypeError: a dtype of x, mask, key_lengths or sink that is not listed above; an argument of another type than
            its annotation's, a tensor or bool as the scale included.
        ValueError: x of rank 0; a mask that does not broadcast or is empty for a non-empty x; key_lengths or a sink of
            another shape; a tensor on another device; a scale that is not finite or not in range; a window below 1; a
            sparse layout; dropout_p outside [0, 1].
        RuntimeError: dropout within ``torch.vmap`` with ``randomness="error"``.
        NotImplementedError: an option or derivative that is not supported yet, such as dropout of a DTensor.
    """
    if not _build.NATIVE and isinstance(x, torch.Tensor):
        _build.warn_about_composite(x)
    if (
        type(x) in _PLAIN
        and (mask is None or isinstance(mask, torch.Tensor))
        and type(scale) is float
        and type(is_causal) is bool
        and type(diagonal) is int
        and diagonal == 0
        and window is None
        and key_lengths is None
        and sink is None
        and type(dropout_p) is float
        and dropout_p == 0.0
    ):
        # Arguments by keyword cost a third of a small call.
        if torch.compiler.is_dynamo_compiling():  # which traces torch's object alone
            return _forward(x, mask, scale, is_causal)
        return _forward_directly(x, mask, scale, is_causal)
    _check_tensor_types(x, mask=mask, key_lengths=key_lengths, sink=sink)
    check_option_types(scale, is_causal, diagonal, window, dropout_p)
    if _build.NATIVE and _is_sharded(x):  # plain operators bring rules of their own
        if dropout_p != 0.0:
            raise NotImplementedError(
                f"scaled_mask_softmax: dropout_p is {_checks.number(dropout_p)} for x that is a DTensor; expected 0. "
                "Apply torch.nn.functional.dropout to the result."
            )
        from . import _sharding

        return _sharding.forward(x, mask, scale, is_causal, diagonal, window, key_lengths, sink)
    options = {"diagonal": diagonal, "window": window, "key_lengths": key_lengths, "sink": sink}
    if dropout_p == 0.0:
        return _forward(x, mask, scale, is_causal, **options)
    return _forward_dropout(x, mask, scale, is_causal, **options, dropout_p=dropout_p)


def scaled_mask_softmax_(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    *,
    diagonal: int = 0,
    window: int | None = None,
    key_lengths: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Like :func:`scaled_mask_softmax`, but write the result into x and return x.

    Safe under autograd: backward needs the result only. Any strides are written back (a last dimension that is not
    contiguous costs a temporary copy).

    Raises:
        ValueError: also where elements of x may share memory with one another (an expanded tensor) or with another
            argument.
        RuntimeError: x is a leaf that requires a gradient, as for every in-place operator of torch.
        NotImplementedError: dropout where a gradient is needed, which needs the probabilities before dropout.
    """
    if not _build.NATIVE and isinstance(x, torch.Tensor):
        _build.warn_about_composite(x)
    if (
        type(x) in _PLAIN
        and (mask is None or isinstance(mask, torch.Tensor))
        and type(scale) is float
        and type(is_causal) is bool
        and type(diagonal) is int
        and diagonal == 0
        and window is None
        and key_lengths is None
        and sink is None
        and type(dropout_p) is float
        and dropout_p == 0.0
    ):
        _forward_in_place(x, mask, scale, is_causal)
        return x
    _check_tensor_types(x, mask=mask, key_lengths=key_lengths, sink=sink)
    check_option_types(scale, is_causal, diagonal, window, dropout_p)
    if _is_sharded(x):
        raise NotImplementedError(
            "scaled_mask_softmax: x of the in-place form is a DTensor; expected a plain tensor. Use "
            "scaled_mask_softmax, or x.to_local()."
        )
    options = {"diagonal": diagonal, "window": window, "key_lengths": key_lengths, "sink": sink}
    if dropout_p == 0.0:
        _forward_in_place(x, mask, scale, is_causal, **options)
    else:
        _forward_in_place_dropout(x, mask, scale, is_causal, **options, dropout_p=dropout_p)
    return x
