"""The index's landing page: a selector that prints the lines for one wheel, and tables of what exists.

It needs nothing from elsewhere, and without JavaScript it is those tables. What it shows comes from index.json, which
may be a mirror's: all of it is escaped, and the page's policy lets no script run but the one below.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .index import Entry

PROJECT = "scaled-mask-softmax"
# The channel of the plain wheel and the source distribution.
PLAIN = "plain"
_PIP = '--no-deps --index-url {channel} "scaled-mask-softmax=={version}"'
_FILE = "scaled-mask-softmax @ {wheel}#sha256={sha256}"
# How each tool is told. The selector fills them in the browser, `filled` here.
LINES = {
    "pip": ("pip", f"python -m pip install {_PIP}"),
    "uv": ("uv", f"uv pip install {_PIP}"),
    "conda": (
        "conda env",
        "# environment.yml, for conda env create; torch {torch} for {cuda} belongs in it too\n"
        "channels:\n  - conda-forge\ndependencies:\n  - python={python}\n  - pip\n  - pip:\n"
        f"      - {_FILE}",
    ),
    "docker": (
        "Dockerfile",
        "# in an image that has torch {torch} for {cuda} and Python {python}\n"
        f"RUN python -m pip install --no-cache-dir {_PIP}",
    ),
    "requirements": (
        "requirements.txt",
        f"# torch {{torch}} for {{cuda}}, Python {{python}}, Linux on {{platform}}\n{_FILE}",
    ),
    "uv-project": (
        "pyproject.toml (uv)",
        "[project]\n"
        'dependencies = ["scaled-mask-softmax=={version}", "torch=={torch}.*"]\n\n'
        "[tool.uv.sources]\n"
        'scaled-mask-softmax = { index = "scaled-mask-softmax" }\n\n'
        "[[tool.uv.index]]\n"
        'name = "scaled-mask-softmax"\nurl = "{channel}"\nexplicit = true',
    ),
    "poetry-project": (
        "pyproject.toml (Poetry)",
        "[project]\n"
        'dependencies = ["scaled-mask-softmax=={version}", "torch=={torch}.*"]\n\n'
        "[tool.poetry.dependencies]\n"
        'scaled-mask-softmax = { source = "scaled-mask-softmax" }\n\n'
        "[[tool.poetry.source]]\n"
        'name = "scaled-mask-softmax"\nurl = "{channel}"\npriority = "explicit"',
    ),
}

# For a torch that no wheel is for: the command comes with the plain wheel.
BUILD = (
    'python -m pip install --no-deps --index-url {index}plain/ "scaled-mask-softmax=={version}"\n'
    "scaled-mask-softmax build --index {index} --install"
)

# In the lines of a page that does not know where it will lie.
PLACEHOLDER = "INDEX/"


@dataclass(frozen=True)
class Wheel:
    torch: str  # "2.14"
    cuda: str  # "cu130"
    platform: str  # "x86_64"
    python: str  # "3.11"
    glibc: str  # "2.28"; empty where the tag names none
    channel: str  # "whl/cu130/torch2.14/"
    entry: Entry

    @property
    def choice(self) -> tuple[str, str, str, str]:
        """What is chosen, in the order in which one narrows the next."""
        return self.torch, self.cuda, self.platform, self.python

    @property
    def version(self) -> str:
        return self.entry.version.partition("+")[0]

    def link(self, address: str) -> str:
        """Of the file, in an index that lies at `address`."""
        return self.entry.url if "://" in self.entry.url else f"{address}{self.channel}{PROJECT}/{self.entry.url}"


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def version_order(version: str) -> tuple[list[int], bool, str]:
    """Sorts our versions: "1.0.0rc1+cu130torch2.14" before "1.0.0+cu130torch2.14"."""
    match = re.match(r"([\d.]+)([^+]*)", version)
    numbers, rest = match.groups() if match else ("", version)
    return _numbers(numbers), not rest, rest


def every(channels: Mapping[str, Mapping[str, Entry]]) -> list[Wheel]:
    """Every wheel whose name says what it is for, newest torch, CUDA, version and Python first."""
    found = []
    for name, entries in channels.items():
        channel = re.fullmatch(r"whl/(cpu|cu\d+)/torch(.+)", name)
        for entry in entries.values():
            tags = re.search(r"-cp(\d)(\d+)-[^-]+-(?:many)?linux(?:_(\d+)_(\d+))?_(\w+)[^-]*\.whl$", entry.filename)
            if channel and tags:
                major, minor, glibc, glibc_minor, platform = tags.groups()
                glibc = f"{glibc}.{glibc_minor}" if glibc else ""
                found.append(Wheel(channel[2], channel[1], platform, f"{major}.{minor}", glibc, f"{name}/", entry))

    def order(wheel: Wheel) -> tuple[object, ...]:
        return (
            _numbers(wheel.torch), wheel.torch, wheel.cuda != "cpu", _numbers(wheel.cuda),
            version_order(wheel.version), wheel.platform == "x86_64", wheel.platform, _numbers(wheel.python),
        )  # fmt: skip

    return sorted(found, key=order, reverse=True)


def newest(wheels: Iterable[Wheel]) -> list[Wheel]:
    """One for each torch, CUDA, platform and Python: the newest that is not withdrawn."""
    found: dict[tuple[str, str, str, str], Wheel] = {}
    for wheel in wheels:
        if wheel.entry.yanked is None:
            found.setdefault(wheel.choice, wheel)
    return list(found.values())


def filled(tool: str, wheel: Wheel, address: str) -> str:
    """The lines that tell a tool of LINES to take this wheel, from an index that lies at `address`."""
    values = {
        "torch": wheel.torch,
        "cuda": wheel.cuda,
        "platform": wheel.platform,
        "python": wheel.python,
        "version": wheel.entry.version,
        "channel": address + wheel.channel,
        "wheel": wheel.link(address),
        "sha256": wheel.entry.sha256,
    }
    return re.sub(r"\{(\w+)\}", lambda match: values[match[1]], LINES[tool][1])


def _size(sizes: Sequence[int]) -> str:
    """In MB, as every command says it; what has less than one in kB."""
    unit, name = (10**6, "MB") if max(sizes) >= 10**6 else (10**3, "kB")
    low, high = (f"{size / unit:.1f}" for size in (min(sizes), max(sizes)))
    return f"{low} {name}" if low == high else f"{low} to {high} {name}"


def _span(pythons: Iterable[str]) -> str:
    """ "3.10 to 3.12, 3.14" for what is there of them."""
    minors = sorted({_numbers(python)[1] for python in pythons})
    spans: list[list[int]] = []
    for minor in minors:
        if spans and minor == spans[-1][-1] + 1:
            spans[-1].append(minor)
        else:
            spans.append([minor])
    return ", ".join(f"3.{span[0]}" if len(span) == 1 else f"3.{span[0]} to 3.{span[-1]}" for span in spans)


def _gpus(entry: Entry) -> str:
    if not entry.architectures:
        return "CPU only"
    return ", ".join(entry.architectures) + (f"; PTX {', '.join(entry.ptx)}" if entry.ptx else "")


def _table(label: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of HTML cells; the first of a row is its head."""
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    body = ""
    for first, *rest in rows:
        cells = "".join(f"<td>{cell}</td>" for cell in rest)
        body += f'<tr><th scope="row">{first}</th>{cells}</tr>\n'
    return (
        f'<div class="scroll" role="region" aria-label="{label}" tabindex="0">\n<table>\n'
        f"<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}</tbody>\n</table>\n</div>\n"
    )


def _coverage(offered: Sequence[Wheel], address: str) -> str:
    groups: dict[tuple[str, str, str, str], list[Wheel]] = {}
    for wheel in offered:
        groups.setdefault((wheel.torch, wheel.cuda, wheel.platform, wheel.version), []).append(wheel)
    rows = []
    for (torch, cuda, platform, version), group in groups.items():
        glibc = f", glibc {escape(group[0].glibc)} or newer" if group[0].glibc else ""
        rows.append(
            (
                f'<a href="{escape(group[0].channel)}">torch {escape(torch)}, {escape(cuda)}</a>',
                f"{escape(platform)}{glibc}",
                escape(_span(wheel.python for wheel in group)),
                escape(version),
                escape(_gpus(group[0].entry)),
                escape(_size([wheel.entry.size for wheel in group])),
                f"<code>{escape(filled('pip', group[0], address))}</code>",
            )
        )
    heads = ("For", "Linux on", "Python", "Version", "Compute capabilities", "Size", "With pip")
    return _table("What exists", heads, rows)


def _every(label: str, wheels: Sequence[Wheel]) -> str:
    rows = []
    for wheel in wheels:
        entry = wheel.entry
        state = "" if entry.yanked is None else f"withdrawn: {escape(entry.yanked or 'no reason was given')}"
        # Linked so that a copy made by following links has it; the channel's page only names it.
        metadata = (
            f'<a href="{escape(wheel.link(""))}.metadata" aria-label="metadata of {escape(entry.filename)}">'
            "metadata</a>"
        )
        rows.append(
            (
                f'<a href="{escape(wheel.link(""))}">{escape(entry.filename)}</a>',
                "" if entry.is_source else metadata,
                escape(_size([entry.size])),
                f"<code>{escape(entry.sha256)}</code>",
                state,
            )
        )
    return _table(label, ("File", "Metadata", "Size", "SHA-256", "State"), rows)


def _plain(entries: Iterable[Entry], address: str) -> str:
    """What fits every torch: the source distribution, and the plain wheel with the command that compiles it."""
    order = sorted(entries, key=lambda entry: version_order(entry.version), reverse=True)
    files = [Wheel("", "", "", "", "", f"{PLAIN}/", entry) for entry in order]
    offered = [file for file in files if file.entry.is_source and file.entry.yanked is None]
    final = [file for file in offered if version_order(file.version)[1]] or offered
    lines = ""
    if final:
        template = BUILD.replace("{version}", final[0].version)
        lines = (
            f'<pre><code data-lines="{escape(template)}">{escape(template.replace("{index}", address))}</code></pre>\n'
        )
    return (
        "<h2>For another torch</h2>\n"
        "<p>For a vendor's or a nightly torch, and for any other that no wheel is for, "
        "<code>scaled-mask-softmax build</code> compiles one from the source distribution, after saying how long that "
        f'takes. The command is part of every wheel, the <a href="{PLAIN}/">plain one</a> too, which runs beside any '
        "torch on plain torch operators.</p>\n"
        f"{lines}<details>\n<summary>The plain wheel and the source distribution, with their checksums</summary>\n"
        f"{_every('Plain wheels and source distributions', files)}</details>\n"
    )


def _radios(name: str, title: str, values: Mapping[str, str]) -> str:
    """A group of radio buttons by value and text, the first of them chosen."""
    radios = "".join(
        f'<label><input type="radio" name="{name}" value="{escape(value)}"{"" if at else " checked"}>{escape(text)}'
        "</label>\n"
        for at, (value, text) in enumerate(values.items())
    )
    return f"<fieldset>\n<legend>{title}</legend>\n{radios}</fieldset>\n"


def _selector(offered: Sequence[Wheel]) -> str:
    cudas = sorted({wheel.cuda for wheel in offered}, key=lambda cuda: (cuda != "cpu", _numbers(cuda)), reverse=True)
    pythons = sorted({wheel.python for wheel in offered}, key=_numbers, reverse=True)
    return (
        '<section id="selector" aria-labelledby="choose" hidden>\n<h2 id="choose">Choose</h2>\n<form>\n'
        + _radios("torch", "torch", {wheel.torch: wheel.torch for wheel in offered})
        + _radios("cuda", "CUDA", {cuda: "none (CPU)" if cuda == "cpu" else cuda for cuda in cudas})
        + _radios("platform", "Platform", {wheel.platform: wheel.platform for wheel in offered})
        + _radios("python", "Python", {python: python for python in pythons})
        + _radios("tool", "With", {name: title for name, (title, _) in LINES.items()})
        + '</form>\n<pre><code id="lines"></code></pre>\n'
        '<div class="copy"><button type="button" id="copy">Copy</button><span id="status" role="status"></span></div>\n'
        "</section>\n"
    )


def _ways(wheel: Wheel, address: str) -> str:
    """The lines for each tool, by the example of one wheel."""
    ways = "".join(
        f"<h3>{escape(title)}</h3>\n<pre><code>{escape(filled(tool, wheel, address))}</code></pre>\n"
        for tool, (title, _) in LINES.items()
    )
    example = f"torch {wheel.torch}, {wheel.cuda}, Python {wheel.python} on {wheel.platform}"
    return f"<details>\n<summary>The lines for each tool, for {escape(example)}</summary>\n{ways}</details>\n"


def _embedded(data: object) -> str:
    """JSON that may stand in a script element, whatever it holds."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _source(text: str) -> str:
    """A content security policy's name for an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page(channels: Mapping[str, Mapping[str, Entry]], missing: Sequence[str], address: str = "") -> str:
    """The page for `channels` by name and file, as in index.json; `missing` names wheels that are expected.

    address: where the page will lie, ending in "/". Without JavaScript its commands name that; with it, where the page
    really lies, so that a mirror prints its own address.
    """
    style, script = (Path(__file__).with_name(f"landing.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    wheels = every(channels)
    offered = newest(wheels)
    where = address or PLACEHOLDER
    data = {
        "lines": {tool: lines for tool, (_, lines) in LINES.items()},
        "wheels": [
            (*wheel.choice, wheel.channel, wheel.entry.version, wheel.entry.url, wheel.entry.sha256)
            for wheel in offered
        ],
    }
    policy = (
        f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; base-uri 'none'; "
        "form-action 'none'"
    )
    note = "" if address else f"<p>In the tables <code>{PLACEHOLDER}</code> stands for this page's address.</p>\n"
    if offered:
        body = (
            f"{_selector(offered)}<h2>What exists</h2>\n{note}{_coverage(offered, where)}{_ways(offered[0], where)}"
            f"<details>\n<summary>Every wheel, with its checksum</summary>\n{_every('Every wheel', wheels)}"
            "</details>\n"
        )
    else:
        body = "<p>There is no wheel here yet.</p>\n"
    if plain := channels.get(PLAIN):
        body += _plain(plain.values(), where)
    if missing:
        names = "".join(f"<li><code>{escape(name)}</code></li>\n" for name in missing)
        body += f"<details>\n<summary>Expected, and missing</summary>\n<ul>\n{names}</ul>\n</details>\n"
    scripts = (
        f'<script type="application/json" id="data">{_embedded(data)}</script>\n<script>{script}</script>\n'
        if offered
        else ""
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>Install scaled-mask-softmax</title>\n<style>{style}</style>\n</head>\n<body>\n"
        "<main>\n<h1>Install scaled-mask-softmax</h1>\n"
        "<p>A wheel fits one torch minor release and one CUDA release. Yours: "
        '<code>python -c "import torch; print(torch.__version__, torch.version.cuda)"</code>. '
        "The lines name one channel and the full version, so the torch that is there stays as it is and a mismatch "
        "fails loudly.</p>\n"
        f'{body}<p><a href="index.json">index.json</a> says the same to tools; <a href="SHA256SUMS">SHA256SUMS</a> '
        f"lists the files that lie here.</p>\n</main>\n{scripts}</body>\n</html>\n"
    )
