"""What the package offers by name, and the types that its functions take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from checks import normal, same_bits

import scaled_mask_softmax as sms

FUNCTIONS = [sms.scaled_mask_softmax, sms.scaled_mask_softmax_]
SIGNATURE = (
    "(x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0, is_causal: bool = False, *, "
    "diagonal: int = 0, window: int | None = None, key_lengths: torch.Tensor | None = None, "
    "sink: torch.Tensor | None = None, dropout_p: float = 0.0) -> torch.Tensor"
)


def test_names() -> None:
    assert sorted(sms.__all__) == [
        "ScaledMaskSoftmax",
        "__version__",
        "build_info",
        "library_path",
        "scaled_mask_softmax",
        "scaled_mask_softmax_",
    ]
    for name in sms.__all__:
        assert hasattr(sms, name)
    assert (Path(sms.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_signature(function: Callable[..., torch.Tensor]) -> None:
    assert str(inspect.signature(function)).replace("'", "") == SIGNATURE


def test_documentation() -> None:
    text = inspect.getdoc(sms.scaled_mask_softmax) or ""
    for fact in ("True where masked out", "mask=~sdpa_mask", "d_k**-0.5", "diagonal=Sk - Sq", "mask[None]"):
        assert fact in text, fact
    for name in sms.__all__:
        assert name == "__version__" or inspect.getdoc(getattr(sms, name))


def test_build_info_and_library_path() -> None:
    info = sms.build_info()
    assert info["version"] == sms.__version__
    assert info["native"] is True
    assert Path(sms.library_path()).is_file()
    info["native"] = False
    assert sms.build_info()["native"] is True, "a caller's changes stay the caller's"


def test_the_in_place_form_returns_x(device: str) -> None:
    x = normal((2, 3), torch.float32, device)
    expected = sms.scaled_mask_softmax(x, None, 0.5)
    assert sms.scaled_mask_softmax_(x, None, 0.5) is x
    assert same_bits(x, expected)
    # Through the keywords as well.
    y = normal((2, 3), torch.float32, device)
    assert sms.scaled_mask_softmax_(y, None, 0.5, True, diagonal=7) is y
    assert same_bits(y, expected)


@pytest.mark.parametrize("scale", [2, numpy.float64(2), True + 1, 2.0])
def test_a_scale_may_be_any_number_of_python(device: str, scale: Any) -> None:
    x = normal((2, 3), torch.float32, device)
    assert same_bits(sms.scaled_mask_softmax(x, None, scale), sms.scaled_mask_softmax(x, None, 2.0))


TENSOR = torch.zeros(())
WRONG_TYPES = [
    ({"x": [1.0]}, "x is a list; expected a torch.Tensor. Use torch.as_tensor(x)."),
    ({"x": None}, "x is None; expected a torch.Tensor. Use torch.as_tensor(x)."),
    ({"x": numpy.zeros((2, 3))}, "x is a ndarray; expected a torch.Tensor. Use torch.as_tensor(x)."),
    ({"mask": numpy.zeros(3)}, "mask is a ndarray; expected a torch.Tensor or None. Use torch.as_tensor(mask)."),
    ({"mask": True}, "mask is a bool; expected a torch.Tensor or None. Use scale for a factor, or is_causal."),
    ({"mask": 0.125}, "mask is a float; expected a torch.Tensor or None. Use scale for a factor, or is_causal."),
    ({"scale": None}, "scale is None; expected a Python number. Use 1.0, or d_k ** -0.5 as attention does."),
    ({"scale": True}, "scale is a bool; expected a Python number. Use is_causal for a causal mask."),
    ({"scale": Fraction(1, 2)}, "scale is a Fraction; expected a Python number. Use float(scale)."),
    ({"is_causal": 1}, "is_causal is an int; expected a bool. Use bool(is_causal)."),
    ({"is_causal": None}, "is_causal is None; expected a bool. Use bool(is_causal)."),
    ({"is_causal": TENSOR}, "is_causal is a torch.Tensor; expected a bool. Use bool(is_causal)."),
    ({"diagonal": None}, "diagonal is None; expected an int. Use 0."),
    ({"diagonal": TENSOR}, "diagonal is a Tensor; expected an int. Use int(diagonal)."),
    ({"window": 2.0}, "window is a float; expected an int. Use int(window)."),
    (
        {"window": (4, 0)},
        "window is a tuple; expected an int. Use is_causal=True, diagonal=right and window=left + right + 1 for (left, "
        "right).",
    ),
    ({"key_lengths": [1]}, "key_lengths is a list; expected a torch.Tensor or None. Use torch.as_tensor(key_lengths)."),
    ({"sink": 0.0}, "sink is a float; expected a torch.Tensor or None. Use torch.as_tensor(sink)."),
    ({"dropout_p": None}, "dropout_p is None; expected a Python number. Use 0 for no dropout."),
]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("changes", "text"), WRONG_TYPES, ids=lambda value: str(value)[:24])
def test_wrong_types(function: Callable[..., torch.Tensor], changes: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError) as caught:
        function(**{"x": torch.zeros(2, 3), **changes})
    assert str(caught.value) == f"scaled_mask_softmax: {text}"


@pytest.mark.parametrize("function", FUNCTIONS)
def test_integers_out_of_range(function: Callable[..., torch.Tensor]) -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"^scaled_mask_softmax: scale is an integer of 1330 bits; expected a number"):
        function(x, None, -(2**1329))
    with pytest.raises(ValueError, match=r"^scaled_mask_softmax: window is \d+; expected an integer of 64 bits"):
        function(x, window=2**64)


def test_parameters_subclasses_and_stand_ins_are_tensors() -> None:
    parameter = torch.nn.Parameter(normal((3, 4), torch.float32, "cpu"))
    assert same_bits(sms.scaled_mask_softmax(parameter), sms.scaled_mask_softmax(parameter.detach()))

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return sms.scaled_mask_softmax(x, mask, 0.5, True, diagonal=x.shape[-1] - x.shape[-2])

    mask = torch.zeros(4, dtype=torch.bool)
    traced = torch.fx.symbolic_trace(Layer())
    assert same_bits(traced(parameter, mask), Layer()(parameter, mask))
