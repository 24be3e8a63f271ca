"""Values and gradients against the oracle: every dtype, shape, mask, broadcast, diagonal and scale."""

from __future__ import annotations

import pytest
import torch
from checks import DTYPES, DTYPES_AND_KINDS, mask_kinds, normal, random_mask, short, verify

SHAPES = [
    (1,),
    (7,),
    (129,),
    (1, 1),
    (3, 1),
    (1, 5),
    (5, 8),
    (17, 17),
    (9, 64),
    (33, 31),
    (2, 3, 4),
    (3, 127, 127),
    (2, 5, 255),
    (1, 1, 8, 8),
    (1, 3, 5, 65),
    (3, 1, 1, 1000),
    (2, 3, 7, 513),
    (2, 2, 1, 1025),
    (1, 2, 3, 2048),
    (1, 1, 5, 4097),
    (2, 1, 2, 3, 33),
    (2, 1, 3, 1, 2, 3, 9),
]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("dtype", "kind"), DTYPES_AND_KINDS, ids=short)
@pytest.mark.parametrize("shape", SHAPES, ids=short)
def test_shapes(device: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str, is_causal: bool) -> None:
    x = normal(shape, dtype, device)
    verify(x, random_mask(kind, shape, dtype, device), 0.8, is_causal)


COLUMNS = [
    *(2, 3, 4, 6, 11, 13, 15, 16, 24, 32, 63, 96, 100, 128, 191, 256, 257, 384, 511, 512, 640, 768, 769, 1023, 1024),
    *(1536, 1999, 2047, 2049, 3072, 3073, 4095, 4096, 5000, 6143, 8191, 8192, 8193, 12000, 12289, 16383, 16384, 16387),
    *(24576, 32749, 32768, 32769, 65521, 65536, 65537, 100_000, 131_072, 131_101, 1_000_003),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("columns", COLUMNS)
def test_row_lengths(device: str, columns: int, dtype: torch.dtype) -> None:
    """Each kind of mask, with and without causality; rows begin at every alignment when the length is odd."""
    rows = 3 if columns < 20_000 else 2
    x = normal((2, rows, columns) if columns < 200_000 else (rows, columns), dtype, device, columns)
    verify(x, None, 0.5)
    for kind in mask_kinds(dtype):
        if columns < 20_000 or kind in ("none", "bool"):
            mask = random_mask(kind, x.shape[-2:], dtype, device)
            verify(x, mask, 1.25, is_causal=True, diagonal=columns // 2)


MASK_SHAPES = [
    *((), (1,), (7,), (1, 1), (1, 7), (5, 1), (5, 7)),
    *((1, 1, 1), (3, 1, 1), (3, 1, 7), (3, 5, 1), (3, 5, 7), (1, 5, 7), (1, 1, 7), (1, 5, 1)),
    *((b, h, q, k) for b in (1, 3) for h in (1, 4) for q in (1, 5) for k in (1, 7)),
]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("dtype", "kind"), [pair for pair in DTYPES_AND_KINDS if pair[1] != "none"], ids=short)
@pytest.mark.parametrize("mask_shape", MASK_SHAPES, ids=short)
def test_mask_broadcasts(
    device: str, mask_shape: tuple[int, ...], dtype: torch.dtype, kind: str, is_causal: bool
) -> None:
    verify(
        normal((3, 4, 5, 7), dtype, device), random_mask(kind, mask_shape, dtype, device, 3), 1.0, is_causal, diagonal=1
    )


@pytest.mark.parametrize(
    ("shape", "mask_shape"),
    [
        ((5, 7), (1, 7)),
        ((5, 7), ()),
        ((7,), (1,)),
        ((3, 5, 7), (3, 1, 7)),
        ((3, 5, 7), (1, 5, 7)),
        ((2, 3, 4, 5, 7), (4, 5, 7)),
        ((2, 3, 4, 5, 7), (3, 1, 5, 1)),
        ((2, 3, 4, 5, 7), (2, 1, 4, 1, 7)),
        ((3, 3, 5, 7), (3, 5, 7)),  # as many samples as heads: the samples win
        ((1, 4, 5, 7), (1, 5, 7)),
    ],
    ids=short,
)
@pytest.mark.parametrize("kind", ["bool", "same"])
def test_mask_broadcasts_at_other_ranks(
    device: str, shape: tuple[int, ...], mask_shape: tuple[int, ...], kind: str
) -> None:
    verify(normal(shape, torch.float32, device), random_mask(kind, mask_shape, torch.float32, device))


@pytest.mark.parametrize("shape", [(2, 9, 9), (2, 5, 13), (3, 13, 5), (2, 1, 8), (1, 300, 70), (1, 70, 300)], ids=short)
@pytest.mark.parametrize("kind", ["none", "bool", "same"])
def test_diagonals(device: str, shape: tuple[int, ...], kind: str) -> None:
    queries, columns = shape[-2:]
    near = {-queries - 1, -queries, 1 - queries, 2 - queries, -3, -1, 0, 1, 3}
    near |= {columns - queries, columns - 2, columns - 1, columns, columns + 1}
    far = {2**31 - 1, 2**31, -(2**31) - 1, 2**40, 2**63 - 1, -(2**63) + 1, -(2**63)}
    for dtype in (torch.float16, torch.float32):
        x = normal(shape, dtype, device)
        mask = random_mask(kind, shape, dtype, device)
        for diagonal in sorted(near):
            verify(x, mask, 0.9, True, diagonal)
        for diagonal in sorted(far):
            verify(x, mask, 0.9, True, diagonal)


def test_diagonal_has_no_effect_without_causality(device: str) -> None:
    x = normal((2, 6, 6), torch.float32, device)
    plain, _ = verify(x)
    shifted, _ = verify(x, diagonal=-3)
    assert torch.equal(plain, shifted)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("scale", [0, 0.0, -0.0, 1, 3, -1.0, 0.125, 64**-0.5, -2.5, 1e-30, 1e-45, 17.3])
def test_scales(device: str, dtype: torch.dtype, scale: float) -> None:
    x = normal((3, 11, 37), dtype, device)
    for kind in ("none", "bool", "same"):
        verify(x, random_mask(kind, x.shape, dtype, device), scale, is_causal=kind == "none")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
def test_sizes_of_gradients(device: str, dtype: torch.dtype, size: float) -> None:
    x = normal((3, 5, 67), dtype, device)
    verify(x, None, 0.3, True, grad=normal(x.shape, dtype, device, 4, size))


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_gradient_of_a_sum_is_almost_zero(device: str, dtype: torch.dtype) -> None:
    """Every weight moves the others down by as much, so what remains is rounding, and no cell has it large."""
    for columns in (5, 64, 1000, 5000):
        x = normal((4, columns), dtype, device)
        verify(x, grad=torch.ones((), dtype=dtype, device=device).expand(x.shape))
