"""Compares the installed build with torch, the driver and the GPUs, and says what mends a misfit."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from . import diagnoses, facts, gpus, installed, known
from .diagnoses import Judgement
from .facts import Facts
from .remedy import redacted
from .status import FITS, MEANING, MISFIT, NO_GPU, NOTHING, SOME_GPUS

# What a bug report shows of the environment.
_VARIABLES = ("CUDA_", "LD_LIBRARY_PATH", "NVIDIA_", "PIP_", "PYTHON", "SCALED_MASK_SOFTMAX_", "TORCH", "UV_")
# Values of variables of such names are nobody's business.
_SECRET = re.compile("TOKEN|PASSW|SECRET|KEY|AUTH|CREDENTIAL|USERNAME", re.I)
_DISTRIBUTIONS = ("nvidia", "scaled-mask-softmax", "scaled_mask_softmax", "torch", "triton")


def print_version() -> int:
    """Print the version; NOTHING where there is no package."""
    package = installed.find_package()
    if package is None:
        print(diagnoses.DIAGNOSES["no-package"].message, file=sys.stderr)
        return NOTHING
    print(package.version)
    return FITS


def _abi(cxx11_abi: bool | None) -> str:
    return {True: "C++11 ABI", False: "pre-C++11 ABI", None: "C++ ABI unknown"}[cxx11_abi]


def _record_rows(package: installed.Package) -> Iterator[tuple[str, str]]:
    record = package.record
    if record is None:
        yield "built for", "any torch: a plain wheel, without native kernels"
        return
    yield "built for", f"{package.build.built_for(record)}; Python {record['python']}, {record['platform']}"
    compilers = [record["host_compiler"]]
    if record["cuda_compiler"] is not None:
        compilers.insert(0, f"nvcc {record['cuda_compiler']}")
    yield "built with", f"torch {record['torch']}, {', '.join(compilers)}; commit {record['commit'] or 'unknown'}"
    if record["cuda"] is not None:
        ptx = f"; PTX {', '.join(record['ptx'])}" if record["ptx"] else ""
        yield "GPU code", f"compute capability {', '.join(record['architectures']) or 'none'}{ptx}"


def _driver_text(driver: gpus.Driver) -> str:
    if driver.state == "absent":
        return "none found" if not driver.smi_gpus else f"{driver.version}, but without libcuda.so.1"
    parts = [driver.version or "of unknown version", f"CUDA {driver.cuda}" if driver.cuda else ""]
    where = f" ({driver.library})" if driver.library else ""
    windows = ", of Windows (WSL2)" if driver.wsl else ""
    state = "" if driver.state == "works" else f"; {driver.state}: {driver.error}"
    return ", ".join(filter(None, parts)) + windows + where + state


def _gpu_rows(found: Facts, judgement: Judgement) -> Iterator[tuple[str, str]]:
    words = {item.gpu.index: item.verdict for item in judgement.gpus}
    for gpu in found.driver.visible:
        verdict = f": {words[gpu.index]}" if gpu.index in words else ""
        yield f"GPU {gpu.index}", f"{gpu.name}, compute capability {gpu.capability}{verdict} ({gpu.uuid})"
    hidden = len(found.driver.all) - len(found.driver.visible)
    if hidden > 0:
        yield "hidden", f"{hidden} more, by {gpus.VISIBLE}={found.visible}"


def _import_text(imported: facts.Imported) -> str:
    if imported.state == "hangs":
        return "did not end"
    if imported.torch or imported.package:
        return "fails"
    return "torch and the package, in a process apart"


def _finding_rows(judgement: Judgement) -> Iterator[tuple[str, str]]:
    for finding in judgement.notes:
        yield "note", f"{finding.text}{f' Fix: {finding.fix}.' if finding.fix else ''}"
    for finding in judgement.problems[1:]:
        yield "also", f"{finding.text}{f' Fix: {finding.fix}.' if finding.fix else ''}"


def _verdict_rows(judgement: Judgement) -> Iterator[tuple[str, str]]:
    # An error of the package spans lines, the last of them the fix.
    first, *more = judgement.verdict.splitlines()
    yield "verdict", first
    yield from (("", line.strip()) for line in more)
    way = judgement.remedy
    problem = judgement.problems[0] if judgement.problems else None
    lines: list[tuple[str, str]] = []
    if problem is not None:
        lines = [("fix", problem.fix)] if problem.fix else way.lines or [("fix", "install scaled-mask-softmax again")]
    elif any(finding.diagnosis == "plain-on-cuda" for finding in judgement.notes):
        lines = [("for native", way.first), *way.lines[1:]]
    yield from lines
    if lines and lines[0][1] == way.first:
        if way.no_wheel:
            yield "wheel", f"no prebuilt wheel: {way.no_wheel}"
        if way.takes:
            yield "takes", way.takes


def rows(found: Facts, judgement: Judgement) -> Iterator[tuple[str, str]]:
    """The table: what, and what is known of it."""
    yield "Python", f"{found.python} ({found.implementation}, {found.tag}, {found.environment}; {found.executable})"
    yield "platform", f"{found.platform}, {' '.join(filter(None, found.libc)) or 'libc unknown'}"
    torch, package = found.torch, found.package
    if torch is None:
        yield "torch", "not installed"
    else:
        cuda = f"ROCm {torch.hip}" if torch.hip else f"CUDA {torch.cuda or 'none'}"
        kind = f"{torch.flavour} build"
        yield (
            "torch",
            f"{torch.version or 'of unknown version'}, {cuda}, {_abi(torch.cxx11_abi)}, {kind} ({torch.folder})",
        )
    if package is None:
        yield "package", "not installed" if found.unreadable is None else f"broken ({found.unreadable.parent})"
    else:
        yield "package", f"{package.version} ({package.folders[0]})"
        yield from _record_rows(package)
    yield "driver", _driver_text(found.driver)
    yield from _gpu_rows(found, judgement)
    if found.imported is not None:
        yield "imports", _import_text(found.imported)
    yield from _finding_rows(judgement)
    yield from _verdict_rows(judgement)


def _visible(text: str) -> str:
    """A line, with what would move the cursor, or is in no encoding, as an escape."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _line(what: str, text: str) -> str:
    return f"{what:<10} {_visible(text)}\n"


def table(found: Facts, judgement: Judgement) -> str:
    return "".join(_line(what, text) for what, text in rows(found, judgement))


def _plain(value: Any) -> Any:
    """Values as JSON has them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def as_json(found: Facts, judgement: Judgement) -> dict[str, Any]:
    everything: dict[str, Any] = _plain(found)
    package = found.package
    if package is not None:
        everything["package"].pop("build")
        everything["package"].update(version=package.version, missing=package.missing)
    everything["gpus"] = [{**_plain(item.gpu), "verdict": item.verdict} for item in judgement.gpus]
    everything.update(
        status=judgement.status,
        verdict=judgement.verdict,
        findings=[_plain(finding) for finding in judgement.findings],
        commands=dict(judgement.remedy.lines),
        no_wheel=judgement.remedy.no_wheel,
        takes=judgement.remedy.takes,
    )
    return everything


def _distribution_lines() -> list[str]:
    found = {
        f"{item.metadata['Name']} {item.version}"
        for item in metadata.distributions()
        if str(item.metadata["Name"] or "").lower().startswith(_DISTRIBUTIONS)
    }
    return sorted(found, key=str.lower)


def bug_report(found: Facts, judgement: Judgement) -> str:
    """Everything, as a block to paste: without passwords in addresses, and with ~ for the home."""
    variables = [
        _visible(f"{name}={'***' if _SECRET.search(name) else value}")
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES)
    ]
    table_data = known.load()
    parts = [
        table(found, judgement),
        "\n".join(variables) or "no variables of Python, CUDA or torch are set",
        "\n".join(_distribution_lines()) or "no distributions of torch are installed",
        f"matrix of {table_data.version if table_data else 'unknown version'}; status {judgement.status}; findings: "
        + (", ".join(finding.diagnosis for finding in judgement.findings) or "none"),
    ]
    text = redacted("\n\n".join(part.rstrip("\n") for part in parts))
    home = str(Path.home()) if "HOME" in os.environ else ""
    if len(home) > 1:
        text = text.replace(home, "~")
    return f"```\n{text}\n```\n"


def add_arguments(command: argparse.ArgumentParser) -> None:
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print everything as JSON")
    form.add_argument("--bug-report", action="store_true", help="print a block to paste into an issue")
    form.add_argument("--quiet", action="store_true", help="print the verdict alone, and nothing where all is well")
    command.add_argument("--require-gpu", action="store_true", help="status 4 where no GPU is visible")
    command.add_argument(
        "--no-import", action="store_true", help="import nothing, not even in a process apart: for a quick check"
    )
    statuses = "; ".join(f"{status}: {MEANING[status]}" for status in (FITS, MISFIT, NOTHING, SOME_GPUS, NO_GPU))
    command.epilog = f"Exit statuses: {statuses}."
    command.set_defaults(run=examine)


def examine(arguments: argparse.Namespace) -> int:
    """Print what there is, whether it fits and the command that mends it. Return the exit status."""
    found = facts.gather()
    judgement = diagnoses.judge(found, require_gpu=arguments.require_gpu)
    if judgement.status not in (MISFIT, NOTHING) and not arguments.no_import:
        # The files promise that it works.
        found = dataclasses.replace(found, imported=facts.try_import(os.environ))
        judgement = diagnoses.judge(found, require_gpu=arguments.require_gpu)
    if arguments.json:
        print(json.dumps(as_json(found, judgement), indent=2))
    elif arguments.bug_report:
        print(bug_report(found, judgement), end="")
    elif arguments.quiet:
        if judgement.status != FITS:
            print("".join(_line(what, text) for what, text in _verdict_rows(judgement)), end="")
    else:
        print(table(found, judgement), end="")
    return judgement.status
