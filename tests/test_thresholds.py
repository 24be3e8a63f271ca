"""Row lengths on either side of every switch between kernels."""

from __future__ import annotations

import itertools

import pytest
import torch
from checks import DTYPES_AND_KINDS, mask_kinds, normal, random_mask, short, verify

from scaled_mask_softmax import _C

LONGEST = 2**20


def capability(device: str) -> int:
    """Of the device; without one, any will do: the lengths are then tried on the CPU."""
    major, minor = torch.cuda.get_device_capability() if device == "cuda" else (9, 0)
    return 10 * major + minor


def switches(direction: str, dtype: str, mask: str, band: bool, capability: int, dropout: bool = False) -> list[int]:
    """Each length up to LONGEST whose plan differs from that of the length one shorter."""

    def plan(columns: int) -> dict[str, object]:
        return _C.plan(direction, columns, dtype, mask, band, capability, dropout)

    found = []

    def search(low: int, high: int) -> None:
        if plan(low) == plan(high):
            return
        if high - low == 1:
            found.append(high)
            return
        middle = (low + high) // 2
        search(low, middle)
        search(middle, high)

    # A plan may come back after another one, so compare at small steps.
    grid = [*range(1, 265), *range(272, 4097, 8), *range(4160, 2**15, 64), *range(2**15, LONGEST + 1, 1024)]
    for low, high in itertools.pairwise(grid):
        search(low, high)
    return found


def short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def test_the_scan_finds_the_strategies() -> None:
    for dtype, kind in DTYPES_AND_KINDS:
        starts = [1, *switches("forward", short_name(dtype), kind, False, 90)]
        strategies = [_C.plan("forward", columns, short_name(dtype), kind, False, 90)["strategy"] for columns in starts]
        expected = {"warp_rows", "block_row", "cluster_row", "shared_row", "stream_row"}
        assert set(strategies) == expected - ({"cluster_row"} if dtype == torch.float64 else set())
        assert _C.plan("forward", 2**40, short_name(dtype), kind, False, 90)["strategy"] == strategies[-1]


@pytest.mark.parametrize(("dtype", "kind"), DTYPES_AND_KINDS, ids=short)
def test_on_either_side_of_each_switch(device: str, dtype: torch.dtype, kind: str) -> None:
    """Powers of two stand for the CPU's vectors, blocks and chunks, all of which are such."""
    lengths = {2**power for power in range(18)}
    for direction in ("forward", "backward"):
        for band in (False, True):
            mask = kind if direction == "forward" else "none"
            lengths.update(switches(direction, short_name(dtype), mask, band, capability(device)))
    columns = sorted({length + step for length in lengths for step in (-2, -1, 0, 1)} - {-1, 0})
    assert len(columns) > 60
    for length in columns:
        x = normal((3 if length < 9000 else 1, length), dtype, device, length)
        mask = random_mask(kind, x.shape, dtype, device)
        verify(x, mask, 0.7)
        verify(x, mask, 0.7, is_causal=True, diagonal=length - 3)


@pytest.mark.parametrize("band", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_plan_exists_for_every_length_and_device(direction: str, band: bool) -> None:
    """Lengths far past any memory included."""
    for capability_ in (75, 80, 86, 89, 90, 100, 103, 120):
        for dtype in ("float16", "bfloat16", "float32", "float64"):
            for kind in mask_kinds(getattr(torch, dtype)) if direction == "forward" else ["none"]:
                for columns in (1, 2, 1000, 10**6, 2**31 - 1, 2**31, 2**33, 2**40):
                    for dropout in (False, True):
                        plan = _C.plan(direction, columns, dtype, kind, band, capability_, dropout)
                        assert 32 <= plan["threads"] <= 1024
                        assert plan["threads"] % 32 == 0
                        assert plan["rows_per_block"] >= 1
