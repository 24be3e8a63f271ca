"""Results as a file: written after every cell, continued, merged and compared."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import scaled_mask_softmax

from .cells import Cell, joined
from .peers import DISTRIBUTIONS, OURS

FORMAT = 1
# Results that differ in one of these do not belong in one report.
IDENTITY = ("device", "kind", "threads", "torch", "version", "native", "commit", "score_bytes", "seconds")
SLOWER = 1.05
DIGITS = 5  # significant ones, of every figure in a file


class Mismatch(Exception):
    """Files that cannot be put together or compared."""


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value


@dataclass
class Results:
    environment: dict[str, Any]
    cells: dict[str, Cell] = field(default_factory=dict)  # by the case's name

    def missing(self, name: str, peers: Iterable[str]) -> list[str] | None:
        """Those of the peers that the case was not measured beside; None where the case itself is not measured."""
        times = self.cells[name]["times"] if name in self.cells else {}
        if "seconds" not in times.get(OURS, {}):
            return None
        return [peer for peer in peers if peer not in times]

    def add(self, name: str, cell: Cell) -> None:
        self.cells[name] = joined(self.cells[name], cell) if name in self.cells else cell

    def merge(self, other: Results) -> None:
        """Take over what another part of the same run measured, and this one did not."""
        differing = [key for key in IDENTITY if self.environment.get(key) != other.environment.get(key)]
        if differing:
            texts = (f"{key} {self.environment.get(key)!r} and {other.environment.get(key)!r}" for key in differing)
            raise Mismatch(f"results of different runs: {', '.join(texts)}")
        for name, cell in other.cells.items():
            self.add(name, cell)

    def write(self, path: Path) -> None:
        """A line a case; atomically, as a run can be stopped at any time."""
        cells = ",\n".join(f"{json.dumps(name)}: {json.dumps(_rounded(cell))}" for name, cell in self.cells.items())
        text = f'{{"format": {FORMAT},\n"environment": {json.dumps(self.environment)},\n"cells": {{\n{cells}\n}}}}\n'
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(text, "utf-8")
        os.replace(temporary, path)


def read(path: Path) -> Results:
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise Mismatch(f"{path} holds no results of this version of the bench")
    return Results(content["environment"], content["cells"])


def environment(device: str, score_bytes: int, seconds: float) -> dict[str, Any]:
    """What the results depend on."""
    build = scaled_mask_softmax.build_info()
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else build.get("instruction_set", "CPU"),
        "kind": device,
        "threads": None if device == "cuda" else torch.get_num_threads(),
        "torch": str(torch.__version__),
        "version": build["version"],
        "native": build["native"],
        "commit": build.get("commit"),
        "score_bytes": score_bytes,
        "seconds": seconds,
        "rivals": versions,
    }


def cost(cell: Mapping[str, Any], kind: str) -> float | None:
    """What `compare` compares: time as a share of something measured beside it, where there is something.

    On the CPU that is torch.softmax in the same turns, on CUDA the copy of the same run; else it is the time itself.
    None where there is nothing to compare: not timed, or on the CPU without torch.softmax beside it.
    """
    times = cell["times"]
    ours = times.get(OURS, {})
    if kind == "cpu":
        ratio = times.get("softmax", {}).get("ratio_to_ours")
        return None if ratio is None else 1.0 / float(ratio)
    if "share_of_floor" in ours:
        return 1.0 / float(ours["share_of_floor"])
    return float(ours["seconds"]) if "seconds" in ours else None


def slowdowns(new: Results, old: Results) -> dict[str, float]:
    """Of each case in both: its cost now over that of before; infinite where it failed."""
    kind = new.environment["kind"]
    for key in ("kind", "score_bytes", "device" if kind == "cuda" else "threads"):
        if new.environment.get(key) != old.environment.get(key):
            raise Mismatch(f"not comparable: {key} {new.environment.get(key)!r}, was {old.environment.get(key)!r}")
    factors = {}
    for name, before in old.cells.items():
        was = cost(before, kind)
        if name in new.cells and was is not None:
            now = cost(new.cells[name], kind)
            factors[name] = math.inf if now is None else now / was
    if not factors:
        raise Mismatch("there is no case in common to compare")
    return factors
