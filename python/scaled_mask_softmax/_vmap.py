"""torch.vmap of the operators: the batch dimension becomes one more leading dimension of x, so one call serves all.

The in-place forms have come apart before: see _ops.py.

In Python, as torch ships the headers for batching rules in C++ without one that they include.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch._C import _functorch

from . import _checks

_OPERATORS = torch.ops.scaled_mask_softmax


@dataclass
class _Sample:
    """A tensor argument, with its batch dimension in front if it has one. tensor is None where it was not given."""

    tensor: torch.Tensor | None
    batched: bool

    @property
    def rank(self) -> int:
        """That of one sample."""
        return 0 if self.tensor is None else self.tensor.dim() - self.batched

    def with_batch_dim(self) -> torch.Tensor:
        """The batch dimension has size 1 where all samples share the tensor."""
        assert self.tensor is not None
        return self.tensor if self.batched else self.tensor.unsqueeze(0)

    def one(self) -> Any:
        """For checks: a tensor like that of one sample, of which there may be none. None where it was not given."""
        if self.tensor is None or not self.batched:
            return self.tensor
        return self.tensor.new_empty(()).expand(self.tensor.shape[1:])


def _samples(*arguments: torch.Tensor | None) -> list[_Sample]:
    level = _functorch.current_level()
    result = []
    for argument in arguments:
        if argument is None:
            result.append(_Sample(None, False))
            continue
        tensor, dim = _functorch._unwrap_batched(argument, level)
        result.append(_Sample(tensor, False) if dim is None else _Sample(tensor.movedim(dim, 0), True))
    return result


def _expand_leading(tensor: torch.Tensor, leading: torch.Size) -> torch.Tensor:
    return tensor.expand(*leading, *tensor.shape[len(leading) :])


class _Batch:
    """The arguments of one call that serves a batch of samples, given those of each sample, which have been checked:
    with a dimension more, more of them would pass.

    The first `leading` dimensions of the batch of scores, ``[N, ...]``, become the first dimension of the call.
    """

    def __init__(self, scores: _Sample, others: list[_Sample], key_lengths: _Sample, sink: _Sample) -> None:
        size = next(
            sample.tensor.shape[0]
            for sample in (scores, *others, key_lengths, sink)
            if sample.batched and sample.tensor is not None
        )
        self.rank = scores.rank
        self.shape = torch.Size((size, *scores.with_batch_dim().shape[1:]))
        # Rows get a query dimension, so that none is taken for the query index of another.
        self.is_row = self.rank == 1
        self.leading = 1
        if key_lengths.tensor is not None:
            self.leading = 2
        # A sink of each sample, or one on the dimension that lengths have merged, needs an entry for every matrix.
        if sink.tensor is not None and (sink.batched or self.leading == self.rank - 1):
            self.leading = self.rank - 1

    def _merge(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.leading == 1:
            return tensor
        return tensor.reshape(math.prod(tensor.shape[: self.leading]), *tensor.shape[self.leading :])

    def scores(self, sample: _Sample) -> torch.Tensor:
        """Of the scores' shape: x, y and their gradients."""
        tensor = _expand_leading(sample.with_batch_dim(), self.shape[:1])
        return tensor.unsqueeze(1) if self.is_row else self._merge(tensor)

    def mask(self, sample: _Sample) -> torch.Tensor | None:
        """At full rank, so that the operator aligns it as the samples' own ranks say."""
        if sample.tensor is None:
            return None
        mask = sample.with_batch_dim()
        if self.rank == 4 and sample.rank == 3:
            mask = mask.unsqueeze(2)  # per sample in the operator's own sense
        rank = self.rank + 1 + self.is_row
        while mask.dim() < rank:
            mask = mask.unsqueeze(1)
        if self.leading == 1:
            return mask
        if any(size != 1 for size in mask.shape[: self.leading]):
            mask = _expand_leading(mask, self.shape[: self.leading])
        return self._merge(mask)

    def key_lengths(self, sample: _Sample) -> torch.Tensor | None:
        """An entry for every index of dimension 0 of a sample's scores."""
        if sample.tensor is None:
            return None
        lengths = sample.with_batch_dim()
        lengths = lengths.reshape(*lengths.shape, *(1 for _ in range(self.leading - 2)))
        return self._merge(_expand_leading(lengths, self.shape[: self.leading]))

    def sink(self, sample: _Sample) -> torch.Tensor | None:
        """An entry for every index of dimension -3 of a sample's scores."""
        if sample.tensor is None or self.leading != self.rank - 1:
            return sample.tensor
        sink = sample.with_batch_dim()
        sink = sink.reshape(sink.shape[0], *(1 for _ in range(self.leading - 2)), sink.shape[1])
        return self._merge(_expand_leading(sink, self.shape[: self.leading]))

    def result(self, computed: torch.Tensor) -> torch.Tensor:
        """Of the scores' shape."""
        return _functorch._add_batch_dim(computed.view(self.shape), 0, _functorch.current_level())

    def of_rows(self, computed: torch.Tensor) -> torch.Tensor:
        """One number a row."""
        return _functorch._add_batch_dim(computed.view(self.shape[:-1]), 0, _functorch.current_level())


def _below_vmap() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched))


def _call_forward(
    operator: Any,
    kinds: str,
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float = 1.0,
    *options: Any,
    window: int | None = None,
    key_lengths: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    **keywords: Any,
) -> Any:
    """kinds: of the operator's results, each "y" (of the scores' shape), "r" (one number a row) or "-" (without
    elements)."""
    with _below_vmap():
        scores, masks, lengths, sinks, keeps = samples = _samples(x, mask, key_lengths, sink, keep)
        keywords["window"] = window
        if keep is not None:
            keywords["keep"] = keep
        if not any(sample.batched for sample in samples):
            return operator(x, mask, scale, *options, key_lengths=key_lengths, sink=sink, **keywords)
        _checks.check_forward(scores.one(), masks.one(), scale, window, lengths.one(), sinks.one())
        batch = _Batch(scores, [masks, keeps], lengths, sinks)
        if keep is not None:
            keywords["keep"] = batch.scores(keeps)
        computed = operator(
            batch.scores(scores),
            batch.mask(masks),
            scale,
            *options,
            key_lengths=batch.key_lengths(lengths),
            sink=batch.sink(sinks),
            **keywords,
        )
        wrap: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "y": batch.result,
            "r": batch.of_rows,
            "-": lambda empty: empty,
        }
        if len(kinds) == 1:
            return wrap[kinds](computed)
        return tuple(wrap[kind](tensor) for kind, tensor in zip(kinds, computed, strict=True))


def _forward(*arguments: Any, **keywords: Any) -> Any:
    return _call_forward(_OPERATORS.scaled_mask_softmax.default, "y", *arguments, **keywords)


def _forward_with_sink_probability(*arguments: Any, **keywords: Any) -> Any:
    return _call_forward(_OPERATORS.scaled_mask_softmax.with_sink_probability, "yr", *arguments, **keywords)


def _forward_dropout_of_keep(*arguments: Any, with_sink_probability: bool, **keywords: Any) -> Any:
    return _call_forward(
        _OPERATORS.scaled_mask_softmax.dropout_of_keep,
        "yyr" if with_sink_probability else "yy-",
        *arguments,
        with_sink_probability=with_sink_probability,
        **keywords,
    )


def _backward(
    grad: torch.Tensor,
    y: torch.Tensor,
    scale: float,
    *options: Any,
    window: int | None = None,
    key_lengths: torch.Tensor | None = None,
    **keywords: Any,
) -> Any:
    operator = _OPERATORS.scaled_mask_softmax_backward.default
    with _below_vmap():
        grads, ys, lengths = samples = _samples(grad, y, key_lengths)
        if not any(sample.batched for sample in samples):
            return operator(grad, y, scale, *options, window=window, key_lengths=key_lengths, **keywords)
        _checks.check_backward(grads.one(), ys.one(), scale, window, lengths.one())
        batch = _Batch(ys, [grads], lengths, _Sample(None, False))
        return batch.result(
            operator(
                batch.scores(grads),
                batch.scores(ys),
                scale,
                *options,
                window=window,
                key_lengths=batch.key_lengths(lengths),
                **keywords,
            )
        )


# The other backward operators are never called with a batch: see autograd.cpp.
_library = torch.library.Library("scaled_mask_softmax", "IMPL", "FuncTorchBatched")
_library.impl("scaled_mask_softmax", _forward)
_library.impl("scaled_mask_softmax.with_sink_probability", _forward_with_sink_probability)
_library.impl("scaled_mask_softmax.dropout_of_keep", _forward_dropout_of_keep)
_library.impl("scaled_mask_softmax_backward", _backward)


def _dropout_keep(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """As vmap's randomness says: refused, the same cells of each sample, or cells of the whole batch."""
    # Not above: only this needs it.
    from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_current_functorch_interpreter

    vmap = cast(VmapInterpreter, retrieve_current_functorch_interpreter())
    if vmap.randomness() == "error":
        raise RuntimeError(
            f"scaled_mask_softmax: dropout_p is {_checks.number(dropout_p)} within torch.vmap with randomness='error'; "
            "expected 'different' or 'same'. Use torch.vmap(..., randomness='different')."
        )
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchVmapMode)
    with _below_vmap(), torch._C._ExcludeDispatchKeyGuard(keys):
        (sample,) = _samples(x)
        assert sample.tensor is not None
        if vmap.randomness() == "same" and vmap.batch_size() > 0:
            one = sample.tensor[0] if sample.batched else sample.tensor
            return cast(torch.Tensor, _OPERATORS.dropout_keep.default(one, dropout_p))
        batch = sample.with_batch_dim().expand(vmap.batch_size(), *(-1 for _ in range(sample.rank)))
        keep = _OPERATORS.dropout_keep.default(batch, dropout_p)
        return _functorch._add_batch_dim(keep, 0, vmap.level())


def _forward_dropout(
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
    if x.dim() == 0:  # refused by the operator
        return cast(torch.Tensor, _OPERATORS.scaled_mask_softmax.default(x))
    result, _, _ = _OPERATORS.scaled_mask_softmax.dropout_of_keep(
        x,
        mask,
        scale,
        is_causal,
        diagonal=diagonal,
        window=window,
        key_lengths=key_lengths,
        sink=sink,
        keep=_OPERATORS.dropout_keep.default(x.detach(), dropout_p),
        dropout_p=dropout_p,
        with_sink_probability=False,
    )
    return cast(torch.Tensor, result)


# Where no argument is batched too.
_random_library = torch.library.Library("scaled_mask_softmax", "IMPL", "FuncTorchVmapMode")
_random_library.impl("dropout_keep", _dropout_keep)
_random_library.impl("scaled_mask_softmax.dropout", _forward_dropout)
