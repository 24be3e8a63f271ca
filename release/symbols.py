"""Which symbols a shared library asks for, and which of them others define. Standard library only; quick on torch."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

_DYNSYM, _VERSYM = 11, 0x6FFFFFFF
_WEAK = 2


def _dynamic_symbols(data: bytes | mmap.mmap) -> Iterator[tuple[bytes, bool, bool, bool]]:
    """Name, whether it is defined, weak, and bound to a version, of each symbol of a 64-bit little-endian ELF file."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (offset,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    headers = [struct.unpack_from("<IIQQQQII", data, offset + size * index) for index in range(count)]
    table = next((header for header in headers if header[1] == _DYNSYM), None)
    if table is None:
        return
    symbols = data[table[4] : table[4] + table[5]]
    strings = data[headers[table[6]][4] : headers[table[6]][4] + headers[table[6]][5]]
    section = next((header for header in headers if header[1] == _VERSYM), None)
    versions = data[section[4] : section[4] + section[5]] if section else bytes(len(symbols) // 12)
    for (name, info, _, index, _, _), (version,) in zip(
        struct.iter_unpack("<IBBHQQ", symbols), struct.iter_unpack("<H", versions)
    ):
        yield strings[name : strings.index(b"\0", name)], index != 0, info >> 4 == _WEAK, version & 0x7FFF > 1


def undefined(library: bytes) -> set[bytes]:
    """What the library cannot do without and asks for without a version, as all of torch's symbols are."""
    return {
        name
        for name, is_defined, weak, versioned in _dynamic_symbols(library)
        if name and not is_defined and not weak and not versioned
    }


def defined(library: bytes) -> set[bytes]:
    return {name for name, is_defined, _, _ in _dynamic_symbols(library) if is_defined}


def missing(wanted: Iterable[bytes], libraries: Iterable[Path]) -> set[bytes]:
    """The wanted symbols that none of the libraries defines."""
    rest = set(wanted)
    for library in libraries:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            rest -= {name for name, is_defined, _, _ in _dynamic_symbols(data) if is_defined}
    return rest
