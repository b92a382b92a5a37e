"""Orders: what the catalog has a shard do with bytes.

Rules
- An order carries the term and a serial number. A shard applies orders in sequence, once each, and refuses those of a
  lower term, or of the same term with another token. The catalog repeats an order until it is acknowledged.
- `Free` alone ends committed slots. Staged memory, compaction, and eviction of what is in a file are the shard's own
  affair.
- The keeper of a segment is the one shard that writes, replaces and deletes its files. Other shards with copies of it
  write none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..segments.segment import File, SegmentId

Slots = Mapping[SegmentId, tuple[int, ...]]
"""Segment -> slots of it, ascending."""


@dataclass(frozen=True, slots=True)
class Free:
    """End slots. A segment without live slots goes, with its file where this shard is the keeper."""

    slots: Slots


@dataclass(frozen=True, slots=True)
class Cool:
    """Let segments leave the memory, now or as soon as they are in files: a retention policy does not keep them."""

    segments: tuple[SegmentId, ...]


@dataclass(frozen=True, slots=True)
class Take:
    """Be the keeper of segments: of a copy that lies here, or of a file that another shard wrote.

    The shard reads the rows of such a file when it first needs them.
    """

    files: Mapping[SegmentId, File | None]
    """Segment -> its file; None: it has none yet."""


@dataclass(frozen=True, slots=True)
class Yield:
    """Be the keeper of segments no more: another shard is. It has their files from now on, whatever is freed here."""

    segments: tuple[SegmentId, ...]


@dataclass(frozen=True, slots=True)
class Inspect:
    """Be the keeper of segments of which files lie on the path that were never reported: open and report each.

    A file that is damaged, or is not there, is reported as failed.
    """

    files: Mapping[SegmentId, str]
    """Segment -> name of the file with the highest generation."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy slots of segments from another shard's memory, and report that."""

    source: int
    """Number of that shard."""
    slots: Slots


@dataclass(frozen=True, slots=True)
class Discard:
    """Delete files that no segment needs, except those that are written or reported just now."""

    files: tuple[str, ...]
    """Names below the path."""


@dataclass(frozen=True, slots=True)
class Backups:
    """From now on, send the bytes of each save to these shards before it is proposed (`replicas=`)."""

    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """Grant nothing any more and finish the saves under way. The catalog has the segments copied meanwhile."""


@dataclass(frozen=True, slots=True)
class Leave:
    """All is elsewhere: write no file and answer no save any more. The planner ends the process."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Clients whose sessions at the catalog ended: what they staged goes; memory that they fill stays theirs until
    their processes end."""

    clients: tuple[str, ...]


Order = Free | Cool | Take | Yield | Inspect | Copy | Discard | Backups | Drain | Leave | Ended
