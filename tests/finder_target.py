"""An environment with a torch, for which the finder's commands are run."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import installers
import stand_in
import tiny_wheels

PYTHON = "{}.{}".format(*sys.version_info)
TAG = "cp" + PYTHON.replace(".", "")
LABEL = "cu130torch2.14"
FULL = f"1.0.0+{LABEL}"

# Installers that are tried: this environment's pip, and its uv.
UV = shutil.which("uv", path=str(Path(sys.executable).parent))
INSTALLERS = ["pip", *(["uv"] if UV else [])]


class Target:
    """A virtual environment in a folder, and the command beside it as another release's plain wheel would bring it."""

    def __init__(
        self,
        folder: Path,
        version: str | None = "2.14.1+cu130",
        cuda: str | None = "13.0",
        hip: str | None = None,
        *,
        copy_pip: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.tool = folder, folder / "tool"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.python = folder / "venv/bin/python"
        (self.site,) = (folder / "venv").glob("lib/*/site-packages")
        pip = installers.pip_folder()
        if copy_pip:  # for users who may not enter the folder of this environment
            shutil.copytree(pip, self.site / "pip")
        else:
            (self.site / "pip").symlink_to(pip)
        if version is not None:
            stand_in.torch(self.site, version, cuda, hip)
            stand_in.distribution(self.site, version.partition("+")[0], "torch")
        stand_in.package(self.tool, None)
        shutil.copytree(stand_in.COMMAND, self.tool / stand_in.COMMAND.name)
        stand_in.cli_data.write(self.tool / stand_in.COMMAND.name / "_matrix.py")

    def environment(self, **variables: str) -> dict[str, str]:
        uv = f"{Path(UV).parent}:" if UV else ""
        return {
            "PATH": f"{uv}/usr/bin:/bin",
            "HOME": str(self.folder),
            "PYTHONPATH": str(self.tool),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_RETRIES": "1",
            "UV_NO_CONFIG": "1",
            "UV_HTTP_RETRIES": "1",
            "NO_PROXY": "127.0.0.1",
            **variables,
        }

    def command(self, *arguments: str | Path) -> list[str | Path]:
        return [self.python, "-W", "error", "-m", stand_in.COMMAND.name, *arguments]

    def run(
        self, *arguments: str | Path, before: Callable[[], None] | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*arguments),
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            timeout=300,
            preexec_fn=before,
            cwd=self.folder,
        )
        assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
        return done

    def start(self, *arguments: str | Path, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            env=self.environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=self.folder,
            # A suite that a shell has put in the background ignores it, and so would its children.
            preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )

    @property
    def installed(self) -> dict[str, str]:
        found = importlib.metadata.distributions(path=[str(self.site)])
        return {distribution.name: distribution.version for distribution in found}

    def has(self, wheel: Path) -> bool:
        """Whether the files of a wheel are installed as they are in it."""
        with zipfile.ZipFile(wheel) as archive:
            return all(
                (self.site / name).is_file() and (self.site / name).read_bytes() == archive.read(name)
                for name in archive.namelist()
                if "dist-info" not in name
            )

    def unpack(self, version: str) -> None:
        """Puts a version of the package into the environment, as an installer that was there before."""
        with zipfile.ZipFile(tiny_wheels.wheel(self.folder / "before", version)) as archive:
            archive.extractall(self.site)
