"""The documentation: its code runs, its commands exist, and what it takes from elsewhere is current.

Blocks of a page run in order, as written, in one namespace and one folder. What stands after the language says more:

    python, sh             runs; warnings are errors
    python needs=cuda      runs where there is a CUDA device (needs=nvcc: a CUDA compiler)
    sh not-run             cannot run here; our own commands and options, and pip's, must exist
    text                   is output, or no code
    any language whose first line is a comment that is a file's name: is written to that file, for later blocks
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import itertools
import os
import re
import shlex
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from packaging.requirements import InvalidRequirement, Requirement

from release import __main__ as release_program
from release import matrix, toolkit
from scaled_mask_softmax_cli import __main__ as console

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
NOT_CODE = ("text", "json", "toml", "ini")

# torch builds CUDA code with the compiler of its own major release alone.
NEEDS = {
    "cuda": torch.cuda.is_available,
    "nvcc": lambda: torch.version.cuda is not None and toolkit.locate_nvcc() is not None,
}

FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^(?:#|//) (?P<name>[\w.-]+\.\w+|CMakeLists\.txt)\n")


class Block(NamedTuple):
    language: str
    words: list[str]
    text: str
    line: int

    @property
    def file(self) -> str | None:
        found = FILE.match(self.text)
        return found["name"] if found else None

    @property
    def needs(self) -> list[str]:
        return [word.removeprefix("needs=") for word in self.words if word.startswith("needs=")]


def blocks(text: str) -> list[Block]:
    found = []
    for fence in FENCE.finditer(text):
        words = fence["info"].split()
        if words and words[0].startswith("{"):  # a directive of the site
            continue
        indent = len(fence["indent"])
        lines = [line[indent:] for line in fence["text"].splitlines(keepends=True)]
        language = words[0] if words else ""
        found.append(Block(language, words[1:], "".join(lines), text.count("\n", 0, fence.start()) + 2))
    return found


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=name)


@every_page
def test_blocks_say_what_they_are(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for block in blocks(text):
        where = f"{name(page)}:{block.line}"
        runs = block.language in ("python", "sh")
        assert runs or block.file or block.language in NOT_CODE, (
            f"{where}: '{block.language}'; begin the block with ```python, sh, sh not-run or text"
        )
        assert all(word == "not-run" or word.startswith("needs=") for word in block.words), where
        assert set(block.needs) <= NEEDS.keys(), where
        assert "not-run" not in block.words or block.language == "sh", f"{where}: only sh may not run"
    assert text.count("```") == 2 * len(list(FENCE.finditer(text))), "a fence that is not closed"


def run_shell(text: str, where: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        env={**os.environ, "PATH": path, "PYTHONWARNINGS": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{where}: {done.stdout}{done.stderr}"


PAGES_WITH_CODE = [
    page
    for page in PAGES
    if any(block.language in ("python", "sh") and "not-run" not in block.words for block in blocks(page.read_text()))
]


def prepare_for_extensions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's load_inline needs: a place for its builds, and a libcudart.so, which a toolkit installed from Python
    packages lacks."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")  # blocks may set it: to be put back
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    if NEEDS["nvcc"]():
        (folder / "links").mkdir()
        (folder / "links" / "libcudart.so").symlink_to(toolkit.inspect(*toolkit.locate_nvcc()).runtime)
        monkeypatch.setenv("LIBRARY_PATH", f"{folder / 'links'}:{os.environ.get('LIBRARY_PATH', '')}")


def launch_without_a_device(namespace: dict[str, Any]) -> None:
    """Of a kernel that was built where no device can run it: all of it that the host does."""
    if "half" in namespace and not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA error"):
            namespace["half"].softmax(torch.empty(300, 1000, dtype=torch.float16), 0.5, True, 90, 0)


# torch's own, of its use of itself in 2.11.
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
@pytest.mark.usefixtures("inductors_compiler")
@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=name)
def test_code_runs(device: str, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, and with the CUDA device as torch's default where there is one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scaled-mask-softmax").symlink_to(ROOT)  # the clone
    prepare_for_extensions(tmp_path, monkeypatch)
    torch.compiler.reset()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page.read_text(encoding="utf-8")):
        where = f"{name(page)}:{block.line}"
        if block.file:
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif "not-run" in block.words or not all(NEEDS[need]() for need in block.needs):
            continue
        elif block.language == "python":
            # Line numbers of a traceback are those of the page.
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            with torch.device(device):
                exec(code, namespace)
        elif block.language == "sh" and device == "cpu":
            run_shell(block.text, where)
    launch_without_a_device(namespace)


# What can be said of commands that do not run here.

OPERATORS = {"&&", "||", "|", ";", "&", ">", "<"}


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command, with variables that are set before filled in."""
    variables: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        filled = string.Template(line).safe_substitute(variables)
        lexer = shlex.shlex(filled, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if word not in OPERATORS:
                command.append(word)
                continue
            assignments = {}
            while command and re.fullmatch(r"\w+=.*", command[0], re.DOTALL):
                variable, _, value = command.pop(0).partition("=")
                assignments[variable] = value
            if command:
                yield command
            else:
                variables.update(assignments)
            command = []


def printed(function: Any, arguments: list[str]) -> str:
    """What a program's --help says; fails where there is no such command."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), pytest.raises(SystemExit) as left:
        function([*arguments, "--help"])
    assert left.value.code == 0, output.getvalue()
    return output.getvalue()


def run_release(arguments: list[str]) -> None:
    release_program._parser().parse_args(arguments)


@functools.cache
def pip_help(subcommand: str) -> str:
    command = [sys.executable, "-m", "pip", subcommand, "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def check_options(words: list[str], text: str) -> None:
    for word in words:
        if word.startswith("-"):
            option = word.split("=")[0]
            assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text), f"there is no option {option}"


def check_requirement(word: str) -> None:
    """A release of ours that is named is one that the matrix has."""
    with contextlib.suppress(InvalidRequirement):
        requirement = Requirement(word)
        if requirement.name != "scaled-mask-softmax" or not requirement.specifier:
            return
        data = matrix.load()
        ours = {wheel.split("-")[1] for wheel in matrix.wheels(data, data.cells())} | {data.version}
        assert {specifier.version for specifier in requirement.specifier} <= ours, word


def check_command(words: list[str]) -> None:
    """Fails for a command, option, target or version of ours, or of pip, that does not exist."""
    words = list(words)
    if words[:2] in (["python", "-m"], ["python3", "-m"]):
        words = words[2:]
    program, arguments = words[0], words[1:]
    if program == "make":
        text = (ROOT / "Makefile").read_text(encoding="utf-8")
        for word in arguments:
            variable, is_assignment, _ = word.partition("=")
            if is_assignment:
                assert re.search(rf"\b{variable}\b", text), f"make knows no {variable}"
            else:
                assert re.search(rf"^{re.escape(word)}:", text, re.MULTILINE), f"make knows no target {word}"
    elif program == "scaled-mask-softmax":
        check_options(arguments, printed(console.main, arguments[:1]))
    elif program == "release":
        check_options(arguments, printed(run_release, arguments[:1]))
    elif program == "pip":
        check_options(arguments, pip_help(arguments[0]))
    if "pip" in (program, *arguments[:1]):
        for word in arguments:
            check_requirement(word)


INLINE = re.compile(r"`((?:make|scaled-mask-softmax|python -m release|pip install) [^`]+)`")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name)
def test_commands_exist(page: Path) -> None:
    """Those of shell blocks, and those within a sentence."""
    text = page.read_text(encoding="utf-8")
    given = [(f"{name(page)}:{block.line}", block.text) for block in blocks(text) if block.language == "sh"]
    given += [(name(page), " ".join(command.split())) for command in INLINE.findall(text)]
    for where, source in given:
        done = subprocess.run(["bash", "-n"], input=source, capture_output=True, text=True)
        assert done.returncode == 0, f"{where}: {done.stderr}"
        for command in commands(source):
            try:
                check_command(command)
            except AssertionError as error:
                raise AssertionError(f"{where}: {shlex.join(command)}: {error}") from None


@pytest.mark.parametrize(
    "line",
    [
        "make whell",
        "make wheel TROCH=2.14",
        "scaled-mask-softmax doctr",
        "scaled-mask-softmax bench --colums 8",
        "python -m release verfy",
        "python -m release verify --tourch x",
        "cd /tmp && pip install --indx-url x y",
        "pip install scaled-mask-softmax==0.9.0",
        'a="pip install --no-dep"\n$a torch',
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    with pytest.raises((AssertionError, subprocess.CalledProcessError)):
        list(map(check_command, commands(line)))


# What pages take from elsewhere.


def test_pictures_and_tables_are_current() -> None:
    """To write them anew: python docs/generate.py"""
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    expected = generate.files()
    assert {path: path.read_text(encoding="utf-8") for path in expected} == expected
    assert {path.name for path in (DOCS / "pictures").iterdir()} == {f"{drawn}.svg" for drawn in generate.PICTURES}


def test_named_tests_exist() -> None:
    """Each test that the comparison names is collected."""
    text = (DOCS / "comparison.md").read_text(encoding="utf-8")
    named = sorted(set(re.findall(r"`(test_\w+)::(test_\w+)`", text)))
    assert len(named) > 50
    options = ["--collect-only", "--quiet", "-p", "no:cacheprovider"]
    ids = [f"tests/{module}.py::{test}" for module, test in named]
    command = [sys.executable, "-m", "pytest", *options, *ids]
    variables = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # other plugins may warn at this one's process
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_input_has_a_test() -> None:
    """Each row below the comparison's features and inputs names one."""
    text = (DOCS / "comparison.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\|[^\n]*\| test \|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert len(tables) == 6
    for row in "".join(tables).splitlines():
        assert re.search(r"`test_\w+::test_\w+` ?", row.rpartition(" | ")[2]), row


# The README in Chinese.

HEADING = re.compile(r"^(#+) (.*)$", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")
NUMBER = re.compile(r"(?<![A-Za-z0-9_.])\d+(?:[.,]\d+)*(?![A-Za-z0-9_])")
BENCH = re.compile(r"<!-- bench: .*?<!-- end of bench -->", re.DOTALL)


class Section(NamedTuple):
    """What a translation leaves as it is. Tables: what is code and what is a number in each row."""

    level: int
    code_blocks: list[str]
    figures: list[str]
    tables: list[tuple[int, set[str]]]
    inline: set[str]
    links: set[str]


def untranslated(text: str) -> set[str]:
    code = {" ".join(span.split()) for span in CODE.findall(text)}
    return code | set(NUMBER.findall(CODE.sub("", text)))


def sections(path: Path) -> list[tuple[str, Section]]:
    text = path.read_text(encoding="utf-8")
    fenced = [fence[0] for fence in FENCE.finditer(text)]
    # Fences hold lines that look like headings.
    plain = FENCE.sub(lambda fence: "\0" * 3, text)
    pieces = HEADING.split(plain)[1:]
    found = []
    for level, title, body in zip(pieces[::3], pieces[1::3], pieces[2::3]):
        blocks = [fenced.pop(0) for _ in range(body.count("\0" * 3))]
        rest = BENCH.sub("", body)
        rows = [line for line in rest.splitlines() if line.startswith("|")]
        prose = "\n".join(line for line in rest.splitlines() if not line.startswith("|"))
        links = set(re.findall(r"\]\(([^)]+)\)", rest)) - {README.name, CHINESE.name}
        prose = re.sub(r"\]\([^)]+\)", "]", prose)
        tables = [(row.count("|"), untranslated(row)) for row in rows]
        found.append((title, Section(len(level), blocks, BENCH.findall(body), tables, untranslated(prose), links)))
    return found


def test_the_chinese_readme_says_the_same() -> None:
    """Section by section: code and figures as they are, as many rows, the same names and numbers in prose."""
    english, chinese = sections(README), sections(CHINESE)
    assert [section.level for _, section in chinese] == [section.level for _, section in english]
    for (title, expected), (chinese_title, found) in zip(english, chinese):
        where = f"'{chinese_title}' of {CHINESE.name} beside '{title}'"
        for part, of_english, of_chinese in zip(Section._fields, expected, found):
            if isinstance(of_english, set):
                missing, more = of_english - of_chinese, of_chinese - of_english
                assert not missing | more, f"{where}: {part}: lacks {sorted(missing)}, has {sorted(more)} besides"
            elif isinstance(of_english, list):
                for line, (one, other) in enumerate(itertools.zip_longest(of_english, of_chinese), 1):
                    assert one == other, f"{where}: {part}: number {line} is {other}, not {one}"
            else:
                assert of_chinese == of_english, f"{where}: {part}"


def test_each_readme_links_to_the_other() -> None:
    assert f"({CHINESE.name})" in README.read_text(encoding="utf-8")
    assert f"({README.name})" in CHINESE.read_text(encoding="utf-8")
