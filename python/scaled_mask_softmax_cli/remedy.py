"""The commands that mend an installation here, and what a build costs."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from . import gpus, installed, known
from .facts import tag

# One compilation of everything, with one process at a time: seconds for the code of one architecture and for each
# further one, and what the largest compiler took; docs/install/finder.md has the measurement.
_FIRST_SECONDS, _NEXT_SECONDS, _CPU_SECONDS, _JOB_GB = 260, 125, 80, 1.0


@dataclass(frozen=True)
class Remedy:
    """Ways to the same end: what to call each, and the command."""

    lines: list[tuple[str, str]]
    no_wheel: str = ""  # why no prebuilt wheel is made for this machine
    takes: str = ""  # what building takes

    @property
    def first(self) -> str:
        return self.lines[0][1] if self.lines else ""


def torch_facts(build: ModuleType, torch: installed.Torch) -> Any:
    """The running torch as the package's own comparison takes it."""
    return build.TorchFacts(torch.version, torch.cuda, torch.hip, torch.cxx11_abi)


def redacted(text: str) -> str:
    """A text without the names and passwords that its addresses hold, even those with a / that should be a %2F."""
    return re.sub(r"(?<=://)(?:[^/@\s\"']*:[^\s\"']*|[^/\s\"']*)@", "***@", text)


def jobs() -> int:
    """How many compilations run at a time: MAX_JOBS, or what cores and free memory allow (cmake/Jobs.cmake)."""
    if re.fullmatch(r"[1-9]\d*", given := os.environ.get("MAX_JOBS", "")):
        return int(given)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            (available,) = re.findall(r"^MemAvailable:\s+(\d+) kB$", file.read(), re.M)
    except (OSError, ValueError):
        return cores
    return max(1, min(cores, int(available) // 3_000_000))


def estimate(architectures: int, parallel: int) -> tuple[int, float]:
    """What a build takes: minutes and GB of memory."""
    seconds = _CPU_SECONDS if architectures == 0 else _FIRST_SECONDS + _NEXT_SECONDS * (architectures - 1)
    return max(1, round(seconds / parallel / 60)), max(1.0, round(_JOB_GB * parallel, 1))


def architectures(driver: gpus.Driver, cuda: str | None, machine: str) -> str:
    """What to build for, as TORCH_CUDA_ARCH_LIST: the GPUs that are here, or else what the matrix has for that CUDA."""
    if cuda is None:
        return ""
    here = sorted({gpu.capability for gpu in driver.all or driver.smi_gpus})
    if here:
        return ";".join(here)
    rules, table = installed.rules(), known.load()
    row = table.cuda.get(rules.cuda_label(cuda)) if rules is not None and table is not None else None
    return row.architectures.get(machine, "") if row is not None else ""


def names(architectures: str) -> list[str]:
    """Those in a TORCH_CUDA_ARCH_LIST."""
    return [name for name in re.split("[; ,]", architectures) if name]


def what_it_takes(count: int) -> str:
    parallel = jobs()
    minutes, memory = estimate(count, parallel)
    what = f"{count} architecture{'s' if count != 1 else ''}" if count else "the CPU alone"
    times = f"{parallel} compilation{'s' if parallel != 1 else ''} at a time"
    return f"about {minutes} min on idle cores and {memory:g} GB of memory for {what}, {times}"


def uv_command(pip_command: str, python: str) -> str:
    """The same with uv, for that Python."""
    return pip_command.replace("pip install --force-reinstall", f"uv pip install --python {python} --reinstall", 1)


def has_pip() -> bool:
    return importlib.util.find_spec("pip") is not None


def for_torch(version: str, torch: installed.Torch, driver: gpus.Driver, machine: str) -> Remedy:
    """How to get the build of `version` that fits a torch."""
    build = installed.rules()
    if build is None:
        return Remedy([])
    facts = torch_facts(build, torch)
    command = build.how_to_install(version, facts)
    reason = build.why_no_wheel(facts)
    if reason is None:
        reason = _unfit_machine() or ""
        if reason and not command.startswith(build.BUILD_COMMAND):
            command = f"{build.how_to_compile()} (no prebuilt wheel: {reason})"
    if command.startswith(build.BUILD_COMMAND):
        takes = what_it_takes(len(names(architectures(driver, torch.cuda, machine))))
        return Remedy([("fix", command)], reason, takes)
    if not build.index_url():
        return Remedy([("fix", command)], reason)
    lines = [("fix", command)]
    if not command.startswith(build.INSTALL_COMMAND):
        lines.append(("with uv", uv_command(command, sys.executable)))
    if facts.has_channel:
        python = "{}.{}".format(*sys.version_info)
        lines.append(("mirrored", "scaled-mask-softmax install --index MIRROR, an address or a folder that holds whl/"))
        lines.append(
            (
                "offline",
                f"scaled-mask-softmax download --torch {facts.minor} --cuda {build.cuda_label(torch.cuda)} --python "
                f"{python} --platform {machine} DIR where there is a network; then scaled-mask-softmax install "
                "--index DIR here",
            )
        )
    return Remedy(lines, reason)


def _unfit_machine() -> str | None:
    """What about this Python's C library or build keeps prebuilt wheels out."""
    table = known.load()
    if table is None:
        return None
    name, version = platform.libc_ver()
    if name == "glibc" and (numbers := re.findall(r"\d+", version)):
        found = (int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 0)
        if found < table.glibc:
            wanted = ".".join(map(str, table.glibc))
            return f"they need glibc {wanted} or newer, and this is {version}"
    elif sys.platform == "linux" and name != "glibc":
        return "they need glibc, and this system has another C library"
    if (here := tag()) != "cp{}{}".format(*sys.version_info):
        return f"they are made for CPython with its global lock, and this takes {here} wheels"
    return None


def torch_command(record: Mapping[str, Any] | None) -> str:
    """What installs a torch that a build fits."""
    table = known.load()
    if record is None:
        return "pip install torch"
    rules = installed.rules()
    if rules is None or not rules.is_release(record["torch"]):
        return f"install torch {record['torch']}, which this build is for"
    label = rules.cuda_label(record["cuda"])
    row = table.torch.get(record["torch_minor"]) if table is not None else None
    where = (
        "" if table is None or row is None or label == row.default else f"--index-url {table.torch_channels}/{label} "
    )
    return f'pip install {where}"torch=={record["torch_minor"]}.*"'


def installer(which: str | None = None) -> list[str]:
    """The installer for this Python: its own pip, or else uv, or the one asked for. Empty where there is none."""
    if which != "uv" and has_pip():
        return [sys.executable, "-m", "pip"]
    uv = shutil.which("uv") if which != "pip" else None
    return [uv, "pip"] if uv else []
