"""The C++ compiler that tests call, and what it must be told."""

from __future__ import annotations

import subprocess


def shared_library_options(compiler: list[str]) -> list[str]:
    """What makes a shared library need the shared C++ library.

    As cmake/SharedStdcxx.cmake: a compiler that has only a static one beside it links that, and the library fails
    beside torch.
    """
    command = [*compiler, "-print-file-name=libstdc++.so"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return ["-l:libstdc++.so.6"] if found == "libstdc++.so" else []
