"""The build record: what was built, as plain Python data that the package checks before it loads the library.

The bill of materials is made from it.
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from pathlib import Path
from typing import Any

from . import fatbin, sbom


class RecordError(RuntimeError):
    """The library does not hold what was asked for, or a record cannot be read."""


def make(library: Path, facts: dict[str, Any], host_compiler: str) -> dict[str, Any]:
    """The record of `library`. Raises RecordError where its architectures are not those that were asked for."""
    entries = fatbin.read(library)
    architectures, ptx = fatbin.architectures(entries), fatbin.ptx(entries)
    asked, asked_ptx = facts.get("asked_architectures", []), facts.get("asked_ptx", [])
    if facts["cuda"] is not None and (set(architectures), set(ptx)) != (set(asked), set(asked_ptx)):
        raise RecordError(
            f"{library.name} holds cubins for {', '.join(architectures) or 'nothing'} and PTX for "
            f"{', '.join(ptx) or 'nothing'}, but asked for were {', '.join(asked)} and {', '.join(asked_ptx) or 'none'}"
        )
    return {
        "version": facts["version"],
        "torch": facts["torch"],
        "torch_minor": facts["torch_minor"],
        "cuda": facts["cuda"],
        "cuda_compiler": facts.get("cuda_compiler"),
        "host_compiler": host_compiler,
        "cxx11_abi": facts["cxx11_abi"],
        "architectures": architectures,
        "ptx": ptx,
        "commit": facts["commit"],
        "python": "{}.{}".format(*sys.version_info),
        "platform": sysconfig.get_platform().replace("-", "_").replace(".", "_"),
    }


def write(library: Path, facts_file: Path, host_compiler: str, output: Path) -> None:
    facts = json.loads(facts_file.read_text(encoding="utf-8"))
    record = make(library, facts, host_compiler)
    lines = "".join(f"    {key!r}: {value!r},\n" for key, value in record.items())
    output.write_text(
        f'"""What this build was made of and for. Written by the build."""\n\nBUILD = {{\n{lines}}}\n', "utf-8"
    )
    import pybind11

    output.with_name(sbom.FILE).write_text(sbom.text(record, pybind11.__version__), "utf-8")
    print(f"architectures {', '.join(record['architectures']) or 'none'}; PTX {', '.join(record['ptx']) or 'none'}")


def read(text: str) -> dict[str, Any]:
    """The record in the text of a _build_record.py, which is not run."""
    try:
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BUILD":
                return dict(ast.literal_eval(node.value))
    except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError):
        pass  # the last two where it nests deeper than Python reads
    raise RecordError("the build record holds no BUILD = {...} of plain values")
