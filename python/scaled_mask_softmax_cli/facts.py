"""Everything that the doctor looks at, gathered and not yet judged."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import gpus, installed
from .ask import ask

# A cold import of torch from a network file system takes tens of seconds.
IMPORT_SECONDS = 180.0
# What torch brings itself; another of it earlier on the search path can be taken instead.
_BROUGHT = re.compile(r"lib(cudart|cublas|cublasLt|cudnn|nvrtc|nccl|torch\w*|c10\w*|gomp|stdc\+\+)\b.*\.so[.\d]*")
# What must be in a process once.
_ONCE = ("libcudart", "libgomp", "libscaled_mask_softmax")

_IMPORT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
report = {"torch": None, "package": None}
def words(error):
    return f"{type(error).__name__}: {error}"
try:
    import torch
except BaseException as error:
    report["torch"] = words(error)
else:
    try:
        import scaled_mask_softmax
    except BaseException as error:
        report["package"] = words(error)
report["libraries"] = []
try:
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        paths = (line.rstrip("\\n").split(maxsplit=5)[5:] for line in maps)
        report["libraries"] = sorted({path[0] for path in paths if path and ".so" in path[0]})
except OSError:  # not Linux
    pass
print("\\n" + json.dumps(report))
"""


@dataclass(frozen=True)
class Imported:
    """What a process saw that imported torch and the package."""

    state: str  # "ok", "failed" or "hangs"
    torch: str | None = None  # the error
    package: str | None = None
    libraries: list[str] = field(default_factory=list)  # the shared libraries in it


@dataclass(frozen=True)
class Facts:
    python: str  # "3.11.7"
    implementation: str  # "CPython"
    tag: str  # "cp311", of the wheels that it takes
    executable: str
    environment: str  # "venv", "conda" or "system"
    platform: str  # "linux-x86_64"
    machine: str  # "x86_64"
    libc: tuple[str, str]  # "glibc", "2.36"
    torch: installed.Torch | None
    package: installed.Package | None
    unreadable: Path | None  # the file without which the package cannot be looked at
    driver: gpus.Driver
    visible: str | None  # CUDA_VISIBLE_DEVICES
    shadows: list[str]  # libraries on LD_LIBRARY_PATH that torch brings itself
    homes: list[tuple[str, str, str]]  # variable, path, what is wrong with it
    ptx_cache: tuple[str, bool]  # where the driver keeps what it compiles, and whether it can
    imported: Imported | None  # None: it was not tried


def tag() -> str:
    """The tag of the wheels that this Python takes: "cp311", "cp313t" without the global lock."""
    name = {"cpython": "cp", "pypy": "pp"}.get(sys.implementation.name, sys.implementation.name)
    free = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    return f"{name}{sys.version_info[0]}{sys.version_info[1]}{free}"


def environment_kind() -> str:
    if os.path.isdir(os.path.join(sys.prefix, "conda-meta")):
        return "conda"
    return "venv" if sys.prefix != sys.base_prefix else "system"


def shadows(environment: Mapping[str, str]) -> list[str]:
    found = []
    for entry in environment.get("LD_LIBRARY_PATH", "").split(":"):
        # What cannot be listed cannot be searched by the loader either, in nearly every case.
        with contextlib.suppress(OSError):
            names = sorted(name for name in os.listdir(entry) if _BROUGHT.fullmatch(name)) if entry else []
            found += [os.path.join(entry, name) for name in names]
    return found


def _can_write(path: Path) -> bool:
    """Whether files can be made at a path, or it can be made itself."""
    existing = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
    return os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)


def homes(environment: Mapping[str, str]) -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME"):
        value = environment.get(name)
        if value is None:
            if name == "HOME":
                found.append((name, "", "is not set"))
            continue
        path = Path(value)
        if not value or not path.is_absolute():
            problem = "is no absolute path"
        elif not os.path.exists(path):
            problem = "does not exist" if name == "HOME" or not _can_write(path) else ""
        elif not os.path.isdir(path):
            problem = "is no folder"
        else:
            problem = "" if _can_write(path) else "cannot be written"
        if problem:
            found.append((name, value, problem))
    return found


def ptx_cache(environment: Mapping[str, str]) -> tuple[str, bool]:
    default = os.path.join(environment.get("HOME") or "/", ".nv", "ComputeCache")
    path = environment.get("CUDA_CACHE_PATH") or default
    return path, environment.get("CUDA_CACHE_DISABLE", "0") in ("", "0") and _can_write(Path(path).absolute())


def try_import(environment: Mapping[str, str], seconds: float = IMPORT_SECONDS) -> Imported:
    """Imports torch and then the package in a process apart."""
    entries = json.dumps([entry or os.curdir for entry in sys.path])
    answer = ask([sys.executable, "-c", _IMPORT, entries], seconds, environment)
    if answer.state == "hangs":
        return Imported("hangs")
    try:
        report: dict[str, Any] = json.loads(answer.output.splitlines()[-1])
        return Imported("ok", report["torch"], report["package"], report["libraries"])
    except (IndexError, ValueError, KeyError, TypeError):
        return Imported("failed", torch=answer.last_words or answer.state)


def several(libraries: list[str]) -> dict[str, list[str]]:
    """The libraries that a process should hold once and holds more often: name and files."""
    found: dict[str, list[str]] = {}
    for name in _ONCE:
        pattern = re.compile(rf"{name}(-[0-9a-f]+)?\.so[.\d]*")
        files = sorted({os.path.realpath(path) for path in libraries if pattern.fullmatch(os.path.basename(path))})
        if len(files) > 1:
            found[name] = files
    return found


def taken(shadowing: list[str], libraries: list[str]) -> list[str]:
    """Those on LD_LIBRARY_PATH that a process really has."""
    inside = {os.path.realpath(path) for path in libraries}
    return [path for path in shadowing if os.path.realpath(path) in inside]


def gather(environment: Mapping[str, str] | None = None, root: Path = Path("/")) -> Facts:
    """Looks at this Python and this machine, without importing anything anywhere."""
    environment = os.environ if environment is None else environment
    torch, package = installed.find_torch(), installed.find_package()
    libc = platform.libc_ver()
    if libc == ("", "") and "musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or ""):
        libc = ("musl", "")
    return Facts(
        python=platform.python_version(),
        implementation=platform.python_implementation(),
        tag=tag(),
        executable=sys.executable,
        environment=environment_kind(),
        platform=sysconfig.get_platform(),
        machine=platform.machine(),
        libc=libc,
        torch=torch,
        package=package,
        unreadable=installed.unreadable() if package is None else None,
        driver=gpus.look(environment, root),
        visible=environment.get(gpus.VISIBLE),
        shadows=shadows(environment),
        homes=homes(environment),
        ptx_cache=ptx_cache(environment),
        imported=None,
    )
