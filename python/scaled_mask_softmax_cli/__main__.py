"""The console command's arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import doctor


def bench(arguments: Sequence[str]) -> int:
    """Run the bench, the one command that imports torch and the package."""
    try:
        from scaled_mask_softmax.bench import command
    except ImportError as error:
        print(f"scaled-mask-softmax bench: {error}", file=sys.stderr)
        return doctor.NOTHING
    return command.main(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments[:1]) == ["bench"]:  # its arguments are its own, so that this parser needs no import to know them
        return bench(arguments[1:])
    parser = argparse.ArgumentParser(prog="scaled-mask-softmax", allow_abbrev=False)
    parser.description = "Look at an installation of scaled-mask-softmax, without importing it; or measure it."
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("version", help="print the installed version").set_defaults(run=doctor.print_version)
    commands.add_parser(
        "doctor",
        help="compare the installed build with torch; status 0: fits, 1: does not, 2: nothing to compare",
    ).set_defaults(run=doctor.examine)
    commands.add_parser("bench", help="measure the operator beside its rivals; bench --help says more")
    status: int = parser.parse_args(arguments).run()
    return status


if __name__ == "__main__":
    sys.exit(main())
