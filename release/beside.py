"""A wheel in a clean environment beside its torch: installed by pip from a channel alone, and used."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from . import ROOT, WORK, index
from .environments import Environment, create, log, own_configuration, pip
from .preflight import Interpreter
from .progress import StepError, run

# Forward and backward, beside plain torch.
PROGRAM = ROOT / "docker" / "healthcheck.py"


def _state(torch: Environment) -> str:
    """Changes when anything about the installed torch does."""
    (info,) = torch.site_packages.glob("torch-*.dist-info")
    return info.name + hashlib.sha256((info / "RECORD").read_bytes()).hexdigest()


def install(name: str, interpreter: Interpreter, torch: Environment, channel: Path, version: str) -> Environment:
    """A fresh environment over `torch`, called `name`, with this version of the channel installed by pip.

    Raises StepError where pip fails or does not leave torch alone.
    """
    path = WORK / f"check-{name}"
    shutil.rmtree(path, ignore_errors=True)
    before = _state(torch)
    environment = create(path, interpreter, "", lambda made: None, below=torch)
    requirement = f"{index.PROJECT}=={version}"
    pip(
        environment,
        ["install", "--index-url", channel.as_uri() + "/", requirement],
        what="installing from the channel",
        env=own_configuration(),
    )
    if list(environment.site_packages.glob("torch*")) or _state(torch) != before:
        raise StepError("pip replaced torch while it installed the wheel")
    return environment


def use(wheel: Path, version: str, interpreter: Interpreter, torch: Environment) -> None:
    """Installs the wheel over `torch` and runs the operator forward and backward. Raises StepError where it fails."""
    name = f"{version}-{interpreter.tag}"
    with tempfile.TemporaryDirectory() as folder:
        (channel,) = index.write(Path(folder), [wheel])
        environment = install(name, interpreter, torch, channel, version)
        run([environment.python, PROGRAM], what="using the wheel", log=log(f"use-{name}"), cwd=Path(folder))
