"""One call of the operator, compared with the oracle in every respect."""

from __future__ import annotations

import gc
from typing import Any

import oracle
import tolerances
import torch

import scaled_mask_softmax as sms

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SIXTEEN_BIT = [torch.float16, torch.bfloat16]
MASK_KINDS = ["none", "bool", "same", "float32"]


def short(value: Any) -> str | None:
    """Test ids: float16 for torch.float16, 2x3x5 for a shape."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, tuple) and all(isinstance(size, int) for size in value):
        return "x".join(map(str, value)) or "scalar"
    return None


def mask_kinds(dtype: torch.dtype) -> list[str]:
    """A float32 mask is a kind of its own for 16-bit scores only."""
    return MASK_KINDS if dtype in SIXTEEN_BIT else MASK_KINDS[:3]


DTYPES_AND_KINDS = [(dtype, kind) for dtype in DTYPES for kind in mask_kinds(dtype)]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(shape: Any, dtype: torch.dtype, device: str, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    """The same numbers on every device."""
    numbers = torch.randn(
        shape, generator=generator(seed), dtype=torch.float64 if dtype.itemsize > 4 else torch.float32
    )
    return (numbers * spread).to(dtype).to(device)


def random_mask(kind: str, shape: Any, dtype: torch.dtype, device: str, seed: int = 1) -> torch.Tensor | None:
    """bool: a third True. Float: about 0, a fifth -inf."""
    if kind == "none":
        return None
    drawn = torch.rand(shape, generator=generator(seed))
    if kind == "bool":
        return (drawn < 0.33).to(device)
    values = normal(shape, torch.float32, "cpu", seed + 1, 1.0).masked_fill(drawn < 0.2, -torch.inf)
    return values.to(dtype if kind == "same" else torch.float32).to(device)


def memory_before() -> int:
    """Bytes in use on the CUDA device, from which on its peak is measured. What earlier tests left to the garbage
    collector is freed first: between the two readings it would count as a peak."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak_beyond(before: int) -> int:
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bit patterns, so that NaN compares."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(integer)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def assert_within(actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor, what: str) -> None:
    """NaN and infinities where the oracle has them; elsewhere an error of at most bound."""
    assert actual.shape == expected.shape
    error = (actual.detach().double() - expected).abs()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    wrong = ~(same | (error <= bound))
    if not wrong.any():
        return
    where = wrong.nonzero()
    index = tuple(where[0].tolist())
    raise AssertionError(
        f"{what}: {len(where)} of {wrong.numel()} cells are wrong, the first at {list(index)}: "
        f"{actual[index].item()!r} for {expected[index].item()!r}, allowed {bound.expand_as(error)[index].item():.3g}; "
        f"largest error {error[wrong].nan_to_num(nan=torch.inf).max().item():.3g}"
    )


class Snapshot:
    """All memory behind some tensors, to be found unmodified later."""

    def __init__(self, *tensors: torch.Tensor | None) -> None:
        self._bytes = [t.untyped_storage() for t in tensors if t is not None]
        self._copies = [storage.clone() for storage in self._bytes]

    def assert_unmodified(self) -> None:
        for now, before in zip(self._bytes, self._copies, strict=True):
            device = now.device
            assert torch.equal(
                torch.empty(0, dtype=torch.uint8, device=device).set_(now),
                torch.empty(0, dtype=torch.uint8, device=device).set_(before),
            ), "an argument was modified"


def dropout_of_the_operator(
    x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """torch.nn.functional.dropout, drawing what the operator's dropout would draw for its result x."""
    if not training or p == 0:
        return x
    return torch.where(torch.ops.scaled_mask_softmax.dropout_keep(x.detach(), p), x / (1 - p), 0.0)


def assert_is_forward(
    y: torch.Tensor,
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    diagonal: int = 0,
    window: int | None = None,
    key_lengths: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    exact_scores: bool = False,
) -> None:
    """y is what the oracle makes of the rest."""
    scores, _ = oracle.scores(x, mask, scale, is_causal, diagonal, window, key_lengths)
    expected, _ = oracle.softmax_with_sink(scores, sink)
    sizes = scores if sink is None else torch.cat([scores, oracle.column_of_sinks(x, sink)], dim=-1)
    assert_within(y, expected, tolerances.forward_bound(x.dtype, sizes, expected, exact_scores), "forward")
    no_weight = (scores == -torch.inf) & ~expected.isnan()
    assert not y.masked_select(no_weight).count_nonzero(), "a cell of no weight is not exactly zero"
    rounded = expected.to(x.dtype).double().sum(dim=-1)
    bound = tolerances.row_sum_bound(x.dtype, sizes, sink is not None)
    assert_within(y.detach().double().sum(dim=-1), rounded, bound, "row sum")


def assert_are_gradients(
    gradients: dict[str, torch.Tensor],
    grad: torch.Tensor,
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    diagonal: int = 0,
    window: int | None = None,
    key_lengths: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
) -> None:
    """gradients of "x", "mask" and "sink", or some of them, are what the oracle makes of the rest, from x on."""
    exclusions: dict[str, Any] = {
        "is_causal": is_causal,
        "diagonal": diagonal,
        "window": window,
        "key_lengths": key_lengths,
    }
    scores, _ = oracle.scores(x, mask, scale, **exclusions)
    exact, sink_probability = oracle.softmax_with_sink(scores, sink)
    sizes = scores if sink is None else torch.cat([scores, oracle.column_of_sinks(x, sink)], dim=-1)
    if "x" in gradients:
        assert gradients["x"].dtype == x.dtype
        expected = oracle.backward(grad, exact, scale, **exclusions)
        assert_within(gradients["x"], expected, tolerances.gradient_bound(x.dtype, scale, grad, sizes), "gradient")
    of_rows = tolerances.gradient_bound(x.dtype, 1.0, grad, sizes)
    if "mask" in gradients:
        assert mask is not None
        assert gradients["mask"].dtype == mask.dtype
        expected, share = oracle.mask_backward(grad, exact, mask, **exclusions)
        cell = of_rows.max() if sizes.numel() else share.new_zeros(())
        bound = cell * share + torch.finfo(mask.dtype).eps * expected.abs()
        assert_within(gradients["mask"], expected, bound, "the mask's gradient")
    if "sink" in gradients:
        assert sink is not None
        assert gradients["sink"].dtype == sink.dtype
        expected = oracle.sink_backward(grad, exact, sink_probability)
        rows = of_rows.squeeze(-1) + tolerances.smallest(x.dtype)
        rounding = torch.finfo(sink.dtype).eps * expected.abs()
        bound = rows.movedim(-2, 0).flatten(1).sum(dim=1) + rounding
        assert_within(gradients["sink"], expected, bound, "sink's gradient")


def verify(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    diagonal: int = 0,
    window: int | None = None,
    key_lengths: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    grad: torch.Tensor | None = None,
    exact_scores: bool = False,
    from_x: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run forward and backward, compare with the oracle, and return y and dx.

    from_x: compare dx with the oracle's gradient from x on, too. Pass False where grad holds NaN or infinities, which
    multiply with the rounding error of y.
    """
    options: dict[str, Any] = {
        "is_causal": is_causal,
        "diagonal": diagonal,
        "window": window,
        "key_lengths": key_lengths,
    }
    if grad is None:
        grad = normal(x.shape, x.dtype, str(x.device), 99, 1.0)
    leaf = x.detach().requires_grad_()
    snapshot = Snapshot(x, mask, grad, key_lengths, sink)
    sink_leaf = None if sink is None else sink.detach().requires_grad_()
    y = sms.scaled_mask_softmax(leaf, mask, scale, sink=sink_leaf, **options)
    assert y.dtype == x.dtype
    assert y.shape == x.shape
    assert y.device == x.device
    assert y.is_contiguous()
    assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or x.numel() == 0
    assert_is_forward(y, x, mask, scale, exact_scores=exact_scores, sink=sink, **options)

    dx, *dsink = torch.autograd.grad(y, [tensor for tensor in (leaf, sink_leaf) if tensor is not None], grad)
    assert dx.dtype == x.dtype
    assert dx.shape == x.shape
    expected = oracle.backward(grad, y, scale, **options)
    assert_within(dx, expected, tolerances.backward_bound(x.dtype, scale, grad, y, expected), "backward")
    no_weight = (y == 0) | oracle.excluded_by_position(x, **options)
    assert not dx.masked_select(no_weight).count_nonzero(), "the gradient of a cell of no weight is not exactly zero"
    if from_x:
        gradients = {"x": dx} if sink is None else {"x": dx, "sink": dsink[0]}
        assert_are_gradients(gradients, grad, x, mask, scale, sink=sink, **options)
    snapshot.assert_unmodified()
    return y, dx
