"""`scaled-mask-softmax doctor` as it is run: beside stand-ins with a made-up driver, and beside real torches."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import fake_driver
import pytest
import stand_in
import torch
from stand_in import RECORD

import scaled_mask_softmax
from scaled_mask_softmax import _build


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return fake_driver.library(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An installation that fits."""
    stand_in.artefacts(stand_in.package(tmp_path, RECORD))
    stand_in.torch(tmp_path, "2.14.1+cu130", "13.0")
    return tmp_path


PROLOGUE = ("doctor", "--quiet", "--no-import", "--require-gpu")


@pytest.mark.parametrize(
    ("devices", "visible", "code"),
    [
        (f"{fake_driver.H200};{fake_driver.H200}", None, 0),
        (f"{fake_driver.H200};{fake_driver.V100}", None, 3),
        (f"{fake_driver.H200};{fake_driver.V100}", "0", 0),
        (fake_driver.V100, None, 4),
        (fake_driver.H200, "-1", 4),
        ("", None, 4),
    ],
)
def test_a_prologue_check(devices: str, visible: str | None, code: int, site: Path, driver: dict[str, str]) -> None:
    """It says nothing of a good node, and why of a bad one, with a status for one bad GPU and one for none good."""
    variables = {**driver, "FAKE_GPUS": devices, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})}
    result = stand_in.command(site, *PROLOGUE, **variables)
    assert result.returncode == code
    assert (result.stdout == "") is (code == 0)
    if code:
        assert result.stdout.startswith("verdict ")


def test_the_table_and_json_agree(site: Path, driver: dict[str, str]) -> None:
    variables = {**driver, "FAKE_GPUS": fake_driver.V100, "HOME": "/nowhere"}
    table = stand_in.command(site, "doctor", "--no-import", **variables)
    data = json.loads(stand_in.command(site, "doctor", "--no-import", "--json", **variables).stdout)
    assert table.returncode == data["status"] == 4
    assert f"verdict    {data['verdict']}\n" in table.stdout
    assert [item["diagnosis"] for item in data["findings"]] == ["gpu-architecture", "home"]
    for gpu in data["gpus"]:
        assert f"GPU {gpu['index']}      {gpu['name']}, compute capability {gpu['capability']}: none" in table.stdout


def test_python_m_is_the_same_command(site: Path) -> None:
    assert stand_in.command(site, "doctor", "--no-import").returncode == 0


def test_help_names_the_statuses(site: Path) -> None:
    text = " ".join(stand_in.command(site, "doctor", "--help").stdout.split())
    assert "3: some visible GPUs cannot run this build, others can; 4: no visible GPU" in text


# For real, with the torch of this environment


def links(site: Path) -> Path:
    """The running native build in a folder of its own."""
    library = Path(scaled_mask_softmax.library_path())
    record = {key: value for key, value in scaled_mask_softmax.build_info().items() if key in RECORD}
    folder = stand_in.package(site, record)
    (module,) = library.parent.glob("_C.*.so")
    for path in (library, module):
        shutil.copy(path, folder)
    return folder


def real(site: Path | None, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    if site is not None:
        target = site / stand_in.COMMAND.name
        shutil.copytree(stand_in.COMMAND, target, dirs_exist_ok=True)
        stand_in.cli_data.write(target / "_matrix.py")
    result = stand_in.run(["-m", stand_in.COMMAND.name, "doctor", *arguments], site, **variables)
    assert "Traceback" not in result.stderr
    return result


def test_real_a_build_that_fits_is_imported_in_a_process_apart() -> None:
    result = real(None, "--json")
    data = json.loads(result.stdout)
    assert (result.returncode, data["verdict"]) == (0, "fits")
    assert (data["imported"]["torch"], data["imported"]["package"]) == (None, None)
    assert [Path(path).name for path in data["imported"]["libraries"] if _build.LIBRARY in path] == [_build.LIBRARY]
    if torch.version.cuda is not None:
        major = torch.version.cuda.split(".")[0]
        runtimes = {Path(path).name for path in data["imported"]["libraries"] if "libcudart.so" in path}
        assert runtimes == {f"libcudart.so.{major}"}


def test_real_a_library_that_does_not_load(tmp_path: Path) -> None:
    folder = links(tmp_path)
    (folder / _build.LIBRARY).write_bytes(b"not a library")
    result = real(tmp_path)
    assert result.returncode == 1
    assert "verdict    the package does not import: ImportError: scaled_mask_softmax " in result.stdout
    assert "file too short" in result.stdout


def test_real_a_shadowed_library(tmp_path: Path) -> None:
    """A broken C++ library on LD_LIBRARY_PATH: torch does not import, and neither does this package."""
    (tmp_path / "libstdc++.so.6").write_bytes(b"nothing")
    result = real(None, LD_LIBRARY_PATH=str(tmp_path))
    assert result.returncode == 1
    assert "verdict    torch does not import: " in result.stdout
    assert f"{tmp_path / 'libstdc++.so.6'}: file too short" in result.stdout
    assert "\nfix        take other libraries out of LD_LIBRARY_PATH; " in result.stdout


def test_real_two_copies(tmp_path: Path) -> None:
    """The installed one and another before it on the path: it works, and the doctor names both."""
    links(tmp_path)
    result = real(tmp_path)
    assert result.returncode == 0, result.stdout
    installed = Path(scaled_mask_softmax.__file__).parent
    assert "note       several copies of scaled_mask_softmax are on the path" in result.stdout
    assert f"Python takes {tmp_path / 'scaled_mask_softmax'}; the others: {installed}." in result.stdout


def test_real_no_torch(tmp_path: Path) -> None:
    """A fresh environment with the package's files alone."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv").glob("lib/*/site-packages")
    links(site)
    shutil.copytree(stand_in.COMMAND, site / stand_in.COMMAND.name)
    stand_in.cli_data.write(site / stand_in.COMMAND.name / "_matrix.py")
    command = [tmp_path / "venv/bin/python", "-m", stand_in.COMMAND.name, "doctor"]
    result = subprocess.run(
        command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    )
    assert (result.returncode, result.stderr) == (2, "")
    assert "torch      not installed\n" in result.stdout
    assert (
        "verdict    torch is not installed for this Python: install it first.\nfix        pip install" in result.stdout
    )


@pytest.mark.parametrize(
    ("version", "what", "differing"),
    [
        ("2.99.0", "upgraded", "the torch version"),
        ("2.9.1", "downgraded", "the torch version"),
        ("2.99.0.dev20991231+cu199", "nightly", "the torch version"),
        ("2.99.0+cpu", "CPU", "the torch version, the CUDA major version"),
    ],
)
def test_real_torch_replaced_under_the_build(version: str, what: str, differing: str, tmp_path: Path) -> None:
    """The native build is real, the torch that was put in its torch's place is a stand-in of its version."""
    links(tmp_path)
    stand_in.torch(tmp_path, version, None if what == "CPU" else torch.version.cuda)
    if torch.version.cuda is None:
        differing = "the torch version"
    result = real(tmp_path)
    assert result.returncode == 1
    assert f"verdict    this build does not fit the installed torch ({differing}).\n" in result.stdout
    error = stand_in.import_error("import scaled_mask_softmax", tmp_path)
    (fix,) = [line.removeprefix("  fix: ") for line in error.splitlines() if line.startswith("  fix: ")]
    assert f"fix        {fix}\n" in result.stdout
