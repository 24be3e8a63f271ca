"""Programs that use the library without the package: ahead-of-time compiled models, and C++."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checks import normal, random_mask, same_bits
from torch.utils import cpp_extension

import scaled_mask_softmax as sms


class Attention(torch.nn.Module):
    """Scores to mixed values, with the operator between work that a compiler fuses."""

    def forward(self, scores: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return sms.scaled_mask_softmax(scores * 2, mask, 0.5, True) @ values


def arguments(batch: int, length: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mask = random_mask("bool", (batch, 1, 1, length), torch.float32, device)
    assert mask is not None
    return (
        normal((batch, 2, length, length), torch.float32, device),
        mask,
        normal((batch, 2, length, 8), torch.float32, device, 2),
    )


def exported(device: str) -> torch.export.ExportedProgram:
    """For any batch and any length."""
    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=2, max=4096)
    shapes = ({0: batch, 2: length, 3: length}, {0: batch, 3: length}, {0: batch, 2: length})
    return torch.export.export(Attention(), arguments(3, 9, device), dynamic_shapes=shapes)


def test_an_exported_program_serves_every_length(device: str, tmp_path: Path) -> None:
    program = exported(device)
    assert str(program.graph).count("scaled_mask_softmax.scaled_mask_softmax.default") == 1
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for batch, length in ((3, 9), (2, 33), (5, 130)):
        given = arguments(batch, length, device)
        assert same_bits(loaded(*given), Attention()(*given))


# Imports torch alone, as a server would.
SERVE = """
import sys
import torch
library, package, given, computed = sys.argv[1:]
torch.ops.load_library(library)
model = torch._inductor.aoti_load_package(package)
torch.save([model(*one) for one in torch.load(given)], computed)
assert "scaled_mask_softmax" not in sys.modules
"""


# torch's own, of its use of itself in 2.11.
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
@pytest.mark.usefixtures("inductors_compiler")
def test_an_ahead_of_time_compiled_package_runs_in_a_process_of_its_own(device: str, tmp_path: Path) -> None:
    package = torch._inductor.aoti_compile_and_package(exported(device), package_path=str(tmp_path / "model.pt2"))
    given = [arguments(batch, length, device) for batch, length in ((3, 9), (2, 33), (5, 130))]
    torch.save(given, tmp_path / "given.pt")
    files = [sms.library_path(), package, tmp_path / "given.pt", tmp_path / "computed.pt"]
    served = subprocess.run(
        [sys.executable, "-c", SERVE, *map(str, files)], capture_output=True, text=True, timeout=300, check=False
    )
    assert served.returncode == 0, served.stderr
    computed = torch.load(tmp_path / "computed.pt")
    assert len(computed) == len(given)
    for got, one in zip(computed, given):
        torch.testing.assert_close(got, Attention()(*one))


def compile_program(name: str, folder: Path, *options: str) -> Path:
    """A program of tests/cpp that links what the library needs, but for the library."""
    source = Path(__file__).parent / "cpp" / f"{name}.cpp"
    program = folder / name
    torch_libraries = Path(torch.__file__).parent / "lib"
    needed = ["torch", "torch_cpu", "c10"]
    if sms.build_info()["cuda"] is not None:
        # The library needs them; torch's Python module would have loaded them.
        needed += ["torch_cuda", "c10_cuda"]
    command = [
        os.environ.get("CXX", "c++"),
        "-std=c++20",
        "-O0",
        str(source),
        *options,
        *(f"-isystem{folder}" for folder in cpp_extension.include_paths()),
        f"-L{torch_libraries}",
        f"-Wl,-rpath,{torch_libraries},--no-as-needed",
        *(f"-l{name}" for name in needed),
        "-ldl",
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True, timeout=600)
    return program


def test_gradients_of_masks_in_pieces(tmp_path: Path) -> None:
    """What a kernel with narrow limits of dimensions and rows computes piece by piece."""
    source = Path(__file__).parent.parent / "src"
    program = compile_program("mask_pieces", tmp_path, f"-I{source}", str(source / "canonicalize.cpp"))
    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith(" 0 wrong\n")


def test_a_cpp_program_loads_the_library(tmp_path: Path) -> None:
    program = compile_program("use_library", tmp_path)
    result = subprocess.run(
        [str(program), sms.library_path()], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    printed = {
        name: [float(number) for number in numbers] for name, *numbers in map(str.split, result.stdout.splitlines())
    }

    x = torch.arange(12.0, dtype=torch.float64).view(3, 4).requires_grad_()
    y = sms.scaled_mask_softmax(x, torch.tensor([False, False, True, False]), 0.5, True, diagonal=1)
    (dx,) = torch.autograd.grad(y, x, x.detach())
    assert printed["y"] == pytest.approx(y.flatten().tolist(), abs=1e-15)
    assert printed["dx"] == pytest.approx(dx.flatten().tolist(), abs=1e-15)
