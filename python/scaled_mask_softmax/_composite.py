"""The operator in plain torch operators: for devices without a native kernel, and for wheels without the library.

Differentiable any number of times and in either mode. The semantics are those of
:func:`scaled_mask_softmax.scaled_mask_softmax`; memory is that of several tensors of x's size.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from . import _checks


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _aligned_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return mask.unsqueeze(1) if _checks.is_per_sample(x, mask) else mask


def _excluded_by_position(
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


def _probabilities(x: torch.Tensor, mask: torch.Tensor | None, scale: float, *options: Any) -> torch.Tensor:
    scores = x.to(_accumulate_dtype(x.dtype)) * scale
    excluded = _excluded_by_position(x, *options)
    if mask is not None:
        mask = _aligned_mask(x, mask)
        if mask.dtype == torch.bool:
            excluded = mask if excluded is None else excluded | mask
        else:
            scores = scores + mask.to(scores.dtype)
    if excluded is not None:
        scores = scores.masked_fill(excluded, float("-inf"))
    if x.numel() == 0:
        return scores.to(x.dtype).contiguous()
    dead = (scores == float("-inf")).all(-1, keepdim=True)
    # Filled last, so that the result is a tensor of its own: torch.compile of torch 2.11 returns all intermediate
    # tensors of an autograd.Function, and loses the gradient where one of them, before a conversion that changed
    # nothing, is the result itself.
    return torch.softmax(scores, -1).to(x.dtype).contiguous().masked_fill(dead, 0.0)


def _derivative(arriving: torch.Tensor, y: torch.Tensor, scale: float, *options: Any) -> torch.Tensor:
    """The symmetric Jacobian ``scale * (diag(y) - y y^T)`` of each row, times `arriving`."""
    probability = y.to(_accumulate_dtype(y.dtype))
    arriving = arriving.to(probability.dtype)
    # Selected, not multiplied, so that a NaN that arrives where the derivative is zero stays out.
    zero = y == 0
    outside = _excluded_by_position(y, *options)
    if outside is not None:
        zero = zero | outside
    total = (arriving.masked_fill(zero, 0.0) * probability.masked_fill(zero, 0.0)).sum(-1, keepdim=True)
    return (probability * (arriving - total) * scale).masked_fill(zero, 0.0).to(y.dtype).contiguous()


class _Function(torch.autograd.Function):
    """Saves y and key_lengths, and differentiates with the formula of the native kernels.

    torch's own derivative of the steps above would let a NaN in the gradient of one cell reach the cells of
    probability 0 beside it, and would keep several tensors of x's size.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor,
        mask: torch.Tensor | None,
        key_lengths: torch.Tensor | None,
        scale: float,
        is_causal: bool,
        diagonal: int,
        window: int | None,
    ) -> torch.Tensor:
        return _probabilities(x, mask, scale, is_causal, diagonal, window, key_lengths)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.options = inputs[3:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output, inputs[2])
        ctx.save_for_forward(output, inputs[2])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        y, key_lengths = ctx.saved_tensors
        dx = None if grads[0] is None else _derivative(grads[0], y, *ctx.options, key_lengths)
        return dx, None, None, None, None, None, None


class _ForwardModeFunction(_Function):
    """Apart, as torch.compile refuses functions with a jvp."""

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> torch.Tensor:
        if tangents[0] is None or tangents[1] is not None:
            raise NotImplementedError(
                "scaled_mask_softmax: mask has a tangent, which is not supported yet; expected a mask without one. "
                "Add the mask to x beforehand."
            )
        y, key_lengths = ctx.saved_tensors
        return _derivative(tangents[0], y, *ctx.options, key_lengths)


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
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            "scaled_mask_softmax: mask requires a gradient, which is not supported yet; expected a mask with "
            "requires_grad=False. Use mask.detach(), or add the mask to x beforehand."
        )
    function = _Function if torch.compiler.is_compiling() else _ForwardModeFunction
    return cast(torch.Tensor, function.apply(x, mask, key_lengths, scale, is_causal, diagonal, window))


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
        _checks.check_in_place(x, mask)
    x.copy_(forward(x, mask, scale, is_causal, diagonal=diagonal, window=window, key_lengths=key_lengths, sink=sink))


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
    return _derivative(grad, y, scale, is_causal, diagonal, window, key_lengths)
