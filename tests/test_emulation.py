"""The CUDA kernels on machines without a GPU: their source, compiled for the host, on random problems.

tests/emulation holds a device made of fibers, and the program that draws the problems and checks them against the
definition in float64. It finds columns in wrong lanes, wrong edges, reads outside of operands and writes outside of
rows, addresses out of alignment, results that follow from where a row lies, barriers that are missing or that not
everyone comes to, and copies and numbers of other blocks that nobody waits for.

Not emulated: what nvcc makes of the source; PTX itself and its rounding (src/cuda/ptx.cuh); branches on __CUDA_ARCH__
(the host takes those of the oldest architecture, and clusters, asynchronous copies and maxima of integers beside
them); threads that truly run at once (one does at a time, in either of two orders); registers, occupancy and speed.
Not drawn: more dimensions than three, problems in pieces, and rows longer than 34,000 vectors. A program of its own
tries where rows of any dimensions and pieces lie.

SMS_HYPOTHESIS_PROFILE=deep runs many times as many problems, others each time. A failure prints the command that
repeats it; SMS_EMULATION_FIRST is the number of the first problem.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import os
import random
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from checks import DTYPES, short
from tolerances import TOLERANCES, smallest

SOURCE = Path(__file__).parent.parent / "src"
EMULATION = Path(__file__).parent / "emulation"
ROW_MAP = Path(__file__).parent / "cpp" / "row_map.cpp"

DEEP = os.environ.get("SMS_HYPOTHESIS_PROFILE") == "deep"
PROBLEMS = 100_000 if DEEP else 2_500

# As sms::Element.
ELEMENTS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

OPTIONS = [
    "-std=c++20",
    "-O1",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",  # those of nvcc
    "-Wno-missing-field-initializers",
    # As nvcc reads the kernels: memory holds any type, and nothing becomes a fused multiply-add by itself.
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    # A device faults at an address out of alignment. Without a library of the compiler's, which not every one has.
    "-fsanitize=alignment,bounds,shift",
    "-fsanitize-undefined-trap-on-error",
    "-U_FORTIFY_SOURCE",  # fibers are jumps that its longjmp() takes for mistakes
    "-DSMS_EMULATION",
    f"-I{EMULATION}",
    f"-I{SOURCE}",
    "-include",
    "cuda_runtime_api.h",
    "-pthread",
]


def build(folder: Path) -> Path:
    """The program, of all kernels: as many compilers at a time as there are cores."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    launcher = shlex.split(os.environ.get("CMAKE_CXX_COMPILER_LAUNCHER", ""))
    # The largest first.
    sources = sorted([*SOURCE.glob("cuda/*.cu"), *EMULATION.glob("*.cpp")], key=lambda path: "forward" not in path.name)

    def compiled(source: Path) -> str:
        result = folder / f"{source.name}.o"
        command = [*launcher, *compiler, *OPTIONS, "-c", "-x", "c++", str(source), "-o", str(result)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"
        return str(result)

    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compiled, sources))
    program = folder / "problems"
    subprocess.run([*compiler, *objects, "-pthread", "-o", str(program)], timeout=600, check=True)
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once, whichever parallel worker needs it first."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder = base / "emulation"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = folder / "built"
        if not built.exists():
            built.write_text(str(build(folder)))
    return Path(built.read_text())


def command(program: Path, dtype: torch.dtype, first: int, count: int) -> list[str]:
    row = TOLERANCES[dtype]
    bounds = (
        row.forward,
        row.relative,
        row.forward_scores,
        row.relative_scores,
        row.backward,
        row.backward_relative,
        smallest(dtype),
    )
    return [str(program), str(ELEMENTS.index(dtype)), str(first), str(count), *map(repr, bounds)]


def kernels_of(dtype: torch.dtype) -> set[str]:
    """What the problems of one dtype have to meet."""
    clusters = "shared_row in clusters" if dtype == torch.float64 else "cluster_row in clusters"
    long_with_dropout = ["stream_row"] if dtype == torch.float64 else ["block_row", "stream_row"]
    kernels = {"mask_gradient", "mask_gradient with dropout", "keep", "keep with dropout"}
    if dtype != torch.float64:
        kernels |= {"forward, pair_rows", "forward, pair_rows in clusters"}
        kernels |= {"forward, block_row of odd length", "backward, block_row of odd length"}
    if dtype == torch.float32:
        kernels |= {"forward, pair_rows in clusters of five blocks"}
    if dtype in (torch.float16, torch.bfloat16):
        kernels |= {"forward, block_row with two rows", "backward, block_row with two rows"}
    for direction in ("forward", "backward"):
        without = ["warp_rows", "block_row", "shared_row", "stream_row", clusters]
        kernels |= {f"{direction}, {name}" for name in without}
        kernels |= {f"{direction} with dropout, {name}" for name in ["warp_rows", *long_with_dropout]}
    return kernels


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_random_problems(program: Path, dtype: torch.dtype) -> None:
    first = int(os.environ.get("SMS_EMULATION_FIRST", random.SystemRandom().randrange(2**40) if DEEP else 0))
    given = command(program, dtype, first, PROBLEMS)
    print(shlex.join(given))
    done = subprocess.run(given, capture_output=True, text=True, timeout=7200, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert {line.split(":")[0] for line in done.stdout.splitlines()} >= kernels_of(dtype)


def test_row_map(tmp_path: Path) -> None:
    """Dimensions and distances that no memory of a test holds, in the pieces that launches take."""
    program = tmp_path / "row_map"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    subprocess.run([*compiler, *OPTIONS, str(ROW_MAP), "-o", str(program)], timeout=600, check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=600, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
