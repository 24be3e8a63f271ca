"""What a machine must have before anything starts, each lack one sentence. Standard library only."""

from __future__ import annotations

import glob
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

MINIMUM_PYTHON = (3, 10)
# torch with its CUDA libraries takes 5.7 GB installed, and 3.0 GB as wheels, which pip holds until all are unpacked.
FULL_DISK_GB, BUILD_DISK_GB = 10, 3

_ASK = """
import importlib.util, json, os, sys, sysconfig
print(json.dumps({
    "version": list(sys.version_info[:2]),
    "executable": sys.executable,
    "headers": os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")),
    "venv": all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")),
}))
"""


class PreflightError(RuntimeError):
    """The machine lacks something, or the options ask for the impossible."""


@dataclass(frozen=True)
class Interpreter:
    executable: Path
    version: str  # "3.11"

    @property
    def tag(self) -> str:
        return "cp" + self.version.replace(".", "")


def _ask(command: str) -> dict[str, object] | None:
    try:
        result = subprocess.run([command, "-c", _ASK], capture_output=True, text=True, timeout=60, check=True)
        return dict(json.loads(result.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):
        return None


def interpreter(wanted: str | None) -> Interpreter:
    """The Python to build for: `wanted` ("3.11", or a path), else the running one, with headers and venv."""
    if wanted is None:
        commands = [sys.executable]
    elif "/" in wanted:
        commands = [wanted]
    else:
        pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
        installed = sorted(glob.glob(f"{pyenv}/versions/{wanted}.*/bin/python{wanted}"), reverse=True)
        commands = [sys.executable, f"python{wanted}", *installed]
    for command in commands:
        facts = _ask(command)
        if facts is None:
            continue
        version = "{}.{}".format(*facts["version"])  # type: ignore[misc]
        if wanted is not None and "/" not in wanted and version != wanted:
            continue
        if tuple(map(int, version.split("."))) < MINIMUM_PYTHON:
            raise PreflightError(
                f"Python {version} is too old: Python 3.10 or newer is needed, for example PYTHON=3.11"
            )
        if not facts["venv"]:
            raise PreflightError(f"Python {version} ({command}) lacks venv: install it, on Debian python{version}-venv")
        if not facts["headers"]:
            raise PreflightError(
                f"Python {version} ({command}) lacks its headers: install them, on Debian python{version}-dev, on "
                f"Fedora python{version}-devel"
            )
        return Interpreter(Path(str(facts["executable"])), version)
    if wanted is None:
        raise PreflightError(f"{sys.executable} does not work: give another with PYTHON=3.11 or PYTHON=/path/to/python")
    if patch := re.fullmatch(r"(\d+\.\d+)\.\S+", wanted):
        raise PreflightError(f"PYTHON={wanted} is no minor version: give PYTHON={patch[1]}, or the path of that Python")
    raise PreflightError(
        f"PYTHON={wanted} is no working Python here: give the version of one that is installed, as in PYTHON=3.11, or "
        "its path, as in PYTHON=/usr/bin/python3.11"
    )


def cxx_compiler() -> str:
    command = os.environ.get("CXX") or next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), "")
    if not command or shutil.which(command.split()[0]) is None:
        raise PreflightError(f"no C++ compiler was found ({command or 'c++, g++ or clang++'}): install g++ or set CXX")
    return command


def check_cxx() -> str:
    """The C++ compiler, proven to know C++20."""
    command = cxx_compiler()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "check.cpp")
        source.write_text("#include <concepts>\nstatic_assert(std::integral<int>);\nint main() { return 0; }\n")
        result = subprocess.run(
            [*command.split(), "-std=c++20", "-o", f"{folder}/check", str(source)], capture_output=True, text=True
        )
    if result.returncode != 0:
        raise PreflightError(f"the C++ compiler {command} does not compile C++20: install g++ 10 or newer, or set CXX")
    return command


def gcc_major(command: str) -> int | None:
    """The major version of a gcc; None for other compilers."""
    macros = subprocess.run(
        [*command.split(), "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True, check=True
    ).stdout
    if "__clang__" in macros:
        return None
    match = re.search(r"^#define __GNUC__ (\d+)$", macros, re.MULTILINE)
    return int(match[1]) if match else None


def check_gcc(command: str, cuda: str, max_gcc: int) -> None:
    major = gcc_major(command)
    if major is not None and major > max_gcc:
        raise PreflightError(
            f"{command} is gcc {major}, too new for the CUDA {cuda} compiler, which takes gcc {max_gcc} or older: "
            f"install g++-{max_gcc} and set CXX=g++-{max_gcc}"
        )


def check_disk(folder: Path, needed_gb: int) -> None:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = math.floor(shutil.disk_usage(existing).free / 1e8) / 10  # down, so that too little never reads as enough
    if free < needed_gb:
        raise PreflightError(
            f"{existing} has {free} GB free and about {needed_gb} GB are needed: free some, or point "
            "XDG_CACHE_HOME to a larger disk"
        )
