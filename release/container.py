"""Building a cell's wheels in its image with cibuildwheel: starting it, and the steps that it takes inside.

What does not differ between cells is in pyproject.toml; a cell differs in the variables that `environment` gives.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import ROOT
from .environments import TOOLS, Environment, cache, create, pip, tools_folder
from .preflight import Interpreter
from .progress import StepError
from .torch_info import TORCH_VARIABLE

# The steps inside start before there is a TOML parser for older Pythons.
if TYPE_CHECKING:
    from .matrix import Cell, Matrix

CIBUILDWHEEL = "cibuildwheel==4.3.5"
TORCH, CUDA = "SMS_CELL_TORCH", "SMS_CELL_CUDA"
ARCHS = "TORCH_CUDA_ARCH_LIST"


def environment(data: Matrix, cell: Cell, pythons: Sequence[str], image: str, engine: str) -> dict[str, str]:
    """The variables that make cibuildwheel build this cell for `pythons` ("3.11") in `image`, with `engine`."""
    from . import build as building

    build = [f"cp{python.replace('.', '')}-manylinux_{cell.platform}" for python in pythons]
    return {
        "CIBW_ARCHS_LINUX": cell.platform,
        "CIBW_BUILD": " ".join(build),
        f"CIBW_MANYLINUX_{cell.platform.upper()}_IMAGE": image,
        "CIBW_CONTAINER_ENGINE": f"{engine}; create_args: --volume={ccache()}:/ccache",
        TORCH: cell.torch.minor,
        CUDA: cell.cuda_label,
        "TORCH_INDEX": data.torch_index(cell),
        "SOURCE_DATE_EPOCH": building.source_date_epoch(),
    }


def ccache() -> Path:
    """What the compilers made before, kept outside the containers."""
    return cache() / "ccache"


def build(variables: Mapping[str, str], interpreter: Interpreter, output: Path) -> None:
    """Runs cibuildwheel, with its own output. What the caller's environment sets already wins, such as TORCH_INDEX."""

    def fill(made: Environment) -> None:
        pip(made, ["install", CIBUILDWHEEL], what="installing cibuildwheel")

    tools = create(tools_folder(interpreter, "cibuildwheel"), interpreter, CIBUILDWHEEL, fill)
    ccache().mkdir(parents=True, exist_ok=True)
    command: list[str | Path] = [tools.python, "-m", "cibuildwheel", "--platform", "linux", "--output-dir", output]
    if subprocess.run([*command, ROOT], cwd=ROOT, env={**variables, **os.environ}).returncode != 0:
        raise StepError("cibuildwheel failed")


def _here() -> Environment:
    return Environment(Path(sys.prefix), "{}.{}".format(*sys.version_info))


def _cell() -> Cell:
    from . import matrix

    return matrix.load().cell(os.environ[TORCH], os.environ[CUDA])


def setup() -> None:
    """Before a build: the build tools, and the cell's torch in one folder for every Python, so that ccache finds it."""
    pip(_here(), ["install", *TOOLS], what="installing the build tools")
    from . import provision

    cell, folder = _cell(), Path(os.environ[TORCH_VARIABLE]).parent
    if provision.mismatch(folder, cell) is not None:
        requirement = provision.torch_requirement(cell)
        pip(_here(), ["install", "--no-deps", "--target", folder, *requirement], what="fetching torch")
    if problem := provision.mismatch(folder, cell):
        raise StepError(f"{folder} holds {problem}, not the cell's torch")


def torch() -> None:
    """Before a test: exactly the cell's torch, which the wheel then finds and leaves alone."""
    pip(_here(), ["install", *TOOLS], what="installing the build tools")
    from . import provision

    cell, here = _cell(), _here()
    pip(here, ["install", *provision.torch_requirement(cell)], what="installing torch")
    if problem := provision.mismatch(here.site_packages, cell):
        raise StepError(f"pip installed {problem}, not the cell's torch")


def repair(wheel: Path, folder: Path) -> None:
    """Tags the wheel with the image's manylinux; in an image that names none, with the oldest that is true."""
    from . import build

    build.auditwheel(_here(), wheel, folder, os.environ.get("AUDITWHEEL_PLAT"))


def check(wheel: Path) -> None:
    """Before the tests: the wheel is verified, and installing it has left torch alone."""
    from . import provision, verify

    if problem := provision.mismatch(_here().site_packages, _cell()):
        raise StepError(f"installing {wheel.name} has left {problem}, not the cell's torch")
    complete = not os.environ.get(ARCHS)
    torch = _here().site_packages / "torch"
    verify.verify(wheel, complete=complete, torches=[torch])


# By name: the step, and how many paths it takes.
STEPS: dict[str, tuple[Callable[..., None], int]] = {
    "setup": (setup, 0),
    "torch": (torch, 0),
    "repair": (repair, 2),
    "check": (check, 1),
}
