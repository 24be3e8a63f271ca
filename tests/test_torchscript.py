"""TorchScript: the module scripted and traced, the operator by its name, and both saved for a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checks import normal, random_mask, same_bits

import scaled_mask_softmax as sms

# TorchScript is deprecated in torch, and works.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated")

MODULES = [
    sms.ScaledMaskSoftmax(),
    sms.ScaledMaskSoftmax(2, True, diagonal=1),
    sms.ScaledMaskSoftmax(0.25, dropout_p=0.5).eval(),
]


def by_name(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.scaled_mask_softmax.scaled_mask_softmax(x, mask, 0.5, True, diagonal=2)


def assert_same(module: torch.nn.Module, compiled: torch.nn.Module, device: str) -> None:
    for masked in (False, True):
        x = normal((2, 3, 5, 9), torch.float32, device).requires_grad_()
        mask = random_mask("bool", (2, 1, 1, 9), torch.float32, device) if masked else None
        grad = normal(x.shape, torch.float32, device, 2)
        expected, got = module(x, mask), compiled(x, mask)
        assert same_bits(got, expected)
        assert same_bits(torch.autograd.grad(got, x, grad)[0], torch.autograd.grad(expected, x, grad)[0])


@pytest.mark.parametrize("module", MODULES, ids=repr)
def test_script(device: str, module: sms.ScaledMaskSoftmax) -> None:
    assert_same(module, torch.jit.script(module), device)


def test_script_drops_out_in_training(device: str) -> None:
    module = torch.jit.script(sms.ScaledMaskSoftmax(dropout_p=0.5))
    x = normal((64, 64), torch.float32, device)
    y = module(x)
    dropped = (y == 0).float().mean().item()
    assert 0.4 < dropped < 0.6
    torch.testing.assert_close(y[y != 0], (sms.scaled_mask_softmax(x) * 2)[y != 0])


def test_script_of_the_operator_by_its_name(device: str) -> None:
    scripted = torch.jit.script(by_name)
    x = normal((2, 3, 5, 9), torch.float32, device)
    mask = random_mask("same", (5, 9), torch.float32, device)
    for given in (None, mask):
        assert same_bits(scripted(x, given), by_name(x, given))
        assert same_bits(scripted(x, given), sms.scaled_mask_softmax(x, given, 0.5, True, diagonal=2))


@pytest.mark.parametrize("module", MODULES, ids=repr)
def test_trace_serves_other_shapes(device: str, module: sms.ScaledMaskSoftmax) -> None:
    traced = torch.jit.trace(module, (normal((1, 2, 3, 4), torch.float32, device),))
    x = normal((2, 3, 5, 9), torch.float32, device)
    assert same_bits(traced(x), module(x))


SERVE = """
import sys
import torch
library, model, given, computed = sys.argv[1:]
torch.ops.load_library(library)
torch.save(torch.jit.load(model)(torch.load(given)), computed)
assert "scaled_mask_softmax" not in sys.modules
"""


@pytest.mark.parametrize("traced", [False, True])
def test_saved_programs_need_the_library_alone(device: str, tmp_path: Path, traced: bool) -> None:
    module = sms.ScaledMaskSoftmax(0.5, True)
    x = normal((2, 5, 9), torch.float32, device)
    program = torch.jit.trace(module, (x,)) if traced else torch.jit.script(module)
    torch.jit.save(program, str(tmp_path / "model.pt"))
    torch.save(x, tmp_path / "given.pt")
    files = [sms.library_path(), tmp_path / "model.pt", tmp_path / "given.pt", tmp_path / "computed.pt"]
    subprocess.run([sys.executable, "-W", "ignore", "-c", SERVE, *map(str, files)], check=True, timeout=300)
    assert same_bits(torch.load(tmp_path / "computed.pt"), module(x))
