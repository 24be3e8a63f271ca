"""python -m release COMMAND: see --help."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def _matrix(arguments: argparse.Namespace) -> None:
    from . import matrix

    data = matrix.load()
    print(data.version if arguments.version else matrix.table(data))


def _configure(arguments: argparse.Namespace) -> None:
    from . import configure

    configure.write(arguments.output)


def _record(arguments: argparse.Namespace) -> None:
    from . import record

    record.write(arguments.library, arguments.facts, arguments.host_compiler, arguments.output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m release", description="Builds and checks wheels.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("matrix", help="print the release matrix")
    command.add_argument("--version", action="store_true", help="only the project's version")
    command.set_defaults(run=_matrix)

    command = commands.add_parser("configure", help="(for CMake) find torch and nvcc, choose architectures")
    command.add_argument("--output", type=Path, required=True)
    command.set_defaults(run=_configure)

    command = commands.add_parser("record", help="(for CMake) read a library back into a build record")
    command.add_argument("--library", type=Path, required=True)
    command.add_argument("--facts", type=Path, required=True)
    command.add_argument("--host-compiler", required=True)
    command.add_argument("--output", type=Path, required=True)
    command.set_defaults(run=_record)
    return parser


def main() -> int:
    arguments = _parser().parse_args()
    try:
        arguments.run(arguments)
    except (ValueError, RuntimeError, OSError) as error:
        # Every error that a user can cause is one sentence; a bug keeps its traceback.
        if type(error).__module__.startswith("release."):
            print(f"error: {error}", file=sys.stderr)
            return 1
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
