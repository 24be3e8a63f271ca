"""Finds the torch to build against and reads what the build needs to know of it, without importing it.

Standard library only.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import ROOT

CPU = "cpu"
# The matrix's oldest minor, which a build without a TOML parser cannot read there.
OLDEST = (2, 11)

# A folder that holds a torch, for builds whose interpreter cannot see the torch they are for.
TORCH_VARIABLE = "SCALED_MASK_SOFTMAX_TORCH"

NO_TORCH = f"""\
scaled-mask-softmax is built against an installed torch, and this build sees none. Any of these helps:
  - install torch first, then repeat: pip finds it in the environment that it installs into
  - pip install --no-build-isolation . (first pip install scikit-build-core pybind11 cmake ninja; with uv the only way,
    beside the next)
  - set {TORCH_VARIABLE} to a torch folder, such as /path/to/site-packages/torch
  - make wheel, which fetches a matching torch and builds against it
  - a wheel without native kernels: SCALED_MASK_SOFTMAX_PLAIN=1 pip install ."""


def _rules() -> Any:
    """How versions of torch map to labels: the package's own module for it, which needs the standard library only.

    By its path, since importing the package imports torch.
    """
    path = ROOT / "python" / "scaled_mask_softmax" / "_build.py"
    spec = importlib.util.spec_from_file_location("release._rules", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_RULES = _rules()


def cuda_label(version: str | None) -> str:
    """The label of torch.version.cuda: "13.0" -> "cu130", None -> "cpu"."""
    return str(_RULES.cuda_label(version))


def is_release(version: str) -> bool:
    """False for vendor and nightly builds, which fit no range of versions."""
    return bool(_RULES.is_release(version))


class TorchError(RuntimeError):
    """There is no torch to build against, or none that can be built against."""


@dataclass(frozen=True)
class TorchInfo:
    path: Path  # torch's folder
    version: str  # "2.14.1+cu130"
    cuda: str | None  # torch.version.cuda, "13.0"

    @property
    def minor(self) -> str:
        return str(_RULES.minor(self.version))

    @property
    def label(self) -> str:
        """The local version label of a wheel for this torch: "cu130torch2.14"."""
        return str(_RULES.TorchFacts(self.version, self.cuda).label)

    @property
    def requirements(self) -> list[str]:
        """Requires-Dist of a wheel for this torch. Vendor and nightly builds get none: no range includes them."""
        if not is_release(self.version):
            return []
        major, minor = map(int, self.minor.split("."))
        return [f"torch>={major}.{minor},<{major}.{minor + 1}"]


def _constants(path: Path) -> dict[str, object]:
    """The literal assignments of a module."""
    values: dict[str, object] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            targets: list[ast.expr] = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        else:
            continue
        try:
            value = ast.literal_eval(node.value)  # type: ignore[arg-type]
        except ValueError:
            continue
        values.update((target.id, value) for target in targets if isinstance(target, ast.Name))
    return values


def read(path: Path) -> TorchInfo:
    """Reads a torch folder. Raises TorchError if it is none, or a torch that this project cannot be built for."""
    version_file = path / "version.py"
    if not version_file.is_file() or not (path / "include" / "ATen").is_dir():
        raise TorchError(f"{path} holds no torch with headers: version.py or include/ATen is missing")
    constants = _constants(version_file)
    version, cuda = constants.get("__version__"), constants.get("cuda")
    if not isinstance(version, str) or not (cuda is None or isinstance(cuda, str)):
        raise TorchError(f"{version_file} does not give torch's version and CUDA release")
    if constants.get("hip") is not None:
        raise TorchError(
            f"torch {version} at {path} is built for ROCm, which has no native kernels here: use the plain wheel "
            "(SCALED_MASK_SOFTMAX_PLAIN=1), which works on every device"
        )
    info = TorchInfo(path, version, cuda)
    if tuple(map(int, info.minor.split("."))) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise TorchError(f"torch {version} at {path} is too old: scaled-mask-softmax needs torch {oldest} or newer")
    return info


def _candidates() -> list[Path]:
    # Under pip's build isolation sys.path holds only the isolated packages, but sysconfig still names the environment
    # that is installed into.
    spec = importlib.machinery.PathFinder.find_spec("torch", [entry or os.getcwd() for entry in sys.path])
    found = [Path(spec.origin).parent] if spec is not None and spec.origin is not None else []
    return found + [Path(sysconfig.get_path(key)) / "torch" for key in ("purelib", "platlib")]


def find() -> TorchInfo:
    """The torch that a build here is for. Raises TorchError with the ways out where there is none."""
    if given := os.environ.get(TORCH_VARIABLE):
        return read(Path(given).expanduser().resolve())
    for path in _candidates():
        if (path / "version.py").is_file():
            return read(path)
    raise TorchError(NO_TORCH)
