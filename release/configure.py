"""Decides what a CMake build is made of and hands it to CMake as variables (see cmake/BuildFacts.cmake)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from . import ROOT, arch_list, matrix, toolkit, torch_info


class ConfigureError(RuntimeError):
    """The parts of the build do not fit together."""


def check_cuda(torch: torch_info.TorchInfo, kit: toolkit.Toolkit) -> str | None:
    """A warning where torch and compiler differ in CUDA's minor version. Raises ConfigureError where in the major."""
    assert torch.cuda is not None
    ours, theirs = kit.version, ".".join(torch.cuda.split(".")[:2])
    if ours.split(".")[0] != theirs.split(".")[0]:
        raise ConfigureError(
            f"{kit.nvcc} is of CUDA {ours} but torch {torch.version} is built for CUDA {theirs}: their major versions "
            f"must agree, so point CUDACXX or CUDA_HOME to a CUDA {theirs.split('.')[0]} toolkit"
        )
    if ours != theirs:
        return f"{kit.nvcc} is of CUDA {ours}, torch {torch.version} is built for {theirs}: minor versions differ"
    return None


def commit() -> str | None:
    """The commit of the working tree; None outside one (a source distribution)."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def default_architectures(torch: torch_info.TorchInfo, kit: toolkit.Toolkit) -> str:
    """The matrix's list for torch's CUDA; for a CUDA outside the matrix, that of the newest older one."""
    data = matrix.load()
    label = torch_info.cuda_label(torch.cuda)
    older = [known for known in sorted(data.cuda) if known <= label] or sorted(data.cuda)[:1]
    machine = os.uname().machine
    cuda = data.cuda[older[-1]]
    spelling = cuda.architectures.get(machine, next(iter(cuda.architectures.values())))
    # A compiler of another minor than torch's may lack some.
    known = [arch for arch in spelling.removesuffix("+PTX").split(";") if arch in kit.compiler.architectures]
    return ";".join(known) + "+PTX" if known else spelling


def _bracket(value: object) -> str:
    text = str(value)
    level = "="
    while f"]{level}]" in text:
        level += "="
    return f"[{level}[{text}]{level}]"


def facts() -> dict[str, object]:
    """Everything that CMake and the build record need. Prints what was chosen and why to standard error."""
    torch = torch_info.find()
    data = matrix.load()
    result: dict[str, object] = {
        "version": f"{data.version}+{torch.label}",
        "torch": torch.version,
        "torch_minor": torch.minor,
        "torch_dir": str(torch.path),
        "cuda": torch.cuda,
        "commit": commit(),
        "cxx11_abi": True,  # of every torch since 2.7
    }
    print(f"-- torch {torch.version} (CUDA {torch.cuda or 'none'}) at {torch.path}", file=sys.stderr)
    if torch.cuda is None:
        return result
    kit = toolkit.find()
    if kit is None:
        raise ConfigureError(
            f"torch {torch.version} is built for CUDA {torch.cuda} and no nvcc was found in CUDACXX, CUDA_HOME, PATH "
            "or /usr/local/cuda: install that CUDA toolkit, or use make wheel, which can fetch one"
        )
    print(f"-- {kit.compiler} at {kit.nvcc} (from {kit.reason}), torch's CUDA is {torch.cuda}", file=sys.stderr)
    if warning := check_cuda(torch, kit):
        print(f"-- warning: {warning}", file=sys.stderr)
    spelling = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    archs = arch_list.parse(spelling, kit.compiler, default_architectures(torch, kit), toolkit.local_gpus)
    source = "TORCH_CUDA_ARCH_LIST" if spelling.strip("; \t") else "the matrix"
    print(f"-- architectures {archs} (from {source})", file=sys.stderr)
    result.update(
        cuda_compiler=kit.compiler.version,
        nvcc=str(kit.nvcc),
        cuda_include=str(kit.include),
        cudart=str(kit.runtime),
        cuda_major=kit.compiler.version.split(".")[0],
        gencode=archs.flags(),
        asked_architectures=[real for real, _ in archs.cubins],
        asked_ptx=list(archs.ptx),
    )
    return result


def write(output: Path) -> None:
    """Writes the facts as `output` (JSON, for the build record) and beside it as .cmake."""
    values = facts()
    output.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    lines = []
    for key, value in values.items():
        if value is None:
            continue
        items = value if isinstance(value, list) else [value]
        lines.append(f"set(SMS_{key.upper()} {' '.join(_bracket(item) for item in items)})")
    output.with_suffix(".cmake").write_text("\n".join(lines) + "\n", encoding="utf-8")
