"""The options of make: what they may say, each refused by its own name. Standard library only."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import arch_list, toolkit

if TYPE_CHECKING:
    from .matrix import Cell, Matrix


class OptionError(ValueError):
    """An option says what cannot be meant."""


@dataclass(frozen=True)
class Options:
    torch: str | None = None
    cuda: str | None = None
    python: str | None = None
    archs: str | None = None
    # The option or variable that `archs` comes from.
    archs_source: str = "ARCHS"
    test: bool = True
    # What this machine's Python has: a default, not a demand.
    torch_here: str | None = None
    cuda_here: str | None = None

    def check_archs(self, compiler: arch_list.Compiler | None, default: str) -> None:
        """Raises ArchListError for what `compiler` does not build; without one, for what none does."""
        if self.archs is not None:
            arch_list.parse(self.archs, compiler, default, toolkit.local_gpus, self.archs_source)


def yes(name: str, text: str) -> bool:
    if text not in ("yes", "no"):
        raise OptionError(f"{name}={text} is neither yes nor no: give {name}=no, or leave it out")
    return text == "yes"


def words(name: str, text: str) -> list[str]:
    """The arguments in `text`, quoted as in a shell."""
    try:
        return shlex.split(text)
    except ValueError:
        raise OptionError(
            f"{name}={text} has a quotation mark without its partner: close it, as in {name}=\"-k 'one or two'\""
        ) from None


def choose(data: Matrix, torch: str | None, cuda: str | None, machine: str | None = None) -> Cell:
    """The matrix's cell for these, each with a default. Raises OptionError."""
    if torch is not None and torch not in data.torch:
        patch = re.fullmatch(r"(\d+\.\d+)\.\d+\S*", torch)
        if patch and patch[1] in data.torch:
            raise OptionError(
                f"TORCH={torch} is a patch release, and a wheel serves every patch of a minor: give TORCH={patch[1]}"
            )
        raise OptionError(f"TORCH={torch} is not in the matrix: give one of {', '.join(data.torch)}")
    minor = torch or data.default_torch
    labels = data.torch[minor].cuda
    if cuda is not None and cuda not in labels:
        others = [row.minor for row in data.torch.values() if cuda in row.cuda]
        other = f", or TORCH={others[-1]} beside it" if others else ""
        raise OptionError(
            f"CUDA={cuda} is nothing that torch {minor} is published for: give one of {', '.join(labels)}{other}"
        )
    return data.cell(torch, cuda, machine)
