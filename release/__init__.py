"""Build and release tools: the matrix, and everything that reads it. Not installed with the package."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Everything that belongs to this checkout alone: build folders, unrepaired wheels, environments, logs.
WORK = ROOT / "build"
