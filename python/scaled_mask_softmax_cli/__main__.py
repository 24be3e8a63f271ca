"""The console command's arguments."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from . import doctor

# The commands that import torch and the package. Their arguments are their own, so that this parser need not know them.
MEASURING = {
    "bench": ("scaled_mask_softmax.bench.command", "measure the operator beside its rivals"),
    "profile": ("scaled_mask_softmax.bench.profile", "trace one case and measure its kernels"),
}


def measure(command: str, arguments: Sequence[str]) -> int:
    """Run one of them."""
    try:
        module = importlib.import_module(MEASURING[command][0])
    except ImportError as error:
        print(f"scaled-mask-softmax {command}: {error}", file=sys.stderr)
        return doctor.NOTHING
    status: int = module.main(arguments)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in MEASURING:
        return measure(arguments[0], arguments[1:])
    parser = argparse.ArgumentParser(prog="scaled-mask-softmax", allow_abbrev=False)
    parser.description = "Look at an installation of scaled-mask-softmax, without importing it; or measure it."
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("version", help="print the installed version").set_defaults(run=doctor.print_version)
    commands.add_parser(
        "doctor",
        help="compare the installed build with torch; status 0: fits, 1: does not, 2: nothing to compare",
    ).set_defaults(run=doctor.examine)
    for name, (_, text) in MEASURING.items():
        commands.add_parser(name, help=f"{text}; {name} --help says more")
    status: int = parser.parse_args(arguments).run()
    return status


if __name__ == "__main__":
    sys.exit(main())
