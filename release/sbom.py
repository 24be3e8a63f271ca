"""The bill of materials of a native wheel (PEP 770): what was compiled into it or with it, as CycloneDX.

Without a serial number or a time, so that the same build gives the same bytes.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

FILE = "scaled-mask-softmax.cdx.json"
_SPECIFICATION = "1.6"


def _purl(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{quote(version)}"


def _component(name: str, version: str, licence: str, **more: Any) -> dict[str, Any]:
    return {"type": "library", "name": name, "version": version, "licenses": [{"license": {"id": licence}}], **more}


def make(record: dict[str, Any], pybind11: str) -> dict[str, Any]:
    """The bill of the wheel with this build record, whose `_C` was compiled with headers of `pybind11`."""
    ours = _purl("scaled-mask-softmax", record["version"])
    parts = [
        _component("torch", record["torch"], "BSD-3-Clause", purl=_purl("torch", record["torch"])),
        _component("pybind11", pybind11, "BSD-3-Clause", purl=_purl("pybind11", pybind11)),
    ]
    name, _, version = record["host_compiler"].partition(" ")
    tools = [{"type": "application", "name": name, "version": version}]
    if record["cuda_compiler"]:
        tools.append({"type": "application", "name": "NVIDIA CUDA compiler", "version": record["cuda_compiler"]})
    for part in parts:
        part["bom-ref"] = part["purl"]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": _SPECIFICATION,
        "version": 1,
        "metadata": {
            "tools": {"components": tools},
            "component": {
                **_component("scaled-mask-softmax", record["version"], "BSD-3-Clause", purl=ours),
                "bom-ref": ours,
            },
        },
        "components": parts,
        "dependencies": [{"ref": ours, "dependsOn": [part["bom-ref"] for part in parts]}],
    }


def text(record: dict[str, Any], pybind11: str) -> str:
    return json.dumps(make(record, pybind11), indent=2) + "\n"


def problem(contents: str, record: dict[str, Any]) -> str | None:
    """What is wrong with the bill of a wheel with this build record; None where it is right."""
    try:
        found = json.loads(contents)
        pybind11 = next(part["version"] for part in found["components"] if part["name"] == "pybind11")
    except (ValueError, KeyError, TypeError, StopIteration):
        return "it is not a bill of materials of ours"
    return None if found == make(record, pybind11) else "it says something else than the build record"
