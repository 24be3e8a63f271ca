"""The CPU kernels for processors older than this one: the small suite again, in a process where torch chooses them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scaled_mask_softmax import _C

SCRIPT = """
import sys
import pytest
from scaled_mask_softmax import _C
assert _C.build_info()["instruction_set"] == sys.argv[1], _C.build_info()
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("instruction_set", ["DEFAULT", "AVX2"])
def test_older_instruction_sets(instruction_set: str) -> None:
    if instruction_set == "AVX2" and _C.build_info()["instruction_set"] not in ("AVX2", "AVX512"):
        pytest.skip("this processor has no AVX2")
    tests = Path(__file__).parent
    files = [str(tests / f"test_{name}.py") for name in ("sanitizer", "semantics", "dropout")]
    arguments = ["-q", "-p", "no:cacheprovider", *files]
    # Without the workers' variables of the process above, and without a GPU: that one has its turn elsewhere.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment |= {"ATEN_CPU_CAPABILITY": instruction_set.lower(), "CUDA_VISIBLE_DEVICES": "", "SMS_REQUIRE_GPU": "0"}
    chosen = "test_every_kernel or test_edges or nan or (dead and not 40003) or 300 or minimum or philox"
    child = subprocess.run(
        [sys.executable, "-c", SCRIPT, instruction_set, *arguments, "-k", f"({chosen}) and not 70003 and not 17001"],
        env=environment | {"OMP_NUM_THREADS": "1"},
        cwd=tests.parent,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stdout[-5000:] + child.stderr[-2000:]
