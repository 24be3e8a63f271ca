"""Results for people: a line a cell, what the headline case can cost at all, and a plot."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .cells import Cell
from .peers import COPY, OURS, PEERS
from .results import Mismatch, Results

# Figures often quoted for scores [8, 32, 2048, 2048] in float16 on an A100: seconds, peak bytes, and how many tensors
# of that size must move if no triangle is skipped and if it is. An eager chain is three passes, which skip nothing.
QUOTED = (
    ("eager forward", 2.87e-3, 4.2e9, 6.0, 6.0),
    ("fused forward", 0.34e-3, 1.1e9, 2.0, 1.5),
    ("fused forward + backward", 0.76e-3, 1.4e9, 5.0, 3.5),
)
HEADLINE_BYTES = 8 * 32 * 2048 * 2048 * 2
A100_BYTES_PER_SECOND = 2.039e12  # data sheet of the faster model, with 80 GB


def duration(seconds: float) -> str:
    return f"{seconds * 1e6:.2f} us" if seconds < 1e-3 else f"{seconds * 1e3:.3f} ms"


def best_rival(cell: Mapping[str, Any]) -> tuple[str, float] | None:
    """The fastest peer that does the whole case, and its time over ours."""
    rivals = {peer.name for peer in PEERS.values() if peer.competes(cell["kind"])}
    ratios = {name: entry["ratio_to_ours"] for name, entry in cell["times"].items() if "ratio_to_ours" in entry}
    return min(((name, ratios[name]) for name in rivals & set(ratios)), key=lambda pair: pair[1], default=None)


def device(environment: Mapping[str, Any]) -> str:
    """What the results are of, and with what they were measured."""
    name = environment["device"]
    if environment["kind"] == "cpu":
        threads = environment["threads"]
        name = f"{'CPU' if name == 'CPU' else f'CPU ({name})'}, {threads} thread{'' if threads == 1 else 's'}"
    build = "" if environment["native"] else ", without native kernels"
    return f"{name}, torch {environment['torch']}, scaled-mask-softmax {environment['version']}{build}"


def line(name: str, cell: Cell, kind: str) -> str:
    """One line. Ratios are the other's time over ours: above 1, this operator is faster.

    kind: of the device. The floor says something where memory limits: on a CPU, the arithmetic of its threads does.
    """
    ours = cell["times"][OURS]
    if "seconds" not in ours:
        return f"{name:<52} {ours.get('failed', ours.get('absent'))}"
    spread = f"({duration(ours['p10'])} to {duration(ours['p90'])})"
    parts = [f"{name:<52} {duration(ours['seconds']):>10} {spread}"]
    if kind == "cuda" and "share_of_floor" in ours:
        parts.append(f"{ours['share_of_floor']:.3f} of the floor")
    if (best := best_rival(cell)) is not None:
        parts.append(f"best rival {best[0]} {best[1]:.2f}x")
    others = (
        f"{peer} {entry['ratio_to_ours']:.2f}x"
        for peer, entry in cell["times"].items()
        if "ratio_to_ours" in entry and peer not in (OURS, COPY, best[0] if best else None)
    )
    parts += others
    if "peak_bytes" in ours:
        parts.append(f"peak {ours['peak_bytes'] / 1e9:.3f} GB beside {cell['input_bytes'] / 1e9:.3f} GB")
    failures = [f"{peer}: {entry['failed']}" for peer, entry in cell["times"].items() if "failed" in entry]
    return ", ".join([*parts, *failures])


def headline(results: Results) -> list[str]:
    """The headline case's floor, which of the quoted figures are possible, and what was measured."""

    def verdict(possible: bool) -> str:
        return "possible" if possible else "impossible"

    lines = [
        f"Headline: scores [8, 32, 2048, 2048] in float16 take {HEADLINE_BYTES / 1e9:.2f} GB. Forward moves 2 such "
        "tensors (1.5 if causal) at least, forward + backward 5 (3.5).",
        f"Often quoted for an A100, which moves at most {A100_BYTES_PER_SECOND / 1e12:.3f} TB/s:",
    ]
    for what, seconds, peak, whole, causal in QUOTED:
        least, plain = (tensors * HEADLINE_BYTES / A100_BYTES_PER_SECOND for tensors in (causal, whole))
        lines.append(
            f"  {what}: {duration(seconds)} is {verdict(seconds >= least)}: its bytes take {duration(plain)}, "
            f"{duration(least)} if causal; a peak of {peak / 1e9:.1f} GB is {verdict(peak >= HEADLINE_BYTES)}"
        )
    for name, cell in results.cells.items():
        if cell["suite"] != "headline" or "seconds" not in cell["times"][OURS]:
            continue
        at_copy = cell["floor_bytes"] / cell["copy_bytes_per_second"]
        lines.append(f"  measured, {name.removeprefix('headline ')}: floor {duration(at_copy)} at the copy's bandwidth")
        for peer, entry in cell["times"].items():
            if "peak_bytes" in entry:
                peak = entry["peak_bytes"] + cell["input_bytes"]
                lines.append(f"    {peer:<8} {duration(entry['seconds']):>10}, peak {peak / 1e9:.2f} GB")
    return lines


def plot(results: Results, path: Path) -> None:
    """Share of the floor over Sk: a panel for each kind of case, direction and dtype that was measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = [cell for cell in results.cells.values() if cell["suite"] == "sweep" and "floor_bytes" in cell]
    if not cells:
        raise Mismatch("--plot: no case of the sweep was measured")
    rows = list(dict.fromkeys(cell["kind"] for cell in cells))
    columns = list(dict.fromkeys((cell["dtype"], cell["direction"]) for cell in cells))
    figure = Figure(figsize=(1 + 4 * len(columns), 1 + 3 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), len(columns), squeeze=False, sharey=True)
    colours = {name: f"C{index}" for index, name in enumerate((OURS, *PEERS))}
    for i, kind in enumerate(rows):
        for j, (dtype, direction) in enumerate(columns):
            axis = axes[i][j]
            chosen = [
                cell for cell in cells if (cell["kind"], cell["dtype"], cell["direction"]) == (kind, dtype, direction)
            ]
            chosen.sort(key=lambda cell: int(cell["shape"][-1]))
            for peer, colour in colours.items():
                points = [
                    (cell["shape"][-1], cell["times"][peer]["share_of_floor"])
                    for cell in chosen
                    if "share_of_floor" in cell["times"].get(peer, {})
                ]
                if points:
                    width = 2.5 if peer == OURS else 1.0
                    axis.plot(*zip(*points), marker=".", color=colour, linewidth=width, label=peer)
            axis.set(title=f"{kind}, {dtype}, {direction}", xlabel="Sk", ylabel="share of the floor")
            axis.set_xscale("log", base=2)
            axis.axhline(1.0, color="grey", linewidth=0.8, linestyle="dotted")
            if axis.lines[1:]:
                axis.legend(fontsize="small")
    shares = [entry.get("share_of_floor", 0.0) for cell in cells for entry in cell["times"].values()]
    axes[0][0].set_ylim(0, 1.05 * max(1.0, *shares))  # of all: they share it
    facts = results.environment
    figure.suptitle(f"{facts['device']}, torch {facts['torch']}, scaled-mask-softmax {facts['version']}")
    figure.savefig(path, format="png", dpi=100)


class Progress:
    """A bar on a terminal's standard error; nothing elsewhere."""

    WIDTH = 24

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._start = time.monotonic()
        self._shown = sys.stderr.isatty()

    def show(self, name: str) -> None:
        if not self._shown:
            return
        filled = self.WIDTH * self._done // max(1, self._total)
        left = (time.monotonic() - self._start) / self._done * (self._total - self._done) if self._done else 0.0
        text = f", {left / 60:.0f} min left" if self._done else ""
        bar = "#" * filled + "." * (self.WIDTH - filled)
        print(f"\r\033[K[{bar}] {self._done}/{self._total}{text}: {name}", end="", file=sys.stderr, flush=True)

    def step(self) -> None:
        """One more is done; clears the bar."""
        self._done += 1
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
