"""The console command's arguments."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from . import doctor, finder
from .status import NOTHING, Failure

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
        return NOTHING
    status: int = module.main(arguments)
    return status


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="scaled-mask-softmax", allow_abbrev=False)
    top.description = "Install scaled-mask-softmax, and look at an installation without importing it; or measure it."
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    version = commands.add_parser("version", help="print the installed version")
    version.set_defaults(run=lambda arguments: doctor.print_version())
    doctor.add_arguments(
        commands.add_parser("doctor", help="say whether the build fits torch and the GPUs, and the fix")
    )
    finder.add_commands(commands)
    for name, (_, text) in MEASURING.items():
        commands.add_parser(name, help=f"{text}; {name} --help says more")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in MEASURING:
        return measure(arguments[0], arguments[1:])
    given = parser().parse_args(arguments)
    try:
        status: int = given.run(given)
    except Failure as failure:
        print(f"scaled-mask-softmax {given.command}: {failure}", file=sys.stderr)
        return failure.status
    except BrokenPipeError:
        # Who reads the output has enough of it; Python would complain of that at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"scaled-mask-softmax {given.command}: interrupted", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
