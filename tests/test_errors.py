"""Every error: its type and its whole text, alike on each device, for fake tensors and in the composite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from error_cases import CASES, FUNCTION_CASES, OTHER_KINDS, Case
from torch._subclasses.fake_tensor import FakeTensorMode

import scaled_mask_softmax as sms
from scaled_mask_softmax import _composite

OPS = torch.ops.scaled_mask_softmax
NATIVE: dict[str, Callable[..., Any]] = {
    "forward": OPS.scaled_mask_softmax.default,
    "in_place": OPS.scaled_mask_softmax_.default,
    "backward": OPS.scaled_mask_softmax_backward.default,
    "dropout": OPS.scaled_mask_softmax.dropout,
    "in_place_dropout": OPS.scaled_mask_softmax_.dropout,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "forward": sms.scaled_mask_softmax,
    "in_place": sms.scaled_mask_softmax_,
    "dropout": sms.scaled_mask_softmax,
    "in_place_dropout": sms.scaled_mask_softmax_,
}
COMPOSITE: dict[str, Callable[..., Any]] = {
    "forward": _composite.forward,
    "in_place": _composite.forward_in_place,
    "backward": _composite.backward,
    "dropout": _composite.forward_dropout,
    "in_place_dropout": _composite.forward_in_place_dropout,
}


def assert_refused(functions: dict[str, Callable[..., Any]], case: Case, device: str) -> None:
    args, kwargs = case.arguments(device)
    values = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    versions = [value._version for value in values]
    with pytest.raises(case.exception) as caught:
        functions[case.form](*args, **kwargs)
    name = "cuda:0" if device == "cuda" else device
    assert caught.type is case.exception
    # A C++ stack may follow where torch was asked to show one.
    assert str(caught.value) == case.text.replace("{device}", name)
    assert versions == [value._version for value in values], "an argument was written before the error"


def named(case: Case) -> str:
    return case.name


@pytest.mark.sanitizer
@pytest.mark.parametrize("case", CASES, ids=named)
def test_operator(device: str, case: Case) -> None:
    assert_refused(NATIVE, case, device)


@pytest.mark.parametrize("case", [*(case for case in CASES if case.form != "backward"), *FUNCTION_CASES], ids=named)
def test_function(device: str, case: Case) -> None:
    assert_refused(FUNCTIONS, case, device)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_composite(device: str, case: Case) -> None:
    assert_refused(COMPOSITE, case, device)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_fake_tensors(device: str, case: Case) -> None:
    with FakeTensorMode():
        assert_refused(NATIVE, case, device)


@pytest.mark.parametrize("case", [case for case in CASES if "on another device" not in case.name], ids=named)
def test_meta_tensors(case: Case) -> None:
    assert_refused(NATIVE, case, "meta")


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.form in ("forward", "dropout") and " x of " not in case.name], ids=named
)
def test_where_a_gradient_is_needed(device: str, case: Case) -> None:
    (x, *args), kwargs = case.arguments(device)
    with pytest.raises(case.exception) as caught:
        sms.scaled_mask_softmax(x.requires_grad_(), *args, **kwargs)
    assert str(caught.value) == case.text.replace("{device}", "cuda:0" if device == "cuda" else device)


# torch's own, of each kind.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantize.* are deprecated:UserWarning")
@pytest.mark.parametrize("case", OTHER_KINDS, ids=named)
def test_tensors_that_are_not_dense_numbers(device: str, case: Case) -> None:
    assert_refused(FUNCTIONS, case, device)
    assert_refused(COMPOSITE, case, device)


def test_an_error_leaves_x_of_the_in_place_form_as_it_was(device: str) -> None:
    x = torch.arange(12.0, device=device).view(3, 4)
    before = x.clone()
    for bad in (torch.zeros(5, device=device), torch.zeros(3, 4, dtype=torch.int64, device=device)):
        with pytest.raises((ValueError, TypeError)):
            sms.scaled_mask_softmax_(x, bad)
    assert torch.equal(x, before)
    assert x._version == 0


def test_diagonal_is_a_64_bit_integer(device: str) -> None:
    x = torch.zeros(3, 4, device=device)
    for diagonal in (2**63 - 1, -(2**63)):
        sms.scaled_mask_softmax(x, None, 1.0, True, diagonal=diagonal)
