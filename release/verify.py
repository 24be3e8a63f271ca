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
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from . import fatbin, matrix, record, torch_info
from .preflight import cxx_compiler

PACKAGE = "scaled_mask_softmax"
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


def metadata(archive: zipfile.ZipFile) -> Message:
    names = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
    _require(len(names) == 1, f"{len(names)} METADATA files where one is expected")
    return Parser().parsestr(archive.read(names[0]).decode("utf-8"))


def _check_record_file(archive: zipfile.ZipFile) -> None:
    """Every file is in RECORD with its true hash, and the other way round."""
    (name,) = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/RECORD", name)]
    rows = {row[0]: row[1] for row in csv.reader(io.StringIO(archive.read(name).decode("utf-8")))}
    files = {info.filename for info in archive.infolist() if not info.is_dir()}
    _require(rows.keys() == files, f"RECORD and contents differ: {', '.join(sorted(rows.keys() ^ files))}")
    for file, value in rows.items():
        if file != name:
            digest = base64.urlsafe_b64encode(hashlib.sha256(archive.read(file)).digest()).rstrip(b"=").decode()
            _require(value == f"sha256={digest}", f"RECORD has another hash than {file}")


def _check_names(wheel: Path, version: str, build: dict[str, Any], requires: list[str]) -> str:
    """File name, METADATA and build record agree. Returns the platform tag."""
    parts = wheel.name.removesuffix(".whl").split("-")
    _require(len(parts) == 5, f"{wheel.name} is not name-version-python-abi-platform.whl")
    name, file_version, python, abi, platform = parts
    _require(name == PACKAGE, f"the file is named {name}, not {PACKAGE}")
    _require(file_version == version, f"the file name says {file_version}, METADATA {version}")
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
    _require(python == abi == tag, f"tags {python}-{abi}, but built by Python {build['python']}")
    return platform


def _check_elf(name: str, data: bytes, platform: str) -> None:
    """RPATH is relative, nothing else than promised is needed, and the manylinux tag is true."""
    from elftools.elf.elffile import ELFFile
    from elftools.elf.gnuversions import GNUVerNeedSection

    policies = json.loads(importlib.resources.files("auditwheel.policy").joinpath("manylinux-policy.json").read_text())
    match = re.search(r"manylinux_(\d+)_(\d+)_(\w+)$", platform)
    _require(match, f"platform tag {platform} is no manylinux")
    assert match is not None
    policy = next((p for p in policies if p["name"] == f"manylinux_{match[1]}_{match[2]}"), None)
    _require(policy, f"no manylinux_{match[1]}_{match[2]} is known")
    assert policy is not None
    allowed = policy["symbol_versions"][match[3]]

    elf: Any = ELFFile(io.BytesIO(data))
    machine = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}.get(elf["e_machine"])
    _require(machine == match[3], f"{name} is of {elf['e_machine']}, the tag says {match[3]}")
    dynamic = list(elf.get_section_by_name(".dynamic").iter_tags())
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


def verify(wheel: Path, *, cuobjdump: Path | None = None, complete: bool = False) -> Report:
    """Verifies a native wheel; `complete` also that it serves the architectures of the matrix."""
    data = matrix.load()
    size = wheel.stat().st_size
    _require(size <= data.max_wheel_size << 20, f"{size / 2**20:.1f} MiB is more than {data.max_wheel_size} MiB")
    with zipfile.ZipFile(wheel) as archive:
        _check_record_file(archive)
        message = metadata(archive)
        version = str(message["Version"])
        build = record.read(archive.read(f"{PACKAGE}/_build_record.py").decode("utf-8"))
        all_requires = [str(value) for value in message.get_all("Requires-Dist") or []]
        _require(not any("+" in value for value in all_requires), f"a '+' in Requires-Dist: {all_requires}")
        requires = [value for value in all_requires if "extra ==" not in value]
        platform = _check_names(wheel, version, build, requires)

        libraries = [name for name in archive.namelist() if re.search(r"\.so(\.|$)", name)]
        modules = [name for name in libraries if fnmatchcase(name, MODULE)]
        _require(
            len(modules) == 1 and sorted(libraries) == sorted([LIBRARY, *modules]),
            f"exactly {LIBRARY} and {MODULE} are expected inside, found {', '.join(libraries)}",
        )
        for name in libraries:
            _check_elf(name, archive.read(name), platform)

        with tempfile.TemporaryDirectory() as folder:
            library = Path(archive.extract(LIBRARY, folder))
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
        cuda = data.cuda[torch_info.cuda_label(build["cuda"])]
        machine = platform.split("_", 3)[-1]
        expected = cuda.architectures[machine].removesuffix("+PTX").split(";")
        _require(architectures == expected, f"architectures {architectures}, the matrix has {expected}")
    return Report(wheel, version, size, architectures, ptx, len(wanted), platform)
