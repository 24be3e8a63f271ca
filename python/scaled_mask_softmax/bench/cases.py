"""What is measured, and the fewest bytes that each case must move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from . import thresholds

SECTOR_BYTES = 32
# The size of the scores in the sweep: past the L2 of every device, and past the last-level cache of most CPUs.
SCORE_BYTES = {"cuda": 1 << 29, "cpu": 1 << 26}

THRESHOLDS = "thresholds"
SUITES = ("sweep", "headline", "attention", "small", "dropout", THRESHOLDS)
WHOLE_COLUMNS = (1, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
ODD_COLUMNS = (1000, 1001, 1023, 1025, 4097)  # each is compared with the next multiple of 64


def next_whole(columns: int) -> int:
    return -(-columns // 64) * 64


COLUMNS = tuple(sorted({*WHOLE_COLUMNS, *ODD_COLUMNS, *map(next_whole, ODD_COLUMNS)}))
DTYPES = ("float16", "bfloat16", "float32")
# mask-*: a float mask of x's dtype, its shape in the name; padding: bool [B,1,1,Sk]; decode: one query that sees all.
KINDS = ("plain", "causal", "mask-b1qk", "mask-bhqk", "mask-qk", "padding", "causal+mask", "decode")
DROPOUT = "dropout"  # the kind of the suite of that name: plain, with dropout of the probabilities
DIRECTIONS = ("forward", "forward+backward")

LONG_QUERIES = 256  # of rows whose square would be too large: a slice from the middle of the sequence
HEADS = 16
LONG_HEADS = 4  # where that many do not fit; more than one, as they share a mask
HEAD_DIM = 64
ATTENTION_COLUMNS = (128, 256, 512, 1024, 2048, 4096)
ATTENTION_TOKENS = 8192
SMALL_COLUMNS = (1, 8, 32, 64, 128)
DROPOUT_COLUMNS = (128, 512, 2048, 8192)
DROPOUT_P = 0.1
THRESHOLD_KINDS = ("plain", "causal", "mask-b1qk", "causal+mask")
THRESHOLD_DTYPES = ("float16", "float32")  # where none is asked for: bfloat16 has the kernels of float16


@dataclass(frozen=True)
class Case:
    """One cell of the report. Scores are [batch, heads, queries, columns]."""

    suite: str
    kind: str
    dtype_name: str
    batch: int
    heads: int
    queries: int
    columns: int
    backward: bool
    # kernels: time on the device; host: time of the calling thread; graph: replay of a captured CUDA graph.
    clock: str = "kernels"

    @property
    def name(self) -> str:
        prefix = "" if self.suite in ("sweep", self.kind) else f"{self.suite} "
        suffix = "" if self.clock == "kernels" else f" {self.clock}"
        return f"{prefix}{self.dtype_name} Sk={self.columns} {self.kind} {self.direction}{suffix}"

    @property
    def direction(self) -> str:
        return DIRECTIONS[self.backward]

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype_name)
        return dtype

    @property
    def is_causal(self) -> bool:
        return self.kind in ("causal", "causal+mask", "decode")

    @property
    def diagonal(self) -> int:
        """0 for squares. Decoding sees every column; a slice of queries sees half of them, as a square does."""
        if not self.is_causal:
            return 0
        return (self.columns - self.queries) // (1 if self.kind == "decode" else 2)

    @property
    def mask_shape(self) -> tuple[int, ...] | None:
        shapes: dict[str, tuple[int, ...]] = {
            "mask-b1qk": (self.batch, 1, self.queries, self.columns),
            "causal+mask": (self.batch, 1, self.queries, self.columns),
            "mask-bhqk": (self.batch, self.heads, self.queries, self.columns),
            "mask-qk": (self.queries, self.columns),
            "padding": (self.batch, 1, 1, self.columns),
        }
        return shapes.get(self.kind)

    @property
    def score_bytes(self) -> int:
        return self.batch * self.heads * self.queries * self.columns * self.dtype.itemsize

    def live_bytes(self) -> int:
        """Bytes of [queries, columns] that a causal operator needs, each row rounded up to whole sectors."""
        row = self.columns * self.dtype.itemsize
        if not self.is_causal:
            return self.queries * row
        ends = (min(i + self.diagonal + 1, self.columns) * self.dtype.itemsize for i in range(self.queries))
        return sum(min(-(-end // SECTOR_BYTES) * SECTOR_BYTES, row) for end in ends)

    def floor_bytes(self) -> int:
        """The fewest bytes to move: every needed byte of an input read once, every byte of an output written once.

        Forward reads x and the mask and writes y; backward reads y and the gradient where x was needed, and writes dx.
        Which cells dropout keeps need not be stored, nor y before it, which could be computed from x again.
        """
        live = self.live_bytes()
        needed = self.batch * self.heads * live
        mask = 0
        if self.kind == "padding":
            mask = self.batch * self.columns  # one byte a cell
        elif self.mask_shape is not None:
            mask = live * {"mask-qk": 1, "mask-bhqk": self.batch * self.heads}.get(self.kind, self.batch)
        forward = needed + mask + self.score_bytes
        return forward + 2 * needed + self.score_bytes if self.backward else forward


def sweep_case(
    kind: str, dtype_name: str, columns: int, backward: bool, score_bytes: int, suite: str = "sweep"
) -> Case:
    """A case whose scores take score_bytes, or more by less than one more batch or, where rows are long, a square."""
    row = columns * getattr(torch, dtype_name).itemsize
    queries = columns
    if kind == "decode":
        queries = 1
    elif columns * row > 2 * score_bytes:
        queries = max(1, min(LONG_QUERIES, score_bytes // (LONG_HEADS * row)))
    plane = queries * row
    heads = HEADS if plane * HEADS <= score_bytes else LONG_HEADS
    batch = -(-score_bytes // (heads * plane))
    return Case(suite, kind, dtype_name, batch, heads, queries, columns, backward)


def threshold_cases(kind: str, dtype_name: str, backward: bool, score_bytes: int, capability: int) -> Iterator[Case]:
    """Rows on either side of each threshold, thresholds.STEP columns apart, in scores that differ in nothing else.

    With a backward pass, of its own thresholds alone: it takes most of the time.
    """
    any_length = sweep_case(kind, dtype_name, thresholds.SHORTEST, backward, score_bytes)
    direction, mask, band = "backward", "none", False
    if not backward:
        direction, mask, band = "forward", "none" if any_length.mask_shape is None else "same", any_length.is_causal
    found: dict[int, Case] = {}
    for shorter in thresholds.lengths(direction, dtype_name, mask, band, capability):
        case = found.setdefault(shorter, sweep_case(kind, dtype_name, shorter, backward, score_bytes, THRESHOLDS))
        longer = shorter + thresholds.STEP
        queries = longer if case.queries == shorter else case.queries
        found.setdefault(longer, replace(case, queries=queries, columns=longer))
    yield from found.values()


def all_cases(device: str, score_bytes: int) -> Iterator[Case]:
    """Every case, in the order of the report."""
    for kind in KINDS:
        for backward in (False, True):
            for dtype_name in DTYPES:
                for columns in COLUMNS:
                    yield sweep_case(kind, dtype_name, columns, backward, score_bytes)
    for kind in ("plain", "causal"):
        for backward in (False, True):
            yield Case("headline", kind, "float16", 8, 32, 2048, 2048, backward)
    for dtype_name in DTYPES:
        for columns in ATTENTION_COLUMNS:
            batch = ATTENTION_TOKENS // columns
            yield Case("attention", "causal", dtype_name, batch, HEADS, columns, columns, True)
    for clock in ("host", "graph") if device == "cuda" else ("host",):
        for kind in ("plain", "mask-b1qk"):
            for backward in (False, True):
                for dtype_name in ("float16", "float32"):
                    for columns in SMALL_COLUMNS:
                        batch, heads = (1, 1) if columns <= 8 else (2, HEADS)
                        yield Case("small", kind, dtype_name, batch, heads, columns, columns, backward, clock)
    # Last, so that shards of the others hold what they held before.
    for backward in (False, True):
        for dtype_name in DTYPES:
            for columns in DROPOUT_COLUMNS:
                yield sweep_case(DROPOUT, dtype_name, columns, backward, score_bytes, DROPOUT)
    if device == "cuda" and thresholds.known():
        capability = thresholds.capability()
        for kind, backward in (*((kind, False) for kind in THRESHOLD_KINDS), ("plain", True)):
            for dtype_name in DTYPES:
                yield from threshold_cases(kind, dtype_name, backward, score_bytes, capability)
