"""torch.nn.MultiheadAttention with the operator inside, for callers who want the attention weights.

:func:`convert` turns the layers of a model; :class:`MultiheadAttention` takes the place of torch's class. Parameters,
their names and state dicts are those of torch's. Without ``need_weights`` the call is torch's own, with its fused
attention.

The one difference in results: a query that may attend to nothing gets zeros instead of NaN.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch.nn import functional

from .._checks import PREFIX
from ..functional import scaled_mask_softmax

_Module = TypeVar("_Module", bound=torch.nn.Module)


def convert(model: _Module) -> _Module:
    """Let every torch.nn.MultiheadAttention in model, itself included, use the operator. Returns model.

    Subclasses of torch's class are left as they are. Converting again changes nothing.
    """
    for module in model.modules():
        if type(module) is torch.nn.MultiheadAttention:
            module.__class__ = MultiheadAttention
    return model


class MultiheadAttention(torch.nn.MultiheadAttention):
    """torch.nn.MultiheadAttention whose weights come from one pass over the scores: no copy for scale and mask."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As torch.nn.MultiheadAttention.forward: bool masks are True where masked out, float masks are added.

        is_causal tells, as there, that attn_mask is the causal mask; it is then not read.

        Raises:
            ValueError: shapes that do not belong together, as torch refuses them; a nested tensor.
            TypeError: an integer mask.
            RuntimeError: is_causal without attn_mask, as in torch.
        """
        if not need_weights:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        self._check(query, key, value, key_padding_mask, attn_mask)
        batched = query.dim() == 3
        if not batched:
            query, key, value = (tensor.unsqueeze(0) for tensor in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        batch, queries, _ = query.shape
        query, key, value = self._projected(query, key, value)
        appended = 0  # columns past those that the masks know
        if self.bias_k is not None and self.bias_v is not None:
            key = torch.cat([key, self.bias_k.expand(batch, 1, -1)], 1)
            value = torch.cat([value, self.bias_v.expand(batch, 1, -1)], 1)
            appended += 1
        query, key, value = (
            tensor.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for tensor in (query, key, value)
        )
        if self.add_zero_attn:
            key, value = (functional.pad(tensor, (0, 0, 0, 1)) for tensor in (key, value))
            appended += 1
        # Appended columns are attended by all, so with them the causal mask is no longer the triangle alone.
        causal = is_causal and appended == 0
        mask = self._mask(key_padding_mask, None if causal else attn_mask, batch, query.dtype)
        if mask is not None and appended:
            mask = functional.pad(mask, (0, appended))
        dropout_p = self.dropout if self.training else 0.0
        weights = scaled_mask_softmax(query @ key.mT, mask, self.head_dim**-0.5, causal, dropout_p=dropout_p)
        output = self.out_proj((weights @ value).transpose(1, 2).reshape(batch, queries, self.embed_dim))
        if average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return output.squeeze(0), weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _check(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None,
        attn_mask: torch.Tensor | None,
    ) -> None:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.is_nested:
                raise ValueError(
                    f"{PREFIX}{name} is a nested tensor; expected a dense one. Use torch.nested.to_padded_tensor, and "
                    "a key_padding_mask that is True at the padding."
                )
        batch_dim = None if query.dim() == 2 else 0 if self.batch_first else 1
        length_dim = 1 if batch_dim == 0 else 0
        layout = "[S, E]" if batch_dim is None else "[N, S, E]" if self.batch_first else "[S, N, E]"
        if query.dim() not in (2, 3):
            raise ValueError(
                f"{PREFIX}query has shape {list(query.shape)}; expected [S, E] or {layout}, S queries of size E for "
                "each of N sequences. Use query.flatten or query.unsqueeze."
            )
        for name, tensor, size in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            expected: list[int | str] = ["S"] * query.dim()
            if batch_dim is not None:
                expected[batch_dim] = query.shape[batch_dim]
            if name == "value":
                expected[length_dim] = key.shape[length_dim]
            expected[-1] = size
            if tensor.dim() != query.dim() or any(
                given != wanted for given, wanted in zip(tensor.shape, expected, strict=True) if wanted != "S"
            ):
                raise ValueError(
                    f"{PREFIX}{name} has shape {list(tensor.shape)} for query of shape {list(query.shape)}; expected "
                    f"[{', '.join(map(str, expected))}], which is {layout}. Give each sequence its own {name}s, and "
                    "see batch_first of the layer."
                )
        queries, columns = query.shape[length_dim], key.shape[length_dim]
        batch = () if batch_dim is None else (query.shape[batch_dim],)
        for name, mask, shapes in (
            ("key_padding_mask", key_padding_mask, [(*batch, columns)]),
            ("attn_mask", attn_mask, [(queries, columns), ((*batch, 1)[0] * self.num_heads, queries, columns)]),
        ):
            if mask is None:
                continue
            if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
                raise TypeError(
                    f"{PREFIX}{name} has dtype {mask.dtype}; expected torch.bool, True where a key is masked out, or "
                    f"a float type, which is added. Use {name}.bool()."
                )
            if tuple(mask.shape) not in shapes:
                raise ValueError(
                    f"{PREFIX}{name} has shape {list(mask.shape)} for query of shape {list(query.shape)} and key of "
                    f"shape {list(key.shape)}; expected {' or '.join(str(list(shape)) for shape in shapes)}. Use "
                    f"{name}.expand where it broadcasts."
                )

    def _projected(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if self.in_proj_weight is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif query is key and key is value:
            q, k, v = functional.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
            return q, k, v
        else:
            weights = self.in_proj_weight.chunk(3)
        q, k, v = (functional.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        return q, k, v

    def _mask(
        self,
        key_padding_mask: torch.Tensor | None,
        attn_mask: torch.Tensor | None,
        batch: int,
        dtype: torch.dtype,
    ) -> torch.Tensor | None:
        """One mask of both, that broadcasts to ``[B, H, Sq, Sk]``."""
        padding = None if key_padding_mask is None else key_padding_mask[:, None, None, :]
        mask = attn_mask
        if mask is not None:
            mask = mask.view(batch, self.num_heads, *mask.shape[1:]) if mask.dim() == 3 else mask[None, None]
        given = [one if one.dtype == torch.bool else one.to(dtype) for one in (padding, mask) if one is not None]
        if len(given) < 2:
            return given[0] if given else None
        first, second = given
        if first.dtype == torch.bool and second.dtype == torch.bool:
            return first | second
        if first.dtype == torch.bool:
            return second.masked_fill(first, -torch.inf)
        if second.dtype == torch.bool:
            return first.masked_fill(second, -torch.inf)
        return first + second
