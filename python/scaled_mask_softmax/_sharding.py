"""How the operators run on DTensors. Imported with the first one, as torch.distributed.tensor is slow to import."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.experimental import register_sharding

_OPERATORS = torch.ops.scaled_mask_softmax


def _mask_placement(scores: Any, mask: Any, dim: int) -> Any:
    """That of the mask where dimension `dim` of the scores is sharded."""
    if scores.ndim == 4 and mask.ndim == 3:  # per sample: no dimension for heads
        mask_dim = -1 if dim == 1 else max(dim - 1, 0)
    else:
        mask_dim = dim - (scores.ndim - mask.ndim)
    return Replicate() if mask_dim < 0 or mask.shape[mask_dim] == 1 else Shard(mask_dim)


def _placement(name: str, tensor: Any, scores: Any, dim: int) -> Any:
    if name == "mask":
        return _mask_placement(scores, tensor, dim)
    if name == "key_lengths":
        return Shard(0) if dim == 0 else Replicate()
    if name == "sink":
        return Shard(0) if dim == scores.ndim - 3 else Replicate()
    return Shard(dim)  # of the scores' shape


def _strategies(scores: Any, **tensors: Any) -> list[tuple[list[Any], list[Any]]]:
    """Placements of a result of the scores' shape and of the tensor arguments that need no communication.

    A shard along any dimension but rows and columns is a problem of its own, and so are rows where the query index
    does not count. But DTensor keeps what it chose for later calls with the same tensors and integers, in which
    is_causal may be another.
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    result: list[tuple[list[Any], list[Any]]] = [([Replicate()], [Replicate()] * len(given))]
    for dim in range(scores.ndim - 2):
        result.append(([Shard(dim)], [_placement(name, tensor, scores, dim) for name, tensor in given.items()]))
    return result


def _forward(
    x: Any, mask: Any = None, *options: Any, key_lengths: Any = None, sink: Any = None, **keywords: Any
) -> list[tuple[list[Any], list[Any]]]:
    return _strategies(x, x=x, mask=mask, key_lengths=key_lengths, sink=sink)


def _backward(
    grad: Any, y: Any, *options: Any, key_lengths: Any = None, **keywords: Any
) -> list[tuple[list[Any], list[Any]]]:
    return _strategies(y, grad=grad, y=y, key_lengths=key_lengths)


# None for the others: one has the shape of its result among its arguments, and what some return follows from truth
# values, which DTensor does not look at.
register_sharding(_OPERATORS.scaled_mask_softmax.default)(_forward)
register_sharding(_OPERATORS.scaled_mask_softmax_backward.default)(_backward)


def _local(name: str, tensor: Any, x: DTensor) -> Any:
    """This process's part of an argument beside its part of x."""
    if tensor is None:
        return None
    if not isinstance(tensor, DTensor):
        raise TypeError(
            f"scaled_mask_softmax: {name} is a {type(tensor).__name__} for x that is a DTensor; expected a DTensor. "
            "Use torch.distributed.tensor.distribute_tensor."
        )
    placements, grad_placements = [], []
    for sharded in x.placements:
        placement = _placement(name, tensor, x, sharded.dim) if isinstance(sharded, Shard) else Replicate()
        placements.append(placement)
        # What shards of x share gets a part of its gradient from each; but shards of columns sum that of a sink.
        whole = name == "sink" and sharded.is_shard(x.ndim - 1)
        shared = placement.is_replicate() and sharded.is_shard()
        grad_placements.append(Partial() if shared and not whole else placement)
    return tensor.redistribute(x.device_mesh, placements).to_local(grad_placements=grad_placements)


def forward(
    x: DTensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    diagonal: int,
    window: int | None,
    key_lengths: torch.Tensor | None,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """The operator on each process's part, where DTensor's own rules would gather or cannot tell.

    They have no way to say that shards of rows need a diagonal each, nor that shards of columns need two numbers a row;
    they serve no gradient of a mask or sink, and leave arguments by keyword where they are.
    """
    positional = is_causal or window is not None
    rows, last = x.ndim - 2, x.ndim - 1
    by_column = [dim for dim, placement in enumerate(x.placements) if placement.is_shard(last)]
    by_row = any(placement.is_shard(rows) for placement in x.placements)
    of_mask = mask is not None and mask.requires_grad and torch.is_grad_enabled()
    if not (by_column or by_row or of_mask or key_lengths is not None or sink is not None):
        result = _OPERATORS.scaled_mask_softmax.default(
            x, mask, scale, is_causal, diagonal=diagonal, window=window, key_lengths=key_lengths, sink=sink
        )
        return cast(torch.Tensor, result)
    x = x.redistribute(
        x.device_mesh,
        [
            Replicate() if placement.is_partial() or dim in by_column[1:] else placement
            for dim, placement in enumerate(x.placements)
        ],
    )
    _, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    arguments = (x.to_local(grad_placements=x.placements), _local("mask", mask, x), scale, is_causal)
    if positional and x.ndim > 1:
        diagonal += offset[rows]
        # What does not fit into 64 bits is taken off the window, whose far end it leaves in place.
        excess = max(diagonal - (2**63 - 1), 0)
        diagonal -= excess
        window = None if window is None else max(window - excess, 1)
    options = {
        "diagonal": diagonal,
        "window": window,
        "key_lengths": _local("key_lengths", key_lengths, x),
        "sink": _local("sink", sink, x),
    }
    if by_column:
        from .distributed import context_parallel

        group = x.device_mesh.get_group(by_column[0])
        y = context_parallel(*arguments, **options, column_offset=offset[last], group=group)
    else:
        y = _OPERATORS.scaled_mask_softmax.default(*arguments, **options)
    strides = torch.empty(x.shape, device="meta").stride()
    return DTensor.from_local(y, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=strides)
