"""Staging a release: exactly the matrix's proven wheels, or none; the small matrix of the rehearsal."""

import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys

import pytest

from release import ROOT, index, matrix, rehearsal, stage
from release.index import ChannelError
from release.matrix import MatrixError
from release.stage import StageError
from tests import tiny_wheels
from tests.test_release_clients import make_wheel

CELLS = ["2.14/cu130/3.11", "2.14/cu130/3.12", "2.13/cpu/3.11"]


@pytest.fixture
def small():
    text = matrix.MATRIX_FILE.read_text(encoding="utf-8")
    return matrix.read(rehearsal.small(text, "1.2.3", CELLS, "manylinux_2_34", "9.0", "x86_64"), "small")


def test_the_small_matrix(small):
    assert matrix.wheels(small, small.cells(proven=True)) == [
        f"scaled_mask_softmax-1.2.3+{label}-{tag}-{tag}-manylinux_2_34_x86_64.whl"
        for label, tag in (("cputorch2.13", "cp311"), ("cu130torch2.14", "cp311"), ("cu130torch2.14", "cp312"))
    ]
    assert small.cell("2.14").architectures == "9.0+PTX"


def test_the_cells_of_a_rehearsal():
    """Two torch minors on two Pythons and a CPU cell, all from the matrix, and each of them in it."""
    data = matrix.load()
    cells, tried = rehearsal.default_cells(data, "x86_64", data.torch[data.default_torch].python[-2])
    found = [cell.split("/") for cell in cells]
    assert len(set(cells)) == 5
    assert all(python in data.cell(torch, cuda, "x86_64").torch.python for torch, cuda, python in found)
    assert found[0][:2] == [data.default_torch, data.torch[data.default_torch].default]
    assert [cuda for _, cuda, _ in found].index("cpu") == 4
    assert len({torch for torch, *_ in found[:4]}) == len({python for *_, python in found[:4]}) == 2
    assert tried == [cells[0], cells[-1]]
    with pytest.raises(MatrixError, match=r"not 3\.9 and a newer one"):
        rehearsal.default_cells(data, "x86_64", "3.9")
    with pytest.raises(MatrixError, match="no proven cell"):
        rehearsal.default_cells(data, "aarch64", data.torch[data.default_torch].python[-2])


@pytest.mark.parametrize("cell", ["junk", "2.14/cu130", "2.14/cu130/x", "2/cpu/3.11", "2.14/cpu/3.11/1"])
def test_what_is_no_cell_of_a_rehearsal(cell):
    with pytest.raises(MatrixError, match=f"'{cell}' is no cell: give torch, CUDA and Python"):
        rehearsal.run([cell], "manylinux_2_34", "9.0", try_out=[])


def test_the_version_after():
    assert [rehearsal.next_version(text) for text in ("1.2.3", "1.0.9", "2.0.0rc1")] == ["1.2.4", "1.0.10", "2.0.1"]


@pytest.fixture
def wheels(small, tmp_path):
    """Stand-ins for the wheels of the small matrix."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in matrix.wheels(small, small.cells(proven=True)):
        make_wheel(folder, "scaled_mask_softmax", name.split("-")[1]).rename(folder / name)
    return sorted(folder.iterdir())


@pytest.fixture
def builds(monkeypatch):
    monkeypatch.setattr(stage.build, "plain", lambda tools, folder: tiny_wheels.wheel(folder, "1.2.3"))
    monkeypatch.setattr(stage.build, "sdist", lambda tools, folder: tiny_wheels.source(folder, "1.2.3"))


def test_a_release(small, wheels, builds, tmp_path):
    files = stage.stage(small, None, tmp_path / "staged", wheels)
    source = "scaled_mask_softmax-1.2.3.tar.gz"
    names = {"scaled_mask_softmax-1.2.3-py3-none-any.whl", *(wheel.name for wheel in wheels)}
    assert {path.name for path in files} == names | {f"{name}.metadata" for name in names} | {source}
    sums = (tmp_path / "staged/assets/SHA256SUMS").read_text().splitlines()
    assert sums == [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in files]
    data = json.loads((tmp_path / "staged/site" / index.DATA).read_text())
    assert sorted(data["channels"]) == ["plain", "whl/cpu/torch2.13", "whl/cu130/torch2.14"]
    assert {entry["filename"] for entries in data["channels"].values() for entry in entries} == names | {source}


def test_no_release_without_a_wheel_or_with_one_more(small, wheels, builds, tmp_path):
    with pytest.raises(ChannelError, match="1 wheels of the release are missing"):
        stage.stage(small, None, tmp_path / "staged", wheels[1:])
    unproven = dataclasses.replace(small.torch["2.13"], proven={})
    less = dataclasses.replace(small, torch={**small.torch, "2.13": unproven})
    with pytest.raises(ChannelError, match=r"cputorch2\.13-.* is no wheel of release 1\.2\.3"):
        stage.stage(less, None, tmp_path / "staged", wheels)
    assert not (tmp_path / "staged").exists()


def test_staging_again_replaces_the_first(small, wheels, builds, tmp_path):
    first = stage.stage(small, None, tmp_path / "staged", wheels)
    (tmp_path / "staged/assets/old").touch()
    assert stage.stage(small, None, tmp_path / "staged", wheels) == first
    assert not (tmp_path / "staged/assets/old").exists()


def test_nothing_else_is_removed(small, wheels, builds, tmp_path):
    """A folder that holds other things, or the wheels themselves, and a file."""
    (tmp_path / "file").write_text("kept")
    nested = tmp_path / "staged/assets/wheels"
    nested.parent.mkdir(parents=True)
    shutil.copytree(wheels[0].parent, nested)
    for folder, given, message in (
        (tmp_path, wheels, "holds file, which no staging wrote: give a folder that is empty or not there"),
        (wheels[0].parent, wheels, "which no staging wrote"),
        (tmp_path / "staged", sorted(nested.iterdir()), "is emptied first: give another folder to stage in"),
        (tmp_path / "file", wheels, "is no folder"),
    ):
        with pytest.raises(StageError, match=message):
            stage.stage(small, None, folder, given)
    assert (tmp_path / "file").read_text() == "kept"
    assert len(list(nested.iterdir())) == len(list(wheels[0].parent.iterdir())) == len(wheels)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stage", "absent"], "absent is no folder: give the one that holds the release's wheels"),
        (
            ["try", "absent", "--torch", "2.14", "--cuda", "cu130"],
            "absent has no channel for cu130torch2.14, which wou",
        ),
        (["compare", "absent.whl", "absent.whl"], "absent.whl: there is no such file"),
        (["new-torch", "2.x"], "2.x is no minor release of torch: give one such as 2.16"),
        (["new-torch", "--write"], "--write needs to know what to write: give a minor release of torch too"),
    ],
)
def test_a_command_with_what_is_not_there(arguments, message):
    command = [sys.executable, "-m", "release", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.stdout:  # the first command of a machine fetches the tools
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1


def test_the_tag(small):
    stage.check_tag(small, "v1.2.3")
    with pytest.raises(StageError, match=r"the tag is v1\.2\.4, the version in the matrix is 1\.2\.3"):
        stage.check_tag(small, "v1.2.4")
