"""The operator as a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import _checks
from .functional import check_option_types, scaled_mask_softmax

_CHECKS: dict[str, Callable[[Any], None]] = {
    "scale": _checks.check_scale,
    "is_causal": lambda _: None,
    "diagonal": lambda _: None,
    "window": _checks.check_window,
    "dropout_p": _checks.check_dropout,
}


class ScaledMaskSoftmax(torch.nn.Module):
    """:func:`scaled_mask_softmax` with the options of a layer fixed. Holds no parameters, buffers or other state.

    Args:
        scale, is_causal, diagonal, window, dropout_p: as for :func:`scaled_mask_softmax`; dropout applies in training
            mode only. Attributes of these names may be assigned later.

    Shapes, dtypes and errors are those of :func:`scaled_mask_softmax`; options are refused where they are given.
    """

    def __init__(
        self,
        scale: float = 1.0,
        is_causal: bool = False,
        *,
        diagonal: int = 0,
        window: int | None = None,
        dropout_p: float = 0.0,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.is_causal = is_causal
        self.diagonal = diagonal
        self.window = window
        self.dropout_p = dropout_p

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CHECKS:
            check_option_types(**{name: value})
            _CHECKS[name](value)
        super().__setattr__(name, value)

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        key_lengths: torch.Tensor | None = None,
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the probabilities of scores x ``[..., Sq, Sk]``."""
        # TorchScript compiles this branch and not the other.
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            if self.training and self.dropout_p != 0.0:
                dropped: torch.Tensor = torch.ops.scaled_mask_softmax.scaled_mask_softmax(
                    x,
                    mask,
                    float(self.scale),
                    self.is_causal,
                    diagonal=self.diagonal,
                    window=self.window,
                    key_lengths=key_lengths,
                    sink=sink,
                    dropout_p=float(self.dropout_p),
                )
                return dropped
            y: torch.Tensor = torch.ops.scaled_mask_softmax.scaled_mask_softmax(
                x,
                mask,
                float(self.scale),
                self.is_causal,
                diagonal=self.diagonal,
                window=self.window,
                key_lengths=key_lengths,
                sink=sink,
            )
            return y
        return scaled_mask_softmax(
            x,
            mask,
            self.scale,
            self.is_causal,
            diagonal=self.diagonal,
            window=self.window,
            key_lengths=key_lengths,
            sink=sink,
            dropout_p=self.dropout_p if self.training else 0.0,
        )

    def extra_repr(self) -> str:
        options = [f"scale={self.scale:g}"]
        if self.is_causal:
            options.append("is_causal=True")
        if self.diagonal:
            options.append(f"diagonal={self.diagonal}")
        if self.window is not None:
            options.append(f"window={self.window}")
        if self.dropout_p:
            options.append(f"dropout_p={self.dropout_p:g}")
        return ", ".join(options)
