"""The operator over several processes: sharded scores as DTensor, and columns sharded over a process group.

DTensor: importing this module, or calling :func:`scaled_mask_softmax` with a DTensor, registers how the operators
shard. Batch, heads and any other leading dimension run without communication, and query rows too; columns sharded over
one dimension of a mesh run as :func:`context_parallel`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from . import _build, _checks, _composite
from .functional import check_option_types, scaled_mask_softmax

if _build.NATIVE:
    from . import _sharding  # noqa: F401  (registers)

__all__ = ["context_parallel"]

_PREFIX = "scaled_mask_softmax.distributed.context_parallel: "


def _aligned(tensor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A mask so that it broadcasts to x by torch's rules alone."""
    return tensor.unsqueeze(1) if x.dim() == 4 and tensor.dim() == 3 else tensor


def _log_sums(y: torch.Tensor, x: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """log(sum(exp(s))) of each row, ``[..., 1]``, from probabilities y of these columns alone.

    At the largest probability p of a row, of score s, it is s - log(p).
    """
    if y.shape[-1] == 0:
        return y.new_full((*y.shape[:-1], 1), -torch.inf)
    largest, column = y.max(-1, keepdim=True)
    score = x.gather(-1, column).to(y.dtype) * scale
    if mask is not None and mask.dtype != torch.bool:
        score = score + _aligned(mask, x).expand(x.shape).gather(-1, column).to(y.dtype)
    # A row without a live cell has no probability at all, and a row of NaN no largest one.
    return torch.where(largest == 0, -torch.inf, score - largest.log()).masked_fill(largest.isnan(), torch.nan)


class _ContextParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        sink: torch.Tensor | None,
        scale: float,
        options: dict[str, Any],
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        # 16-bit probabilities would be rounded twice.
        accumulate = _composite.accumulate_dtype(x.dtype)
        added = mask if mask is None or mask.dtype == torch.bool else mask.to(accumulate)
        y = scaled_mask_softmax(x.to(accumulate), added, scale, **options)
        log_sum = _log_sums(y, x, added, scale)
        # Processes may order NaN either way in a maximum: infinity stands for it, and the sum makes it NaN again.
        maximum = log_sum.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group)
        sink_logit = None
        if sink is not None:
            sink_logit = sink.to(accumulate).view(-1, 1, 1)
            maximum = torch.maximum(maximum, sink_logit)
        dead = maximum == -torch.inf
        maximum = maximum.masked_fill(dead, 0.0)
        weight = (log_sum - maximum).exp()
        total = weight.clone()
        dist.all_reduce(total, dist.ReduceOp.SUM, group)
        sink_weight = None
        if sink_logit is not None:
            sink_weight = (sink_logit - maximum).exp()
            total = total + sink_weight
        total = total.masked_fill(dead, 1.0)
        y = y.mul_(weight / total).to(x.dtype)
        sink_probability = None if sink_weight is None else sink_weight / total
        ctx.save_for_backward(y, mask, sink, sink_probability, options["key_lengths"])
        ctx.scale, ctx.group = scale, group
        ctx.position = {name: value for name, value in options.items() if name != "key_lengths"}
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, mask, sink, sink_probability, key_lengths = ctx.saved_tensors
        accumulate = _composite.accumulate_dtype(y.dtype)
        zero = y == 0
        # Which y does not tell in a row of NaN.
        outside = _composite.excluded_by_position(y, **ctx.position, key_lengths=key_lengths)
        if outside is not None:
            zero = zero.logical_or_(outside)
        grad = grads[0].to(accumulate).masked_fill(zero, 0.0)
        probability = y.to(accumulate).masked_fill(zero, 0.0)
        total = (grad * probability).sum(-1, keepdim=True)
        dist.all_reduce(total, dist.ReduceOp.SUM, ctx.group)
        change = grad.sub_(total).mul_(probability).masked_fill_(zero, 0.0)
        dx = (change * ctx.scale).to(y.dtype) if ctx.needs_input_grad[0] else None
        dmask = dsink = None
        if ctx.needs_input_grad[1]:
            aligned = _aligned(mask, y)
            dmask = change.sum_to_size(aligned.shape).view(mask.shape).to(mask.dtype)
        if ctx.needs_input_grad[2]:
            dsink = (-(sink_probability * total).movedim(-3, 0).flatten(1).sum(1)).to(sink.dtype)
        return dx, dmask, dsink, None, None, None


def context_parallel(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    *,
    diagonal: int = 0,
    window: int | None = None,
    key_lengths: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    column_offset: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """:func:`scaled_mask_softmax` of scores whose columns are sharded over the processes of a group.

    Every process passes the columns that it holds and gets their probabilities; together they are those of the whole
    scores. Two numbers a row are all-reduced forward (a maximum and a sum), one backward; nothing is gathered.
    Collective: all processes of the group call it, with the same leading dimensions, dtype and options, and likewise
    backward.

    Args:
        x: this process's columns, ``[..., Sq, columns]``.
        mask: for x, so a mask with columns holds this process's. A float mask's gradient is that of this process's
            columns: sum it over the group where processes share the mask.
        scale, is_causal, diagonal, window, key_lengths, sink: those of the whole scores, the same in each process. The
            gradient of a sink is whole in each process.
        column_offset: which column of the whole scores x begins with. The default suits equal shards in rank order:
            the rank in the group times the columns of x.
        group: the process group, by default that of all processes.

    Returns:
        Probabilities of x's shape and dtype. Scores of float16 and bfloat16 cost a float32 copy.

    Raises:
        ValueError: column_offset is negative.
        RuntimeError: no process group is initialised; a second derivative.
        TypeError, ValueError: otherwise as :func:`scaled_mask_softmax`.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            f"{_PREFIX}no process group is initialised; expected one. Call torch.distributed.init_process_group first."
        )
    check_option_types(scale, is_causal, diagonal, window)
    _checks.check_forward(x, mask, scale, window, key_lengths, sink)
    if column_offset is None:
        column_offset = dist.get_rank(group) * x.shape[-1]
    elif column_offset < 0:
        raise ValueError(
            f"{_PREFIX}column_offset is {column_offset}; expected 0 or more. Give the place of x's first column "
            "in the whole scores."
        )
    options = {
        "is_causal": is_causal,
        # The ends of 64 bits stand for themselves: a wrapped number would mean another one, on some ranks only.
        "diagonal": max(diagonal - column_offset, -(2**63)) if is_causal or window is not None else 0,
        "window": window,
        "key_lengths": None if key_lengths is None else key_lengths.clamp(min=0) - column_offset,
    }
    result = _ContextParallel.apply(x, mask, sink, float(scale), options, group)
    assert isinstance(result, torch.Tensor)
    return result
