"""The operator in torch.nn.MultiheadAttention and behind Megatron-LM's interface."""

from __future__ import annotations

import copy
import enum
import itertools
import math
from typing import Any

import pytest
import torch
from checks import assert_is_forward, dropout_of_the_operator, normal, random_mask, same_bits
from torch import nn

from scaled_mask_softmax.integrations import megatron, mha


def layer_and_twin(device: str, **options: Any) -> tuple[nn.MultiheadAttention, mha.MultiheadAttention]:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 4, **options).to(device, torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.4)
    twin = mha.convert(copy.deepcopy(layer))
    assert type(twin) is mha.MultiheadAttention
    assert twin.state_dict().keys() == layer.state_dict().keys()
    return layer, twin


def compare(layer: nn.Module, twin: nn.Module, arguments: tuple[torch.Tensor, ...], **options: Any) -> None:
    """Outputs, weights, and gradients of arguments and parameters."""
    results = []
    for module in (layer, twin):
        leaves = [argument.clone().requires_grad_() for argument in arguments]
        if all(argument is arguments[0] for argument in arguments):
            leaves = leaves[:1] * 3
        torch.manual_seed(1)
        output, weights = module(*leaves, **options)
        loss = output.square().sum() + (0 if weights is None else weights.square().sum())
        inputs = [*dict.fromkeys(leaves), *module.parameters()]
        results.append([output, weights, *torch.autograd.grad(loss, inputs, allow_unused=True)])
    for expected, got in zip(*results, strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 8, "vdim": 12}]
)
def test_mha_is_that_of_torch(device: str, options: dict[str, Any], average: bool, batch_first: bool) -> None:
    layer, twin = layer_and_twin(device, batch_first=batch_first, **options)
    shapes = [(3, 5, 16), (3, 7, options.get("kdim", 16)), (3, 7, options.get("vdim", 16))]
    query, key, value = (normal(shape, torch.float64, device, seed, 1.0) for seed, shape in enumerate(shapes))
    padding = torch.zeros(3, 7, dtype=torch.bool, device=device)
    padding[0, 4:] = padding[1, 6:] = True
    causal = torch.ones(5, 7, dtype=torch.bool, device=device).triu(1)
    by_head = random_mask("bool", (12, 5, 7), torch.float64, device)
    assert by_head is not None
    by_head[..., 0] = False
    additive = normal((5, 7), torch.float64, device, 4)
    if not batch_first:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    for key_padding_mask, attn_mask, is_causal in [
        (None, None, False),
        (padding, None, False),
        (None, causal, False),
        (None, causal, True),
        (padding, causal, True),
        (padding, by_head, False),
        (padding.double() * -3, additive, False),
    ]:
        compare(
            layer,
            twin,
            (query, key, value),
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            is_causal=is_causal,
            average_attn_weights=average,
        )


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_mha_masks_of_one_key_leave_appended_columns_alone(device: str, options: dict[str, Any]) -> None:
    layer, twin = layer_and_twin(device, batch_first=True, **options)
    query, key = (normal(shape, torch.float64, device, 1, 1.0) for shape in ((2, 3, 16), (2, 1, 16)))
    padding = torch.tensor([[True], [False]], device=device)
    compare(layer, twin, (query, key, key.clone()), key_padding_mask=padding)
    compare(layer, twin, (query, key, key.clone()), attn_mask=normal((3, 1), torch.float64, device, 2))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64], ids=str)
def test_mha_refuses_integer_masks(device: str, dtype: torch.dtype) -> None:
    _, twin = layer_and_twin(device, batch_first=True)
    x = normal((2, 3, 16), torch.float64, device)
    with pytest.raises(TypeError, match=r"key_padding_mask has dtype .*key_padding_mask\.bool\(\)"):
        twin(x, x, x, key_padding_mask=torch.zeros(2, 3, dtype=dtype, device=device))
    with pytest.raises(TypeError, match=r"attn_mask has dtype"):
        twin(x, x, x, attn_mask=torch.zeros(3, 3, dtype=dtype, device=device))


SEQUENCES: dict[str, tuple[int, ...]] = {"query": (3, 5, 16), "key": (3, 7, 8), "value": (3, 7, 12)}


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"query": (16,)}, "query has shape"),
        ({"query": (1, 3, 5, 16)}, "query has shape"),
        ({"query": (3, 5, 8)}, "query has shape"),
        ({"key": (7, 8)}, "key has shape"),
        ({"key": (3, 7, 16)}, "key has shape"),
        ({"key": (1, 7, 8), "value": (1, 7, 12)}, "key has shape"),
        ({"value": (1, 7, 12)}, "value has shape"),
        ({"value": (3, 6, 12)}, "value has shape"),
        ({"value": (3, 1, 12)}, "value has shape"),
        ({"query": (1, 5, 16)}, "key has shape"),
        ({"key_padding_mask": (7,)}, "key_padding_mask has shape"),
        ({"key_padding_mask": (1, 7)}, "key_padding_mask has shape"),
        ({"key_padding_mask": (3, 1)}, "key_padding_mask has shape"),
        ({"key_padding_mask": (3, 5, 7)}, "key_padding_mask has shape"),
        ({"attn_mask": (7,)}, "attn_mask has shape"),
        ({"attn_mask": (1, 7)}, "attn_mask has shape"),
        ({"attn_mask": (5, 1)}, "attn_mask has shape"),
        ({"attn_mask": (1, 5, 7)}, "attn_mask has shape"),
        ({"attn_mask": (4, 5, 7)}, "attn_mask has shape"),
        ({"attn_mask": (12, 1, 7)}, "attn_mask has shape"),
        ({"attn_mask": (3, 4, 5, 7)}, "attn_mask has shape"),
        ({"attn_mask": (7, 5), "is_causal": True}, "attn_mask has shape"),
    ],
    ids=str,
)
def test_mha_refuses_the_shapes_that_torch_refuses(
    device: str, changed: dict[str, Any], text: str, batch_first: bool
) -> None:
    layer, twin = layer_and_twin(device, batch_first=batch_first, kdim=8, vdim=12)
    given: dict[str, Any] = {}
    for name, shape in {**SEQUENCES, **changed}.items():
        if name == "is_causal":
            given[name] = shape
            continue
        tensor = torch.zeros(shape, dtype=torch.bool if name.endswith("mask") else torch.float64, device=device)
        given[name] = tensor.transpose(0, 1) if name in SEQUENCES and tensor.dim() == 3 and not batch_first else tensor
    with pytest.raises((AssertionError, RuntimeError)):
        layer(**given)
    with pytest.raises(ValueError, match=rf"^scaled_mask_softmax: {text} \[.*; expected \[.*\. \w+ .*\.$"):
        twin(**given)


def test_mha_of_one_sequence_refuses_what_torch_refuses(device: str) -> None:
    layer, twin = layer_and_twin(device)
    x = normal((6, 16), torch.float64, device)
    for masks in (
        {"key_padding_mask": (1, 6)},
        {"key_padding_mask": (5,)},
        {"attn_mask": (1, 6, 6)},
        {"attn_mask": (6,)},
    ):
        given = {name: torch.zeros(shape, dtype=torch.bool, device=device) for name, shape in masks.items()}
        with pytest.raises((AssertionError, RuntimeError)):
            layer(x, x, x, **given)
        with pytest.raises(ValueError, match=r"mask has shape .*; expected \[.* Use"):
            twin(x, x, x, **given)
    by_head = torch.zeros(4, 6, 6, dtype=torch.bool, device=device)
    compare(layer, twin, (x, x, x), attn_mask=by_head)
    with pytest.raises(
        ValueError, match=r"key has shape \[1, 6, 16\] for query of shape \[6, 16\]; expected \[S, 16\]"
    ):
        twin(x, x[None], x[None])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
def test_mha_refuses_nested_tensors(device: str) -> None:
    _, twin = layer_and_twin(device, batch_first=True)
    x = torch.nested.nested_tensor([normal((size, 16), torch.float64, device) for size in (2, 3)])
    with pytest.raises(ValueError, match=r"query is a nested tensor; expected a dense one. Use torch.nested.to_padded"):
        twin(x, x, x)


def test_mha_of_one_sequence_and_of_itself(device: str) -> None:
    layer, twin = layer_and_twin(device)
    x = normal((6, 16), torch.float64, device)
    padding = torch.tensor([False, False, False, False, True, True], device=device)
    compare(layer, twin, (x, x, x), key_padding_mask=padding)


def test_mha_drops_out_in_training(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's, once that draws its random numbers as the operator does."""
    layer, twin = layer_and_twin(device, dropout=0.4, batch_first=True)
    x = normal((2, 6, 16), torch.float64, device)
    monkeypatch.setattr(torch.nn.functional, "dropout", dropout_of_the_operator)
    compare(layer, twin, (x, x, x))
    compare(layer.eval(), twin.eval(), (x, x, x))


def test_mha_without_weights_is_torch_itself(device: str) -> None:
    layer, twin = layer_and_twin(device, batch_first=True)
    x = normal((2, 6, 16), torch.float64, device)
    compare(layer, twin, (x, x, x), need_weights=False)


def test_mha_gives_zeros_where_nothing_may_be_attended(device: str) -> None:
    _, twin = layer_and_twin(device, batch_first=True)
    x = normal((2, 6, 16), torch.float64, device)
    padding = torch.zeros(2, 6, dtype=torch.bool, device=device)
    padding[1] = True
    output, weights = twin(x, x, x, key_padding_mask=padding)
    assert not weights[1].any()
    assert torch.equal(output[1], twin.out_proj.bias.expand(6, 16))


def test_mha_refuses_a_causal_hint_without_a_mask(device: str) -> None:
    layer, twin = layer_and_twin(device)
    x = normal((6, 16), torch.float64, device)
    for module in (layer, twin):
        with pytest.raises(RuntimeError, match="Need attn_mask"):
            module(x, x, x, is_causal=True)


def test_mha_conversion_finds_the_layers_of_a_model(device: str) -> None:
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 2).to(
        device, torch.float64
    )
    x, memory = normal((2, 5, 16), torch.float64, device), normal((2, 7, 16), torch.float64, device, 1)
    expected = model(x, memory)
    assert mha.convert(mha.convert(model)) is model
    assert sum(type(module) is mha.MultiheadAttention for module in model.modules()) == 4
    torch.testing.assert_close(model(x, memory), expected)


class TheirMaskType(enum.Enum):
    """Megatron's own enumeration, as another module defines it."""

    padding = 1
    causal = 2
    no_mask = 3


def never(*arguments: Any) -> torch.Tensor:
    raise AssertionError("the mask function was called")


def of_megatron(
    dtype: torch.dtype, mask_type: Any, scale: float | None = 0.5, **options: Any
) -> megatron.FusedScaleMaskSoftmax:
    return megatron.FusedScaleMaskSoftmax(
        dtype == torch.float16, dtype == torch.bfloat16, mask_type, True, never, True, scale, **options
    )


SHAPES = [(2, 3, 5, 5), (2, 3, 1, 9), (1, 3, 7, 10)]


@pytest.mark.parametrize("mask_type", [*megatron.AttnMaskType, *TheirMaskType, "causal"], ids=str)
def test_megatron_mask_types(device: str, mask_type: Any) -> None:
    """Against a mask that says which cells are out: the last query sees every key."""
    name = getattr(mask_type, "name", mask_type)
    for dtype, shape in itertools.product((torch.float16, torch.bfloat16, torch.float32), SHAPES):
        module = of_megatron(dtype, mask_type)
        x = normal(shape, dtype, device)
        padding = random_mask("bool", (shape[0], 1, 1, shape[-1]), dtype, device)
        future = torch.ones(shape[-2:], dtype=torch.bool, device=device).triu(1 + shape[-1] - shape[-2])
        out = future if "causal" in name else torch.zeros_like(future)
        assert_is_forward(module(x, None), x, out, 0.5)
        assert_is_forward(module(x, padding), x, out | padding, 0.5)
        assert same_bits(module(x, padding.to(torch.uint8)), module(x, padding))


@pytest.mark.parametrize("window", [(2, 0), (2, 1), (-1, 1), (0, 0), (2, -1)])
def test_megatron_windows(device: str, window: tuple[int, int]) -> None:
    left, right = window
    for shape in SHAPES:
        x = normal(shape, torch.float32, device)
        position = torch.arange(shape[-2], device=device)[:, None] + shape[-1] - shape[-2]
        key = torch.arange(shape[-1], device=device)
        out = torch.zeros(shape[-2:], dtype=torch.bool, device=device)
        if left >= 0:
            out |= key < position - left
        if right >= 0:
            out |= key > position + right
        module = of_megatron(torch.float32, "arbitrary", window_size=window)
        assert_is_forward(module(x, None), x, out, 0.5)
        if right <= 0:
            causal = of_megatron(torch.float32, "causal", window_size=window)
            assert_is_forward(causal(x, None), x, out | (key > position), 0.5)


def test_megatron_softmax_offset_is_a_sink(device: str) -> None:
    """A logit of each head, shared by the batch."""
    x, offset = normal((2, 3, 5, 5), torch.float64, device), normal((3,), torch.float64, device, 1)
    with_offset = torch.cat([x * 0.5, offset.view(1, 3, 1, 1).expand(2, 3, 5, 1)], -1)
    expected = with_offset.softmax(-1)[..., :-1]
    torch.testing.assert_close(of_megatron(torch.float64, "no_mask")(x, None, offset), expected)


def test_megatron_scale_gradients_and_refusals(device: str) -> None:
    x = normal((2, 3, 5, 5), torch.float64, device, spread=1.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: of_megatron(torch.float64, "causal", None)(x, None), x)
    assert_is_forward(of_megatron(torch.float64, "padding", None)(x, None), x)
    with pytest.raises(
        ValueError, match=r"attn_mask_type is diagonal; expected one of padding, causal.* Use AttnMaskTy"
    ):
        of_megatron(torch.float32, "diagonal")
    with pytest.raises(ValueError, match=r"input_in_fp16 and input_in_bf16 are both True; expected one.* Set the one"):
        megatron.FusedScaleMaskSoftmax(True, True, "causal", True, None, True, None)
    for window in ((1, -2), (-2, 1), (1,), (1.5, 0), 3):
        with pytest.raises(ValueError, match=r"window_size is .*; expected None or two integers .* Use -1"):
            of_megatron(torch.float32, "causal", window_size=window)
    with pytest.raises(ValueError, match=r"scale is inf; expected a finite number. Check"):
        of_megatron(torch.float32, "causal", math.inf)
    with pytest.raises(TypeError, match=r"scale is a str; expected a Python number. Use"):
        of_megatron(torch.float32, "causal", "1")  # type: ignore[arg-type]
    module = of_megatron(torch.float64, "padding")
    with pytest.raises(ValueError, match=r"input has shape \[3, 5, 5\]; expected 4 dimensions, .* Use input.unsqueeze"):
        module(x[0], None)
    with pytest.raises(TypeError, match=r"mask has dtype torch.float64; expected torch.bool, .* Use mask.bool\(\)"):
        module(x, torch.zeros(5, 5, dtype=torch.float64, device=device))
    with pytest.raises(
        ValueError, match=r"softmax_offset has shape \[1, 3, 1, 1\] .*; expected \[3\], .* Use softmax_"
    ):
        module(x, None, torch.zeros(1, 3, 1, 1, dtype=torch.float64, device=device))
    assert repr(of_megatron(torch.float32, "causal")) == "FusedScaleMaskSoftmax(attn_mask_type=causal, scale=0.5)"
