"""Who sends what to whom in a fork: the bytes of a training's state cut into messages (DeepClone, section IV-B).

Rules
- A large tensor is cut at multiples of 1/N and of 1/M, for N ranks and M clones: rank r sends what lies in both its
  own part and a clone's. So each byte leaves the ranks once, the ranks share the work, and each clone receives its M-th
  part; the clones gather the rest among themselves.
- A tensor of less than `SMALL` bytes, and one in which ranks may differ, goes whole to every clone, from the clone's
  counterpart: the rank whose number is that of the clone in its group, modulo N. What is small travels together with
  other small pieces in one message.
- The order of the messages between a rank and a clone is fixed: that in which a step updates what they carry. All sides
  compute the same plan, so a message says nothing about itself.
- Pure: the same arguments give the same plan, in any process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SMALL = 256 << 10
"""Bytes below which a tensor is not cut: what it takes to gather it would outweigh what sending less of it saves."""
MESSAGE = 16 << 20
"""Bytes of a message at most, so that what is set aside, and what is waited for, is never much."""
BUNDLE = 1 << 20
"""Bytes of small pieces that travel together at most."""
ALIGNMENT = 64
"""Tensors are cut at multiples of it, in bytes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one tensor."""

    tensor: int
    """Its place in the order in which a step updates tensors."""
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Message:
    """What goes at once from a rank to a clone."""

    source: int
    """The rank."""
    clone: int
    pieces: tuple[Piece, ...]
    """More than one: small ones, one after the other."""

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def last(self) -> int:
        """The tensor that is updated last of those it carries."""
        return self.pieces[-1].tensor


@dataclass(frozen=True, slots=True)
class ForkPlan:
    """The messages of a fork.

    >>> plan = plan_fork([4 << 20, 100], [False, False], sources=2, groups=[2])
    >>> [[(p.tensor, p.begin, p.end) for p in message.pieces] for message in plan.outgoing(1)]
    [[(0, 2097152, 4194304)], [(1, 0, 100)]]
    >>> plan.gathered
    {0: (0, 2097152, 4194304)}
    """

    counterparts: tuple[int, ...]
    """Clone -> the rank whose own state it takes over."""
    messages: tuple[Message, ...]
    """Those of one rank and clone stand in the order in which they are sent."""
    gathered: dict[int, tuple[int, ...]]
    """Tensor that the clones gather -> clones + 1 bounds in bytes."""

    def outgoing(self, source: int) -> list[Message]:
        """List what a rank sends, in the order in which it becomes ready."""
        return [message for message in self.messages if message.source == source]

    def incoming(self, clone: int) -> dict[int, list[Message]]:
        """List what a clone receives, by rank; ranks that send it nothing are left out."""
        found: dict[int, list[Message]] = {}
        for message in self.messages:
            if message.clone == clone:
                found.setdefault(message.source, []).append(message)
        return found

    def pairs(self) -> list[tuple[int, int]]:
        """List (rank, clone) that talk to each other; each clone with its counterpart at least."""
        talking = {(message.source, message.clone) for message in self.messages}
        return sorted(talking | {(source, clone) for clone, source in enumerate(self.counterparts)})


def plan_fork(
    sizes: Sequence[int],
    local: Sequence[bool],
    *,
    sources: int,
    groups: Sequence[int],
    small: int = SMALL,
    message: int = MESSAGE,
    bundle: int = BUNDLE,
) -> ForkPlan:
    """Plan a fork (DeepClone, algorithms 1 and 2, for any numbers of ranks and clones).

    Args:
        sizes: bytes of each tensor, in the order in which a step updates them.
        local: whether ranks may differ in it; as many.
        sources: ranks of the training, from 1.
        groups: clones of each group, from 1.
        small: bytes below which a tensor is not cut.
        message: bytes of a message at most, from `ALIGNMENT`.
        bundle: bytes of small pieces in one message at most.

    Raises:
        ValueError: no ranks or clones, negative sizes, or lists of unequal lengths.
    """
    clones = sum(groups)
    ranks_wrong = sources < 1 or min(groups, default=0) < 1
    if ranks_wrong or len(sizes) != len(local) or min(sizes, default=0) < 0 or message < ALIGNMENT:
        raise ValueError(
            f"fork: expected at least 1 rank and clone, sizes of at least 0, and messages of at least {ALIGNMENT} "
            f"bytes; found "
            f"{sources} ranks, groups of {list(groups)} clones, {len(sizes)} sizes, {len(local)} flags, messages of "
            f"{message} bytes"
        )
    counterparts = tuple(clone % sources for size in groups for clone in range(size))
    gathered: dict[int, tuple[int, ...]] = {}
    pieces: dict[tuple[int, int], list[Piece]] = {}
    for tensor, nbytes in enumerate(sizes):
        whole = local[tensor] or nbytes < small
        if not whole and clones > 1:
            gathered[tensor] = _bounds(nbytes, clones)
        for source, clone, begin, end in _whole(nbytes, counterparts) if whole else _cut(nbytes, sources, clones):
            steps = range(begin, end, message) if end > begin else [begin]
            cut = [Piece(tensor, at, min(at + message, end)) for at in steps]
            pieces.setdefault((source, clone), []).extend(cut)
    messages = [
        found for (source, clone), own in pieces.items() for found in _messages(source, clone, own, small, bundle)
    ]
    messages.sort(key=lambda found: found.last)
    return ForkPlan(counterparts, tuple(messages), gathered)


def _bounds(nbytes: int, parts: int) -> tuple[int, ...]:
    """Cut bytes into parts at aligned places; the last part may be longer or shorter."""
    units = -(-nbytes // ALIGNMENT)
    return tuple(min(units * part // parts * ALIGNMENT, nbytes) for part in range(parts + 1))


def _whole(nbytes: int, counterparts: Sequence[int]) -> list[tuple[int, int, int, int]]:
    return [(source, clone, 0, nbytes) for clone, source in enumerate(counterparts)]


def _cut(nbytes: int, sources: int, clones: int) -> list[tuple[int, int, int, int]]:
    """Return (rank, clone, begin, end) of each part that a rank and a clone have in common."""
    mine, theirs = _bounds(nbytes, sources), _bounds(nbytes, clones)
    found: list[tuple[int, int, int, int]] = []
    source = clone = 0
    while source < sources and clone < clones:
        begin, end = max(mine[source], theirs[clone]), min(mine[source + 1], theirs[clone + 1])
        if end > begin:
            found.append((source, clone, begin, end))
        if mine[source + 1] <= theirs[clone + 1]:
            source += 1
        else:
            clone += 1
    return found


def _messages(source: int, clone: int, pieces: Sequence[Piece], small: int, bundle: int) -> list[Message]:
    """Put small pieces together; a large one is a message of its own and does not hold up what waits to be filled."""
    done: list[Message] = []
    waiting: list[Piece] = []
    filled = 0
    for piece in pieces:
        if piece.nbytes >= small:
            done.append(Message(source, clone, (piece,)))
            continue
        if waiting and filled + piece.nbytes > bundle:
            done.append(Message(source, clone, tuple(waiting)))
            waiting, filled = [], 0
        waiting.append(piece)
        filled += piece.nbytes
    if waiting:
        done.append(Message(source, clone, tuple(waiting)))
    return done
