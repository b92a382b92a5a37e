"""What savers ask of a shard: memory to fill, and the commit.

Rules
- Memory is granted to a client whose process is watched, filled by it, and adopted; what is not adopted goes back when
  the save ends, and what is asked for it after that is refused (`store.requests`).
- What a client cannot fill is fetched from it into memory that is the save's as well, and then adopted.
- A commit runs in a task of its own: whatever becomes of the client, what was sent on waits for the catalog's answer
  (`proposals`), and an `abort` waits for that. A commit that is repeated joins the task, or gets the same answer.
- Once a version exists, nothing that comes after can fail its save: that is logged.
- A shard that drains grants nothing, and finishes the saves under way.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence

import numpy as np
from cachetools import LRUCache

from ....store.catalog.reports import Staged
from ....store.errors import MovedError, OperationTimeoutError, ShardUnavailableError, StorageError
from ....store.holders import Request
from ....store.metrics import SHARD_COMMIT
from ....store.segments.arena import Part
from ....store.segments.segment import Holds, SegmentId
from ....store.shard import place_of
from ....store.versions.slots import unpacked_slots
from ....store.waiting import Deadline
from ...rpc.calls import answers
from ...rpc.catalog_messages import Committed, Proposal, Refused
from ...rpc.messages import PEER_TIMEOUT_S, Filled, Handed
from ...transport.tcp import UnreachableError
from ..admission import Admission
from ..calls.copies import Address, Original, Piece
from ..calls.writes import WriteCalls
from ..context import ShardContext
from ..copying import Copying, put_together
from ..disk.history import History
from ..proposals import Proposals
from ..settling import Settling
from .copies import Copies

log = logging.getLogger(__name__)

PULLS = 8
"""Saves whose bytes are fetched at once: so many slow savers keep others waiting."""
LATE_S = 2.0
"""How much longer than its timeout a client is kept waiting for the catalog's own word that it is over."""
ANSWERS = 4096
"""Commits whose answers are remembered, for calls that are repeated."""


class Writes:
    """What one shard does for savers.

    Args:
        context: the shard's.
        settling: carries out what follows.
        admission: has memory for savers.
        history: the shard's disk, if there is one.
        copies: sends what is saved to other shards first, with `replicas`.
        proposals: sends commits on to the catalog.
    """

    def __init__(
        self,
        context: ShardContext,
        settling: Settling,
        *,
        admission: Admission,
        history: History | None,
        copies: Copies,
        proposals: Proposals,
    ) -> None:
        self._context = context
        self._state = context.state
        self._lock = context.lock
        self._segment_memory = context.segment_memory
        self._settling = settling
        self._admission = admission
        self._pulling = Copying(context, admission, PULLS)
        self._history = history
        self._copies = copies
        self._proposals = proposals
        self._committing: dict[Request, asyncio.Task[Committed | Refused]] = {}
        self._committed: LRUCache[Request, Committed] = LRUCache(ANSWERS)

    # ---- memory ---------------------------------------------------------------------------------------

    @answers(WriteCalls.reserve)
    async def reserve(self, client: str, save: Request, sizes: Sequence[int]) -> list[int]:
        with self._lock:
            self._state.requests.open(client, time.monotonic())
            wanted = () if self._state.draining else self._admission.filled_by(client, sizes)
            return self._segment_memory.reserve(save, wanted) if wanted else []

    @answers(WriteCalls.is_short)
    async def is_short(self) -> bool:
        return self._admission.is_short()

    @answers(WriteCalls.grant)
    async def grant(self, client: str, save: Request, sizes: Sequence[int], timeout: float) -> list[int]:
        self._open(save)
        return await self._admission.granted(save, sizes, timeout, client)

    @answers(WriteCalls.allocate)
    async def allocate(self, client: str, save: Request, sizes: Sequence[int], timeout: float) -> list[int]:
        self._open(save)
        offsets = await self._admission.granted(save, sizes, timeout)
        with self._lock:
            self._segment_memory.expect_pieces(save, offsets)
        return offsets

    @answers(WriteCalls.place)
    async def place(
        self, save: Request, part: Part, pieces: Sequence[Piece], address: Address | None, timeout: float
    ) -> str | None:
        try:
            await self._pulling.run(put_together, part, pieces, save, self._segment_memory, address, timeout)
        except UnreachableError as exc:
            return str(exc)
        return None

    @answers(WriteCalls.pull)
    async def pull(
        self, save: Request, originals: Mapping[SegmentId, Original], address: Address | None, timeout: float
    ) -> str | None:
        self._open(save)
        try:
            async with self._pulling.copied(save, originals, address, timeout, timeout) as copies:
                self._adopt(save, [Filled(segment, copy.handle, copy.sizes) for segment, copy in copies.items()])
        except UnreachableError as exc:
            return str(exc)
        return None

    @answers(WriteCalls.adopt_block)
    async def adopt_block(
        self, save: Request, segment: SegmentId, block: np.ndarray, sizes: Sequence[int], timeout: float
    ) -> None:
        self._open(save)
        (offset,) = await self._admission.granted(save, [block.nbytes], timeout)
        part = Part(offset, block.nbytes)
        try:
            await self._segment_memory.workers.run(self._segment_memory.fill, part, save, block)
            self._adopt(save, [Filled(segment, part, tuple(sizes))])
        except BaseException:
            with self._lock:
                self._segment_memory.give_back(part, save)
            raise

    def _open(self, save: Request) -> None:
        """Note that a client is there, whom a shard that drains refuses: nothing new is put there."""
        with self._lock:
            self._state.requests.open(save.client, time.monotonic())
            self._check_stays()

    def _check_stays(self) -> None:
        if self._state.draining:
            raise MovedError(f"shard {self._context.index}: expected a shard that accepts saves; it is draining")

    def _adopt(self, save: Request, blocks: Sequence[Filled]) -> None:
        """Take what this process has filled itself."""
        with self._lock:
            self._segment_memory.adopt(save, os.getpid(), blocks)

    # ---- commits --------------------------------------------------------------------------------------

    @answers(WriteCalls.commit)
    async def commit(self, handed: Handed) -> Committed | Refused:
        deadline, save = Deadline.after(handed.timeout), handed.draft.save
        known = self._committed.get(save)
        if known is not None:
            return known
        task = self._committing.get(save)
        if task is None:
            task = self._committing[save] = asyncio.create_task(self._committed_by(handed, deadline))
            task.add_done_callback(lambda done: self._ended(save, done))
        await asyncio.wait([task], timeout=deadline.left() + LATE_S)
        if not task.done():
            refusal = self._proposals.refusals.get(save)
            raise OperationTimeoutError(
                f"save of {handed.draft.name!r}: expected the catalog to decide within {handed.timeout:.1f} s; it is "
                f"not known whether the version exists{f' ({refusal})' if refusal else ''}"
            )
        return task.result()

    @answers(WriteCalls.abort)
    async def abort(self, save: Request) -> None:
        with self._lock:
            waits = not self._state.end(save)
            if not waits:
                self._drop(save)
        task = self._committing.get(save)
        if waits and task is not None:
            await asyncio.wait([task], timeout=PEER_TIMEOUT_S)
        self._settling.settle()

    def _ended(self, save: Request, task: asyncio.Task[Committed | Refused]) -> None:
        """See what becomes of a save whose commit was answered, or could not be sent."""
        del self._committing[save]
        with self._lock:
            self._state.sent.discard(save)
            if self._state.requests.is_over(save):
                self._drop(save)
        if not task.cancelled() and task.exception() is None and isinstance(answer := task.result(), Committed):
            self._committed[save] = answer
        self._settling.settle()

    def _drop(self, save: Request) -> None:
        """Drop what a save that is over has here, and on other shards. Call it with the lock held."""
        self._state.drop(save)
        self._segment_memory.drop_grants(save)
        self._copies.over(save)

    async def _committed_by(self, handed: Handed, deadline: Deadline) -> Committed | Refused:
        draft, what, begun = handed.draft, f"save of {handed.draft.name!r}", time.perf_counter()
        named = unpacked_slots(draft.slots)
        await self._admission.keep_pace(what, deadline)
        await self._proposals.ready(what, deadline)
        if handed.durable and self._history is None:
            raise StorageError(f"{what}: durability 'disk': expected a repository with path=; found one without")
        if self._history is not None:
            await self._history.check_files(named)
        if not self._taken(handed):
            return await self._answer_of_another(handed, deadline)
        kept = await self._copies.sent(draft.save, named, deadline)
        with self._lock:
            proposal = self._proposal(handed, named, kept)
            self._state.sent.add(draft.save)
        if handed.durable and self._history is not None:
            self._history.persister.add(proposal.staged)
        answer = await self._proposals.answer(proposal, deadline)
        self._context.counts.observe(SHARD_COMMIT, time.perf_counter() - begun)
        if isinstance(answer, Committed):
            self._publish(draft.save, named, answer)
        return answer

    def _taken(self, handed: Handed) -> bool:
        """Take what a client filled; False: this is another process than the one whose memory it filled."""
        with self._lock:
            self._context.requests += 1
            self._state.requests.open(handed.draft.save.client, time.monotonic())
            if handed.blocks and handed.incarnation not in (0, os.getpid()):  # 0: nothing was granted
                return False
            if self._state.left:
                self._check_stays()
            self._segment_memory.adopt(handed.draft.save, os.getpid(), handed.blocks)
            return True

    def _proposal(self, handed: Handed, named: Holds, kept: Mapping[int, int]) -> Proposal:
        """Make the proposal of a save that is not over. Call it with the lock held."""
        save, index = handed.draft.save, self._context.index
        self._state.requests.check(save)
        staged = {
            segment_id: Staged(len(segment.sizes), (index, *kept), place_of(segment, index))
            for segment_id, segment in self._state.staged(save).items()
            if segment_id in named
        }
        return Proposal(
            save=save,
            draft=handed.draft,
            default_parent=handed.default_parent,
            staged=staged,
            kept=kept,
            durable=handed.durable,
            timeout=handed.timeout,
        )

    async def _answer_of_another(self, handed: Handed, deadline: Deadline) -> Committed:
        """Learn what became of a commit that an earlier process of this shard may have sent on.

        The bytes are not here: the catalog can only say that the version exists, or refuse it.
        """
        with self._lock:
            proposal = self._proposal(handed, {}, {})
        answer = await self._proposals.answer(proposal, deadline)
        if isinstance(answer, Committed):
            return answer
        raise ShardUnavailableError(
            f"shard {self._context.index}: expected the process that granted the memory of save {handed.draft.save}; "
            "the shard restarted"
        )

    def _publish(self, save: Request, named: Holds, answer: Committed) -> None:
        """Keep what a version that exists names."""
        try:
            with self._lock:
                self._state.commit(save, named)
                self._segment_memory.drop_grants(save)
                self._copies.over(save, named)
        except Exception:
            log.exception("%s is committed, but a later step of its save failed", answer.ref)
