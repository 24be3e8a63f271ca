"""Asks other programs, and never waits for one that hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        return Answer("hangs")
    texts = [data.decode("utf-8", "replace") for data in (output, errors)]
    if process.returncode == 0:
        return Answer("ok", *texts)
    if process.returncode < 0:
        texts[1] += f"\nkilled by signal {-process.returncode}"
    return Answer("failed", *texts)
