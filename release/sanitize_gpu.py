"""make sanitize-gpu: compute-sanitizer's four tools over the tests marked `sanitizer`, spread over GPUs and cores."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import ROOT, WORK, toolkit
from .options import OptionError
from .progress import StepError, duration, say

# Our namespace, which the mangled name of each of our kernels holds and no kernel of torch's.
KERNELS = "sms"

# What a tool needs beside the options of all. initcheck sees every kernel, as those of torch write what ours read.
TOOLS: dict[str, tuple[str, ...]] = {
    "memcheck": ("--kernel-name", f"kns={KERNELS}", "--report-api-errors", "explicit"),
    "racecheck": ("--kernel-name", f"kns={KERNELS}"),
    "synccheck": ("--kernel-name", f"kns={KERNELS}"),
    "initcheck": (),
}
# Its processes take longest, so they start first.
_SLOWEST = "racecheck"

_FOUND = 97  # compute-sanitizer's exit status where it found something
_LIMIT_SECONDS = 1800.0  # of one process, which takes minutes
_GPU_BYTES = 4 << 30  # of a GPU's memory, for a process: its CUDA context, small tensors, what the tool keeps
# Each compute-sanitizer reaches its process through the first free of ten ports.
_FIRST_PORT, _PORTS = 49152, 10

_MISSING = (
    "compute-sanitizer is not here: it is a part of NVIDIA's toolkit, looked for in PATH, CUDA_HOME and "
    "/usr/local/cuda, and of the package nvidia-cuda-sanitizer-api. Give SANITIZER=path"
)
_NO_GPU = "compute-sanitizer needs a GPU"


def chosen(words: Sequence[str]) -> list[str]:
    """The tools that TOOLS names; all where it names none. Raises OptionError."""
    for word in words:
        if word not in TOOLS:
            raise OptionError(f"TOOLS={word} is no tool of compute-sanitizer: give some of {', '.join(TOOLS)}")
    return [tool for tool in TOOLS if tool in words or not words]


def locate(given: str | None) -> Path:
    """compute-sanitizer, the one that is `given` or this machine's. Raises StepError."""
    if given:
        found = shutil.which(given)
        if found is None:
            raise StepError(f"SANITIZER={given} is no program: give the path of compute-sanitizer")
        return Path(found)
    roots = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    folders = [f"{root / name}" for root in [*roots, Path("/usr/local/cuda")] for name in ("bin", "compute-sanitizer")]
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    if found is None:
        raise StepError(_MISSING)
    return Path(found)


def check_machine(given: str | None) -> None:
    """Raises StepError where nothing could run, before anything is built."""
    if not toolkit.local_gpus():
        raise StepError(f"{_NO_GPU}, and nvidia-smi lists none here")
    locate(given)


@dataclass(frozen=True)
class Gpu:
    name: str  # as CUDA_VISIBLE_DEVICES names it
    free_bytes: int


_ASK = """
import json, torch
import scaled_mask_softmax as sms
free = [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]
print(json.dumps([torch.__version__, sms.__version__, free]))
"""


def gpus(python: Path) -> list[Gpu]:
    """Those that torch sees. Raises StepError where there is none."""
    done = subprocess.run([python, "-c", _ASK], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise StepError(f"{python} cannot use torch and scaled_mask_softmax: {done.stderr.strip()}")
    torch, version, free = json.loads(done.stdout.splitlines()[-1])
    if not free:
        raise StepError(f"{_NO_GPU}, and torch {torch} of {python} sees none")
    say(f"scaled-mask-softmax {version}, torch {torch}, {len(free)} GPU{'s' * (len(free) > 1)}")
    names = (os.environ.get("CUDA_VISIBLE_DEVICES") or "").split(",")
    if names == [""]:
        names = [str(index) for index in range(len(free))]
    return [Gpu(name.strip(), count) for name, count in zip(names, free)]


def _pytest(python: Path, *arguments: str) -> list[str]:
    return [str(python), "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *arguments]


def collect(python: Path, pytest: Sequence[str]) -> list[str]:
    """The ids of the tests that run on a GPU. Raises StepError where there is none."""
    command = _pytest(python, "-m", "sanitizer", "--collect-only", *pytest)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    ids = [line for line in done.stdout.splitlines() if re.match(r"tests/\w+\.py::.*\[cuda\b", line)]
    if not ids:
        raise StepError(f"pytest collects no test of a GPU: {(done.stdout + done.stderr).strip()[-2000:]}")
    return ids


_DTYPES, _KINDS = r"b?float\d+", "none|bool|same|float32"


def groups(ids: Sequence[str]) -> dict[str, list[str]]:
    """What a process runs, by name: the tests of one dtype and kind of mask, and those that have none."""
    found: dict[str, list[str]] = {}
    for test in ids:
        dtype_and_kind = re.search(rf"-({_DTYPES}-(?:{_KINDS}))\b", test)
        found.setdefault(dtype_and_kind[1] if dtype_and_kind else "others", []).append(test)
    return found


@dataclass(frozen=True)
class Run:
    """One process: a tool over a group of tests."""

    tool: str
    group: str
    tests: int
    passed: int
    findings: int | None  # None where the tool gave no summary
    status: int | None  # None where it ran out of time
    seconds: float
    log: Path

    @property
    def problem(self) -> str | None:
        if self.status is None:
            return f"not done after {duration(self.seconds)}"
        if self.findings is None:
            return f"exit status {self.status} without a summary of {self.tool}'s"
        if self.findings:
            return f"{self.findings} finding{'s' * (self.findings > 1)}"
        if self.passed != self.tests:
            return f"{self.passed} of {self.tests} tests passed"
        return None if self.status == 0 else f"exit status {self.status}"


def _passed(output: str) -> int:
    """From the last line of pytest's, such as "1 failed, 62 passed in 3.14s"."""
    last = re.findall(r"^(?:.*, )?(\d+) passed\b.* in \d", output, re.MULTILINE)
    return int(last[-1]) if last else 0


def _findings(tool: str, output: str) -> int | None:
    name, what = ("RACECHECK", "hazards?") if tool == "racecheck" else ("ERROR", "errors?")
    counts = re.findall(rf"^=+ {name} SUMMARY: (\d+) {what}\b", output, re.MULTILINE)
    return sum(map(int, counts)) if counts else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that has a session of its own, with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _run(
    program: Path,
    python: Path,
    tool: str,
    group: str,
    tests: list[str],
    gpu: Gpu,
    slot: int,
    running: set[subprocess.Popen[bytes]],
) -> Run:
    log = WORK / "logs" / "sanitize-gpu" / f"{tool}-{group}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    port = str(_FIRST_PORT + slot * _PORTS)
    options = ["--tool", tool, "--error-exitcode", str(_FOUND), "--port", port, "--max-connections", str(_PORTS)]
    command = [str(program), *options, *TOOLS[tool], *_pytest(python, *tests)]
    # Each tensor an allocation of its own, whose end is guarded.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1", "SMS_REQUIRE_GPU": "1"}
    env["CUDA_VISIBLE_DEVICES"] = gpu.name
    started = time.monotonic()
    status: int | None = None
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
        running.add(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(_LIMIT_SECONDS)
        _end(process)
        running.discard(process)
    seconds = time.monotonic() - started
    output = log.read_text(encoding="utf-8", errors="replace")
    return Run(tool, group, len(tests), _passed(output), _findings(tool, output), status, seconds, log)


def _slots(found: Sequence[Gpu], jobs: int | None) -> list[Gpu]:
    """The GPU of each process that may run at a time: one a core, as far as the GPUs' memory goes."""
    room = [max(1, gpu.free_bytes // _GPU_BYTES) for gpu in found]
    rounds = [gpu for number in range(max(room)) for gpu, own in zip(found, room) if number < own]
    return rounds[: jobs or max(len(os.sched_getaffinity(0)), len(found))]


def table(runs: Sequence[Run]) -> list[str]:
    rows: list[tuple[str, ...]] = [("tool", "processes", "tests", "passed", "findings", "slowest", "")]
    for tool in TOOLS:
        own = [run for run in runs if run.tool == tool]
        if not own:
            continue
        bad = sum(run.problem is not None for run in own)
        numbers = [len(own), sum(run.tests for run in own), sum(run.passed for run in own)]
        numbers.append(sum(run.findings or 0 for run in own))
        slowest = duration(max(run.seconds for run in own))
        rows.append((tool, *map(str, numbers), slowest, f"{bad} processes with a problem" if bad else "clean"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def run(
    python: Path, given: str | None, words: Sequence[str], jobs: int | None = None, pytest: Sequence[str] = ()
) -> None:
    """Runs the tools over the tests of the environment that `python` belongs to. Raises StepError for any problem."""
    started = time.monotonic()
    tools, program = chosen(words), locate(given)
    slots = _slots(gpus(python), jobs)
    tests = groups(collect(python, pytest))
    work = [(tool, group) for tool in sorted(tools, key=lambda tool: tool != _SLOWEST) for group in tests]
    count = sum(map(len, tests.values()))
    say(f"{program}: {', '.join(tools)} over {count} tests, {len(work)} processes, {len(slots)} at a time")
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for slot in range(len(slots)):
        free.put(slot)
    runs: list[Run] = []
    running: set[subprocess.Popen[bytes]] = set()

    def one(item: tuple[str, str]) -> None:
        slot = free.get()
        try:
            done = _run(program, python, *item, tests[item[1]], slots[slot], slot, running)
        finally:
            free.put(slot)
        runs.append(done)
        say(
            f"  [{len(runs)}/{len(work)}] {done.tool} {done.group}: {done.problem or 'clean'}, {done.tests} tests, "
            f"{duration(done.seconds)}"
        )

    with ThreadPoolExecutor(len(slots)) as pool:
        try:
            list(pool.map(one, work))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                _end(process)
            raise
    say("")
    for line in table(runs):
        say(line)
    say(f"in {duration(time.monotonic() - started)}")
    problems = [done for done in runs if done.problem]
    for done in problems:
        say(f"{done.tool} {done.group}: {done.problem}; {done.log}")
        sys.stdout.write("".join(done.log.read_text(encoding="utf-8", errors="replace").splitlines(True)[-25:]))
    if problems:
        raise StepError(f"{len(problems)} of {len(runs)} processes of compute-sanitizer have a problem")
