"""Devices, markers and profiles of the suite.

Environment:
  SMS_REQUIRE_GPU=1            a machine without a CUDA device fails the run, instead of skipping what needs one
  SMS_HYPOTHESIS_PROFILE=deep  thousands of random cases a test, drawn anew each time; their numbers and the seed are
                               printed, and --hypothesis-seed repeats them
"""

from __future__ import annotations

import os
import random
import shlex
from collections.abc import Iterator
from pathlib import Path

import cxx
import hypothesis
import pytest
import torch

REQUIRE_GPU = os.environ.get("SMS_REQUIRE_GPU", "0") not in ("", "0")

hypothesis.settings.register_profile("default", derandomize=True, deadline=None, max_examples=150, database=None)
# A profile begins with what is loaded, of which no seed is to be heeded.
hypothesis.settings.register_profile(
    "deep", derandomize=False, deadline=None, max_examples=5000, database=None, print_blob=True
)
PROFILE = os.environ.get("SMS_HYPOTHESIS_PROFILE", "default")
hypothesis.settings.load_profile(PROFILE)


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its options, and pytest-xdist hands them to its workers
def pytest_configure(config: pytest.Config) -> None:
    if PROFILE == "deep":
        config.option.hypothesis_seed = config.option.hypothesis_seed or str(random.SystemRandom().randrange(2**32))
        config.option.hypothesis_show_statistics = True
    config.addinivalue_line(
        "markers", "sanitizer: the small set of tests that sanitizers run, each kernel at least once"
    )
    config.addinivalue_line("markers", "large: needs tens of GB of memory")
    # Parallel workers share the cores: threads that wait for one another's turn take ten times as long.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    if REQUIRE_GPU and not torch.cuda.is_available():
        raise pytest.UsageError("SMS_REQUIRE_GPU is set, and torch finds no CUDA device")


def pytest_report_header(config: pytest.Config) -> str | None:
    if PROFILE != "deep":
        return None
    cases = hypothesis.settings.default.max_examples
    return f"random cases: up to {cases} a test, --hypothesis-seed={config.option.hypothesis_seed}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `device` runs on the CPU, and on the CUDA device where there is one."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Of long texts their length: processes that a test starts have its name in their environment, which has bounds."""
    return f"{argname}-of-{len(val)}" if isinstance(val, str | bytes) and len(val) > 200 else None


@pytest.fixture
def cuda() -> str:
    """For tests of what only a CUDA device has."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return "cuda"


@pytest.fixture
def second_cuda() -> str:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return "cuda:1"


@pytest.fixture
def inductors_compiler(tmp_path: Path) -> Iterator[None]:
    """Lets torch's own compiler make libraries that work beside torch (cxx.py)."""
    compiler = os.environ.get("CXX", "g++")
    options = cxx.shared_library_options(shlex.split(compiler))
    if not options:
        yield
        return
    wrapper = tmp_path / "g++"
    wrapper.write_text(
        "#!/bin/sh\n"
        f'for argument; do [ "$argument" != -shared ] || exec {compiler} "$@" {" ".join(options)}; done\n'
        f'exec {compiler} "$@"\n'
    )
    wrapper.chmod(0o755)
    with torch._inductor.config.patch({"cpp.cxx": (None, str(wrapper))}):
        yield
