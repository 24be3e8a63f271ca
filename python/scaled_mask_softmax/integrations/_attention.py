"""Attention around the operator, without a copy of keys or values for grouped-query heads."""

from __future__ import annotations

import torch


def scores_of(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """``query @ key^T`` as ``[B, H, Sq, Sk]`` from query ``[B, H, Sq, D]`` and key ``[B, H / groups, Sk, D]``."""
    batch, heads, queries, width = query.shape
    key_heads = key.shape[1]
    if key_heads == heads:
        return query @ key.mT
    grouped = query.reshape(batch, key_heads, heads // key_heads * queries, width)
    return (grouped @ key.mT).view(batch, heads, queries, key.shape[2])


def mixed(probabilities: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``probabilities @ value`` as ``[B, Sq, H, Dv]``, contiguous, likewise."""
    batch, heads, queries, columns = probabilities.shape
    value_heads = value.shape[1]
    if value_heads != heads:
        probabilities = probabilities.reshape(batch, value_heads, heads // value_heads * queries, columns)
    result = (probabilities @ value).view(batch, heads, queries, value.shape[-1])
    return result.transpose(1, 2).contiguous()
