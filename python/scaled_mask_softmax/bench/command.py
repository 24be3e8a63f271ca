"""The arguments of ``scaled-mask-softmax bench``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from . import cells, report, results, tables, thresholds, timing
from .cases import (
    COLUMNS,
    DIRECTIONS,
    DROPOUT,
    DTYPES,
    KINDS,
    SCORE_BYTES,
    SUITES,
    THRESHOLD_DTYPES,
    THRESHOLDS,
    Case,
    all_cases,
)
from .peers import OURS, PEERS

OK, BAD, USAGE = 0, 1, 2

# Results are written when the last ones are older than this, and at the end.
WRITE_SECONDS = 2.0
# A case that seems slower is measured again this often, and is slower only if it is each time.
RETRIES = 2


class Refused(Exception):
    """What is missing, in a sentence."""


def shard(text: str) -> tuple[int, int]:
    """ "2/8" -> (2, 8)."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with 1 <= I <= N")
    return int(index), int(count)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scaled-mask-softmax bench", allow_abbrev=False)
    parser.description = (
        "Measure the operator beside a copy of the same size and its rivals. Every result is verified before it is "
        "timed. Status 1: a wrong result of this operator, or a case that --compare finds slower."
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), help="default: cuda where torch finds a CUDA device")
    add("--suite", nargs="+", choices=SUITES, help="default: all, on the CPU sweep, attention, small and dropout")
    add("--case", nargs="+", choices=(*KINDS, DROPOUT), help="kinds of cases")
    add("--columns", nargs="+", type=int, metavar="SK", help=f"of {', '.join(map(str, COLUMNS))} and the other suites'")
    add("--dtype", nargs="+", choices=DTYPES)
    add("--direction", nargs="+", choices=DIRECTIONS)
    add("--only", metavar="TEXT", default="", help="cases whose name contains TEXT")
    add("--peers", nargs="+", choices=(*PEERS, "none"), default=list(PEERS), help="default: all that are installed")
    add("--shard", type=shard, metavar="I/N", default=(1, 1), help="every N-th case, from the I-th on")
    add("--seconds", type=float, metavar="N", default=math.inf, help="begin no case after N seconds")
    add("--json", type=Path, metavar="FILE", help="keep the results here, and skip what it holds already")
    add("--merge", nargs="+", type=Path, default=[], metavar="FILE", help="take over the results of other shards")
    add("--no-run", action="store_true", help="measure nothing: print, merge, plot and compare what there is")
    add("--list", action="store_true", help="print the names of the cases that would be measured")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="a PNG of the shares of the floor over Sk, on CUDA; needs the extra [bench]",
    )
    add("--fill", nargs="+", type=Path, default=[], metavar="FILE", help="write the tables into these Markdown files")
    add("--bars", action="store_true", help="print how the results stand beside the bars that this project sets itself")
    add("--compare", type=Path, metavar="OLD", help="fail where a case is slower than in these results")
    add("--slower", type=float, metavar="FACTOR", default=results.SLOWER, help="what is slower; default: %(default)s")
    add("--each", type=float, metavar="S", default=timing.SECONDS, help=f"time each S seconds or {timing.RUNS} runs")
    add("--bytes", type=int, help="size of the scores in the sweep; default: past the caches")
    add("--threads", type=int, help="of the CPU; default: torch's")
    return parser


def check_suites(options: argparse.Namespace) -> None:
    """Refuses a suite that cannot have any case."""
    if THRESHOLDS in (options.suite or ()) and not options.no_run:
        if options.device == "cpu":
            raise Refused(f"--suite {THRESHOLDS}: the length of a row decides over CUDA kernels alone, not on the CPU")
        if not thresholds.known():
            raise Refused(f"--suite {THRESHOLDS} needs the native library, whose kernels it asks for; this is without")


def chosen_cases(options: argparse.Namespace, score_bytes: int) -> list[Case]:
    suites = options.suite or [suite for suite in SUITES if options.device == "cuda" or suite != "headline"]
    chosen = [
        case
        for case in all_cases(options.device, score_bytes)
        if case.suite in suites
        and (options.case is None or case.kind in options.case)
        and (options.columns is None or case.columns in options.columns)
        and case.dtype_name in (options.dtype or (THRESHOLD_DTYPES if case.suite == THRESHOLDS else DTYPES))
        and (options.direction is None or case.direction in options.direction)
        and options.only in case.name
    ]
    index, count = options.shard
    return chosen[index - 1 :: count]


def gather(options: argparse.Namespace, score_bytes: int) -> results.Results:
    """What was measured already."""
    files = [path for path in (options.json, *options.merge) if path is not None]
    known = [results.read(path) for path in files if path in options.merge or path.exists()]
    if options.no_run:
        if not known:
            raise results.Mismatch("--no-run needs results: --json or --merge")
        gathered = results.Results(known[0].environment)
    else:
        gathered = results.Results(results.environment(options.device, score_bytes, options.each))
    for part in known:
        gathered.merge(part)
    return gathered


def check_target(option: str, path: Path) -> None:
    """Refuses a file that could not be written."""
    if not path.parent.is_dir():
        raise Refused(f"{option} {path}: there is no folder {path.parent}; make it first")
    try:
        if path.exists():
            path.open("r+b").close()
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise Refused(f"{option} {path} cannot be written: {error.strerror}") from None


def check(options: argparse.Namespace, gathered: results.Results, cases: Sequence[Case]) -> None:
    """Refuses what could otherwise fail only after the last case."""
    # What there will be; the figures do not matter.
    planned = results.Results(gathered.environment, dict(gathered.cells))
    for case in () if options.no_run else cases:
        cell = cells.unmeasured(case)
        cell["times"][OURS] = {"seconds": 1.0, "share_of_floor": 1.0}
        planned.cells.setdefault(case.name, cell)
    if options.json is not None:
        check_target("--json", options.json)
    if options.plot is not None:
        if gathered.environment["kind"] != "cuda":
            raise Refused(
                "--plot draws shares of the floor, which mean something on a CUDA device only: leave it out on the CPU"
            )
        if all(cell["suite"] != "sweep" for cell in planned.cells.values()):
            raise Refused("--plot draws cases of the suite sweep, and none is chosen")
        try:
            importlib.import_module("matplotlib.backends.backend_agg")
        except ImportError as error:
            raise Refused(
                "--plot needs matplotlib, which the extra [bench] brings: "
                f'pip install "scaled-mask-softmax[bench]" ({error})'
            ) from None
        check_target("--plot", options.plot)
    for path in options.fill:
        tables.filled(path.read_text("utf-8"), planned)
        check_target("--fill", path)
    if options.compare is not None:
        results.slowdowns(planned, results.read(options.compare))


@contextlib.contextmanager
def kept(gathered: results.Results, path: Path | None) -> Iterator[None]:
    """Whatever fails or interrupts: what was measured is kept, in a new file where there is no other, and says so."""
    try:
        yield
    except BaseException:
        if gathered.cells:
            if path is None or not written(gathered, path):
                handle, name = tempfile.mkstemp(prefix="scaled-mask-softmax-bench-", suffix=".json")
                os.close(handle)
                path = Path(name)
                gathered.write(path)
            print(
                f"scaled-mask-softmax bench: the results of {len(gathered.cells)} cases are kept in {path}; --json "
                f"{path} goes on with them, with --no-run without measuring",
                file=sys.stderr,
            )
        raise


def written(gathered: results.Results, path: Path) -> bool:
    try:
        gathered.write(path)
    except OSError:
        return False
    return True


def measure(options: argparse.Namespace, gathered: results.Results, cases: Sequence[Case]) -> None:
    """Measure what is missing, until the time is up."""
    start = last = time.monotonic()
    peers = [name for name in PEERS if name in options.peers]
    todo: list[tuple[Case, list[str]]] = []
    for case in cases:
        missing = gathered.missing(case.name, peers)
        if missing is None or missing:
            todo.append((case, peers if missing is None else missing))
    if len(todo) < len(cases):
        print(f"{len(cases) - len(todo)} of {len(cases)} cases are measured already")
    progress = report.Progress(len(todo))
    for done, (case, names) in enumerate(todo):
        if time.monotonic() - start > options.seconds:
            print(f"stopped after {options.seconds:.0f} s: {len(todo) - done} of {len(todo)} cases are left")
            break
        progress.show(case.name)
        try:
            gathered.add(case.name, cells.measure(case, [PEERS[name] for name in names], options.device, options.each))
        finally:
            progress.step()
        print(report.line(case.name, gathered.cells[case.name], options.device), flush=True)
        if options.device == "cuda":
            torch.cuda.empty_cache()
        if options.json is not None and time.monotonic() - last > WRITE_SECONDS:
            gathered.write(options.json)
            last = time.monotonic()
    if options.json is not None:
        gathered.write(options.json)


def compare(options: argparse.Namespace, gathered: results.Results, cases: Sequence[Case]) -> list[str]:
    """A line for each case that is slower than before."""
    old = results.read(options.compare)
    factors = results.slowdowns(gathered, old)
    for _ in range(0 if options.no_run else RETRIES):
        again = results.Results(gathered.environment)
        for case in cases:
            if factors.get(case.name, 0.0) > options.slower:
                beside = [PEERS["softmax"]] if options.device == "cpu" else []
                again.add(case.name, cells.measure(case, beside, options.device, options.each))
        if again.cells:
            better = results.slowdowns(again, old)
            factors = {name: min(factor, better.get(name, factor)) for name, factor in factors.items()}
    slower = {name: factor for name, factor in factors.items() if factor > options.slower}
    print(f"compared {len(factors)} cases with {options.compare}: {len(slower)} slower or failed")
    return [f"  {name}: {factor:.2f}x the time that it took" for name, factor in slower.items()]


def finish(options: argparse.Namespace, gathered: results.Results, cases: Sequence[Case]) -> int:
    """Headline, plot, tables and comparison; the exit status."""
    status = OK
    if any(cell["suite"] == "headline" for cell in gathered.cells.values()):
        print(*report.headline(gathered), sep="\n")
    failed = [name for name, cell in gathered.cells.items() if "failed" in cell["times"][OURS]]
    if failed:
        print(f"{len(failed)} cases were not timed, because this operator failed: {', '.join(failed)}", file=sys.stderr)
        status = BAD
    if options.plot is not None:
        report.plot(gathered, options.plot)
    if options.bars:
        print(tables.bars(gathered))
    for path in options.fill:
        path.write_text(tables.filled(path.read_text("utf-8"), gathered), "utf-8")
    if options.compare is not None:
        slower = compare(options, gathered, cases)
        print(*slower, sep="\n", end="\n" if slower else "")
        status = BAD if slower else status
    return status


def bench(options: argparse.Namespace) -> int:
    """Do what the options ask for, and return the exit status."""
    here = torch.cuda.is_available()
    asked, options.device = options.device, options.device or ("cuda" if here else "cpu")
    score_bytes = options.bytes or SCORE_BYTES[options.device]
    check_suites(options)
    cases = chosen_cases(options, score_bytes)
    if options.list:
        print(*(case.name for case in cases), sep="\n")
        return OK
    if options.device == "cuda" and not here and not options.no_run:
        raise Refused("--device cuda: torch finds no CUDA device")
    if options.device == "cpu":
        timing.keep_memory()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    gathered = gather(options, score_bytes)
    check(options, gathered, cases)
    why = "" if options.no_run or asked or here else "; torch finds no CUDA device"
    print(f"{report.device(gathered.environment)}{why}", flush=True)
    if options.no_run:
        for name, cell in gathered.cells.items():
            print(report.line(name, cell, gathered.environment["kind"]))
        if options.json is not None:
            gathered.write(options.json)
        return finish(options, gathered, cases)
    with kept(gathered, options.json):
        measure(options, gathered, cases)
        return finish(options, gathered, cases)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench and return its exit status."""
    options = make_parser().parse_args(arguments)
    try:
        return bench(options)
    except (Refused, results.Mismatch, OSError, ValueError) as error:
        print(f"scaled-mask-softmax bench: {error}", file=sys.stderr)
        return USAGE
