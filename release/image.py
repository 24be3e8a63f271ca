"""The builder image of a cell: how docker/manylinux-cuda.Dockerfile is built for it. Torch minors share it."""

from __future__ import annotations

from . import ROOT
from .matrix import Cell, Matrix
from .provision import registry_packages

DOCKERFILE = ROOT / "docker" / "manylinux-cuda.Dockerfile"
_DISTRIBUTION = ("cuda-nvcc", "cuda-cudart-devel", "cuda-cccl", "cuda-nvrtc-devel", "cuda-driver-devel")
OCI_PLATFORM = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}


def tag(cell: Cell) -> str:
    return f"scaled-mask-softmax-builder:{cell.cuda_label}-{cell.platform}"


def arguments(data: Matrix, cell: Cell) -> dict[str, str]:
    """Every ARG of the Dockerfile."""
    platform = data.platforms[cell.platform]
    cuda = cell.cuda
    source, packages, folder = "none", "", "/nonexistent"
    if cuda is not None and cuda.source == "registry":
        source, packages, folder = cuda.source, registry_packages(cuda), f"/opt/cuda/nvidia/cu{cuda.major}"
    elif cuda is not None:
        suffix = cuda.toolkit.replace(".", "-")
        source, packages = cuda.source, " ".join(f"{name}-{suffix}" for name in _DISTRIBUTION)
        folder = f"/usr/local/cuda-{cuda.toolkit}"
    return {
        "BASE_IMAGE": platform.image,
        # The image's own, unless nvcc refuses it.
        "GCC_TOOLSET": str(min(platform.gcc, cuda.max_gcc) if cuda else platform.gcc),
        "NVIDIA_REPOSITORY": platform.nvidia_repository,
        "TOOLKIT_SOURCE": source,
        "TOOLKIT_PACKAGES": packages,
        "TOOLKIT_FOLDER": folder,
    }


def command(data: Matrix, cell: Cell, engine: str = "docker", base: str | None = None) -> list[str]:
    """What builds and tags the image; `engine` is docker or podman, `base` another image to start from."""
    values = {**arguments(data, cell), **({"BASE_IMAGE": base} if base else {})}
    given = [text for name, value in values.items() for text in ("--build-arg", f"{name}={value}")]
    platform = ["--platform", OCI_PLATFORM[cell.platform]]
    return [engine, "build", "--file", str(DOCKERFILE), *platform, *given, "--tag", tag(cell), str(DOCKERFILE.parent)]
