"""The image that programs start from, one a cell: docker/runtime.Dockerfile, and the tags that it gets."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from . import ROOT, image
from .matrix import Cell, Matrix, MatrixError

DOCKERFILE = ROOT / "docker" / "runtime.Dockerfile"
NAME = "scaled-mask-softmax"


def tag(data: Matrix, cell: Cell, name: str = NAME) -> str:
    """ "NAME:1.0.0-torch2.14-cu130", for all platforms: none is "latest", and none can mean another torch tomorrow."""
    return f"{name.lower()}:{data.version}-torch{cell.torch.minor}-{cell.cuda_label}"


def reference(data: Matrix, cell: Cell, name: str = NAME) -> str:
    """The image of this platform alone; a release puts those of one tag together."""
    return f"{tag(data, cell, name)}-{cell.platform}"


def arguments(data: Matrix, cell: Cell, source: str = "") -> dict[str, str]:
    """Every ARG of the Dockerfile. `source` is the address of the repository. Raises MatrixError without its Python."""
    if data.runtime_python not in cell.torch.python:
        raise MatrixError(
            f"the runtime image has Python {data.runtime_python}, and torch {cell.torch.minor} is built for "
            f"{', '.join(cell.torch.python)}: change [runtime] in the matrix"
        )
    torch = cell.torch.release if cell.cuda_label == cell.torch.default else f"{cell.torch.release}+{cell.cuda_label}"
    return {
        "BASE_IMAGE": data.runtime_image,
        "TORCH": f"torch=={torch}",
        # An empty one in the environment: pip's own configuration has that torch.
        "TORCH_INDEX": os.environ.get("TORCH_INDEX", data.torch_index(cell)),
        "CHANNEL": f"whl/{cell.cuda_label}/torch{cell.torch.minor}",
        "WHEEL": f"scaled-mask-softmax=={data.version}+{cell.label}",
        "VISIBLE_DEVICES": "all" if cell.cuda else "void",
        "VERSION": data.version,
        "SOURCE": source,
    }


def command(
    data: Matrix,
    cell: Cell,
    site: Path,
    engine: str = "docker",
    base: str | None = None,
    name: str = NAME,
    source: str = "",
) -> list[str]:
    """What builds and tags the image from the channels below `site`; `base` is another image to start from.

    Raises MatrixError where the cell or the channel lacks what the image is made of.
    """
    values = {**arguments(data, cell, source), **({"BASE_IMAGE": base} if base else {})}
    if not (site / values["CHANNEL"]).is_dir():
        raise MatrixError(f"{site} has no {values['CHANNEL']}: give the folder of an index that has the cell's wheels")
    given = [text for name_, value in values.items() for text in ("--build-arg", f"{name_}={value}")]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    # Not an ARG, since podman finds a layer of labels in its cache whatever they say.
    label = ["--label", f"org.opencontainers.image.revision={commit.stdout.strip()}"]
    # podman's own format has no health checks.
    form = ["--format", "docker"] if engine == "podman" else []
    platform = ["--platform", image.OCI_PLATFORM[cell.platform]]
    context = ["--build-context", f"site={site.resolve()}"]
    where = ["--file", str(DOCKERFILE), *platform, *context]
    return [
        engine,
        "build",
        *form,
        *where,
        *given,
        *label,
        "--tag",
        reference(data, cell, name),
        str(DOCKERFILE.parent),
    ]
