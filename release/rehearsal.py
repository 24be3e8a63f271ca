"""A whole release on a small matrix, in a clone: tags, builds, a cell that fails, a second version, installs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from . import ROOT, WORK
from .matrix import MATRIX_FILE, Matrix, MatrixError, load, parse_toml, read
from .progress import StepError, Steps, say
from .torch_info import CPU

FOLDER = WORK / "rehearsal"


def _toml(tables: dict[str, object], prefix: str = "") -> str:
    """TOML of nested tables of strings, integers and lists of strings."""
    lines, below = [], []
    for key, value in tables.items():
        name = f'{prefix}"{key}"'
        if isinstance(value, dict):
            below.append(f"\n[{name}]\n{_toml(value, f'{name}.')}")
        else:
            lines.append(f"{json.dumps(key)} = {json.dumps(value)}\n")
    return "".join([*lines, *below])


def small(text: str, version: str, cells: Sequence[str], manylinux: str, archs: str, machine: str) -> str:
    """The matrix in `text`, of these `cells` ("2.14/cu130/3.11") on `machine` alone, each of them proven."""
    data = parse_toml(text)
    old = data["manylinux"]
    data.update(version=version, manylinux=manylinux, default_torch=cells[0].split("/")[0])
    data["platform"] = {machine: data["platform"][machine]}
    data["platform"][machine]["image"] = data["platform"][machine]["image"].replace(old, manylinux)
    torches: dict[str, object] = {}
    for minor, row in data["torch"].items():
        mine = [cell.split("/") for cell in cells if cell.startswith(f"{minor}/")]
        labels = list(dict.fromkeys(label for _, label, _ in mine))
        pythons = sorted({python for *_, python in mine}, key=lambda python: int(python.split(".")[1]))
        if labels:
            release = row["release"]
            proven = {machine: labels}
            torches[minor] = {
                "release": release, "default": labels[0], "cuda": labels, "python": pythons, "proven": proven
            }  # fmt: skip
    data["torch"] = torches
    used = {label for cell in cells for label in [cell.split("/")[1]]}
    data["cuda"] = {
        label: {**row, "architectures": f"{archs}+PTX"} for label, row in data["cuda"].items() if label in used
    }
    for row in data["cuda"].values():
        for key in [key for key in row if key.startswith("architectures_")]:
            del row[key]
    data["architecture"] = {name: data["architecture"][name] for name in archs.split(";")}
    result = _toml(data)
    read(result, "the small matrix")
    return result


def default_cells(data: Matrix, machine: str, python: str) -> tuple[list[str], list[str]]:
    """The cells of a rehearsal: two torch minors, the default one and the newest other, on `python` and the next one,
    and a proven one for the CPU. And those of them that are installed: the first and the last.

    Raises MatrixError where the matrix lacks one.
    """
    default = data.cell(machine=machine).torch
    other = [row for row in data.torch.values() if row is not default][-1]
    both = [name for name in default.python if name in other.python]
    pythons = both[both.index(python) :][:2] if python in both else []
    if len(pythons) < 2:
        minors = f"{default.minor} and {other.minor}"
        raise MatrixError(f"torch {minors} have Python {', '.join(both)}: not {python} and a newer one")
    cells = [f"{row.minor}/{row.default}/{name}" for row in (default, other) for name in pythons]
    cpu = [cell.torch for cell in data.cells(None, CPU, machine, proven=True) if python in cell.torch.python]
    if not cpu:
        raise MatrixError(f"no proven cell for the CPU has Python {python}")
    cells.append(f"{cpu[-1].minor}/{CPU}/{python}")
    return cells, [cells[0], cells[-1]]


class _Clone:
    """The checkout that the release is made of, and where its wheels go."""

    def __init__(self) -> None:
        self.root = FOLDER / "clone"
        self.staged = self.root / "build" / "staged"
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir(parents=True)
        self.git("clone", "--quiet", str(ROOT), str(self.root), cwd=ROOT)
        self.git("config", "user.name", "rehearsal")
        self.git("config", "user.email", "rehearsal@localhost")

    def git(self, *arguments: str, cwd: Path | None = None) -> None:
        subprocess.run(["git", *arguments], cwd=cwd or self.root, check=True)

    def tag(self, matrix: str, version: str) -> None:
        (self.root / "release" / MATRIX_FILE.name).write_text(matrix, encoding="utf-8")
        self.git("commit", "--quiet", "--all", "--message", f"Version {version}")
        self.git("tag", f"v{version}")

    def release(self, *arguments: str | Path, fails: str = "", **env: str) -> str:
        """Runs a command of the clone's. With `fails` it must fail and say so; else it must not."""
        command = [sys.executable, "-m", "release", *map(str, arguments)]
        done = subprocess.run(command, cwd=self.root, env={**os.environ, **env}, capture_output=True, text=True)
        output = done.stdout + done.stderr
        if (done.returncode != 0) != bool(fails) or fails not in output:
            wanted = f"fail with {fails!r}" if fails else "succeed"
            raise StepError(f"{' '.join(command[2:])} should {wanted}, and said:\n{output[-3000:]}")
        return output

    def build(self, cell: str, archs: str, fails: str = "", **env: str) -> None:
        torch, cuda, python = cell.split("/")
        options = ["--torch", torch, "--cuda", cuda, "--python", python, "--test", "no"]
        output = self.release("wheel", *options, "--archs", archs, fails=fails, **env)
        told = dict(line.split(maxsplit=1) for line in output.splitlines() if line.startswith(("  wheel ", "  total ")))
        if not fails:
            say(f"      {Path(told['wheel']).name}: {told['total'].split(maxsplit=1)[1]}")

    def stage(self, tag: str, fails: str = "") -> None:
        self.release("stage", "dist", "--tag", tag, fails=fails)
        if not fails:
            (sdist,) = self.staged.glob("assets/*.tar.gz")
            with tarfile.open(sdist) as archive:
                inside = {name.partition("/")[2] for name in archive.getnames()}
            tracked = subprocess.run(["git", "ls-files"], cwd=self.root, check=True, capture_output=True, text=True)
            if more := inside - {*tracked.stdout.splitlines(), "PKG-INFO"}:
                raise StepError(f"the source distribution holds what is not under version control: {sorted(more)[0]}")

    def publish(self) -> None:
        """What a release does with a channel that has others: adds, and never takes away."""
        files = sorted(path for path in (self.staged / "assets").iterdir() if path.suffix in (".whl", ".gz"))
        base = (FOLDER / "released").as_uri() + "/"
        options: list[str | Path] = ["--base-url", base, "--assets", FOLDER / "released", "--release", "complete"]
        self.release("index", FOLDER / "pages", *files, *options)


def _published() -> dict[str, str]:
    data = json.loads((FOLDER / "pages" / "index.json").read_text(encoding="utf-8"))
    return {entry["filename"]: entry["sha256"] for entries in data["channels"].values() for entry in entries}


def check_cells(cells: Iterable[str]) -> None:
    """Raises MatrixError where a cell is not spelt as one."""
    for cell in cells:
        if not re.fullmatch(r"\d+\.\d+/(?:cpu|cu\d+)/3\.\d+", cell, re.ASCII):
            raise MatrixError(f"{cell!r} is no cell: give torch, CUDA and Python, such as 2.14/cu130/3.11")


def next_version(version: str) -> str:
    """The patch release after it, or after what it is a candidate of."""
    major, minor, patch = re.findall(r"\d+", version)[:3]
    return f"{major}.{minor}.{int(patch) + 1}"


def run(cells: Sequence[str], manylinux: str, archs: str, *, try_out: Sequence[str]) -> None:
    """Releases `cells` ("2.14/cu130/3.11") for `archs` twice, and installs those in `try_out`.

    Raises StepError where a step does not end as it must.
    """
    check_cells([*cells, *try_out])
    steps = Steps(7)
    text = MATRIX_FILE.read_text(encoding="utf-8")
    machine = os.uname().machine
    first = load()
    later = next_version(first.version)
    clone = _Clone()

    steps.next(f"tag v{first.version}; every cell but the last is built")
    clone.tag(small(text, first.version, cells, manylinux, archs, machine), first.version)
    for cell in cells[:-1]:
        clone.build(cell, archs)

    steps.next("the last cell's compiler fails: there is no release")
    clone.build(cells[-1], archs, fails="error:", CXX="false")
    clone.stage(f"v{first.version}", fails="1 wheels of the release are missing")
    clone.stage(f"v{later}", fails="the version in the matrix is")

    steps.next("that cell again, and no other: a release")
    before = {path: path.stat().st_mtime_ns for path in (clone.root / "dist").rglob("*.whl")}
    clone.build(cells[-1], archs)
    if any(path.stat().st_mtime_ns != time for path, time in before.items()):
        raise StepError("another wheel than the failed one was built again")
    clone.stage(f"v{first.version}")
    clone.publish()

    steps.next("from the staged channels into clean environments")
    for cell in try_out:
        torch, cuda, python = cell.split("/")
        options = ["--torch", torch, "--cuda", cuda, "--python", python]
        output = clone.release("try", clone.staged / "site", *options)
        say("      " + " ".join([cell, *(line.strip() for line in output.splitlines() if "agreement" in line)]))

    steps.next(f"tag v{later} on top")
    old = _published()
    clone.tag(small(text, later, cells, manylinux, archs, machine), later)
    for cell in cells:
        clone.build(cell, archs)
    clone.stage(f"v{later}")
    clone.publish()
    new = _published()
    # The plain wheel and the source distribution too.
    expected = len(cells) + 2
    if len(old) != expected or len(new) != 2 * expected or not old.items() <= new.items():
        raise StepError(f"{len(old)} files were published, then {len(new)}, where {2 * expected} were expected")

    steps.next("publishing again changes nothing; another file of a released name is refused")
    pages = {path: path.stat().st_mtime_ns for path in (FOLDER / "pages").rglob("*")}
    clone.publish()
    if {path: path.stat().st_mtime_ns for path in (FOLDER / "pages").rglob("*")} != pages:
        raise StepError("publishing the same again has changed the pages")
    wheel = sorted((clone.staged / "assets").glob("*+*.whl"))[0]
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    clone.release("index", FOLDER / "pages", wheel, fails="a released file never changes")

    steps.next("pip takes the newest from the published pages, and the older one by its name")
    torch, cuda, _ = cells[0].split("/")
    channel = (FOLDER / "pages" / "whl" / cuda / f"torch{torch}").as_uri() + "/"
    for wanted, version in ("", later), (f"=={first.version}+{cuda}torch{torch}", first.version):
        target = FOLDER / "got" / version
        options = ["--isolated", "download", "--no-deps", "--index-url", channel, "--dest", str(target)]
        options += ["--python-version", cells[0].split("/")[2], "--only-binary", ":all:"]
        options += ["--platform", f"{manylinux}_{machine}", f"scaled-mask-softmax{wanted}"]
        subprocess.run([sys.executable, "-m", "pip", *options], check=True, capture_output=True)
        (got,) = target.iterdir()
        if f"-{version}+" not in got.name:
            raise StepError(f"pip took {got.name}, not version {version}")
        say(f"      {got.name}")
    say(f"Done: {len(new)} files of two versions in {FOLDER / 'pages'}")
