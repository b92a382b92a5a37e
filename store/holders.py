"""Who keeps what from going, each as a type of its own.

What holds slots of segments (`Holder`):

| kind | made by | ends with | what it decides |
|---|---|---|---|
| `ModelRef` | a commit, a restart, its home elsewhere | its end | what homes, replicas, retention count |
| `Save` | `SegmentMemory.adopt` | commit, `abort`, the client's session | opens its session anew where they go |
| `FileOf` | `SegmentTable.store`, `recovery` | its segment, the next file | stays on disk; keeps none in memory |
| `FileTaking` | `SegmentTable.store` | the same step | as `FileOf`; both count while one follows the other |
| `Drain` | `SegmentHandoff.receive` at a successor | its `inherit`, a drain given up | which copies are refused |
| `Reason` | a shard for itself, see there | see there | `RESTORED`: a replica has it, too |

Whose a part of a shard's memory is until a segment lies in it (`Owner`): a `Save`, or a `Filling` of the shard itself.
Saves under way keep a shard that drained from ending (`SegmentMemory.serves_saves`), those `ahead` do not. A `Lease`
holds no slots: it keeps a retired version, which does. A `Query` holds nothing but leases.

Rules
- Kinds are told apart by their types alone. No two kinds are equal: tuples of theirs differ in length or in kind.
- What is looked up most is made, hashed and compared in C: hence named tuples.
- They travel inside messages, and stand in no file.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from .refs import ModelRef


class Save(NamedTuple):
    """A save under way, or to come: it owns memory that its client fills, and holds what that brought until its commit.

    >>> str(Save("client", 7)), str(Save("client", 8, ahead=True))
    ('client/s7', 'client/r8')
    """

    client: str
    serial: int
    """Counts the client's saves."""
    ahead: bool = False
    """Its memory was granted before there was a save, which may never come: then nobody waits for its end."""

    def __str__(self) -> str:
        return f"{self.client}/{'r' if self.ahead else 's'}{self.serial}"


class Query(NamedTuple):
    """A prefix query under way: it owns what it pinned, until a match takes that over.

    >>> str(Query("client", 9))
    'client/q9'
    """

    client: str
    serial: int
    """Counts the client's queries."""

    def __str__(self) -> str:
        return f"{self.client}/q{self.serial}"


class Lease(NamedTuple):
    """A pin on a version: it keeps the version's tensors until it is unpinned or the client's session ends.

    The client chooses it, so a request that is repeated pins once, and `abort` of the operation drops it. It moves
    with the version's name from home to home.

    >>> str(Lease(Query("client", 9), 2, 1))
    'client/q9/2.1'
    """

    operation: Save | Query
    """What pinned."""
    shard: int
    """The shard that pinned first."""
    position: int = 0
    """Tells the pins of one query apart: the position of its graph."""

    @property
    def client(self) -> str:
        """The client whose session it belongs to."""
        return self.operation.client

    def __str__(self) -> str:
        return f"{self.operation}/{self.shard}.{self.position}"


class Filling(NamedTuple):
    """A shard that fills memory of its own: it loads, copies, compacts.

    >>> str(Filling("load", 3)), str(Filling("compaction"))
    ('load 3', 'compaction')
    """

    purpose: str
    serial: int = 0
    """Tells those of one purpose apart."""

    def __str__(self) -> str:
        return f"{self.purpose} {self.serial}" if self.serial else self.purpose


Owner = Save | Filling
"""Whose a part of a shard's memory is, as long as no segment lies in it."""


class FileOf(NamedTuple):
    """A segment's file: it holds what its tensors are encoded against, in segments of this shard and of others.

    >>> str(FileOf(255))
    'file ff'
    """

    serial: int
    """Of the segment, wherever it was made: savers draw them at random."""

    def __str__(self) -> str:
        return f"file {self.serial:x}"


class FileTaking(NamedTuple):
    """A file that is about to take the place of its segment's: both hold for a moment."""

    file: FileOf

    def __str__(self) -> str:
        return f"next {self.file}"


class Drain(NamedTuple):
    """A shard that drains: it holds the copies at its successors until they are told who does."""

    shard: int
    version: int
    """Of the topology after it."""

    def __str__(self) -> str:
        return f"drain of shard {self.shard} to topology {self.version}"


class Reason(Enum):
    """Why a shard itself holds what nobody is known to."""

    RESTORED = "restored"
    """The disk or a replica gave it back, and not all homes have said what their versions name."""
    UNREAD = "unread"
    """It has a file, and a manifest could not be read: that may name any of it."""
    DRAINED = "drained"
    """Its successors have it, and a shard that drained goes on answering from it."""


Holder = ModelRef | Save | FileOf | FileTaking | Drain | Reason
"""What holds slots of segments."""
