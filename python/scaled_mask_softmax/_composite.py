"""The operator in plain torch operators: for devices without a native kernel, and for wheels without the library.

Differentiable any number of times and in either mode. The semantics are those of
:func:`scaled_mask_softmax.scaled_mask_softmax`; memory is that of several tensors of x's size.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from . import _checks


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the numbers that rows are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _aligned_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return mask.unsqueeze(1) if _checks.is_per_sample(x, mask) else mask


def excluded_by_position(
    x: torch.Tensor, is_causal: bool, diagonal: int, window: int | None, key_lengths: torch.Tensor | None
) -> torch.Tensor | None:
    """The cells that is_causal, window and key_lengths exclude, as a bool tensor that broadcasts to x; None if none."""
    if not is_causal and window is None and key_lengths is None:
        return None
    columns = x.shape[-1]
    column = torch.arange(columns, device=x.device)
    outside = None
    if key_lengths is not None:
        outside = column >= key_lengths.reshape(-1, *([1] * (x.dim() - 1)))
    if is_causal or window is not None:
        queries = x.shape[-2] if x.dim() >= 2 else 1
        row = torch.arange(queries, device=x.device).unsqueeze(-1)
        # Past these bounds nothing, or everything, is excluded; comparing clamped values cannot overflow.
        last = max(-queries - 1, min(diagonal, columns))
        band = column > row + last if is_causal else None
        if window is not None:
            before = column <= row + max(-queries - 1, min(diagonal - window, columns))
            band = before if band is None else band | before
        if band is not None:
            band = band if x.dim() >= 2 else band.squeeze(0)
            outside = band if outside is None else outside | band
    return outside


def _probabilities(
    x: torch.Tensor, mask: torch.Tensor | None, sink: torch.Tensor | None, scale: float, *options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The probabilities, and those of the sink, ``[..., Sq]``, where there is one."""
    scores = x.to(accumulate_dtype(x.dtype)) * scale
    excluded = excluded_by_position(x, *options)
    if mask is not None:
        mask = _aligned_mask(x, mask)
        if mask.dtype == torch.bool:
            excluded = mask if excluded is None else excluded | mask
        else:
            scores = scores + mask.to(scores.dtype)
    if excluded is not None:
        scores = scores.masked_fill(excluded, float("-inf"))
    columns = x.shape[-1]
    if sink is not None:
        logits = sink.to(scores.dtype).reshape(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, logits], -1)
    elif x.numel() == 0:
        return scores.to(x.dtype).contiguous(), None
    dead = (scores == float("-inf")).all(-1, keepdim=True)
    full = torch.softmax(scores, -1)
    # Filled last, so that the result is a tensor of its own: torch.compile of torch 2.11 returns all intermediate
    # tensors of an autograd.Function, and loses the gradient where one of them, before a conversion that changed
    # nothing, is the result itself.
    y = full[..., :columns].to(x.dtype).contiguous().masked_fill(dead, 0.0)
    return y, None if sink is None else full[..., columns].masked_fill(dead[..., 0], 0.0)


def _changes(
    arriving: torch.Tensor,
    sink_arriving: torch.Tensor | None,
    y: torch.Tensor,
    sink_probability: torch.Tensor | None,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The symmetric Jacobian ``diag(p) - p p^T`` of each row times what arrives, p being y and its sink's probability.

    Returns its part of x's shape, and each row's ``sum(p * arriving)``.
    """
    probability = y.to(accumulate_dtype(y.dtype))
    arriving = arriving.to(probability.dtype)
    # Selected, not multiplied, so that a NaN that arrives where the derivative is zero stays out.
    zero = y == 0
    outside = excluded_by_position(y, *options)
    if outside is not None:
        zero = zero | outside
    total = (arriving.masked_fill(zero, 0.0) * probability.masked_fill(zero, 0.0)).sum(-1)
    if sink_arriving is not None and sink_probability is not None:
        total = total + sink_arriving * sink_probability
    return (probability * (arriving - total.unsqueeze(-1))).masked_fill(zero, 0.0), total


def _aligned_shape(x: torch.Tensor, shape: tuple[int, ...]) -> list[int]:
    """Of a mask, with as many dimensions as x."""
    if x.dim() == 4 and len(shape) == 3:
        return [shape[0], 1, *shape[1:]]
    return [1] * (x.dim() - len(shape)) + list(shape)


def _sum_over_rows(values: torch.Tensor, sink_shape: tuple[int, ...]) -> torch.Tensor:
    """Of ``[..., H, Sq]``, the sum for each head."""
    return values.sum_to_size(*sink_shape, 1).squeeze(-1)


class _Function(torch.autograd.Function):
    """Saves its results and key_lengths, and differentiates with the formula of the native kernels.

    torch's own derivative of the steps above would let a NaN in the gradient of one cell reach the cells of
    probability 0 beside it, and would keep several tensors of x's size.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor,
        mask: torch.Tensor | None,
        sink: torch.Tensor | None,
        key_lengths: torch.Tensor | None,
        keep: torch.Tensor | None,
        dropout_p: float,
        scale: float,
        is_causal: bool,
        diagonal: int,
        window: int | None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """y, the sink's probability if there is a sink, and the result of dropout if there are cells to keep."""
        y, sink_probability = _probabilities(x, mask, sink, scale, is_causal, diagonal, window, key_lengths)
        dropped = None if keep is None else torch.where(keep, y * dropout_factor(dropout_p), 0.0)
        results = tuple(result for result in (y, sink_probability, dropped) if result is not None)
        return results if len(results) > 1 else y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, mask, sink, key_lengths, keep, dropout_p, ctx.scale, *options = inputs
        ctx.options = options
        ctx.factor = dropout_factor(dropout_p)
        ctx.mask = None if mask is None else (tuple(mask.shape), mask.dtype)
        ctx.sink = None if sink is None else (tuple(sink.shape), sink.dtype)
        ctx.set_materialize_grads(False)
        y, *others = output if isinstance(output, tuple) else (output,)
        saved = (y, None if sink is None else others[0], key_lengths, keep)
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        y, sink_probability, key_lengths, keep = ctx.saved_tensors
        grad = grads[0]
        sink_grad = None if ctx.sink is None else grads[1]
        # What arrives, at y and its sink, and what multiplies its part of the gradient: not what arrives itself, which
        # may be near the largest number of its type.
        parts: list[tuple[torch.Tensor, torch.Tensor | None, float]] = []
        if grad is not None or sink_grad is not None:
            parts.append((torch.zeros_like(y) if grad is None else grad, sink_grad, 1.0))
        if keep is not None and grads[-1] is not None:
            parts.append((torch.where(keep, grads[-1], 0.0), None, ctx.factor))
        dx = dmask = dsink = None

        def added(sum_: torch.Tensor | None, part: torch.Tensor, factor: float) -> torch.Tensor:
            part = part if factor == 1.0 else part * factor
            return part if sum_ is None else sum_ + part

        for arriving, sink_arriving, factor in parts:
            change, total = _changes(arriving, sink_arriving, y, sink_probability, *ctx.options, key_lengths)
            dx = added(dx, (change * scale_with_dropout(ctx.scale, factor, y.dtype)).to(y.dtype), 1.0)
            if ctx.mask is not None and ctx.needs_input_grad[1]:
                shape = ctx.mask[0]
                dmask = added(dmask, change.sum_to_size(_aligned_shape(y, shape)).reshape(shape), factor)
            if ctx.sink is not None:
                of_rows = -total if sink_arriving is None else sink_arriving - total
                dsink = added(dsink, _sum_over_rows(sink_probability * of_rows, ctx.sink[0]), factor)
        dmask = None if dmask is None else dmask.to(ctx.mask[1])
        dsink = None if dsink is None else dsink.to(ctx.sink[1])
        return dx, dmask, dsink, None, None, None, None, None, None, None


class _ForwardModeFunction(_Function):
    """Apart, as torch.compile refuses functions with a jvp."""

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        of_x, of_mask, of_sink = tangents[:3]
        y, sink_probability, key_lengths, keep = ctx.saved_tensors
        arriving = torch.zeros_like(y) if of_x is None else of_x.to(accumulate_dtype(y.dtype)) * ctx.scale
        if of_mask is not None:
            arriving = arriving + _aligned_mask(y, of_mask)
        sink_arriving = None if of_sink is None else of_sink.to(accumulate_dtype(y.dtype)).unsqueeze(-1)
        change, total = _changes(arriving, sink_arriving, y, sink_probability, *ctx.options, key_lengths)
        of_y = change.to(y.dtype)
        results = [of_y]
        if sink_probability is not None:
            results.append(sink_probability * ((0.0 if sink_arriving is None else sink_arriving) - total))
        if keep is not None:
            results.append(torch.where(keep, of_y * ctx.factor, 0.0))
        return tuple(results) if len(results) > 1 else of_y


def _function() -> type[_Function]:
    return _Function if torch.compiler.is_compiling() else _ForwardModeFunction


def forward(
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
    """Return the probabilities of x; arguments, result and errors as in ``scaled_mask_softmax``."""
    _checks.check_forward(x, mask, scale, window, key_lengths, sink)
    y = _function().apply(x, mask, sink, key_lengths, None, 0.0, scale, is_causal, diagonal, window)
    return cast(torch.Tensor, y if sink is None else y[0])


def forward_with_sink_probability(
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
    """Return the probabilities of x and those of each row's sink, ``[..., Sq]``; not differentiable."""
    _checks.check_forward(x, mask, scale, window, key_lengths, sink)
    with torch.no_grad():
        y, sink_probability = _probabilities(x, mask, sink, scale, is_causal, diagonal, window, key_lengths)
    return y, cast(torch.Tensor, sink_probability)


def forward_in_place(
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
    """Overwrite x with its probabilities; arguments and errors as in ``scaled_mask_softmax_``."""
    _checks.check_forward(x, mask, scale, window, key_lengths, sink)
    # Storages cannot be compared while torch.compile traces, nor need they be: the result is whole before it is copied.
    if not torch.compiler.is_compiling():
        _checks.check_in_place(x, mask, key_lengths, sink)
    x.copy_(forward(x, mask, scale, is_causal, diagonal=diagonal, window=window, key_lengths=key_lengths, sink=sink))


def forward_in_place_with_sink_probability(
    x: torch.Tensor, mask: torch.Tensor | None, *options: Any, sink: torch.Tensor, **keywords: Any
) -> torch.Tensor:
    """Overwrite x with its probabilities and return those of each row's sink; not differentiable."""
    y, sink_probability = forward_with_sink_probability(x, mask, *options, sink=sink, **keywords)
    _checks.check_in_place(x, mask, keywords.get("key_lengths"), sink)
    x.copy_(y)
    return sink_probability


def dropout_factor(dropout_p: float) -> float:
    """Of the probabilities that are kept."""
    return 0.0 if dropout_p >= 1.0 - 2.0**-33 else 1.0 / (1.0 - dropout_p)


def scale_with_dropout(scale: float, factor: float, dtype: torch.dtype) -> float:
    """Of a gradient, finite in the type that it is computed in, so that 0 times it is 0."""
    if factor == 1.0:
        return scale
    largest = torch.finfo(accumulate_dtype(dtype)).max
    return max(-largest, min(scale * factor, largest))


def forward_dropout(
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
    """Return the probabilities of x with dropout, by random numbers of torch's own operators; differentiable."""
    _checks.check_forward(x, mask, scale, window, key_lengths, sink)
    _checks.check_dropout(dropout_p)
    keep = torch.rand_like(x, dtype=torch.float32, memory_format=torch.contiguous_format) >= dropout_p
    results = _function().apply(x, mask, sink, key_lengths, keep, dropout_p, scale, is_causal, diagonal, window)
    return cast(torch.Tensor, results[-1])


def forward_in_place_dropout(
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
    """Overwrite x with its probabilities with dropout; where no gradient is needed."""
    _checks.check_in_place_dropout(dropout_p, x, mask, sink)
    _checks.check_forward(x, mask, scale, window, key_lengths, sink)
    _checks.check_dropout(dropout_p)
    if not torch.compiler.is_compiling():
        _checks.check_in_place(x, mask, key_lengths, sink)
    x.copy_(
        forward_dropout(
            x,
            mask,
            scale,
            is_causal,
            diagonal=diagonal,
            window=window,
            key_lengths=key_lengths,
            sink=sink,
            dropout_p=dropout_p,
        )
    )


# The operators with dropout, for devices without a kernel: the same pattern for a state as the kernels have.


def dropout_keep_of_state(x: torch.Tensor, state: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """The cells of x's shape that dropout keeps, as bool: Philox4x32-10 in 64-bit integers, see ``src/philox.h``."""
    _checks.check_dropout(dropout_p)
    _checks.check_random_state(x, state)
    columns = x.shape[-1]
    fours = -(-columns // 4)
    low = 2**32 - 1
    seed, offset = state[0], state[1] >> 2
    number = torch.arange(x.numel() // max(columns, 1) * fours, device=x.device)
    words = [offset & low, offset >> 32 & low, number & low, number >> 32 & low]
    key = [seed & low, seed >> 32 & low]
    for _ in range(10):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            (second >> 32 & low) ^ words[1] ^ key[0],
            second & low,
            (first >> 32 & low) ^ words[3] ^ key[1],
            first & low,
        ]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    numbers = torch.stack(words, -1).reshape(*x.shape[:-1], 4 * fours)[..., :columns]
    return numbers >= min(int(dropout_p * 2**32 + 0.5), low)


def _random_state(x: torch.Tensor) -> torch.Tensor:
    return torch.randint(torch.iinfo(torch.int64).max, (2,), device=x.device)


def dropout_keep(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """The same, drawn anew."""
    return dropout_keep_of_state(x, _random_state(x), dropout_p)


def forward_dropout_with_y(
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
    with_sink_probability: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the result of dropout, the probabilities before it, its state, and the sink's; not differentiable."""
    _checks.check_forward(x, mask, scale, window, key_lengths, sink)
    _checks.check_dropout(dropout_p)
    with torch.no_grad():
        y, sink_probability = _probabilities(x, mask, sink, scale, is_causal, diagonal, window, key_lengths)
        state = _random_state(x)
        keep = dropout_keep_of_state(y, state, dropout_p)
        result = torch.where(keep, y * dropout_factor(dropout_p), 0.0)
    if sink_probability is None or not with_sink_probability:
        sink_probability = x.new_empty(0, dtype=accumulate_dtype(x.dtype))
    return result, y, state, sink_probability


def forward_dropout_alone(*arguments: Any, **options: Any) -> torch.Tensor:
    """The first of these."""
    return forward_dropout_with_y(*arguments, **options)[0]


def forward_in_place_dropout_alone(
    x: torch.Tensor, mask: torch.Tensor | None = None, *scale: Any, **options: Any
) -> None:
    """The same, written into x."""
    result = forward_dropout_alone(x, mask, *scale, **options)
    _checks.check_in_place(x, mask, options.get("key_lengths"), options.get("sink"))
    x.copy_(result)


def backward_dropout(
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
    """As backward_with_dots, from the gradient of the result of dropout; dots without the factor 1 / (1 - p)."""
    _checks.check_backward(grad, y, scale, window, key_lengths)
    kept = grad.masked_fill(~dropout_keep_of_state(y, state, dropout_p), 0.0)
    change, dots = _changes(kept, None, y, None, is_causal, diagonal, window, key_lengths)
    scale = scale_with_dropout(scale, dropout_factor(dropout_p), y.dtype)
    dx = (change * scale).to(y.dtype).contiguous() if with_dx else y.new_empty(0)
    return dx, dots if with_dots else dots.new_empty(0)


def mask_backward_dropout(
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
    """As mask_backward, from the gradient of the result of dropout."""
    _checks.check_backward(grad, y, 1.0, window, key_lengths)
    kept = grad.masked_fill(~dropout_keep_of_state(y, state, dropout_p), 0.0)
    change, _ = _changes(kept, None, y, None, is_causal, diagonal, window, key_lengths)
    return (change * dropout_factor(dropout_p)).sum_to_size(size).to(dtype).contiguous()


def backward(
    grad: torch.Tensor,
    y: torch.Tensor,
    scale: float,
    is_causal: bool,
    *,
    diagonal: int = 0,
    window: int | None = None,
    key_lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of x from the probabilities y and their gradient."""
    _checks.check_backward(grad, y, scale, window, key_lengths)
    change, _ = _changes(grad, None, y, None, is_causal, diagonal, window, key_lengths)
    return (change * scale).to(y.dtype).contiguous()


def backward_with_dots(
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
    """Return the gradient of x (without elements unless with_dx), and each row's ``sum(grad * y)``, ``[..., Sq]``."""
    _checks.check_backward(grad, y, scale, window, key_lengths)
    change, dots = _changes(grad, None, y, None, is_causal, diagonal, window, key_lengths)
    return (change * scale).to(y.dtype).contiguous() if with_dx else y.new_empty(0), dots


def mask_backward(
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
    """Return the gradient of a float mask, of y's shape with size 1 where the mask broadcasts."""
    _checks.check_backward(grad, y, 1.0, window, key_lengths)
    change, _ = _changes(grad, None, y, None, is_causal, diagonal, window, key_lengths)
    return change.sum_to_size(size).to(dtype).contiguous()
