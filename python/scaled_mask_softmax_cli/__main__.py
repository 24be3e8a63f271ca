"""The console command's arguments."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from . import doctor, finder
from .status import NOT_WRITTEN, NOTHING, Failure

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


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.exit(doctor.print_version())


def _speak_everywhere() -> None:
    """Lets what the output's encoding lacks, such as a file's name in no encoding, be written as \\x.. and \\u...."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _abandon_output() -> None:
    """Python would complain at its end of what it could not write."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="scaled-mask-softmax", allow_abbrev=False)
    top.description = "Install scaled-mask-softmax, and look at an installation without importing it; or measure it."
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    top.add_argument("--version", action=_Version, nargs=0, help="print the installed version, as the command version")
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
    _speak_everywhere()
    given = parser().parse_args(arguments)
    try:
        status: int = given.run(given)
        if sys.stdout is not None:
            sys.stdout.flush()
    except Failure as failure:
        print(f"scaled-mask-softmax {given.command}: {failure}", file=sys.stderr)
        return failure.status
    except BrokenPipeError:
        # Who reads the output has enough of it.
        _abandon_output()
        return 1
    except OSError as error:
        if error.filename is not None:
            print(f"scaled-mask-softmax {given.command}: {error.filename}: {error.strerror}", file=sys.stderr)
            return NOT_WRITTEN
        print(f"scaled-mask-softmax {given.command}: the output cannot be written: {error}", file=sys.stderr)
        _abandon_output()
        return NOT_WRITTEN
    except KeyboardInterrupt:
        print(f"scaled-mask-softmax {given.command}: interrupted", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
