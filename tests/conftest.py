"""Devices, markers and profiles of the suite.

Environment:
  SMS_REQUIRE_GPU=1            a machine without a CUDA device fails the run, instead of skipping what needs one
  SMS_HYPOTHESIS_PROFILE=deep  many more random examples, drawn anew each time
"""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

REQUIRE_GPU = os.environ.get("SMS_REQUIRE_GPU", "0") not in ("", "0")

hypothesis.settings.register_profile("default", derandomize=True, deadline=None, max_examples=150, database=None)
hypothesis.settings.register_profile("deep", deadline=None, max_examples=5000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("SMS_HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "sanitizer: the small set of tests that sanitizers run, each kernel at least once"
    )
    config.addinivalue_line("markers", "large: needs tens of GB of memory on the CUDA device")
    # Parallel workers share the cores: threads that wait for one another's turn take ten times as long.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    if REQUIRE_GPU and not torch.cuda.is_available():
        raise pytest.UsageError("SMS_REQUIRE_GPU is set, and torch finds no CUDA device")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `device` runs on the CPU, and on the CUDA device where there is one."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])


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
