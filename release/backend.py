"""scikit-build-core's build backend, refusing at once where there is no torch to build against.

Without this the refusal would come after pip has fetched CMake and Ninja.
"""

from __future__ import annotations

try:
    import scikit_build_core  # noqa: F401
except ModuleNotFoundError:
    raise SystemExit(
        "scaled-mask-softmax: this environment lacks scikit-build-core; expected the tools of the build, as build "
        "isolation is off. Run pip install scikit-build-core pybind11 cmake ninja, or leave out --no-build-isolation."
    ) from None

from scikit_build_core.build import build_editable as _build_editable
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from scikit_build_core.build import build_wheel as _build_wheel
from scikit_build_core.build import get_requires_for_build_editable as _requires_for_editable
from scikit_build_core.build import get_requires_for_build_wheel as _requires_for_wheel

from . import cli_data, metadata, torch_info

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_Settings = dict[str, "list[str] | str"] | None


def _need_torch() -> None:
    if metadata.plain():
        return
    try:
        torch_info.find()
    except torch_info.TorchError as error:
        raise SystemExit(str(error)) from None


def get_requires_for_build_wheel(config_settings: _Settings = None) -> list[str]:
    _need_torch()
    return _requires_for_wheel(config_settings)


def get_requires_for_build_editable(config_settings: _Settings = None) -> list[str]:
    _need_torch()
    return _requires_for_editable(config_settings)


def build_wheel(wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None) -> str:
    cli_data.write()
    return str(_build_wheel(wheel_directory, config_settings, metadata_directory))


def build_editable(
    wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    cli_data.write()
    return str(_build_editable(wheel_directory, config_settings, metadata_directory))
