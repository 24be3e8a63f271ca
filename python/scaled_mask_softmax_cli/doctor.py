"""Compares the installed build with the installed torch by reading their files."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import platform
import runpy
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

FITS, MISFIT, NOTHING = 0, 1, 2


@dataclass(frozen=True)
class Package:
    """An installed scaled_mask_softmax. An editable install has two folders: the checkout and the build's."""

    folders: list[Path]
    build: ModuleType  # its _build.py, which holds the comparison
    record: Mapping[str, Any] | None  # None: a plain wheel

    def file(self, name: str) -> Path | None:
        return _first_file(self.folders, name)

    @property
    def version(self) -> str:
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
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _folders(name: str) -> list[Path]:
    """Where a top-level package is; finding it does not import it."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # imported already, by something without a spec
        return []
    return [] if spec is None else [Path(location) for location in spec.submodule_search_locations or []]


def find_package() -> Package | None:
    folders = _folders("scaled_mask_softmax")
    path = _first_file(folders, "_build.py")
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location("_scaled_mask_softmax_build", path)
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = build  # dataclasses look their module up
    spec.loader.exec_module(build)
    record = _first_file(folders, "_build_record.py")
    return Package(folders, build, None if record is None else runpy.run_path(str(record))["BUILD"])


def find_torch() -> tuple[Path, dict[str, Any]] | None:
    """torch's folder and the constants of its version.py, read and not run."""
    path = _first_file(_folders("torch"), "version.py")
    if path is None:
        return None
    constants: dict[str, Any] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            constants.update((target.id, node.value.value) for target in targets if isinstance(target, ast.Name))
    return (path.parent, constants) if isinstance(constants.get("__version__"), str) else None


def _say(subject: str, text: str) -> None:
    print(f"{subject:<10} {text}")


def _say_record(package: Package) -> None:
    record = package.record
    if record is None:
        _say("built for", "any torch: a plain wheel, without native kernels")
        return
    _say("built for", f"{package.build.built_for(record)}; Python {record['python']}, {record['platform']}")
    compilers = [record["host_compiler"]]
    if record["cuda_compiler"] is not None:
        compilers.insert(0, f"nvcc {record['cuda_compiler']}")
    _say("built with", f"torch {record['torch']}, {', '.join(compilers)}; commit {record['commit'] or 'unknown'}")
    if record["cuda"] is not None:
        ptx = f"; PTX {', '.join(record['ptx'])}" if record["ptx"] else ""
        _say("GPUs", f"compute capability {', '.join(record['architectures']) or 'none'}{ptx}")


def print_version() -> int:
    """Print the version; NOTHING where there is no package."""
    package = find_package()
    if package is None:
        print("scaled_mask_softmax is not installed for this Python", file=sys.stderr)
        return NOTHING
    print(package.version)
    return FITS


def examine() -> int:
    """Print what there is, whether it fits and the command that mends it. Return FITS, MISFIT or NOTHING."""
    _say("Python", f"{platform.python_version()} ({sys.executable})")
    _say("platform", f"{sysconfig.get_platform()}, {' '.join(platform.libc_ver()) or 'libc unknown'}")
    found, package = find_torch(), find_package()
    if found is None:
        _say("torch", "not installed")
    else:
        folder, constants = found
        _say("torch", f"{constants['__version__']}, CUDA {constants.get('cuda') or 'none'} ({folder})")
    if package is None:
        _say("package", "not installed")
        _say("verdict", "scaled_mask_softmax is not installed for this Python")
        return NOTHING
    _say("package", f"{package.version} ({package.folders[0]})")
    _say_record(package)
    if found is None:
        _say("verdict", "torch is not installed for this Python: install it first")
        return NOTHING
    build = package.build
    # Every torch since 2.7 has the C++11 ABI; its files don't say, so importing the package is what checks it.
    facts = build.TorchFacts(constants["__version__"], constants.get("cuda"), constants.get("hip"))
    way = build.how_to_install(package.version, facts)
    if package.record is None:
        _say("verdict", "works, on plain torch operators")
        if build.native_exists(facts):
            _say("for native", way)
        return FITS
    problems = build.differences(package.record, facts)
    if problems:
        _say("verdict", f"does not fit: {', '.join(problems)}")
    elif package.missing:
        _say("verdict", f"broken: {', '.join(package.missing)} is missing")
    else:
        _say("verdict", "fits")
        return FITS
    _say("fix", way)
    return MISFIT
