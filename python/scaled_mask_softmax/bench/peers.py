"""This operator, and whatever else can do a case: imported where it is installed, never required."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from scaled_mask_softmax import scaled_mask_softmax, scaled_mask_softmax_

from .cases import DROPOUT, DROPOUT_P
from .problems import SCALE, Operator, Problem

OURS = "ours"
COPY = "copy"  # of the scores, which sets the bandwidth of the floor


class Unsupported(Exception):
    """Why a peer cannot do a case."""


@dataclass(frozen=True)
class Peer:
    name: str
    # Raises Unsupported where it cannot do the problem, and ImportError where it is not installed.
    operator: Callable[[Problem], Operator]
    # Softmax without scale and mask: less than most cases ask for, so a rival only where there is no mask.
    alone: bool = False
    compiled: bool = False
    overwrites_grad: bool = False
    rival: bool = True

    def competes(self, kind: str) -> bool:
        """Whether it is somebody else's and does all that the case asks for."""
        return self.rival and (not self.alone or kind == "plain")


def _ours(problem: Problem) -> Operator:
    mask, is_causal, diagonal = problem.mask, problem.case.is_causal, problem.case.diagonal
    if problem.case.kind == DROPOUT:
        return lambda x: scaled_mask_softmax(x, mask, SCALE, dropout_p=DROPOUT_P)
    if diagonal == 0:  # as most calls are written
        return lambda x: scaled_mask_softmax(x, mask, SCALE, is_causal)
    return lambda x: scaled_mask_softmax(x, mask, SCALE, is_causal, diagonal=diagonal)


class _Onto(torch.autograd.Function):
    """x with the memory of another tensor, which may be written in place while x needs a gradient."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return memory.data

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _in_place(problem: Problem) -> Operator:
    """The form that writes into x. Only its first call sees the scores; the later ones see what the last one wrote."""
    _require(problem.case.suite == "headline", "measured for the headline case alone")
    mask, is_causal, diagonal = problem.mask, problem.case.is_causal, problem.case.diagonal
    memory = problem.inputs[0].detach().clone()

    def operator(x: torch.Tensor) -> torch.Tensor:
        scores = _Onto.apply(x, memory) if x.requires_grad else memory
        return scaled_mask_softmax_(scores, mask, SCALE, is_causal, diagonal=diagonal)

    return operator


def _masked(mask: torch.Tensor | None) -> Operator:
    """Scale and mask. What does not change from call to call is decided here, not in the call that is timed."""
    if mask is None:
        return lambda x: x * SCALE
    if mask.dtype == torch.bool:
        return lambda x: (x * SCALE).masked_fill(mask, -torch.inf)
    return lambda x: x * SCALE + mask


def _eager(problem: Problem) -> Operator:
    """The usual chain; the causal mask is a tensor made beforehand."""
    case, scores = problem.case, _masked(problem.mask)
    if case.kind == DROPOUT:
        return lambda x: torch.nn.functional.dropout(scores(x).softmax(-1), DROPOUT_P)
    if not case.is_causal:
        return lambda x: scores(x).softmax(-1)
    device = problem.inputs[0].device
    above = torch.ones(case.queries, case.columns, dtype=torch.bool, device=device).triu(case.diagonal + 1)
    return lambda x: scores(x).masked_fill(above, -torch.inf).softmax(-1)


def _computed(problem: Problem) -> Operator:
    """The chain for a compiler: causality is computed, so that no mask is read for it."""
    case, scores = problem.case, _masked(problem.mask)
    if not case.is_causal:
        return _eager(problem)
    queries, columns, diagonal = case.queries, case.columns, case.diagonal

    def operator(x: torch.Tensor) -> torch.Tensor:
        i = torch.arange(queries, device=x.device)[:, None]
        j = torch.arange(columns, device=x.device)
        return scores(x).masked_fill(j > i + diagonal, -torch.inf).softmax(-1)

    return operator


def _softmax(problem: Problem) -> Operator:
    return lambda x: torch.softmax(x, -1)


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise Unsupported(reason)


def _require_softmax_on_cuda(problem: Problem) -> None:
    _require(problem.inputs[0].is_cuda, "CUDA only")
    _require(problem.case.kind == "plain", "neither scale, mask nor dropout")


def _liger(problem: Problem) -> Operator:
    _require_softmax_on_cuda(problem)
    function = importlib.import_module("liger_kernel.ops.softmax").LigerSoftmaxFunction
    operator: Operator = function.apply
    return operator


def _quack(problem: Problem) -> Operator:
    _require_softmax_on_cuda(problem)
    _require(problem.case.columns % 8 == 0, "Sk is no multiple of 8")
    softmax = importlib.import_module("quack.softmax").softmax

    def operator(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = softmax(x.view(-1, x.shape[-1])).view(x.shape)
        return y

    return operator


def _whole_mask(problem: Problem) -> torch.Tensor:
    """The padding as apex and Transformer Engine take it: broadcast along the heads alone."""
    case = problem.case
    assert problem.mask is not None
    return problem.mask.expand(case.batch, 1, case.queries, case.columns).contiguous()


def _require_megatron_square(problem: Problem, kinds: tuple[str, ...], longest: int) -> None:
    """What the kernels that began in Megatron-LM ask for."""
    case = problem.case
    _require(problem.inputs[0].is_cuda, "CUDA only")
    _require(case.dtype_name != "float32", "16-bit only")
    _require(case.kind in kinds, f"does {', '.join(kinds)} only")
    _require(case.queries == case.columns, "squares only")
    _require(16 < case.columns <= longest, "rows too short or too long")


def _apex(problem: Problem) -> Operator:
    case = problem.case
    _require_megatron_square(problem, ("causal", "padding"), 16384 if case.kind == "causal" else 4096)
    _require(case.queries % 4 == 0, "Sq is no multiple of 4")
    functions = importlib.import_module("apex.transformer.functional.fused_softmax")
    if case.kind == "causal":
        return lambda x: functions.scaled_upper_triang_masked_softmax(x, None, SCALE)
    mask = _whole_mask(problem)
    return lambda x: functions.scaled_masked_softmax(x, mask, SCALE)


def _transformer_engine(problem: Problem) -> Operator:
    case = problem.case
    _require_megatron_square(problem, ("plain", "causal", "padding"), 16383)
    _require(case.columns % 8 == 0, "Sk is no multiple of 8")
    functions = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.softmax")
    if case.kind == "plain":
        return lambda x: functions.ScaledSoftmax.apply(x, SCALE)
    if case.kind == "causal":
        return lambda x: functions.ScaledAlignedCausalMaskedSoftmax.apply(x, SCALE)
    mask = _whole_mask(problem)
    return lambda x: functions.ScaledMaskedSoftmax.apply(x, mask, SCALE)


OPERATOR = Peer(OURS, _ours, rival=False)
PEERS = {
    peer.name: peer
    for peer in (
        Peer("in-place", _in_place, rival=False),
        Peer("eager", _eager),
        Peer("compile", _computed, compiled=True),
        Peer("softmax", _softmax, alone=True),
        Peer("liger", _liger, alone=True),
        Peer("quack", _quack, alone=True),
        Peer("apex", _apex, overwrites_grad=True),
        Peer("te", _transformer_engine, overwrites_grad=True),
    )
}
# The packages that rivals come from, for the record of a run.
DISTRIBUTIONS = ("triton", "liger-kernel", "quack-kernels", "apex", "transformer-engine")
