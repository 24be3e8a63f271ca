"""Random shapes, strides, offsets, broadcasts, options and values, drawn by hypothesis.

SMS_HYPOTHESIS_PROFILE=deep draws thousands of cases a test, and prints how many and from which seed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import layouts
import pytest
import torch
from checks import (
    DTYPES,
    assert_are_gradients,
    assert_is_forward,
    bits,
    mask_kinds,
    normal,
    random_mask,
    same_bits,
    verify,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import scaled_mask_softmax as sms
from scaled_mask_softmax import _composite

SIZES = st.integers(1, 5)
COLUMNS = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 129, 255, 257, 513, 1023, 1025, 2050, 4100]))
SHAPES = st.builds(lambda leading, columns: (*leading, columns), st.lists(SIZES, max_size=5), COLUMNS)


@st.composite
def laid_out(draw: st.DrawFn, source: torch.Tensor) -> torch.Tensor:
    """source's values, its dimensions in any order in memory with any gaps, from any offset."""
    order = draw(st.permutations(range(source.dim())))
    last = source.dim() - 1
    if last > 0 and draw(st.booleans()):
        order = [*(dim for dim in order if dim != last), last]
    strides = [0] * source.dim()
    step = draw(st.sampled_from([1, 1, 1, 2, 3]))
    for dim in reversed(order):
        strides[dim] = step
        step = step * source.shape[dim] + draw(st.integers(0, 9))
    return layouts.strided(source, strides, draw(st.integers(0, 33)))


@st.composite
def calls(draw: st.DrawFn, device: str) -> dict[str, Any]:
    shape = draw(SHAPES)
    dtype = draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 2**20))
    kind = draw(st.sampled_from(mask_kinds(dtype)))
    call: dict[str, Any] = {
        "x": draw(laid_out(normal(shape, dtype, device, seed, draw(st.sampled_from([0.0, 1.0, 5.0]))))),
        "scale": draw(st.sampled_from([1.0, 0.125, -0.3, 0.0, 0.7])),
        "is_causal": draw(st.booleans()),
        "diagonal": draw(st.integers(-8, 70)),
        "window": draw(st.none() | st.integers(1, 80)),
        "key_lengths": None,
        "sink": None,
        "mask": None,
        "grad": draw(laid_out(normal(shape, dtype, device, seed + 1, 1.0))),
    }
    if len(shape) >= 3 and draw(st.booleans()):
        values = draw(st.lists(st.integers(-3, shape[-1] + 3), min_size=shape[0], max_size=shape[0]))
        call["key_lengths"] = torch.tensor(values, dtype=draw(st.sampled_from([torch.int32, torch.int64]))).to(device)
    if len(shape) >= 3 and draw(st.booleans()):
        sink_dtype = dtype if draw(st.booleans()) or dtype == torch.float64 else torch.float32
        call["sink"] = normal(shape[-3], sink_dtype, device, seed + 3)
    if kind != "none":
        mask_shape = [size if draw(st.booleans()) else 1 for size in shape]
        dropped = draw(st.integers(0, len(shape)))
        mask_shape = mask_shape[dropped:]
        if len(shape) == 4 and len(mask_shape) == 3:
            mask_shape = [size if draw(st.booleans()) else 1 for size in (shape[0], shape[2], shape[3])]
        call["mask"] = draw(laid_out(random_mask(kind, mask_shape, dtype, device, seed + 2)))
    return call


def results(function: Any, call: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What function makes of a call, and the gradients of all that can have one."""
    floats = {name: call[name] for name in ("x", "mask", "sink") if call[name] is not None}
    leaves = {
        name: tensor.detach().requires_grad_() for name, tensor in floats.items() if tensor.dtype.is_floating_point
    }
    arguments = {name: value for name, value in call.items() if name not in ("x", "mask", "grad", *leaves)}
    x, mask = (leaves.get(name, call[name]) for name in ("x", "mask"))
    y = function(x, mask, **arguments, **({"sink": leaves["sink"]} if "sink" in leaves else {}))
    return y.detach(), dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), call["grad"])))


@given(st.data())
def test_any_call(device: str, data: st.DataObject) -> None:
    call = data.draw(calls(device))
    y, dx = verify(**call)
    dense = {name: layouts.dense(value) if torch.is_tensor(value) else value for name, value in call.items()}
    dense_y, dense_dx = verify(**dense)
    assert same_bits(y, dense_y)
    assert same_bits(dx, dense_dx)
    if call["mask"] is not None and call["mask"].dtype != torch.bool:
        _, gradients = results(sms.scaled_mask_softmax, call)
        assert_are_gradients(gradients, call["grad"], **{name: call[name] for name in call if name != "grad"})


# Each case is compiled.
@settings(max_examples=max(20, settings.default.max_examples // 10))
@given(st.data())
def test_eager_compiled_and_composite_agree(device: str, data: st.DataObject) -> None:
    call = data.draw(calls(device))
    backend = data.draw(st.sampled_from(["inductor", "aot_eager"]))
    torch.compiler.reset()
    compiled = torch.compile(
        sms.scaled_mask_softmax, fullgraph=True, backend=backend, dynamic=data.draw(st.sampled_from([None, True]))
    )
    y, gradients = results(sms.scaled_mask_softmax, call)
    arguments = {name: value for name, value in call.items() if name != "grad"}
    for function in (sms.scaled_mask_softmax, compiled, _composite.forward):
        other_y, other_gradients = results(function, call)
        assert_is_forward(other_y, **arguments)
        assert_are_gradients(other_gradients, call["grad"], **arguments)
        if function is not _composite.forward:
            # A compiler may sum the gradients of a mask and a sink in another order.
            assert same_bits(other_y, y)
            assert same_bits(other_gradients["x"], gradients["x"])


# Each case is traced several times.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@settings(max_examples=max(20, settings.default.max_examples // 10))
@given(st.data())
def test_opcheck_of_any_call(device: str, data: st.DataObject) -> None:
    call = data.draw(calls(device))
    operators = torch.ops.scaled_mask_softmax
    x, mask, grad = call["x"], call["mask"], call["grad"]
    place = {name: call[name] for name in ("diagonal", "window", "key_lengths")}
    options = {**place, "sink": call["sink"]}
    arguments = (mask, call["scale"], call["is_causal"])
    leaf = x.detach().requires_grad_(data.draw(st.booleans()))
    torch.library.opcheck(operators.scaled_mask_softmax.default, (leaf, *arguments), options)
    torch.library.opcheck(operators.scaled_mask_softmax_.default, (x, *arguments), options)
    y = sms.scaled_mask_softmax(x, *arguments, **options)
    torch.library.opcheck(operators.scaled_mask_softmax_backward.default, (grad, y, *arguments[1:]), place)


@given(st.data())
def test_any_call_in_place(device: str, data: st.DataObject) -> None:
    call = data.draw(calls(device))
    options = {name: call[name] for name in ("scale", "is_causal", "diagonal", "window", "key_lengths", "sink")}
    y = sms.scaled_mask_softmax(call["x"], call["mask"], **options)
    sms.scaled_mask_softmax_(call["x"], call["mask"], **options)
    assert torch.equal(bits(call["x"]), bits(y))
    assert layouts.poison_intact(call["x"])


@given(st.data())
def test_vmap_of_any_call(device: str, data: st.DataObject) -> None:
    """Whichever arguments are batched, along any dimension: each sample's result to the bit, and its gradients."""
    call = data.draw(calls(device))
    grad = call.pop("grad")
    tensors = {name: value for name, value in call.items() if torch.is_tensor(value)}
    options = {name: value for name, value in call.items() if not torch.is_tensor(value)}
    batched = data.draw(st.sets(st.sampled_from(sorted(tensors)), min_size=1))
    dims = {
        name: data.draw(st.integers(-t.dim() - 1, t.dim())) if name in batched else None for name, t in tensors.items()
    }
    samples = [{name: t.roll(index) if name in batched else t for name, t in tensors.items()} for index in range(3)]
    given_ = {
        name: t if dims[name] is None else torch.stack([one[name] for one in samples], dims[name])
        for name, t in tensors.items()
    }

    def of(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return sms.scaled_mask_softmax(**tensors, **options)

    assert same_bits(torch.vmap(of, in_dims=(dims,))(given_), torch.stack([of(one) for one in samples]))
    floats = {name for name, t in tensors.items() if t.dtype.is_floating_point}

    def gradients(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        fixed = {name: t for name, t in tensors.items() if name not in floats}
        leaves = {name: t for name, t in tensors.items() if name in floats}
        return torch.func.grad(lambda leaves: (of({**fixed, **leaves}) * grad).sum())(leaves)

    got = torch.vmap(gradients, in_dims=(dims,))(given_)
    expected = [gradients(one) for one in samples]
    # Sums of a mask's and a sink's gradients may run in another order.
    eps = torch.finfo(call["x"].dtype).eps
    for name in floats:
        wanted = torch.stack([one[name] for one in expected])
        bound = 64 * eps * max(1.0, wanted.abs().max().item())
        torch.testing.assert_close(got[name], wanted, rtol=0, atol=bound)


SPECIAL = st.sampled_from([0.0, 1.0, -1.0, 60_000.0, -60_000.0, float("inf"), float("-inf"), float("nan")])


@given(st.data())
def test_any_values(device: str, data: st.DataObject) -> None:
    """NaN, infinities and large numbers anywhere in x, in the mask and in a sink."""
    dtype = data.draw(st.sampled_from(DTYPES))
    heads, queries, columns = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 70))
    x = normal((heads, queries, columns), dtype, device, data.draw(st.integers(0, 99)))
    mask = random_mask(data.draw(st.sampled_from(mask_kinds(dtype))), x.shape, dtype, device, 7)
    sink = normal((heads,), dtype, device, 3) if data.draw(st.booleans()) else None
    lengths = st.lists(st.integers(0, columns), min_size=heads, max_size=heads)
    key_lengths = torch.tensor(data.draw(lengths), device=device) if data.draw(st.booleans()) else None
    for tensor in (x, mask, sink):
        if tensor is None or tensor.dtype == torch.bool:
            continue
        for _ in range(data.draw(st.integers(0, 6))):
            tensor[tuple(data.draw(st.integers(0, size - 1)) for size in tensor.shape)] = data.draw(SPECIAL)
    verify(
        x,
        mask,
        data.draw(st.sampled_from([1.0, -1.0, 0.0, 0.5])),
        data.draw(st.booleans()),
        data.draw(st.integers(-4, 70)),
        data.draw(st.none() | st.integers(1, 70)),
        key_lengths,
        sink,
        from_x=False,
    )


PROBE = """
from hypothesis import given, settings, strategies as st

drawn = []


@settings(max_examples=20)
@given(st.integers(0, 2**60))
def test_draws(number):
    drawn.append(number)


def test_shows():
    print("drawn:", hash(tuple(drawn)))
"""


def test_the_deep_mode_draws_by_its_seed(tmp_path: Path) -> None:
    """Anew in each run, and the same again from the seed that it prints."""
    (tmp_path / "test_probe.py").write_text(PROBE)

    def run(*arguments: str) -> tuple[str, str]:
        """The seed, and what was drawn."""
        command = [sys.executable, "-m", "pytest", "-s", "-p", "no:xdist", "-p", "no:cacheprovider", "-p", "conftest"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        environment |= {"SMS_HYPOTHESIS_PROFILE": "deep", "PYTHONPATH": str(Path(__file__).parent)}
        done = subprocess.run(
            [*command, *arguments, "test_probe.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (seed,) = re.findall(r"--hypothesis-seed=(\d+)", done.stdout)
        (drawn,) = re.findall(r"drawn: (\S+)", done.stdout)
        return seed, drawn

    first, second = run(), run()
    assert first != second
    assert first[1] != second[1]
    assert run(f"--hypothesis-seed={first[0]}") == first
