"""Taking a shard's memory back from a replica, when its process or its node was lost.

Rules
- All other shards are asked. One that is being started again has lost its replica store, so it is not waited for long:
  it may be waiting for this one. Each is told later to let go of what it has, or may be told yet by an earlier
  incarnation, if that runs on where nobody sees it.
- Of the replicas the one that was complete last has everything that was committed. None: all is lost, by name. A shard
  that has one and cannot be reached is asked again, for as long as one that is being started again.
- A copy whose bytes are not those that were written is not brought back: its segment is lost, and the log names it.
- What the disk knows, or the ledger counts as retired, is not brought back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ....store.archive.manifestfile import Manifest
from ....store.errors import CorruptDataError, OperationTimeoutError, ShardUnavailableError, TensorVineError
from ....store.holders import Filling
from ....store.refs import ModelRef
from ....store.segments.arena import Part
from ....store.segments.segment import SegmentId
from ....store.shard import ShardState
from ....store.versions.architectures import unpacked
from ....store.versions.manifest import decode_body, slots_of
from ....store.versions.replica import NEVER, Copy, Kept, SequenceNumber
from ....store.waiting import Backoff, Deadline
from ..calls import ShardCalls
from ..calls.copies import Address, Original
from ..calls.replicas import Offer
from ..context import ShardContext
from ..copying import fetched, large
from ..peers import Peers
from ..segment_memory import SegmentMemory

log = logging.getLogger(__name__)

RESTARTING_S = 5.0
"""How long to wait for a shard that is being started again."""
SILENT_S = 30.0
"""How long to wait for one that does not answer."""
ASK_S = 5.0
OFFER_S = 120.0
FETCH_S = 600.0
_PAUSE_S = 0.1
_OWNER = Filling("restoring")


@dataclass(slots=True)
class Restored:
    """What came back."""

    incarnation: int = 1
    """The number of the shard's incarnation: one above every one that a replica store has heard of."""
    refs: list[ModelRef] = field(default_factory=list[ModelRef])
    """Versions of this home."""
    replicas: set[int] = field(default_factory=set[int])
    """Shards that have replicas of earlier incarnations, or may come to have some: all others."""
    unheard: set[int] = field(default_factory=set[int])
    """Those of them that did not answer: they may know of a later incarnation than `incarnation`."""


def restore(context: ShardContext, home_of: Callable[[str], int]) -> Restored:
    """Bring back what the best replica of a shard has.

    Args:
        context: of the shard, which starts again; its state has the ledger, and what the disk brought back.
        home_of: name -> the shard that answers for it now. Versions of others are left out: they were on their way
            here or from here, and come with their names or have gone with them.
    """
    index, peers = context.index, context.peers
    standings = _standings(index, peers)
    restored = Restored(1 + max((incarnation for incarnation, _ in standings.values()), default=0))
    restored.unheard = set(peers.others) - standings.keys()
    restored.replicas = set(peers.others)
    complete = {shard: number for shard, (_, number) in standings.items() if number > NEVER}
    for shard in sorted(complete, key=complete.__getitem__, reverse=True):
        refs = _brought_back(context, shard, home_of)
        if refs is not None:
            restored.refs = refs
            return restored
    log.error("shard %d restarted: no other shard has a replica of it; save its lost versions again", index)
    return restored


def _brought_back(context: ShardContext, shard: int, home_of: Callable[[str], int]) -> list[ModelRef] | None:
    """Bring back what the replica of one shard has, and try again while that shard cannot be reached.

    Returns:
        Versions of this home; None: it could not give them.
    """
    deadline, pauses = Deadline.after(RESTARTING_S), Backoff(_PAUSE_S, _PAUSE_S)
    while True:
        try:
            return _given(context, shard, home_of)
        except TensorVineError as exc:
            if not isinstance(exc, ShardUnavailableError) or deadline.passed:
                log.error("shard %d: shard %d could not return its replica: %s", context.index, shard, exc)
                return None
            log.info("shard %d: requesting its replica from shard %d failed, retrying: %s", context.index, shard, exc)
        pauses.wait()


def _given(context: ShardContext, shard: int, home_of: Callable[[str], int]) -> list[ModelRef]:
    began = time.monotonic()
    offer = context.peers.call(shard, ShardCalls.offer_replica(context.index), OFFER_S)
    with context.lock:
        wanted = _wanted(context.state, offer)
        parts = _admission(context.segment_memory, wanted)
    without = large(wanted).keys() - parts.keys()
    here = {s: o for s, o in wanted.items() if s not in without}
    _take(context, offer, here, parts)
    refs = _enter(context, offer, home_of)
    log.warning(
        "shard %d restarted: shard %d returned %d versions and %d of %d segments in %.2f s",
        context.index,
        shard,
        len(refs),
        len(here),
        len(offer.segments),
        time.monotonic() - began,
    )
    return refs


def _standings(index: int, peers: Peers) -> dict[int, tuple[int, SequenceNumber]]:
    """Ask how good their replicas are: shard -> (latest incarnation, sequence number)."""
    began, pauses = time.monotonic(), Backoff(_PAUSE_S, _PAUSE_S)
    found: dict[int, tuple[int, SequenceNumber]] = {}
    waiting = set(peers.others)
    while waiting:
        for shard in sorted(waiting):
            patience = SILENT_S
            try:
                found[shard] = peers.call(shard, ShardCalls.look_at_replica(index), ASK_S)
                waiting.discard(shard)
                continue
            except ShardUnavailableError as exc:
                patience, why = RESTARTING_S, exc
            except OperationTimeoutError as exc:
                why = exc
            if time.monotonic() - began > patience:
                log.warning("shard %d: shard %d is no longer asked for a replica: %s", index, shard, why)
                waiting.discard(shard)
        if waiting:
            pauses.wait()
    return found


def _wanted(state: ShardState, offer: Offer) -> dict[SegmentId, Original]:
    """Return those that the disk does not have whole."""
    wanted: dict[SegmentId, Original] = {}
    for segment_id, original in offer.segments.items():
        known = state.segment(segment_id)
        stored = known.stored.slots if known is not None and known.stored is not None else frozenset[int]()
        if not stored.issuperset(original.slots):
            wanted[segment_id] = original
    return wanted


def _admission(segment_memory: SegmentMemory, wanted: Mapping[SegmentId, Original]) -> dict[SegmentId, Part]:
    """Have memory granted, as far as there is some."""
    lengths = large(wanted)
    parts: dict[SegmentId, Part] = {}
    while len(parts) < len(lengths):
        left = [s for s in lengths if s not in parts]
        offsets = segment_memory.grant(_OWNER, [lengths[s] for s in left])
        if not offsets:
            log.error(
                "%d segments are lost, as they do not fit into the memory; raise store_bytes= at the next start: %s",
                len(left),
                left[:10],
            )
            break
        parts |= {s: Part(offset, lengths[s]) for s, offset in zip(left, offsets, strict=False)}
    return parts


def _take(
    context: ShardContext, offer: Offer, wanted: Mapping[SegmentId, Original], parts: Mapping[SegmentId, Part]
) -> None:
    lock, state, segment_memory = context.lock, context.state, context.segment_memory
    try:
        copies = _fetched(context, wanted, parts, offer.address)
        with lock:
            for segment, copy in copies.items():
                state.take_back(segment, copy.handle, copy.sizes, copy.slots)
                if isinstance(copy.handle, Part):
                    segment_memory.keep(copy.handle, segment)
                segment_memory.hashing.later(segment)
    finally:
        with lock:
            segment_memory.drop_grants(_OWNER)


def _fetched(
    context: ShardContext,
    wanted: Mapping[SegmentId, Original],
    parts: Mapping[SegmentId, Part],
    address: Address | None,
) -> dict[SegmentId, Copy]:
    """Fetch the copies whose bytes are what was written; where some are not, one by one."""
    try:
        return fetched(wanted, parts, _OWNER, context.segment_memory, address, FETCH_S, hashed=True)
    except CorruptDataError as exc:
        if len(wanted) == 1:
            log.error(
                "shard %d: segment %s is lost, as its replica is damaged: %s", context.index, next(iter(wanted)), exc
            )
            return {}
    found: dict[SegmentId, Copy] = {}
    for segment, original in wanted.items():
        part = {segment: parts[segment]} if segment in parts else {}
        found |= _fetched(context, {segment: original}, part, address)
    return found


def _enter(context: ShardContext, offer: Offer, home_of: Callable[[str], int]) -> list[ModelRef]:
    """Have versions of this home exist again, and hold what they name here."""
    state, entered = context.state, list[ModelRef]()
    with context.lock:
        for ref in sorted(offer.records):
            known = ref in state.live or ref in state.unread or state.ledger.retired(ref)
            if known or home_of(ref.name) != state.index:
                continue
            _enter_version(state, offer.records[ref])
            entered.append(ref)
    return entered


def _enter_version(state: ShardState, kept: Kept) -> None:
    ref = kept.header.ref
    entries = decode_body(kept.body, ref)
    state.restore_version(Manifest(kept.header, unpacked(kept.packed), entries, {}), kept.body)
    here: dict[SegmentId, Any] = slots_of(e for e in entries.values() if state.where(e.segment) == state.index)
    for segment, slots in here.items():
        try:
            state.hold(ref, {segment: slots})
        except TensorVineError as exc:
            log.error("shard %d: %s is partly lost: %s", state.index, ref, exc)
