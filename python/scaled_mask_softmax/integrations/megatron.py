"""A drop-in for Megatron-LM's FusedScaleMaskSoftmax: its constructor and call, without its limits.

No limit on rows, columns or their divisors, all four floating dtypes, and a row whose every cell is masked gives
zeros. Assign it where a model looks the class up::

    megatron.core.transformer.dot_product_attention.FusedScaleMaskSoftmax = FusedScaleMaskSoftmax
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch

from ..functional import scaled_mask_softmax


class AttnMaskType(enum.Enum):
    """The names that Megatron's enumeration has; members of either are taken."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
    causal_bottom_right = 6


_CAUSAL = ("causal", "padding_causal", "causal_bottom_right")


class FusedScaleMaskSoftmax(torch.nn.Module):
    """Scale, mask and softmax of scores ``[b, np, sq, sk]``.

    Args:
        input_in_fp16, input_in_bf16: kept for the interface; at most one may be set. The dtype is the input's.
        attn_mask_type: a member of :class:`AttnMaskType` or of Megatron's enumeration. With the causal ones the last
            query sees every key, so it fits any sq and sk, decoding with a cache included.
        scaled_masked_softmax_fusion: kept for the interface: the operator serves every case.
        mask_func: kept for the interface, and not called: masked cells get exactly 0, whatever value it would fill in.
        softmax_in_fp32: kept for the interface: 16-bit scores are always computed in float32.
        scale: factor of the scores, or None for 1.
        window_size: None, or how many keys ``(left, right)`` of its own position a query sees; -1 is unlimited.

    Raises:
        ValueError: both dtype flags; an unknown attn_mask_type.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: Any,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[..., torch.Tensor] | None,
        softmax_in_fp32: bool,
        scale: float | None,
        window_size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        name = getattr(attn_mask_type, "name", attn_mask_type)
        if name not in AttnMaskType.__members__:
            raise ValueError(
                f"scaled_mask_softmax: attn_mask_type is {attn_mask_type}; expected one of "
                f"{', '.join(AttnMaskType.__members__)}."
            )
        if input_in_fp16 and input_in_bf16:
            raise ValueError(
                "scaled_mask_softmax: both input_in_fp16 and input_in_bf16 are set; expected one of them at most."
            )
        self.attn_mask_type = attn_mask_type
        self.is_causal = name in _CAUSAL
        self.scale = 1.0 if scale is None else float(scale)
        self.window_size = window_size

    def forward(
        self,
        input: torch.Tensor,
        mask: torch.Tensor | None = None,
        softmax_offset: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return probabilities of the shape and dtype of input.

        Args:
            mask: None, or bool and **True where masked out**, broadcasting to input; another dtype is taken as bool.
            softmax_offset: a sink logit for each head, ``[np]``.
        """
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.bool()
        diagonal = input.shape[-1] - input.shape[-2]
        is_causal, window = self.is_causal, None
        if self.window_size is not None:
            left, right = self.window_size
            right = 0 if is_causal else right
            is_causal = right >= 0
            diagonal += max(right, 0)
            window = left + max(right, 0) + 1 if left >= 0 else None
        return scaled_mask_softmax(
            input, mask, self.scale, is_causal, diagonal=diagonal, window=window, sink=softmax_offset
        )

    def extra_repr(self) -> str:
        return f"attn_mask_type={self.attn_mask_type}, scale={self.scale:g}"
