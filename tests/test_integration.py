"""The operator inside PyTorch: opcheck, torch.compile, fake tensors, modes and contexts."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import layouts
import pytest
import torch
import torch._dynamo.testing
from checks import DTYPES, normal, random_mask, same_bits, short
from torch._subclasses.fake_tensor import FakeTensorMode

import scaled_mask_softmax as sms

OPS = torch.ops.scaled_mask_softmax


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch.compiler.reset()


def opcheck_arguments(device: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for dtype, requires_grad in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        x = normal((2, 3, 5, 9), dtype, device).requires_grad_(requires_grad)
        calls += [
            ((x,), {}),
            ((x, random_mask("bool", (2, 1, 1, 9), dtype, device), 0.5), {}),
            ((x, random_mask("same", (5, 9), dtype, device), 0.5, True), {"diagonal": 2}),
            ((x, random_mask("bool", (2, 5, 9), dtype, device), 2.0, True), {}),
        ]
        lengths = torch.tensor([4, 9], device=device)
        calls.append(((x, None, 0.5, True), {"diagonal": 4, "window": 3, "key_lengths": lengths}))
        calls.append(((x, random_mask("bool", (5, 9), dtype, device)), {"key_lengths": lengths.int()}))
        sink = normal((3,), torch.float32, device, 7).requires_grad_(requires_grad)
        calls.append(((x, None, 0.5), {"sink": sink}))
        for shape in ((5, 1), (2, 1, 1, 9)):
            bias = normal(shape, dtype, device, 8).requires_grad_(requires_grad)
            calls.append(((x, bias, 0.5), {"sink": sink.detach()}))
    calls.append(((normal((4, 7), torch.float32, device).t(), None, 0.5), {}))
    calls.append(((torch.empty(0, 5, device=device),), {}))
    return calls


# torch's own, while it clones arguments that require gradients.
clones_leaves = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@clones_leaves
def test_opcheck_forward(device: str) -> None:
    for args, kwargs in opcheck_arguments(device):
        torch.library.opcheck(OPS.scaled_mask_softmax.default, args, kwargs)


@clones_leaves
def test_opcheck_in_place(device: str) -> None:
    for args, kwargs in opcheck_arguments(device):
        x = args[0].detach().clone()
        # A leaf that requires grad cannot be overwritten; opcheck hands over leaves.
        torch.library.opcheck(OPS.scaled_mask_softmax_.default, (x, *args[1:]), kwargs)


def test_opcheck_of_overloads_with_a_value_of_each_row(device: str) -> None:
    options = {"diagonal": 1, "window": None, "key_lengths": torch.tensor([4, 9], device=device)}
    for dtype in (torch.float32, torch.float16, torch.float64):
        x, grad = (normal((2, 3, 5, 9), dtype, device, seed) for seed in (0, 1))
        sink = normal((3,), dtype, device, 2)
        arguments = (x, random_mask("bool", (2, 1, 1, 9), dtype, device), 0.5, True)
        torch.library.opcheck(OPS.scaled_mask_softmax.with_sink_probability, arguments, {**options, "sink": sink})
        torch.library.opcheck(
            OPS.scaled_mask_softmax_.with_sink_probability, (x.clone(), *arguments[1:]), {**options, "sink": sink}
        )
        y = sms.scaled_mask_softmax(x)
        for with_dx in (True, False):
            torch.library.opcheck(OPS.scaled_mask_softmax_backward.with_dots, (grad, y, 0.5, True, with_dx), options)
        _, dots = OPS.scaled_mask_softmax_backward.with_dots(grad, y, 0.5, True, False, **options)
        for size in ((2, 3, 5, 9), (2, 1, 1, 9), (1, 3, 5, 9), (1, 1, 1, 9)):
            arguments = (grad, y, dots, size, dtype, True)
            torch.library.opcheck(OPS.scaled_mask_softmax_mask_backward.default, arguments, options)


def test_opcheck_backward(device: str) -> None:
    for dtype in (torch.float32, torch.float16):
        y = sms.scaled_mask_softmax(normal((2, 3, 9), dtype, device))
        grad = normal((2, 3, 9), dtype, device, 2)
        torch.library.opcheck(OPS.scaled_mask_softmax_backward.default, (grad, y, 0.5, False))
        torch.library.opcheck(OPS.scaled_mask_softmax_backward.default, (grad, y, 0.5, True), {"diagonal": 1})
        torch.library.opcheck(
            OPS.scaled_mask_softmax_backward.default, (grad[:1, :1, :1].expand_as(y), y, 0.5, False), {}
        )
        lengths = torch.tensor([4, 9], device=device)
        torch.library.opcheck(
            OPS.scaled_mask_softmax_backward.default, (grad, y, 0.5, True), {"window": 2, "key_lengths": lengths}
        )


def test_every_overload_is_checked_above() -> None:
    names = {
        (schema.name.removeprefix("scaled_mask_softmax::"), schema.overload_name)
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("scaled_mask_softmax::")
    }
    assert names == {
        ("scaled_mask_softmax", ""),
        ("scaled_mask_softmax", "with_sink_probability"),
        ("scaled_mask_softmax_", ""),
        # Those with dropout: test_dropout.py.
        *(("scaled_mask_softmax", name) for name in ("dropout", "dropout_with_y", "dropout_of_keep")),
        *((f"scaled_mask_softmax{name}", "dropout") for name in ("_", "_backward", "_mask_backward")),
        *(("dropout_keep", name) for name in ("", "of_state")),
        ("scaled_mask_softmax_", "with_sink_probability"),
        ("scaled_mask_softmax_backward", ""),
        ("scaled_mask_softmax_backward", "with_dots"),
        ("scaled_mask_softmax_mask_backward", ""),
    }


def test_fake_tensors_have_the_strides_of_real_ones(device: str) -> None:
    for dtype in DTYPES:
        for layout in layouts.ALL.values():
            x = layout(normal((2, 3, 5, 9), dtype, device))
            real = sms.scaled_mask_softmax(x)
            with FakeTensorMode() as mode:
                fake_x = mode.from_tensor(x)
                fake = sms.scaled_mask_softmax(fake_x)
                fake_dx = OPS.scaled_mask_softmax_backward(fake_x, fake, 1.0, False)
            for one in (fake, fake_dx):
                assert one.stride() == real.stride()
                assert one.dtype == dtype
                assert one.device == real.device
                assert one.storage_offset() == 0


def attend(x: torch.Tensor, mask: torch.Tensor | None, scale: float, diagonal: int) -> torch.Tensor:
    """The operator between pointwise work that a compiler wants to fuse, and that is exact however it is computed."""
    return sms.scaled_mask_softmax(x * 2, mask, scale, True, diagonal=diagonal) * -4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
@pytest.mark.parametrize("kind", ["none", "bool", "same"])
def test_compile(device: str, kind: str, dtype: torch.dtype) -> None:
    compiled = torch.compile(attend, fullgraph=True)
    for layout in ("dense", "padded_rows", "transposed_leading"):
        x = layouts.ALL[layout](normal((2, 3, 17, 33), dtype, device)).requires_grad_()
        mask = random_mask(kind, (2, 1, 17, 33), dtype, device)
        grad = normal(x.shape, dtype, device, 4)
        expected = attend(x, mask, 0.5, 3)
        got = compiled(x, mask, 0.5, 3)
        assert same_bits(got, expected)
        assert same_bits(torch.autograd.grad(got, x, grad)[0], torch.autograd.grad(expected, x, grad)[0])


def test_compile_with_dynamic_shapes(device: str) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    compiled_once = 0
    # No two of the first numbers are equal: torch would take that for a rule, and compile again where it breaks.
    for batch, queries, columns in ((4, 5, 11), (3, 6, 33), (5, 16, 65), (7, 4, 130)):
        x = normal((batch, 2, queries, columns), torch.float32, device).requires_grad_()
        mask = random_mask("bool", (batch, 1, 1, columns), torch.float32, device)
        grad = normal(x.shape, torch.float32, device, 4)
        expected = attend(x, mask, 0.5, columns - queries)
        got = compiled(x, mask, 0.5, columns - queries)
        assert same_bits(got, expected)
        assert same_bits(torch.autograd.grad(got, x, grad)[0], torch.autograd.grad(expected, x, grad)[0])
        # torch compiles twice at first: once in the hope that the scale may vary.
        compiled_once = compiled_once or counter.frame_count
        assert counter.frame_count == compiled_once, "recompiled for a new shape or diagonal"


def test_compile_with_changing_scale(device: str) -> None:
    compiled = torch.compile(attend, fullgraph=True)
    x = normal((2, 3, 5, 33), torch.float32, device)
    for scale in (1.0, 0.5, -0.25, 0.0, 0.125):
        assert same_bits(compiled(x, None, scale, 3), attend(x, None, scale, 3))


def test_compile_where_inductor_pads_rows(device: str) -> None:
    compiled = torch.compile(attend, fullgraph=True)
    for columns in (1025, 2051):
        x = normal((2, 3, 40, columns), torch.bfloat16, device).requires_grad_()
        expected, got = (function(x, None, 0.5, 900) for function in (attend, compiled))
        assert same_bits(got, expected)
        assert same_bits(*(torch.autograd.grad(y, x, x.detach())[0] for y in (got, expected)))


def test_compile_in_place(device: str) -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        hidden = x * 2
        sms.scaled_mask_softmax_(hidden, None, 0.5, True, diagonal=1)
        return hidden * -4

    def of_an_argument(x: torch.Tensor) -> torch.Tensor:
        return sms.scaled_mask_softmax_(x, None, 0.5)

    for dynamic in (False, True):
        compiled = torch.compile(work, fullgraph=True, dynamic=dynamic)
        for columns in (9, 33):
            x = normal((2, 5, columns), torch.float32, device).requires_grad_()
            grad = normal(x.shape, torch.float32, device, 4)
            expected, got = work(x), compiled(x)
            assert same_bits(got, expected)
            assert same_bits(torch.autograd.grad(got, x, grad)[0], torch.autograd.grad(expected, x, grad)[0])
        given, kept = (normal((2, 5, 9), torch.float32, device) for _ in range(2))
        result = torch.compile(of_an_argument, fullgraph=True, dynamic=dynamic)(given)
        assert same_bits(given, of_an_argument(kept))
        assert same_bits(result, given)


# torch's compiler looks at .grad of its arguments.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("part", [slice(None), slice(1, 4)], ids=["whole", "view"])
def test_compiled_gradient_through_an_argument_written_in_place(device: str, part: slice) -> None:
    """What is compiled changes a tensor that it was given, and that belongs to a graph made outside."""

    def work(hidden: torch.Tensor) -> torch.Tensor:
        sms.scaled_mask_softmax_(hidden[part], None, 0.5, True)
        return hidden * 3

    x = normal((5, 6), torch.float64, device).requires_grad_()
    grad = normal((5, 6), torch.float64, device, 4)
    results = []
    for function in (work, torch.compile(work, fullgraph=True, backend="aot_eager")):
        hidden = x * 2
        y = function(hidden)
        of_y, of_hidden = (torch.autograd.grad(tensor, x, grad, retain_graph=True)[0] for tensor in (y, hidden))
        results.append((y, hidden, of_y, of_hidden))
    for expected, got in zip(*results):
        assert same_bits(got, expected)


def test_compiled_errors_are_those_of_eager(device: str) -> None:
    compiled = torch.compile(lambda x, mask: sms.scaled_mask_softmax(x, mask), fullgraph=True)
    with pytest.raises(Exception, match=r"scaled_mask_softmax: mask has shape \[4\] for x of shape \[2, 3\]"):
        compiled(torch.zeros(2, 3, device=device), torch.zeros(4, device=device))


def test_export(device: str) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return sms.scaled_mask_softmax(x, mask, 0.5, True)

    x, mask = normal((2, 3, 5, 9), torch.float32, device), random_mask("bool", (2, 1, 1, 9), torch.float32, device)
    program = torch.export.export(Layer(), (x, mask))
    assert "scaled_mask_softmax.scaled_mask_softmax.default" in str(program.graph)
    assert same_bits(program.module()(x, mask), Layer()(x, mask))


def test_module_copies_and_pickles(device: str) -> None:
    """A tensor that went through the operator is an ordinary tensor."""
    y = sms.scaled_mask_softmax(normal((3, 9), torch.float32, device))
    assert same_bits(copy.deepcopy(y), y)


def test_inference_mode(device: str) -> None:
    x = normal((3, 65), torch.float32, device)
    expected = sms.scaled_mask_softmax(x, None, 0.5, True)
    with torch.inference_mode():
        assert same_bits(sms.scaled_mask_softmax(x, None, 0.5, True), expected)
        inside = x.clone()
        sms.scaled_mask_softmax_(inside, None, 0.5, True)
        assert same_bits(inside, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_autocast_keeps_the_dtype(device: str, dtype: torch.dtype) -> None:
    x = normal((3, 65), dtype, device).requires_grad_()
    mask = random_mask("same", (65,), dtype, device)
    expected = sms.scaled_mask_softmax(x, mask, 0.5)
    for autocast_dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(device, dtype=autocast_dtype):
            y = sms.scaled_mask_softmax(x, mask, 0.5)
        assert same_bits(y, expected)
        assert torch.autograd.grad(y, x, y.detach())[0].dtype == dtype


def test_deterministic_mode(device: str) -> None:
    """Nothing to warn of, nothing that changes; uninitialised memory filled with NaN shows up nowhere."""
    x = normal((3, 4097), torch.float32, device).requires_grad_()
    expected = sms.scaled_mask_softmax(x, None, 0.5, True, diagonal=9)
    (expected_dx,) = torch.autograd.grad(expected, x, expected.detach())
    torch.use_deterministic_algorithms(True)
    try:
        y = sms.scaled_mask_softmax(x, None, 0.5, True, diagonal=9)
        (dx,) = torch.autograd.grad(y, x, expected.detach())
    finally:
        torch.use_deterministic_algorithms(False)
    assert same_bits(y, expected)
    assert same_bits(dx, expected_dx)


def test_subclasses_and_parameters(device: str) -> None:
    parameter = torch.nn.Parameter(normal((3, 9), torch.float32, device))
    sms.scaled_mask_softmax(parameter, None, 0.5).square().sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.isfinite().all()


def test_floating_point_modes_are_left_alone() -> None:
    """Subnormal numbers live on after a call, in this thread and in those of torch's pool."""
    for _ in range(3):
        sms.scaled_mask_softmax(normal((256, 1000), torch.float32, "cpu"), None, 0.5)
    small = torch.full((100_000,), 1e-40)
    assert (small * 0.5).count_nonzero() == small.numel()


def test_other_devices_take_the_composite() -> None:
    x = torch.empty(2, 3, 5, 9, device="meta", dtype=torch.bfloat16)
    y = sms.scaled_mask_softmax(x, None, 0.5, True)
    assert (y.device.type, y.dtype, y.shape, y.stride()) == ("meta", torch.bfloat16, x.shape, x.stride())
