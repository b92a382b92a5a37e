"""What follows when a shard says all that it has: which places change, who is told to keep what, what nobody refers to.

Rules
- A segment that the catalog places at a shard, and that the shard does not have, is not there any more: its memory went
  with an earlier process, or has it never been. Another copy takes over, else the file.
- A shard that takes itself for the keeper of another one's segment is told so, and the other way round.
- A file that the shard has and the catalog has not heard of is inspected: an answer to a report was lost with a term.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..segments.segment import File, SegmentId, file_name
from .placing import keeper_of
from .references import Known, References
from .reports import Held, Place

Spot = tuple[int, tuple[int, ...]]
"""Keeper and copies of a segment."""


@dataclass(slots=True)
class Compared:
    """What follows from a comparison."""

    spots: dict[SegmentId, Spot] = field(default_factory=dict[SegmentId, Spot])
    """Segments that are elsewhere than was thought."""
    takes: dict[int, dict[SegmentId, File | None]] = field(default_factory=dict[int, "dict[SegmentId, File | None]"])
    """Shard -> segments that it is to keep, and does not know so."""
    yields: list[SegmentId] = field(default_factory=list[SegmentId])
    """Segments that the shard takes itself for the keeper of."""
    inspects: dict[SegmentId, str] = field(default_factory=dict[SegmentId, str])
    """Files of the shard's that the catalog does not know."""
    strangers: dict[SegmentId, tuple[int, ...]] = field(default_factory=dict[SegmentId, "tuple[int, ...]"])
    """Slots at the shard that nothing refers to."""
    missing: list[SegmentId] = field(default_factory=list[SegmentId])
    """Segments of which some slots are nowhere now."""
    places: dict[SegmentId, Place] = field(default_factory=dict[SegmentId, Place])
    """Where segments lie that the shard keeps."""


def compared(references: References, shard: int, held: Mapping[SegmentId, Held], shards: Sequence[int]) -> Compared:
    """Compare what a shard has with what it is thought to have.

    Args:
        references: what is thought.
        shard: its number.
        held: all that it has.
        shards: those that may keep segments; the shard itself is one of them unless it has left.
    """
    found = Compared()
    for segment, known in references.items():
        one = held.get(segment)
        if one is not None or known.keeper == shard or shard in known.copies or known.keeper not in shards:
            _compare(found, segment, known, one, shard, shards)
    for segment, one in held.items():
        known = references.get(segment)
        unused = one.slots if known is None else [slot for slot in one.slots if not _is_used(known, slot)]
        if unused:
            found.strangers[segment] = tuple(unused)
    return found


def _compare(
    found: Compared, segment: SegmentId, known: Known, one: Held | None, shard: int, shards: Sequence[int]
) -> None:
    live = known.live()
    has = one is not None and one.in_memory and set(one.slots).issuperset(live)
    copies = tuple(copy for copy in known.copies if copy != shard)
    copies = (*copies, shard) if has else copies
    keeper = known.keeper
    if keeper not in copies and (keeper == shard or keeper not in shards):
        keeper = _next_keeper(segment, known, copies, shard, shards)
    if (keeper, copies) != (known.keeper, known.copies):
        found.spots[segment] = keeper, copies
    file = known.file.file(segment) if known.file is not None else None
    generation = known.file.generation if known.file is not None else None
    if keeper == shard and (one is None or not one.keeper):
        found.takes.setdefault(shard, {})[segment] = file
    elif keeper != shard and one is not None and one.keeper:
        found.yields.append(segment)
    if keeper not in (known.keeper, shard):
        found.takes.setdefault(keeper, {})[segment] = file
    if keeper == shard and one is not None and one.generation is not None and one.generation > (generation or -1):
        found.inspects[segment] = file_name(segment, one.generation)
    if keeper == shard and one is not None and one.place is not None:
        found.places[segment] = one.place
    if not copies and any(known.file is None or not known.file.has(slot) for slot in live):
        found.missing.append(segment)


def _next_keeper(segment: SegmentId, known: Known, copies: Sequence[int], shard: int, shards: Sequence[int]) -> int:
    """Choose who keeps a segment whose keeper has lost it, or has left."""
    if copies:
        return copies[0]
    if known.keeper in shards:
        return known.keeper
    return shard if shard in shards and known.file is None else keeper_of(segment, shards)


def _is_used(known: Known, slot: int) -> bool:
    return slot < len(known.counts) and known.counts[slot] > 0
