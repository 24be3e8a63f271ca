"""The operator as an attention implementation of the transformers library.

After :func:`register`, ``attn_implementation="scaled_mask_softmax"`` serves every model that chooses its attention by
name. Attention weights are returned, as by ``"eager"``.

The one difference in results from ``"eager"``: a query that may attend to nothing, as in a padded row, gets zeros
instead of the mean of all values.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.masking_utils import sdpa_mask

from ..functional import scaled_mask_softmax
from ._attention import mixed, scores_of

NAME = "scaled_mask_softmax"


def register() -> str:
    """Make ``attn_implementation="scaled_mask_softmax"`` available, and return that name. May be called again."""
    transformers.AttentionInterface.register(NAME, attention_forward)
    # Bool masks, True where attended; None where causality or nothing at all excludes.
    transformers.AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in transformers' own convention.

    Args:
        query, key, value: ``[B, H, Sq, D]``, ``[B, H / groups, Sk, D]``, ``[B, H / groups, Sk, Dv]``.
        attention_mask: bool, **True where attended** (the library's convention, the opposite of the operator's), or a
            float mask to be added; broadcasts to ``[B, H, Sq, Sk]``. A sliding window is part of it.
        scaling: of the scores, by default ``D**-0.5``.
        dropout: of the weights, where module is in training mode.
        is_causal: by default module's attribute; without effect beside a mask.
        softcap: scores become ``softcap * tanh(scores / softcap)`` before the mask.
        position_bias: added to the scores after scaling.
        s_aux: a sink logit for each head, ``[H]``.
        options: of other implementations, ignored: a sliding window is part of the mask.

    Returns:
        The output ``[B, Sq, H, Dv]`` and the weights ``[B, H, Sq, Sk]``.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = scores_of(query, key)
    if softcap is not None:
        scores, scale = torch.tanh(scores * (scale / softcap)), softcap
    if position_bias is not None:
        scores, scale = torch.add(position_bias, scores, alpha=scale), 1.0
    queries, columns = scores.shape[-2:]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and queries > 1
    if attention_mask is None:
        mask = None
    elif attention_mask.dtype == torch.bool:
        mask = ~attention_mask
    else:
        mask = attention_mask.to(scores.dtype)
    weights = scaled_mask_softmax(
        scores,
        mask,
        scale,
        causal,
        diagonal=columns - queries if causal else 0,
        sink=s_aux,
        dropout_p=dropout if module.training else 0.0,
    )
    return mixed(weights, value), weights
