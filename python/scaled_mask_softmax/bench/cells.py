"""One cell of the report: a case, measured with this operator and its peers in turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from . import timing
from .cases import DROPOUT, DROPOUT_P, Case
from .peers import COPY, OPERATOR, OURS, PEERS, Peer, Unsupported
from .problems import Forward, Problem, make_problem, run, step
from .reference import WrongResult, verify

# A cell: facts of the case, and under "times" an entry for each implementation, with either its figures ("seconds",
# "p10", "p90", "runs", and where they apply "share_of_floor", "peak_bytes", "ratio_to_ours"), or the reason why there
# are none: "absent" or "failed". Ratios and shares are of the run that measured the entry.
Cell = dict[str, Any]


def _forward(problem: Problem, peer: Peer) -> Forward:
    forward = step(problem, peer.operator(problem))
    if not peer.compiled:
        return forward
    torch.compiler.reset()
    compiled: Forward = torch.compile(forward, dynamic=False, fullgraph=True)
    return compiled


def _run_with_pattern(problem: Problem, forward: Forward, peer: Peer) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """The results, and which cells dropout was to keep: of a rival, which draws as it likes, those that it kept."""
    torch.manual_seed(0)
    outcome = run(problem, forward)
    if peer.rival:
        return outcome, outcome[0].detach() != 0
    torch.manual_seed(0)
    keep: torch.Tensor = torch.ops.scaled_mask_softmax.dropout_keep(problem.inputs[0].detach(), DROPOUT_P)
    return outcome, keep


def _prepare(problem: Problem, peer: Peer) -> timing.Call:
    """A call that is known to give the right result. Raises what the peer raises, and WrongResult."""
    if peer.alone and problem.case.suite == "attention":
        raise Unsupported("a different attention")
    own = problem
    if peer.overwrites_grad and problem.grad is not None:
        own = replace(problem, grad=problem.grad.clone())
    forward = _forward(own, peer)
    check = partial(verify, problem, alone=peer.alone, rival=peer.rival)
    if problem.case.kind == DROPOUT and not peer.alone:
        check(*_run_with_pattern(own, forward, peer))
    else:
        check(run(own, forward))
    if own.grad is None:
        call: timing.Call = partial(forward, *own.inputs)
    else:
        call = partial(run, own, forward)
    if problem.case.clock != "graph":
        return call
    replay, output = timing.captured(call)
    replay()
    check(output if isinstance(output, tuple) else (output,))
    return replay


def _reason(error: Exception) -> dict[str, str]:
    """An entry of a cell, for an implementation without figures."""
    if isinstance(error, Unsupported):
        return {"absent": str(error)}
    if isinstance(error, ModuleNotFoundError):
        return {"absent": f"{error.name} is not installed"}
    if isinstance(error, WrongResult):
        return {"failed": f"not timed, its result is wrong: {error}"}
    return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


def _time(cell: Cell, case: Case, calls: dict[str, timing.Call], source: torch.Tensor, seconds: float) -> None:
    """Fill in the figures of all calls, ours among them. source: the scores, or one of an attention's inputs."""
    times = cell["times"]
    if source.is_cuda and case.clock == "kernels":
        for name, call in calls.items():
            call()  # the second call: the first may have compiled
            times[name] = {"peak_bytes": timing.peak_bytes(call)}
    has_floor = case.suite not in ("attention", "small")
    if has_floor:
        calls = {**calls, COPY: lambda: torch.empty_like(source).copy_(source)}
    samples = timing.measure(calls, timing.clock(case.clock, source.device.type), seconds)
    for name in calls:
        entry = times.setdefault(name, {})
        entry.update(timing.summary(samples[name]))
        entry["ratio_to_ours"] = timing.paired_ratio(samples[name], samples[OURS])
    if has_floor:
        bandwidth = 2 * case.score_bytes / times[COPY]["seconds"]
        cell["floor_bytes"] = case.floor_bytes()
        cell["copy_bytes_per_second"] = bandwidth
        for name in calls:
            # Where a softmax alone does less than the case asks for, its floor is another one.
            if name != COPY and (name not in PEERS or not PEERS[name].alone or case.kind == "plain"):
                times[name]["share_of_floor"] = case.floor_bytes() / bandwidth / times[name]["seconds"]


def unmeasured(case: Case) -> Cell:
    """The cell with its facts alone."""
    return {
        "suite": case.suite,
        "kind": case.kind,
        "dtype": case.dtype_name,
        "shape": [case.batch, case.heads, case.queries, case.columns],
        "direction": case.direction,
        "clock": case.clock,
        "times": {},
    }


def measure(case: Case, peers: Iterable[Peer], device: str, seconds: float) -> Cell:
    """Verify, then time, each implementation for at most `seconds`. A peer that fails leaves the others alone."""
    cell = unmeasured(case)
    times = cell["times"]
    # Whatever another's code may raise, or a lack of memory, is a fact to report.
    try:
        problem = make_problem(case, device)
        cell["input_bytes"] = problem.tensor_bytes
        calls: dict[str, timing.Call] = {}
        for peer in (OPERATOR, *peers):
            try:
                calls[peer.name] = _prepare(problem, peer)
            except Exception as error:
                times[peer.name] = _reason(error)
        if OURS in calls:
            _time(cell, case, calls, problem.inputs[0].detach(), seconds)
    except Exception as error:
        times[OURS] = _reason(error)
    return cell


def joined(cell: Cell, other: Mapping[str, Any]) -> Cell:
    """The cell, with what only the other one's run measured."""
    ours, theirs = cell["times"], other["times"]
    if "seconds" not in ours[OURS]:
        return {**other, "times": {**ours, **theirs}}
    added = {name: entry for name, entry in theirs.items() if name not in ours or "seconds" not in ours[name]}
    return {**cell, "times": {**ours, **added}}
