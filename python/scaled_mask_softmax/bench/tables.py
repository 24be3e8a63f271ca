"""Results as Markdown: tables of figures, and how they stand beside the bars that this project sets itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from . import thresholds
from .cases import DIRECTIONS, THRESHOLDS, next_whole
from .cells import Cell
from .peers import OURS
from .report import best_rival, duration
from .results import Mismatch, Results

FORWARD, BOTH = DIRECTIONS
TABLE_COLUMNS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
TABLE_CASES = (
    ("plain", FORWARD),
    ("causal", FORWARD),
    ("padding", FORWARD),
    ("mask-b1qk", FORWARD),
    ("causal+mask", FORWARD),
    ("plain", BOTH),
    ("causal", BOTH),
)
CPU_KINDS = ("plain", "causal", "mask-b1qk", "padding", "causal+mask")
SHORTEST = 128  # of the lengths that have a bar of their share of the floor
ROUNDING = 0.01  # of an allocator that rounds up, as a share of the scores

# The figure of a cell, or None where the bar is not about it or it was not measured.
Figure = Callable[[Results, Cell], "float | None"]


@dataclass(frozen=True)
class Bar:
    what: str
    figure: Figure
    must: float
    aim: float | None = None
    at_most: bool = False

    def meets(self, figure: float, bar: float) -> bool:
        return figure <= bar if self.at_most else figure >= bar


def _ratio(cell: Cell, peer: str) -> float | None:
    """Our time over the peer's."""
    ratio = cell["times"].get(peer, {}).get("ratio_to_ours")
    return None if ratio is None else 1.0 / float(ratio)


def _share(kinds: tuple[str, ...], direction: str, shortest: int, longest: int) -> Figure:
    def figure(_: Results, cell: Cell) -> float | None:
        columns = cell["shape"][-1]
        if cell["suite"] != "sweep" or cell["kind"] not in kinds or cell["direction"] != direction:
            return None
        if not shortest <= columns <= longest or columns != next_whole(columns):
            return None
        share: float | None = cell["times"][OURS].get("share_of_floor")
        return share

    return figure


def _beside_longer(results: Results, cell: Cell, columns: int) -> float | None:
    """The share of the floor over that of the same case with more columns, or None where either was not measured."""
    share = cell["times"][OURS].get("share_of_floor")
    facts = ("suite", "kind", "dtype", "direction")
    for other in results.cells.values():
        if other["shape"][-1] == columns and all(other[fact] == cell[fact] for fact in facts):
            longer = other["times"][OURS].get("share_of_floor")
            return None if share is None or longer is None else float(share) / float(longer)
    return None


def _odd_length(results: Results, cell: Cell) -> float | None:
    columns = cell["shape"][-1]
    if cell["suite"] != "sweep" or columns < SHORTEST or columns == next_whole(columns):
        return None
    return _beside_longer(results, cell, next_whole(columns))


def _across_threshold(results: Results, cell: Cell) -> float | None:
    """Of the shorter rows beside a threshold: the smaller share of the floor over the larger."""
    if cell["suite"] != THRESHOLDS:
        return None
    ratio = _beside_longer(results, cell, cell["shape"][-1] + thresholds.STEP)
    return None if ratio is None else min(ratio, 1 / ratio)


def _beside_best_rival(_: Results, cell: Cell) -> float | None:
    best = best_rival(cell) if cell["suite"] in ("sweep", "dropout") else None
    return None if best is None else 1.0 / best[1]


def _small(clock: str, peer: str, direction: str | None = None, columns: int | None = None) -> Figure:
    def figure(_: Results, cell: Cell) -> float | None:
        if cell["suite"] != "small" or cell["clock"] != clock:
            return None
        if direction not in (None, cell["direction"]) or columns not in (None, cell["shape"][-1]):
            return None
        return _ratio(cell, peer)

    return figure


def _replay(_: Results, cell: Cell) -> float | None:
    seconds = cell["times"][OURS].get("seconds") if cell["clock"] == "graph" else None
    return None if seconds is None else float(seconds) * 1e6


def _peak(implementation: str, direction: str, tensors: int, suites: tuple[str, ...] = ("sweep", "headline")) -> Figure:
    """The peak beside the size of so many tensors like the scores."""

    def figure(_: Results, cell: Cell) -> float | None:
        peak = cell["times"].get(implementation, {}).get("peak_bytes")
        if cell["suite"] not in suites or cell["direction"] != direction or peak is None:
            return None
        batch, heads, queries, columns = cell["shape"]
        itemsize = getattr(torch, cell["dtype"]).itemsize
        return float(peak / (batch * heads * queries * columns * itemsize * tensors))

    return figure


def _cpu(kind: str | None, dtype: str | None, peer: str, direction: str = FORWARD) -> Figure:
    def figure(_: Results, cell: Cell) -> float | None:
        if cell["suite"] != "sweep" or kind not in (None, cell["kind"]) or dtype not in (None, cell["dtype"]):
            return None
        return _ratio(cell, peer) if cell["direction"] == direction else None

    return figure


FLOAT_MASKS = ("mask-b1qk", "mask-bhqk", "mask-qk")
SHARE = "share of the floor"
BARS = {
    "cuda": (
        Bar(f"forward, plain: {SHARE}", _share(("plain",), FORWARD, SHORTEST, 65536), 0.95, 0.98),
        Bar(f"forward, padding: {SHARE}", _share(("padding",), FORWARD, SHORTEST, 65536), 0.95),
        Bar(f"forward, causal, Sk 128: {SHARE}", _share(("causal",), FORWARD, 128, 128), 0.82, 0.93),
        Bar(f"forward, causal, Sk 256: {SHARE}", _share(("causal",), FORWARD, 256, 256), 0.87, 0.93),
        Bar(f"forward, causal, Sk 512 and more: {SHARE}", _share(("causal",), FORWARD, 512, 65536), 0.90, 0.93),
        Bar(f"forward, float masks, to Sk 256: {SHARE}", _share(FLOAT_MASKS, FORWARD, SHORTEST, 256), 0.93, 0.95),
        Bar(f"forward, float masks, to Sk 2,048: {SHARE}", _share(FLOAT_MASKS, FORWARD, 257, 2048), 0.90, 0.95),
        Bar(f"forward, float masks, beyond: {SHARE}", _share(FLOAT_MASKS, FORWARD, 2049, 65536), 0.87, 0.95),
        Bar(f"forward, causal + mask, Sk 128: {SHARE}", _share(("causal+mask",), FORWARD, 128, 128), 0.82, 0.92),
        Bar(f"forward, causal + mask, Sk 256: {SHARE}", _share(("causal+mask",), FORWARD, 256, 256), 0.86, 0.92),
        Bar(f"forward, causal + mask, beyond: {SHARE}", _share(("causal+mask",), FORWARD, 512, 65536), 0.88, 0.92),
        Bar(f"forward + backward, plain: {SHARE}", _share(("plain",), BOTH, SHORTEST, 65536), 0.97, 1.0),
        Bar(f"forward + backward, causal: {SHARE}", _share(("causal",), BOTH, SHORTEST, 65536), 0.88, 0.93),
        Bar(f"forward, plain, Sk 131,072: {SHARE}", _share(("plain",), FORWARD, 131072, 131072), 0.90),
        Bar("Sk no multiple of 64: share beside that of the next multiple", _odd_length, 1 / 1.12),
        Bar("either side of a threshold, 8 columns apart: smaller share beside the larger", _across_threshold, 0.85),
        Bar("time beside that of the best rival", _beside_best_rival, 1.02, at_most=True),
        Bar("small tensors, host: time beside eager", _small("host", "eager"), 1.0, at_most=True),
        Bar("small tensors, replayed graph: time beside eager", _small("graph", "eager"), 1.0, at_most=True),
        Bar("small tensors, replayed graph: us", _replay, 10.0, at_most=True),
        Bar("peak memory, forward: beside y", _peak(OURS, FORWARD, 1), 1 + ROUNDING, at_most=True),
        Bar("peak memory, with backward: beside y and dx", _peak(OURS, BOTH, 2), 1 + ROUNDING, at_most=True),
        Bar("peak memory in place, forward: beside x", _peak("in-place", FORWARD, 1), ROUNDING, at_most=True),
        Bar(
            "peak memory in place, forward + backward: beside dx",
            _peak("in-place", BOTH, 1),
            1 + ROUNDING,
            at_most=True,
        ),
        Bar(
            "peak memory with dropout, forward: beside y",
            _peak(OURS, FORWARD, 1, ("dropout",)),
            1 + ROUNDING,
            at_most=True,
        ),
        Bar(
            "peak memory with dropout, with backward: beside y, before and after dropout, and dx",
            _peak(OURS, BOTH, 3, ("dropout",)),
            1 + ROUNDING,
            at_most=True,
        ),
    ),
    "cpu": (
        Bar("causal + mask: beside torch.softmax", _cpu("causal+mask", None, "softmax"), 1.0, at_most=True),
        Bar("causal + mask, float32: beside eager", _cpu("causal+mask", "float32", "eager"), 1 / 2.4, at_most=True),
        Bar("causal + mask, bfloat16: beside eager", _cpu("causal+mask", "bfloat16", "eager"), 0.4, at_most=True),
        Bar("causal + mask: beside torch.compile", _cpu("causal+mask", None, "compile"), 1.0, at_most=True),
        Bar("each kind, forward: beside torch.softmax", _cpu(None, None, "softmax"), 1.0, at_most=True),
        Bar("each kind, with backward: beside torch.softmax", _cpu(None, None, "softmax", BOTH), 1.0, at_most=True),
        Bar("time beside that of the best rival", _beside_best_rival, 1.02, at_most=True),
        Bar("[1,1,8,8] forward: beside eager", _small("host", "eager", FORWARD, 8), 0.70, at_most=True),
        Bar("[1,1,8,8] forward: beside torch.softmax", _small("host", "softmax", FORWARD, 8), 2.3, at_most=True),
        Bar("[1,1,8,8] with backward: beside eager", _small("host", "eager", BOTH, 8), 0.85, at_most=True),
        Bar("[1,1,8,8] with backward: beside torch.softmax", _small("host", "softmax", BOTH, 8), 1.6, at_most=True),
    ),
}


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([_row(*head), f"|{'---|' * len(head)}", *(_row(*row) for row in rows)])


def bars(results: Results) -> str:
    """Each bar, how many cells meet it, and the cell farthest from it."""
    rows = []
    for bar in BARS[results.environment["kind"]]:
        figures = {
            name: figure for name, cell in results.cells.items() if (figure := bar.figure(results, cell)) is not None
        }
        sign = "<=" if bar.at_most else ">="
        must = f"{sign} {bar.must:.3g}"
        aim = "" if bar.aim is None else f"{sign} {bar.aim:.3g}"
        if not figures:
            rows.append((bar.what, must, aim, "not measured", "", ""))
            continue
        where = (max if bar.at_most else min)(figures, key=lambda name: figures[name])
        met = sum(bar.meets(figure, bar.must) for figure in figures.values())
        verdict = f"{met} of {len(figures)}"
        if bar.aim is not None:
            verdict += f", aim {sum(bar.meets(figure, bar.aim) for figure in figures.values())}"
        rows.append((bar.what, must, aim, verdict, f"{figures[where]:.4g}", where))
    return _table(("bar", "must", "aim", "met by", "farthest", "where"), rows)


def floor(results: Results, dtype: str) -> str:
    """Shares of the floor, a row a length."""
    shares = {
        (cell["shape"][-1], cell["kind"], cell["direction"]): cell["times"][OURS].get("share_of_floor")
        for cell in results.cells.values()
        if cell["suite"] == "sweep" and cell["dtype"] == dtype
    }
    rows = []
    for columns in TABLE_COLUMNS:
        found = [shares.get((columns, kind, direction)) for kind, direction in TABLE_CASES]
        if any(share is not None for share in found):
            rows.append((f"{columns:,}", *("" if share is None else f"{share:.2f}" for share in found)))
    if not rows:
        raise Mismatch(f"no case of the sweep was measured in {dtype}")
    return _table(("Sk", *(f"{kind}, {direction}" for kind, direction in TABLE_CASES)), rows)


PEER_TITLES = {
    "softmax": "`torch.softmax` alone",
    "eager": "eager",
    "compile": "`torch.compile`",
    "liger": "Liger",
    "quack": "QuACK",
}


def times(
    results: Results, wanted: Callable[[Cell], bool], others: tuple[str, ...] = ("softmax", "eager", "compile")
) -> str:
    """Our time of each case that is wanted, and the others' over it."""
    rows = []
    for name, cell in results.cells.items():
        ours = cell["times"][OURS]
        if "seconds" in ours and wanted(cell):
            ratios = (cell["times"].get(peer, {}).get("ratio_to_ours") for peer in others)
            found = ("" if ratio is None else f"{ratio:.2f}x" for ratio in ratios)
            shape = ", ".join(map(str, cell["shape"]))
            rows.append((name, f"[{shape}]", duration(ours["seconds"]), *found))
    return _table(("case", "scores", "time", *(PEER_TITLES[peer] for peer in others)), rows)


def beside_softmax(results: Results, dtype: str) -> str:
    """The time of torch.softmax alone over ours, a row a length."""
    ratios = {
        (cell["shape"][-1], cell["kind"], cell["direction"]): cell["times"].get("softmax", {}).get("ratio_to_ours")
        for cell in results.cells.values()
        if cell["suite"] == "sweep" and cell["dtype"] == dtype
    }
    heads = [(kind, direction) for direction in DIRECTIONS for kind in CPU_KINDS]
    rows = []
    for columns in sorted({columns for columns, _, _ in ratios}):
        found = [ratios.get((columns, *head)) for head in heads]
        rows.append((f"{columns:,}", *("" if ratio is None else f"{ratio:.2f}x" for ratio in found)))
    return _table(("Sk", *(f"{kind}, {direction}" for kind, direction in heads)), rows)


def rivals(results: Results) -> str:
    """The cases of the sweep that were measured beside others."""
    others = ("softmax", "liger", "quack", "compile")
    return times(
        results, lambda cell: cell["suite"] == "sweep" and any(peer in cell["times"] for peer in others), others
    )


def _fused(cell: Cell) -> bool:
    """What the bars beside eager and torch.compile are about."""
    return bool(cell["kind"] == "causal+mask" and cell["direction"] == FORWARD and "compile" in cell["times"])


_CPU_BLOCKS: dict[str, Callable[[Results], str]] = {
    "fused": lambda results: times(results, _fused),
    "small": lambda results: times(results, lambda cell: bool(cell["suite"] == "small")),
    "dropout": lambda results: times(results, lambda cell: bool(cell["suite"] == "dropout")),
    "float32": lambda results: beside_softmax(results, "float32"),
    "bfloat16": lambda results: beside_softmax(results, "bfloat16"),
    "bars": bars,
}
BLOCKS: dict[str, Callable[[Results], str]] = {
    "cuda float16": lambda results: floor(results, "float16"),
    "cuda bfloat16": lambda results: floor(results, "bfloat16"),
    "cuda float32": lambda results: floor(results, "float32"),
    "cuda bars": bars,
    "cuda others": lambda results: times(results, lambda cell: cell["suite"] in ("headline", "attention", "dropout")),
    "cuda rivals": rivals,
    **{f"cpu {name}": block for name, block in _CPU_BLOCKS.items()},
    **{f"cpu-avx512 {name}": block for name, block in _CPU_BLOCKS.items()},
    "cpu-2 fused": _CPU_BLOCKS["fused"],
}
BLOCK = re.compile(r"<!-- bench: (?P<name>.+?) -->\n.*?<!-- end of bench -->", re.DOTALL)


def blocks(text: str) -> Iterator[str]:
    """The names of the tables in a Markdown text."""
    return (match["name"] for match in BLOCK.finditer(text))


def group(results: Results) -> str:
    """Of the blocks that show these results: the device, and of a CPU, AVX-512 and several threads."""
    parts: list[str] = [results.environment["kind"]]
    if results.environment["device"] == "AVX512":
        parts.append("avx512")
    threads = results.environment.get("threads") or 1
    if threads != 1:
        parts.append(str(threads))
    return "-".join(parts)


def filled(text: str, results: Results) -> str:
    """The Markdown text, with the tables of these results between its markers."""

    def table(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in BLOCKS:
            raise Mismatch(f"there is no table {name!r}; there are {', '.join(BLOCKS)}")
        if name.split()[0] != group(results):
            return match[0]
        return f"<!-- bench: {name} -->\n{BLOCKS[name](results)}\n<!-- end of bench -->"

    return BLOCK.sub(table, text)
