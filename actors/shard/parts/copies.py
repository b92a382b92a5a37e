"""Copies of segments on other shards: of what is saved here, of what others save, and those that the catalog orders.

Rules
- With `replicas`, what a save brings is sent to the backups that the catalog named, before it is proposed; and again to
  others, if it names others meanwhile. The proposal says which incarnation of a backup has them: those that an earlier
  one had are gone. A backup without a lease keeps none.
- Content hashes are checked when a copy is written, and are served with it when it is read.
- What became of a save that copies came for, the catalog is asked every `ASK_S` (`Report.kept`).
- What an order had copied is reported. A copy that fails is tried again until the term is over; what the source
  has not got any more is not copied.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from ....store.catalog.orders import Copy as CopyOrder
from ....store.catalog.orders import Slots
from ....store.errors import MovedError, ShardUnavailableError, StoreFullError, TensorVineError
from ....store.holders import Request
from ....store.segments.arena import Part
from ....store.segments.segment import SegmentId
from ....store.waiting import Backoff, Deadline
from ...rpc.calls import answers
from ...rpc.messages import PEER_TIMEOUT_S
from ...rpc.ticker import Ticker
from ..calls import ShardCalls
from ..calls.copies import Address, Original
from ..calls.orders import OrderCalls
from ..context import ShardContext
from ..copying import Copied, Copying, original_of
from ..reporting import Reporting
from ..settling import Settling

log = logging.getLogger(__name__)

ASK_S = 30.0
"""How often the catalog is asked about saves that copies came for."""
PAUSE_S = (0.1, 5.0)
"""Shortest and longest pause between two tries to copy."""
LATE_S = 1.0
"""How much longer than it may take to keep copies a shard is waited for: it says itself what was late."""
COPY_S = 120.0
"""How long a copy that was ordered may take."""


@dataclass(slots=True)
class _Sent:
    shards: set[int] = field(default_factory=set[int])
    backups: tuple[int, ...] = ()
    """Those of them that are named in the proposal."""
    segments: set[SegmentId] = field(default_factory=set[SegmentId])


class Copies:
    """The copies that one shard sends and keeps.

    Args:
        context: the shard's.
        settling: carries out what follows.
        copying: fetches what is to be kept.
        reporting: tells the catalog.
    """

    def __init__(self, context: ShardContext, settling: Settling, copying: Copying, reporting: Reporting) -> None:
        self._context = context
        self._state = context.state
        self._lock = context.lock
        self._segment_memory = context.segment_memory
        self._shards = context.shards
        self._settling = settling
        self._copying = copying
        self._reporting = reporting
        self._at: dict[Request, _Sent] = {}
        """Save that is not committed -> what was sent for it."""
        self._ordered: set[asyncio.Task[None]] = set()
        if context.config.replicas > 1:
            Ticker("copies", f"shard {context.index}", lambda: ASK_S, self._ask)

    # ---- of what is saved here ------------------------------------------------------------------------

    async def sent(self, save: Request, named: Container[SegmentId], deadline: Deadline) -> dict[int, int]:
        """Have all backups keep copies of what a save has staged and its version names.

        Returns:
            Backup -> its incarnation that has them.

        Raises:
            StoreFullError: a backup has no room.
            ShardUnavailableError: one does not take them until the deadline.
        """
        done: dict[int, int] = {}
        pauses = Backoff(*PAUSE_S)
        while True:
            with self._lock:
                backups = self._state.backups
                missing = [shard for shard in backups if shard not in done]
                if not missing:
                    if save in self._at:
                        self._at[save].backups = backups
                    return {shard: done[shard] for shard in backups}
                staged = {s: segment for s, segment in self._state.staged(save).items() if s in named}
                originals = {s: original_of(segment, self._segment_memory) for s, segment in staged.items()}
                if not originals:
                    return {}
                sent = self._at.setdefault(save, _Sent())
                sent.shards.update(missing)
                sent.segments.update(originals)
            left = deadline.left()
            call = ShardCalls.keep_copies(self._context.index, save, originals, self._context.tcp_address, left)
            found = await asyncio.gather(
                *(self._shards[shard].ask(call, left + LATE_S) for shard in missing), return_exceptions=True
            )
            failed = {s: error for s, error in zip(missing, found, strict=True) if isinstance(error, BaseException)}
            done |= {s: number for s, number in zip(missing, found, strict=True) if isinstance(number, int)}
            for error in failed.values():
                if not isinstance(error, TensorVineError) or isinstance(error, StoreFullError):
                    raise error
            if failed and not await pauses.wait_async(deadline):
                raise ShardUnavailableError(
                    f"shard {self._context.index}: expected shards {backups} to keep copies of save {save} first; "
                    + "; ".join(f"shard {shard}: {error}" for shard, error in failed.items())
                )

    def over(self, save: Request, needed: Container[SegmentId] = ()) -> None:
        """Have the copies dropped that were sent for a save, but for those that its version needs.

        Call it with the lock held; it waits for nobody.
        """
        sent = self._at.pop(save, _Sent())
        for shard in sent.shards:
            kept = [segment for segment in sent.segments if segment in needed] if shard in sent.backups else []
            if len(kept) == len(sent.segments):
                continue
            try:
                self._shards[shard].post(ShardCalls.drop_copies(save, kept))
            except TensorVineError as exc:
                log.info("shard %d: copies of save %s are dropped later: %s", shard, save, exc)

    # ---- of what others have --------------------------------------------------------------------------

    @answers(OrderCalls.keep_copies)
    async def keep_copies(
        self,
        source: int,
        save: Request,
        originals: Mapping[SegmentId, Original],
        address: Address | None,
        timeout: float,
    ) -> int:
        with self._lock:
            if self._state.draining:
                raise MovedError(f"shard {self._context.index}: expected a shard that keeps copies; it is draining")
        self._context.lease.check()
        await self._kept(originals, address, timeout, save)
        self._context.lease.check()
        return self._state.incarnation

    @answers(OrderCalls.drop_copies)
    async def drop_copies(self, save: Request, needed: Sequence[SegmentId]) -> None:
        with self._lock:
            self._state.drop_copies(save, needed)
        self._settling.settle()

    @answers(OrderCalls.originals)
    async def originals(self, slots: Slots) -> tuple[dict[SegmentId, Original], Address | None]:
        found: dict[SegmentId, Original] = {}
        with self._lock:
            for segment_id, chosen in slots.items():
                segment = self._state.segment(segment_id)
                live = tuple(slot for slot in chosen if slot in segment.live) if segment is not None else ()
                if segment is not None and live:
                    found[segment_id] = original_of(segment, self._segment_memory, live)
        return found, self._context.tcp_address

    def order(self, copies: Sequence[CopyOrder]) -> None:
        """Have segments copied, as the catalog orders it. Call it in an event loop."""
        for each in copies:
            task = asyncio.get_running_loop().create_task(self._copy(each, self._state.term))
            self._ordered.add(task)
            task.add_done_callback(self._ordered.discard)

    async def _copy(self, order: CopyOrder, term: int) -> None:
        pauses = Backoff(*PAUSE_S)
        while self._state.term == term and not self._state.left:
            try:
                call = ShardCalls.originals(order.slots)
                originals, address = await self._shards[order.source].ask(call, PEER_TIMEOUT_S)
                await self._kept(originals, address, COPY_S, None)
                return
            except TensorVineError as exc:
                log.info("shard %d: copying from shard %d failed, retrying: %s", self._context.index, order.source, exc)
            await pauses.wait_async()

    async def _kept(
        self, originals: Mapping[SegmentId, Original], address: Address | None, timeout: float, save: Request | None
    ) -> None:
        """Fetch what is not here, and keep it; for a save, or to be reported (None)."""
        with self._lock:
            new = {s: original for s, original in originals.items() if self._state.segment(s) is None}
        owner = self._copying.owner(f"copies of save {save}" if save is not None else "copies")
        try:
            async with self._copying.copied(owner, new, address, timeout, timeout, hashed=True) as copies:
                with self._lock:
                    for segment_id, copy in copies.items():
                        self._take(segment_id, copy, originals[segment_id])
                    for segment_id, original in originals.items():
                        self._note(segment_id, original, save)
        finally:
            self._settling.settle()
        if save is None:
            self._reporting.soon()

    def _take(self, segment_id: SegmentId, copy: Copied, original: Original) -> None:
        digests = dict(zip(copy.slots, copy.digests, strict=True))
        by_slot = [digests.get(slot, "") for slot in range(len(copy.sizes))]
        if self._state.take_copy(
            segment_id, copy.handle, copy.sizes, copy.slots, by_slot, original.labels
        ) and isinstance(copy.handle, Part):
            self._segment_memory.keep(copy.handle, segment_id)

    def _note(self, segment_id: SegmentId, original: Original, save: Request | None) -> None:
        segment = self._state.segment(segment_id)
        if segment is None:
            return
        if save is not None:
            self._state.kept_for(save, segment_id)
        else:
            self._state.note_copied(segment_id, segment.live.intersection(original.slots))

    def _ask(self) -> None:
        with self._lock:
            asks = bool(self._state.unconfirmed())
            if asks:
                self._state.ask_about_copies()
        if asks:
            self._reporting.soon()
