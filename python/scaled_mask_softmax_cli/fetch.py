"""Fetches files so that nothing half of one is ever taken for whole: resumed, verified, renamed in one step."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import os
import re
import shutil
import sys
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit
from urllib.request import url2pathname

from .channels import BUSY, PATIENCE, Source, Wheel, asked_wait, open_address, trouble
from .status import INDEX, NOT_WRITTEN, UNTRUSTED, Failure

try:
    import fcntl
    import pwd
except ImportError:  # the plain wheel is for every system
    fcntl = pwd = None  # type: ignore[assignment]

_CHUNK = 1 << 18
# Attempts without a single new byte.
_ATTEMPTS = 4


def megabytes(size: float) -> str:
    return f"{size / 1e6:.1f} MB"


def owner(path: Path) -> str:
    """Whose the nearest folder that exists is."""
    existing = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
    uid = existing.stat().st_uid
    try:
        name = pwd.getpwuid(uid).pw_name if pwd is not None else str(uid)
    except KeyError:
        name = str(uid)
    return f"{existing} belongs to {name}"


def not_written(path: Path, error: OSError) -> Failure:
    """Why a file cannot be written, and what to do."""
    text = error.strerror or str(error)
    if error.errno in (errno.EACCES, errno.EPERM):
        text += f" ({owner(path)}): give another folder, or have the rights changed"
    elif error.errno == errno.EROFS:
        text += ": give a folder on another file system"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        text += ": free some space and repeat the command, which goes on where it stopped"
    elif error.errno == errno.EFBIG:
        text += ": raise the limit on the size of files (ulimit -f) and repeat the command"
    return Failure(NOT_WRITTEN, f"{path} cannot be written: {text}")


@contextlib.contextmanager
def alone(folder: Path, what: str) -> Iterator[None]:
    """Holds a lock on a folder, without a file in it; waits, and says so, while another process has it."""
    if fcntl is None:
        yield
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise not_written(folder, error) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting: another process {what} {folder}", file=sys.stderr, flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            # Some network file systems have no locks.
            print(f"note: {folder} cannot be locked ({error.strerror}): run one command at a time", file=sys.stderr)
        yield
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise not_written(folder, error) from None


def write(path: Path, data: bytes) -> None:
    """Writes a small file in one step."""
    scratch = path.with_name(f".{path.name}.new")
    try:
        scratch.write_bytes(data)
        os.replace(scratch, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise not_written(path, error) from None


def folder_of(given: str) -> Path:
    """A folder that a user named. Raises Failure where it cannot be one."""
    try:
        return Path(given).expanduser().absolute()
    except (OSError, RuntimeError) as error:
        # ~ without a home, or a name below a folder that was removed.
        raise Failure(NOT_WRITTEN, f"{given} is no folder here ({error}): give an absolute path") from None


def has(path: Path, wheel: Wheel) -> bool:
    """Whether a file is there as the index says, and can be read."""
    try:
        return path.stat().st_size == wheel.size and digest(path) == wheel.sha256
    except OSError:
        return False


def digest(path: Path) -> str:
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            sha256.update(chunk)
    return sha256.hexdigest()


class Progress:
    """A bar on a terminal; elsewhere a line a file."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size, self.shown = name, size, 0.0
        self.live = sys.stderr is not None and sys.stderr.isatty()

    def at(self, done: int) -> None:
        now = time.monotonic()
        if self.live and (now - self.shown > 0.1 or done == self.size):
            self.shown = now
            filled = 30 * done // self.size
            bar = "#" * filled + "." * (30 - filled)
            sys.stderr.write(f"\r[{bar}] {megabytes(done)} of {megabytes(self.size)}  {self.name}")
            sys.stderr.flush()

    def end(self) -> None:
        if self.live:
            sys.stderr.write("\n")


class _Short(Exception):
    """The server stopped before the end."""


def _open(source: Source, wheel: Wheel, offset: int) -> tuple[IO[bytes], int]:
    """The wheel's bytes from `offset`, or from the place where the server begins, which is returned too."""
    parts = urlsplit(wheel.address)
    if parts.scheme == "file":
        try:
            file = Path(url2pathname(parts.path)).open("rb")  # noqa: SIM115 (the caller closes it)
        except OSError as error:
            raise Failure(INDEX, f"{wheel.address} cannot be read: {error.strerror}") from None
        file.seek(offset)
        return file, offset
    headers = {"Range": f"bytes={offset}-"} if offset else {}
    try:
        answer = open_address(wheel.address, headers, source.timeout, source.login_for(wheel.address))
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        raise _Short(f"there are no more than {offset} of {wheel.size} bytes") from None
    if answer.status == 206:
        match = re.fullmatch(r"bytes (\d+)-\d+/(?:\d+|\*)", answer.headers.get("Content-Range", ""))
        if match and int(match[1]) == offset:
            return answer, offset
        answer.close()
        raise _Short("it answered with another part than was asked for")
    return answer, 0


def _receive(source: Source, wheel: Wheel, part: Path, progress: Progress) -> None:
    """Appends to `part` until it has the wheel's size. Raises _Short, OSError of the network, or Failure."""
    offset = part.stat().st_size if os.path.exists(part) else 0
    if offset > wheel.size:
        offset = 0
    if offset == wheel.size:
        return
    answer, offset = _open(source, wheel, offset)
    with answer:
        try:
            file = part.open("r+b" if os.path.exists(part) else "wb")
        except OSError as error:
            raise not_written(part, error) from None
        with file:
            file.truncate(offset)
            file.seek(offset)
            while True:
                chunk = answer.read(_CHUNK)
                if not chunk:
                    break
                offset += len(chunk)
                if offset > wheel.size:
                    raise Failure(UNTRUSTED, f"{wheel.filename} is longer than the {wheel.size} bytes of the index")
                try:
                    file.write(chunk)
                    file.flush()
                    if offset == wheel.size:
                        os.fsync(file.fileno())
                except OSError as error:
                    raise not_written(part, error) from None
                progress.at(offset)
    if offset < wheel.size:
        raise _Short(f"it ended after {offset} of {wheel.size} bytes")


def _complete(source: Source, wheel: Wheel, part: Path, progress: Progress) -> None:
    """Brings `part` to its full size, again and again as long as that gets on."""
    left, most = _ATTEMPTS, -1
    while True:
        try:
            _receive(source, wheel, part, progress)
            return
        except urllib.error.HTTPError as error:
            if (error.code < 500 and error.code not in BUSY) or (asked_wait(error) or 0) > PATIENCE:
                raise trouble(wheel.address, error) from None
            problem: Exception = error
        except (OSError, http.client.HTTPException, _Short) as error:
            problem = error
        size = part.stat().st_size if os.path.exists(part) else 0
        left, most = (_ATTEMPTS if size > most >= 0 else left) - 1, max(size, most)
        if left <= 0:
            failure = trouble(wheel.address, problem)
            kept = f"; {megabytes(size)} are kept, and the same command goes on from there" if size else ""
            raise Failure(failure.status, f"{failure}{kept}")
        print(f"\n{wheel.filename}: {problem}; trying again", file=sys.stderr)
        time.sleep(max(0.2 * 2 ** (_ATTEMPTS - left), asked_wait(problem) or 0))


def fetch(source: Source, wheel: Wheel, folder: Path) -> bool:
    """Brings a wheel into a folder, whole and verified, or raises Failure. Returns False where it was there already.

    What was fetched of it before goes on where it stopped.
    """
    target, part = folder / wheel.filename, folder / f".{wheel.filename}.part"
    if has(target, wheel):
        return False
    have = part.stat().st_size if os.path.exists(part) else 0
    if (free := shutil.disk_usage(folder).free) < wheel.size - have:
        raise Failure(
            NOT_WRITTEN,
            f"{folder} has {megabytes(free)} free, and {wheel.filename} takes {megabytes(wheel.size)}: free some space "
            "or give another folder",
        )
    progress = Progress(wheel.filename, wheel.size)
    try:
        _complete(source, wheel, part, progress)
        if have and digest(part) != wheel.sha256:
            # The beginning was of another file: once more, from the start.
            part.unlink()
            _complete(source, wheel, part, progress)
    finally:
        progress.end()
    if digest(part) != wheel.sha256:
        part.unlink()
        raise Failure(
            UNTRUSTED,
            f"{wheel.filename} has another sha256 than the index says, and was thrown away: a cache or a mirror "
            "between here and there is stale, or the file was changed; repeat the command, and tell whose index it is",
        )
    try:
        os.replace(part, target)
    except OSError as error:
        raise not_written(target, error) from None
    return True
