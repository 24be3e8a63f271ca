"""The operator in plain torch operators: for devices without a native kernel, and for wheels without the library.

Differentiable by torch, any number of times and in either mode. The semantics are those of
:func:`scaled_mask_softmax.scaled_mask_softmax`; memory is that of several tensors of x's size.
"""

from __future__ import annotations

import torch

from . import _checks


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _aligned_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return mask.unsqueeze(1) if _checks.is_per_sample(x, mask) else mask


def _outside_band(x: torch.Tensor, is_causal: bool, diagonal: int) -> torch.Tensor | None:
    """The cells excluded by position, as a bool tensor ``[Sq, Sk]`` (``[Sk]`` for a row); None where there are none."""
    if not is_causal:
        return None
    queries = x.shape[-2] if x.dim() >= 2 else 1
    columns = x.shape[-1]
    # Past these bounds nothing, or everything, is excluded; comparing clamped values cannot overflow.
    diagonal = max(-queries - 1, min(diagonal, columns))
    row = torch.arange(queries, device=x.device).unsqueeze(-1)
    column = torch.arange(columns, device=x.device)
    outside = column > row + diagonal
    return outside if x.dim() >= 2 else outside.squeeze(0)


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
    scores = x.to(_accumulate_dtype(x.dtype)) * scale
    excluded = _outside_band(x, is_causal, diagonal)
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
    # A dead row goes through the softmax as zeros, so that neither it nor its gradient is ever NaN.
    dead = (scores == float("-inf")).all(-1, keepdim=True)
    y = torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0).to(x.dtype)
    # A cell of probability 0 passes no gradient, whatever arrives there.
    return y.masked_fill(y == 0, 0.0).contiguous()


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
    probability = y.to(_accumulate_dtype(y.dtype))
    arriving = grad.to(probability.dtype).masked_fill(y == 0, 0.0)
    outside = _outside_band(y, is_causal, diagonal)
    if outside is not None:
        probability = probability.masked_fill(outside, 0.0)
        arriving = arriving.masked_fill(outside, 0.0)
    total = (arriving * probability).sum(-1, keepdim=True)
    dx = (probability * (arriving - total) * scale).masked_fill(probability == 0, 0.0)
    return dx.to(y.dtype).contiguous()
