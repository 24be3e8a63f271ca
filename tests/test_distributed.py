"""Several processes: sharded columns, DTensor, and training steps of DDP and FSDP2. Over gloo, on the CPU, and NCCL."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from checks import DTYPES, MASK_KINDS, assert_is_forward, normal, random_mask
from stand_in import python
from torch import nn

import scaled_mask_softmax as sms

SHAPE = (2, 3, 5, 24)

# What the whole scores are called with: mask kind and shape, and options.
CASES: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("none", (), {}),
    ("bool", (2, 1, 1, 24), {}),
    ("bool", (2, 5, 24), {"is_causal": True, "diagonal": 9}),  # rank 3: per sample
    ("same", (5, 24), {"is_causal": True, "diagonal": -2}),  # the first rows have no live cell
    ("same", (1, 3, 5, 1), {}),  # no columns of its own
    ("none", (), {"is_causal": True, "diagonal": 30}),
    ("none", (), {"is_causal": True, "diagonal": 19, "window": 7}),
    ("bool", (2, 1, 1, 24), {"key_lengths": torch.tensor([24, 5])}),
]


def shard(tensor: torch.Tensor, columns: slice) -> torch.Tensor:
    return tensor if tensor.dim() == 0 or tensor.shape[-1] == 1 else tensor[..., columns]


def check_context_parallel(blocks: list[int] | None) -> None:
    """In each process, on its columns: those of the whole scores' result, and of their gradient."""
    from scaled_mask_softmax.distributed import context_parallel

    rank, world, device = dist.get_rank(), dist.get_world_size(), processes.device()
    sizes = blocks or [SHAPE[-1] // world] * world
    begin = sum(sizes[:rank])
    columns = slice(begin, begin + sizes[rank])
    offset = None if blocks is None else begin
    for dtype, (kind, mask_shape, given) in itertools.product(DTYPES, CASES):
        options = {name: value.to(device) if name == "key_lengths" else value for name, value in given.items()}
        x, grad = normal(SHAPE, dtype, device), normal(SHAPE, dtype, device, 1, 1.0)
        x[0, 0, 0] = -torch.inf
        x[0, 0, 1, :20] = -torch.inf  # no live cell in the first processes
        mask = random_mask(kind, mask_shape, dtype, device)
        whole = x.clone().requires_grad_()
        expected = sms.scaled_mask_softmax(whole, mask, 0.7, **options)
        (expected_dx,) = torch.autograd.grad(expected, whole, grad)

        part = x[..., columns].clone().requires_grad_()
        part_of_mask = None if mask is None else shard(mask, columns)
        y = context_parallel(part, part_of_mask, 0.7, column_offset=offset, **options)
        assert y.dtype == dtype
        (dx,) = torch.autograd.grad(y, part, grad[..., columns])
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, y.detach().cpu())
        assert_is_forward(torch.cat(gathered, -1).to(device), x, mask, 0.7, **options)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(dx, expected_dx[..., columns], rtol=0, atol=4 * eps)


def check_context_parallel_of_odd_rows() -> None:
    """NaN in one process's columns takes the whole row everywhere; and the gradients of a mask and of a sink."""
    from scaled_mask_softmax.distributed import context_parallel

    rank, world = dist.get_rank(), dist.get_world_size()
    columns = slice(rank * 24 // world, (rank + 1) * 24 // world)
    x = normal(SHAPE, torch.float32, "cpu")
    x[0, 0, 2, 23] = torch.nan
    x[1, 1, 3, 0] = torch.inf
    y = context_parallel(x[..., columns])
    invalid = torch.zeros(SHAPE[:-1], dtype=torch.bool)
    invalid[0, 0, 2] = invalid[1, 1, 3] = True
    assert torch.equal(y.isnan().all(-1), invalid)
    assert torch.equal(y.isnan().any(-1), invalid)

    x = normal(SHAPE, torch.float64, "cpu")
    part = x[..., columns]
    lengths = torch.tensor([torch.iinfo(torch.int64).min, 24])
    y = context_parallel(part, key_lengths=lengths)
    assert not y[0].any()
    torch.testing.assert_close(y[1], context_parallel(part)[1])
    # One-sided, from so far below that every column is seen.
    torch.testing.assert_close(context_parallel(part, window=1, diagonal=-(2**63)), context_parallel(part))

    with pytest.raises(TypeError, match=r"scale is a torch.Tensor; expected a Python number"):
        context_parallel(part, None, torch.tensor(0.5))
    with pytest.raises(ValueError, match=r"x has shape \[\] \(rank 0\)"):
        context_parallel(torch.zeros(()))
    with pytest.raises(ValueError, match=r"sink has shape \[2\] for x of shape .*; expected \[3\]"):
        context_parallel(part, sink=torch.zeros(2, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"sink has dtype torch\.int64"):
        context_parallel(part, sink=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"column_offset is -1; expected 0 or more\. Give"):
        context_parallel(part, column_offset=-1)

    sink, bias = normal((3,), torch.float64, "cpu", 3), normal((3, 1, 24), torch.float64, "cpu", 4)[None]
    grad = normal(SHAPE, torch.float64, "cpu", 5)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, bias, sink)]
    scores = leaves[0] * 0.7 + leaves[1]
    with_sink = torch.cat([scores, leaves[2].view(1, 3, 1, 1).expand(2, 3, 5, 1)], -1)
    expected = with_sink.softmax(-1)[..., :-1]
    expected_grads = torch.autograd.grad(expected, leaves, grad)

    parts = [
        x[..., columns].clone().requires_grad_(),
        bias[..., columns].clone().requires_grad_(),
        sink.clone().requires_grad_(),
    ]
    y = context_parallel(parts[0], parts[1], 0.7, sink=parts[2])
    torch.testing.assert_close(y, expected[..., columns])
    dx, dbias, dsink = torch.autograd.grad(y, parts, grad[..., columns])
    torch.testing.assert_close(dx, expected_grads[0][..., columns])
    torch.testing.assert_close(dbias, expected_grads[1][..., columns])
    torch.testing.assert_close(dsink, expected_grads[2])


def check_context_parallel_of_nan() -> None:
    """NaN and infinities anywhere: the rows and gradients of one process, cell by cell."""
    from scaled_mask_softmax.distributed import context_parallel

    rank, world = dist.get_rank(), dist.get_world_size()
    columns = slice(rank * 24 // world, (rank + 1) * 24 // world)
    positions: list[dict[str, Any]] = [
        {},
        {"is_causal": True, "diagonal": 7},
        {"is_causal": True, "diagonal": 12, "window": 5},
        {"key_lengths": torch.tensor([10, 0])},
    ]
    sinks = [None, *(torch.tensor([0.5, value, -torch.inf]) for value in (torch.nan, torch.inf, -torch.inf))]
    for dtype, kind, given, sink in itertools.product(
        (torch.float32, torch.bfloat16), MASK_KINDS[:3], positions, sinks
    ):
        x, grad = normal(SHAPE, dtype, "cpu"), normal(SHAPE, dtype, "cpu", 1, 1.0)
        x[0, 0, 0, 3] = torch.nan
        x[0, 1, 1, 23] = torch.inf  # excluded by the first positions
        x[0, 2, 2, 13:] = torch.nan
        x[1, 0, 3] = -torch.inf
        x[1, 1, 4, 11] = -torch.inf
        x[1, 1, 4, 12] = torch.nan
        mask = random_mask(kind, (2, 1, 5, 24), dtype, "cpu")
        if mask is not None and kind == "same":
            mask[0, 0, 3, 20] = torch.nan
        grad[0, 0, 0, 5] = torch.nan
        leaves: dict[str, torch.Tensor] = {"x": x}
        if kind == "same":
            assert mask is not None
            leaves["mask"] = mask
        if sink is not None:
            leaves["sink"] = sink.to(dtype)
        whole = {name: tensor.clone().requires_grad_() for name, tensor in leaves.items()}
        expected = sms.scaled_mask_softmax(whole["x"], whole.get("mask", mask), 0.7, sink=whole.get("sink"), **given)
        expected_gradients = torch.autograd.grad(expected, list(whole.values()), grad)

        part = {name: (t if name == "sink" else t[..., columns]).clone().requires_grad_() for name, t in leaves.items()}
        part_of_mask = None if mask is None else mask[..., columns]
        y = context_parallel(part["x"], part.get("mask", part_of_mask), 0.7, sink=part.get("sink"), **given)
        gradients = torch.autograd.grad(y, list(part.values()), grad[..., columns])
        bound = {"rtol": 0, "atol": 16 * torch.finfo(dtype).eps, "equal_nan": True}
        torch.testing.assert_close(y, expected[..., columns], **bound)
        for name, got, want in zip(whole, gradients, expected_gradients):
            wanted = want if name == "sink" else want[..., columns]
            if name == "x" and kind == "bool":  # in a row of NaN either
                assert part_of_mask is not None
                got, wanted = (t.masked_fill(part_of_mask & y.isnan(), 0.0) for t in (got, wanted))
            torch.testing.assert_close(got, wanted, **bound)


def check_context_parallel_communication() -> None:
    """Two all-reduces of a number a row forward, one backward, and nothing else."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from scaled_mask_softmax.distributed import context_parallel

    class Sent(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[tuple[str, int]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "c10d":
                self.calls.append((func.name(), sum(tensor.numel() for tensor in args[0])))
            return func(*args, **(kwargs or {}))

    x = normal((*SHAPE[:-1], 8), torch.float32, "cpu").requires_grad_()
    rows = x.numel() // 8
    with Sent() as sent:
        y = context_parallel(x)
    assert sent.calls == [("c10d::allreduce_", rows)] * 2
    with Sent() as sent:
        y.square().sum().backward()
    assert sent.calls == [("c10d::allreduce_", rows)]


@pytest.mark.parametrize("world", [2, 4])
def test_sharded_columns_are_the_columns_of_the_whole(tmp_path: Path, world: int) -> None:
    processes.run(world, tmp_path, check_context_parallel, None)


def test_sharded_columns_over_nccl(second_cuda: str, tmp_path: Path) -> None:
    processes.run(2, tmp_path, check_context_parallel, None, backend="nccl")


def test_sharded_columns_may_be_of_any_size(tmp_path: Path) -> None:
    """One process holds nothing."""
    processes.run(4, tmp_path, check_context_parallel, [7, 0, 16, 1])


def test_nan_masks_and_sinks_of_sharded_columns(tmp_path: Path) -> None:
    processes.run(2, tmp_path, check_context_parallel_of_odd_rows)


@pytest.mark.parametrize("world", [2, 4])
def test_nan_of_sharded_columns_is_nan_of_the_whole(tmp_path: Path, world: int) -> None:
    processes.run(world, tmp_path, check_context_parallel_of_nan)


def test_sharded_columns_gather_nothing(tmp_path: Path) -> None:
    processes.run(2, tmp_path, check_context_parallel_communication)


def test_context_parallel_refuses_what_it_cannot_do() -> None:
    from scaled_mask_softmax.distributed import context_parallel

    with pytest.raises(RuntimeError, match="no process group is initialised"):
        context_parallel(torch.zeros(2, 3))


def check_dtensor() -> None:
    """On a mesh of two dimensions: any pair of batch, heads and rows, without communication; and columns with each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (2, 2))
    shape = (4, 4, 6, 8)
    x, grad = normal(shape, torch.float64, "cpu"), normal(shape, torch.float64, "cpu", 1)
    placements = [Replicate(), Shard(0), Shard(1), Shard(2)]
    masks = [("none", ()), ("bool", (4, 1, 1, 8)), ("bool", (4, 6, 8)), ("same", (1, 4, 1, 8)), ("same", (4, 4, 6, 8))]
    triangle: list[dict[str, Any]] = [{}, {"is_causal": True, "diagonal": 1}]
    for placed, (kind, mask_shape), option in itertools.product(
        itertools.product(placements, placements), masks, triangle
    ):
        mask = random_mask(kind, mask_shape, torch.float64, "cpu")
        leaf = x.clone().requires_grad_()
        expected = sms.scaled_mask_softmax(leaf, mask, 0.5, **option)
        (expected_dx,) = torch.autograd.grad(expected, leaf, grad)

        sharded = distribute_tensor(x, mesh, placed).requires_grad_()
        sharded_grad = distribute_tensor(grad, mesh, placed)
        everywhere = None if mask is None else distribute_tensor(mask, mesh, [Replicate(), Replicate()])
        with CommDebugMode() as communication:
            y = sms.scaled_mask_softmax(sharded, everywhere, 0.5, **option)
            (dx,) = torch.autograd.grad(y, sharded, sharded_grad)
        assert communication.get_total_counts() == 0, (placed, mask_shape, option)
        for got, wanted in ((y, expected), (dx, expected_dx)):
            assert isinstance(got, DTensor)
            assert got.placements == placed
            torch.testing.assert_close(got.full_tensor(), wanted, rtol=0, atol=1e-15)

    # Sharded columns take two small all-reduces forward and one backward, beside any other sharding.
    for other, (kind, mask_shape) in itertools.product(placements, masks):
        mask = random_mask(kind, mask_shape, torch.float64, "cpu")
        leaf = x.clone().requires_grad_()
        expected = sms.scaled_mask_softmax(leaf, mask, 0.5, True, diagonal=1)
        (expected_dx,) = torch.autograd.grad(expected, leaf, grad)
        placed = (other, Shard(3))
        columns = distribute_tensor(x, mesh, placed).requires_grad_()
        sharded_grad = distribute_tensor(grad, mesh, placed)
        everywhere = None if mask is None else distribute_tensor(mask, mesh, [Replicate(), Replicate()])
        with CommDebugMode() as communication:
            y = sms.scaled_mask_softmax(columns, everywhere, 0.5, True, diagonal=1)
            (dx,) = torch.autograd.grad(y, columns, sharded_grad)
        assert [str(name) for name in communication.get_comm_counts()] == ["c10d.allreduce_"]
        assert communication.get_total_counts() == 3
        for got, wanted in ((y, expected), (dx, expected_dx)):
            assert got.placements == placed
            torch.testing.assert_close(got.full_tensor(), wanted, rtol=0, atol=1e-15)
    # Lengths follow the batch and a sink the heads; its gradient is summed where shards share it.
    lengths, sink = torch.tensor([8, 3, 0, 5]), normal((4,), torch.float64, "cpu", 6)
    everywhere = distribute_tensor(lengths, mesh, [Replicate(), Replicate()])
    options = {"is_causal": True, "diagonal": 1, "window": 4}
    for placed, with_sink in itertools.product(itertools.product(placements, [*placements, Shard(3)]), (False, True)):
        leaves = [x.clone().requires_grad_(), *([sink.clone().requires_grad_()] if with_sink else [])]
        sharded_leaves = [distribute_tensor(x, mesh, placed).requires_grad_()]
        sharded_leaves += [
            distribute_tensor(leaf.detach(), mesh, [Replicate(), Replicate()]).requires_grad_() for leaf in leaves[1:]
        ]
        results = []
        for (scores, *sinks), given, arriving in (
            (leaves, lengths, grad),
            (sharded_leaves, everywhere, distribute_tensor(grad, mesh, placed)),
        ):
            y = sms.scaled_mask_softmax(
                scores, None, 0.5, key_lengths=given, sink=sinks[0] if sinks else None, **options
            )
            results.append((y, *torch.autograd.grad(y, [scores, *sinks], arriving)))
        for wanted, got in zip(*results, strict=True):
            torch.testing.assert_close(got.full_tensor(), wanted, rtol=0, atol=1e-14)
    # The operator by its name, where rows are sharded: likewise.
    rows = distribute_tensor(x, mesh, [Shard(0), Shard(2)])
    y = torch.ops.scaled_mask_softmax.scaled_mask_softmax(rows, None, 0.5, True)
    torch.testing.assert_close(y.full_tensor(), sms.scaled_mask_softmax(x, None, 0.5, True))
    # Where the diagonal of a shard would not fit into 64 bits.
    for window in (None, 2**63 - 1, 2**63 - 5):
        extreme = {"is_causal": True, "diagonal": 2**63 - 1, "window": window}
        y = sms.scaled_mask_softmax(rows, None, 0.5, **extreme)
        torch.testing.assert_close(y.full_tensor(), sms.scaled_mask_softmax(x, None, 0.5, **extreme))
    with pytest.raises(NotImplementedError, match="x of the in-place form is a DTensor"):
        sms.scaled_mask_softmax_(rows)
    with pytest.raises(TypeError, match="mask is a Tensor for x that is a DTensor"):
        sms.scaled_mask_softmax(rows, torch.zeros(8, dtype=torch.bool), 0.5, True)


def check_gradients_of_dtensors() -> None:
    """Of a mask, whether shards share it or not; and of scores, wherever the incoming gradient is sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    shape = (4, 4, 6, 8)
    x, grad = normal(shape, torch.float64, "cpu"), normal(shape, torch.float64, "cpu", 1)
    placements = [Replicate(), Shard(0), Shard(1), Shard(2)]
    masks = [(8,), (6, 8), (4, 6, 8), (4, 1, 1, 8), (1, 4, 6, 1), (4, 4, 6, 8)]
    for mask_shape, is_causal, of_x in itertools.product(masks, (False, True), (False, True)):
        leaves = [x.clone().requires_grad_(of_x), normal(mask_shape, torch.float64, "cpu", 2).requires_grad_()]
        y = sms.scaled_mask_softmax(*leaves, 0.5, is_causal)
        expected = torch.autograd.grad(y, leaves if of_x else leaves[1:], grad)
        for placed in itertools.product(placements, placements):
            sharded = distribute_tensor(x, mesh, placed).requires_grad_(of_x)
            mask = distribute_tensor(leaves[1].detach(), mesh, [Replicate(), Replicate()]).requires_grad_()
            y = sms.scaled_mask_softmax(sharded, mask, 0.5, is_causal)
            given = distribute_tensor(grad, mesh, placed)
            got = torch.autograd.grad(y, [sharded, mask] if of_x else [mask], given)
            for one, wanted in zip(got, expected, strict=True):
                torch.testing.assert_close(one.full_tensor(), wanted, rtol=0, atol=1e-14)
    # DTensor remembers how it ran a call of the same shapes, but not whether that was causal.
    by_name = torch.ops.scaled_mask_softmax.scaled_mask_softmax.default
    pairs = itertools.product(placements, [*placements, Shard(3)])
    for (of_scores, of_grad), form, is_causal in itertools.product(
        pairs, (sms.scaled_mask_softmax, by_name), (False, True)
    ):
        leaf = x.clone().requires_grad_()
        y = sms.scaled_mask_softmax(leaf, None, 0.5, is_causal)
        (wanted,) = torch.autograd.grad(y, leaf, grad)
        sharded = distribute_tensor(x, mesh, [of_scores, Replicate()]).requires_grad_()
        y = form(sharded, None, 0.5, is_causal)
        (got,) = torch.autograd.grad(y, sharded, distribute_tensor(grad, mesh, [of_grad, Replicate()]))
        torch.testing.assert_close(got.full_tensor(), wanted, rtol=0, atol=1e-14)


def test_dtensors_sharded_by_batch_heads_and_rows_need_no_communication_and_columns_little(tmp_path: Path) -> None:
    processes.run(4, tmp_path, check_dtensor)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.softmax = sms.ScaledMaskSoftmax(8**-0.5, is_causal=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        return self.softmax(query @ key.mT) @ value


def loss_and_gradients(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    return loss.detach()


def check_training(kind: str) -> None:
    """One step on halves of a batch is the step on the batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    rank, world = dist.get_rank(), dist.get_world_size()
    batch = normal((2 * world, 5, 8), torch.float32, "cpu", 9)
    torch.manual_seed(0)
    alone = nn.Sequential(Attention(), Attention())
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(Attention(), Attention())
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (world,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    for one, part in ((alone, batch), (model, batch[2 * rank : 2 * rank + 2])):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            loss_and_gradients(one, part)
            optimizer.step()
    for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        torch.testing.assert_close(whole, expected.to(whole.dtype))


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_training_steps_over_two_processes_are_those_of_one(tmp_path: Path, kind: str) -> None:
    processes.run(2, tmp_path, check_training, kind)


def test_gradients_of_dtensors(tmp_path: Path) -> None:
    processes.run(4, tmp_path, check_gradients_of_dtensors)


def test_importing_the_package_leaves_dtensor_alone() -> None:
    code = "import sys, scaled_mask_softmax; print('torch.distributed.tensor' in sys.modules)"
    assert python(code).strip() == "False"
