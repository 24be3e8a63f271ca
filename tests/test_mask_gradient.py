"""The gradient of a float mask: a learned bias of any shape that broadcasts."""

from __future__ import annotations

import itertools
import math
from typing import Any

import layouts
import oracle
import pytest
import torch
from checks import (
    DTYPES,
    DTYPES_AND_KINDS,
    assert_are_gradients,
    memory_before,
    normal,
    peak_beyond,
    same_bits,
    short,
)
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import scaled_mask_softmax as sms
from scaled_mask_softmax import _composite

FLOAT_KINDS = [pair for pair in DTYPES_AND_KINDS if pair[1] in ("same", "float32")]

SHAPE = (2, 3, 5, 33)
MASKS = [
    (2, 3, 5, 33),
    (1, 3, 5, 33),
    (2, 1, 1, 33),
    (2, 1, 5, 33),
    (2, 5, 33),  # per sample
    (1, 5, 33),
    (1, 3, 1, 33),
    (5, 33),
    (33,),
    (1, 3, 1, 1),
    (2, 1, 5, 1),
    (5, 1),
    (1,),
    (),
]

# torch compiles its own formulas with torch.jit the first time that it differentiates forward.
forward_mode = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")


def a_mask(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """About 0, some -inf."""
    mask_dtype = dtype if kind == "same" else torch.float32
    drop = torch.rand(shape, generator=torch.Generator().manual_seed(3)).to(device) < (0.2 if len(shape) > 1 else 0.0)
    return normal(shape, mask_dtype, device, 7, 1.0).masked_fill(drop, -math.inf)


def check(
    x: torch.Tensor,
    mask: torch.Tensor,
    scale: float = 0.7,
    grad: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    **exclusions: Any,
) -> torch.Tensor:
    """Compare the mask's gradient with the oracle's, alone and beside that of x; return it."""
    if grad is None:
        grad = normal(x.shape, x.dtype, str(x.device), 99, 1.0)
    exclusions = {"is_causal": False, "diagonal": 0, **exclusions}
    leaf = mask.detach().requires_grad_()
    (alone,) = torch.autograd.grad(sms.scaled_mask_softmax(x, leaf, scale, sink=sink, **exclusions), leaf, grad)
    x_leaf = x.detach().requires_grad_()
    y = sms.scaled_mask_softmax(x_leaf, leaf, scale, sink=sink, **exclusions)
    dx, dmask = torch.autograd.grad(y, (x_leaf, leaf), grad)
    (plain,) = torch.autograd.grad(sms.scaled_mask_softmax(x_leaf, mask, scale, sink=sink, **exclusions), x_leaf, grad)
    assert same_bits(dx, plain)
    assert same_bits(dmask, alone)
    assert_are_gradients({"mask": dmask}, grad, x, mask, scale, sink=sink, **exclusions)
    return dmask


@pytest.mark.parametrize("shape", MASKS, ids=short)
@pytest.mark.parametrize(("dtype", "kind"), FLOAT_KINDS, ids=short)
def test_every_way_to_broadcast(device: str, dtype: torch.dtype, kind: str, shape: tuple[int, ...]) -> None:
    x = normal(SHAPE, dtype, device)
    mask = a_mask(kind, shape, dtype, device)
    lengths = torch.tensor([20, 33], device=device)
    sink = normal((3,), dtype, device, 5)
    for given_sink, exclusions in itertools.product(
        (None, sink), ({}, {"is_causal": True, "diagonal": 25, "window": 21, "key_lengths": lengths})
    ):
        check(x, mask, sink=given_sink, **exclusions)


@pytest.mark.sanitizer
@pytest.mark.parametrize("columns", [1, 7, 67, 300, 1029, 4099, 17_001, 70_003])
@pytest.mark.parametrize(("dtype", "kind"), FLOAT_KINDS, ids=short)
def test_lengths(device: str, dtype: torch.dtype, kind: str, columns: int) -> None:
    x = normal((2, 2, 3, columns), dtype, device)
    for shape in ((2, 1, 1, columns), (2, 3, columns), (1, 2, 1, columns)):
        check(x, a_mask(kind, shape, dtype, device), is_causal=True, diagonal=columns // 2)


def test_many_rows(device: str) -> None:
    """More rows to sum than a block has warps, and a sum that does not drift."""
    x = normal((7, 3, 111, 40), torch.float32, device)
    for shape in ((40,), (3, 1, 40), (1, 3, 1, 40), (111, 40), (7, 1, 1, 40)):
        mask = normal(shape, torch.float32, device, 3)
        check(x[0] if len(shape) == 3 else x, mask)
    ones = torch.zeros(4096, 8, device=device)
    bias = torch.zeros(8, device=device, requires_grad=True)
    grad = torch.zeros_like(ones)
    grad[:, 0] = 1.0
    (dmask,) = torch.autograd.grad(sms.scaled_mask_softmax(ones, bias), bias, grad)
    assert dmask.tolist() == [4096 * 7 / 64, *([-4096 / 64] * 7)]


@pytest.mark.parametrize("layout", layouts.ALL)
def test_layouts(device: str, layout: str) -> None:
    for dtype in DTYPES:
        grad = layouts.ALL[layout](normal(SHAPE, dtype, device, 1))
        x = layouts.ALL[layout](normal(SHAPE, dtype, device))
        for shape in ((2, 1, 1, 33), (1, 3, 5, 33), (5, 33)):
            mask = layouts.ALL[layout](a_mask("same", shape, dtype, device))
            dmask = check(x, mask, grad=grad, is_causal=True, diagonal=20)
            dense = [layouts.dense(tensor) for tensor in (x, mask, grad)]
            assert same_bits(dmask, check(dense[0], dense[1], grad=dense[2], is_causal=True, diagonal=20))


def test_an_expanded_parameter(device: str) -> None:
    x = normal(SHAPE, torch.float32, device)
    grad = normal(SHAPE, torch.float32, device, 2)
    bias = normal((1, 3, 1, 33), torch.float32, device, 3).requires_grad_()
    (direct,) = torch.autograd.grad(sms.scaled_mask_softmax(x, bias, 0.5), bias, grad)
    (expanded,) = torch.autograd.grad(sms.scaled_mask_softmax(x, bias.expand(SHAPE), 0.5), bias, grad)
    torch.testing.assert_close(expanded, direct, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_scale_of_zero(device: str, dtype: torch.dtype) -> None:
    x = normal(SHAPE, dtype, device)
    for shape in (SHAPE, (1, 3, 5, 33), (2, 1, 1, 33)):
        assert check(x, a_mask("same", shape, dtype, device), 0.0).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_dead_rows_and_rows_of_nan(device: str, dtype: torch.dtype) -> None:
    """A dead row gives nothing, whatever arrives; a row of NaN gives NaN where it is live."""
    x = normal((2, 1, 4, 40), dtype, device)
    grad = normal(x.shape, dtype, device, 2)
    mask = torch.zeros(2, 1, 1, 40, dtype=dtype, device=device)
    mask[0] = -math.inf
    x[1, 0, 2, 7] = math.nan
    leaf = mask.requires_grad_()
    options: dict[str, Any] = {"is_causal": True, "diagonal": 10}
    y = sms.scaled_mask_softmax(x, leaf, **options)
    (dmask,) = torch.autograd.grad(y, leaf, grad.index_fill(0, torch.tensor([0], device=device), math.nan))
    assert not dmask[0].any()
    assert dmask[1, 0, 0, :13].isnan().all()
    assert dmask[1, 0, 0, 13].isfinite()
    assert not dmask[1, 0, 0, 14:].any()
    row_mask = torch.zeros(2, 1, 4, 1, dtype=dtype, device=device, requires_grad=True)
    (drow,) = torch.autograd.grad(sms.scaled_mask_softmax(x, row_mask, **options), row_mask, grad)
    assert drow.isnan().flatten().tolist() == [False] * 6 + [True, False]


def masks_and_inputs(device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = normal((2, 2, 3, 4), torch.float64, device, spread=1.0).requires_grad_()
    shapes = [(2, 2, 3, 4), (2, 1, 1, 4), (2, 3, 4), (3, 4), (1, 2, 1, 1), (3, 1)]
    return [(x, normal(shape, torch.float64, device, 5, 1.0).requires_grad_()) for shape in shapes]


def test_derivatives(device: str) -> None:
    sink = normal((2,), torch.float64, device, 6)
    for x, mask in masks_and_inputs(device):
        for function, given_sink in itertools.product((sms.scaled_mask_softmax, _composite.forward), (None, sink)):

            def of(x: torch.Tensor, mask: torch.Tensor, function: Any = function, sink: Any = given_sink) -> Any:
                return function(x, mask, -0.7, True, diagonal=1, sink=sink)

            assert gradcheck(of, (x, mask), check_batched_grad=True)
            assert gradcheck(lambda mask, of=of, x=x: of(x.detach(), mask), mask)
            assert gradgradcheck(of, (x, mask), check_batched_grad=True)


@forward_mode
def test_derivatives_in_forward_mode(device: str) -> None:
    for x, mask in masks_and_inputs(device):
        for function in (sms.scaled_mask_softmax, _composite.forward):

            def of(x: torch.Tensor, mask: torch.Tensor, function: Any = function) -> torch.Tensor:
                return function(x, mask, -0.7, True, diagonal=1)

            assert gradcheck(of, (x, mask), check_forward_ad=True)
            assert gradgradcheck(of, (x, mask), check_fwd_over_rev=True)


def test_the_functional_transforms(device: str) -> None:
    x = normal((3, 2, 4, 5), torch.float32, device)
    bias = normal((2, 1, 5), torch.float32, device, 3)

    def loss(bias: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return sms.scaled_mask_softmax(x, bias, 0.5).square().sum()

    got = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(bias, x)
    torch.testing.assert_close(got, torch.stack([torch.func.grad(loss)(bias, sample) for sample in x]))
    leaf = bias.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf, x[0]), leaf)
    torch.testing.assert_close(got[0], expected)


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.of_ours: list[str] = []
        self.largest = 0  # elements of a result with memory of its own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "scaled_mask_softmax":
            self.of_ours.append(func._overloadname if func._overloadname != "default" else func.__name__.split(".")[0])
        given = {tensor.data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.data_ptr() not in given:
                self.largest = max(self.largest, tensor.numel())
        return result


def test_no_more_is_computed_than_asked_for(device: str) -> None:
    x = normal(SHAPE, torch.float32, device)
    grad = normal(SHAPE, torch.float32, device, 2)
    for shape in ((2, 1, 1, 33), (1, 3, 1, 1)):
        mask = normal(shape, torch.float32, device, 3).requires_grad_()
        y = sms.scaled_mask_softmax(x, mask, 0.5)
        with Calls() as calls:
            torch.autograd.grad(y, mask, grad)
        assert calls.of_ours == ["with_dots", *(["scaled_mask_softmax_mask_backward"] if shape[-1] != 1 else [])]
        assert calls.largest < x.numel() / 3, "a temporary of the scores' size"
    mask = normal(SHAPE, torch.float32, device, 3).requires_grad_()
    y = sms.scaled_mask_softmax(x, mask, 0.5)
    with Calls() as calls:
        torch.autograd.grad(y, mask, grad)
    assert calls.of_ours == ["scaled_mask_softmax_backward"]


def test_saved_for_backward(device: str) -> None:
    """y alone."""
    x = normal(SHAPE, torch.float16, device).requires_grad_()
    bias = normal((1, 3, 5, 33), torch.float32, device, 3).requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = sms.scaled_mask_softmax(x, bias)
    assert [tensor.data_ptr() for tensor in saved] == [y.data_ptr()]


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_in_place(device: str, dtype: torch.dtype) -> None:
    x = normal(SHAPE, dtype, device)
    grad = normal(SHAPE, dtype, device, 2)
    for shape in ((1, 3, 5, 33), (2, 5, 33), (1, 3, 1, 1)):
        mask = a_mask("same", shape, dtype, device).requires_grad_()
        (expected,) = torch.autograd.grad(sms.scaled_mask_softmax(x, mask, 0.7), mask, grad)
        hidden = x.clone()
        y = sms.scaled_mask_softmax_(hidden, mask, 0.7)
        assert y is hidden
        assert same_bits(torch.autograd.grad(y, mask, grad)[0], expected)


def test_run_to_run_and_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        for shape, mask_shape in (((3, 4, 50, 70), (4, 1, 70)), ((2, 1, 3, 70_001), (70_001,))):
            x, grad = normal(shape[-3:], torch.float32, "cpu"), normal(shape[-3:], torch.float32, "cpu", 2)
            mask = normal(mask_shape, torch.float32, "cpu", 3)
            torch.set_num_threads(1)
            expected = check(x, mask, grad=grad)
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                assert same_bits(check(x, mask, grad=grad), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(0, 3, 2, 4), (2, 3, 0, 4), (2, 3, 4, 0)], ids=short)
def test_empty(device: str, shape: tuple[int, ...]) -> None:
    x = normal(shape, torch.float32, device)
    for mask_shape in (shape, (1, 3, 1, shape[-1]), (1, 3, 1, 1)):
        mask = torch.zeros(mask_shape, device=device, requires_grad=True)
        (dmask,) = torch.autograd.grad(sms.scaled_mask_softmax(x, mask), mask, torch.empty_like(x))
        assert dmask.shape == mask.shape
        assert not dmask.any()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device: str, dynamic: bool) -> None:
    def attend(x: torch.Tensor, bias: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return sms.scaled_mask_softmax(x * 2, bias, 0.5, True, diagonal=3) + sms.scaled_mask_softmax(x, row)

    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic)
    for batch, columns in ((2, 9), (5, 33)):
        x = normal((batch, 3, 7, columns), torch.float32, device).requires_grad_()
        bias = normal((batch, 7, columns), torch.float32, device, 3).requires_grad_()
        row = normal((1, 3, 1, 1), torch.float32, device, 5).requires_grad_()
        grad = normal(x.shape, torch.float32, device, 4)
        expected, got = attend(x, bias, row), compiled(x, bias, row)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(*(torch.autograd.grad(y, (x, bias, row), grad) for y in (got, expected)))


@pytest.mark.parametrize(
    ("shape", "mask_shape"),
    [
        ((2, 3, 2, 3, 2, 3, 2, 3, 5, 9), (2, 1, 2, 1, 2, 1, 2, 1, 5, 9)),
        ((2, 3, 2, 3, 2, 3, 2, 3, 5, 9), (1, 3, 1, 3, 1, 3, 1, 3, 1, 9)),
        ((2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 4, 9), (2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 1, 9)),
    ],
    ids=short,
)
def test_any_number_of_dimensions(device: str, shape: tuple[int, ...], mask_shape: tuple[int, ...]) -> None:
    """More than a kernel walks at a time, on either side: those of the mask and those that are summed."""
    for dtype, kind in (("float32", "same"), ("float16", "same"), ("bfloat16", "float32"), ("float64", "same")):
        x = normal(shape, getattr(torch, dtype), device)
        mask = a_mask(kind, mask_shape, x.dtype, device)
        lengths = torch.tensor([4, 9], device=device)
        check(x, mask)
        check(x, mask, is_causal=True, diagonal=3, key_lengths=lengths)
        x_leaf, mask_leaf = x.clone().requires_grad_(), mask.clone().requires_grad_()
        torch.manual_seed(5)
        y = sms.scaled_mask_softmax(x_leaf, mask_leaf, 0.7, dropout_p=0.3)
        grad = normal(shape, x.dtype, device, 9)
        (dmask,) = torch.autograd.grad(y, mask_leaf, grad)
        torch.manual_seed(5)
        keep = torch.ops.scaled_mask_softmax.dropout_keep(x, 0.3)
        assert_are_gradients({"mask": dmask}, oracle.dropout(grad, keep, 0.3), x, mask, 0.7)


def test_memory_and_kernels(cuda: str) -> None:
    """Two kernels, and beside y and the gradients no more than a number a row."""
    from torch.profiler import ProfilerActivity, profile

    x = normal((4, 8, 256, 1024), torch.float16, cuda).requires_grad_()
    bias = torch.zeros(1, 8, 1, 1024, device=cuda, requires_grad=True)
    y = sms.scaled_mask_softmax(x, bias, 0.5)
    grad = torch.ones((), dtype=torch.float16, device=cuda).expand(x.shape)
    torch.autograd.grad(y, (x, bias), grad, retain_graph=True)
    before = memory_before()
    gradients = torch.autograd.grad(y, (x, bias), grad, retain_graph=True)
    assert peak_beyond(before) <= x.numel() * 2 + (4 << 20)
    del gradients
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as recorded:
        torch.autograd.grad(y, (x, bias), grad)
        torch.cuda.synchronize()
    kernels = [event.name for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 2, kernels
