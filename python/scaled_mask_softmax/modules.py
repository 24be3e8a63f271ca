"""The operator as a module."""

from __future__ import annotations

import torch

from .functional import scaled_mask_softmax


class ScaledMaskSoftmax(torch.nn.Module):
    """:func:`scaled_mask_softmax` with the options of a layer fixed. Holds no parameters, buffers or other state.

    Args:
        scale, is_causal, diagonal, window, dropout_p: as for :func:`scaled_mask_softmax`; dropout applies in training
            mode only.

    Shapes, dtypes and errors are those of :func:`scaled_mask_softmax`.
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
