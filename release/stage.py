"""A release before it is published: every wheel of it, as channels and as files to attach."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path

from . import build, index, wheel_file
from .environments import Environment
from .matrix import Matrix, wheels

SITE, ASSETS = "site", "assets"


class StageError(ValueError):
    """What is there is no release."""


def check_tag(data: Matrix, tag: str) -> None:
    if tag != f"v{data.version}":
        raise StageError(f"the tag is {tag}, the version in the matrix is {data.version}: tag v{data.version}")


def _clear(folder: Path, wheels: Iterable[Path]) -> None:
    """Removes what an earlier staging left in `folder`. Raises StageError where that would remove anything else."""
    if folder.exists() and not folder.is_dir():
        raise StageError(f"{folder} is no folder: give one that a release is to be staged in")
    if more := sorted({path.name for path in folder.glob("*")} - {SITE, ASSETS}):
        raise StageError(f"{folder} holds {more[0]}, which no staging wrote: give a folder that is empty or not there")
    if inside := [path for path in wheels if folder.resolve() in path.resolve().parents]:
        raise StageError(f"{inside[0]} lies in {folder}, which is emptied first: give another folder to stage in")
    for name in (SITE, ASSETS):
        shutil.rmtree(folder / name, ignore_errors=True)


def stage(data: Matrix, tools: Environment, folder: Path, found: Iterable[Path]) -> list[Path]:
    """Stages the release below `folder`, in place of one that was staged there.

    It holds exactly the wheels of the matrix's proven cells: `site` the channels with the files in them, `assets` every
    file of the release and their checksums. Returns the assets. Raises ChannelError where a wheel is missing or one too
    many, StageError where the folder is another's.
    """
    site, assets = folder / SITE, folder / ASSETS
    found = list(found)
    _clear(folder, found)
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
