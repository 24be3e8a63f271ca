"""A finished wheel's name, METADATA and contents, read whole. Standard library only."""

from __future__ import annotations

import lzma
import re
import struct
import zipfile
import zlib
from collections.abc import Container
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

NAME = "scaled_mask_softmax"


# What reading a broken archive raises, beside OSError: some bytes reach decoders that expect others.
_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    LookupError,
    OverflowError,
    RuntimeError,
    UnicodeError,
)


class WheelFileError(ValueError):
    """The file is no readable wheel of this project."""


@dataclass(frozen=True)
class WheelFile:
    path: Path
    version: str
    tags: tuple[str, str, str]  # Python, ABI, platform
    files: dict[str, bytes]
    metadata: bytes  # METADATA as it is, and parsed
    message: Message

    @property
    def is_plain(self) -> bool:
        return self.tags == ("py3", "none", "any")

    def field(self, name: str) -> str:
        """A field of METADATA; empty where there is none."""
        return str(self.message.get(name, ""))


def in_info(files: dict[str, bytes], name: str) -> str:
    """The path of a file of the .dist-info folder."""
    paths = [path for path in files if re.fullmatch(rf"[^/]+\.dist-info/{name}", path)]
    if len(paths) != 1:
        raise WheelFileError(f"{len(paths)} {name} files where one is expected")
    return paths[0]


def _contents(path: Path) -> dict[str, bytes]:
    if not path.exists():
        raise WheelFileError("there is no such file")
    if not path.is_file():
        raise WheelFileError("this is no file, but a folder or a device: give the wheel itself")
    files: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                _check_member(info.filename, files)
                if not info.is_dir():
                    files[info.filename] = archive.read(info)
    except _BROKEN as error:
        raise WheelFileError(f"this is no wheel, or a broken one ({error}): copy or build it again") from None
    except OSError as error:
        raise WheelFileError(f"it cannot be read: {error.strerror or error}") from None
    return files


def _check_member(name: str, before: Container[str]) -> None:
    """Installers do not agree on which of two files of one name they take, and a path must not leave its folder."""
    if name in before:
        raise WheelFileError(f"it holds {name!r} twice: build it again")
    if not name or name.startswith("/") or ".." in name.split("/") or not name.isprintable() or "\\" in name:
        raise WheelFileError(f"it holds a file of the name {name!r}, which is no path of a wheel: build it again")


def _read(path: Path) -> WheelFile:
    files = _contents(path)
    parts = path.name.removesuffix(".whl").split("-")
    if not path.name.endswith(".whl") or len(parts) != 5:
        raise WheelFileError("the file name is not name-version-python-abi-platform.whl")
    name, version, python, abi, platform = parts
    if name != NAME:
        raise WheelFileError(f"the file is named {name}, not {NAME}")
    metadata = files[in_info(files, "METADATA")]
    wheel = WheelFile(path, version, (python, abi, platform), files, metadata, BytesParser().parsebytes(metadata))
    if wheel.field("Name") != NAME.replace("_", "-"):
        raise WheelFileError(f"METADATA is of {wheel.field('Name') or 'nothing'}, not of {NAME.replace('_', '-')}")
    if wheel.field("Version") != version:
        raise WheelFileError(f"the file name says {version}, METADATA {wheel.field('Version') or 'nothing'}")
    return wheel


def read(path: Path) -> WheelFile:
    """Reads a wheel. Raises WheelFileError, naming it, where there is none."""
    try:
        return _read(path)
    except WheelFileError as error:
        raise WheelFileError(f"{path}: {error}") from None
