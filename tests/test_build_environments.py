"""Environments that several runs share."""

import threading
import time
from pathlib import Path

from release import environments


def test_one_run_at_a_time_makes_a_folder(tmp_path: Path, capsys) -> None:
    path = tmp_path / "cache" / "torch"
    inside = threading.Event()
    order = []

    def first() -> None:
        with environments.locked(path):
            inside.set()
            time.sleep(0.2)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(300)
    with environments.locked(path):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]
    assert f"waiting for another run that is making {path}" in capsys.readouterr().out
