"""Lays wheels out as channels: one PEP 503 index a (CUDA, torch) pair, so that pip can never pick a neighbour's binary.

A channel is a folder such as whl/cu130/torch2.14/ and works from file://, any web server and static hosting. Links are
relative, carry sha256, write + as %2B, and have PEP 658 metadata beside the wheel.
"""

from __future__ import annotations

import hashlib
import html
import re
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

PROJECT = "scaled-mask-softmax"


class ChannelError(ValueError):
    """A wheel belongs to no channel."""


def channel(wheel_name: str) -> str:
    """The channel of a wheel, from its file name: "whl/cu130/torch2.14"."""
    match = re.match(r"[^-]+-[^-+]+\+(cpu|cu\d+)torch([^-]+)-", wheel_name)
    if match is None:
        raise ChannelError(f"{wheel_name} carries no label such as +cu130torch2.14, so it belongs to no channel")
    return f"whl/{match[1]}/torch{match[2]}"


def _page(title: str, links: Iterable[str]) -> str:
    body = "".join(f"    {link}<br>\n" for link in links)
    return (
        "<!DOCTYPE html>\n<html>\n  <head>\n"
        '    <meta charset="utf-8">\n    <meta name="pypi:repository-version" content="1.0">\n'
        f"    <title>{html.escape(title)}</title>\n  </head>\n  <body>\n{body}  </body>\n</html>\n"
    )


def _metadata(wheel: Path) -> tuple[bytes, str]:
    """METADATA and Requires-Python."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        data = archive.read(name)
    match = re.search(rb"^Requires-Python: (.+)$", data, re.MULTILINE)
    return data, match[1].decode() if match else ""


def _link(wheel: Path) -> str:
    data, requires_python = _metadata(wheel)
    wheel.with_name(wheel.name + ".metadata").write_bytes(data)
    attributes = {"data-core-metadata": f"sha256={hashlib.sha256(data).hexdigest()}"}
    # The name of the attribute before PEP 714.
    attributes["data-dist-info-metadata"] = attributes["data-core-metadata"]
    if requires_python:
        attributes["data-requires-python"] = requires_python
    text = " ".join(f'{key}="{html.escape(value)}"' for key, value in attributes.items())
    target = f"{quote(wheel.name)}#sha256={hashlib.sha256(wheel.read_bytes()).hexdigest()}"
    return f'<a href="{target}" {text}>{html.escape(wheel.name)}</a>'


def write(root: Path, wheels: Iterable[Path]) -> list[Path]:
    """Copies `wheels` into their channels below `root` and rewrites those channels' pages. Returns the channels."""
    channels: dict[Path, None] = {}
    for wheel in wheels:
        folder = root / channel(wheel.name)
        (folder / PROJECT).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(wheel, folder / PROJECT / wheel.name)
        channels[folder] = None
    for folder in channels:
        links = [_link(wheel) for wheel in sorted((folder / PROJECT).glob("*.whl"))]
        (folder / PROJECT / "index.html").write_text(_page(f"Links for {PROJECT}", links), encoding="utf-8")
        (folder / "index.html").write_text(
            _page("Simple index", [f'<a href="{PROJECT}/">{PROJECT}</a>']), encoding="utf-8"
        )
    return list(channels)
