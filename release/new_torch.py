"""Adding a torch release to the matrix: what the registry has that the matrix lacks, and the row for it.

pip reads the wheels' metadata without downloading them.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from dataclasses import dataclass

from .environments import Environment, own_configuration
from .matrix import MATRIX_FILE, Matrix, MatrixError, read
from .progress import StepError
from .torch_info import cuda_label

# Tried: from the oldest that the matrix has, this many on.
_PYTHONS = 8


def _pip(
    environment: Environment, *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [str(environment.python), "-m", "pip", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def _order(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def released(environment: Environment) -> list[str]:
    """The releases of torch in the registry, newest first."""
    done = _pip(environment, "index", "versions", "torch")
    line = re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE)
    if line is None:
        raise StepError(f"pip does not tell the versions of torch: {done.stderr.strip()}")
    found = {text.strip() for text in line[1].split(",")}
    return sorted((text for text in found if re.fullmatch(r"\d+\.\d+\.\d+", text)), key=_order, reverse=True)


def lacking(data: Matrix, releases: list[str]) -> list[str]:
    """The newest release of each minor that is newer than the matrix's, or than all of them; newest first."""
    newest: dict[str, str] = {}
    for release in releases:
        newest.setdefault(release.rpartition(".")[0], release)
    known = {row.minor: row.release for row in data.torch.values()}
    last = max(known, key=_order)
    return [
        release
        for minor, release in newest.items()
        if (_order(release) > _order(known[minor]) if minor in known else _order(minor) > _order(last))
    ]


@dataclass(frozen=True)
class Published:
    """What the registry's wheels of a torch release are for."""

    release: str
    cuda: str  # "13.0"
    pythons: tuple[str, ...]


def published(environment: Environment, data: Matrix, release: str) -> Published:
    """Asks for `release` with one Python after another; where pip's configuration of this machine holds it back, once
    more without that. Raises StepError where there is no wheel at all.
    """
    first = min(int(python.split(".")[1]) for row in data.torch.values() for python in row.python)
    for env in (None, own_configuration()):
        pythons, cuda = [], ""
        with tempfile.TemporaryDirectory() as folder:
            options = ["--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:", "--quiet"]
            for python in [f"3.{minor}" for minor in range(first, first + _PYTHONS)]:
                there = ["--target", folder, "--python-version", python, "--report", "-"]
                done = _pip(environment, "install", *options, *there, f"torch=={release}", env=env)
                if done.returncode != 0:
                    continue
                pythons.append(python)
                requires = "\n".join(json.loads(done.stdout)["install"][0]["metadata"].get("requires_dist", []))
                # The metapackage of newer releases, the runtime's own package of older ones.
                pattern = r"(?:cuda-toolkit(?:\[[^\]]*\])?|nvidia-cuda-runtime(?:-cu\d+)?)==(\d+\.\d+)"
                cuda = match[1] if (match := re.search(pattern, requires)) else cuda
        if pythons and cuda:
            return Published(release, cuda, tuple(pythons))
    raise StepError(f"the registry has no CUDA wheel of torch {release} for any Python from 3.{first} on")


def row(found: Published) -> str:
    """The table of matrix.toml for a new minor, with what the registry tells: nothing in it is proven yet."""
    label = cuda_label(found.cuda)
    pythons = ", ".join(f'"{python}"' for python in found.pythons)
    return (
        f'[torch."{found.release.rpartition(".")[0]}"]\nrelease = "{found.release}"\ndefault = "{label}"\n'
        f'cuda = ["{label}", "cpu"]\npython = [{pythons}]\n'
    )


def updated(text: str, data: Matrix, found: Published) -> str:
    """matrix.toml with the release in it: a new patch release in its row, or a new row after the last.

    Raises MatrixError where what comes out does not fit together, such as a CUDA release that has no table, or where
    the text is spelt in another way.
    """
    minor = found.release.rpartition(".")[0]
    if minor in data.torch:
        old = f'[torch."{minor}"]\nrelease = "{data.torch[minor].release}"'
        text = text.replace(old, f'[torch."{minor}"]\nrelease = "{found.release}"')
    else:
        last = list(data.torch)[-1]
        head, header, rest = text.partition(f'[torch."{last}"]\n')
        lines, blank, tail = rest.partition("\n\n")
        text = f"{head}{header}{lines}\n\n{row(found)}{blank[1:]}{tail}"
    row_now = read(text, MATRIX_FILE.name).torch.get(minor)
    if row_now is None or row_now.release != found.release:
        raise MatrixError(
            f'{MATRIX_FILE.name} has no lines [torch."{minor}"] and release = where they are expected: '
            f"write torch {found.release} there by hand"
        )
    return text


def steps(data: Matrix, found: Published) -> str:
    """What is left to do, as text."""
    minor = found.release.rpartition(".")[0]
    label = cuda_label(found.cuda)
    return (
        f"Then, for torch {minor}:\n"
        f"  1. add to its `cuda` the other CUDA releases that {data.torch_channels} has it for, each with a table\n"
        "  2. python -m release matrix: what follows\n"
        f"  3. make test TORCH={minor} CUDA={label}, with a GPU too\n"
        f"  4. make image TORCH={minor} CUDA={label} && make container TORCH={minor} CUDA={label}: every Python\n"
        "  5. name under `proven` what passed; a release holds nothing else\n"
    )
