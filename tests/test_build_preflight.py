"""What a machine lacks is said in one sentence before anything starts; the options lead to the right cell."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from release import matrix, preflight, wheel
from release.options import OptionError
from release.preflight import Interpreter, PreflightError

THIS = "{}.{}".format(*sys.version_info)


def fake_python(folder, version=(3, 12), headers=True, venv=True):
    answer = {"version": version, "executable": str(folder / "python"), "headers": headers, "venv": venv}
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    path.chmod(0o755)
    return str(path)


def test_the_running_python_is_the_default():
    found = preflight.interpreter(None)
    assert found.version == THIS
    assert found.tag == "cp" + THIS.replace(".", "")
    assert preflight.interpreter(THIS).version == THIS


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"version": (3, 9)}, "Python 3.9 is too old: Python 3.10 or newer is needed"),
        ({"headers": False}, "lacks its headers: install them, on Debian python3.12-dev"),
        ({"venv": False}, "lacks venv: install it, on Debian python3.12-venv"),
    ],
)
def test_python_that_will_not_do(tmp_path, facts, message):
    with pytest.raises(PreflightError, match=re.escape(message)):
        preflight.interpreter(fake_python(tmp_path, **facts))


def test_no_such_python():
    with pytest.raises(PreflightError, match=r"PYTHON=3\.99 is no working Python here"):
        preflight.interpreter("3.99")


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(PreflightError, match=r"no C\+\+ compiler was found"):
        preflight.check_cxx()
    monkeypatch.setenv("CXX", "/gone/g++")
    with pytest.raises(PreflightError, match=r"/gone/g\+\+"):
        preflight.check_cxx()


def test_a_compiler_without_cxx20(monkeypatch, tmp_path):
    compiler = tmp_path / "old g++".replace(" ", "")
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(PreflightError, match=r"does not compile C\+\+20"):
        preflight.check_cxx()


def test_this_compiler_will_do():
    assert preflight.check_cxx()


@pytest.mark.parametrize(("label", "major", "fits"), [("cu126", 13, True), ("cu126", 14, False), ("cu130", 16, False)])
def test_gcc_too_new_for_the_cuda_compiler(monkeypatch, label, major, fits):
    monkeypatch.setattr(preflight, "gcc_major", lambda command: major)
    cuda = matrix.load().cuda[label]
    if fits:
        preflight.check_gcc("g++", cuda.toolkit, cuda.max_gcc)
    else:
        with pytest.raises(PreflightError, match=f"gcc {major}, too new for the CUDA {cuda.toolkit} compiler"):
            preflight.check_gcc("g++", cuda.toolkit, cuda.max_gcc)


def test_too_little_disk(monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=4_200_000_000))
    preflight.check_disk(tmp_path / "not/yet/there", 3)
    with pytest.raises(PreflightError, match=r"has 4\.2 GB free and about 10 GB are needed.*XDG_CACHE_HOME"):
        preflight.check_disk(tmp_path / "not/yet/there", 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=9_999_000_000))
    with pytest.raises(PreflightError, match=r"has 9\.9 GB free and about 10 GB are needed"):
        preflight.check_disk(tmp_path, 10)


def cell(python="3.11", **options):
    chosen = wheel.choose(matrix.load(), wheel.Options(**options), Interpreter(Path("/python"), python))
    return chosen.torch.minor, chosen.cuda.label if chosen.cuda else "cpu"


def test_defaults_come_from_the_matrix():
    loaded = matrix.load()
    assert cell() == (loaded.default_torch, loaded.torch[loaded.default_torch].default)
    assert cell(torch="2.15") == ("2.15", "cu132")
    assert cell(torch="2.13", cuda="cpu") == ("2.13", "cpu")


def test_the_torch_of_this_machine_is_the_default():
    assert cell(torch_here="2.12", cuda_here="cu126") == ("2.12", "cu126")
    assert cell(torch_here="2.12", cuda_here="cu126", torch="2.15") == ("2.15", "cu132")
    assert cell(torch_here="2.12", cuda_here="cu126", cuda="cu130")[1] == "cu130"
    assert cell(torch_here="2.9", cuda_here="cu128")[0] == matrix.load().default_torch


def test_python_that_torch_is_not_published_for():
    with pytest.raises(OptionError, match=r"torch 2\.15 is published for Python 3\.11 to 3\.14, not for 3\.10"):
        cell(python="3.10", torch="2.15")
