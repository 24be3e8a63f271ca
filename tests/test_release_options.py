"""The options of make: a wrong one is refused by its own name before anything is fetched; what was fetched serves."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from release import ROOT, build, environments, matrix, preflight, provision, toolkit, wheel
from release.arch_list import ArchListError, Compiler
from release.options import OptionError, Options, choose
from release.preflight import Interpreter
from release.progress import StepError
from release.toolkit import Toolkit

PYTHON = Interpreter(Path(sys.executable), "3.11")
NVCC = Compiler("13.0.88", ("7.5", "9.0", "12.0"))


def run(tmp_path, *arguments, **variables):
    """A command of the release tools that has nothing yet, and nowhere to fetch from."""
    env = {name: value for name, value in os.environ.items() if name != "TORCH_CUDA_ARCH_LIST"}
    env.update(XDG_CACHE_HOME=str(tmp_path / "cache"), PIP_NO_INDEX="1", **variables)
    done = subprocess.run(
        [sys.executable, "-m", "release", *arguments], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert not (tmp_path / "cache").exists()
    return done


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["wheel", "--archs=garbage"], "unknown 'garbage' in ARCHS: expected numbers such as 9.0, "),
        (["wheel", "--archs=9.0 8.0a"], "'8.0a' in ARCHS: 'a' targets start at 9.0a"),
        (["test", "--archs=8.0(9.0)"], "'8.0(9.0)' in ARCHS: 8.0 cannot run code for 9.0"),
        (["wheel", "--torch=2.14.1"], "TORCH=2.14.1 is a patch release, and a wheel serves every patch of a minor: "),
        (["test", "--torch=2.14.1+cu130"], "TORCH=2.14.1+cu130 is a patch release"),
        (["sanitize", "--torch=two"], "TORCH=two is not in the matrix: give one of 2.11, 2.12, "),
        (["typecheck", "--cuda=13.0"], "CUDA=13.0 is nothing that torch "),
        (["image", "--torch=2.14.1"], "TORCH=2.14.1 is a patch release"),
        (["wheel", "--python=3.11.7"], "PYTHON=3.11.7 is no minor version: give PYTHON=3.11, "),
        (["wheel", "--python=three"], "PYTHON=three is no working Python here: give "),
        (["wheel", "--python=/bin/true"], "PYTHON=/bin/true is no working Python here: give "),
        (["wheel", "--test=maybe"], "TEST=maybe is neither yes nor no: give TEST=no, or leave it out"),
        (
            ["bench", "--bench=--only 'unbalanced"],
            "BENCH=--only 'unbalanced has a quotation mark without its partner: ",
        ),
        (
            ["sanitize-gpu", "--tools=memcheck race"],
            "TOOLS=race is no tool of compute-sanitizer: give some of memcheck, ",
        ),
        (["sanitize-gpu", "--jobs=0"], "JOBS=0 is no number of processes: give JOBS=8, or leave it out"),
        (["sanitize-gpu", "--cuda=cpu"], "CUDA=cpu has nothing for compute-sanitizer to see: "),
        (["test", "--pytest=-k 'unbalanced"], "PYTEST=-k 'unbalanced has a quotation mark without its partner: "),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_fetched(tmp_path, arguments, message):
    done = run(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1


def test_the_variable_is_refused_by_its_own_name(tmp_path):
    done = run(tmp_path, "wheel", TORCH_CUDA_ARCH_LIST="garbage")
    assert done.stderr.startswith("error: unknown 'garbage' in TORCH_CUDA_ARCH_LIST: expected numbers")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not here")
def test_make_hands_options_on_as_they_are(tmp_path):
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    values = {"TORCH": "2.14", "ARCHS": "8.0 9.0+PTX", "PYTEST": "-k 'a or b' -m \"not c\""}
    done = subprocess.run(
        ["make", "--no-print-directory", f"python={python}", "test", *(f"{k}={v}" for k, v in values.items())],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    given = [f"--{name.lower()}={value}" for name, value in values.items()]
    assert done.stdout.splitlines() == ["-m", "release", "test", *given]


def test_a_cuda_release_of_another_torch():
    with pytest.raises(OptionError, match=r"CUDA=cu128 is nothing .* give one of cu130, .*, or TORCH=2\.11 beside it"):
        choose(matrix.load(), None, "cu128")


def kit(compiler=NVCC, reason="PATH"):
    path = Path("/kit")
    return Toolkit(path / "bin/nvcc", reason, path, path / "include", path / "lib/libcudart.so.13", compiler)


def test_the_compiler_that_is_here_refuses_an_architecture_at_once(monkeypatch):
    monkeypatch.setattr(toolkit, "locate_nvcc", lambda: (Path("/kit/bin/nvcc"), "PATH"))
    monkeypatch.setattr(toolkit, "inspect", lambda *located: kit())
    with pytest.raises(ArchListError, match=r"'13\.0' in ARCHS is too new for nvcc 13\.0\.88, whose newest is 12\.0"):
        wheel.check(Options("2.14", "cu130", archs="13.0"), PYTHON)


def test_a_fetched_compiler_refuses_an_architecture_before_torch_is_fetched(monkeypatch):
    monkeypatch.setattr(provision, "cuda_compiler", lambda cuda, tools: kit())
    monkeypatch.setattr(provision, "torch", lambda *arguments, **more: pytest.fail("fetches torch"))
    cell = matrix.load().cell("2.14", "cu130", "x86_64")
    with pytest.raises(ArchListError, match=r"'13\.0' in ARCHS is too new for nvcc 13\.0\.88"):
        build.provide(
            cell, Options(archs="9.0 13.0"), PYTHON, environments.Environment(Path("/t"), "3.11"), importable=True
        )


@pytest.fixture
def nothing_here(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(toolkit, "locate_nvcc", lambda: None)
    return environments.cache()


def test_a_compiler_that_is_neither_here_nor_fetched_is_refused_at_once(nothing_here):
    with pytest.raises(StepError, match=r"no nvcc 12\.6 was found, .* \(nvidia-cuda-nvcc-cu12\) has no nvcc: install"):
        wheel.check(Options("2.14", "cu126"), PYTHON)


def test_a_compiler_that_was_fetched_is_found(nothing_here, monkeypatch):
    cuda = matrix.load().cuda["cu130"]
    assert provision.local_compiler(cuda) is None
    (nothing_here / "toolkit/cu130").mkdir(parents=True)
    (nothing_here / "toolkit/cu130/.complete").touch()
    monkeypatch.setattr(toolkit, "inspect", lambda nvcc, reason: (nvcc, reason))
    found = nothing_here / "toolkit/cu130/nvidia/cu13/bin/nvcc"
    assert provision.local_compiler(cuda) == (found, provision.FETCHED)


def test_headers_come_from_the_whole_torch_where_that_was_fetched(nothing_here, monkeypatch):
    cell = matrix.load().cell("2.14", "cu130", "x86_64")
    path = nothing_here / f"torch/{cell.torch.release}-cu130-cp311"
    made = []
    monkeypatch.setattr(provision, "create", lambda path, *arguments: made.append(path.name))
    provision.torch(cell, PYTHON, importable=False)
    assert not provision.has_torch(cell, PYTHON)
    monkeypatch.setattr(
        environments.subprocess, "run", lambda command, **more: subprocess.CompletedProcess(command, 0, "", "")
    )

    def fill(environment):
        (environment.path / "bin").mkdir(parents=True)
        environment.python.touch()

    environments.create(path, PYTHON, provision.torch_requirement(cell)[0], fill)
    assert provision.has_torch(cell, PYTHON)
    provision.torch(cell, PYTHON, importable=False)
    assert made == [f"{path.name}-headers", path.name]


def test_where_a_torch_outside_the_registry_is_found_is_said(nothing_here, monkeypatch):
    def fails(environment, arguments, **more):
        if arguments[0] == "install":
            raise StepError("pip found none")

    monkeypatch.delenv("TORCH_INDEX", raising=False)
    monkeypatch.setattr(provision, "pip", fails)
    monkeypatch.setattr(provision, "create", lambda path, interpreter, spec, fill: fill(None))
    cell = matrix.load().cell("2.14", "cu126", "x86_64")
    with pytest.raises(StepError, match=r"so set TORCH_INDEX=https://\S+/cu126, torch's own channel"):
        provision.torch(cell, PYTHON, importable=False)


def test_a_torch_that_was_fetched_needs_no_room_again(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(preflight, "check_disk", lambda folder, gigabytes: asked.append(gigabytes))
    monkeypatch.setattr(preflight, "gcc_major", lambda command: None)
    cell = matrix.load().cell("2.14", "cu130", "x86_64")
    for fetched in (False, True):
        monkeypatch.setattr(provision, "has_torch", lambda *which, fetched=fetched: fetched)
        wheel._check_machine(cell, PYTHON, full=True)
    assert asked == [preflight.FULL_DISK_GB, preflight.BUILD_DISK_GB]
