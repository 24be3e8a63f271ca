"""The tensors of a case, and running an implementation on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .cases import HEAD_DIM, Case

# Scores [B, H, Sq, Sk] -> probabilities.
Operator = Callable[[torch.Tensor], torch.Tensor]
# Inputs of the problem -> what the gradient is taken of.
Forward = Callable[..., torch.Tensor]

SCALE = 0.125
PADDED = 7  # columns masked out at the end of a row


@dataclass(frozen=True)
class Problem:
    """inputs: (x,) or, for an attention step, (query, key, value). grad: of the output; None for forward alone."""

    case: Case
    inputs: tuple[torch.Tensor, ...]
    mask: torch.Tensor | None
    grad: torch.Tensor | None

    @property
    def tensor_bytes(self) -> int:
        tensors = [*self.inputs, *(tensor for tensor in (self.mask, self.grad) if tensor is not None)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def make_problem(case: Case, device: str) -> Problem:
    """The same numbers for the same case."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=case.dtype, generator=generator)

    if case.suite == "attention":
        shapes = [(case.batch, case.heads, size, HEAD_DIM) for size in (case.queries, case.columns, case.columns)]
    else:
        shapes = [(case.batch, case.heads, case.queries, case.columns)]
    inputs = tuple(normal(*shape).requires_grad_(case.backward) for shape in shapes)
    mask = None
    if case.kind == "padding":
        padded = min(PADDED, case.columns // 2)
        mask = torch.arange(case.columns, device=device) >= case.columns - padded
        mask = mask.expand(case.batch, 1, 1, case.columns).contiguous()
    elif case.mask_shape is not None:
        mask = normal(*case.mask_shape)
    return Problem(case, inputs, mask, normal(*shapes[0]) if case.backward else None)


def step(problem: Problem, operator: Operator) -> Forward:
    """The forward pass with this operator: itself, or the attention around it."""
    if problem.case.suite != "attention":
        return operator

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return operator(query @ key.transpose(-2, -1)) @ value

    return attention


def run(problem: Problem, forward: Forward) -> tuple[torch.Tensor, ...]:
    """The output and, where the case has a backward pass, the gradients of the inputs."""
    if problem.grad is None:
        return (forward(*problem.inputs),)
    output = forward(*problem.inputs)
    return (output, *torch.autograd.grad(output, problem.inputs, problem.grad))
