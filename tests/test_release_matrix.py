"""The matrix holds what the project promises, and a broken one is refused with the table's name."""

import copy
import re

import pytest

from release import ROOT, matrix
from release.matrix import MatrixError, tomllib


@pytest.fixture
def data():
    return tomllib.loads(matrix.MATRIX_FILE.read_text(encoding="utf-8"))


def test_promises():
    loaded = matrix.load()
    assert list(loaded.torch) == ["2.11", "2.12", "2.13", "2.14", "2.15"]
    assert loaded.platforms == ("x86_64", "aarch64")
    assert loaded.manylinux == "manylinux_2_28"
    assert {version for torch in loaded.torch.values() for version in torch.python} == {
        "3.10", "3.11", "3.12", "3.13", "3.14"
    }  # fmt: skip
    assert loaded.torch["2.15"].default == "cu132"
    assert all(loaded.torch[minor].default == "cu130" for minor in ("2.11", "2.12", "2.13", "2.14"))
    assert "3.10" not in loaded.torch["2.15"].python


def test_cells():
    loaded = matrix.load()
    cell = loaded.cell("2.14", "cu130", "x86_64")
    assert cell.label == "cu130torch2.14"
    assert cell.architectures == "7.5;8.0;8.6;9.0;10.0;12.0+PTX"
    assert "11.0" in loaded.cell("2.14", "cu130", "aarch64").architectures
    assert loaded.cell("2.13", "cpu", "x86_64").label == "cputorch2.13"
    assert loaded.cell(machine="x86_64").torch.minor == loaded.default_torch
    labels = [(cell.label, cell.platform) for cell in loaded.cells()]
    assert len(set(labels)) == len(labels) == 2 * sum(len(torch.cuda) for torch in loaded.torch.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2.9",), "torch 2.9 is not in the matrix, which has 2.11"),
        (("2.15", "cu130"), "torch 2.15 is not published for cu130, only for cu132, cpu"),
        (("2.14", "cu130", "riscv64"), "platform riscv64 is not in the matrix"),
    ],
)
def test_impossible_cells(arguments, message):
    with pytest.raises(MatrixError, match=re.escape(message)):
        matrix.load().cell(*arguments)


def test_version_is_held_here_alone():
    version = matrix.load().version
    assigned = re.compile(rf"version\w*\W+{re.escape(version)}\b", re.IGNORECASE)
    for pattern in ("pyproject.toml", "CMakeLists.txt", "cmake/*", "src/**/*.cpp", "release/*.py", "python/**/*.py"):
        for path in ROOT.glob(pattern):
            assert not assigned.search(path.read_text(encoding="utf-8")), path


def test_every_cell_is_in_the_printed_table():
    loaded = matrix.load()
    lines = matrix.table(loaded).splitlines()
    assert len(lines) == 2 + len(loaded.cells())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("version"), "missing version"),
        (lambda d: d.update(extra=1), "unknown extra"),
        (lambda d: d.update(version="1.0"), "version = '1.0'"),
        (lambda d: d.update(default_torch="9.9"), "default_torch 9.9 has no table"),
        (lambda d: d["torch"]["2.14"].update(release="2.15.0"), 'torch."2.14": release 2.15.0'),
        (lambda d: d["torch"]["2.14"].update(default="cu126"), "must be the first of cuda"),
        (lambda d: d["torch"]["2.14"].update(cuda=["cu130", "cu199"]), "no table for cu199"),
        (lambda d: d["torch"]["2.14"].update(cuda=["cu130", "cu130"]), "without duplicates"),
        (lambda d: d["torch"]["2.14"].update(python=["3.x"]), "'3.x' in python"),
        (lambda d: d["cuda"]["cu130"].update(toolkit="13.2"), "cuda.cu130: toolkit 13.2 belongs to cu132"),
        (lambda d: d["cuda"]["cu130"].update(architectures="9.0;8.0+PTX"), "must ascend"),
        (lambda d: d["cuda"]["cu130"].update(architectures="8.0;9.0"), "+PTX on the newest only"),
        (lambda d: d["cuda"]["cu130"].pop("max_gcc"), "cuda.cu130: missing max_gcc"),
    ],
)
def test_broken_matrices(data, change, message):
    broken = copy.deepcopy(data)
    change(broken)
    with pytest.raises(MatrixError, match=re.escape(message)):
        matrix.parse(broken)
