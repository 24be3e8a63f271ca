"""Installers that the channels are tried with (make clients), beside this environment's pip. Standard library only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from . import ROOT
from .environments import Environment, create, pip, tools_folder
from .preflight import Interpreter
from .progress import StepError

# What the oldest supported Python came with, and the newest.
PIPS = ("21.2.4", "26.3")
PROGRAMS = ("uv==0.13.9", "poetry==2.5.1", "pytest>=8.2", "pip>=24", "tomli>=2; python_version < '3.11'")


def run(interpreter: Interpreter, arguments: Sequence[str]) -> None:
    """Runs the tests of channels with every client. Raises StepError where one fails."""

    def fill(made: Environment) -> None:
        pip(made, ["install", *PROGRAMS], what="installing uv and poetry")
        for version in PIPS:
            target = made.path / f"pip-{version}"
            pip(made, ["install", "--target", target, f"pip=={version}"], what=f"fetching pip {version}")

    made = create(tools_folder(interpreter, "clients"), interpreter, "\n".join([*PIPS, *PROGRAMS]), fill)
    # Without conftest.py, which needs torch.
    command: list[str | Path] = [made.python, "-m", "pytest", "--noconftest", "tests/test_release_clients.py"]
    if (
        subprocess.run([*command, *arguments], cwd=ROOT, env={**os.environ, "SMS_CLIENTS": str(made.path)}).returncode
        != 0
    ):
        raise StepError("a client does not do what it should with a channel")
