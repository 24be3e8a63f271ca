"""Time the operator on a CUDA device as a share of the floor.

The floor of a case is the fewest bytes it must move (each needed input byte once, each output byte once; under a causal
mask only the lower triangle of the scores, each row rounded up to whole 32-byte sectors) divided by the bandwidth of a
device-to-device copy of the same size in the same run. A share of 1.00 is as fast as that copy.

    python benchmarks/share_of_floor.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from scaled_mask_softmax import scaled_mask_softmax

SECTOR_BYTES = 32
HEADS = 16
SCORE_BYTES = 1 << 29  # past the L2 of every device


@dataclass(frozen=True)
class Case:
    columns: int
    dtype: torch.dtype
    causal: bool = False
    mask: str = "none"  # none, float ([B, 1, Sq, Sk]) or padding (bool [B, 1, 1, Sk])
    backward: bool = False

    @property
    def name(self) -> str:
        kind = "+".join([part for part, on in (("causal", self.causal), (self.mask, self.mask != "none")) if on])
        direction = "forward+backward" if self.backward else "forward"
        return f"{str(self.dtype).removeprefix('torch.')} Sk={self.columns} {kind or 'plain'} {direction}"


CASES = [
    *(Case(columns, torch.float16) for columns in (128, 512, 1024, 2048, 4096, 8192, 16384, 65536)),
    *(Case(columns, torch.float32) for columns in (128, 1024, 4096, 16384)),
    *(Case(columns, torch.float16) for columns in (1000, 1001, 1025, 4097)),
    *(Case(columns, torch.float16, causal=True) for columns in (128, 512, 1024, 2048, 4096, 16384)),
    *(Case(columns, torch.float16, mask="float") for columns in (128, 1024, 2048, 8192)),
    *(Case(columns, torch.float16, mask="padding") for columns in (128, 1024, 4096)),
    *(Case(columns, torch.float16, causal=True, mask="float") for columns in (512, 2048)),
    *(Case(columns, torch.float16, backward=True) for columns in (128, 1024, 4096, 16384)),
    *(Case(columns, torch.float16, causal=True, backward=True) for columns in (512, 2048)),
]


def median_seconds(call: Callable[[], object], runs: int = 50) -> float:
    """Median over CUDA events, after a warm-up."""
    for _ in range(5):
        call()
    times = []
    for _ in range(runs):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def triangle_bytes(queries: int, columns: int, element_bytes: int) -> int:
    """Bytes of the live cells of one causal square, each row rounded up to whole sectors."""
    live = (min(row + 1, columns) * element_bytes for row in range(queries))
    return sum(-(-size // SECTOR_BYTES) * SECTOR_BYTES for size in live)


def measure(case: Case) -> dict[str, object]:
    element_bytes = case.dtype.itemsize
    columns = case.columns
    queries = columns if columns <= 16384 else 256
    heads = HEADS if queries * columns * HEADS * element_bytes <= SCORE_BYTES else 1
    batch = max(1, SCORE_BYTES // (heads * queries * columns * element_bytes))
    x = torch.randn(batch, heads, queries, columns, device="cuda", dtype=case.dtype)
    mask = None
    mask_bytes = 0
    if case.mask == "float":
        mask = torch.randn(batch, 1, queries, columns, device="cuda", dtype=case.dtype)
        mask_bytes = (
            batch * triangle_bytes(queries, columns, element_bytes) if case.causal else mask.numel() * element_bytes
        )
    elif case.mask == "padding":
        mask = torch.arange(columns, device="cuda").expand(batch, 1, 1, columns) >= columns - 7
        mask_bytes = batch * columns
    square = triangle_bytes(queries, columns, element_bytes) if case.causal else queries * columns * element_bytes
    read = batch * heads * square
    whole = x.numel() * element_bytes
    moved = read + mask_bytes + whole
    if case.backward:
        x.requires_grad_()
        moved += 2 * read + whole
        grad = torch.randn_like(x)

        def call() -> object:
            x.grad = None
            return scaled_mask_softmax(x, mask, 0.125, case.causal).backward(grad)

    else:

        def call() -> object:
            return scaled_mask_softmax(x, mask, 0.125, case.causal)

    target = torch.empty_like(x)
    source = x.detach()
    seconds = median_seconds(call)
    copy_seconds = median_seconds(lambda: target.detach().copy_(source))
    bandwidth = 2 * whole / copy_seconds
    return {
        "case": case.name,
        **{key: str(value) for key, value in asdict(case).items()},
        "shape": list(x.shape),
        "seconds": seconds,
        "copy_bytes_per_second": bandwidth,
        "share_of_floor": moved / bandwidth / seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("share_of_floor: no CUDA device was found; this benchmark needs one.", file=sys.stderr)
        return 2
    results = []
    for case in CASES:
        if arguments.only not in case.name:
            continue
        result = measure(case)
        results.append(result)
        bandwidth = float(str(result["copy_bytes_per_second"])) / 1e12
        print(
            f"{result['case']:<50} {result['share_of_floor']:.3f} of the floor (copy {bandwidth:.2f} TB/s)", flush=True
        )
        torch.cuda.empty_cache()
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
