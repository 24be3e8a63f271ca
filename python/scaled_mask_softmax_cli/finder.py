"""Finds the wheel for the running torch: install, channels, download and build."""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote

from . import channels, fetch, gpus, installed, known, remedy
from .ask import ask
from .channels import PROJECT, Source, Wheel
from .facts import tag
from .status import FAILED, FITS, INDEX, NO_WHEEL, NOT_WRITTEN, NOTHING, UNTRUSTED, Failure

# Where an installer would look beside the channel, which alone has the wheels.
_OTHER_INDEXES = (
    *("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_INDEX_URL"),
    *("UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_NO_INDEX", "UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL"),
)

# What is kept of pip's configuration files, which may name other indexes too.
_KEPT = (
    "break-system-packages",
    "cert",
    "client-cert",
    "proxy",
    "require-virtualenv",
    "retries",
    "timeout",
    "trusted-host",
)

# Settings of an installer, each a variable of PIP_ or UV_, that keep it from installing this wheel, or here.
_BENDING = (
    *("CONSTRAINT", "DRY_RUN", "EXCLUDE_NEWER", "NO_BINARY", "OFFLINE", "OVERRIDE", "PREFIX", "REQUIRE_HASHES"),
    *("REQUIRE_VIRTUALENV", "ROOT", "TARGET", "UPLOADED_PRIOR_TO", "USER"),
)

# What an installer's last words mean: a pattern, the exit status and the word for it.
_TROUBLES = (
    (
        r"not a trusted or secure host",
        INDEX,
        "pip takes nothing over plain http unless PIP_TRUSTED_HOST names the host: set it, or give an https address",
    ),
    (r"require.hashes", FAILED, "the installer asks for hashes on the command line, which it verifies without that"),
    (
        r"hash|sha256|\bCRC\b|checksum",
        UNTRUSTED,
        "the wheel is not the one that the index names: a cache or a mirror between here and there is stale, or the "
        "file was changed; repeat the command, and tell whose index it is",
    ),
    (r"No space left|Disk quota|File too large", NOT_WRITTEN, "the disk is full, or a limit on files is reached"),
    (
        r"Permission denied|Read-only file system|externally.managed|not permitted",
        NOT_WRITTEN,
        "the environment cannot be written: use one of your own (python -m venv)",
    ),
    (
        r"connect|timed out|timeout|\d{3} (?:error|Server|Client)|HTTP status|proxy|ProtocolError|IncompleteRead|"
        r"Name or service|SSL|certificate|\bdns\b",
        INDEX,
        "the index cannot be reached, or stopped in the middle; repeat the command",
    ),
    (
        r"No matching distribution|Could not find a version|no version of|not found in|no wheels? with|No solution",
        NO_WHEEL,
        "the channel has no such wheel for this Python and machine; scaled-mask-softmax channels lists what there is",
    ),
    (r"zip|wheel.*invalid|invalid.*wheel|RECORD", UNTRUSTED, "the file is no whole wheel; repeat the command"),
)


_UNLISTED = (
    "the channel's page does not offer what index.json lists: the index is being changed, or its server is in trouble; "
    "repeat the command"
)


def _rules() -> ModuleType:
    build = installed.rules()
    if build is None:
        raise Failure(
            NOTHING, f"this installation is broken: {installed.PACKAGE}/_build.py is missing; install it again"
        )
    return build


def _source(arguments: argparse.Namespace) -> Source:
    build = _rules()
    given = arguments.index or build.index_url()
    if not given:
        raise Failure(
            INDEX,
            "no public index exists yet: give --index with a folder or an address, or set "
            f"{build.INDEX_VARIABLE}; without one, make wheel in a clone builds a wheel and an index of it",
        )
    return Source(given, arguments.timeout)


def _torch() -> installed.Torch:
    torch = installed.find_torch()
    if torch is None or not torch.version:
        what = "is not installed for this Python: install it first"
        if torch is not None:
            what = f"at {torch.folder} is broken: its version.py {torch.broken}; install it again"
        raise Failure(NOTHING, f"torch {what} ({sys.executable} -m pip install torch)")
    return torch


def _glibc() -> tuple[int, int]:
    """The C library's version; (0, 0) where it is another one, which no wheel of ours is for."""
    name, version = platform.libc_ver()
    numbers = re.findall(r"\d+", version)
    return (int(numbers[0]), int(numbers[1])) if name == "glibc" and len(numbers) > 1 else (0, 0)


def _newest(wheels: Iterable[Wheel], version: str | None) -> str | None:
    """The version to take: the one that was asked for, or the newest that is final and not withdrawn."""
    found = sorted({wheel.version for wheel in wheels if version or wheel.yanked is None}, key=channels.version_order)
    if version is not None:
        return next((full for full in found if version in (full, full.partition("+")[0])), None)
    final = [full for full in found if channels.version_order(full)[1]]
    return final[-1] if final else found[-1] if found else None


def _say(text: str) -> None:
    print(text, flush=True)


# Running an installer or a compiler


def _stream(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Runs a command, shows what it says, and returns its status and the end of that."""
    try:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise Failure(FAILED, f"{command[0]} does not start: {error.strerror}") from None
    lines: list[str] = []
    with process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(remedy.redacted(f"  {line}"), end="", flush=True)
                lines = [*lines[-99:], line]
        except BaseException:
            process.terminate()
            raise
    return process.returncode, "".join(lines)


def _shown(command: Sequence[str]) -> str:
    return remedy.redacted(shlex.join(command))


def _bent() -> str:
    """Which settings of the environment may be the reason why an installer did something else than it was told."""
    names = [f"{tool}_{setting}" for tool in ("PIP", "UV") for setting in _BENDING]
    here = [name for name in names if os.environ.get(name)]
    return f" {', '.join(here)} {'is' if len(here) == 1 else 'are'} set, which may be why." if here else ""


def _judge_failure(code: int, output: str, *, listed: bool = False) -> Failure:
    """What an installer's failure means; `listed`: the index says that the wheel is there."""
    # What it looks at may have any name.
    names = ("Looking", "Collecting", "Downloading", "Processing", "Obtaining", "Using")
    output = "\n".join(line for line in output.splitlines() if not line.strip().startswith(names))
    if code < 0 and code == -getattr(signal, "SIGXFSZ", 0):
        output = "File too large"
    for pattern, status, text in _TROUBLES:
        if re.search(pattern, output, re.I):
            if status == NO_WHEEL and listed:
                status, text = INDEX, _UNLISTED
            return Failure(status, f"{text}.{_bent()} What was installed before is as it was.")
    return Failure(
        FAILED, f"the installer failed, for the reason above.{_bent()} What was installed before is as it was."
    )


def _site() -> Path:
    """Where native wheels go, on nearly every system the folder of all others too."""
    return Path(sysconfig.get_path("platlib"))


def clear_remains(site: Path) -> list[Path]:
    """Removes what an installation that was cut off has left, which installers stumble over: folders that pip had put
    aside, and metadata without RECORD.
    """
    broken = [item.path for item in installed.distributions(installed.PACKAGE, [site]) if not item.complete]
    remains = [*broken, *sorted(site.glob(f"~*{installed.PACKAGE[1:]}*"))]
    for path in remains:
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise fetch.not_written(path, error) from None
    return remains


def _install_command(source: Source, channel: str, requirement: str, which: str | None) -> list[str]:
    tool = remedy.installer(which)
    if not tool:
        raise Failure(
            FAILED, f"neither pip nor uv is here for {sys.executable}: python -m ensurepip gives pip, or install uv"
        )
    # A login goes by a variable (_index_variable): every user of the machine sees the arguments of a program.
    index = [requirement] if source.login else ["--index-url", f"{source.address}/{channel}/", requirement]
    if tool[-1] == "pip" and tool[0] != sys.executable:
        return [*tool, "install", "--python", sys.executable, "--reinstall", "--no-deps", "--no-cache", *index]
    # Without its cache, which could hold an older file of that name.
    return [*tool, "install", "--force-reinstall", "--no-deps", "--no-cache-dir", "--disable-pip-version-check", *index]


def _index_variable(command: Sequence[str], source: Source, channel: str) -> dict[str, str]:
    """What tells an installer the channel, where its address holds a login."""
    name = "PIP_INDEX_URL" if command[0] == sys.executable else "UV_DEFAULT_INDEX"
    return {name: f"{source.with_login}/{channel}/"} if source.login else {}


def _environment(command: Sequence[str]) -> dict[str, str]:
    """For an installer that asks the channel alone: no index of variables or configuration files, but their proxies and
    certificates.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _OTHER_INDEXES}
    if command[0] != sys.executable:
        return {**environment, "UV_NO_CONFIG": "1"}
    # uv knows this one; an older pip has a name of its own for it.
    if environment.get("SSL_CERT_FILE") and not environment.get("REQUESTS_CA_BUNDLE"):
        environment.setdefault("PIP_CERT", environment["SSL_CERT_FILE"])
    answer = ask([*command[:3], "config", "list"], 60)
    for line in answer.output.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.partition(".")
        if section in ("global", "install") and key in _KEPT:
            with contextlib.suppress(ValueError, SyntaxError):
                text = " ".join(str(ast.literal_eval(value)).split())
                environment.setdefault(f"PIP_{key.upper().replace('-', '_')}", text)
    return {**environment, "PIP_CONFIG_FILE": os.devnull}


def _check_room(site: Path, size: int) -> None:
    """Says what stands in the way before an installer starts."""
    if not os.access(site, os.W_OK | os.X_OK):
        own = f"install into an environment of your own ({sys.executable} -m venv DIR)"
        raise Failure(NOT_WRITTEN, f"{site} cannot be written ({fetch.owner(site)}): {own}")
    # The wheel, what is in it, and what it replaces.
    needed = 6 * size
    if (free := shutil.disk_usage(site).free) < needed:
        raise Failure(
            NOT_WRITTEN,
            f"{site} has {fetch.megabytes(free)} free, and about {fetch.megabytes(needed)} are needed: free some space",
        )


def _warn_of_gpus(wheel: Wheel) -> None:
    """Says which of the GPUs here a wheel does not serve."""
    if not wheel.architectures:
        return
    driver = gpus.look(os.environ)
    for gpu in driver.visible or driver.smi_gpus:
        verdict, _ = gpus.verdict(gpu.capability, wheel.architectures, wheel.ptx, None, None)
        if verdict != gpus.NATIVE:
            _say(f"note: on GPU {gpu.index} ({gpu.name}, compute capability {gpu.capability}): {verdict}")


def install(arguments: argparse.Namespace) -> int:
    """Install the native wheel for the running torch from its channel."""
    build, torch = _rules(), _torch()
    facts = remedy.torch_facts(build, torch)
    if not facts.has_channel:
        raise Failure(
            NO_WHEEL,
            f"{build.why_no_wheel(facts)}: use the plain wheel, {build.how_to_install(_version(build), facts)}",
        )
    source = _source(arguments)
    channel = build.channel(facts.label)
    found = channels.read(source)
    machine, here = platform.machine(), "{}.{}".format(*sys.version_info)
    size, wheel = 0, None
    if found is None:
        _say(f"note: {source.shown} has no {channels.DATA}; its channel {channel} is taken as it is")
        version = f"{build.public_version(arguments.version or _version(build))}+{facts.label}"
    else:
        serving = [w for w in found.get(channel, []) if w.serves(tag(), machine, _glibc())]
        chosen = _newest(serving, arguments.version)
        if chosen is None:
            raise Failure(NO_WHEEL, _no_wheel(source, found, channel, facts, machine, here, arguments.version))
        version, wheel = chosen, next(w for w in serving if w.version == chosen)
        size = wheel.size
        if wheel.yanked is not None:
            _say(f"note: {version} was withdrawn: {wheel.yanked or 'no reason is given'}")
        _warn_of_gpus(wheel)
    command = _install_command(source, channel, f"{PROJECT}=={version}", arguments.installer)
    told = _index_variable(command, source, channel)
    _say(f"torch {torch.version} in {torch.folder.parent} takes {channel}:")
    _say(f"  {_shown([*(f'{name}={value}' for name, value in told.items()), *command])}")
    if arguments.dry_run:
        return FITS
    site = _site()
    _check_room(site, size)
    environment = {**_environment(command), **told}
    with fetch.alone(site, "installs into"):
        for path in clear_remains(site):
            _say(f"removed {path}, the remains of an installation that was cut off")
        status, output = _stream(command, environment)
    if status != 0:
        raise _judge_failure(status, output, listed=wheel is not None)
    versions = [item.version for item in installed.distributions(installed.PACKAGE)]
    if version not in versions:
        raise Failure(
            FAILED,
            f"the installer says that it is done, but {version} is not on the path: {', '.join(versions) or 'nothing'}."
            f"{_bent()}",
        )
    _say(f"installed {version}; torch was left alone. scaled-mask-softmax doctor looks at the result.")
    return FITS


def _version(build: ModuleType) -> str:
    """The version of this command."""
    table = known.load()
    return table.version if table is not None else str(build.version(None))


def _no_wheel(
    source: Source,
    found: Mapping[str, list[Wheel]],
    channel: str,
    facts: Any,
    machine: str,
    python: str,
    version: str | None,
) -> str:
    """Why nothing is installed, and what to do."""
    wheels = found.get(channel, [])
    if not wheels:
        native = sorted(name.removeprefix("whl/") for name in found if found[name] and name != channels.PLAIN)
        has = ", ".join(native) or "nothing"
        text = f"{source.shown} has no channel {channel} for torch {facts.version}; it has {has}"
    elif version is not None and all(version not in (w.version, w.version.partition("+")[0]) for w in wheels):
        has = ", ".join(sorted({w.version for w in wheels}, key=channels.version_order))
        return f"{channel} of {source.shown} has no version {channels.clean(version)}; it has {has}"
    elif all(wheel.yanked is not None for wheel in wheels):
        text = f"everything in {channel} of {source.shown} was withdrawn: {wheels[-1].yanked or 'no reason is given'}"
    else:
        has = ", ".join(sorted({f"{wheel.python} {wheel.platform}" for wheel in wheels}))
        libc = " ".join(filter(None, platform.libc_ver())) or "another C library than glibc"
        text = f"{channel} of {source.shown} has no wheel for Python {python} ({tag()}) on {machine} with {libc}"
        text += f"; it has {has}"
    takes = remedy.what_it_takes(len(remedy.names(remedy.architectures(gpus.look(os.environ), facts.cuda, machine))))
    where = f"--index {shlex.quote(source.shown)}" if _sources(found) else "FOLDER"
    what = "its source distribution" if _sources(found) else "a clone or a source distribution"
    return f"{text}.\nNo prebuilt wheel: scaled-mask-softmax build {where} makes one from {what}, in {takes}"


def _sources(found: Mapping[str, list[Wheel]]) -> list[Wheel]:
    return [file for file in found.get(channels.PLAIN, []) if file.is_source]


def list_channels(arguments: argparse.Namespace) -> int:
    """Print what the index has."""
    source = _source(arguments)
    found = channels.read(source)
    if found is None:
        raise Failure(INDEX, f"{source.shown} has no {channels.DATA}, so its channels cannot be listed")
    build, torch = _rules(), installed.find_torch()
    mine = None
    if torch is not None and torch.version:
        mine = build.channel(remedy.torch_facts(build, torch).label)
    if arguments.json:
        rows = {
            name: [{field: getattr(wheel, field) for field in Wheel.__dataclass_fields__} for wheel in wheels]
            for name, wheels in sorted(found.items())
        }
        print(json.dumps({"index": source.shown, "mine": mine, "channels": rows}, indent=2))
        return FITS
    lines = [("channel", "version", "Python", "platform", "size", "architectures")]
    for name in sorted(found):
        groups: dict[tuple[str, str], list[Wheel]] = {}
        for wheel in found[name]:
            groups.setdefault((wheel.version, wheel.platform), []).append(wheel)
        for (version, machine), wheels in sorted(
            groups.items(), key=lambda item: (channels.version_order(item[0][0]), item[0][1])
        ):
            pythons = ", ".join(sorted({wheel.python for wheel in wheels}, key=lambda name: (len(name), name)))
            pythons, machine = pythons or "source", machine or "any"
            codes = ", ".join(wheels[0].architectures) + (f", PTX {', '.join(wheels[0].ptx)}" if wheels[0].ptx else "")
            size = f"{max(wheel.size for wheel in wheels) / 1e6:.1f} MB"
            note = "" if wheels[0].yanked is None else f" (withdrawn: {wheels[0].yanked or 'no reason given'})"
            mark = "* " if name == mine else "  "
            lines.append((mark + name, version + note, pythons, machine, size, codes or "-"))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        _say("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    if len(lines) == 1:
        _say(f"{source.shown} has no wheels yet")
    if mine is not None and torch is not None:
        has = "marked *" if found.get(mine) else "which is not here"
        _say(f"torch {torch.version} takes {mine}, {has}")
    return FITS


# A folder for machines without a network


def _own_index(folder: Path) -> dict[str, Any]:
    """index.json of a folder that an earlier download filled, or an empty one."""
    path = folder / channels.DATA
    empty: dict[str, Any] = {"format": channels.FORMAT, "project": PROJECT, "channels": {}}
    empty.update(expected_missing=[], address="")
    if not os.path.exists(path):
        return empty
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
        channels.parse(Source(str(folder)), path.read_bytes())
        return data
    except (OSError, ValueError) as error:
        raise Failure(NOT_WRITTEN, f"{path} cannot be read: {error}; delete it, and repeat the command") from None


def _metadata(path: Path) -> bytes:
    """METADATA of a wheel, PKG-INFO of a source distribution."""
    try:
        if path.suffix == ".gz":
            with tarfile.open(path) as tar:
                file = tar.extractfile(f"{path.name.removesuffix('.tar.gz')}/PKG-INFO")
                return file.read() if file is not None else b""
        with zipfile.ZipFile(path) as archive:
            (name,) = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
            return archive.read(name)
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, ValueError, KeyError, RuntimeError) as error:
        what = "source distribution" if path.suffix == ".gz" else "wheel"
        raise Failure(UNTRUSTED, f"{path} is what the index says, and no {what}: {error}") from None


def _entry(wheel: Wheel, metadata: bytes) -> dict[str, Any]:
    """A wheel as index.json has it, with a link to the file beside the page."""
    return {
        "filename": wheel.filename,
        "version": wheel.version,
        "url": quote(wheel.filename),
        "sha256": wheel.sha256,
        "size": wheel.size,
        "metadata_sha256": hashlib.sha256(metadata).hexdigest(),
        "requires_python": wheel.requires_python,
        "architectures": wheel.architectures,
        "ptx": wheel.ptx,
        "yanked": wheel.yanked,
    }


def _write_pages(folder: Path, wheels: Sequence[Wheel]) -> None:
    """Adds wheels that lie in the folder to its index: the page that pip reads, then index.json."""
    data, channel = _own_index(folder), wheels[0].channel
    project = folder / channel / PROJECT
    entries = {entry["filename"]: entry for entry in data["channels"].get(channel, [])}
    for wheel in wheels:
        metadata = _metadata(project / wheel.filename)
        if not wheel.is_source:
            fetch.write(project / f"{wheel.filename}.metadata", metadata)
        entries[wheel.filename] = _entry(wheel, metadata)
    kept = [entries[name] for name in sorted(entries) if (project / name).is_file()]
    # Installers are shown no source distribution, which they would compile unasked.
    links = [channels.link(entry) for entry in kept if entry["filename"].endswith(".whl")]
    fetch.write(project / "index.html", channels.page(f"Links for {PROJECT}", links).encode())
    front = channels.page("Simple index", [f'<a href="{PROJECT}/">{PROJECT}</a>'])
    fetch.write(folder / channel / "index.html", front.encode())
    data["channels"][channel] = kept
    fetch.write(folder / channels.DATA, (json.dumps(data, indent=2) + "\n").encode())


def _read(source: Source) -> dict[str, list[Wheel]]:
    """What the index has. Raises Failure where it does not say."""
    found = channels.read(source)
    if found is None:
        raise Failure(INDEX, f"{source.shown} has no {channels.DATA}, which names the files and their hashes")
    return found


def _fill(source: Source, files: Sequence[Wheel], folder: Path) -> None:
    """Brings files of one channel into a folder, and into its index."""
    project = folder / files[0].channel / PROJECT
    fetch.make_folder(project)
    with fetch.alone(folder, "fills"):
        for file in files:
            what = "fetched" if fetch.fetch(source, file, project) else "was there already"
            _say(f"{file.filename}  {fetch.megabytes(file.size)}  {what}, sha256 verified")
        _write_pages(folder, files)


def _download_plain(source: Source, version: str | None, folder: Path) -> int:
    """The plain wheel and the source distribution, to build with where there is no network."""
    files = _read(source).get(channels.PLAIN, [])
    chosen = _newest([file for file in files if file.is_source], version)
    if chosen is None:
        raise Failure(NO_WHEEL, _no_source(source, files, version))
    _fill(source, [file for file in files if file.version == chosen], folder)
    _say(f"\nCarry {folder} to the machine without a network, and there, as DIR, beside scikit-build-core, pybind11,")
    _say("cmake and ninja, which nothing fetches there:")
    _say(f'  pip install --force-reinstall --no-deps --index-url file:///DIR/{channels.PLAIN}/ "{PROJECT}=={chosen}"')
    _say("  scaled-mask-softmax build --index DIR --no-build-isolation --install")
    return FITS


def download(arguments: argparse.Namespace) -> int:
    """Fill a folder with the wheels of a channel, as an index of its own."""
    folder = fetch.folder_of(arguments.folder)
    if arguments.plain:
        return _download_plain(_source(arguments), arguments.version, folder)
    torch = installed.find_torch()
    build, table = _rules(), known.load()
    wanted = arguments.torch or (torch.version if torch is not None else "")
    minor = build.minor(wanted) if wanted else None
    if minor is None:
        raise Failure(NOTHING, "no torch is here to download for: give --torch, such as --torch 2.14")
    cuda = arguments.cuda
    if cuda is None and torch is not None and torch.version and build.minor(torch.version) == minor:
        cuda = build.cuda_label(torch.cuda)
    if cuda is None:
        cuda = table.torch[minor].default if table is not None and minor in table.torch else None
    if cuda is None:
        raise Failure(NOTHING, f"no CUDA release is known for torch {minor}: give --cuda, such as --cuda cu130")
    python = arguments.python or "{}.{}".format(*sys.version_info)
    python_tag, machine = f"cp{python.replace('.', '')}", arguments.platform or platform.machine()
    source, channel = _source(arguments), f"whl/{cuda}/torch{minor}"
    found = _read(source)
    serving = [wheel for wheel in found.get(channel, []) if wheel.serves(python_tag, machine)]
    version = _newest(serving, arguments.version)
    if version is None:
        has = sorted({f"{w.version} {w.python} {w.platform}" for w in found.get(channel, [])})
        raise Failure(
            NO_WHEEL,
            f"{source.shown} has no wheel for torch {minor}, {cuda}, Python {python} on {machine}"
            + (
                f"; {channel} has {', '.join(has)}"
                if has
                else f"; its channels are {', '.join(sorted(found)) or 'none'}"
            ),
        )
    wheels = [wheel for wheel in serving if wheel.version == version]
    _fill(source, wheels, folder)
    requirement = f'"{PROJECT}=={version}"'
    _say(f"\nCarry {folder} to the machine without a network, and there, as DIR:")
    _say("  scaled-mask-softmax install --index DIR")
    _say("or, where this command is not installed yet:")
    _say(f"  pip install --force-reinstall --no-deps --index-url file:///DIR/{channel}/ {requirement}")
    return FITS


# Building from source


def _unpack(archive: Path, into: Path) -> Path:
    """The only folder of a source distribution."""
    into.mkdir()
    try:
        with tarfile.open(archive) as tar:
            for member in tar.getmembers():
                path = Path(member.name)
                if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
                    raise Failure(
                        UNTRUSTED, f"{archive} holds {channels.clean(member.name)}, as no source distribution does"
                    )
            if hasattr(tarfile, "data_filter"):
                tar.extractall(into, filter="data")
            else:
                tar.extractall(into)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise Failure(FAILED, f"{archive} cannot be unpacked: {error}") from None
    folders = [path for path in into.iterdir() if path.is_dir()]
    if len(folders) != 1:
        raise Failure(FAILED, f"{archive} holds {len(folders)} folders, and a source distribution has one")
    return folders[0]


def _no_source(source: Source, files: Sequence[Wheel], version: str | None) -> str:
    """Why no source distribution is taken from an index, and what to do."""
    has = ", ".join(sorted((file.version for file in files if file.is_source), key=channels.version_order))
    what = f" of version {channels.clean(version)}; it has {has}" if version is not None and has else ""
    return f"{source.shown} has no source distribution{what}: give a clone, an unpacked one, or its .tar.gz"


def _fetch_source(arguments: argparse.Namespace, folder: Path) -> Path:
    """The index's source distribution, in a folder."""
    if not arguments.index and not _rules().index_url():
        raise Failure(
            NOTHING,
            "there is nothing to build: give a clone (. in one), an unpacked source distribution or its .tar.gz, or "
            "--index with an index that has one",
        )
    source = _source(arguments)
    files = _read(source).get(channels.PLAIN, [])
    version = _newest([file for file in files if file.is_source], arguments.version)
    if version is None:
        raise Failure(NO_WHEEL, _no_source(source, files, arguments.version))
    file = next(file for file in files if file.is_source and file.version == version)
    if file.yanked is not None:
        _say(f"note: {version} was withdrawn: {file.yanked or 'no reason is given'}")
    fetch.fetch(source, file, folder)
    _say(f"{file.filename}  {fetch.megabytes(file.size)}  fetched from {source.shown}, sha256 verified")
    return folder / file.filename


def _check_source(folder: Path) -> None:
    for name in ("pyproject.toml", "CMakeLists.txt", "release/matrix.toml"):
        if not (folder / name).is_file():
            raise Failure(
                NOTHING,
                f"{folder} is no source of this project, since it has no {name}: give a clone, an unpacked source "
                f"distribution, or its scaled_mask_softmax-VERSION.tar.gz",
            )


def _build_command(source: Path, output: Path, isolated: bool, which: str | None) -> list[str]:
    tool = remedy.installer(which)
    if not tool:
        raise Failure(FAILED, f"neither pip nor uv is here for {sys.executable}")
    if tool[0] != sys.executable:
        extra = [] if isolated else ["--no-build-isolation"]
        return [tool[0], "build", "--wheel", "--python", sys.executable, "-o", str(output), *extra, str(source)]
    extra = [] if isolated else ["--no-build-isolation"]
    return [*tool, "wheel", "-v", "--no-deps", "--no-cache-dir", "-w", str(output), *extra, str(source)]


def build_wheel(arguments: argparse.Namespace) -> int:
    """Compile the wheel for the running torch."""
    build, torch = _rules(), _torch()
    facts = remedy.torch_facts(build, torch)
    if not facts.has_channel:
        raise Failure(NO_WHEEL, f"{build.why_no_wheel(facts)}, and none can be built: use the plain wheel")
    if (folder := torch.folder / "include" / "ATen") and not os.path.isdir(folder):
        raise Failure(NOTHING, f"torch {torch.version} has no headers in {folder}, so nothing can be built against it")
    output = fetch.folder_of(arguments.output)
    machine = platform.machine()
    listed = arguments.archs or os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    listed = listed or remedy.architectures(gpus.look(os.environ), torch.cuda, machine)
    archs = remedy.names(listed)
    environment = {**os.environ, "SCALED_MASK_SOFTMAX_TORCH": str(torch.folder), "MAX_JOBS": str(remedy.jobs())}
    environment.pop("SCALED_MASK_SOFTMAX_PLAIN", None)
    if torch.cuda is not None and archs:
        environment["TORCH_CUDA_ARCH_LIST"] = listed
    with tempfile.TemporaryDirectory(prefix="scaled-mask-softmax-") as scratch:
        if arguments.source is not None and (arguments.index or arguments.version):
            raise Failure(NOTHING, f"give {arguments.source} to build, or --index and --version, not both")
        if arguments.source is None:
            fetched = Path(scratch, "index")
            fetched.mkdir()
            given = _fetch_source(arguments, fetched)
        else:
            given = fetch.folder_of(arguments.source)
        if os.path.isfile(given):
            source = _unpack(given, Path(scratch, "source"))
        elif os.path.isdir(given):
            source = given
        else:
            raise Failure(NOTHING, f"{given} is not there: give the folder of a source distribution, or its .tar.gz")
        _check_source(source)
        command = _build_command(source, output, not arguments.no_build_isolation, arguments.installer)
        where = "for the CPU" if torch.cuda is None else f"for {', '.join(archs) or 'what the build chooses'}"
        _say(f"This compiles {PROJECT} for torch {torch.version}, {where}.")
        _say(
            f"It takes {remedy.what_it_takes(len(archs))} (MAX_JOBS changes that), 1 GB of disk, and a C++ compiler"
            + (f" and nvcc of CUDA {torch.cuda.split('.')[0]}." if torch.cuda is not None else ".")
        )
        variables = ("SCALED_MASK_SOFTMAX_TORCH", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS")
        shown = [f"{name}={shlex.quote(environment[name])}" for name in variables if name in environment]
        _say(f"  {' '.join(shown)} {_shown(command)}")
        if arguments.dry_run:
            return FITS
        fetch.make_folder(output)
        before = {path: path.stat().st_mtime_ns for path in output.glob("*.whl")}
        status, said = _stream(command, environment)
    if status != 0:
        low = re.search(r"Killed|out of memory|cc1plus.*signal|internal compiler error", said)
        hint = "memory ran out: set MAX_JOBS=1" if low else "the reason is above"
        raise Failure(FAILED, f"the build failed; {hint}")
    made = [path for path in output.glob("*.whl") if before.get(path) != path.stat().st_mtime_ns]
    if len(made) != 1:
        raise Failure(FAILED, f"the build left {len(made)} new wheels in {output}")
    wheel = made[0]
    _say(f"built {wheel} ({fetch.megabytes(wheel.stat().st_size)})")
    tool = remedy.installer(arguments.installer)
    if tool[0] == sys.executable:
        install_it = [*tool, "install", "--force-reinstall", "--no-deps", str(wheel)]
    else:
        install_it = [*tool, "install", "--python", sys.executable, "--reinstall", "--no-deps", str(wheel)]
    if not arguments.install:
        _say(f"to install it:\n  {_shown(install_it)}")
        return FITS
    with fetch.alone(_site(), "installs into"):
        clear_remains(_site())
        status, said = _stream(install_it, os.environ)
    if status != 0:
        raise _judge_failure(status, said)
    _say("installed; torch was left alone")
    return FITS


# The commands


def _index_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--index", metavar="ADDRESS", help="a folder or an address that holds whl/ and index.json")
    command.add_argument(
        "--timeout", type=_seconds, default=30.0, metavar="SECONDS", help="to wait for a server's answer"
    )


def _installer_option(command: argparse.ArgumentParser) -> None:
    command.add_argument("--installer", choices=["pip", "uv"], help="by default this Python's pip, or else uv")


def add_commands(commands: Any) -> None:
    command = commands.add_parser("install", help="install the native wheel for the running torch, from its channel")
    _index_options(command)
    _installer_option(command)
    command.add_argument("--version", help="by default the newest that is final and not withdrawn")
    command.add_argument("--dry-run", action="store_true", help="show the command only")
    command.set_defaults(run=install)

    command = commands.add_parser("channels", help="list what an index has")
    _index_options(command)
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=list_channels)

    command = commands.add_parser("download", help="fill a folder for machines without a network")
    _index_options(command)
    command.add_argument("--torch", metavar="2.14", help="by default the running torch's minor")
    command.add_argument("--cuda", metavar="cu130", help="or cpu; by default the running torch's, or its default")
    command.add_argument("--python", metavar="3.12", type=_python, help="by default this one")
    command.add_argument("--platform", metavar="aarch64", help="by default this machine's")
    command.add_argument("--version", help="by default the newest that is final and not withdrawn")
    command.add_argument(
        "--plain", action="store_true", help="the plain wheel and the source distribution, to build with there"
    )
    command.add_argument("folder", metavar="DIR")
    command.set_defaults(run=download)

    command = commands.add_parser(
        "build", help="compile the wheel for the running torch; for vendor and nightly builds"
    )
    command.add_argument(
        "source",
        nargs="?",
        help="a clone, an unpacked source distribution, or its .tar.gz; by default the index's source distribution",
    )
    _index_options(command)
    command.add_argument("--version", help="of the index; by default the newest that is final and not withdrawn")
    command.add_argument("--output", default="dist", metavar="DIR", help="for the wheel; by default dist")
    command.add_argument("--archs", help="as TORCH_CUDA_ARCH_LIST; by default the GPUs that are here, or all")
    command.add_argument("--install", action="store_true", help="install it too")
    command.add_argument("--no-build-isolation", action="store_true", help="with the build tools of this environment")
    command.add_argument("--dry-run", action="store_true", help="say what it takes, and show the command only")
    _installer_option(command)
    command.set_defaults(run=build_wheel)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d{1,6}(\.\d+)?", text) or not float(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0, such as 30")
    return float(text)


def _python(text: str) -> str:
    if not re.fullmatch(r"3\.\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no minor version of Python, such as 3.12")
    return text
