"""Wheels of a few bytes, or of as many as a test wants, and source distributions."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
import zipfile
from pathlib import Path


def wheel(
    folder: Path,
    version: str = "1.0.0+cu130torch2.14",
    tag: str = "py3-none-any",
    *,
    name: str = "scaled_mask_softmax",
    record: dict[str, object] | None = None,
    payload: bytes = b"",
) -> Path:
    """A wheel that an installer takes. `payload` is a file inside it, not compressed."""
    folder.mkdir(parents=True, exist_ok=True)
    path, info = folder / f"{name}-{version}-{tag}.whl", f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\nRequires-Python: >=3.10\n"
    files = {
        f"{name}/__init__.py": f"VERSION = {version!r}\n".encode(),
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n".encode(),
    }
    if record is not None:
        files[f"{name}/_build_record.py"] = f"BUILD = {record!r}\n".encode()
    if payload:
        files[f"{name}/payload"] = payload
    rows = ""
    for file, contents in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(contents).digest()).rstrip(b"=").decode()
        rows += f"{file},sha256={digest},{len(contents)}\n"
    # Without a time of its own each entry, and with it the wheel's hash, would change every two seconds.
    with zipfile.ZipFile(path, "w") as archive:
        for file, contents in {**files, f"{info}/RECORD": f"{rows}{info}/RECORD,,\n".encode()}.items():
            archive.writestr(zipfile.ZipInfo(file), contents)
    return path


def source(folder: Path, version: str = "1.0.0", tree: Path | None = None, *, metadata: str | None = None) -> Path:
    """A source distribution of the files in the folder `tree`, and PKG-INFO."""
    folder.mkdir(parents=True, exist_ok=True)
    top = f"scaled_mask_softmax-{version}"
    path = folder / f"{top}.tar.gz"
    text = (
        metadata or f"Metadata-Version: 2.1\nName: scaled-mask-softmax\nVersion: {version}\nRequires-Python: >=3.10\n"
    )
    with tarfile.open(path, "w:gz") as tar:
        if tree is not None:
            tar.add(tree, top)
        info = tarfile.TarInfo(f"{top}/PKG-INFO")
        info.size = len(text)
        tar.addfile(info, io.BytesIO(text.encode()))
    return path
