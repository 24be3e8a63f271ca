"""How many compilations run at a time: MAX_JOBS, else what cores and free memory allow."""

import os
import re
import shutil
import subprocess

import pytest

from release import ROOT


def jobs(**variables):
    cmake = shutil.which("cmake")
    assert cmake is not None, "the build tools are not on PATH"
    env = {name: value for name, value in os.environ.items() if name not in ("MAX_JOBS", "NVCC_THREADS")}
    command = [cmake, "-P", ROOT / "cmake/Jobs.cmake"]
    done = subprocess.run(command, env={**env, **variables}, capture_output=True, text=True, check=True)
    match = re.search(r"at most (\d+) compilations at a time", done.stdout)
    assert match is not None
    return int(match[1])


@pytest.mark.parametrize("wanted", [1, 7, 64])
def test_max_jobs_decides(wanted):
    assert jobs(MAX_JOBS=str(wanted)) == wanted


@pytest.mark.parametrize("nonsense", ["", "0", "many", "-1"])
def test_nonsense_is_no_limit_of_its_own(nonsense):
    assert 1 <= jobs(MAX_JOBS=nonsense) <= (os.cpu_count() or 1)


def test_memory_bounds_the_default():
    # No machine has memory for a thousand threads of nvcc in each of its jobs.
    assert jobs(NVCC_THREADS="1000") == 1
