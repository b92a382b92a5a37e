"""What was promised: every save, retirement and flush, and the rules that all reads and the end are held against.

Rules (by name, as failures print them)
- R1: every byte read is the version's. Contents are derived from ids, so that each array says whose it is.
- R2: an array that a client holds never changes.
- R3: a save that returned is readable, or named lost for a reason: with a path, what was flushed or durable is never
  lost; without a crash nothing is; with two replicas one crash loses nothing. "Never saved" is never the answer,
  unless nobody who knew of it lived on, and it was not promised to be on disk. A save whose call ended by a signal
  exists by then, or never does.
- R4: a version number is never used twice.
- R5: a name has one home: no version is listed twice.
- R6: no error outside the one tree reaches a caller, and no thread of an actor ends by one.
- R7: when all is retired and released, memory, pins, staged bytes and files are back to nothing.
- R8: with everybody alive and calm every operation ends, and well within its timeout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
from tensorvine.store.graphs.graph import Layer, ModelGraph
from tensorvine.store.refs import ModelRef

from .scheduler import START_S, World

Table = dict[str, tuple[int, int]]
"""Tensor -> (content id, elements)."""
_SHIFT = np.uint64(32)
SCRIBBLED = 1 << 31
"""Contents from here on are no version's: callers write them into arrays that are theirs again, with the number of the
save that these were given to."""


def graph_of(table: Table) -> ModelGraph:
    """Return a chain of layers, one for each tensor, whose configs are the tensors' sizes."""
    layers, before = [Layer("in", {"class": "Input"})], "in"
    for tensor, (_, elements) in table.items():
        layers.append(Layer(f"layer {tensor}", {"units": elements}, [before], [tensor]))
        before = f"layer {tensor}"
    return ModelGraph(layers)


def layers_shared(table: Table, other: Table) -> int:
    """Return how many layers of the graphs of two tables match: the input, and those whose sizes are the same."""
    pairs = zip(table.values(), other.values(), strict=False)
    return 1 + sum(1 for _ in takewhile(lambda pair: pair[0][1] == pair[1][1], pairs))


def content_name(number: int) -> str:
    """Name a content, or the save whose caller wrote it into its arrays afterwards."""
    return f"after save {number - SCRIBBLED}" if number >= SCRIBBLED else str(number)


@dataclass(eq=False)
class Attempt:
    """A save that was tried."""

    number: int
    name: str
    table: Table
    durable: bool
    began: float
    ref: ModelRef | None = None
    failed: bool = False
    """It raised: the version may or may not exist."""
    existing: set[ModelRef] | None = None
    """Versions of its name that there were when a signal ended its call; None: none did, or it goes on without a
    call."""
    committed: float = 0.0
    safe: bool = False
    """It is promised to be on disk."""
    retiring: bool = False
    retired: bool = False
    lossy: bool = False
    """A crash came that may have lost it: not if it was safe by then."""


@dataclass(eq=False)
class Held:
    """Arrays that a client keeps."""

    what: str
    arrays: dict[str, np.ndarray]
    attempt: Attempt


@dataclass(eq=False)
class Oracle:
    """The truth of one world."""

    world: World
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    by_ref: dict[ModelRef, Attempt] = field(default_factory=dict[ModelRef, Attempt])
    broken: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(rule, what happened)."""
    contents: int = 0
    crashes: int = 0

    def fail(self, rule: str, what: str) -> None:
        """A rule is broken; after the end of the world none is: what still runs is being unwound."""
        if self.world.over:
            return
        self.world.note(f"BROKEN {rule}: {what}")
        self.broken.append((rule, f"at {self.world.now - START_S:.3f} s: {what}"))

    # ---- contents ---------------------------------------------------------------------------------------

    def fresh(self, elements: int) -> tuple[int, int]:
        """Make a content that never was."""
        self.contents += 1
        return self.contents, elements

    @staticmethod
    def array(content: tuple[int, int]) -> np.ndarray:
        """Return the array of a content."""
        number, elements = content
        return np.arange(elements, dtype=np.uint64) + (np.uint64(number) << _SHIFT)

    def arrays(self, table: Table) -> dict[str, np.ndarray]:
        """Return the arrays of a table."""
        return {name: self.array(content) for name, content in table.items()}

    def scribble(self, attempt: Attempt, arrays: Mapping[str, np.ndarray]) -> None:
        """Overwrite arrays that are their caller's again: nobody may read them any more."""
        for array in arrays.values():
            array[:] = self.array((SCRIBBLED + attempt.number, array.size))

    # ---- saves ------------------------------------------------------------------------------------------

    def begin(self, name: str, table: Table, durable: bool) -> Attempt:
        """Note that a save begins."""
        attempt = Attempt(len(self.attempts), name, table, durable, self.world.now)
        self.attempts.append(attempt)
        return attempt

    def committed(self, attempt: Attempt, ref: ModelRef) -> None:
        """Note that it returned."""
        known = self.by_ref.get(ref)
        if known is not None:
            self.fail("R4", f"{ref} was given to save {known.number} and to save {attempt.number}")
        attempt.ref, attempt.committed = ref, self.world.now
        attempt.safe = attempt.durable
        self.by_ref[ref] = attempt

    def flushed(self, since: float) -> None:
        """Note that all that was committed before `since` is on disk."""
        for attempt in self.attempts:
            if attempt.ref is not None and attempt.committed < since and not attempt.lossy:
                attempt.safe = True

    def crashed(self, covered: bool) -> None:
        """Note that a shard died; `covered`: copies of what it had were on another node."""
        self.crashes += 1
        for attempt in self.attempts:
            if not attempt.safe and not covered:
                attempt.lossy = True

    def alive(self, name: str | None = None) -> list[Attempt]:
        """Return the committed saves that nobody has begun to retire."""
        return [a for a in self.attempts if a.ref is not None and not a.retiring and name in (None, a.name)]

    # ---- reads ------------------------------------------------------------------------------------------

    def read(
        self, what: str, ref: ModelRef | None, name: str, arrays: Mapping[str, Any], all_of_it: bool
    ) -> Attempt | None:
        """Check what a load gave; gives the save that it is of."""
        seen: dict[str, int] = {}
        for tensor, array in arrays.items():
            number = int(array.flat[0] >> _SHIFT) if array.size and array.dtype == np.uint64 else -1
            seen[tensor] = number
            if not np.array_equal(array, self.array((number, array.size))):
                wrong = array != self.array((number, array.size))
                told = f"{int(np.sum(wrong))} of {array.size} elements are no content's ({number})"
                others = sorted({content_name(int(element) >> 32) for element in array[wrong]})[:5]
                self.fail("R1", f"{what}: tensor {tensor!r}: {told}; they seem to be of {others}")
                return None
        candidates = [
            a for a in self.attempts if a.name == name and (ref is None or a.ref == ref or (a.ref is None and a.failed))
        ]
        if ref is not None and ref in self.by_ref:
            candidates = [self.by_ref[ref]]
        for attempt in reversed(candidates):
            same = all(t in attempt.table and attempt.table[t] == (seen[t], arrays[t].size) for t in arrays)
            if same and (not all_of_it or len(arrays) == len(attempt.table)):
                return attempt
        unfinished = [a for a in self.attempts if a.name == name and a.ref is None and not a.failed]
        for attempt in unfinished:
            if all(t in attempt.table and attempt.table[t][0] == seen[t] for t in arrays):
                return attempt
        expected = [{t: c[0] for t, c in a.table.items()} for a in candidates[-2:]]
        contents = {tensor: content_name(number) for tensor, number in seen.items()}
        self.fail("R1", f"{what}: contents {contents} are of no version that it may be; such as {expected}")
        return None

    def failed(self, name: str, arrays: Mapping[str, Any]) -> list[Attempt]:
        """Return the failed saves that a version without a known save may be of."""
        seen = {tensor: (int(array.flat[0] >> _SHIFT), array.size) for tensor, array in arrays.items()}
        return [a for a in self.attempts if a.name == name and a.failed and a.ref is None and a.table == seen]

    def check_held(self, held: Held) -> None:
        """Hold kept arrays against what they were."""
        for tensor, array in held.arrays.items():
            expected = self.array(held.attempt.table[tensor])
            if not np.array_equal(array, expected):
                wrong = int(np.sum(array != expected))
                self.fail("R2", f"{held.what}: tensor {tensor!r}, held: {wrong} of {array.size} elements changed")
