"""The smoke job: trains a small attention layer on real text with the installed operator and with plain torch.

Run by the Python of an environment that has torch and the wheel; prints one JSON object as its last line. The text is
this repository's own documents as bytes, split into paragraphs of their real lengths, so every batch is padded. Both
models start from the same weights and see the same batches: their losses must agree step by step.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from scaled_mask_softmax import scaled_mask_softmax

# (scores, mask True = masked out, scale) -> probabilities, causal
Softmax = Callable[[Tensor, Tensor, float], Tensor]

BATCH, LONGEST, WIDTH, HEADS = 8, 192, 64, 4
LEARNING_RATE = 0.05


def ours(scores: Tensor, padding: Tensor, scale: float) -> Tensor:
    return scaled_mask_softmax(scores, padding, scale=scale, is_causal=True)


def plain(scores: Tensor, padding: Tensor, scale: float) -> Tensor:
    causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return torch.softmax((scores * scale).masked_fill(padding | causal, -math.inf), -1)


class Layer(nn.Module):
    """Bytes [B, S] to logits of the next byte [B, S, 256], through one attention layer."""

    def __init__(self, softmax: Softmax) -> None:
        super().__init__()
        self.softmax = softmax
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        batch, length = tokens.shape
        x = self.bytes(tokens) + self.positions(torch.arange(length, device=tokens.device))
        query, key, value = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1)
        weights = self.softmax(scores, padding[:, None, None, :], query.shape[-1] ** -0.5)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(batch, length, WIDTH))
        logits: Tensor = self.head(self.norm(x))
        return logits


def paragraphs(root: Path) -> list[bytes]:
    """The repository's documents, cut where they have blank lines; long paragraphs cut further."""
    texts = [
        path.read_bytes()
        for pattern in ("*.md", "*/*.md", "src/*.h", "release/*.py")
        for path in sorted(root.glob(pattern))
    ]
    pieces = [piece for text in texts for piece in text.split(b"\n\n")]
    cut = [piece[start : start + LONGEST] for piece in pieces for start in range(0, len(piece), LONGEST)]
    return [piece for piece in cut if len(piece) >= 8]


def batches(texts: list[bytes], steps: int, device: str) -> list[tuple[Tensor, Tensor]]:
    """Tokens [B, S] and padding [B, S] (True past the end), S the longest of the batch."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for _ in range(steps):
        chosen = [texts[i] for i in torch.randint(len(texts), (BATCH,), generator=generator).tolist()]
        longest = max(map(len, chosen))
        tokens = torch.tensor([list(text) + [0] * (longest - len(text)) for text in chosen])
        lengths = torch.tensor([len(text) for text in chosen])
        result.append((tokens.to(device), (torch.arange(longest) >= lengths[:, None]).to(device)))
    return result


class Training:
    """A layer, its optimizer and its losses, from the same start for every softmax."""

    def __init__(self, softmax: Softmax, device: str) -> None:
        torch.manual_seed(0)
        self.model = Layer(softmax).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE, momentum=0.9)
        self.losses: list[float] = []

    def step(self, tokens: Tensor, padding: Tensor) -> float:
        """One step on tokens [B, S] and padding [B, S]; returns the loss before it."""
        logits = self.model(tokens[:, :-1], padding[:, :-1])
        target = tokens[:, 1:].masked_fill(padding[:, 1:], -100)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        return self.losses[-1]


def compare(data: list[tuple[Tensor, Tensor]], device: str, tolerance: float) -> str:
    """Trains with the operator and with plain torch, side by side. Exits where the losses part."""
    mine, theirs = Training(ours, device), Training(plain, device)
    worst = 0.0
    for step, (tokens, padding) in enumerate(data, 1):
        loss, expected = mine.step(tokens, padding), theirs.step(tokens, padding)
        if not abs(loss - expected) <= tolerance:  # also for NaN
            raise SystemExit(f"{device}: at step {step} the loss is {loss}, plain torch's is {expected}: too far apart")
        worst = max(worst, abs(loss - expected))
        if step % 50 == 0:
            print(f"{device}: step {step} of {len(data)}, loss {loss:.3f}, at most {worst:.1e} apart", flush=True)
    start, end = sum(mine.losses[:10]) / 10, sum(mine.losses[-10:]) / 10
    if not end < start - 0.5:
        raise SystemExit(f"{device}: the layer did not learn: loss {start:.3f} at first, {end:.3f} at the end")
    return f"losses at most {worst:.1e} apart in {len(data)} steps, {start:.2f} to {end:.2f}"


def milliseconds(softmax: Softmax, device: str, repeats: int) -> float:
    """Forward and backward of the operator alone, median, on [8, 8, 512, 512]."""
    torch.manual_seed(0)
    scores = torch.randn(8, 8, 512, 512, device=device, requires_grad=True)
    padding = (torch.arange(512, device=device) >= 400).expand(8, 1, 1, 512)
    grad = torch.randn(8, 8, 512, 512, device=device)
    times = []
    for _ in range(repeats + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        softmax(scores, padding, 0.125).backward(grad)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        scores.grad = None
    return sorted(times[2:])[repeats // 2] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    # Measured: at most 5e-7 apart in 300 steps on a CPU. A wrong mask or gradient shows within ten steps as 1e-2.
    parser.add_argument("--tolerance", type=float, default=1e-5)
    arguments = parser.parse_args()

    result: dict[str, str] = {}
    texts = paragraphs(arguments.documents)
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() and torch.version.cuda else [])]:
        data = batches(texts, arguments.steps, device)
        result[f"agreement, {device}"] = compare(data, device, arguments.tolerance)
        repeats = 50 if device == "cuda" else 10
        mine, theirs = milliseconds(ours, device, repeats), milliseconds(plain, device, repeats)
        result[f"time, {device}"] = f"{mine:.2f} ms against eager's {theirs:.2f} ms, {theirs / mine:.1f}x faster"
    print(json.dumps(result))


if __name__ == "__main__":
    main()
