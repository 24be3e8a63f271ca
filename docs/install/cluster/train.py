"""Trains a small attention layer with a copy in every process, on GPUs (NCCL) or without (gloo). Run by torchrun.

The task: each position must name the symbol that stands `BACK` before it. Prints what the first process sees; ends with
an error where the layer does not learn, or where the processes' weights part.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scaled_mask_softmax import scaled_mask_softmax

BACK, LENGTH, WIDTH, SYMBOLS = 3, 24, 64, 16


class Layer(nn.Module):
    """Symbols [B, S] to logits [B, S, SYMBOLS]."""

    def __init__(self):
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, tokens):
        places = self.positions(torch.arange(LENGTH, device=tokens.device))
        query, key, value = self.qkv(self.symbols(tokens) + places).chunk(3, -1)
        scores = (query @ key.transpose(-2, -1)).unsqueeze(1)  # [B, 1, S, S]
        weights = scaled_mask_softmax(scores, scale=WIDTH**-0.5, is_causal=True).squeeze(1)
        return self.head(weights @ value)


def main():
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Layer().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(1 + rank)  # other data in each process
    for step in range(101):
        tokens = torch.randint(SYMBOLS, (32, LENGTH), generator=generator).to(device)
        logits = model(tokens)[:, BACK:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, :-BACK].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"{world} processes on {device.type}: step {step}, loss {loss.item():.3f}", flush=True)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    theirs = [torch.empty_like(weights) for _ in range(world)]
    dist.all_gather(theirs, weights)
    dist.destroy_process_group()
    if not all(torch.equal(weights, other) for other in theirs):
        raise SystemExit("the processes' weights differ")
    if not loss.item() < 0.5:
        raise SystemExit(f"the layer did not learn: loss {loss.item():.3f}")
    if rank == 0:
        print(f"{world} processes agree, to the last bit")


if __name__ == "__main__":
    main()
    # Without the interpreter's own end: a thread of gloo that still holds a tensor then would abort the process, and
    # destroy_process_group() does not wait for it while DistributedDataParallel holds the group.
    sys.stdout.flush()
    os._exit(0)
