"""Builds one wheel with the project's own build backend, showing the compiler's progress."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from . import ROOT, WORK, metadata, provision, torch_info
from .environments import Environment, log
from .matrix import Cell
from .options import Options
from .preflight import Interpreter
from .progress import StepError, run
from .toolkit import Toolkit

_BACKEND = "import json, sys; from release import backend; backend.build_wheel(sys.argv[1], json.loads(sys.argv[2]))"
_SDIST = "import sys; from release import backend; backend.build_sdist(sys.argv[1])"


@dataclass(frozen=True)
class Parts:
    """What a build is made from."""

    cell: Cell
    interpreter: Interpreter
    tools: Environment
    torch: Environment
    kit: Toolkit | None


def _line(line: str) -> bool:
    return (
        re.match(
            r"\[\d+/\d+\]|-- (torch|nvcc|architectures|warning|at most)|architectures |FAILED|ERROR|.*error:", line
        )
        is not None
    )


def source_date_epoch() -> str:
    """The time that files in a wheel carry: the commit's, so that building it again gives the same bytes."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return given
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    done = subprocess.run(command, capture_output=True, text=True)
    # A source distribution has no commit; its wheels carry the oldest time that they can.
    return done.stdout.strip() if done.returncode == 0 else "315532800"


def _only_wheel(folder: Path) -> Path:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise StepError(f"the build left {len(wheels)} wheels in {folder}, where one was expected")
    return wheels[0]


def provide(cell: Cell, options: Options, interpreter: Interpreter, tools: Environment, *, importable: bool) -> Parts:
    kit = None
    if cell.cuda:
        kit = provision.cuda_compiler(cell.cuda, tools)
        # Before the largest download.
        options.check_archs(kit.compiler, cell.architectures)
    torch = provision.torch(cell, interpreter, importable=importable)
    return Parts(cell, interpreter, tools, torch, kit)


def native(parts: Parts, architectures: str | None, folder: Path, *, sanitize: bool = False) -> Path:
    """The wheel as the build backend makes it, not repaired, in `folder` (emptied first)."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    env = {name: value for name, value in os.environ.items() if name != metadata.PLAIN_VARIABLE}
    # The build tools' own CMake and Ninja, whatever else PATH holds.
    env["PATH"] = f"{parts.tools.path / 'bin'}:{env.get('PATH', os.defpath)}"
    env[torch_info.TORCH_VARIABLE] = str(parts.torch.site_packages / "torch")
    if parts.kit is not None and parts.kit.reason == provision.FETCHED:
        env["CUDACXX"] = str(parts.kit.nvcc)
    if architectures is not None:
        env["TORCH_CUDA_ARCH_LIST"] = architectures
    name = f"{parts.cell.label}-{parts.interpreter.tag}{'-sanitize' if sanitize else ''}"
    env["SOURCE_DATE_EPOCH"] = source_date_epoch()
    settings = {"build-dir": str(WORK / name)}
    if sanitize:
        settings.update({"cmake.define.SMS_SANITIZE": "ON", "install.strip": "false"})
    run(
        [parts.tools.python, "-c", _BACKEND, folder, json.dumps(settings)],
        what="building the wheel",
        log=log(f"build-{name}"),
        cwd=ROOT,
        env=env,
        show=_line,
    )
    return _only_wheel(folder)


def plain(tools: Environment, folder: Path) -> Path:
    """The wheel without native code, for every platform, in `folder`."""
    scratch = folder / ".plain"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    run(
        [tools.python, "-c", _BACKEND, scratch, "{}"],
        what="building the plain wheel",
        log=log("build-plain"),
        cwd=ROOT,
        env={**os.environ, metadata.PLAIN_VARIABLE: "1", "SOURCE_DATE_EPOCH": source_date_epoch()},
        show=lambda line: False,
    )
    wheel = _only_wheel(scratch)
    target = folder / wheel.name
    shutil.move(wheel, target)
    scratch.rmdir()
    return target


def sdist(tools: Environment, folder: Path) -> Path:
    """The source distribution, in `folder`."""
    run(
        [tools.python, "-c", _SDIST, folder],
        what="building the source distribution",
        log=log("build-sdist"),
        cwd=ROOT,
        env={**os.environ, "SOURCE_DATE_EPOCH": source_date_epoch()},
        show=lambda line: False,
    )
    (archive,) = folder.glob("*.tar.gz")
    return archive


def auditwheel(environment: Environment, wheel: Path, folder: Path, platform: str | None = None) -> None:
    """Tags the wheel with `platform`, by default the oldest manylinux that it is true for. Copies nothing into it."""
    # SONAMEs that torch and its dependencies bring, or the driver; globs, since they carry versions.
    brought = ("libtorch*.so", "libc10*.so", "libcuda.so.*", "libcudart.so.*", "libnvrtc.so.*", "libgomp*.so.*")
    excludes = [argument for name in brought for argument in ("--exclude", name)]
    tag = ["--plat", platform, "--only-plat"] if platform else ["--plat", "auto"]
    env = {**os.environ, "PATH": f"{environment.path / 'bin'}:{os.environ.get('PATH', os.defpath)}"}
    env["SOURCE_DATE_EPOCH"] = source_date_epoch()
    run(
        [environment.python, "-m", "auditwheel", "repair", *tag, *excludes, "-w", folder, wheel],
        what="auditwheel",
        log=log(f"auditwheel-{wheel.stem}"),
        env=env,
        show=lambda line: False,
    )


def repair(parts: Parts, wheel: Path, folder: Path) -> Path:
    """The wheel under its manylinux tag, in `folder` (emptied first)."""
    shutil.rmtree(folder, ignore_errors=True)
    auditwheel(parts.tools, wheel, folder)
    return _only_wheel(folder)
