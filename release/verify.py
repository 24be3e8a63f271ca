"""Checks a wheel before anyone installs it. Raises VerifyError with the first thing that is wrong."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.resources
import io
import json
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from . import fatbin, matrix, record, torch_info, wheel_file
from .preflight import cxx_compiler
from .wheel_file import WheelFile, WheelFileError

PACKAGE = wheel_file.NAME
LIBRARY = f"{PACKAGE}/lib{PACKAGE}.so"
MODULE = f"{PACKAGE}/_C.*.so"

# What a library of ours may ask for beside the manylinux libraries: torch's own, its CUDA runtime, and ours.
_BROUGHT = ("libtorch*.so", "libc10*.so", "libcudart.so.*", f"lib{PACKAGE}.so")


class VerifyError(ValueError):
    """A wheel is not what it says."""


@dataclass(frozen=True)
class Report:
    wheel: Path
    version: str
    size: int
    architectures: list[str]
    ptx: list[str]
    kernels: int  # in each architecture
    tag: str


def _require(condition: object, message: str) -> None:
    if not condition:
        raise VerifyError(message)


def _check_record_file(files: dict[str, bytes]) -> None:
    """Every file is in RECORD with its true hash, and the other way round."""
    name = wheel_file.in_info(files, "RECORD")
    rows = list(csv.reader(io.StringIO(files[name].decode("utf-8", "replace"))))
    _require(all(len(row) == 3 for row in rows), "RECORD is not a table of paths, hashes and sizes")
    hashes = {path: value for path, value, _ in rows}
    _require(hashes.keys() == files.keys(), f"RECORD and contents differ: {', '.join(sorted(hashes.keys() ^ files))}")
    for file, value in hashes.items():
        if file != name:
            digest = base64.urlsafe_b64encode(hashlib.sha256(files[file]).digest()).rstrip(b"=").decode()
            _require(value == f"sha256={digest}", f"RECORD has another hash than {file}")


def _read_record(files: dict[str, bytes]) -> dict[str, Any]:
    """The build record, with every key that the checks use."""
    name = f"{PACKAGE}/_build_record.py"
    _require(name in files, f"{name} is missing")
    build = record.read(files[name].decode("utf-8", "replace"))
    wanted = ("version", "torch", "torch_minor", "cuda", "architectures", "ptx", "python")
    missing = [key for key in wanted if key not in build]
    _require(not missing, f"the build record lacks {', '.join(missing)}")
    return build


def _check_names(wheel: WheelFile, build: dict[str, Any], requires: list[str]) -> None:
    """The file name, which is METADATA's, and the build record agree."""
    version = wheel.version
    _require(build["version"] == version, f"the build record says {build['version']}, METADATA {version}")
    _require(version == version.lower(), f"version {version} is not lower case")
    label = version.partition("+")[2]
    minor, cuda = build["torch_minor"], torch_info.cuda_label(build["cuda"])
    _require(build["torch"].startswith(f"{minor}."), f"build record: torch {build['torch']} is not of {minor}")
    if torch_info.is_release(build["torch"]):
        _require(label == f"{cuda}torch{minor}", f"label {label} is not {cuda}torch{minor}")
        major, number = minor.split(".")
        pin = {f">={minor}", f"<{major}.{int(number) + 1}"}
        _require(len(requires) == 1, f"Requires-Dist must pin torch and name nothing else: {requires}")
        match = re.fullmatch(r"torch\s*\(?([^)+]*)\)?", requires[0])
        _require(match and set(match[1].replace(" ", "").split(",")) == pin, f"Requires-Dist is {requires[0]!r}")
    else:
        _require(label.startswith(f"{cuda}torch{minor}") and not requires, f"label {label}, Requires-Dist {requires}")
    tag = "cp" + build["python"].replace(".", "")
    python, abi, _ = wheel.tags
    _require(python == abi == tag, f"tags {python}-{abi}, but built by Python {build['python']}")


def _machine(platform: str) -> str:
    """The machine of a manylinux tag: "x86_64"."""
    match = re.search(r"manylinux_\d+_\d+_(\w+)$", platform)
    _require(match, f"platform tag {platform} is no manylinux")
    assert match is not None
    return match[1]


def _check_elf(name: str, data: bytes, platform: str) -> None:
    """RPATH is relative, nothing else than promised is needed, and the manylinux tag is true."""
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile
    from elftools.elf.gnuversions import GNUVerNeedSection

    policies = json.loads(importlib.resources.files("auditwheel.policy").joinpath("manylinux-policy.json").read_text())
    machine = _machine(platform)
    manylinux = platform.split(".")[-1].removesuffix(f"_{machine}")
    policy = next((p for p in policies if p["name"] == manylinux), None)
    _require(policy and machine in policy["symbol_versions"], f"no {manylinux} for {machine} is known")
    assert policy is not None
    allowed = policy["symbol_versions"][machine]

    try:
        elf: Any = ELFFile(io.BytesIO(data))
    except ELFError:
        raise VerifyError(f"{name} is no shared library") from None
    built_for = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}.get(elf["e_machine"])
    _require(built_for == machine, f"{name} is of {elf['e_machine']}, the tag says {machine}")
    section = elf.get_section_by_name(".dynamic")
    _require(section, f"{name} is no shared library")
    dynamic = list(section.iter_tags())
    needed = [tag.needed for tag in dynamic if tag.entry.d_tag == "DT_NEEDED"]
    _require("libstdc++.so.6" in needed, f"{name} holds a C++ library of its own, which crashes beside torch's")
    for tag in dynamic:
        if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
            value = tag.runpath if tag.entry.d_tag == "DT_RUNPATH" else tag.rpath
            for entry in value.split(":"):
                _require(entry == "$ORIGIN" or entry.startswith("$ORIGIN/"), f"{name}: RPATH {entry!r} is not relative")
    for library in needed:
        known = library in policy["lib_whitelist"] or any(fnmatchcase(library, glob) for glob in _BROUGHT)
        loader = re.fullmatch(r"ld-linux-[a-z0-9-]+\.so\.\d", library)
        _require(known or loader, f"{name} needs {library}, which nobody brings")
    for section in elf.iter_sections():
        if not isinstance(section, GNUVerNeedSection):
            continue
        for source, versions in section.iter_versions():
            for version in versions:
                family, _, number = version.name.partition("_")
                if source.name in policy["lib_whitelist"] and family in allowed and number not in allowed[family]:
                    raise VerifyError(f"{name} needs {version.name} of {source.name}: {platform} is not true")


def policy_kernels() -> list[str]:
    """How the symbols of the kernels that the policy can choose begin, from the policy's own source."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "kernels")
        source = Path(__file__).with_name("kernels.cpp")
        command = [*cxx_compiler().split(), "-std=c++20", "-o", str(program), str(source)]
        result = subprocess.run(command, capture_output=True, text=True)
        _require(result.returncode == 0, f"the list of kernels does not compile: {result.stderr}")
        return subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()


def check_kernels(present: dict[str, set[str]], wanted: Iterable[str]) -> None:
    """Every wanted kernel is in the cubins of every architecture."""
    wanted = list(wanted)
    for arch, names in present.items():
        missing = [prefix for prefix in wanted if not any(name.startswith(prefix) for name in names)]
        _require(not missing, f"no cubin for {arch} of {len(missing)} kernels, the first {missing[:1]}")


def _verify(path: Path, cuobjdump: Path | None, complete: bool) -> Report:
    data = matrix.load()
    wheel = wheel_file.read(path)
    size = path.stat().st_size
    _require(size <= data.max_wheel_size << 20, f"{size / 2**20:.1f} MiB is more than {data.max_wheel_size} MiB")
    _require(not wheel.is_plain, "this is a plain wheel, and only native ones are verified: give one built for a torch")
    _check_record_file(wheel.files)
    build = _read_record(wheel.files)
    all_requires = [str(value) for value in wheel.message.get_all("Requires-Dist") or []]
    _require(not any("+" in value for value in all_requires), f"a '+' in Requires-Dist: {all_requires}")
    _check_names(wheel, build, [value for value in all_requires if "extra ==" not in value])
    platform = wheel.tags[2]

    libraries = [name for name in wheel.files if re.search(r"\.so(\.|$)", name)]
    modules = [name for name in libraries if fnmatchcase(name, MODULE)]
    _require(
        len(modules) == 1 and sorted(libraries) == sorted([LIBRARY, *modules]),
        f"exactly {LIBRARY} and {MODULE} are expected inside, found {', '.join(libraries)}",
    )
    for name in libraries:
        _check_elf(name, wheel.files[name], platform)

    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, Path(LIBRARY).name)
        library.write_bytes(wheel.files[LIBRARY])
        entries = fatbin.read(library)
        architectures, ptx = fatbin.architectures(entries), fatbin.ptx(entries)
        _require(
            build["architectures"] == architectures and build["ptx"] == ptx,
            f"the build record says {build['architectures']} and PTX {build['ptx']}, the library holds "
            f"{architectures} and PTX {ptx}",
        )
        _require(bool(architectures) == (build["cuda"] is not None), f"CUDA {build['cuda']}: {architectures}")
        wanted: list[str] = []
        if architectures:
            wanted = policy_kernels()
            check_kernels(fatbin.kernels(entries, library, cuobjdump), wanted)
    if complete and build["cuda"] is not None:
        label, machine = torch_info.cuda_label(build["cuda"]), _machine(platform)
        _require(label in data.cuda and machine in data.platforms, f"the matrix has no {label} for {machine}")
        expected = data.cuda[label].architectures[machine].removesuffix("+PTX").split(";")
        _require(architectures == expected, f"architectures {architectures}, the matrix has {expected}")
    return Report(path, wheel.version, size, architectures, ptx, len(wanted), platform)


def verify(wheel: Path, *, cuobjdump: Path | None = None, complete: bool = False) -> Report:
    """Verifies a native wheel; `complete` also that it serves the architectures of the matrix.

    Raises VerifyError, naming the wheel.
    """
    try:
        return _verify(wheel, cuobjdump, complete)
    except WheelFileError as error:
        raise VerifyError(str(error)) from None
    except (VerifyError, fatbin.FatbinError, record.RecordError) as error:
        raise VerifyError(f"{wheel}: {error}") from None
