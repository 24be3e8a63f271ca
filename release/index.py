"""Lays wheels out as channels: one PEP 503 index a (CUDA, torch) pair, so that pip can never pick a neighbour's binary.

A channel is a folder such as whl/cu130/torch2.14/ and works from file://, any web server and static hosting. Links
carry sha256, write + as %2B, and have PEP 658 metadata beside the wheel. What fits every torch, the plain wheel and the
source distribution, has the channel plain/; the latter is on no page that installers read, or they would compile it
unasked. index.json says the same to tools and is what the pages are written from; it remembers what was withdrawn.
Nothing is ever deleted, and a file that is in a channel is never replaced by another, unless that is asked for.

A reader never sees half an update: files come before the page that links to them, and each replaces its predecessor in
one step.
"""

from __future__ import annotations

import contextlib
import fcntl
import filecmp
import hashlib
import html
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from . import landing, record, source_file, wheel_file
from .landing import PLAIN
from .source_file import SourceFile
from .wheel_file import WheelFile

PROJECT = "scaled-mask-softmax"
DATA = "index.json"
CHECKSUMS = "SHA256SUMS"
# Of index.json. Another number means that readers of this one would misread it.
FORMAT = 1

# What the names of our files are made of: no other is indexed, so none can lead out of a channel or into a page.
_PUBLIC = r"\d+(?:\.\d+)*(?:(?:a|b|rc)\d+)?"
_LABEL = r"\+(?P<cuda>cpu|cu\d+)torch(?P<torch>\d+(?:\.[a-z0-9]+)*)"
_CHANNEL = re.compile(rf"whl/(?:cpu|cu\d+)/torch\d+(?:\.[a-z0-9]+)*|{PLAIN}", re.ASCII)
_NATIVE = re.compile(rf"{wheel_file.NAME}-(?P<version>{_PUBLIC}{_LABEL})-\w+-\w+-\w+(?:\.\w+)*\.whl", re.ASCII)
_PLAIN = re.compile(rf"{wheel_file.NAME}-(?P<version>{_PUBLIC})(?:-py3-none-any\.whl|\.tar\.gz)", re.ASCII)


class ChannelError(ValueError):
    """A wheel belongs to no channel, or to another; or the index is not what it should be."""


@dataclass(frozen=True)
class Entry:
    """A file in a channel, as index.json has it."""

    filename: str
    version: str
    url: str  # relative to the page of the channel's project, or absolute
    sha256: str
    size: int
    metadata_sha256: str
    requires_python: str
    architectures: list[str]
    ptx: list[str]
    yanked: str | None  # the reason

    def __post_init__(self) -> None:
        """Raises ChannelError for what no wheel of ours has, wherever it comes from."""
        if not isinstance(self.filename, str) or (name := _name(self.filename)) is None:
            raise ChannelError(f"{self.filename!r} is the name of no wheel and no source distribution of ours")

        def text(value: object, pattern: str) -> bool:
            return isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII) is not None

        def texts(value: object, pattern: str) -> bool:
            return isinstance(value, list) and all(text(each, pattern) for each in value)

        right = {
            "version": self.version == name["version"],
            "url": text(self.url, r"(?:(?:https?|file)://[^\s\"'<>]*/)?" + re.escape(quote(self.filename))),
            "sha256": text(self.sha256, r"[0-9a-f]{64}"),
            "size": type(self.size) is int and self.size >= 0,
            "metadata_sha256": text(self.metadata_sha256, r"[0-9a-f]{64}"),
            "requires_python": text(self.requires_python, r"[0-9.,<>=!~* ]*"),
            "architectures": texts(self.architectures, r"\d+\.\d+[a-z]?"),
            "ptx": texts(self.ptx, r"\d+\.\d+[a-z]?"),
            "yanked": isinstance(self.yanked, str | None),
        }
        for field in (field for field, is_right in right.items() if not is_right):
            raise ChannelError(f"{self.filename!r}: {field} is {getattr(self, field)!r}, as no file of ours has it")

    @property
    def is_source(self) -> bool:
        return self.filename.endswith(".tar.gz")


def _name(filename: str) -> re.Match[str] | None:
    return _NATIVE.fullmatch(filename) or _PLAIN.fullmatch(filename)


def channel(filename: str) -> str:
    """The channel of a file, from its name: "whl/cu130/torch2.14", or "plain"."""
    match = _name(filename)
    if match is None:
        raise ChannelError(
            f"{filename!r} is the name of no wheel and no source distribution of ours, so it belongs to no channel"
        )
    return f"whl/{match['cuda']}/torch{match['torch']}" if match.re is _NATIVE else PLAIN


def page(title: str, links: Iterable[str]) -> str:
    body = "".join(f"    {link}<br>\n" for link in links)
    return (
        "<!DOCTYPE html>\n<html>\n  <head>\n"
        '    <meta charset="utf-8">\n    <meta name="pypi:repository-version" content="1.0">\n'
        f"    <title>{html.escape(title)}</title>\n  </head>\n  <body>\n{body}  </body>\n</html>\n"
    )


def _link(entry: Entry) -> str:
    attributes = {"data-core-metadata": f"sha256={entry.metadata_sha256}"}
    # The name of the attribute before PEP 714.
    attributes["data-dist-info-metadata"] = attributes["data-core-metadata"]
    if entry.requires_python:
        attributes["data-requires-python"] = entry.requires_python
    if entry.yanked is not None:
        attributes["data-yanked"] = entry.yanked
    text = " ".join(f'{key}="{html.escape(value)}"' for key, value in attributes.items())
    return f'<a href="{html.escape(entry.url)}#sha256={entry.sha256}" {text}>{html.escape(entry.filename)}</a>'


def put(path: Path, data: bytes | Path) -> None:
    """Writes the file, or a copy of another, in one step, if it is not there already.

    After a crash of the machine too, the file is the old one or the new one.
    """
    if path.is_file():
        same = filecmp.cmp(path, data, shallow=False) if isinstance(data, Path) else path.read_bytes() == data
        if same:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.new")
    try:
        with scratch.open("wb") as file:
            if isinstance(data, Path):
                with data.open("rb") as source:
                    shutil.copyfileobj(source, file)
            else:
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def _built(wheel: WheelFile) -> dict[str, Any]:
    """A wheel's build record; empty where it has none. Raises ChannelError for another wheel's, or what is none."""
    path = f"{wheel_file.NAME}/_build_record.py"
    try:
        build = record.read(wheel.files[path].decode("utf-8", "replace")) if path in wheel.files else {}
    except record.RecordError as error:
        raise ChannelError(f"{wheel.path}: {error}") from None
    label = str(build.get("version", wheel.version)).partition("+")[2]
    if label != wheel.version.partition("+")[2]:
        raise ChannelError(
            f"{wheel.path} was built for {label or 'no torch'}, and belongs to another channel than its name says"
        )
    return build


def _entry(file: WheelFile | SourceFile, data: bytes, base_url: str) -> Entry:
    name = file.path.name
    build = _built(file) if isinstance(file, WheelFile) else {}
    return Entry(
        filename=name,
        version=file.version,
        url=base_url + quote(name),
        sha256=hashlib.sha256(data).hexdigest(),
        size=len(data),
        metadata_sha256=hashlib.sha256(file.metadata).hexdigest(),
        requires_python=str(file.message.get("Requires-Python", "")),
        architectures=build.get("architectures", []),
        ptx=build.get("ptx", []),
        yanked=None,
    )


class Index:
    """The index below a folder: read, changed in memory, and written in one go."""

    def __init__(self, root: Path) -> None:
        """Raises ChannelError where what is there contradicts itself."""
        self.root = root
        self.channels: dict[str, dict[str, Entry]] = {}
        self.missing: list[str] = []
        self.address = ""
        self._new: dict[Path, bytes | Path] = {}
        path = root / DATA
        if path.is_file():
            try:
                data = json.loads(path.read_text(encoding="utf-8"))
                if (found := data.get("format", FORMAT)) != FORMAT:
                    raise ValueError(f"it is of format {found!r}, and this release writes {FORMAT}")
                self.missing = data["expected_missing"]
                if not isinstance(self.missing, list) or not all(isinstance(name, str) for name in self.missing):
                    raise TypeError("expected_missing are not names")
                if address := data.get("address"):
                    self.set_address(address)
                for name, entries in data["channels"].items():
                    if not _CHANNEL.fullmatch(name):
                        raise ChannelError(f"{name!r} is no channel")
                    self.channels[name] = {entry["filename"]: Entry(**entry) for entry in entries}
                    if len(self.channels[name]) != len(entries):
                        raise ChannelError(f"channel {name!r} has two entries of one file")
                    if stray := [file for file in self.channels[name] if channel(file) != name]:
                        raise ChannelError(f"{stray[0]} is no file of channel {name!r}")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ChannelError(f"{path} is none of ours: {error!r}. Put back the one that was here") from None
        else:
            for name in (channel.relative_to(root).as_posix() for channel in (*root.glob("whl/*/*"), root / PLAIN)):
                if _CHANNEL.fullmatch(name) and (found := root / name / PROJECT / "index.html").exists():
                    raise ChannelError(
                        f"{path} is gone, which wrote {found} and alone knows what was withdrawn: put it back, or "
                        "remove the pages too to begin anew"
                    )
        patterns = (f"whl/*/*/{PROJECT}/*.whl", f"{PLAIN}/{PROJECT}/*.whl", f"{PLAIN}/{PROJECT}/*.tar.gz")
        for file in sorted(path for pattern in patterns for path in root.glob(pattern)):
            self._check_file(file)

    def _check_file(self, path: Path) -> None:
        """A file that lies in a channel belongs there, and is the one that was indexed."""
        folder = path.parent.parent.relative_to(self.root).as_posix()
        if channel(path.name) != folder:
            raise ChannelError(f"{path} lies in a channel that is not its own, which is {channel(path.name)}")
        known = self.channels.get(folder, {}).get(path.name)
        if known is None:
            self.add(path)
        elif hashlib.sha256(path.read_bytes()).hexdigest() != known.sha256:
            raise ChannelError(f"{path} is not the file that was indexed")
        elif not known.is_source:
            # Whoever has changed or removed this one gets it back.
            self._new[path.with_name(f"{path.name}.metadata")] = wheel_file.read(path).metadata

    def add(self, path: Path, *, base_url: str = "", assets: Path | None = None, may_replace: bool = False) -> str:
        """Adds a wheel or a source distribution and returns its channel. With `base_url` links lead there, and the
        files go to `assets`.

        Raises WheelFileError where it is none, ChannelError where it belongs to no channel or where another file has
        its name, unless `may_replace`.
        """
        is_source = path.name.endswith(".tar.gz")
        read: WheelFile | SourceFile = source_file.read(path) if is_source else wheel_file.read(path)
        name, data = channel(path.name), path.read_bytes()
        entry, entries = _entry(read, data, base_url), self.channels.setdefault(name, {})
        known = entries.get(path.name)
        if known is not None and known.sha256 != entry.sha256 and not may_replace:
            raise ChannelError(f"{path} and the file of that name in {name} differ: a released file never changes")
        entries[path.name] = entry if known is None else replace(entry, yanked=known.yanked)
        folder = assets if base_url and assets is not None else self.root / name / PROJECT
        self._new[folder / path.name] = path
        if not is_source:
            self._new[folder / f"{path.name}.metadata"] = read.metadata
        return name

    def set_address(self, address: str) -> None:
        """Where the index will lie, for the landing page's tables. Raises ChannelError for another kind of text."""
        if not re.fullmatch(r"(?:https?|file)://[^\s\"'<>?#{}]*/", address):
            raise ChannelError(f"an index lies at an http, https or file address that ends in /, not at {address!r}")
        self.address = address

    def entries(self) -> Iterator[Entry]:
        for name in sorted(self.channels):
            yield from (self.channels[name][file] for file in sorted(self.channels[name]))

    def check_files(self) -> None:
        """Raises ChannelError where a file that lies in a channel of its own is there no more."""
        for name, entries in self.channels.items():
            for entry in entries.values():
                path = self.root / name / PROJECT / entry.filename
                if entry.url == quote(entry.filename) and path not in self._new and not path.is_file():
                    raise ChannelError(f"{path} is gone, and pages link to it: put it back, or give its copy as a FILE")

    def yank(self, version: str, reason: str) -> int:
        """Withdraws a version (of every label, or with its label): only who asks for it exactly still gets it.

        Returns how many files that are. Raises ChannelError where there is none, or for a reason of several lines.
        """
        if not reason.isprintable():
            raise ChannelError(f"the reason {reason!r} is no line of text: write it in one line, as UTF-8")
        count = 0
        for entries in self.channels.values():
            for file, entry in entries.items():
                if version in (entry.version, entry.version.partition("+")[0]):
                    entries[file] = replace(entry, yanked=reason)
                    count += 1
        if count == 0:
            raise ChannelError(f"nothing of {version} is in {self.root}")
        return count

    def expect(self, names: Iterable[str], version: str, *, allow_missing: bool) -> None:
        """The native wheels of `version` are those with these names: all, or what lacks is listed if `allow_missing`.

        Raises ChannelError for one that lacks, and for one more: its cell is unproven.
        """
        wanted = set(names)
        native = (entry for entry in self.entries() if "+" in entry.version)
        here = {entry.filename for entry in native if entry.version.partition("+")[0] == version}
        if more := sorted(here - wanted):
            raise ChannelError(f"{more[0]} is no wheel of release {version}: the matrix has no such cell, or unproven")
        self.missing = sorted(wanted - here)
        if self.missing and not allow_missing:
            raise ChannelError(f"{len(self.missing)} wheels of the release are missing, the first {self.missing[0]}")

    def write(self) -> None:
        """Writes everything: files, then index.json, then the pages: what stops half way is completed by the next.

        Raises ChannelError, before anything is written, for what cannot be written as UTF-8.
        """
        everything = {
            "format": FORMAT,
            "project": PROJECT,
            "channels": {
                name: [asdict(self.channels[name][file]) for file in sorted(self.channels[name])]
                for name in sorted(self.channels)
            },
            "expected_missing": self.missing,
            "address": self.address,
        }
        texts = {self.root / DATA: json.dumps(everything, indent=2) + "\n"}
        for name, entries in self.channels.items():
            links = [_link(entries[file]) for file in sorted(entries) if not entries[file].is_source]
            texts[self.root / name / PROJECT / "index.html"] = page(f"Links for {PROJECT}", links)
            texts[self.root / name / "index.html"] = page("Simple index", [f'<a href="{PROJECT}/">{PROJECT}</a>'])
        sums = [
            f"{entry.sha256}  {path.relative_to(self.root)}\n"
            for name in sorted(self.channels)
            for entry in sorted(self.channels[name].values(), key=lambda entry: entry.filename)
            if (path := self.root / name / PROJECT / entry.filename) in self._new or path.is_file()
        ]
        texts[self.root / CHECKSUMS] = "".join(sums)
        texts[self.root / "index.html"] = landing.page(self.channels, self.missing, self.address)
        try:
            data = {path: text.encode() for path, text in texts.items()}
        except UnicodeEncodeError as error:
            raise ChannelError(f"{error.object[error.start : error.end]!r} cannot be written as UTF-8") from None
        for path, contents in (self._new | data).items():
            put(path, contents)
        self._new.clear()


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One update at a time; others wait. The lock goes with its process, however that ends."""
    path, told = root / ".lock", False
    while True:
        with path.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not told:
                    print(f"waiting for another update of {root}", file=sys.stderr, flush=True)
                told = True
                fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                held = os.path.samestat(path.stat(), os.fstat(lock.fileno()))
            except FileNotFoundError:
                held = False
            if not held:  # who held it before has removed it
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


@contextlib.contextmanager
def update(root: Path) -> Iterator[Index]:
    """The index below `root`, to be changed; written at the end, unless there is an error. One at a time.

    Raises ChannelError where the system refuses a file: then readers see what they saw before, or some of the update,
    and the same again completes it.
    """
    made = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root):
            for path in root.rglob(".*.new"):
                path.unlink()  # of an update that was killed
            found = Index(root)
            yield found
            found.write()
    except OSError as error:
        raise ChannelError(
            f"{error.filename or root}: {error.strerror or error}. The index below {root} still serves what it did; "
            "mend this and run the same command again"
        ) from None
    finally:
        # What an update made that wrote nothing.
        with contextlib.suppress(OSError):
            for folder in made:
                folder.rmdir()


def write(root: Path, wheels: Iterable[Path], *, may_replace: bool = False) -> list[Path]:
    """Adds `wheels` to the index below `root`, all or none. Returns their channels."""
    with update(root) as index:
        return [root / name for name in dict.fromkeys(index.add(wheel, may_replace=may_replace) for wheel in wheels)]
