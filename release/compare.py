"""What differs between two wheels that should be one: for rebuilding a released wheel from its commit."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from . import fatbin, wheel_file


def _parts(first: bytes, second: bytes) -> str:
    """Which parts of two versions of a file differ."""
    if not (first.startswith(b"\x7fELF") and second.startswith(b"\x7fELF")):
        return f"{len(first)} and {len(second)} bytes"
    ours, theirs = dict(fatbin.sections(first)), dict(fatbin.sections(second))
    names = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    return f"sections {', '.join(names) or 'alike, other bytes between them'}"


def differences(first: Path, second: Path) -> list[str]:
    """One line a difference; empty where the files are the same, byte for byte.

    Raises WheelFileError where one of them is no wheel.
    """
    ours, theirs = wheel_file.read(first).files, wheel_file.read(second).files
    if hashlib.sha256(first.read_bytes()).digest() == hashlib.sha256(second.read_bytes()).digest():
        return []
    found = [] if first.name == second.name else [f"names: {first.name} and {second.name}"]
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs:
            found.append(f"{name}: only in the {'second' if name in theirs else 'first'}")
        elif ours[name] != theirs[name]:
            found.append(f"{name}: {_parts(ours[name], theirs[name])}")
    if not found:
        with zipfile.ZipFile(first) as one, zipfile.ZipFile(second) as other:
            times = [{info.date_time for info in archive.infolist()} for archive in (one, other)]
        found.append("the archive: " + ("the files' times" if times[0] != times[1] else "order, modes or compression"))
    return found
