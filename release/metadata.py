"""Version and dependencies of a build, for scikit-build-core's [[tool.dynamic-metadata]].

A source distribution and the plain wheel carry the bare version and need nothing. A native wheel carries the label of
the torch that it is built against, and pins that torch's minor.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from . import matrix, torch_info

# Must be the name in pyproject.toml's override, which turns CMake off.
PLAIN_VARIABLE = "SCALED_MASK_SOFTMAX_PLAIN"


def plain() -> bool:
    """Whether a wheel without native code is wanted."""
    return os.environ.get(PLAIN_VARIABLE, "").lower() in {"1", "true", "yes", "on", "y", "t"}


class Provider:
    def __init__(self) -> None:
        self._native = not plain()

    def build_state(self, state: str) -> None:
        self._native = self._native and state != "sdist"

    def dynamic_metadata(self, settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
        version = matrix.load().version
        if not self._native:
            return {"version": version, "dependencies": []}
        try:
            torch = torch_info.find()
        except torch_info.TorchError as error:
            raise SystemExit(str(error)) from None
        return {"version": f"{version}+{torch.label}", "dependencies": torch.requirements}

    def dynamic_wheel(self, settings: Mapping[str, Any]) -> dict[str, bool]:
        return {"dependencies": True}
