"""What tests of installers need of the one that runs them; not the package, which is installed for none of them."""

from __future__ import annotations

import importlib.machinery
from pathlib import Path


def pip_folder() -> Path:
    """Where this environment's pip is. Not by importlib.util.find_spec, into which setuptools hooks a warning."""
    spec = importlib.machinery.PathFinder.find_spec("pip")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
