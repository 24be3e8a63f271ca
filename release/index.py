"""Lays wheels out as channels: one PEP 503 index a (CUDA, torch) pair, so that pip can never pick a neighbour's binary.

A channel is a folder such as whl/cu130/torch2.14/ and works from file://, any web server and static hosting. Links are
relative, carry sha256, write + as %2B, and have PEP 658 metadata beside the wheel.
"""

from __future__ import annotations

import hashlib
import html
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from . import wheel_file
from .wheel_file import WheelFile

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


def _link(wheel: WheelFile) -> str:
    attributes = {"data-core-metadata": f"sha256={hashlib.sha256(wheel.metadata).hexdigest()}"}
    # The name of the attribute before PEP 714.
    attributes["data-dist-info-metadata"] = attributes["data-core-metadata"]
    if requires_python := wheel.field("Requires-Python"):
        attributes["data-requires-python"] = requires_python
    text = " ".join(f'{key}="{html.escape(value)}"' for key, value in attributes.items())
    name = wheel.path.name
    target = f"{quote(name)}#sha256={hashlib.sha256(wheel.path.read_bytes()).hexdigest()}"
    return f'<a href="{target}" {text}>{html.escape(name)}</a>'


def write(root: Path, wheels: Iterable[Path]) -> list[Path]:
    """Copies `wheels` into their channels below `root` and rewrites those channels' pages. Returns the channels.

    Raises WheelFileError or ChannelError before anything is written where one of the wheels, or of those that are in
    the channels already, will not do.
    """
    channels: dict[Path, dict[str, WheelFile]] = {}
    for path in wheels:
        wheel = wheel_file.read(path)
        contents = channels.setdefault(root / channel(path.name), {})
        if contents.setdefault(path.name, wheel).files != wheel.files:
            raise ChannelError(f"{path} and {contents[path.name].path} have one name and differ")
    for folder, contents in channels.items():
        for path in (folder / PROJECT).glob("*.whl"):
            if path.name not in contents:
                contents[path.name] = wheel_file.read(path)
    for folder, contents in channels.items():
        project = folder / PROJECT
        project.mkdir(parents=True, exist_ok=True)
        for name, wheel in contents.items():
            target = project / name
            if not (target.exists() and target.samefile(wheel.path)):
                shutil.copyfile(wheel.path, target)
            target.with_name(f"{name}.metadata").write_bytes(wheel.metadata)
        links = [_link(contents[name]) for name in sorted(contents)]
        (project / "index.html").write_text(_page(f"Links for {PROJECT}", links), encoding="utf-8")
        (folder / "index.html").write_text(
            _page("Simple index", [f'<a href="{PROJECT}/">{PROJECT}</a>']), encoding="utf-8"
        )
    return list(channels)
