"""Asks other programs; never waits for one that hangs, nor listens to one that does not stop talking."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

# Far above what any program that is asked has to say.
_MOST = 16 * 10**6


@dataclass(frozen=True)
class Answer:
    state: str  # "ok", "absent", "failed" or "hangs"
    output: str = ""
    error: str = ""

    @property
    def last_words(self) -> str:
        """The last line that the program said."""
        lines = (self.error.strip() or self.output.strip()).splitlines()
        return lines[-1].strip() if lines else ""


class _Listener(threading.Thread):
    """Keeps what a pipe brings, and ends its program where that is too much."""

    def __init__(self, process: subprocess.Popen[bytes], pipe: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self.process, self.pipe, self.data = process, pipe, bytearray()

    def run(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed by whoever waits no longer
            while chunk := os.read(self.pipe.fileno(), 1 << 16):
                self.data += chunk
                if len(self.data) > _MOST:
                    return _kill(self.process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def ask(command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> Answer:
    """What a program prints within `seconds`. It is killed after that, and left alone where even that does not end it:
    a driver that hangs keeps its callers in the kernel.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=None if environment is None else dict(environment),
            start_new_session=True,
        )
    except OSError as error:
        return Answer("absent", error=str(error))
    assert process.stdout is not None
    assert process.stderr is not None
    listeners = [_Listener(process, pipe) for pipe in (process.stdout, process.stderr)]
    end = time.monotonic() + seconds
    for listener in listeners:
        listener.start()
    try:
        for listener in listeners:
            listener.join(max(0.0, end - time.monotonic()))
        process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        running = process.returncode is None or any(listener.is_alive() for listener in listeners)
        if running:
            _kill(process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
        # A listener that is alive still ends with what it is reading: its pipe has no number any more.
        for listener in listeners:
            listener.pipe.close()
    if any(len(listener.data) > _MOST for listener in listeners):
        return Answer("failed", error=f"it printed more than {_MOST // 10**6} MB")
    if running:
        return Answer("hangs")
    texts = [listener.data.decode("utf-8", "replace") for listener in listeners]
    if process.returncode == 0:
        return Answer("ok", *texts)
    if process.returncode < 0:
        texts[1] += f"\nkilled by signal {-process.returncode}"
    return Answer("failed", *texts)
