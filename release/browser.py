"""The landing page in a real browser (make page-tests): Chromium, its driver, axe-core. Standard library only."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from . import ROOT
from .environments import Environment, create, log, npm, pip, tools_folder
from .preflight import Interpreter
from .progress import StepError, run, say

PACKAGES = ("selenium==4.51.0", "pytest>=8.2", "tomli>=2; python_version < '3.11'")
AXE = "axe-core@4.14.1"
TESTS = "tests/browser/page.py"
_BROWSERS = ("chromium", "google-chrome", "chromium-browser")


def _found() -> tuple[str, str] | None:
    """The browser and its driver."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


def _programs() -> tuple[str, str]:
    """The browser and its driver; installed where this is a Debian machine's root. Raises StepError without them."""
    if (found := _found()) is not None:
        return found
    if os.geteuid() == 0 and shutil.which("apt-get"):
        say("      installing chromium and its driver from the distribution")
        packages = ["--no-install-recommends", "chromium", "chromium-driver", "fonts-dejavu-core"]
        for command in (["update", "-q"], ["install", "-yq", *packages]):
            what = f"apt-get {command[0]}"
            run(["apt-get", *command], what=what, log=log(what.replace(" ", "-")), show=lambda line: False)
        if (found := _found()) is not None:
            return found
    raise StepError("the page's tests need a browser: install chromium and chromedriver, and put both on PATH")


def page_tests(interpreter: Interpreter, arguments: Sequence[str], screenshots: Path | None) -> None:
    """Runs the page's tests. Raises StepError where one fails.

    screenshots: a folder for pictures of the page.
    """

    def fill(made: Environment) -> None:
        pip(made, ["install", *PACKAGES], what="installing selenium")
        npm(made.path, AXE)

    browser, driver = _programs()
    made = create(tools_folder(interpreter, "browser"), interpreter, "\n".join([*PACKAGES, AXE]), fill)
    variables = {
        "SMS_BROWSER": browser,
        "SMS_DRIVER": driver,
        "SMS_AXE": str(made.path / "node_modules" / "axe-core" / "axe.min.js"),
        "SMS_SCREENSHOTS": str(screenshots.resolve()) if screenshots else "",
    }
    # Without conftest.py, which needs torch.
    command: list[str | Path] = [made.python, "-m", "pytest", "--noconftest", TESTS]
    if subprocess.run([*command, *arguments], cwd=ROOT, env={**os.environ, **variables}).returncode != 0:
        raise StepError("the landing page does not do what it should in a browser")
