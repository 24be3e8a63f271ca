"""The console command's arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import doctor


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(prog="scaled-mask-softmax", allow_abbrev=False)
    parser.description = "Look at an installation of scaled-mask-softmax, without importing it."
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("version", help="print the installed version").set_defaults(run=doctor.print_version)
    commands.add_parser(
        "doctor",
        help="compare the installed build with torch; status 0: fits, 1: does not, 2: nothing to compare",
    ).set_defaults(run=doctor.examine)
    status: int = parser.parse_args(arguments).run()
    return status


if __name__ == "__main__":
    sys.exit(main())
