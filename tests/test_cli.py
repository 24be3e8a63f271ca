"""The console command, which imports neither torch nor the package."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import subprocess
from pathlib import Path

import pytest
import stand_in
from stand_in import RECORD

import scaled_mask_softmax
from release import cli_data, matrix
from scaled_mask_softmax import _build

VERSION = "1.0.0+cu130torch2.14"
FIX = "pip install --force-reinstall --no-deps"
CHANNELS = f"{stand_in.INDEX}/whl"


def lines(result: subprocess.CompletedProcess[str]) -> dict[str, str]:
    return {line[:10].rstrip(): line[11:] for line in result.stdout.splitlines()}


def test_version_of_a_native_and_of_a_plain_wheel(tmp_path: Path) -> None:
    stand_in.package(tmp_path / "native", RECORD)
    stand_in.package(tmp_path / "plain", None)
    stand_in.distribution(tmp_path / "plain", "1.0.0")
    for site, version in [("native", VERSION), ("plain", "1.0.0")]:
        result = stand_in.command(tmp_path / site, "version")
        assert (result.returncode, result.stdout) == (0, f"{version}\n")


def test_version_without_the_package(tmp_path: Path) -> None:
    result = stand_in.command(tmp_path, "version")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "scaled_mask_softmax is not installed for this Python.\n"


def test_doctor_of_a_build_that_fits(tmp_path: Path) -> None:
    stand_in.artefacts(stand_in.package(tmp_path, RECORD))
    stand_in.torch(tmp_path, "2.14.0+cu130", "13.0")
    result = stand_in.command(tmp_path, "doctor", "--no-import")
    found = lines(result)
    assert result.returncode == 0
    assert found["verdict"] == "fits"
    assert "fix" not in found
    assert found["torch"] == f"2.14.0+cu130, CUDA 13.0, C++11 ABI, release build ({tmp_path / 'torch'})"
    assert found["package"] == f"{VERSION} ({tmp_path / 'scaled_mask_softmax'})"
    assert found["built for"] == f"torch 2.14, CUDA 13, C++11 ABI; Python {RECORD['python']}, {RECORD['platform']}"
    assert found["built with"] == "torch 2.14.1+cu130, nvcc 13.0.88, GNU 14.2.1; commit unknown"
    assert found["GPU code"] == "compute capability 8.0, 9.0; PTX 12.0"


@pytest.mark.parametrize(
    ("version", "cuda", "hip", "verdict", "fix"),
    [
        (
            "2.15.0",
            "13.2",
            None,
            "the torch version",
            f'--index-url {CHANNELS}/cu132/torch2.15/ "scaled-mask-softmax==1.0.0+cu132torch2.15"',
        ),
        (
            "2.13.0+cu126",
            "12.6",
            None,
            "the torch version, the CUDA major version",
            f'--index-url {CHANNELS}/cu126/torch2.13/ "scaled-mask-softmax==1.0.0+cu126torch2.13"',
        ),
        (
            "2.14.1+rocm6.4",
            None,
            "6.4",
            "the torch version, the CUDA major version",
            f'--index-url {stand_in.INDEX}/plain/ "scaled-mask-softmax==1.0.0"',
        ),
    ],
)
def test_doctor_of_a_build_that_does_not_fit(
    version: str, cuda: str | None, hip: str | None, verdict: str, fix: str, tmp_path: Path
) -> None:
    stand_in.artefacts(stand_in.package(tmp_path, RECORD))
    stand_in.torch(tmp_path, version, cuda, hip)
    result = stand_in.command(tmp_path, "doctor", "--no-import")
    assert result.returncode == 1
    assert lines(result)["verdict"] == f"this build does not fit the installed torch ({verdict})."
    assert lines(result)["fix"] == f"{FIX} {fix}"


@pytest.mark.parametrize("library", [True, False])
def test_doctor_of_a_build_with_a_missing_part(library: bool, tmp_path: Path) -> None:
    folder = stand_in.package(tmp_path, RECORD)
    stand_in.torch(tmp_path, "2.14.1+cu130", "13.0")
    if library:
        stand_in.artefacts(folder, module=False)
        (folder / "_C.cpython-39-x86_64-linux-gnu.so").touch()
    else:
        stand_in.artefacts(folder)
        (folder / _build.LIBRARY).unlink()
    missing = f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}" if library else _build.LIBRARY
    result = stand_in.command(tmp_path, "doctor", "--no-import")
    assert result.returncode == 1
    assert lines(result)["verdict"] == f"the installation is broken: {missing} is missing."
    assert lines(result)["fix"] == f'{FIX} --index-url {CHANNELS}/cu130/torch2.14/ "scaled-mask-softmax=={VERSION}"'


def test_doctor_of_a_plain_wheel(tmp_path: Path) -> None:
    stand_in.package(tmp_path, None)
    stand_in.distribution(tmp_path, "1.0.0")
    stand_in.torch(tmp_path, "2.14.1+cu130", "13.0")
    result = stand_in.command(tmp_path, "doctor", "--no-import")
    found = lines(result)
    assert result.returncode == 0
    assert found["verdict"] == "works, on plain torch operators"
    assert found["for native"] == f'{FIX} --index-url {CHANNELS}/cu130/torch2.14/ "scaled-mask-softmax=={VERSION}"'


def test_doctor_of_a_plain_wheel_where_there_is_no_native_one(tmp_path: Path) -> None:
    stand_in.package(tmp_path, None)
    stand_in.distribution(tmp_path, "1.0.0")
    stand_in.torch(tmp_path, "2.14.1+cpu", None)
    result = stand_in.command(tmp_path, "doctor", "--no-import")
    assert result.returncode == 0
    assert "for native" not in lines(result)


@pytest.mark.parametrize("record", [RECORD, None])
def test_doctor_prints_no_command_for_an_index_that_does_not_exist(
    record: dict[str, object] | None, tmp_path: Path
) -> None:
    stand_in.package(tmp_path, record)
    stand_in.distribution(tmp_path, "1.0.0")
    stand_in.torch(tmp_path, "2.15.0", "13.2")
    result = stand_in.command(tmp_path, "doctor", "--no-import", SCALED_MASK_SOFTMAX_INDEX="")
    way = lines(result)["fix" if record else "for native"]
    assert way.startswith("no public index exists yet: make wheel TORCH=2.15 CUDA=cu132 PYTHON=3.")
    assert way.endswith("; or set SCALED_MASK_SOFTMAX_INDEX to an index that you have")
    assert "--index-url" not in result.stdout


@pytest.mark.parametrize("package", [True, False])
def test_doctor_with_nothing_to_compare(package: bool, tmp_path: Path) -> None:
    if package:
        stand_in.artefacts(stand_in.package(tmp_path, RECORD))
    else:
        stand_in.torch(tmp_path, "2.14.1+cu130", "13.0")
    result = stand_in.command(tmp_path, "doctor", "--no-import")
    assert result.returncode == 2
    assert "not installed for this Python" in lines(result)["verdict"]
    assert lines(result)["torch" if package else "package"] == "not installed"


def test_doctor_imports_neither_torch_nor_the_package(tmp_path: Path) -> None:
    folder = stand_in.package(tmp_path, RECORD)
    stand_in.artefacts(folder)
    stand_in.torch(tmp_path, "2.14.1+cu130", "13.0")
    for path in (folder / "__init__.py", tmp_path / "torch" / "__init__.py"):
        path.write_text("raise SystemExit('imported')\n", "utf-8")
    assert lines(stand_in.command(tmp_path, "doctor", "--no-import"))["verdict"] == "fits"


def test_the_command_runs_on_systems_without_locks_and_owners(tmp_path: Path) -> None:
    """As Windows is one, where the plain wheel works."""
    stand_in.package(tmp_path, None)
    stand_in.distribution(tmp_path, "1.0.0")
    stand_in.torch(tmp_path, "2.14.1+cpu", None)
    stand_in.command(tmp_path, "version")
    code = """
import os, signal, sys
sys.modules["fcntl"] = sys.modules["pwd"] = None
del signal.SIGXFSZ, os.O_DIRECTORY, os.killpg, os.sched_getaffinity
from scaled_mask_softmax_cli import __main__, fetch
with fetch.alone(".", "fills"):
    sys.exit(__main__.main(["doctor", "--no-import"]))
"""
    result = stand_in.run(["-S", "-W", "error", "-c", code], PYTHONPATH=str(tmp_path))
    assert (result.returncode, result.stderr) == (0, "")
    assert "verdict    works, on plain torch operators\n" in result.stdout


def test_the_installed_command_knows_the_matrix() -> None:
    """As it is now: a changed matrix needs a new build."""
    built = importlib.import_module("scaled_mask_softmax_cli._matrix").MATRIX
    assert built == cli_data.data(matrix.load())


def test_a_wrong_command_is_a_usage_error(tmp_path: Path) -> None:
    assert stand_in.command(tmp_path, "docto").returncode == 2
    assert stand_in.command(tmp_path).returncode == 2


def test_the_installed_command_agrees_with_the_import() -> None:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="scaled-mask-softmax")
    call = f"import sys; from {entry.module} import {entry.attr}; sys.exit({entry.attr}(sys.argv[1:]))"
    result = stand_in.run(["-c", call, "version"])
    assert (result.returncode, result.stdout) == (0, f"{scaled_mask_softmax.__version__}\n")
    doctor = stand_in.run(["-c", call, "doctor", "--no-import"])
    assert (doctor.returncode, lines(doctor)["verdict"]) == (0, "fits")
