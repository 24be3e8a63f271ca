"""Seconds a call: CUDA events for kernels, the host's clock for the CPU and for the cost of launching."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import repeat

import torch

Call = Callable[[], object]

# glibc's mallopt: the parameters' numbers, and values that keep freed memory in the process.
MALLOC_OPTIONS = {-4: 0, -1: 2**31 - 1}  # M_MMAP_MAX, M_TRIM_THRESHOLD

WARM_UPS = 10
RUNS = 100
SECONDS = 0.5
EVENTS = 10  # runs that are queued at once: the device never waits for the host between them
CALLS = 50  # small calls that make one sample; fewer launches than fill the queue of a device


def keep_memory() -> None:
    """Let the C library keep what is freed on the CPU, as CUDA's allocator does.

    It returns large blocks to the system otherwise, and new pages for each result take several times as long as the
    results: of 51 ms a call for a softmax of 64 MB, 41 ms. Other C libraries than glibc are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in MALLOC_OPTIONS.items():
            mallopt(option, value)


@dataclass(frozen=True)
class Clock:
    """sample: times one turn of a call, in seconds a call. cost: calls that one sample stands for."""

    sample: Callable[[Call], list[float]]
    cost: int = 1


def _events(call: Call, samples: int, calls: int) -> list[float]:
    call()  # while it runs, the host gets ahead of the device
    pairs = []
    for _ in range(samples):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in repeat(None, calls):
            call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 / calls for start, end in pairs]


def _host(call: Call, calls: int, device: str) -> list[float]:
    # One thread's own time leaves out what other processes take; of several, only the time that passes says anything.
    alone = device == "cpu" and torch.get_num_threads() == 1
    now = time.thread_time if alone else time.perf_counter
    if device == "cuda":
        torch.cuda.synchronize()
    start = now()
    for _ in repeat(None, calls):
        call()
    return [(now() - start) / calls]


def clock(kind: str, device: str) -> Clock:
    """kind: as in Case.clock."""
    if kind == "host":
        return Clock(lambda call: _host(call, CALLS, device), CALLS)
    if device == "cpu":
        return Clock(lambda call: _host(call, 1, device))
    if kind == "graph":
        return Clock(lambda call: _events(call, 1, CALLS), CALLS)
    return Clock(lambda call: _events(call, EVENTS, 1))


def captured(call: Callable[[], object]) -> tuple[Call, object]:
    """The replay of a CUDA graph of one call, and what the call returned, which each replay writes anew."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # what is made at first use cannot be captured
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    return graph.replay, output


def _warm_up(call: Call, seconds: float) -> None:
    start = time.monotonic()
    for done in range(WARM_UPS):
        if done > 0 and time.monotonic() - start > seconds:
            return  # a second of CPU time each: the first one did it
        call()


def measure(calls: Mapping[str, Call], how: Clock, seconds: float) -> dict[str, list[float]]:
    """Samples of each call, in turns, so that all see the same machine: RUNS of them or `seconds`, what comes first."""
    for call in calls.values():
        _warm_up(call, seconds)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    waiting = list(calls)
    while waiting:
        for name in waiting:
            samples[name] += how.sample(calls[name])
        waiting = [name for name in waiting if len(samples[name]) < RUNS and sum(samples[name]) * how.cost < seconds]
    return samples


def summary(samples: list[float]) -> dict[str, float]:
    """Median and spread, in seconds."""
    deciles = statistics.quantiles(samples, n=10, method="inclusive") if len(samples) > 1 else samples * 9
    return {"seconds": statistics.median(samples), "p10": deciles[0], "p90": deciles[8], "runs": len(samples)}


def paired_ratio(samples: list[float], others: list[float]) -> float:
    """Median of samples / others of the same turn."""
    return statistics.median(a / b for a, b in zip(samples, others))


def peak_bytes(call: Call) -> int:
    """What a call allocates on the CUDA device, at its peak and beyond what is there already."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
