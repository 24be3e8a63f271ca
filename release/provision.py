"""The torch and the CUDA compiler of a cell: found on this machine, or fetched into the cache, announced."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from . import toolkit, torch_info
from .environments import Environment, cache, complete, create, locked, own_configuration, pip
from .matrix import Cell, Cuda, load
from .preflight import Interpreter
from .progress import StepError, say
from .torch_info import cuda_label

# GB that torch takes as wheels and installed: 2.14.1+cu130 and 2.13.0+cpu, whole and without dependencies.
SIZES = {(True, True): (3.0, 5.7), (True, False): (0.2, 1.0), (False, True): (0.6, 1.2), (False, False): (0.2, 0.8)}
# Where a compiler of our own fetching comes from.
FETCHED = "NVIDIA's packages"


def mismatch(site_packages: Path, cell: Cell) -> str | None:
    """What is there instead of the cell's torch; None where it is the cell's."""
    path = site_packages / "torch"
    if not path.is_dir():
        return "no torch"
    torch = torch_info.read(path)
    wanted = cell.cuda.label if cell.cuda else "cpu"
    if torch.version.split("+")[0] != cell.torch.release or cuda_label(torch.cuda) != wanted:
        return f"torch {torch.version} (CUDA {torch.cuda or 'none'})"
    return None


def torch_requirement(cell: Cell) -> list[str]:
    """pip's arguments for exactly the cell's torch."""
    requirement = f"torch=={cell.torch.release}"
    if cell.cuda_label != cell.torch.default:
        # The ordinary registry has the default only; a label tells pip which of a channel's builds is meant.
        requirement += f"+{cell.cuda_label}"
    index = os.environ.get("TORCH_INDEX")
    return [requirement, *(["--extra-index-url", index] if index else [])]


def _torch_folder(cell: Cell, interpreter: Interpreter) -> Path:
    return cache() / "torch" / f"{cell.torch.release}-{cell.cuda_label}-{interpreter.tag}"


def has_torch(cell: Cell, interpreter: Interpreter) -> bool:
    """Whether the cell's torch with its dependencies was fetched before."""
    return complete(_torch_folder(cell, interpreter), interpreter, torch_requirement(cell)[0])


def torch(cell: Cell, interpreter: Interpreter, *, importable: bool) -> Environment:
    """An environment that holds exactly the cell's torch; with its dependencies if it must be `importable`."""
    label = cell.cuda_label
    requirement, *index = torch_requirement(cell)
    # One that was fetched whole does for its headers too, and a build against it is not made again for the other.
    importable = importable or has_torch(cell, interpreter)
    arguments = ["install", requirement, *(["numpy"] if importable else ["--no-deps"]), *index]
    path = _torch_folder(cell, interpreter)
    path = path if importable else path.with_name(f"{path.name}-headers")

    def fill(environment: Environment) -> None:
        what = f"installing {requirement}"
        fetched, installed = SIZES[importable, cell.cuda is not None]
        say(f"      fetching {requirement} ({fetched} GB, {installed} GB installed)")
        problem = None
        try:
            pip(environment, arguments, what=what)
        except StepError as error:
            problem = str(error)
        problem = problem or mismatch(environment.site_packages, cell)
        if problem is None:
            return
        say(f"      with pip's configuration of this machine: {problem}; trying once more without that configuration")
        pip(environment, ["uninstall", "--yes", "torch"], what="removing that torch")
        try:
            pip(environment, arguments, what=what, env=own_configuration())
        except StepError as error:
            hint = (
                ""
                if index or label == cell.torch.default
                else (
                    f": torch {cell.torch.minor} for {label} is not in the ordinary registry, so set "
                    f"TORCH_INDEX={load().torch_index(cell)}, torch's own channel for it"
                )
            )
            raise StepError(f"{error}{hint}") from None
        if problem := mismatch(environment.site_packages, cell):
            raise StepError(f"pip installed {problem} where {requirement} for {label} was asked for")

    return create(path, interpreter, requirement, fill)


def registry_packages(cuda: Cuda) -> str:
    """The requirement that brings a whole nvcc of the matrix's minor, from CUDA 13 on."""
    return f"cuda-toolkit[nvcc,cudart,cccl,crt,nvvm,nvrtc]=={cuda.toolkit}.*"


def _fetched(cuda: Cuda) -> Path:
    return cache() / "toolkit" / cuda.label


def _fetched_nvcc(cuda: Cuda) -> Path:
    return _fetched(cuda) / "nvidia" / f"cu{cuda.major}" / "bin" / "nvcc"


def registry_toolkit(cuda: Cuda, environment: Environment) -> Path:
    """nvcc of exactly the matrix's minor from registry packages, in a folder of its own."""
    folder, nvcc = _fetched(cuda), _fetched_nvcc(cuda)
    marker = folder / ".complete"
    with locked(folder):
        if not marker.is_file():
            size = "0.2 GB, 0.4 GB installed"
            say(f"      no nvcc {cuda.toolkit} here: fetching NVIDIA's compiler packages into {folder} ({size})")
            shutil.rmtree(folder, ignore_errors=True)
            packages = registry_packages(cuda)
            pip(environment, ["install", "--target", folder, packages], what=f"installing nvcc {cuda.toolkit}")
            if not nvcc.is_file():
                raise StepError(f"NVIDIA's packages for CUDA {cuda.toolkit} brought no {nvcc}")
            marker.write_text(packages, encoding="utf-8")
    return nvcc


def local_compiler(cuda: Cuda) -> toolkit.Toolkit | None:
    """An nvcc of the matrix's minor that is here: this machine's, or fetched before. None where it can be fetched.

    Raises StepError where it can not.
    """
    located = toolkit.locate_nvcc()
    if located is not None and (kit := toolkit.inspect(*located)).version == cuda.toolkit:
        return kit
    if (_fetched(cuda) / ".complete").is_file():
        return toolkit.inspect(_fetched_nvcc(cuda), FETCHED)
    if cuda.source != "registry":
        raise StepError(
            f"no nvcc {cuda.toolkit} was found, and the package registry's compiler package for CUDA {cuda.major} "
            f"(nvidia-cuda-nvcc-cu{cuda.major}) has no nvcc: install the CUDA {cuda.toolkit} toolkit from NVIDIA and "
            "set CUDA_HOME"
        )
    return None


def cuda_compiler(cuda: Cuda, environment: Environment) -> toolkit.Toolkit:
    """An nvcc of the matrix's minor for this CUDA: this machine's, or fetched."""
    kit = local_compiler(cuda) or toolkit.inspect(registry_toolkit(cuda, environment), FETCHED)
    if kit.reason == FETCHED and (located := toolkit.locate_nvcc()) is not None:
        say(f"      {located[0]} (from {located[1]}) is not of CUDA {cuda.toolkit}: using {kit.nvcc}")
    return kit
