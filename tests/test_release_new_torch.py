"""Adding a torch release: what the registry tells becomes a row of the matrix that is valid, or a clear refusal."""

import json
import subprocess
from pathlib import Path

import pytest

from release import matrix, new_torch
from release.environments import Environment
from release.matrix import MatrixError
from release.progress import StepError

TEXT = matrix.MATRIX_FILE.read_text(encoding="utf-8")
HERE = Environment(Path("/nowhere"), "3.11")


@pytest.fixture
def registry(monkeypatch):
    """A registry that has these releases, each for these Pythons, with this requirement on CUDA. With `cap`, pip's
    configuration on this machine allows no newer release than that.
    """

    def make(wheels, *, cap=None, versions="2.16.1, 2.16.0, 2.15.0, 2.14.1, 2.14.0, 2.13.0+cpu, 2.9.1"):
        def pip(environment, *arguments, env=None):
            if arguments[:2] == ("index", "versions"):
                return subprocess.CompletedProcess([], 0, f"torch (2.16.1)\nAvailable versions: {versions}\n", "")
            release, python = arguments[-1].removeprefix("torch=="), arguments[arguments.index("--python-version") + 1]
            pythons, requires = wheels.get(release, ((), []))
            capped = cap is not None and release > cap and (env is None or "PIP_CONFIG_FILE" not in env)
            if python not in pythons or capped:
                return subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution found")
            report = {"install": [{"metadata": {"requires_dist": requires}}]}
            return subprocess.CompletedProcess([], 0, json.dumps(report), "")

        monkeypatch.setattr(new_torch, "_pip", pip)

    return make


def test_what_the_matrix_lacks(registry):
    registry({})
    releases = new_torch.released(HERE)
    assert releases == ["2.16.1", "2.16.0", "2.15.0", "2.14.1", "2.14.0", "2.9.1"]
    assert new_torch.lacking(matrix.load(), releases) == ["2.16.1"]
    assert new_torch.lacking(matrix.load(), ["2.15.0", "2.14.2", "2.14.1", "2.10.0"]) == ["2.14.2"]


@pytest.mark.parametrize(
    "requirement",
    [
        'cuda-toolkit[cublas,cudart]==13.2.2; platform_system == "Linux"',
        'nvidia-cuda-runtime==13.2.48; platform_system == "Linux"',
    ],
)
def test_a_new_minor(registry, requirement):
    registry({"2.16.1": (("3.11", "3.12", "3.13", "3.14", "3.15"), ["filelock", requirement])})
    found = new_torch.published(HERE, matrix.load(), "2.16.1")
    assert found == new_torch.Published("2.16.1", "13.2", ("3.11", "3.12", "3.13", "3.14", "3.15"))
    text = new_torch.updated(TEXT, matrix.load(), found)
    after = matrix.read(text, "matrix.toml")
    assert list(after.torch) == [*matrix.load().torch, "2.16"]
    assert after.torch["2.16"].default == "cu132"
    assert not any(cell.is_proven for cell in after.cells("2.16"))
    # Nothing else has changed.
    assert text.replace(f"{new_torch.row(found)}\n", "") == TEXT


def test_a_release_that_pip_is_told_not_to_take(registry):
    registry({"2.16.1": (("3.11",), ["cuda-toolkit[cudart]==13.2.2"])}, cap="2.14.1")
    assert new_torch.published(HERE, matrix.load(), "2.16.1") == new_torch.Published("2.16.1", "13.2", ("3.11",))


def test_a_new_patch_release():
    data = matrix.load()
    text = new_torch.updated(TEXT, data, new_torch.Published("2.14.2", "13.0", ("3.11",)))
    after = matrix.read(text, "matrix.toml")
    assert after.torch["2.14"].release == "2.14.2"
    assert text.replace("2.14.2", "2.14.1") == TEXT


def test_a_row_that_is_spelt_in_another_way_is_not_said_to_be_written():
    text = TEXT.replace('[torch."2.14"]\n', '[torch."2.14"]\n# A comment.\n')
    with pytest.raises(MatrixError, match=r"write torch 2\.14\.2 there by hand"):
        new_torch.updated(text, matrix.load(), new_torch.Published("2.14.2", "13.0", ("3.11",)))


def test_a_cuda_release_without_a_table_is_refused():
    with pytest.raises(MatrixError, match="no table for cu141"):
        new_torch.updated(TEXT, matrix.load(), new_torch.Published("2.16.0", "14.1", ("3.11", "3.12")))


def test_nothing_to_be_had(registry):
    registry({})
    with pytest.raises(StepError, match=r"the registry has no CUDA wheel of torch 2\.16\.0"):
        new_torch.published(HERE, matrix.load(), "2.16.0")
