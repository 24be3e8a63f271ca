"""attn_implementation="scaled_mask_softmax" against "eager" in small models with random weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import dropout_of_the_operator

# The libraries that it brings warn of themselves.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    from scaled_mask_softmax.integrations import transformers as integration

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning")]

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
Build = Callable[..., Any]


def llama(**changes: Any) -> Any:
    config = transformers.LlamaConfig(**{**SIZES, **TOKENS, "num_key_value_heads": 2, **changes})
    return transformers.LlamaForCausalLM(config)


def gemma2(**changes: Any) -> Any:
    """Softcap in every layer, a sliding window in every other."""
    settings = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 3.0}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**{**SIZES, **TOKENS, **settings, **changes}))


def bert(**changes: Any) -> Any:
    settings = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(**{**SIZES, **TOKENS, **settings, **changes}))


def gpt_oss(**changes: Any) -> Any:
    """A sink in every layer, a sliding window in every other."""
    settings = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "num_local_experts": 4}
    settings |= {"num_experts_per_tok": 2}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**{**SIZES, **TOKENS, **settings, **changes}))


def t5(**changes: Any) -> Any:
    """A learned bias, an encoder and a decoder with attention to it."""
    settings = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 61}
    settings |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**{**settings, **TOKENS, **changes}))


MODELS: list[Build] = [llama, gemma2, bert, t5, gpt_oss]


def built(build: Build, implementation: str, device: str, **changes: Any) -> Any:
    integration.register()
    torch.manual_seed(0)
    model = build(attn_implementation=implementation, **changes).to(device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("sinks"):
                parameter.normal_(0, 0.2)  # attention that is not nearly uniform
    return model


def batch(device: str, padding: str) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 61, (3, 11), generator=torch.Generator().manual_seed(0)).to(device)
    attended = torch.ones_like(tokens)
    if padding == "right":
        attended[0, 7:] = attended[1, 3:] = 0
    elif padding == "left":
        attended[0, :4] = attended[1, :8] = 0
    return {"input_ids": tokens, "attention_mask": attended}


def run(model: Any, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """Logits of the tokens that are not padding, all attention maps, and gradients of all parameters."""
    # Nor does the token count that a causal model would predict from padding.
    attended = given["attention_mask"].bool()
    labels = given["input_ids"].masked_fill(~(attended & attended.roll(1, -1)), -100)
    torch.manual_seed(1)
    result = model(**given, labels=labels, output_attentions=True)
    result.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    maps = [tensor for name, tensors in result.items() if "attentions" in name for tensor in tensors]
    return result.logits[given["attention_mask"].bool()], maps, gradients


def assert_like_eager(build: Build, device: str, padding: str, **changes: Any) -> None:
    given = batch(device, padding)
    model = built(build, integration.NAME, device, **changes)
    assert model.config._attn_implementation == "scaled_mask_softmax"
    expected_model = built(build, "eager", device, **changes)
    got, expected = run(model, given), run(expected_model, given)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-4, atol=1e-5)
    assert len(got[1]) == len(expected[1]) > 0
    attended = given["attention_mask"].bool()
    for got_map, expected_map in zip(got[1], expected[1]):
        rows = attended if got_map.shape[-2] == attended.shape[-1] else torch.ones_like(attended)
        torch.testing.assert_close(got_map.movedim(2, 1)[rows], expected_map.movedim(2, 1)[rows], rtol=1e-4, atol=1e-6)
    assert got[2].keys() == expected[2].keys()
    for name, gradient in got[2].items():
        torch.testing.assert_close(
            gradient, expected[2][name], rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("build", MODELS)
def test_outputs_maps_and_gradients_are_those_of_eager(device: str, build: Build, padding: str) -> None:
    assert_like_eager(build, device, padding)


@pytest.mark.parametrize(
    ("build", "changes"),
    [
        (llama, {"attention_dropout": 0.3}),
        (bert, {"attention_probs_dropout_prob": 0.3}),
        (gemma2, {"attention_dropout": 0.3}),
        (t5, {"dropout_rate": 0.3}),
    ],
)
def test_dropout_in_training(
    device: str, build: Build, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As eager, once torch's dropout draws its random numbers as the operator does."""
    monkeypatch.setattr(torch.nn.functional, "dropout", dropout_of_the_operator)
    assert_like_eager(lambda **options: build(**options).train(), device, "right", **changes)


@pytest.mark.parametrize("build", [llama, gemma2, gpt_oss])
def test_decoding_with_a_cache_is_that_of_eager(device: str, build: Build) -> None:
    given = batch(device, "left")
    tokens = [
        built(build, implementation, device).eval().generate(**given, max_new_tokens=8, do_sample=False)
        for implementation in (integration.NAME, "eager")
    ]
    assert torch.equal(*tokens)
    assert tokens[0].shape[1] > given["input_ids"].shape[1]


def test_bool_and_additive_masks(device: str) -> None:
    """True is attended in transformers' masks, and grouped heads need no copy of keys."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 5, 8, generator=generator).to(device)
    key, value = (torch.randn(2, 2, 7, 8, generator=generator).to(device) for _ in range(2))
    attended = (torch.rand(2, 1, 5, 7, generator=generator) < 0.7).to(device)
    attended[..., 0] = True
    module = torch.nn.Module()
    module.is_causal = True
    additive = torch.zeros(2, 1, 5, 7, device=device).masked_fill(~attended, torch.finfo(torch.float32).min)
    repeated_key, repeated_value = (tensor.repeat_interleave(2, 1) for tensor in (key, value))
    expected = (query @ repeated_key.mT * 8**-0.5 + additive).softmax(-1)
    for mask in (attended, additive, additive.double()):
        output, weights = integration.attention_forward(module, query, key, value, mask)
        torch.testing.assert_close(weights, expected)
        torch.testing.assert_close(output, (expected @ repeated_value).transpose(1, 2))
        assert output.is_contiguous()
    # Without a mask, module says whether causality holds; the last query sees all keys of a cache.
    _, weights = integration.attention_forward(module, query, key, value, None)
    assert torch.equal(weights == 0, torch.ones(5, 7, device=device, dtype=torch.bool).triu(3).expand(2, 4, 5, 7))
    _, weights = integration.attention_forward(module, query, key, value, None, is_causal=False)
    assert not (weights == 0).any()


def test_switching_the_implementation_of_a_loaded_model(device: str) -> None:
    given = batch(device, "none")
    model = built(llama, "eager", device).eval()
    with torch.no_grad():
        expected = model(**given).logits
        model.set_attn_implementation(integration.register())
        torch.testing.assert_close(model(**given).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_model_compiles_whole(device: str) -> None:
    given = batch(device, "right")
    model = built(llama, integration.NAME, device).eval()
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(**given).logits, model(**given).logits, rtol=1e-4, atol=1e-5)
