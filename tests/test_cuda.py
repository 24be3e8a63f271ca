"""What only a CUDA device has: streams, graphs, memory, kernels, several devices."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from checks import (
    DTYPES,
    DTYPES_AND_KINDS,
    memory_before,
    normal,
    peak_beyond,
    random_mask,
    same_bits,
    short,
    verify,
)
from torch.profiler import ProfilerActivity, profile

import scaled_mask_softmax as sms

LENGTHS = [7, 128, 1000, 2048, 8192, 40_000]


def run(
    x: torch.Tensor, mask: torch.Tensor | None, grad: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = x.detach().requires_grad_()
    y = sms.scaled_mask_softmax(leaf, mask, 0.7, **options)
    return y.detach(), torch.autograd.grad(y, leaf, grad)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("columns", LENGTHS)
def test_agrees_with_the_cpu(cuda: str, columns: int, dtype: torch.dtype) -> None:
    x, grad = normal((2, 3, 5, columns), dtype, "cpu"), normal((2, 3, 5, columns), dtype, "cpu", 2)
    mask = random_mask("bool", (2, 1, 1, columns), dtype, "cpu")
    options = {"is_causal": True, "diagonal": columns // 2}
    on_cpu = run(x, mask, grad, **options)
    on_cuda = run(x.to(cuda), mask.to(cuda), grad.to(cuda), **options)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for a, b in zip(on_cpu, on_cuda):
        torch.testing.assert_close(b.cpu(), a, rtol=0, atol=2 * tolerance)


@pytest.mark.parametrize("columns", LENGTHS)
@pytest.mark.parametrize("kind", ["none", "bool", "same"])
def test_graph_replays_with_new_data(cuda: str, kind: str, columns: int) -> None:
    x, grad = normal((4, 5, columns), torch.float16, cuda), normal((4, 5, columns), torch.float16, cuda, 2)
    mask = random_mask(kind, (5, columns), torch.float16, cuda)
    in_place = x.clone()
    run(x, mask, grad, is_causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    leaf = x.requires_grad_()
    with torch.cuda.graph(graph):
        y = sms.scaled_mask_softmax(leaf, mask, 0.7, True)
        (dx,) = torch.autograd.grad(y, leaf, grad)
        sms.scaled_mask_softmax_(in_place, mask, 0.7, True)
    for seed in (11, 12):
        x.detach().copy_(normal(x.shape, torch.float16, cuda, seed))
        in_place.copy_(x.detach())
        grad.copy_(normal(x.shape, torch.float16, cuda, seed + 100))
        if mask is not None:
            mask.copy_(random_mask(kind, mask.shape, torch.float16, cuda, seed))
        graph.replay()
        torch.cuda.synchronize()
        expected = run(x.detach().clone(), mask, grad, is_causal=True)
        assert same_bits(y, expected[0])
        assert same_bits(dx, expected[1])
        assert same_bits(in_place, expected[0])


def test_current_stream(cuda: str) -> None:
    """On a side stream the result is ordered after that stream's work, not after the default's."""
    side = torch.cuda.Stream()
    x = torch.zeros(64, 1000, device=cuda)
    final = normal(x.shape, torch.float32, cuda)
    expected = run(final, None, final)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.copy_(final)
        got = run(x, None, x)
    assert not side.query(), "the call waited for the stream"
    torch.cuda.current_stream().wait_stream(side)
    assert same_bits(got[0], expected[0])
    assert same_bits(got[1], expected[1])


def test_second_device(second_cuda: str) -> None:
    """Runs where x lies, while another device is current."""
    assert torch.cuda.current_device() == 0
    x = normal((3, 5, 1000), torch.float16, second_cuda)
    y, dx = verify(x, random_mask("bool", (1000,), torch.float16, second_cuda), 0.5, True)
    assert str(y.device) == str(dx.device) == second_cuda
    assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="mask is on cuda:0; expected cuda:1, the device of x"):
        sms.scaled_mask_softmax(x, torch.zeros(1000, dtype=torch.bool, device="cuda:0"))


# The allocator gives large tensors whole multiples of this many bytes: far less than one more tensor of x's size.
ALLOCATION = 2 << 20


@pytest.mark.parametrize(("dtype", "kind"), DTYPES_AND_KINDS, ids=short)
@pytest.mark.parametrize("columns", LENGTHS)
def test_memory(cuda: str, columns: int, dtype: torch.dtype, kind: str) -> None:
    """y and dx, and nothing else; the in-place form dx alone; each rounded up by the allocator."""
    rows = 2**21 // columns * 8
    x = torch.zeros(rows, 4, columns, dtype=dtype, device=cuda)[:, :1]  # rows with gaps
    mask = random_mask(kind, (columns,), dtype, cuda)
    grad = torch.ones((), dtype=dtype, device=cuda).expand(x.shape)
    size = -(-x.numel() * x.element_size() // ALLOCATION) * ALLOCATION
    x.requires_grad_()
    run(x, mask, grad)
    before = memory_before()
    y = sms.scaled_mask_softmax(x, mask, 0.7, True)
    assert peak_beyond(before) <= size
    dx = torch.autograd.grad(y, x, grad)[0]
    assert peak_beyond(before) <= 2 * size
    del y, dx
    hidden = x * 1
    before = memory_before()
    sms.scaled_mask_softmax_(hidden, mask, 0.7, True)
    assert peak_beyond(before) == 0
    torch.autograd.grad(hidden, x, grad)
    assert peak_beyond(before) <= 2 * size  # dx, and that of the multiplication by 1


@pytest.mark.parametrize("kind", ["none", "bool", "same", "float32"])
@pytest.mark.parametrize("columns", LENGTHS)
def test_one_kernel_forward_and_one_backward(cuda: str, columns: int, kind: str) -> None:
    x = normal((4, 5, columns), torch.float16, cuda).requires_grad_()
    mask = random_mask(kind, (5, columns), torch.float16, cuda)
    grad = normal(x.shape, torch.float16, cuda, 2)

    def events(call: Any) -> list[str]:
        call()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as recorded:
            call()
            torch.cuda.synchronize()
        return [event.name for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]

    forward = events(lambda: sms.scaled_mask_softmax(x, mask, 0.7, True))
    assert len(forward) == 1, forward
    assert "forward" in forward[0]
    y = sms.scaled_mask_softmax(x, mask, 0.7, True)
    backward = events(lambda: torch.autograd.grad(y, x, grad, retain_graph=True))
    assert len(backward) == 1, backward
    assert "backward" in backward[0]
    expanded = events(lambda: torch.autograd.grad(y, x, grad[:1, :1, :1].expand_as(y), retain_graph=True))
    assert len(expanded) == 1, expanded
    z = x.detach().clone()
    assert len(events(lambda: sms.scaled_mask_softmax_(z, mask, 0.7, True))) == 1


def test_does_not_wait_for_the_device(cuda: str) -> None:
    x = normal((64, 1000), torch.float32, cuda).requires_grad_()
    mask = random_mask("bool", (1000,), torch.float32, cuda)
    run(x, mask, x.detach())
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype feature")
        torch.cuda.set_sync_debug_mode("error")
    try:
        run(x, mask, x.detach(), is_causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_errors_leave_the_device_usable(cuda: str) -> None:
    x = normal((3, 9), torch.float32, cuda)
    with pytest.raises(ValueError, match="mask has shape"):
        sms.scaled_mask_softmax(x, torch.zeros(4, device=cuda))
    verify(x)
