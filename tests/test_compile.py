"""What torch.compile promises: one graph, no compilation for each new length, CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from checks import normal, random_mask, same_bits
from torch import nn

import scaled_mask_softmax as sms


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch.compiler.reset()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.softmax = sms.ScaledMaskSoftmax(8**-0.5, is_causal=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        return self.softmax(query @ key.mT, mask) @ value


def decode(scores: torch.Tensor) -> torch.Tensor:
    """The diagonal that goes with a cache of any length."""
    return sms.scaled_mask_softmax(scores * 2, None, 0.5, True, diagonal=scores.shape[-1] - scores.shape[-2])


def in_place(scores: torch.Tensor) -> torch.Tensor:
    return sms.scaled_mask_softmax_(scores * 2, None, 0.5, True)


@pytest.mark.parametrize("function", [decode, in_place])
def test_a_new_length_compiles_once_more_at_most(device: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """As torch itself: once for the first length, once for any other."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for length in (9, 33, 64, 65, 130, 257, 1001, 7):
        x = normal((2, 4, length), torch.float32, device).requires_grad_()
        got, expected = compiled(x), function(x)
        assert same_bits(got, expected)
        assert same_bits(torch.autograd.grad(got, x, x.detach())[0], torch.autograd.grad(expected, x, x.detach())[0])
    assert counter.frame_count == 2


def test_a_layer_of_any_batch_and_length_compiles_once(device: str) -> None:
    layer = Attention().to(device)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    compiled_once = 0
    for batch, length in ((3, 9), (4, 33), (5, 64), (2, 7)):
        x = normal((batch, length, 8), torch.float32, device)
        mask = random_mask("bool", (batch, 1, length), torch.float32, device)
        assert mask is not None
        mask[..., 0] = False
        torch.testing.assert_close(compiled(x, mask), layer(x, mask))
        # torch compiles twice at first: once in the hope that the scale may vary.
        compiled_once = compiled_once or counter.frame_count
        assert counter.frame_count == compiled_once


@pytest.mark.parametrize("dynamic", [False, True])
def test_no_graph_break(device: str, dynamic: bool) -> None:
    x = normal((2, 5, 9), torch.float32, device)
    mask = random_mask("bool", (2, 1, 9), torch.float32, device)

    def every_form(x: torch.Tensor) -> torch.Tensor:
        y = sms.scaled_mask_softmax(x, mask, 1)  # an integer takes the careful path
        y = y + sms.ScaledMaskSoftmax(0.5, True, diagonal=1)(x)
        return y + sms.scaled_mask_softmax_(x * 2, mask)

    explained = torch._dynamo.explain(every_form)(x)
    assert explained.graph_break_count == 0, explained.break_reasons
    assert explained.graph_count == 1
    compiled = torch.compile(every_form, fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(compiled(x), every_form(x))


# torch opens its pool of graphs' memory by recording an empty one, and warns of it.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("training", [False, True])
def test_reduce_overhead_replays_with_new_data(cuda: str, training: bool) -> None:
    """mode="reduce-overhead" records CUDA graphs: every step reads what it is given, not what was recorded."""
    torch.manual_seed(0)
    layer = Attention().to(cuda)
    twin = copy.deepcopy(layer)
    compiled: Any = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    torch._dynamo.utils.counters.clear()
    for step in range(6):
        x = normal((3, 16, 8), torch.float32, cuda, step)
        mask = random_mask("bool", (3, 1, 16), torch.float32, cuda, step)
        assert mask is not None
        mask[..., 0] = False
        torch.compiler.cudagraph_mark_step_begin()
        with torch.set_grad_enabled(training):
            got, expected = compiled(x, mask), twin(x, mask)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
            if training:
                for result, model in ((got, layer), (expected, twin)):
                    model.zero_grad()
                    result.square().sum().backward()
                for parameter, other in zip(layer.parameters(), twin.parameters(), strict=True):
                    torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-3, atol=1e-4)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
