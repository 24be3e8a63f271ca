"""Several processes of one group, each running one function of a test module."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing


def _enter(
    rank: int, world: int, store: str, backend: str, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        function(*arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    # A thread of gloo that is the last to hold a tensor aborts an interpreter that ends meanwhile, and where DTensor
    # holds the group its threads are not waited for.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def device() -> str:
    """This process's device in a function that is run."""
    return f"cuda:{dist.get_rank()}" if dist.get_backend() == "nccl" else "cpu"


def run(world: int, folder: Path, function: Callable[..., None], *arguments: Any, backend: str = "gloo") -> None:
    """Call function(*arguments) in `world` processes of one group; fails where one fails, with its traceback.

    function: of a module, not of a class or a function. backend: gloo, on the CPU, or nccl, a GPU a process.
    """
    torch.multiprocessing.spawn(_enter, (world, str(folder / "store"), backend, function, arguments), nprocs=world)
