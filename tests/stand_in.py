"""Stand-in installations: the package's own Python files beside an invented build record, and if need be a torch that
is only its version. What imports them is a process apart.
"""

from __future__ import annotations

import importlib.machinery
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from release import cli_data
from scaled_mask_softmax import _build

PACKAGE = Path(_build.__file__).parent
COMMAND = Path(__file__).parents[1] / "python" / "scaled_mask_softmax_cli"

RECORD = {
    "version": "1.0.0+cu130torch2.14",
    "torch": "2.14.1+cu130",
    "torch_minor": "2.14",
    "cuda": "13.0",
    "cuda_compiler": "13.0.88",
    "host_compiler": "GNU 14.2.1",
    "cxx11_abi": True,
    "architectures": ["8.0", "9.0"],
    "ptx": ["12.0"],
    "commit": None,
    "python": "{}.{}".format(*sys.version_info),
    "platform": f"linux_{platform.machine()}",
}

INDEX = "https://index.example"
VARIABLES = (_build.INDEX_VARIABLE, _build.COMPOSITE_VARIABLE)


def package(site: Path, record: dict[str, object] | None) -> Path:
    """The package in the folder `site`, with a build record or plain. Returns the package's folder."""
    folder = site / "scaled_mask_softmax"
    folder.mkdir(parents=True)
    for path in PACKAGE.glob("*.py"):
        if path.name != "_build_record.py":
            shutil.copy(path, folder)
    if record is not None:
        (folder / "_build_record.py").write_text(f"BUILD = {record!r}\n", "utf-8")
    return folder


def torch(site: Path, version: str, cuda: str | None, hip: str | None = None, cxx11_abi: bool = True) -> None:
    """A torch that can be asked for its version, and nothing else."""
    folder = site / "torch"
    folder.mkdir(parents=True)
    (folder / "version.py").write_text(
        "from typing import Optional\n"
        f"__version__ = {version!r}\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = {hip!r}\n",
        "utf-8",
    )
    (folder / "__init__.py").write_text(
        "from . import version\n__version__ = version.__version__\n"
        f"def compiled_with_cxx11_abi():\n    return {cxx11_abi!r}\n",
        "utf-8",
    )


def distribution(site: Path, version: str, name: str = "scaled-mask-softmax") -> Path:
    """Metadata of an installed distribution of this version. Returns its folder."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")
    (folder / "RECORD").touch()
    return folder


def artefacts(folder: Path, module: bool = True) -> None:
    """Empty files in the place of a native build's."""
    (folder / _build.LIBRARY).touch()
    if module:
        (folder / f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}").touch()


def command(site: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the console command beside a stand-in, with nothing else installed: -S leaves site-packages out."""
    folder = site / COMMAND.name
    shutil.copytree(COMMAND, folder, dirs_exist_ok=True)
    cli_data.write(folder / "_matrix.py")
    result = run(["-S", "-W", "error", "-m", COMMAND.name, *arguments], PYTHONPATH=str(site), **variables)
    assert "Traceback" not in result.stderr, result.stderr
    return result


def run(arguments: list[str], site: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with `site` first on its path, and none of our environment variables but those given and an INDEX."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    if "FAKE_GPUS" in variables:
        environment.pop("CUDA_VISIBLE_DEVICES", None)  # which are real ones
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    environment[_build.INDEX_VARIABLE] = INDEX
    if site is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(site), *filter(None, [environment.get("PYTHONPATH")])])
    environment.update(variables)
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def python(code: str, site: Path | None = None, **variables: str) -> str:
    """What `code` prints; fails where it fails, warnings included."""
    result = run(["-W", "error", "-c", code], site, **variables)
    assert result.returncode == 0, result.stderr
    return result.stdout


def import_error(code: str, site: Path | None = None, **variables: str) -> str:
    """The text of the ImportError that `code` raises."""
    indented = "".join(f"    {line}\n" for line in code.splitlines())
    return python(f"try:\n{indented}except ImportError as error:\n    print(error, end='')\n", site, **variables)
