"""What is installed for this Python, from its files: nothing here imports torch or the package."""

from __future__ import annotations

import ast
import contextlib
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.parser import BytesHeaderParser
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "scaled_mask_softmax"
RECORD_FILE = "_build_record.py"


@dataclass(frozen=True)
class Distribution:
    """A .dist-info folder."""

    path: Path
    version: str
    installer: str  # "pip", "uv", "conda"
    complete: bool  # an installer writes RECORD last


@dataclass(frozen=True)
class Torch:
    folder: Path
    version: str  # "2.14.1+cu130"; empty where version.py does not say
    cuda: str | None  # "13.0"
    hip: str | None
    flavour: str  # "release", "vendor", "nightly", "conda", "CPU" or "ROCm"
    cxx11_abi: bool | None  # None: it cannot be told from the files
    distribution: Distribution | None
    others: list[Path] = field(default_factory=list)  # further torches on the path
    broken: str = ""  # what is wrong with version.py, where it gives no version


@dataclass(frozen=True)
class Package:
    """An installed scaled_mask_softmax. An editable install has two folders: the checkout and the build's."""

    folders: list[Path]
    build: ModuleType  # its _build.py, which holds the comparison
    record: Mapping[str, Any] | None  # None: a plain wheel
    broken: str = ""  # what of it cannot be read
    distributions: list[Distribution] = field(default_factory=list)
    leftovers: list[Path] = field(default_factory=list)  # of an installation that was cut off
    others: list[Path] = field(default_factory=list)  # further copies on the path

    def file(self, name: str) -> Path | None:
        return _first_file(self.folders, name)

    @property
    def version(self) -> str:
        if self.record is None and self.distributions:
            return self.distributions[0].version
        return str(self.build.version(self.record))

    @property
    def missing(self) -> list[str]:
        """The parts of a native build that are not there, or not there for this Python."""
        if self.record is None:
            return []
        modules = [f"_C{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
        missing = [] if self.file(self.build.LIBRARY) else [self.build.LIBRARY]
        return missing if any(map(self.file, modules)) else [*missing, modules[0]]


def _first_file(folders: list[Path], name: str) -> Path | None:
    return next((folder / name for folder in folders if os.path.isfile(folder / name)), None)


def _folders(name: str) -> list[Path]:
    """Where a top-level package is; finding it does not import it."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # imported already, by something without a spec
        return []
    return [] if spec is None else [Path(location) for location in spec.submodule_search_locations or []]


def _roots() -> list[Path]:
    """The folders on the path, each once."""
    found: dict[str, Path] = {}
    for entry in sys.path:
        path = Path(entry or os.curdir)
        if os.path.isdir(path):
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def _copies(name: str, file: str, known: list[Path]) -> list[Path]:
    """The folders of that name on the path that hold `file`, but for the known ones."""
    seen = {os.path.realpath(folder) for folder in known}
    folders = (root / name for root in _roots())
    return [folder for folder in folders if os.path.isfile(folder / file) and os.path.realpath(folder) not in seen]


def distributions(name: str, roots: list[Path] | None = None) -> list[Distribution]:
    """The distributions of that name, as on the path."""
    found = []
    for root in _roots() if roots is None else roots:
        for path in sorted(root.glob(f"{name}-*.dist-info")):
            metadata = path / "METADATA"
            try:
                version = str(BytesHeaderParser().parsebytes(metadata.read_bytes()).get("Version", ""))
            except OSError:
                version = ""
            installer = path / "INSTALLER"
            by = ""
            with contextlib.suppress(OSError):
                by = installer.read_text("utf-8", "replace").strip()
            version = version or path.name.removesuffix(".dist-info").partition("-")[2]
            found.append(Distribution(path, version, by, os.path.isfile(metadata) and os.path.isfile(path / "RECORD")))
    return found


def _leftovers(roots: list[Path]) -> list[Path]:
    """What pip has put aside while it replaces the package: the first letter becomes a ~."""
    return [path for root in roots for path in sorted(root.glob(f"~*{PACKAGE[1:]}*"))]


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_scaled_mask_softmax_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def rules() -> ModuleType | None:
    """The _build.py that came with this command: how labels and commands are made. None where it is missing."""
    path = Path(__file__).parents[1] / PACKAGE / "_build.py"
    if not os.path.isfile(path):
        path = _first_file(_folders(PACKAGE), "_build.py") or path
    try:
        return _load(path)
    except (OSError, SyntaxError):
        return None


def read_record(path: Path) -> dict[str, Any]:
    """The record in a _build_record.py, which is not run. Raises ValueError where it holds none."""
    try:
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BUILD":
                return dict(ast.literal_eval(node.value))
    except (OSError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(str(error)) from None
    raise ValueError("it holds no BUILD")


def unreadable() -> Path | None:
    """The package's _build.py, where there is a package but no such file that can be read."""
    folders = _folders(PACKAGE)
    if _first_file(folders, "__init__.py") is None or rules() is not None:
        return None
    return folders[0] / "_build.py"


def find_package() -> Package | None:
    folders = _folders(PACKAGE)
    path = _first_file(folders, "_build.py")
    if path is None and _first_file(folders, "__init__.py") is None:
        return None
    broken, build = "", None
    with contextlib.suppress(OSError, SyntaxError):
        build = _load(path) if path is not None else None
    if build is None:
        broken, build = "_build.py", rules()
    if build is None:
        return None
    record, record_path = None, _first_file(folders, RECORD_FILE)
    if record_path is not None:
        try:
            record = read_record(record_path)
        except ValueError:
            broken = broken or RECORD_FILE
    near = [
        root
        for root in _roots()
        if any(os.path.realpath(folder.parent) == os.path.realpath(root) for folder in folders)
    ]
    return Package(
        folders=folders,
        build=build,
        record=record,
        broken=broken,
        distributions=distributions(PACKAGE),
        leftovers=_leftovers(near),
        others=_copies(PACKAGE, "__init__.py", folders),
    )


def _constants(path: Path) -> dict[str, Any]:
    """The literal assignments of a module, which is not run. Raises OSError, and ValueError where it is no Python."""
    constants: dict[str, Any] = {}
    try:
        body = ast.parse(path.read_text("utf-8")).body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None
    for node in body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            constants.update((target.id, node.value.value) for target in targets if isinstance(target, ast.Name))
    return constants


def _abi(folder: Path, version: str) -> bool | None:
    """Whether a torch has the C++11 ABI: torch's own CMake files say so where there was a choice."""
    try:
        text = (folder / "share/cmake/Torch/TorchConfig.cmake").read_text("utf-8", "replace")
    except OSError:
        text = ""
    if match := re.search(r"_GLIBCXX_USE_CXX11_ABI=([01])", text):
        return match[1] == "1"
    numbers = re.match(r"(\d+)\.(\d+)", version)
    # Since 2.7 there is no choice.
    return True if numbers and (int(numbers[1]), int(numbers[2])) >= (2, 7) else None


def _is_conda(folder: Path, distribution: Distribution | None) -> bool:
    if distribution is not None and distribution.installer:
        return distribution.installer == "conda"
    return any(Path(sys.prefix).glob("conda-meta/*pytorch-*.json")) and folder.is_relative_to(sys.prefix)


def flavour(version: str, cuda: str | None, hip: str | None, *, conda: bool, released: bool) -> str:
    """What kind of torch this is."""
    if hip is not None:
        return "ROCm"
    if re.search(r"\.dev\d+", version):
        return "nightly"
    if conda:
        return "conda"
    if not released:
        return "vendor"
    return "CPU" if cuda is None else "release"


def find_torch() -> Torch | None:
    """torch as its files describe it; its version is empty where they are broken."""
    folders = _folders("torch")
    path = _first_file(folders, "version.py")
    if path is None and _first_file(folders, "__init__.py") is None:
        return None
    folder = path.parent if path is not None else folders[0]
    constants: dict[str, Any] = {}
    broken = "is missing"
    if path is not None:
        try:
            constants, broken = _constants(path), "gives no version"
        except OSError as error:
            broken = f"cannot be read ({error.strerror})"
        except ValueError:
            broken = "is no Python"
    version, cuda, hip = (constants.get(name) for name in ("__version__", "cuda", "hip"))
    version = version if isinstance(version, str) else ""
    near = distributions("torch", [folder.parent])
    distribution = near[0] if near else None
    known = rules()
    return Torch(
        folder=folder,
        version=version,
        cuda=cuda if isinstance(cuda, str) else None,
        hip=hip if isinstance(hip, str) else None,
        flavour=flavour(
            version,
            cuda,
            hip,
            conda=_is_conda(folder, distribution),
            released=known is None or bool(known.is_release(version)),
        ),
        cxx11_abi=_abi(folder, version),
        distribution=distribution,
        others=_copies("torch", "version.py", folders),
        broken="" if version else broken,
    )
