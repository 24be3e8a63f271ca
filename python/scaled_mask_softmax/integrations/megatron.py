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

from .. import _checks
from .._checks import PREFIX
from ..functional import check_option_types, scaled_mask_softmax


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
        ValueError: both dtype flags; an unknown attn_mask_type; a window_size that is not two numbers from -1 on; a
            scale that is not finite.
        TypeError: a scale that is no number.
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
                f"{PREFIX}attn_mask_type is {attn_mask_type}; expected one of {', '.join(AttnMaskType.__members__)}. "
                "Use AttnMaskType of this module or of Megatron."
            )
        if input_in_fp16 and input_in_bf16:
            raise ValueError(
                f"{PREFIX}input_in_fp16 and input_in_bf16 are both True; expected one of them at most. Set the one "
                "that is the dtype of the scores, or neither."
            )
        if window_size is not None and not (
            isinstance(window_size, (tuple, list))
            and len(window_size) == 2
            and all(type(size) is int and size >= -1 for size in window_size)
        ):
            raise ValueError(
                f"{PREFIX}window_size is {window_size}; expected None or two integers (left, right), each -1 or more. "
                "Use -1 for a side without a limit."
            )
        if scale is not None:
            check_option_types(scale=scale)
            _checks.check_scale(scale)
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
            mask: None, or bool and **True where masked out**, broadcasting to input; integers are taken as bool.
            softmax_offset: a sink logit for each head, ``[np]``.

        Raises:
            ValueError: input that is not 4-D; a softmax_offset of another shape.
            TypeError: a mask of a float type.
            TypeError, ValueError: otherwise as :func:`scaled_mask_softmax`.
        """
        if input.dim() != 4:
            raise ValueError(
                f"{PREFIX}input has shape {list(input.shape)}; expected 4 dimensions, [b, np, sq, sk]. Use "
                "input.unsqueeze, or scaled_mask_softmax for any rank."
            )
        if mask is not None and mask.dtype != torch.bool:
            if mask.dtype.is_floating_point or mask.dtype.is_complex:
                raise TypeError(
                    f"{PREFIX}mask has dtype {mask.dtype}; expected torch.bool, True where masked out. Use "
                    "mask.bool() if nonzero means masked out, or scaled_mask_softmax to add it."
                )
            mask = mask.bool()
        if softmax_offset is not None and softmax_offset.shape != input.shape[1:2]:
            raise ValueError(
                f"{PREFIX}softmax_offset has shape {list(softmax_offset.shape)} for input of shape "
                f"{list(input.shape)}; expected [{input.shape[1]}], a logit for each head. Use "
                "softmax_offset.reshape(-1)."
            )
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
