"""Reads GPU code out of a linked library: which architectures have cubins and PTX, and which kernels each cubin holds.

Neither a toolkit nor a GPU is needed. The container's headers are read here; what is compressed in it, by cuobjdump.
"""

from __future__ import annotations

import importlib.metadata
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# One of the build tools.
CUOBJDUMP = "nvidia-cuda-cuobjdump"

_FATBIN_MAGIC = 0xBA55ED50
_PTX, _ELF = 1, 2
# Bits of an entry's flags: architecture-specific ("a") and family-specific ("f") targets.
_ARCH_SPECIFIC, _FAMILY_SPECIFIC = 1 << 20, 1 << 21


class FatbinError(ValueError):
    """The file is not a library with readable GPU code."""


@dataclass(frozen=True)
class Entry:
    kind: str  # "cubin" or "ptx"
    arch: str  # "9.0", "9.0a"
    kernels: frozenset[str] | None  # mangled; None for PTX and compressed cubins


def sections(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the sections of a 64-bit little-endian ELF file."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise FatbinError("not a 64-bit little-endian ELF file")
    (offset,) = struct.unpack_from("<Q", data, 40)
    size, count, names_index = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, offset + size * index) for index in range(count)]
    if not headers:
        return
    names = data[headers[names_index][4] :]
    for name, kind, _, _, start, length in headers:
        text = names[name : names.index(b"\0", name)].decode()
        yield text, b"" if kind == 8 else data[start : start + length]  # 8: no contents in the file


def _kernels(cubin: bytes) -> frozenset[str] | None:
    if cubin[:4] != b"\x7fELF":
        return None
    names = (name for name, _ in sections(cubin))
    return frozenset(name.removeprefix(".text.") for name in names if name.startswith(".text."))


def _entries(section: bytes) -> Iterator[Entry]:
    position = 0
    while position + 16 <= len(section):
        magic, _, header, length = struct.unpack_from("<IHHQ", section, position)
        if magic != _FATBIN_MAGIC:
            position += 8  # padding between containers
            continue
        entry, end = position + header, position + header + length
        while entry < end:
            kind, _, entry_header, size = struct.unpack_from("<HHIQ", section, entry)
            (number,) = struct.unpack_from("<I", section, entry + 28)
            (flags,) = struct.unpack_from("<Q", section, entry + 40)
            suffix = "a" if flags & _ARCH_SPECIFIC else "f" if flags & _FAMILY_SPECIFIC else ""
            arch = f"{number // 10}.{number % 10}{suffix}"
            code = section[entry + entry_header : entry + entry_header + size]
            if kind == _ELF:
                yield Entry("cubin", arch, _kernels(code))
            elif kind == _PTX:
                yield Entry("ptx", arch, None)
            entry += entry_header + size
        position = end


def read(library: Path) -> list[Entry]:
    """Every cubin and PTX of `library`, one a translation unit and architecture; empty without GPU code."""
    return [
        entry
        for name, contents in sections(library.read_bytes())
        if name == ".nv_fatbin"
        for entry in _entries(contents)
    ]


def is_compressed(section: bytes) -> bool:
    """Whether a section of GPU code holds cubins that only cuobjdump reads: its bytes are as good as random."""
    return any(entry.kind == "cubin" and entry.kernels is None for entry in _entries(section))


def _ascending(archs: set[str]) -> list[str]:
    return sorted(archs, key=lambda arch: (tuple(map(int, arch.rstrip("af").split("."))), arch))


@dataclass(frozen=True)
class Resources:
    """What a kernel takes of a multiprocessor, for each thread."""

    arch: str
    kernel: str  # mangled
    registers: int
    stack: int  # bytes outside registers: what did not fit them


def architectures(entries: list[Entry]) -> list[str]:
    return _ascending({entry.arch for entry in entries if entry.kind == "cubin"})


def ptx(entries: list[Entry]) -> list[str]:
    return _ascending({entry.arch for entry in entries if entry.kind == "ptx"})


def cuobjdump() -> Path | None:
    """The program that decompresses cubins, of the package in this Python's environment; None where that lacks it."""
    try:
        files = importlib.metadata.files(CUOBJDUMP)
    except importlib.metadata.PackageNotFoundError:
        return None
    programs = (Path(str(file.locate())) for file in files or () if file.name == "cuobjdump")
    return next((program for program in programs if program.is_file()), None)


def _run_cuobjdump(library: Path, *arguments: str, folder: Path | None = None) -> str:
    program = cuobjdump()
    if program is None:
        raise FatbinError(
            f"cuobjdump, which reads the cubins of {library.name}, is not here: install it with "
            f"python -m pip install {CUOBJDUMP}"
        )
    command: list[str | Path] = [program, *arguments, library.resolve()]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode != 0:
        text = " ".join((result.stderr or result.stdout).split())
        raise FatbinError(f"{program} cannot read the cubins of {library.name}: {text}")
    return result.stdout


def _decompressed(library: Path) -> list[Entry]:
    """The cubins of `library`, whose kernels cuobjdump makes readable."""
    with tempfile.TemporaryDirectory() as folder:
        _run_cuobjdump(library, "-xelf", "all", folder=Path(folder))
        found = []
        for path in Path(folder).iterdir():
            if match := re.search(r"\.sm_(\d+)(\d[af]?)\.cubin$", path.name):
                found.append(Entry("cubin", f"{match[1]}.{match[2]}", _kernels(path.read_bytes())))
    return found


def kernels(entries: list[Entry], library: Path) -> dict[str, set[str]]:
    """The mangled kernel names of each architecture with cubins, ascending, of the `entries` of `library`."""
    cubins = [entry for entry in entries if entry.kind == "cubin"]
    if any(entry.kernels is None for entry in cubins):
        readable = _decompressed(library)
        if sorted(entry.arch for entry in readable) != sorted(entry.arch for entry in cubins):
            raise FatbinError(f"cuobjdump reads {len(readable)} cubins of {library.name}, which holds {len(cubins)}")
        cubins = readable
    result: dict[str, set[str]] = {arch: set() for arch in architectures(cubins)}
    for entry in cubins:
        result[entry.arch].update(entry.kernels or ())
    return result


def resources(library: Path) -> list[Resources]:
    """Those of every kernel in the cubins of `library`, as the assembler noted them."""
    found = []
    arch = kernel = ""
    for line in _run_cuobjdump(library, "--dump-resource-usage").splitlines():
        if match := re.match(r"arch = sm_(\d+)(\d[af]?)$", line):
            arch = f"{match[1]}.{match[2]}"
        elif match := re.match(r" Function (\S+):$", line):
            kernel = match[1]
        elif kernel and (match := re.match(r"  REG:(\d+) STACK:(\d+) ", line)):
            found.append(Resources(arch, kernel, int(match[1]), int(match[2])))
            kernel = ""
    return found
