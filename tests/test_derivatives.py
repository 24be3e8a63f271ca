"""Derivatives past the first, forward mode, and the transforms of torch.func."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import DTYPES, normal, random_mask, same_bits, short
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

import scaled_mask_softmax as sms
from scaled_mask_softmax import _composite

# torch compiles its own formulas with torch.jit the first time that it differentiates forward.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")

Function = Callable[[torch.Tensor], torch.Tensor]


def a_mask(kind: str, device: str) -> torch.Tensor | None:
    mask = random_mask(kind, (2, 1, 4, 5), torch.float64, device)
    if kind == "bool":
        assert mask is not None
        mask[0, 0, 1] = True  # a row without a live cell
    return mask


def out_of_place(mask: torch.Tensor | None) -> Function:
    return lambda x: sms.scaled_mask_softmax(x, mask, -0.7, True, diagonal=1)


def in_place(mask: torch.Tensor | None) -> Function:
    return lambda x: sms.scaled_mask_softmax_(x.clone(), mask, -0.7, True, diagonal=1)


def in_place_on_a_view(mask: torch.Tensor | None) -> Function:
    def of(x: torch.Tensor) -> torch.Tensor:
        base = x * 2
        sms.scaled_mask_softmax_(base[..., 1:, :], None if mask is None else mask[..., 1:, :], 0.5, True)
        return base

    return of


@pytest.mark.parametrize("kind", ["none", "bool", "same"])
@pytest.mark.parametrize("form", [out_of_place, in_place, in_place_on_a_view])
def test_first_and_second_derivatives_in_both_modes(
    device: str, form: Callable[[torch.Tensor | None], Function], kind: str
) -> None:
    x = normal((2, 2, 4, 5), torch.float64, device, spread=1.0).requires_grad_()
    function = form(a_mask(kind, device))
    assert gradcheck(function, x, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(function, x, check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_second_derivative_of_every_dtype(device: str, dtype: torch.dtype) -> None:
    """Against that of float64: rounded to the dtype thrice on the way, in y, in the gradient and in the result."""

    def second(x: torch.Tensor, grad: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
        y = sms.scaled_mask_softmax(x, None, 0.5, True, diagonal=30)
        (dx,) = torch.autograd.grad(y, x, grad, create_graph=True)
        return torch.autograd.grad(dx, x, tangent)[0]

    values = [normal((3, 65), dtype, device, seed, 1.0) for seed in range(3)]
    got = second(values[0].clone().requires_grad_(), *values[1:])
    exact = [value.double() for value in values]
    expected = second(exact[0].requires_grad_(), *exact[1:])
    assert got.dtype == dtype
    assert expected.abs().max() > 0.01
    assert (got - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()


def test_third_derivative(device: str) -> None:
    """Along a line, where it is one number."""
    row = normal((2, 6), torch.float64, device)

    def thrice(softmax: Callable[..., torch.Tensor]) -> torch.Tensor:
        def along(step: torch.Tensor) -> torch.Tensor:
            return softmax(row * step, None, 0.5, True, diagonal=2).square().sum()

        return torch.func.grad(torch.func.grad(torch.func.grad(along)))(row.new_tensor(1.3))

    got = thrice(sms.scaled_mask_softmax)
    assert got.abs() > 0.01
    torch.testing.assert_close(got, thrice(_composite.forward))


def test_nothing_of_an_excluded_cell_reaches_a_second_derivative(device: str) -> None:
    """NaN in gradients that arrive where the probability is zero: by the mask, by causality and by -inf scores."""
    x = normal((4, 6), torch.float64, device)
    x[2, 0] = -torch.inf
    mask = torch.zeros(4, 6, dtype=torch.bool, device=device)
    mask[:, 1] = True
    grad, tangent = normal((4, 6), torch.float64, device, 2), normal((4, 6), torch.float64, device, 3)

    def second(poison: float) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        y = sms.scaled_mask_softmax(leaf, mask, 0.5, True, diagonal=1)
        (dx,) = torch.autograd.grad(y, leaf, grad.masked_fill(y == 0, poison), create_graph=True)
        return torch.autograd.grad(dx, leaf, tangent.masked_fill(y.detach() == 0, poison))[0]

    clean = second(0.0)
    assert clean.any()
    torch.testing.assert_close(second(torch.nan), clean, rtol=0, atol=0)


@pytest.mark.parametrize("in_place", [False, True])
def test_tangents_of_x_and_of_a_float_mask(device: str, in_place: bool) -> None:
    """A mask's tangent is not scaled, and a mask of rank 3 is per sample."""
    x, x_tangent = (normal((2, 3, 4, 5), torch.float64, device, seed) for seed in (0, 1))
    mask, mask_tangent = (normal((2, 1, 5), torch.float64, device, seed) for seed in (2, 3))

    def with_tangent(x_part: float, mask_part: float) -> torch.Tensor:
        with forward_ad.dual_level():
            scores = forward_ad.make_dual(x.clone(), x_tangent * x_part) if x_part else x.clone()
            added = forward_ad.make_dual(mask, mask_tangent * mask_part) if mask_part else mask
            if in_place:
                y = sms.scaled_mask_softmax_(scores, added, 0.5, True, diagonal=1)
            else:
                y = sms.scaled_mask_softmax(scores, added, 0.5, True, diagonal=1)
            return forward_ad.unpack_dual(y).tangent

    step = 1e-6
    for x_part, mask_part in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
        difference = [
            sms.scaled_mask_softmax(
                x + sign * x_part * x_tangent, mask + sign * mask_part * mask_tangent, 0.5, True, diagonal=1
            )
            for sign in (step, -step)
        ]
        expected = (difference[0] - difference[1]) / (2 * step)
        assert expected.any()
        torch.testing.assert_close(with_tangent(x_part, mask_part), expected, rtol=1e-6, atol=1e-8)


def squares(softmax: Callable[..., torch.Tensor]) -> Function:
    return lambda row: softmax(row, None, 0.5, True, diagonal=2).square().sum()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian])
def test_transforms_and_vmap_of_them(
    device: str, transform: Callable[..., Callable[[torch.Tensor], torch.Tensor]]
) -> None:
    """Rows: a sample of rank 1 stays the row with query index 0."""
    x = normal((3, 5), torch.float64, device)
    batched = torch.vmap(transform(squares(sms.scaled_mask_softmax)))(x)
    assert batched.any()
    torch.testing.assert_close(batched, torch.stack([transform(squares(sms.scaled_mask_softmax))(row) for row in x]))
    torch.testing.assert_close(batched, torch.stack([transform(squares(_composite.forward))(row) for row in x]))


def test_jvp_and_vjp(device: str) -> None:
    x, tangent = normal((2, 4, 5), torch.float64, device), normal((2, 4, 5), torch.float64, device, 1)
    function = out_of_place(None)
    y, y_tangent = torch.func.jvp(function, (x,), (tangent,))
    again, pull_back = torch.func.vjp(function, x)
    assert same_bits(y, function(x))
    assert same_bits(y, again)
    # The Jacobian is symmetric.
    torch.testing.assert_close(pull_back(tangent)[0], y_tangent)
    assert y_tangent.any()


BATCHES: list[tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int | None, int | None]]] = [
    # shapes of x and mask, and their batch dimensions
    ((3, 5), None, (0, None)),
    ((3, 5), (3, 5), (0, 0)),
    ((5,), (3, 5), (None, 0)),
    ((3, 5), (5,), (0, None)),
    ((5, 3), (3,), (1, 0)),
    ((3, 4, 5), (4, 1), (0, None)),
    ((3, 2, 4, 5), (2, 4, 5), (0, None)),
    ((3, 2, 4, 5), (3, 2, 1, 5), (0, 0)),
    ((3, 2, 2, 4, 5), (3, 2, 4, 5), (0, 0)),
    ((3, 2, 2, 4, 5), (2, 4, 5), (0, None)),
    ((2, 2, 4, 5), (3, 2, 4, 5), (None, 0)),
    ((2, 2, 4, 3, 5), (2, 4, 5, 3), (3, 3)),
    ((3, 2, 2, 4, 5), (2, 2, 4, 5), (0, None)),
]


@pytest.mark.parametrize(("shape", "mask_shape", "dims"), BATCHES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "same"])
def test_vmap_is_each_sample_by_itself(
    device: str,
    kind: str,
    shape: tuple[int, ...],
    mask_shape: tuple[int, ...] | None,
    dims: tuple[int | None, int | None],
) -> None:
    x = normal(shape, torch.float32, device)
    mask = None if mask_shape is None else random_mask(kind, mask_shape, torch.float32, device)

    def sample(tensor: torch.Tensor | None, dim: int | None, index: int) -> torch.Tensor | None:
        return tensor if tensor is None or dim is None else tensor.select(dim, index)

    def function(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return sms.scaled_mask_softmax(scores, mask, 0.5, True, diagonal=3)

    def gradient(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return torch.func.grad(lambda scores: function(scores, mask).square().sum())(scores)

    for form in (function, gradient):
        expected = torch.stack([form(sample(x, dims[0], index), sample(mask, dims[1], index)) for index in range(3)])
        got = torch.vmap(form, in_dims=dims)(x, mask)
        assert got.any()
        assert same_bits(got, expected)


def test_vmap_in_place(device: str) -> None:
    x = normal((3, 4, 5), torch.float32, device)
    mask = random_mask("bool", (3, 4, 5), torch.float32, device)
    assert mask is not None
    expected = torch.stack([sms.scaled_mask_softmax(part, one, 0.5, True) for part, one in zip(x, mask)])
    torch.vmap(lambda x, mask: sms.scaled_mask_softmax_(x, mask, 0.5, True))(x, mask)
    assert same_bits(x, expected)
    # One x cannot hold the results of several masks.
    with pytest.raises(RuntimeError, match="vmap"):
        torch.vmap(sms.scaled_mask_softmax_, in_dims=(None, 0))(x[0], mask)


IN_PLACE_FORMS: dict[str, Callable[..., torch.Tensor]] = {
    "whole": lambda x, mask, sink: sms.scaled_mask_softmax_(x, mask, 0.5, True, sink=sink, window=3),
    "returned by its argument": lambda x, mask, sink: (sms.scaled_mask_softmax_(x, mask, 0.5), x)[1],
    "of a copy": lambda x, mask, sink: sms.scaled_mask_softmax_(x * 2, mask, 0.5, sink=sink) + x,
    "of a view": lambda x, mask, sink: (sms.scaled_mask_softmax_(x[1:], mask[1:], 0.5, sink=sink), x)[1],
    "of a transpose": lambda x, mask, sink: (sms.scaled_mask_softmax_(x.mT[..., :4, :], mask[..., :4]), x)[1],
    "of a diagonal": lambda x, mask, sink: (sms.scaled_mask_softmax_(x.diagonal(dim1=0, dim2=1), scale=2.0), x)[1],
    "twice": lambda x, mask, sink: sms.scaled_mask_softmax_(sms.scaled_mask_softmax_(x, mask), mask, 3.0).mT,
    "out of place": lambda x, mask, sink: sms.scaled_mask_softmax(x.mT.flatten(1), sink=None) * 2,
}


@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
@pytest.mark.parametrize("form", IN_PLACE_FORMS.values(), ids=IN_PLACE_FORMS)
def test_functionalize(device: str, form: Callable[..., torch.Tensor], remove: str) -> None:
    """The same results, written to the same places, and no operator that writes but for the arguments' last copy."""
    mask = random_mask("same", (2, 1, 4, 5), torch.float32, device)
    assert mask is not None
    x, sink = normal((2, 3, 4, 5), torch.float32, device), normal((3,), torch.float32, device, 2)

    def of_a_batch(*given: torch.Tensor) -> torch.Tensor:
        return torch.vmap(form)(*(tensor[None] for tensor in given))

    for function in (form, of_a_batch):
        given, expected = x.clone(), x.clone()
        result = function(expected, mask, sink)
        functional = torch.func.functionalize(function, remove=remove)
        assert same_bits(functional(given, mask, sink), result)
        assert same_bits(given, expected)
        traced = make_fx(functional)(x.clone(), mask, sink)
        operators = [node.target for node in traced.graph.nodes if node.op == "call_function"]
        ours = [op for op in operators if op.namespace == "scaled_mask_softmax"]
        assert ours
        written = [op for op in operators if op._schema.is_mutable]
        assert set(written) <= {torch.ops.aten.copy_.default}
        given = x.clone()
        assert same_bits(traced(given, mask, sink), result)
        assert same_bits(given, expected)


def test_functionalize_of_gradients(device: str) -> None:
    mask = random_mask("same", (4, 5), torch.float32, device)
    x = normal((2, 3, 4, 5), torch.float32, device)

    def loss(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return sms.scaled_mask_softmax_(x * 2, mask, 0.5, True).square().sum()

    gradient = torch.func.grad(loss, argnums=(0, 1))
    for got, expected in zip(torch.func.functionalize(gradient)(x, mask), gradient(x, mask), strict=True):
        assert same_bits(got, expected)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf, mask), leaf)
    assert same_bits(torch.func.grad(loss)(x, mask), expected)


def test_in_place_of_overlapping_scores_in_a_transform(device: str) -> None:
    x = normal((2, 1, 5), torch.float32, device)
    for transform in (torch.vmap, torch.func.functionalize, torch.func.jacrev):
        with pytest.raises(ValueError, match=r"so elements may share memory; expected separate memory for each"):
            transform(lambda x: sms.scaled_mask_softmax_((x * 2).expand(*x.shape[:-2], 3, 5)))(x)


def test_nested_vmap(device: str) -> None:
    x = normal((2, 3, 4, 5), torch.float32, device)
    masks = random_mask("bool", (3, 4, 5), torch.float32, device)
    assert masks is not None
    got = torch.vmap(lambda x: torch.vmap(lambda x, mask: sms.scaled_mask_softmax(x, mask, 0.5))(x, masks))(x)
    assert same_bits(got, sms.scaled_mask_softmax(x, masks[None], 0.5))


def test_vmap_refuses_what_each_sample_would(device: str) -> None:
    x = torch.zeros(3, 4, 5, device=device)
    for mask_shape in ((3, 4, 5), (1, 4, 5), (2, 5)):
        with pytest.raises(ValueError, match="scaled_mask_softmax: mask has shape"):
            torch.vmap(lambda x, shape=mask_shape: sms.scaled_mask_softmax(x, torch.zeros(shape, device=device)))(x)
    # With a dimension more, lengths and sinks would find theirs in the batch.
    numbers = torch.arange(3, device=device)
    refused = [
        ((x[0, 0],), {}),
        ((x[0], torch.zeros(1, 5, device=device)), {}),
        ((x[0],), {"key_lengths": torch.arange(4, device=device)}),
        ((x,), {"key_lengths": numbers}),
        ((x,), {"sink": numbers.float()}),
        ((x[None],), {"key_lengths": numbers[:1]}),
        ((x[None],), {"sink": numbers[:1].float()}),
    ]
    for (scores, *mask), options in refused:
        of = functools.partial(lambda x, mask, options: sms.scaled_mask_softmax(x, *mask, **options), mask=mask)
        with pytest.raises(ValueError, match=r"scaled_mask_softmax: ") as alone:
            of(scores[0], options=options)
        for dims in (0, None):
            samples = {name: option.expand(scores.shape[0], *option.shape) for name, option in options.items()}
            given = options if dims is None else samples
            with pytest.raises(ValueError, match=r"scaled_mask_softmax: ") as batched:
                torch.vmap(lambda x, given, of=of: of(x, options=given), in_dims=(0, dims))(scores, given)
            assert str(batched.value) == str(alone.value)


def test_per_sample_gradients_of_a_layer(device: str) -> None:
    """vmap over grad with respect to a parameter, as differential privacy and influence functions do."""
    weight = normal((5, 5), torch.float64, device)
    x = normal((3, 4, 5), torch.float64, device, 1)

    def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return sms.scaled_mask_softmax(x @ weight, None, 0.5, True).square().sum()

    got = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, x)
    torch.testing.assert_close(got, torch.stack([torch.func.grad(loss)(weight, one) for one in x]))


@pytest.mark.parametrize("form", [out_of_place, in_place, in_place_on_a_view])
def test_saved_tensors_hooks_serve_first_and_second_derivatives(
    device: str, form: Callable[[torch.Tensor | None], Function]
) -> None:
    x = normal((2, 4, 5), torch.float64, device).requires_grad_()
    grad = normal((2, 4, 5), torch.float64, device, 1)
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        packed.append(tensor.detach().clone())
        return len(packed) - 1

    def derivatives() -> tuple[torch.Tensor, torch.Tensor]:
        (dx,) = torch.autograd.grad(form(None)(x), x, grad, create_graph=True)
        return dx, torch.autograd.grad(dx.square().sum(), x)[0]

    expected = derivatives()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: packed[index]):
        (dx,) = torch.autograd.grad(form(None)(x), x, grad)
    assert packed
    assert same_bits(dx, expected[0])
    with torch.autograd.graph.save_on_cpu():
        assert all(same_bits(got, wanted) for got, wanted in zip(derivatives(), expected))


def test_checkpointing_recomputes(device: str) -> None:
    calls = 0

    def layer(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return sms.scaled_mask_softmax(x * 2, None, 0.5, True)

    x = normal((3, 65), torch.float32, device).requires_grad_()
    grad = normal(x.shape, torch.float32, device, 3)
    (expected,) = torch.autograd.grad(layer(x), x, grad)
    for reentrant in (False, True):
        calls = 0
        x.grad = None
        checkpoint.checkpoint(layer, x, use_reentrant=reentrant).backward(grad)
        assert calls == 2
        assert same_bits(x.grad, expected)


def test_selective_checkpointing_can_keep_the_operator(device: str) -> None:
    """A policy finds the operator by its name; kept, it does not run again."""
    operator = torch.ops.scaled_mask_softmax.scaled_mask_softmax.default

    class Calls(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Calls.count += func is operator
            return func(*args, **(kwargs or {}))

    def layer(x: torch.Tensor) -> torch.Tensor:
        return sms.scaled_mask_softmax(x * 2, None, 0.5).sin()

    x = normal((3, 9), torch.float32, device).requires_grad_()
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    for kept, calls in ([operator], 1), ([torch.ops.aten.mul.Tensor], 2):
        Calls.count = 0
        with Calls():
            y = checkpoint.checkpoint(
                layer,
                x,
                use_reentrant=False,
                context_fn=lambda kept=kept: checkpoint.create_selective_checkpoint_contexts(kept),
            )
            (dx,) = torch.autograd.grad(y.sum(), x)
        assert same_bits(dx, expected)
        assert Calls.count == calls


def test_y_modified_before_a_second_backward_raises(device: str) -> None:
    x = normal((3, 9), torch.float64, device).requires_grad_()
    y = sms.scaled_mask_softmax(x)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(dx.sum(), x)


# torch's own, while it takes its arguments over.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_autograd(device: str, backend: str) -> None:
    """torch's compiler of backward passes traces through the operator's own."""
    x = normal((3, 4, 9), torch.float32, device).requires_grad_()
    mask = random_mask("bool", (4, 9), torch.float32, device)

    def step() -> torch.Tensor:
        x.grad = None
        sms.scaled_mask_softmax(x * 2, mask, 0.5, True, diagonal=3).square().sum().backward()
        hidden = x * 3
        sms.scaled_mask_softmax_(hidden, None, 0.5)
        hidden.square().sum().backward()
        return x.grad

    def torchs_own() -> torch.Tensor:
        x.grad = None
        torch.softmax(x * 2, -1).square().sum().backward()
        return x.grad

    def compiled(function: Callable[[], torch.Tensor]) -> torch.Tensor:
        torch._dynamo.reset()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True)):
            return function()

    expected = step()
    try:
        got = compiled(step)
    except torch._dynamo.exc.Unsupported:
        # torch 2.11 with inductor on CUDA refuses every backward pass.
        with pytest.raises(torch._dynamo.exc.Unsupported):
            compiled(torchs_own)
        pytest.skip(f"torch {torch.__version__} does not compile the backward pass of torch.softmax here either")
    torch.testing.assert_close(got, expected)


def test_transforms_inside_a_compiled_function(device: str) -> None:
    def per_sample(x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(torch.func.grad(squares(sms.scaled_mask_softmax)))(x)

    torch._dynamo.reset()
    x = normal((3, 5), torch.float64, device)
    torch.testing.assert_close(torch.compile(per_sample, fullgraph=True, backend="aot_eager")(x), per_sample(x))
