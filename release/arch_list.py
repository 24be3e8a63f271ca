"""TORCH_CUDA_ARCH_LIST, in every spelling that one of torch's two parsers (Python, CMake) accepts.

Where the two differ, the reading that gives more wins: a name such as Hopper includes PTX for its newest architecture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class ArchListError(ValueError):
    """A token is unknown, or nvcc cannot build for it."""


@dataclass(frozen=True)
class Compiler:
    """An nvcc: its version ("13.0.88") and the architectures it lists ("7.5", ...), ascending."""

    version: str
    architectures: tuple[str, ...]

    def __str__(self) -> str:
        return f"nvcc {self.version}"


@dataclass(frozen=True)
class ArchList:
    """What to build: cubins as (real, virtual) pairs and PTX, all as "9.0", "9.0a" or "10.0f"."""

    cubins: tuple[tuple[str, str], ...]
    ptx: tuple[str, ...]

    def flags(self) -> list[str]:
        """nvcc's -gencode values, one a cubin and one a PTX.

        Cubins of one major version are made of its oldest virtual architecture: no source of ours asks for a minor, so
        the machine code is the same, and the longest part of a compilation runs once for all of them.
        """
        oldest: dict[str, str] = {}
        for virtual in sorted({virtual for _, virtual in self.cubins if virtual[-1] not in "af"}, key=_key):
            oldest.setdefault(virtual.split(".")[0], virtual)
        flags = []
        for real, virtual in self.cubins:
            source = virtual if virtual[-1] in "af" else oldest[virtual.split(".")[0]]
            flags.append(f"arch=compute_{_digits(source)},code=sm_{_digits(real)}")
        return flags + [f"arch=compute_{_digits(arch)},code=compute_{_digits(arch)}" for arch in self.ptx]

    def __str__(self) -> str:
        ptx = set(self.ptx)
        cubins = [real + ("+PTX" if real in ptx else "") for real, _ in self.cubins]
        real = {real for real, _ in self.cubins}
        return ";".join(cubins + [f"{arch}(PTX only)" for arch in self.ptx if arch not in real])


# Newest last: a name includes PTX for its last architecture. Alternatives are architectures that were renumbered: the
# first that nvcc knows is meant.
_NAMES: dict[str, tuple[tuple[str, ...], ...]] = {
    "Kepler": (("3.5",),),
    "Kepler+Tesla": (("3.7",),),
    "Maxwell": (("5.0",), ("5.2",)),
    "Maxwell+Tegra": (("5.3",),),
    "Pascal": (("6.0",), ("6.1",)),
    "Volta": (("7.0",),),
    "Volta+Tegra": (("7.2",),),
    "Turing": (("7.5",),),
    "Ampere": (("8.0",), ("8.6",)),
    "Ampere+Tegra": (("8.7",),),
    "Ada": (("8.9",),),
    "Hopper": (("9.0",),),
    "Blackwell": (("10.0",), ("10.3",), ("12.0",), ("12.1",)),
    "Blackwell+Tegra": (("11.0", "10.1"),),
    "Rubin": (("10.7",),),
}
_NUMBER = re.compile(r"(\d+\.\d)([af]?)(?:\((\d+\.\d)\))?")


def _key(arch: str) -> tuple[int, int, str]:
    major, minor = arch.rstrip("af").split(".")
    return int(major), int(minor), arch[-1] if arch[-1] in "af" else ""


def _digits(arch: str) -> str:
    return arch.replace(".", "")


def _check(arch: str, where: str, compiler: Compiler | None) -> None:
    base, suffix = arch.rstrip("af"), arch[-1] if arch[-1] in "af" else ""
    if suffix == "a" and _key(base) < (9, 0, ""):
        raise ArchListError(f"{where}: 'a' targets start at 9.0a")
    if suffix == "f" and _key(base) < (10, 0, ""):
        raise ArchListError(f"{where}: 'f' targets start at 10.0f")
    if compiler is None:
        return
    newest, oldest = compiler.architectures[-1], compiler.architectures[0]
    if base not in compiler.architectures:
        if _key(base) > _key(newest):
            raise ArchListError(f"{where} is too new for {compiler}, whose newest is {newest}: leave it out")
        if _key(base) < _key(oldest):
            raise ArchListError(f"{where} is too old for {compiler}, whose oldest is {oldest}: leave it out")
        known = ", ".join(compiler.architectures)
        raise ArchListError(f"{where} is none of the architectures of {compiler}: give some of {known}")
    version = tuple(map(int, compiler.version.split(".")[:2]))
    if suffix == "f" and version < (12, 9):
        raise ArchListError(f"{where}: 'f' targets need CUDA 12.9, this is {compiler}")


def parse(
    text: str,
    compiler: Compiler | None,
    default: str,
    native: Callable[[], Sequence[str]],
    source: str = "TORCH_CUDA_ARCH_LIST",
) -> ArchList:
    """Reads `text`; "Common" and an empty list mean `default`. `native` returns this machine's GPUs ("9.0").

    Raises ArchListError with the offending token and `source`, the name of what holds it. Without a compiler only what
    none takes is refused, and names stand for nothing.
    """
    cubins: dict[tuple[str, str], None] = {}
    ptx: dict[str, None] = {}

    def add(real: str, virtual: str, token: str, with_ptx: bool) -> None:
        where = f"{token!r} in {source}"
        _check(real, where, compiler)
        _check(virtual, where, compiler)
        if _key(virtual) > _key(real):
            raise ArchListError(f"{where}: {real} cannot run code for {virtual}")
        cubins[real, virtual] = None
        if with_ptx:
            ptx[virtual] = None

    def add_group(group: Sequence[str], token: str) -> None:
        for arch in group:
            add(arch, arch, token, with_ptx=arch == group[-1])

    tokens = [token for token in re.split(r"[;\s]+", text) if token]
    if not tokens:
        tokens = ["Common"]
    while tokens:
        token = tokens.pop(0)
        name = token.removesuffix("+PTX")
        if name == "All":
            add_group(compiler.architectures if compiler else (), token)
        elif name == "Common":
            tokens[:0] = default.split(";")
        elif name in ("native", "Auto"):
            found = sorted(set(native()), key=_key)
            if found:
                add_group(found, token)
            elif name == "Auto":
                tokens[:0] = default.split(";")
            else:
                raise ArchListError(f"'native' in {source} needs a GPU, and this machine shows none: give numbers")
        elif name in _NAMES:
            if compiler is None:
                continue
            choices = [[arch for arch in group if arch in compiler.architectures] for group in _NAMES[name]]
            known = [choice[0] for choice in choices if choice]
            # Nothing known: let the check say whether the name is too old or too new.
            add_group(known or [_NAMES[name][-1][0]], token)
        elif match := _NUMBER.fullmatch(name):
            number, suffix, virtual = match.groups()
            add(number + suffix, virtual or number + suffix, token, with_ptx=token != name)
        else:
            raise ArchListError(
                f"unknown {token!r} in {source}: expected numbers such as 9.0, 9.0a or 9.0+PTX, a name "
                f"({', '.join(_NAMES)}), All, Common, Auto or native, separated by ';' or spaces; "
                f'give for example {source}="8.0 9.0+PTX", or leave it out'
            )
    return ArchList(
        tuple(sorted(cubins, key=lambda pair: (_key(pair[0]), _key(pair[1])))), tuple(sorted(ptx, key=_key))
    )
