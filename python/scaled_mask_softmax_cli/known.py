"""What the release matrix says, as the build wrote it beside this file."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Torch:
    release: str  # "2.14.1"
    default: str  # "cu130"
    cuda: tuple[str, ...]  # "cu130", ..., "cpu"
    python: tuple[str, ...]  # "3.11"


@dataclass(frozen=True)
class Cuda:
    toolkit: str  # "13.0"
    min_driver: int  # 580
    architectures: Mapping[str, str]  # by platform, as TORCH_CUDA_ARCH_LIST

    @property
    def major(self) -> int:
        return int(self.toolkit.split(".")[0])

    def cubins(self, machine: str) -> list[str]:
        spelling = self.architectures.get(machine, "").removesuffix("+PTX")
        return spelling.split(";") if spelling else []


@dataclass(frozen=True)
class Known:
    version: str
    manylinux: str  # "manylinux_2_28"
    torch: Mapping[str, Torch]  # by minor
    cuda: Mapping[str, Cuda]  # by label
    gpus: Mapping[str, str]  # by architecture, in words
    platforms: tuple[str, ...]
    torch_channels: str

    @property
    def glibc(self) -> tuple[int, int]:
        """The oldest glibc that the wheels are for."""
        _, major, minor = self.manylinux.split("_")
        return int(major), int(minor)

    def min_driver(self, cuda_major: int) -> int | None:
        """The oldest driver branch that runs programs of this CUDA major."""
        return min((row.min_driver for row in self.cuda.values() if row.major == cuda_major), default=None)


def parse(data: Mapping[str, Any]) -> Known:
    return Known(
        version=data["version"],
        manylinux=data["manylinux"],
        torch={
            minor: Torch(row["release"], row["default"], tuple(row["cuda"]), tuple(row["python"]))
            for minor, row in data["torch"].items()
        },
        cuda={
            label: Cuda(row["toolkit"], row["min_driver"], row["architectures"]) for label, row in data["cuda"].items()
        },
        gpus=data["gpus"],
        platforms=tuple(data["platforms"]),
        torch_channels=data["torch_channels"],
    )


@functools.cache
def load() -> Known | None:
    """The matrix; None in a checkout that was never built or installed."""
    name = f"{__package__}._matrix"
    try:
        return parse(importlib.import_module(name).MATRIX)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None
