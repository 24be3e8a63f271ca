"""Several processes over gloo, each running one function of a test module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing


def _enter(rank: int, world: int, store: str, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        function(*arguments)
    finally:
        dist.destroy_process_group()


def run(world: int, folder: Path, function: Callable[..., None], *arguments: Any) -> None:
    """Call function(*arguments) in `world` processes of one group; fails where one fails, with its traceback.

    function: of a module, not of a class or a function.
    """
    torch.multiprocessing.spawn(_enter, (world, str(folder / "store"), function, arguments), nprocs=world)
