"""The operator as a module."""

from __future__ import annotations

import copy
import math
import pickle
import re
from typing import Any

import pytest
import torch
from checks import normal, random_mask, same_bits

from scaled_mask_softmax import ScaledMaskSoftmax, scaled_mask_softmax


def test_is_the_function_with_its_options_fixed(device: str) -> None:
    x = normal((2, 3, 5, 7), torch.float32, device)
    mask = random_mask("bool", (2, 1, 1, 7), torch.float32, device)
    module = ScaledMaskSoftmax(0.25, True, diagonal=2)
    lengths = torch.tensor([5, 2], device=device)
    windowed = ScaledMaskSoftmax(0.25, window=3)
    expected = scaled_mask_softmax(x, mask, 0.25, window=3, key_lengths=lengths)
    assert same_bits(windowed(x, mask, key_lengths=lengths), expected)
    for module_in_mode in (module.train(), module.eval()):
        assert same_bits(module_in_mode(x, mask), scaled_mask_softmax(x, mask, 0.25, True, diagonal=2))
        assert same_bits(module_in_mode(x), scaled_mask_softmax(x, None, 0.25, True, diagonal=2))
    assert same_bits(ScaledMaskSoftmax()(x), scaled_mask_softmax(x))


def test_is_differentiable(device: str) -> None:
    x = normal((3, 5), torch.float32, device).requires_grad_()
    grad = normal((3, 5), torch.float32, device, 2)
    (dx,) = torch.autograd.grad(ScaledMaskSoftmax(0.5, True)(x), x, grad)
    (expected,) = torch.autograd.grad(scaled_mask_softmax(x, None, 0.5, True), x, grad)
    assert dx.any()
    assert same_bits(dx, expected)


def test_holds_no_state() -> None:
    module = ScaledMaskSoftmax(0.5)
    assert not module.state_dict()
    assert not list(module.parameters())
    assert not list(module.buffers())


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (ScaledMaskSoftmax(), "ScaledMaskSoftmax(scale=1)"),
        (ScaledMaskSoftmax(64**-0.5, True), "ScaledMaskSoftmax(scale=0.125, is_causal=True)"),
        (ScaledMaskSoftmax(2, True, diagonal=-1), "ScaledMaskSoftmax(scale=2, is_causal=True, diagonal=-1)"),
        (
            ScaledMaskSoftmax(0.1, window=4, dropout_p=0.25),
            "ScaledMaskSoftmax(scale=0.1, window=4, dropout_p=0.25)",
        ),
    ],
)
def test_repr_names_what_is_not_default(module: ScaledMaskSoftmax, text: str) -> None:
    assert repr(module) == text


@pytest.mark.parametrize(
    ("name", "value", "exception", "text"),
    [
        ("dropout_p", 1.5, ValueError, "dropout_p is 1.5; expected a probability, 0 <= dropout_p <= 1. Use 0 for no"),
        ("dropout_p", math.nan, ValueError, "dropout_p is nan; expected a probability"),
        ("dropout_p", -1, ValueError, "dropout_p is -1; expected a probability"),
        ("dropout_p", "0.1", TypeError, "dropout_p is a str; expected a Python number"),
        ("dropout_p", torch.tensor(0.1), TypeError, "dropout_p is a Tensor; expected a Python number"),
        ("dropout_p", torch.nn.Parameter(torch.tensor(0.1)), TypeError, "dropout_p is a Parameter; expected a Python"),
        ("scale", math.inf, ValueError, "scale is inf; expected a finite number"),
        ("scale", torch.tensor(0.1), TypeError, "scale is a torch.Tensor; expected a Python number"),
        ("is_causal", 1, TypeError, "is_causal is an int; expected a bool"),
        ("diagonal", 0.5, TypeError, "diagonal is a float; expected an int"),
        ("diagonal", 2**63, ValueError, f"diagonal is {2**63}; expected an integer of 64 bits"),
        ("window", 0, ValueError, "window is 0; expected at least 1"),
        ("window", 2.0, TypeError, "window is a float; expected an int"),
        ("window", True, TypeError, "window is a bool; expected an int"),
    ],
)
def test_options_are_refused_where_they_are_given(name: str, value: Any, exception: type[Exception], text: str) -> None:
    """Not in the first call of a training run; and what is refused does not stay."""
    match = "^scaled_mask_softmax: " + re.escape(text)
    with pytest.raises(exception, match=match):
        ScaledMaskSoftmax(**{name: value})
    module = ScaledMaskSoftmax(0.5, True, diagonal=1, window=3, dropout_p=0.25).eval()
    before = repr(module)
    with pytest.raises(exception, match=match):
        setattr(module, name, value)
    assert repr(module) == before
    assert not list(module.parameters())


def test_options_may_be_assigned(device: str) -> None:
    module = ScaledMaskSoftmax(0.5)
    module.scale, module.is_causal, module.diagonal, module.window, module.dropout_p = 2, True, 1, 2, 1
    x = normal((3, 5), torch.float32, device)
    assert not module(x).any()
    assert same_bits(module.eval()(x), scaled_mask_softmax(x, None, 2, True, diagonal=1, window=2))


def test_dropout_is_a_matter_of_training(device: str) -> None:
    x = normal((2, 3, 5), torch.float32, device)
    module = ScaledMaskSoftmax(0.5, True, dropout_p=0.5)
    for twin in (module, copy.deepcopy(module)):
        torch.manual_seed(3)
        got = twin(x)
        torch.manual_seed(3)
        assert same_bits(got, scaled_mask_softmax(x, None, 0.5, True, dropout_p=0.5))
        assert (got == 0).any()
        assert same_bits(twin.eval()(x), scaled_mask_softmax(x, None, 0.5, True))


def test_copies_and_pickles(device: str) -> None:
    module = ScaledMaskSoftmax(0.5, True, diagonal=1)
    x = normal((3, 5), torch.float32, device)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(twin) == repr(module)
        assert same_bits(twin(x), module(x))


def test_compiles_inside_a_model(device: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), ScaledMaskSoftmax(0.5, True)).to(device)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = normal((3, 6), torch.float32, device)
    torch.testing.assert_close(compiled(x), model(x))
