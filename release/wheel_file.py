"""A finished wheel's name, METADATA and contents, read whole. Standard library only."""

from __future__ import annotations

import re
import zipfile
import zlib
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

NAME = "scaled_mask_softmax"


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
    try:
        with zipfile.ZipFile(path) as archive:
            return {info.filename: archive.read(info) for info in archive.infolist() if not info.is_dir()}
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise WheelFileError(f"this is no wheel, or a broken one ({error}): copy or build it again") from None
    except OSError as error:
        raise WheelFileError(f"it cannot be read: {error.strerror}") from None


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
    if wheel.field("Version") != version:
        raise WheelFileError(f"the file name says {version}, METADATA {wheel.field('Version') or 'nothing'}")
    return wheel


def read(path: Path) -> WheelFile:
    """Reads a wheel. Raises WheelFileError, naming it, where there is none."""
    try:
        return _read(path)
    except WheelFileError as error:
        raise WheelFileError(f"{path}: {error}") from None
