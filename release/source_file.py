"""A source distribution's name and PKG-INFO. Standard library only."""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

from .wheel_file import NAME, WheelFileError


@dataclass(frozen=True)
class SourceFile:
    path: Path
    version: str
    metadata: bytes  # PKG-INFO as it is, and parsed
    message: Message


def _metadata(path: Path) -> bytes:
    try:
        # All of it, so that gzip's own checksum is compared.
        data = gzip.decompress(path.read_bytes())
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            file = archive.extractfile(f"{path.name.removesuffix('.tar.gz')}/PKG-INFO")
            return file.read() if file is not None else b""
    except KeyError:
        raise WheelFileError(f"{path}: no PKG-INFO is in the folder of its name") from None
    except (tarfile.TarError, zlib.error, EOFError) as error:
        raise WheelFileError(
            f"{path}: this is no source distribution, or a broken one ({error}): build it again"
        ) from None
    except OSError as error:
        raise WheelFileError(f"{path}: it cannot be read: {error.strerror or error}") from None


def read(path: Path) -> SourceFile:
    """Reads a source distribution. Raises WheelFileError, naming it, where there is none of this project."""
    metadata = _metadata(path)
    message = BytesParser().parsebytes(metadata)
    version = str(message.get("Version", ""))
    if path.name != f"{NAME}-{version}.tar.gz" or message.get("Name") != NAME.replace("_", "-"):
        raise WheelFileError(f"{path}: PKG-INFO is of {message.get('Name')} {version}, which is not what its name says")
    return SourceFile(path, version, metadata, message)
