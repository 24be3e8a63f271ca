"""The matrix (matrix.toml) as typed, validated data."""

from __future__ import annotations

import functools
import json
import platform
import re
import sys
from collections.abc import Iterable
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


class _Wrong(MatrixError):
    """What is wrong with a table of the matrix, with the key where it is one key."""

    def __init__(self, table: str, message: str, key: str = "") -> None:
        super().__init__(f"{table or 'matrix'}: {message}")
        self.table = table
        self.key = key


@dataclass(frozen=True)
class Platform:
    name: str  # "x86_64"
    runner: str  # "ubuntu-24.04"
    image: str  # by digest
    gcc: int  # in the image
    nvidia_repository: str  # "rhel8/x86_64"


@dataclass(frozen=True)
class Torch:
    minor: str  # "2.14"
    release: str  # "2.14.1"
    default: str  # "cu130"
    cuda: tuple[str, ...]  # "cu130", ..., "cpu"
    python: tuple[str, ...]  # "3.11"
    proven: dict[str, tuple[str, ...]]  # by platform, of `cuda`


@dataclass(frozen=True)
class Cuda:
    label: str  # "cu130"
    toolkit: str  # "13.0"
    source: str  # of the builder image's compiler: "registry" or "distribution" packages
    max_gcc: int
    min_driver: int  # 580
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
    def cuda_label(self) -> str:
        return self.cuda.label if self.cuda else CPU

    @property
    def label(self) -> str:
        return f"{self.cuda_label}torch{self.torch.minor}"

    @property
    def is_proven(self) -> bool:
        return self.cuda_label in self.torch.proven.get(self.platform, ())

    @property
    def architectures(self) -> str:
        return self.cuda.architectures[self.platform] if self.cuda else ""


@dataclass(frozen=True)
class Matrix:
    version: str
    default_torch: str
    platforms: dict[str, Platform]
    manylinux: str
    max_wheel_size: int
    torch_channels: str
    runtime_python: str  # "3.13", of runtime_image
    runtime_image: str  # by digest
    torch: dict[str, Torch]
    cuda: dict[str, Cuda]
    gpus: dict[str, str]  # by architecture, those that it is built for

    def cells(
        self, torch: str | None = None, cuda: str | None = None, machine: str | None = None, *, proven: bool = False
    ) -> list[Cell]:
        """Every cell, or those of a `torch` minor, a `cuda` label and a `machine`, or the `proven` ones of them.

        Raises MatrixError if there is none.
        """
        cells = [
            Cell(row, self.cuda.get(label), name)
            for row in self.torch.values()
            for label in row.cuda
            for name in self.platforms
            if torch in (None, row.minor) and cuda in (None, label) and machine in (None, name)
        ]
        cells = [cell for cell in cells if cell.is_proven or not proven]
        if not cells:
            asked = ", ".join(filter(None, (torch, cuda, machine))) or "any"
            raise MatrixError(
                f"no {'proven ' if proven else ''}cell of the matrix is for {asked}: python -m release matrix lists all"
            )
        return cells

    def torch_index(self, cell: Cell) -> str:
        """The channel that has the cell's torch; empty where the ordinary registry does."""
        return "" if cell.cuda_label == cell.torch.default else f"{self.torch_channels}/{cell.cuda_label}"

    def wheel(self, cell: Cell, python: str) -> str:
        """The file name of a release's wheel."""
        tag = "cp" + python.replace(".", "")
        return f"scaled_mask_softmax-{self.version}+{cell.label}-{tag}-{tag}-{self.manylinux}_{cell.platform}.whl"

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
    if not isinstance(values, list) or not values:
        raise _Wrong(where, f"{key} must be a list without duplicates, not {values!r}", key)
    for value in values:
        if not isinstance(value, str) or not re.fullmatch(pattern, value, re.ASCII):
            raise _Wrong(where, f"{value!r} in {key} does not match {pattern}", key)
    if len(set(values)) != len(values):
        raise _Wrong(where, f"{key} must be a list without duplicates, not {values!r}", key)
    return tuple(values)


def _string(table: dict[str, Any], key: str, pattern: str, where: str) -> str:
    value = table[key]
    if not isinstance(value, str) or not re.fullmatch(pattern, value, re.ASCII):
        raise _Wrong(where, f"{key} = {value!r} does not match {pattern}", key)
    return value


def _integer(table: dict[str, Any], key: str, where: str) -> int:
    value = table[key]
    if type(value) is not int or value <= 0:
        raise _Wrong(where, f"{key} must be a positive integer, not {value!r}", key)
    return value


def _keys(table: Any, required: set[str], optional: set[str], where: str) -> None:
    if not isinstance(table, dict):
        raise _Wrong(where, f"a table is expected, not {table!r}")
    if missing := required - table.keys():
        raise _Wrong(where, f"missing {', '.join(sorted(missing))}")
    if unknown := sorted(table.keys() - required - optional):
        raise _Wrong(where, f"unknown {', '.join(unknown)}", unknown[0])


_CUDA_LABEL = r"cu\d{3}"
_MINOR = r"\d+\.\d+"


def _tables(data: dict[str, Any], name: str) -> dict[str, Any]:
    tables = data[name]
    if not isinstance(tables, dict):
        raise _Wrong("", f"{name}: tables are expected, not {tables!r}", name)
    return tables


def _order(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _platforms(tables: dict[str, Any], manylinux: str) -> dict[str, Platform]:
    platforms = {}
    for name, table in tables.items():
        where = f"platform.{name}"
        _keys(table, {"runner", "image", "gcc", "nvidia_repository"}, set(), where)
        image = _string(table, "image", r"[a-z0-9./_-]+@sha256:[0-9a-f]{64}", where)
        if not image.partition("@")[0].endswith(f"{manylinux}_{name}"):
            raise _Wrong(where, f"image {image} is not of {manylinux}_{name}", "image")
        platforms[name] = Platform(
            name,
            _string(table, "runner", r"[a-z0-9.-]+", where),
            image,
            _integer(table, "gcc", where),
            _string(table, "nvidia_repository", r"[a-z0-9_/]+", where),
        )
    return platforms


def _architectures(table: dict[str, Any], key: str, known: dict[str, Any], toolkit: str, where: str) -> str:
    """An architecture list, each entry of which the toolkit compiles."""
    spelling = _string(table, key, rf"{_MINOR}(?:;{_MINOR})*(?:\+PTX)?", where)
    names = spelling.removesuffix("+PTX").split(";")
    if not spelling.endswith("+PTX") or names != sorted(set(names), key=_order):
        raise _Wrong(where, f"{key} must ascend, with +PTX on the newest only: {spelling}", key)
    for name in names:
        if name not in known:
            raise _Wrong(where, f"{name} in {key} has no table of its own", key)
        since, until = known[name].get("since", toolkit), known[name].get("until", toolkit)
        if not _order(since) <= _order(toolkit) <= _order(until):
            raise _Wrong(where, f"the {toolkit} toolkit does not compile {name} in {key}", key)
    return spelling


def _cudas(tables: dict[str, Any], platforms: Iterable[str], known: dict[str, Any]) -> dict[str, Cuda]:
    cudas = {}
    for label, table in tables.items():
        where = f"cuda.{label}"
        special = {machine: f"architectures_{machine}" for machine in platforms}
        _keys(table, {"toolkit", "source", "max_gcc", "min_driver", "architectures"}, set(special.values()), where)
        toolkit = _string(table, "toolkit", _MINOR, where)
        if label != cuda_label(toolkit):
            raise _Wrong(where, f"toolkit {toolkit} belongs to {cuda_label(toolkit)}", "toolkit")
        source = _string(table, "source", "registry|distribution", where)
        lists = {
            machine: _architectures(table, key if key in table else "architectures", known, toolkit, where)
            for machine, key in special.items()
        }
        gcc, driver = _integer(table, "max_gcc", where), _integer(table, "min_driver", where)
        cudas[label] = Cuda(label, toolkit, source, gcc, driver, lists)
    return cudas


def _torches(tables: dict[str, Any], cudas: Iterable[str], platforms: Iterable[str]) -> dict[str, Torch]:
    torches = {}
    for minor, table in tables.items():
        where = f'torch."{minor}"'
        if not re.fullmatch(_MINOR, minor, re.ASCII):
            raise _Wrong(where, f"{minor!r} is no minor release of torch, which is such as 2.14")
        _keys(table, {"release", "default", "cuda", "python"}, {"proven"}, where)
        release = _string(table, "release", _MINOR + r"\.\d+", where)
        if not release.startswith(minor + "."):
            raise _Wrong(where, f"release {release} is not of this minor", "release")
        labels = _strings(table, "cuda", rf"{_CUDA_LABEL}|{CPU}", where)
        if unknown := [label for label in labels if label != CPU and label not in cudas]:
            raise _Wrong(where, f"no table for {', '.join(unknown)}", "cuda")
        if table["default"] != labels[0]:
            raise _Wrong(where, f"default {table['default']!r} must be the first of cuda", "default")
        pythons = _strings(table, "python", r"3\.\d+", where)
        numbers = [_order(python)[1] for python in pythons]
        if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            raise _Wrong(where, f"python must ascend without a gap: {', '.join(pythons)}", "python")
        proven = table.get("proven", {})
        _keys(proven, set(), set(platforms), f"{where}.proven")
        known = {name: _strings(proven, name, rf"{_CUDA_LABEL}|{CPU}", f"{where}.proven") for name in proven}
        if unknown := sorted({label for found in known.values() for label in found} - set(labels)):
            raise _Wrong(where, f"proven {', '.join(unknown)} is not in cuda", "proven")
        torches[minor] = Torch(minor, release, labels[0], labels, pythons, known)
    return torches


def parse(data: dict[str, Any]) -> Matrix:
    """Validates the contents of matrix.toml. Raises MatrixError naming table and key."""
    scalars = {"version", "default_torch", "manylinux", "max_wheel_size", "torch_channels"}
    _keys(data, scalars | {"platform", "runtime", "architecture", "torch", "cuda"}, set(), "")
    manylinux = _string(data, "manylinux", r"manylinux_\d+_\d+", "")
    architectures = _tables(data, "architecture")
    for name, table in architectures.items():
        where = f'architecture."{name}"'
        _keys(table, {"gpus"}, {"since", "until"}, where)
        _string(table, "gpus", r"\S.*", where)
        for key in table.keys() - {"gpus"}:
            _string(table, key, _MINOR, where)
    platforms = _platforms(_tables(data, "platform"), manylinux)
    cuda = _cudas(_tables(data, "cuda"), platforms, architectures)
    torch = _torches(_tables(data, "torch"), cuda, platforms)
    used = {name for row in cuda.values() for text in row.architectures.values() for name in re.findall(_MINOR, text)}
    if idle := sorted(architectures.keys() - used):
        raise _Wrong(f'architecture."{idle[0]}"', "no CUDA release is built for it")
    if idle := sorted(cuda.keys() - {label for row in torch.values() for label in row.cuda}):
        raise _Wrong(f"cuda.{idle[0]}", "no torch is published for it")
    default = _string(data, "default_torch", _MINOR, "")
    if default not in torch:
        raise _Wrong("", f"default_torch {default} has no table", "default_torch")
    _keys(data["runtime"], {"python", "image"}, set(), "runtime")
    runtime_python = _string(data["runtime"], "python", r"3\.\d+", "runtime")
    image = rf"[a-z0-9./_-]+:{re.escape(runtime_python)}\.[\w.-]+@sha256:[0-9a-f]{{64}}"
    return Matrix(
        runtime_python=runtime_python,
        runtime_image=_string(data["runtime"], "image", image, "runtime"),
        version=_string(data, "version", r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?", ""),
        default_torch=default,
        platforms=platforms,
        manylinux=manylinux,
        max_wheel_size=_integer(data, "max_wheel_size", ""),
        torch_channels=_string(data, "torch_channels", r"https://\S+[^/]", ""),
        torch=torch,
        cuda=cuda,
        gpus={name: table["gpus"] for name, table in architectures.items()},
    )


def parse_toml(text: str) -> dict[str, Any]:
    return dict(tomllib.loads(text))


def _line(text: str, table: str, key: str) -> int:
    """The line of `key` of a table; of what holds it, such as the table's header, where the key has no line."""

    def path(spelling: str) -> str:
        return re.sub(r"[\s\"']", "", spelling)

    wanted, header = f"{path(f'{table}.{key}').strip('.')}.", ""
    found, longest = 1, ""
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*\[\[?([^\]]+)\]", line):
            here = header = f"{path(match[1])}."
        elif match := re.match(r"\s*([\w.\"' -]+)=", line):
            here = f"{header}{path(match[1])}."
        else:
            continue
        if wanted.startswith(here) and len(here) > len(longest):
            found, longest = number, here
    return found


def read(text: str, name: str) -> Matrix:
    """The matrix written in `text`. Raises MatrixError naming the line of the file called `name`."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # What is no TOML names the line by itself.
        raise MatrixError(f"{name}: {error}") from None
    try:
        return parse(data)
    except _Wrong as error:
        raise MatrixError(f"{name}, line {_line(text, error.table, error.key)}: {error}") from None


@functools.cache
def load(path: Path = MATRIX_FILE) -> Matrix:
    name = f"{path.parent.name}/{path.name}"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MatrixError(f"{name} cannot be read as UTF-8 text: {error}") from None
    return read(text, name)


def test_requirements() -> list[str]:
    """The project's test extra, from pyproject.toml."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        return list(tomllib.load(file)["project"]["optional-dependencies"]["test"])


def table(matrix: Matrix, cells: Iterable[Cell]) -> str:
    """The cells as text, one a line."""
    rows = [("torch", "CUDA", "platform", "Python", "driver", "proven", "architectures")]
    for cell in cells:
        pythons = f"{cell.torch.python[0]}-{cell.torch.python[-1]}"
        driver = f">={cell.cuda.min_driver}" if cell.cuda else "-"
        proven, archs = "yes" if cell.is_proven else "no", cell.architectures or "-"
        rows.append((cell.torch.release, cell.cuda_label, cell.platform, pythons, driver, proven, archs))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(value.ljust(width) for value, width in zip(row, widths)).rstrip() for row in rows]
    return f"scaled-mask-softmax {matrix.version}\n" + "\n".join(lines)


def workflow(matrix: Matrix, cells: Iterable[Cell], *, per_python: bool = False, per_label: bool = False) -> str:
    """The cells as a workflow's `strategy.matrix`, in one line: an entry a cell, a cell and Python, or a label."""
    include: list[dict[str, str]] = []
    for cell in cells:
        name = cell.label if per_label else f"{cell.label}-{cell.platform}"
        if any(entry["name"] == name for entry in include) and not per_python:
            continue
        entry = {
            "name": name,
            "torch": cell.torch.minor,
            "cuda": cell.cuda_label,
            "platform": cell.platform,
            "runner": matrix.platforms[cell.platform].runner,
            "torch_index": matrix.torch_index(cell),
        }
        # What runs the tools, on a machine that has no right Python: the cell's newest.
        include += [
            {**entry, "python": python} for python in (cell.torch.python if per_python else cell.torch.python[-1:])
        ]
    return json.dumps({"include": include}, separators=(",", ":"))


def wheels(matrix: Matrix, cells: Iterable[Cell]) -> list[str]:
    """The file names of the cells' wheels in a release."""
    return [matrix.wheel(cell, python) for cell in cells for python in cell.torch.python]
