"""Every wrong call and what it must say: the same on each device, for fake tensors and in the composite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Case(NamedTuple):
    """name: of the test. form: which function is called: forward, in_place, backward, or one of the first two with
    dropout: dropout, in_place_dropout.
    arguments: builds positional and keyword arguments on a device.
    exception: its exact type. text: all of it, `{device}` standing for the device's name."""

    name: str
    form: str
    arguments: Callable[[str], tuple[tuple[Any, ...], dict[str, Any]]]
    exception: type[Exception]
    text: str


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[str], torch.Tensor]:
    return lambda device: torch.zeros(shape, dtype=dtype, device=device)


def strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> Callable[[str], torch.Tensor]:
    return lambda device: torch.zeros(64, device=device).as_strided(shape, strides)


def call(*args: Any, **kwargs: Any) -> Callable[[str], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments that are callable are tensors still to be built on the device."""

    def build(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        made = [value(device) if callable(value) else value for value in args]
        named = {name: value(device) if callable(value) else value for name, value in kwargs.items()}
        return tuple(made), named

    return build


def sharing_memory(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    storage = torch.zeros(40, device=device)
    return (storage[:12].view(3, 4), storage[8:20].view(3, 4)), {}


HALF = torch.float16
DTYPES = "torch.float16, torch.bfloat16, torch.float32 or torch.float64"
BROADCAST = (
    "expected a shape that broadcasts to x without enlarging it. Make each of its trailing dimensions equal to x's or "
    "1."
)
WINDOW = (
    "window is {}; expected at least 1, the number of columns from the diagonal back, that one included. Use "
    "window=None for no window."
)
LENGTHS = "expected [3], one length for each entry of the first dimension."

BOTH_FORMS = [
    # x
    *(
        (
            f"x of {name}",
            call(zeros(3, 4, dtype=getattr(torch, name))),
            TypeError,
            f"x has dtype torch.{name}; expected {DTYPES}. Convert it, for example with x.float().",
        )
        for name in ("int64", "bool", "uint8", "complex64")
    ),
    (
        "x of rank 0",
        call(zeros()),
        ValueError,
        "x has shape [] (rank 0); expected at least one dimension, [..., Sq, Sk]. Use x.unsqueeze(0) for a row of one "
        "score.",
    ),
    # scale
    *(
        (
            f"scale {scale}",
            call(zeros(3, 4), None, scale),
            ValueError,
            f"scale is {scale}; expected a finite number. Check how it is computed, for example d_k ** -0.5.",
        )
        for scale in (math.nan, math.inf, -math.inf)
    ),
    *(
        (
            f"scale {scale} for {name}",
            call(zeros(3, 4, dtype=getattr(torch, name)), None, scale),
            ValueError,
            f"scale is {text}; expected a number in the range of float32, in which scores of dtype torch.{name} are "
            "computed. Use float64 scores or a smaller scale.",
        )
        for scale, text in (
            (3.5e38, "3.5e+38"),
            (-1e300, "-1e+300"),
            (3.4028234663852894e38, "3.4028234663852894e+38"),  # next to the largest that is taken
        )
        for name in ("float16", "bfloat16", "float32")
    ),
    # window and key_lengths
    *((f"window {window}", call(zeros(3, 4), window=window), ValueError, WINDOW.format(window)) for window in (0, -3)),
    *(
        (
            f"key_lengths of {name}",
            call(zeros(3, 2, 4), key_lengths=zeros(3, dtype=getattr(torch, name))),
            TypeError,
            f"key_lengths has dtype torch.{name}; expected torch.int32 or torch.int64. Use key_lengths.long().",
        )
        for name in ("float32", "int16", "bool")
    ),
    *(
        (
            f"key_lengths for x of rank {len(shape)}",
            call(zeros(*shape), key_lengths=zeros(shape[0], dtype=torch.int32)),
            ValueError,
            f"key_lengths is given for x of shape {list(shape)}; expected three dimensions or more, [B, ..., Sq, Sk]. "
            "Use x[None].",
        )
        for shape in ((3, 4), (4,))
    ),
    *(
        (
            f"key_lengths of shape {list(shape)}",
            call(zeros(3, 2, 4), key_lengths=zeros(*shape, dtype=torch.int64)),
            ValueError,
            f"key_lengths has shape {list(shape)} for x of shape [3, 2, 4]; {LENGTHS}",
        )
        for shape in ((2,), (1,), (3, 1), (), (0,))
    ),
    (
        "key_lengths on another device",
        call(zeros(3, 2, 4), key_lengths=lambda _: torch.zeros(3, device="meta", dtype=torch.int32)),
        ValueError,
        "key_lengths is on meta; expected {device}, the device of x. Use key_lengths.to(x.device).",
    ),
    # sink
    *(
        (
            f"sink of {sink} for {x}",
            call(zeros(3, 2, 4, dtype=getattr(torch, x)), sink=zeros(3, dtype=getattr(torch, sink))),
            TypeError,
            f"sink has dtype torch.{sink} for x of dtype torch.{x}; expected torch.{x}"
            f"{' or torch.float32' if x in ('float16', 'bfloat16') else ''}. Use sink.to(x.dtype).",
        )
        for x, sink in (
            ("float32", "int64"),
            ("float32", "float16"),
            ("float32", "float64"),
            ("float64", "float32"),
            ("float16", "bfloat16"),
            ("bfloat16", "float64"),
        )
    ),
    *(
        (
            f"sink for x of rank {len(shape)}",
            call(zeros(*shape), sink=zeros(shape[0])),
            ValueError,
            f"sink is given for x of shape {list(shape)}; expected three dimensions or more, [..., H, Sq, Sk]. "
            "Use x[None].",
        )
        for shape in ((3, 4), (4,))
    ),
    *(
        (
            f"sink of shape {list(shape)}",
            call(zeros(5, 3, 2, 4), sink=zeros(*shape)),
            ValueError,
            f"sink has shape {list(shape)} for x of shape [5, 3, 2, 4]; expected [3], one logit for each head, an "
            "entry of dimension -3.",
        )
        for shape in ((5,), (1,), (3, 1), ())
    ),
    (
        "sink on another device",
        call(zeros(3, 2, 4), sink=lambda _: torch.zeros(3, device="meta")),
        ValueError,
        "sink is on meta; expected {device}, the device of x. Use sink.to(x.device).",
    ),
    # The mask's dtype
    *(
        (
            f"mask of {name}",
            call(zeros(3, 4), zeros(3, 4, dtype=getattr(torch, name))),
            TypeError,
            f"mask has dtype torch.{name} for x of dtype torch.float32; expected torch.bool (True = masked out) or "
            "torch.float32. Use mask.bool() if nonzero means masked out.",
        )
        for name in ("uint8", "int64", "int8")
    ),
    *(
        (
            f"mask of {mask} for {x}",
            call(zeros(3, 4, dtype=getattr(torch, x)), zeros(3, 4, dtype=getattr(torch, mask))),
            TypeError,
            f"mask has dtype torch.{mask} for x of dtype torch.{x}; expected torch.bool (True = masked out) or "
            f"torch.{x}{' or torch.float32' if x in ('float16', 'bfloat16') else ''}. Use mask.to(x.dtype).",
        )
        for x, mask in (
            ("float16", "float64"),
            ("float16", "bfloat16"),
            ("bfloat16", "float16"),
            ("float32", "float16"),
            ("float32", "float64"),
            ("float64", "float32"),
            ("float64", "bfloat16"),
            ("float32", "complex64"),
        )
    ),
    # The mask's shape
    *(
        (
            f"mask of shape {list(mask)} for {list(x)}",
            call(zeros(*x), zeros(*mask, dtype=torch.bool)),
            ValueError,
            f"mask has shape {list(mask)} for x of shape {list(x)}; {BROADCAST}",
        )
        for x, mask in (
            ((3, 4), (5,)),
            ((3, 4), (2, 4)),
            ((3, 4), (3, 3)),
            ((3, 4), (1, 3, 4)),
            ((1, 4), (3, 4)),
            ((3, 1), (3, 4)),
            ((4,), (1, 4)),
            ((2, 3, 4, 5), (2, 3, 4, 4)),
            ((2, 3, 4, 5), (3, 1, 1, 5)),
            ((2, 3, 4, 5), (1, 2, 3, 4, 5)),
            ((2, 3, 4), (3, 3, 4)),
            ((0, 4), (3, 4)),
        )
    ),
    (
        "mask of keys without dimensions of size 1",
        call(zeros(2, 3, 4, 5), zeros(2, 5, dtype=torch.bool)),
        ValueError,
        "mask has shape [2, 5] for x of shape [2, 3, 4, 5]; expected a shape that broadcasts to x without enlarging "
        "it. For a mask of keys, [B, Sk], use mask[:, None, None, :].",
    ),
    *(
        (
            f"per-sample mask of shape {list(mask)}",
            call(zeros(2, 3, 4, 5), zeros(*mask, dtype=torch.bool)),
            ValueError,
            f"mask has shape {list(mask)} for x of shape [2, 3, 4, 5]; a 3-D mask for 4-D x is per sample, expected "
            f"[2 or 1, 4 or 1, 5 or 1]. {hint}",
        )
        for mask, hint in (
            ((3, 4, 5), "For a mask per head use mask[None]."),
            ((3, 1, 1), "For a mask per head use mask[None]."),
            ((4, 4, 5), "Insert dimensions of size 1 so that it broadcasts to x."),
            ((2, 3, 5), "Insert dimensions of size 1 so that it broadcasts to x."),
        )
    ),
    *(
        (
            f"empty mask of shape {list(mask)}",
            call(zeros(3, 4), zeros(*mask, dtype=torch.bool)),
            ValueError,
            f"mask has shape {list(mask)} (no elements) for x of shape [3, 4]; expected a shape that broadcasts to x. "
            "Use mask=None for no mask.",
        )
        for mask in ((0,), (0, 4), (3, 0))
    ),
    # Elsewhere
    (
        "mask on another device",
        call(zeros(3, 4), lambda _: torch.zeros(3, 4, device="meta")),
        ValueError,
        "mask is on meta; expected {device}, the device of x. Use mask.to(x.device).",
    ),
]

IN_PLACE = [
    *(
        (
            f"x of strides {list(strides)}",
            call(strided(shape, strides)),
            ValueError,
            f"x has shape {list(shape)} and strides {list(strides)}, so elements may share memory; expected separate "
            "memory for each, as scaled_mask_softmax_ overwrites x. Use x.contiguous() or scaled_mask_softmax.",
        )
        for shape, strides in (
            ((3, 4), (0, 1)),
            ((3, 4), (4, 0)),
            ((3, 4), (1, 1)),
            ((3, 4), (3, 1)),
            ((2, 2, 3), (3, 0, 1)),
        )
    ),
    (
        "sink sharing memory with x",
        lambda device: ((base := torch.zeros(2, 3, 4, device=device),), {"sink": base[:, 0, 0]}),
        ValueError,
        "sink may share memory with x; expected separate memory, as scaled_mask_softmax_ overwrites x. "
        "Use sink.clone() or scaled_mask_softmax.",
    ),
    (
        "key_lengths sharing memory with x",
        lambda device: (
            (base := torch.zeros(3, 2, 4, device=device),),
            {"key_lengths": base.view(torch.int32)[:, 0, 0]},
        ),
        ValueError,
        "key_lengths may share memory with x; expected separate memory, as scaled_mask_softmax_ overwrites x. "
        "Use key_lengths.clone() or scaled_mask_softmax.",
    ),
    (
        "mask sharing memory with x",
        sharing_memory,
        ValueError,
        "mask may share memory with x; expected separate memory, as scaled_mask_softmax_ overwrites x. "
        "Use mask.clone() or scaled_mask_softmax.",
    ),
]

BACKWARD = [
    (
        "y of int64",
        call(zeros(3, 4), zeros(3, 4, dtype=torch.int64), 1.0, False),
        TypeError,
        f"y has dtype torch.int64; expected {DTYPES}. Convert it, for example with y.float().",
    ),
    (
        "y of rank 0",
        call(zeros(), zeros(), 1.0, False),
        ValueError,
        "y has shape [] (rank 0); expected at least one dimension, [..., Sq, Sk]. Use y.unsqueeze(0) for a row of one "
        "score.",
    ),
    (
        "grad of another dtype",
        call(zeros(3, 4), zeros(3, 4, dtype=HALF), 1.0, False),
        TypeError,
        "grad has dtype torch.float32; expected torch.float16, the dtype of y. Use grad.to(y.dtype).",
    ),
    (
        "grad of another shape",
        call(zeros(1, 4), zeros(3, 4), 1.0, False),
        ValueError,
        "grad has shape [1, 4]; expected [3, 4], the shape of y. Use grad.expand_as(y) if it broadcasts.",
    ),
    (
        "grad on another device",
        call(lambda _: torch.zeros(3, 4, device="meta"), zeros(3, 4), 1.0, False),
        ValueError,
        "grad is on meta; expected {device}, the device of y. Use grad.to(y.device).",
    ),
    (
        "scale",
        call(zeros(3, 4), zeros(3, 4), math.nan, False),
        ValueError,
        "scale is nan; expected a finite number. Check how it is computed, for example d_k ** -0.5.",
    ),
    (
        "scale out of range",
        call(zeros(3, 4), zeros(3, 4), 1e39, False),
        ValueError,
        "scale is 1e+39; expected a number in the range of float32, in which scores of dtype torch.float32 are "
        "computed. Use float64 scores or a smaller scale.",
    ),
    (
        "window",
        call(zeros(3, 4), zeros(3, 4), 1.0, False, window=0),
        ValueError,
        WINDOW.format(0),
    ),
    (
        "key_lengths of another shape",
        call(zeros(3, 2, 4), zeros(3, 2, 4), 1.0, False, key_lengths=zeros(2, dtype=torch.int64)),
        ValueError,
        f"key_lengths has shape [2] for y of shape [3, 2, 4]; {LENGTHS}",
    ),
]

DROPOUT = [
    (
        f"dropout_p {text}",
        call(zeros(3, 4), dropout_p=p),
        ValueError,
        f"dropout_p is {text}; expected a probability, 0 <= dropout_p <= 1. Use 0 for no dropout.",
    )
    for p, text in (
        (-0.1, "-0.1"),
        (1.5, "1.5"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-1e-30, "-1e-30"),
        (-1e-12, "-1e-12"),
        # All digits that it takes to see that it is more than 1.
        (1.000000000000001, "1.000000000000001"),
        (math.nextafter(1, 2), "1.0000000000000002"),
        (-5e-324, "-4.94066e-324"),
        (1e20, "1e+20"),
        (1234567.0, "1234567"),
        (1e6, "1e+06"),
    )
]

IN_PLACE_DROPOUT = [
    (
        f"dropout where {name} needs a gradient",
        call(*args, **kwargs, dropout_p=0.25),
        NotImplementedError,
        "dropout_p is 0.25 for scaled_mask_softmax_ where a gradient is needed; expected 0, as the gradient needs the "
        "probabilities before dropout. Use scaled_mask_softmax.",
    )
    for name, args, kwargs in (
        ("x", (lambda device: torch.zeros(2, 3, 4, device=device, requires_grad=True),), {}),
        ("mask", (zeros(2, 3, 4), lambda device: torch.zeros(4, device=device, requires_grad=True)), {}),
        ("sink", (zeros(2, 3, 4),), {"sink": lambda device: torch.zeros(2, device=device, requires_grad=True)}),
    )
]


def with_dropout(
    arguments: Callable[[str], tuple[tuple[Any, ...], dict[str, Any]]],
) -> Callable[[str], tuple[tuple[Any, ...], dict[str, Any]]]:
    def build(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = arguments(device)
        return args, {"dropout_p": 0.5, **kwargs}

    return build


CASES = [
    Case(
        f"{form}: {name}",
        form,
        with_dropout(arguments) if "dropout" in form else arguments,
        exception,
        f"scaled_mask_softmax: {text}",
    )
    for forms, table in (
        (("forward", "in_place", "dropout", "in_place_dropout"), BOTH_FORMS),
        (("in_place", "in_place_dropout"), IN_PLACE),
        (("dropout", "in_place_dropout"), DROPOUT),
        (("in_place_dropout",), IN_PLACE_DROPOUT),
        (("backward",), BACKWARD),
    )
    for form in forms
    for name, arguments, exception, text in table
]

# Of the Python functions alone: the operators' own parser refuses these before any kernel could.
FUNCTION_CASES = [
    Case(f"{form}: {name}", form, arguments, exception, f"scaled_mask_softmax: {text}")
    for form in ("forward", "in_place")
    for name, arguments, exception, text in [
        (
            "scale a tensor",
            call(zeros(3, 4), None, zeros()),
            TypeError,
            "scale is a torch.Tensor; expected a Python number. Use scale.item(), or scale x.",
        ),
        (
            "scale a string",
            call(zeros(3, 4), None, "1"),
            TypeError,
            "scale is a str; expected a Python number. Use float(scale).",
        ),
        (
            "scale None",
            call(zeros(3, 4), None, None),
            TypeError,
            "scale is None; expected a Python number. Use 1.0, or d_k ** -0.5 as attention does.",
        ),
        (
            "mask a list",
            call(zeros(3, 4), [True]),
            TypeError,
            "mask is a list; expected a torch.Tensor or None. Use torch.as_tensor(mask).",
        ),
        (
            "diagonal a float",
            call(zeros(3, 4), is_causal=True, diagonal=1.5),
            TypeError,
            "diagonal is a float; expected an int. Use int(diagonal).",
        ),
        *(
            (
                f"{name} a bool",
                call(zeros(3, 4), is_causal=True, **{name: value}),
                TypeError,
                f"{name} is a bool; expected an int. Use int({name}).",
            )
            for name, value in (("window", True), ("diagonal", False))
        ),
        (
            "diagonal past 64 bits",
            call(zeros(3, 4), is_causal=True, diagonal=2**63),
            ValueError,
            f"diagonal is {2**63}; expected an integer of 64 bits. Use one within x's shape.",
        ),
        *(
            (
                f"dropout_p a {name}",
                call(zeros(3, 4), dropout_p=value),
                TypeError,
                f"dropout_p is a {name}; expected a Python number. Use float(dropout_p).",
            )
            for name, value in (("bool", True), ("str", "0.5"))
        ),
    ]
]

# Tensors of another kind than dense numbers. Apart: not every device or tracer has them.
NESTED = (
    "is a nested tensor; expected a dense (strided) tensor. Use torch.nested.to_padded_tensor, and a mask that is True "
    "at the padding."
)


def nested(layout: torch.layout) -> Callable[[str], torch.Tensor]:
    return lambda device: torch.nested.nested_tensor(
        [torch.zeros(2, 4, device=device), torch.zeros(3, 4, device=device)], layout=layout
    )


def sparse(layout: torch.layout) -> Callable[[str], torch.Tensor]:
    return lambda device: torch.eye(3, device=device).to_sparse(layout=layout)


OTHER_KINDS = [
    Case(f"{form}: {name}", form, arguments, exception, f"scaled_mask_softmax: {text}")
    for form in ("forward", "in_place")
    for name, arguments, exception, text in [
        *(
            (f"{argument} nested, {layout}", call(*args), ValueError, f"{argument} {NESTED}")
            for layout in (torch.strided, torch.jagged)
            for argument, args in (
                ("x", (nested(layout),)),
                ("mask", (zeros(2, 3, 4), nested(layout))),
            )
        ),
        *(
            (
                f"{argument} sparse, {layout}",
                call(*args),
                ValueError,
                f"{argument} has layout {layout}; expected a dense (strided) tensor. Use {argument}.to_dense().",
            )
            for layout in (torch.sparse_coo, torch.sparse_csr)
            for argument, args in (
                ("x", (lambda device, layout=layout: torch.eye(3, device=device).to_sparse(layout=layout),)),
                (
                    "mask",
                    (zeros(3, 3), lambda device, layout=layout: torch.eye(3, device=device).to_sparse(layout=layout)),
                ),
            )
        ),
        (
            "x quantised",
            call(lambda device: torch.quantize_per_tensor(torch.zeros(3, 4, device=device), 0.1, 0, torch.qint8)),
            TypeError,
            f"x has dtype torch.qint8; expected {DTYPES}. Convert it, for example with x.float().",
        ),
        (
            "x of float8",
            call(zeros(3, 4, dtype=torch.float8_e4m3fn)),
            TypeError,
            f"x has dtype torch.float8_e4m3fn; expected {DTYPES}. Convert it, for example with x.float().",
        ),
    ]
]
