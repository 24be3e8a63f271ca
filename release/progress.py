"""Running long steps with visible progress. Standard library only."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_HEARTBEAT_SECONDS = 20


class StepError(RuntimeError):
    """A step of a command failed, in one sentence."""


def say(text: str) -> None:
    print(text, flush=True)


def duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


class Steps:
    """Announces the numbered steps of a command."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._number = 0

    def next(self, text: str) -> None:
        self._number += 1
        say(f"[{self._number}/{self._total}] {text}")


def _everything(line: str) -> bool:
    return True


def run(
    command: Sequence[str | Path],
    *,
    what: str,
    log: Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    show: Callable[[str], bool] = _everything,
) -> str:
    """Runs `command`, showing its lines that `show` picks, and a sign of life where there are none for long.

    Returns the whole output, also written to `log`. Raises StepError with the output's end.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    started = last = time.monotonic()
    done = threading.Event()

    def beat() -> None:
        nonlocal last
        while not done.wait(1):
            if time.monotonic() - last > _HEARTBEAT_SECONDS:
                last = time.monotonic()
                say(f"      ... {what}, {duration(last - started)}")

    lines: list[str] = []
    environment = dict(os.environ if env is None else env)
    environment["PYTHONUNBUFFERED"] = "1"
    process = subprocess.Popen(
        [os.fspath(part) for part in command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    heart = threading.Thread(target=beat, daemon=True)
    heart.start()
    assert process.stdout is not None
    try:
        with open(log, "w", encoding="utf-8") as file:
            for line in process.stdout:
                file.write(line)
                lines.append(line)
                if show(line):
                    last = time.monotonic()
                    say("      " + line.rstrip()[:160])
        code = process.wait()
    finally:
        done.set()
        heart.join()
        if process.poll() is None:
            process.terminate()
        process.stdout.close()
    if code != 0:
        tail = collections.deque(lines, 25)
        sys.stdout.write("".join(tail))
        raise StepError(f"{what} failed (exit status {code}); the whole output is in {log}")
    return "".join(lines)
