"""What the console command knows of the matrix: a module that every build writes into it, the plain wheel included."""

from __future__ import annotations

import pprint
from pathlib import Path
from typing import Any

from . import ROOT
from .index import put
from .matrix import Matrix, load

# Where the build leaves it; pyproject.toml's force-include puts it into the wheel.
OUTPUT = ROOT / "build" / "cli" / "_matrix.py"


def data(matrix: Matrix) -> dict[str, Any]:
    """The part of the matrix that matters to whoever installs a wheel, or builds one from source."""
    return {
        "version": matrix.version,
        "manylinux": matrix.manylinux,
        "torch": {
            row.minor: {
                "release": row.release,
                "default": row.default,
                "cuda": list(row.cuda),
                "python": list(row.python),
                "proven": {machine: list(labels) for machine, labels in row.proven.items()},
            }
            for row in matrix.torch.values()
        },
        "cuda": {
            row.label: {
                "toolkit": row.toolkit,
                "min_driver": row.min_driver,
                "architectures": dict(row.architectures),
            }
            for row in matrix.cuda.values()
        },
        "gpus": dict(matrix.gpus),
        "platforms": list(matrix.platforms),
        "torch_channels": matrix.torch_channels,
    }


def text(matrix: Matrix) -> str:
    values = pprint.pformat(data(matrix), width=110, sort_dicts=False)
    return f'"""The release matrix that this was built from. Written by the build."""\n\nMATRIX = {values}\n'


def write(path: Path = OUTPUT) -> Path:
    put(path, text(load()).encode())
    return path
