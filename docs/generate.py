"""Writes what the pages take from elsewhere: pictures of the oracle's exclusions, tables of tolerances and of
the release matrix, docstrings.

    python docs/generate.py

tests/test_docs.py fails where a page or a picture is not what this would write.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent / "tests"), str(DOCS.parent)]

import oracle  # noqa: E402
import tolerances  # noqa: E402

from release import matrix  # noqa: E402

QUERIES, COLUMNS = 6, 8
CELL = 24
LEFT, RIGHT, TOP, BOTTOM = 64, 48, 58, 30
LIVE, EXCLUDED, DEAD, LINE, TEXT = "#2f6fb3", "#e8e8e8", "#f3c9a5", "#ffffff", "#222222"

PADDING = torch.zeros(1, 1, 1, COLUMNS, dtype=torch.bool)
PADDING[..., -2:] = True

# name: what is written above the picture, and the arguments.
PICTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mask": ("mask, True for the last two keys", {"mask": PADDING}),
    "key-lengths": ("key_lengths = [5]", {"key_lengths": torch.tensor([5])}),
    "causal": ("is_causal", {"is_causal": True}),
    "causal-diagonal": ("is_causal, diagonal = Sk - Sq = 2", {"is_causal": True, "diagonal": COLUMNS - QUERIES}),
    "window": ("window = 3", {"window": 3}),
    "window-causal": ("window = 3, is_causal", {"window": 3, "is_causal": True}),
    "all": (
        "mask, window = 4, is_causal, diagonal = 2",
        {"mask": PADDING, "window": 4, "is_causal": True, "diagonal": 2},
    ),
    "dead-rows": ("window = 2, is_causal, key_lengths = [3]", {"window": 2, "is_causal": True, "key_lengths": [3]}),
}


def picture(title: str, arguments: dict[str, Any]) -> str:
    """An SVG: a row for each query, a column for each key."""
    options = {name: torch.as_tensor(value) if name == "key_lengths" else value for name, value in arguments.items()}
    values, _ = oracle.scores(torch.zeros(1, 1, QUERIES, COLUMNS), **options)
    live = (values != -torch.inf)[0, 0]
    width, height = LEFT + COLUMNS * CELL + RIGHT, TOP + QUERIES * CELL + BOTTOM

    def text(x: float, y: float, words: str, more: str = "") -> str:
        return f'<text x="{x:g}" y="{y:g}" {more}>{words}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11" fill="{TEXT}" text-anchor="middle">',
        f"<title>{title}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        text(width / 2, 16, title, 'font-size="12"'),
        text(LEFT + COLUMNS * CELL / 2, 34, "key j"),
        text(14, TOP + QUERIES * CELL / 2, "query i", f'transform="rotate(-90 14 {TOP + QUERIES * CELL / 2:g})"'),
    ]
    parts += [text(LEFT + (j + 0.5) * CELL, TOP - 8, str(j)) for j in range(COLUMNS)]
    for i in range(QUERIES):
        parts.append(text(LEFT - 12, TOP + (i + 0.65) * CELL, str(i)))
        for j in range(COLUMNS):
            color = LIVE if live[i, j] else EXCLUDED if live[i].any() else DEAD
            parts.append(
                f'<rect x="{LEFT + j * CELL}" y="{TOP + i * CELL}" width="{CELL}" height="{CELL}" '
                f'fill="{color}" stroke="{LINE}"/>'
            )
    legend = [("live", LIVE), ("excluded", EXCLUDED), *([] if live.any(1).all() else [("row of zeros", DEAD)])]
    x, y = LEFT, TOP + QUERIES * CELL + 10
    for words, color in legend:
        parts.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{color}"/>')
        parts.append(text(x + 14, y + 9, words, 'text-anchor="start"'))
        x += 20 + 7 * len(words)
    return "\n".join([*parts, "</svg>", ""])


def plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tolerance_table() -> str:
    rows = ["| dtype | a probability | a row's sum | a gradient |", "|---|---|---|---|"]
    for dtype, row in tolerances.TOLERANCES.items():

        def bound(absolute: float, scores: float) -> str:
            return f"{absolute:.3g}" + (f" + {scores:.2g} max\\|s\\|" if scores else "")

        rows.append(
            f"| {plain(dtype)} | {bound(row.forward, row.forward_scores)} | {row.row_sum:.3g} | "
            f"{bound(row.gradient, row.gradient_scores)} |"
        )
    return "\n".join(rows)


def wheels_table() -> str:
    """A row a torch minor: what a release holds, and what else the matrix builds."""
    data = matrix.load()
    rows = ["| torch | CPython | released for | built by `make wheel` too |", "|---|---|---|---|"]
    for torch_row in data.torch.values():
        cells = data.cells(torch_row.minor)
        proven = [f"{cell.cuda_label} ({cell.platform})" for cell in cells if cell.is_proven]
        released = {cell.cuda_label for cell in cells if cell.is_proven}
        others = [label for label in torch_row.cuda if label not in released]
        rows.append(
            f"| {torch_row.minor} | {torch_row.python[0]} to {torch_row.python[-1]} | {', '.join(proven) or '-'} | "
            f"{', '.join(others) or '-'} |"
        )
    return "\n".join(rows)


def cuda_table() -> str:
    """A row a CUDA release: the driver that it needs, and what its wheels are compiled for."""
    data = matrix.load()
    rows = ["| CUDA | driver | compiled for |", "|---|---|---|"]
    for cuda in data.cuda.values():
        lists = {machine: text.removesuffix("+PTX").split(";") for machine, text in cuda.architectures.items()}
        every = [name for name in data.gpus if any(name in names for names in lists.values())]
        written = []
        for name in every:
            machines = [machine for machine, names in lists.items() if name in names]
            written.append(name if len(machines) == len(lists) else f"{name} ({', '.join(machines)})")
        rows.append(f"| {cuda.label} | {cuda.min_driver} or newer | {', '.join(written)} |")
    return "\n".join(rows)


def gpus_table() -> str:
    rows = ["| compute capability | GPUs |", "|---|---|"]
    return "\n".join([*rows, *(f"| {name} | {gpus} |" for name, gpus in matrix.load().gpus.items())])


TABLES = {"tolerances": tolerance_table, "wheels": wheels_table, "cuda": cuda_table, "gpus": gpus_table}
PACKAGE = DOCS.parent / "python" / "scaled_mask_softmax"


def reference(module: str, name: str) -> str:
    """A function's or class's signature and docstring, read without importing it."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name)
    function: Any = found
    if isinstance(found, ast.ClassDef):
        function = next(node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
        del function.args.args[0]
    named = function.args.args
    defaults = [None] * (len(named) - len(function.args.defaults)) + function.args.defaults
    pairs = list(zip(named, defaults))
    keywords = list(zip(function.args.kwonlyargs, function.args.kw_defaults))
    written = [f"{argument.arg}={ast.unparse(default)}" if default else argument.arg for argument, default in pairs]
    written += ["*"] if keywords else []
    written += [f"{argument.arg}={ast.unparse(default)}" if default else argument.arg for argument, default in keywords]
    signature = f"{name}({', '.join(written)})"
    lines = textwrap.wrap(signature, 116, subsequent_indent="    ", break_long_words=False)
    return "\n".join(["```text", *lines, "", ast.get_docstring(found) or "", "```"])


def generated(name: str) -> str:
    return TABLES[name]() if name in TABLES else reference(*name.split("."))


def filled(text: str) -> str:
    """A page with what is generated written anew, each between two comments."""
    block = re.compile(r"(<!-- generated: (\S+) -->\n).*?(?=<!-- end of generated -->)", re.DOTALL)
    return block.sub(lambda found: f"{found[1]}{generated(found[2])}\n", text)


def files() -> dict[Path, str]:
    """Everything that is generated, as it should be."""
    pictures = {DOCS / "pictures" / f"{name}.svg": picture(*drawn) for name, drawn in PICTURES.items()}
    pages = {page: filled(page.read_text(encoding="utf-8")) for page in sorted(DOCS.rglob("*.md"))}
    return {**pictures, **pages}


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
