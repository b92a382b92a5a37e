"""A target: a reader of bytes that come from elsewhere, and what it is given.

Rules
- An input is bytes, whatever the reader takes: what needs several parts has them in one text.
- A reader raises errors of the tree (`store/errors.py`) or nothing. What it starts is closed by its `reading`.
- The first numbers are inputs as they are: the valid ones, which must be read, and those that ever found something
  (`found/TARGET-...`), which are read or refused now. All others are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random

from tests.fuzz.mutations import of_bytes

FOUND = Path(__file__).parent / "found"
Read = Callable[[bytes], object]
"""Reads an input to its end."""


@dataclass(frozen=True)
class Target:
    """A reader, and what it is given."""

    name: str
    valid: Callable[[Path], Sequence[bytes]]
    """Makes inputs that are read without an error, in a folder for what it has to write."""
    reading: Callable[[Path], AbstractContextManager[Read]]
    """Opens the reader, in a folder for files of its own."""
    damaged: Callable[[Random, Sequence[bytes]], bytes] = lambda dice, valid: of_bytes(dice, dice.choice(valid), valid)
    """Draws an input."""
    compiled: Callable[[], object] = lambda: None
    """Has compiled what is so at first use: in the runner, for all children, which are its forks."""
    trusted: bool = False
    """Who says so much memory is needed is believed, so that memory is not measured."""
    slow: bool = False
    """It is given fewer inputs where there is little time."""
    heavy: bool = False
    """It imports a framework, and is slow: all such share one process."""


class Inputs:
    """The inputs of a target by number.

    Args:
        target: whose.
        folder: for what making them has to write.
    """

    def __init__(self, target: Target, folder: Path) -> None:
        self._target = target
        self._folder = folder

    @cached_property
    def valid(self) -> Sequence[bytes]:
        """The inputs that must be read."""
        return self._target.valid(self._folder)

    @cached_property
    def fixed(self) -> Sequence[bytes]:
        """These, and the inputs that ever found something."""
        return [*self.valid, *(path.read_bytes() for path in sorted(FOUND.glob(f"{self._target.name}-*")))]

    def of(self, seed: int, number: int) -> bytes:
        """Return one."""
        if number < len(self.fixed):
            return self.fixed[number]
        return self._target.damaged(Random(f"{self._target.name}/{seed}/{number}"), self.valid)
