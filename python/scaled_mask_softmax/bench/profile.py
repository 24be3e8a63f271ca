"""``scaled-mask-softmax profile``: what one case spends its time on, by torch's profiler and by Nsight Compute."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from .cases import SCORE_BYTES, Case, all_cases
from .peers import OPERATOR, PEERS, Peer
from .problems import make_problem, run, step
from .timing import Call

OK, USAGE = 0, 2

STEPS = 5
WARM_UPS = 3
SECTIONS = (
    "SpeedOfLight",
    "MemoryWorkloadAnalysis",
    "Occupancy",
    "LaunchStats",
    "SchedulerStats",
    "WarpStateStats",
)


class Refused(Exception):
    """What is missing, in a sentence."""


def find_case(text: str) -> Case:
    """The case of that name, or the only one whose name contains the text."""
    cases = list(all_cases("cuda", SCORE_BYTES["cuda"]))
    found = [case for case in cases if case.name == text] or [case for case in cases if text in case.name]
    if len(found) != 1:
        some = ", ".join(repr(case.name) for case in found[:3])
        what = f"{len(found)} cases match {text!r}: {some}..." if found else f"no case matches {text!r}"
        raise Refused(f"{what}; `scaled-mask-softmax bench --device cuda --list` prints them all")
    return found[0]


def find_ncu() -> str:
    places = [os.environ.get("PATH", os.defpath)]
    places += [str(Path(root) / "bin") for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if root]
    ncu = shutil.which("ncu", path=os.pathsep.join(places))
    if ncu is None:
        raise Refused(
            "ncu (Nsight Compute) is not on PATH, in CUDA_HOME/bin or in /usr/local/cuda/bin; install it, or pass "
            "--no-ncu for the trace alone"
        )
    return ncu


def prepare(case: Case, peer: Peer) -> Call:
    """One step of the case, warmed up."""
    problem = make_problem(case, "cuda")
    forward = step(problem, peer.operator(problem))

    def call() -> object:
        return run(problem, forward)

    for _ in range(WARM_UPS):
        call()
    torch.cuda.synchronize()
    return call


def launches(events: Iterable[Any]) -> dict[str, tuple[int, float]]:
    """Of each thing that ran on the device: how often, and for how many microseconds in all."""
    found: dict[str, tuple[int, float]] = {}
    for event in events:
        if event.device_type.name == "CUDA":
            count, time = found.get(event.name, (0, 0.0))
            found[event.name] = count + 1, time + event.time_range.elapsed_us()
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def summary(name: str, found: dict[str, tuple[int, float]], steps: int) -> list[str]:
    """Lines: launches and device time a step."""
    count, time = (sum(column) / steps for column in zip(*found.values())) if found else (0.0, 0.0)
    lines = [f"{name}: {count:g} launches and {time:.1f} us on the device a step"]
    return lines + [f"  {n / steps:g} x {t / n:8.1f} us  {kernel[:100]}" for kernel, (n, t) in found.items()]


def trace(case: Case, peer: Peer, path: Path) -> list[str]:
    call = prepare(case, peer)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as recorded:
        for _ in range(STEPS):
            call()
        torch.cuda.synchronize()
    recorded.export_chrome_trace(str(path))
    return summary(peer.name, launches(recorded.events()), STEPS)


def profiled_step(case: Case) -> None:
    """What ncu runs: it looks between start and stop alone."""
    call = prepare(case, OPERATOR)
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def ncu_report(ncu: str, case: Case, report: Path) -> str:
    """Let ncu replay each kernel of one step, keep its report and return it as text."""
    sections = [argument for section in SECTIONS for argument in ("--section", section)]
    # The clocks stay as the bench has them: at ncu's own base clock, memory is faster beside the multiprocessors.
    measure = [ncu, "--profile-from-start", "off", "--clock-control", "none", *sections]
    measure += ["--force-overwrite", "--export", str(report)]
    target = [sys.executable, "-m", "scaled_mask_softmax.bench.profile", case.name, "--step"]
    for command in ([*measure, *target], [ncu, "--import", str(report), "--page", "details"]):
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise Refused(f"ncu failed with status {result.returncode}: {(result.stdout + result.stderr).strip()}")
    return result.stdout


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scaled-mask-softmax profile", allow_abbrev=False)
    parser.description = (
        "Trace a case of the bench with torch's profiler, beside eager torch, and measure its kernels with Nsight "
        "Compute. Needs a CUDA device and ncu."
    )
    add = parser.add_argument
    add("case", metavar="CASE", help="a case's name, or a part of it that only one has: float16 Sk=2048 causal forward")
    add("--out", type=Path, default=Path("profile"), metavar="FOLDER", help="for the traces and ncu's report")
    add("--no-ncu", action="store_true", help="trace only")
    add("--step", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile a case and return the exit status."""
    options = make_parser().parse_args(arguments)
    try:
        case = find_case(options.case)
        if not torch.cuda.is_available():
            raise Refused("there is no CUDA device; kernels can only be profiled on one")
        if options.step:
            profiled_step(case)
            return OK
        ncu = None if options.no_ncu else find_ncu()
        options.out.mkdir(parents=True, exist_ok=True)
        print(case.name)
        for peer in (OPERATOR, PEERS["eager"]):
            path = options.out / f"trace-{peer.name}.json"
            print(*trace(case, peer, path), f"  trace: {path}", sep="\n", flush=True)
            torch.cuda.empty_cache()
        if ncu is not None:
            text = ncu_report(ncu, case, options.out / "ours.ncu-rep")
            (options.out / "ncu.txt").write_text(text, "utf-8")
            print(text)
        return OK
    except Refused as error:
        print(f"scaled-mask-softmax profile: {error}", file=sys.stderr)
        return USAGE


if __name__ == "__main__":
    sys.exit(main())
