"""A release before it is published: every wheel of it, as channels and as files to attach."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path

from . import build, index, wheel_file
from .environments import Environment
from .matrix import Matrix, wheels


class StageError(ValueError):
    """What is there is no release."""


def check_tag(data: Matrix, tag: str) -> None:
    if tag != f"v{data.version}":
        raise StageError(f"the tag is {tag}, the version in the matrix is {data.version}: tag v{data.version}")


def stage(data: Matrix, tools: Environment, folder: Path, found: Iterable[Path]) -> list[Path]:
    """Stages the release below `folder` (emptied first) from exactly the wheels of the matrix's proven cells.

    `site` holds the channels with the files in them, `assets` every file of the release and their checksums. Returns
    the assets. Raises ChannelError where a wheel is missing or one too many.
    """
    site, assets = folder / "site", folder / "assets"
    shutil.rmtree(folder, ignore_errors=True)
    found = list(found)
    with index.update(site) as update:
        for wheel in found:
            update.add(wheel)
        update.expect(wheels(data, data.cells(proven=True)), data.version, allow_missing=False)
        assets.mkdir(parents=True)
        plain = build.plain(tools, assets)
        for path in (plain, build.sdist(tools, assets)):
            update.add(path)
    for wheel in found:
        shutil.copyfile(wheel, assets / wheel.name)
    for wheel in (*found, plain):
        (assets / f"{wheel.name}.metadata").write_bytes(wheel_file.read(wheel).metadata)
    files = sorted(assets.iterdir())
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (assets / index.CHECKSUMS).write_text("".join(sums), encoding="utf-8")
    return files
