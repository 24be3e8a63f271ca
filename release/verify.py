"""Checks a wheel before anyone installs it, gate by gate. Raises VerifyError with the first thing that is wrong."""

from __future__ import annotations

import base64
import collections
import contextlib
import csv
import hashlib
import importlib.resources
import io
import json
import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from . import ROOT, fatbin, matrix, record, sbom, symbols, torch_info, wheel_file
from .preflight import cxx_compiler
from .progress import StepError
from .wheel_file import WheelFile, WheelFileError

PACKAGE = wheel_file.NAME
LIBRARY = f"{PACKAGE}/lib{PACKAGE}.so"
MODULE = f"{PACKAGE}/_C.*.so"

# Of a quarter of a multiprocessor, on every architecture. A warp takes all its own from one quarter, by 8 a thread.
_QUARTER_REGISTERS = 16384
# So few warps still keep memory busy, and so few bytes a thread stay in the nearest cache.
_LEAST_WARPS, _MOST_STACK = 16, 128

# What a library of ours may ask for beside what `_brought` says: the C and C++ libraries of every Linux.
_SYSTEM = {
    f"lib{name}" for name in ("stdc++.so.6", "gcc_s.so.1", "c.so.6", "m.so.6", "dl.so.2", "pthread.so.0", "rt.so.1")
}


# What the checks use of a build record: text that matches, or a list of such.
_RECORD = {
    "version": r"[\w.+]+",
    "torch": r"[\w.+]+",
    "torch_minor": r"\d+\.\d+",
    "cuda": r"\d+\.\d+",
    "architectures": r"\d+\.\d+[a-z]?",
    "ptx": r"\d+\.\d+[a-z]?",
    "python": r"\d+\.\d+",
}


class VerifyError(ValueError):
    """A wheel is not what it says. The text begins with the gate that it did not pass."""


@dataclass(frozen=True)
class Report:
    wheel: Path
    version: str
    size: int
    architectures: list[str]
    ptx: list[str]
    kernels: int  # in each architecture
    tag: str
    gates: tuple[str, ...]  # what it passed


def _require(condition: object, message: str) -> None:
    if not condition:
        raise VerifyError(message)


def _check_record_file(files: dict[str, bytes]) -> None:
    """Every file is in RECORD with its true hash, and the other way round."""
    name = wheel_file.in_info(files, "RECORD")
    try:
        rows = list(csv.reader(io.StringIO(files[name].decode("utf-8", "replace"))))
    except csv.Error as error:
        raise VerifyError(f"RECORD is not a table of paths, hashes and sizes: {error}") from None
    _require(all(len(row) == 3 for row in rows), "RECORD is not a table of paths, hashes and sizes")
    twice = sorted(path for path, count in collections.Counter(row[0] for row in rows).items() if count > 1)
    _require(not twice, f"RECORD has more than one row of {', '.join(twice)}")
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
    missing = [key for key in _RECORD if key not in build]
    _require(not missing, f"the build record lacks {', '.join(missing)}")
    for key, pattern in _RECORD.items():
        value = build[key]
        values = value if key in ("architectures", "ptx") else [value]
        right = isinstance(values, list) and all(
            isinstance(text, str) and re.fullmatch(pattern, text, re.ASCII) for text in values
        )
        _require(right or (key == "cuda" and value is None), f"the build record's {key} is {value!r}: build it again")
    return build


def build_record(wheel: Path) -> dict[str, Any]:
    """The build record of a wheel. Raises WheelFileError or VerifyError, naming it."""
    read = wheel_file.read(wheel)
    try:
        return _read_record(read.files)
    except (VerifyError, record.RecordError) as error:
        raise VerifyError(f"{wheel}: {error}") from None


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


class _Library:
    """One of the wheel's libraries, opened."""

    def __init__(self, name: str, data: bytes) -> None:
        from elftools.common.exceptions import ELFError
        from elftools.elf.elffile import ELFFile

        self.name, self.data = name, data
        try:
            self.elf: Any = ELFFile(io.BytesIO(data))
        except ELFError:
            raise VerifyError(f"{name} is no shared library") from None
        section: Any = self.elf.get_section_by_name(".dynamic")
        _require(section, f"{name} is no shared library")
        self._dynamic = list(section.iter_tags())

    @property
    def needed(self) -> set[str]:
        return {tag.needed for tag in self._dynamic if tag.entry.d_tag == "DT_NEEDED"}

    @property
    def search_path(self) -> list[str]:
        found = []
        for tag in self._dynamic:
            if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
                found += (tag.runpath if tag.entry.d_tag == "DT_RUNPATH" else tag.rpath).split(":")
        return found

    @property
    def versions(self) -> Iterator[tuple[str, str]]:
        """Each library that a version of a symbol is asked of, and that version: "libc.so.6", "GLIBC_2.14"."""
        from elftools.elf.gnuversions import GNUVerNeedSection

        for section in self.elf.iter_sections():
            if isinstance(section, GNUVerNeedSection):
                for source, versions in section.iter_versions():
                    yield from ((str(source.name), str(version.name)) for version in versions)


def _check_needed(library: _Library, build: dict[str, Any]) -> None:
    """It asks for exactly what its cell brings, and beside that only for what every Linux has."""
    if library.name == LIBRARY:
        brought = {"libc10.so", "libtorch_cpu.so"}
        if build["cuda"] is not None:
            brought |= {"libc10_cuda.so", "libtorch_cuda.so", f"libcudart.so.{build['cuda'].split('.')[0]}"}
    else:
        brought = {Path(LIBRARY).name}
    needed = library.needed
    _require("libstdc++.so.6" in needed, f"{library.name} holds a C++ library of its own, which crashes beside torch's")
    loader = {name for name in needed if re.fullmatch(r"ld-linux-[a-z0-9-]+\.so\.\d", name)}
    for name in sorted(needed - brought - _SYSTEM - loader):
        raise VerifyError(f"{library.name} needs {name}, which nobody brings")
    for name in sorted(brought - needed):
        raise VerifyError(f"{library.name} does not ask for {name}, whose symbols it uses")


def _check_search_path(library: _Library) -> None:
    for entry in library.search_path:
        _require(entry == "$ORIGIN" or entry.startswith("$ORIGIN/"), f"{library.name}: RPATH {entry!r} is not relative")


def _check_platform(library: _Library, platform: str) -> None:
    """The platform tag is true: the machine, and no symbol newer than the tag's C and C++ libraries."""
    policies = json.loads(importlib.resources.files("auditwheel.policy").joinpath("manylinux-policy.json").read_text())
    machine = _machine(platform)
    manylinux = platform.split(".")[-1].removesuffix(f"_{machine}")
    policy = next((p for p in policies if p["name"] == manylinux), None)
    _require(policy and machine in policy["symbol_versions"], f"no {manylinux} for {machine} is known")
    assert policy is not None
    allowed = policy["symbol_versions"][machine]
    built_for = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}.get(library.elf["e_machine"])
    _require(built_for == machine, f"{library.name} is of {library.elf['e_machine']}, the tag says {machine}")
    for source, version in library.versions:
        family, _, number = version.partition("_")
        if source in policy["lib_whitelist"] and family in allowed and number not in allowed[family]:
            raise VerifyError(f"{library.name} needs {version} of {source}: {platform} is not true")


def _check_stripped(library: _Library) -> None:
    for section in library.elf.iter_sections():
        kept = section.name == ".symtab" or section.name.startswith(".debug")
        _require(not kept, f"{library.name} is not stripped: it holds {section.name}")


def _check_paths(library: _Library) -> None:
    """No path of the machine that built it: what such a file says must not depend on where that was."""
    for name, contents in fatbin.sections(library.data):
        # Below a folder at least: "/p.h" alone comes up by chance in some megabytes of code.
        pattern = rb"(?<![\w.+-])/[\w+.@-]+(?:/[\w+.@-]+)+\.(?:h|hpp|cuh|cpp|cc|cu)\b"
        if name == ".nv_fatbin" and fatbin.is_compressed(contents):
            continue
        if found := re.search(pattern, contents):
            raise VerifyError(f"{library.name} names {found[0].decode()}, a file of the machine that built it")


def _check_symbols(library: _Library, wheel: WheelFile, torches: Sequence[Path]) -> None:
    """What the library asks torch for is there in each of these torch folders; what `_C` asks for, in the library."""
    asked = symbols.undefined(library.data)
    if library.name == LIBRARY:
        for torch in torches:
            libraries = sorted(torch.glob("lib/*.so*"))
            _require(libraries, f"{torch} holds no libraries")
            if absent := sorted(symbols.missing(asked, libraries)):
                version = torch_info.read(torch).version
                raise VerifyError(f"torch {version} lacks {len(absent)} symbols, the first {absent[0].decode()}")
    else:
        ours = {name for name in asked if not name.startswith((b"Py", b"_Py"))}
        if absent := sorted(ours - symbols.defined(wheel.files[LIBRARY])):
            raise VerifyError(f"nobody defines {absent[0].decode()}, which {library.name} asks for")


def _check_licence(wheel: WheelFile) -> None:
    path = wheel_file.in_info(wheel.files, "licenses/LICENSE")
    _require(wheel.files[path] == (ROOT / "LICENSE").read_bytes(), f"{path} is not the project's")
    licence = wheel.field("License-Expression")
    _require(licence == "BSD-3-Clause", f"License-Expression is {licence or 'missing'}")


def _check_bill(wheel: WheelFile, build: dict[str, Any]) -> None:
    path = wheel_file.in_info(wheel.files, f"sboms/{sbom.FILE}")
    if problem := sbom.problem(wheel.files[path].decode("utf-8", "replace"), build):
        raise VerifyError(f"{path}: {problem}")


def policy_kernels() -> dict[str, int]:
    """How the symbols of the kernels that the policy can choose begin, and the threads of each one's largest block.

    From the policy's own source.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "kernels")
        source = Path(__file__).with_name("kernels.cpp")
        command = [*cxx_compiler().split(), "-std=c++20", "-o", str(program), str(source)]
        result = subprocess.run(command, capture_output=True, text=True)
        _require(result.returncode == 0, f"the list of kernels does not compile: {result.stderr}")
        lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
        return {prefix: int(threads) for prefix, threads in map(str.split, lines)}


def check_kernels(present: dict[str, set[str]], wanted: Iterable[str]) -> None:
    """The cubins of every architecture hold every wanted kernel and no other."""
    prefixes = tuple(wanted)
    for arch, names in present.items():
        missing = [prefix for prefix in prefixes if not any(name.startswith(prefix) for name in names)]
        _require(not missing, f"no cubin for {arch} of {len(missing)} kernels, the first {missing[:1]}")
        more = sorted(name for name in names if not name.startswith(prefixes))
        _require(not more, f"the policy never chooses {len(more)} kernels of {arch}, the first {more[:1]}")


def check_resources(found: Iterable[fatbin.Resources], wanted: dict[str, int]) -> None:
    """No kernel keeps much outside registers, and a multiprocessor has registers for enough warps of each."""
    for kernel in found:
        threads = next((wanted[prefix] for prefix in wanted if kernel.kernel.startswith(prefix)), None)
        _require(threads is not None, f"the policy never chooses {kernel.kernel} of {kernel.arch}")
        usage = f"{kernel.registers} registers and {kernel.stack} bytes of stack"
        takes = f"{kernel.kernel} for {kernel.arch} takes {usage}"
        _require(kernel.stack <= _MOST_STACK, f"{takes} a thread, and is to take {_MOST_STACK} bytes at most")
        block = (threads or 0) // 32
        warps = _QUARTER_REGISTERS // (math.ceil(kernel.registers / 8) * 8 * 32) * 4 // block * block
        _require(
            warps >= _LEAST_WARPS,
            f"{takes} a thread: a multiprocessor has registers for {warps} warps of it, and is to have them for "
            f"{_LEAST_WARPS}",
        )


class _Gates:
    """Runs the checks under their gates' names, and remembers which were passed."""

    def __init__(self, wheel: Path) -> None:
        self._wheel = wheel
        self.passed: list[str] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        try:
            yield
        except WheelFileError as error:
            text = str(error).removeprefix(f"{self._wheel}: ")
            raise VerifyError(f"{self._wheel}: {name}: {text}") from None
        except (VerifyError, fatbin.FatbinError, record.RecordError, StepError) as error:
            raise VerifyError(f"{self._wheel}: {name}: {error}") from None
        self.passed.append(name)


def _check_code(wheel: WheelFile, build: dict[str, Any], gate: _Gates) -> int:
    """GPU code is what the build record says, with every kernel of the policy. Returns how many those are."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, Path(LIBRARY).name)
        library.write_bytes(wheel.files[LIBRARY])
        with gate("architectures"):
            entries = fatbin.read(library)
            architectures, ptx = fatbin.architectures(entries), fatbin.ptx(entries)
            _require(
                build["architectures"] == architectures and build["ptx"] == ptx,
                f"the build record says {build['architectures']} and PTX {build['ptx']}, the library holds "
                f"{architectures} and PTX {ptx}",
            )
            _require(bool(architectures) == (build["cuda"] is not None), f"CUDA {build['cuda']}: {architectures}")
        with gate("kernels"):
            if not architectures:
                return 0
            wanted = policy_kernels()
            check_kernels(fatbin.kernels(entries, library), wanted)
        with gate("resources"):
            check_resources(fatbin.resources(library), wanted)
        return len(wanted)


def _check_matrix(build: dict[str, Any], platform: str) -> None:
    """The GPU code is for the architectures of the matrix, and its PTX for the newest."""
    if build["cuda"] is None:
        return
    data, label, machine = matrix.load(), torch_info.cuda_label(build["cuda"]), _machine(platform)
    _require(label in data.cuda and machine in data.platforms, f"the matrix has no {label} for {machine}")
    expected = data.cuda[label].architectures[machine].removesuffix("+PTX").split(";")
    _require(build["architectures"] == expected, f"architectures {build['architectures']}, the matrix has {expected}")
    _require(build["ptx"] == expected[-1:], f"PTX for {build['ptx']}, the matrix has {expected[-1:]}")


def verify(
    wheel: Path,
    *,
    complete: bool = False,
    torches: Sequence[Path] = (),
    use: Callable[[dict[str, Any]], None] | None = None,
) -> Report:
    """Verifies a native wheel; `complete` also that it serves the architectures of the matrix.

    `torches` are torch folders that must have every symbol that the wheel asks torch for. `use` is given the build
    record, last, and raises StepError where the wheel does not work. Raises VerifyError, naming the wheel and the gate.
    """
    path, gate = wheel, _Gates(wheel)
    with gate("wheel"):
        read = wheel_file.read(path)
        _require(
            not read.is_plain, "this is a plain wheel, and only native ones are verified: give one built for a torch"
        )
    with gate("size"):
        size, budget = path.stat().st_size, matrix.load().max_wheel_size
        _require(size <= budget * 10**6, f"{math.ceil(size / 10**5) / 10} MB is more than {budget} MB")
    with gate("RECORD"):
        _check_record_file(read.files)
    with gate("names"):
        build = _read_record(read.files)
        platform = read.tags[2]
        requires = [str(value) for value in read.message.get_all("Requires-Dist") or []]
        _require(not any("+" in value for value in requires), f"a '+' in Requires-Dist: {requires}")
        _check_names(read, build, [value for value in requires if "extra ==" not in value])
    with gate("contents"):
        names = [name for name in read.files if re.search(r"\.so(\.|$)", name)]
        modules = [name for name in names if fnmatchcase(name, MODULE)]
        _require(
            len(modules) == 1 and sorted(names) == sorted([LIBRARY, *modules]),
            f"exactly {LIBRARY} and {MODULE} are expected inside, found {', '.join(names)}",
        )
        libraries = [_Library(name, read.files[name]) for name in names]
    checks: dict[str, Callable[[_Library], None]] = {
        "needed": lambda library: _check_needed(library, build),
        "search path": _check_search_path,
        "platform": lambda library: _check_platform(library, platform),
        "stripped": _check_stripped,
        "paths": _check_paths,
        "symbols": lambda library: _check_symbols(library, read, torches),
    }
    for name, check in checks.items():
        with gate(name):
            for library in libraries:
                check(library)
    kernels = _check_code(read, build, gate)
    if complete:
        with gate("matrix"):
            _check_matrix(build, platform)
    with gate("licence"):
        _check_licence(read)
    with gate("bill of materials"):
        _check_bill(read, build)
    if use is not None:
        with gate("use"):
            use(build)
    return Report(path, read.version, size, build["architectures"], build["ptx"], kernels, platform, tuple(gate.passed))
