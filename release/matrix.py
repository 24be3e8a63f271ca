"""The matrix (matrix.toml) as typed, validated data."""

from __future__ import annotations

import functools
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import ROOT
from .torch_info import CPU, cuda_label

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MATRIX_FILE = Path(__file__).with_name("matrix.toml")


class MatrixError(ValueError):
    """The matrix is inconsistent, or was asked for what it does not hold."""


@dataclass(frozen=True)
class Torch:
    minor: str  # "2.14"
    release: str  # "2.14.1"
    default: str  # "cu130"
    cuda: tuple[str, ...]  # "cu130", ..., "cpu"
    python: tuple[str, ...]  # "3.11"


@dataclass(frozen=True)
class Cuda:
    label: str  # "cu130"
    toolkit: str  # "13.0"
    max_gcc: int
    architectures: dict[str, str]  # by platform, in the spelling of TORCH_CUDA_ARCH_LIST

    @property
    def major(self) -> int:
        return int(self.toolkit.split(".")[0])


@dataclass(frozen=True)
class Cell:
    """One library: a torch, a CUDA release (None: CPU only) and a platform."""

    torch: Torch
    cuda: Cuda | None
    platform: str

    @property
    def label(self) -> str:
        return f"{self.cuda.label if self.cuda else CPU}torch{self.torch.minor}"

    @property
    def architectures(self) -> str:
        return self.cuda.architectures[self.platform] if self.cuda else ""


@dataclass(frozen=True)
class Matrix:
    version: str
    default_torch: str
    platforms: tuple[str, ...]
    manylinux: str
    max_wheel_size: int
    torch: dict[str, Torch]
    cuda: dict[str, Cuda]

    def cells(self) -> list[Cell]:
        return [
            Cell(torch, self.cuda.get(label), machine)
            for torch in self.torch.values()
            for label in torch.cuda
            for machine in self.platforms
        ]

    def cell(self, torch: str | None = None, cuda: str | None = None, machine: str | None = None) -> Cell:
        """The cell for `torch` ("2.14"), `cuda` ("cu130", "cpu") and `machine` ("x86_64"), each with a default."""
        machine = machine or platform.machine()
        if machine not in self.platforms:
            raise MatrixError(f"platform {machine} is not in the matrix, which has {', '.join(self.platforms)}")
        minor = torch or self.default_torch
        if minor not in self.torch:
            raise MatrixError(f"torch {minor} is not in the matrix, which has {', '.join(self.torch)}")
        label = cuda or self.torch[minor].default
        if label not in self.torch[minor].cuda:
            known = ", ".join(self.torch[minor].cuda)
            raise MatrixError(f"torch {minor} is not published for {label}, only for {known}")
        return Cell(self.torch[minor], self.cuda.get(label), machine)


def _strings(table: dict[str, Any], key: str, pattern: str, where: str) -> tuple[str, ...]:
    values = table[key]
    if not isinstance(values, list) or not values or len(set(values)) != len(values):
        raise MatrixError(f"{where}: {key} must be a list without duplicates, not {values!r}")
    for value in values:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise MatrixError(f"{where}: {value!r} in {key} does not match {pattern}")
    return tuple(values)


def _string(table: dict[str, Any], key: str, pattern: str, where: str) -> str:
    value = table[key]
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise MatrixError(f"{where}: {key} = {value!r} does not match {pattern}")
    return value


def _keys(table: dict[str, Any], required: set[str], optional: set[str], where: str) -> None:
    if missing := required - table.keys():
        raise MatrixError(f"{where}: missing {', '.join(sorted(missing))}")
    if unknown := table.keys() - required - optional:
        raise MatrixError(f"{where}: unknown {', '.join(sorted(unknown))}")


_CUDA_LABEL = r"cu\d{3}"
_MINOR = r"\d+\.\d+"


def parse(data: dict[str, Any]) -> Matrix:
    """Validates the contents of matrix.toml. Raises MatrixError naming table and key."""
    scalars = {"version", "default_torch", "platforms", "manylinux", "max_wheel_size", "torch", "cuda"}
    _keys(data, scalars, set(), "matrix")
    platforms = _strings(data, "platforms", r"[a-z0-9_]+", "matrix")

    cuda: dict[str, Cuda] = {}
    for label, table in data["cuda"].items():
        where = f"cuda.{label}"
        overrides = {f"architectures_{machine}" for machine in platforms}
        _keys(table, {"toolkit", "max_gcc", "architectures"}, overrides, where)
        toolkit = _string(table, "toolkit", _MINOR, where)
        if label != cuda_label(toolkit):
            raise MatrixError(f"{where}: toolkit {toolkit} belongs to {cuda_label(toolkit)}")
        if not isinstance(table["max_gcc"], int):
            raise MatrixError(f"{where}: max_gcc must be an integer")
        architectures = {
            machine: str(table.get(f"architectures_{machine}", table["architectures"])) for machine in platforms
        }
        for spelling in architectures.values():
            numbers = [tuple(map(int, item.split("."))) for item in spelling.removesuffix("+PTX").split(";")]
            if not spelling.endswith("+PTX") or numbers != sorted(set(numbers)):
                raise MatrixError(f"{where}: architectures must ascend, with +PTX on the newest only: {spelling}")
        cuda[label] = Cuda(label, toolkit, table["max_gcc"], architectures)

    torch: dict[str, Torch] = {}
    for minor, table in data["torch"].items():
        where = f'torch."{minor}"'
        _keys(table, {"release", "default", "cuda", "python"}, set(), where)
        release = _string(table, "release", _MINOR + r"\.\d+", where)
        if not release.startswith(minor + "."):
            raise MatrixError(f"{where}: release {release} is not of this minor")
        labels = _strings(table, "cuda", rf"{_CUDA_LABEL}|{CPU}", where)
        if unknown := [label for label in labels if label != CPU and label not in cuda]:
            raise MatrixError(f"{where}: no table for {', '.join(unknown)}")
        if table["default"] != labels[0]:
            raise MatrixError(f"{where}: default {table['default']!r} must be the first of cuda")
        torch[minor] = Torch(minor, release, labels[0], labels, _strings(table, "python", r"3\.\d+", where))

    matrix = Matrix(
        version=_string(data, "version", r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?", "matrix"),
        default_torch=_string(data, "default_torch", _MINOR, "matrix"),
        platforms=platforms,
        manylinux=_string(data, "manylinux", r"manylinux_\d+_\d+", "matrix"),
        max_wheel_size=int(data["max_wheel_size"]),
        torch=torch,
        cuda=cuda,
    )
    if matrix.default_torch not in torch:
        raise MatrixError(f"default_torch {matrix.default_torch} has no table")
    return matrix


@functools.cache
def load(path: Path = MATRIX_FILE) -> Matrix:
    with open(path, "rb") as file:
        return parse(tomllib.load(file))


def test_requirements() -> list[str]:
    """The project's test extra, from pyproject.toml."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        return list(tomllib.load(file)["project"]["optional-dependencies"]["test"])


def table(matrix: Matrix) -> str:
    """The cells as text, one a line."""
    rows = [("torch", "CUDA", "platform", "Python", "architectures")]
    for cell in matrix.cells():
        pythons = f"{cell.torch.python[0]}-{cell.torch.python[-1]}"
        cuda = cell.cuda.label if cell.cuda else CPU
        rows.append((cell.torch.release, cuda, cell.platform, pythons, cell.architectures or "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join(value.ljust(width) for value, width in zip(row, widths)).rstrip() for row in rows]
    return f"scaled-mask-softmax {matrix.version}\n" + "\n".join(lines)
