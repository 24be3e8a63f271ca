"""The CUDA compiler that a build uses, and why that one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .arch_list import Compiler


class ToolkitError(RuntimeError):
    """There is no usable CUDA compiler."""


@dataclass(frozen=True)
class Toolkit:
    nvcc: Path
    reason: str  # where it was found: "CUDA_HOME"
    root: Path
    include: Path
    runtime: Path  # libcudart.so.<major>
    compiler: Compiler

    @property
    def version(self) -> str:
        return ".".join(self.compiler.version.split(".")[:2])


def locate_nvcc() -> tuple[Path, str] | None:
    """The first of CUDACXX, CUDA_HOME, PATH and /usr/local/cuda, with its source; None where there is none."""
    if given := os.environ.get("CUDACXX"):
        found = shutil.which(given)
        if found is None:
            raise ToolkitError(f"CUDACXX={given} is not a program")
        return Path(found), "CUDACXX"
    if home := os.environ.get("CUDA_HOME"):
        nvcc = Path(home) / "bin" / "nvcc"
        if not os.access(nvcc, os.X_OK):
            raise ToolkitError(f"CUDA_HOME={home} holds no bin/nvcc")
        return nvcc, "CUDA_HOME"
    if found := shutil.which("nvcc"):
        return Path(found), "PATH"
    nvcc = Path("/usr/local/cuda/bin/nvcc")
    return (nvcc, "/usr/local/cuda") if os.access(nvcc, os.X_OK) else None


def _run(nvcc: Path, *arguments: str) -> str:
    try:
        result = subprocess.run([nvcc, *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        raise ToolkitError(f"{nvcc} does not work: {detail}") from error
    return result.stdout + result.stderr


def inspect(nvcc: Path, reason: str) -> Toolkit:
    """Asks nvcc for its version and architectures and finds headers and runtime. Works for wrapper scripts too."""
    version = re.search(r"\bV(\d+\.\d+\.\d+)", _run(nvcc, "--version"))
    top = re.search(r"^#\$ TOP=(.*)$", _run(nvcc, "--dryrun", "-E", "-x", "cu", os.devnull), re.MULTILINE)
    if version is None or top is None:
        raise ToolkitError(f"{nvcc} does not tell its version and folder as nvcc does")
    codes = re.findall(r"\bsm_(\d+)(\d)\b", _run(nvcc, "--list-gpu-code"))
    architectures = tuple(f"{major}.{minor}" for major, minor in sorted(set(codes), key=lambda c: (int(c[0]), c[1])))
    root = Path(top[1].strip()).resolve()
    major = version[1].split(".")[0]
    folders = [root / "lib64", root / "lib", *root.glob("targets/*/lib")]
    runtimes = [folder / f"libcudart.so.{major}" for folder in folders]
    runtime = next((path for path in runtimes if path.exists()), None)
    if runtime is None:
        raise ToolkitError(f"{nvcc}: no libcudart.so.{major} below {root}")
    includes = [root / "include", *root.glob("targets/*/include")]
    include = next((path for path in includes if (path / "cuda_runtime_api.h").is_file()), None)
    if include is None:
        raise ToolkitError(f"{nvcc}: no cuda_runtime_api.h below {root}")
    return Toolkit(nvcc, reason, root, include, runtime, Compiler(version[1], architectures))


def find() -> Toolkit | None:
    located = locate_nvcc()
    return inspect(*located) if located else None


def local_gpus() -> list[str]:
    """Compute capabilities of this machine's GPUs ("9.0"), without torch and without a CUDA context."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=compute_cap", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True, check=False)
    return re.findall(r"^\s*(\d+\.\d)\s*$", result.stdout, re.MULTILINE) if result.returncode == 0 else []
