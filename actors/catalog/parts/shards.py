"""What shards ask the catalog: the term, commits, names to watch, and reports of what they have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from ....store.catalog.orders import Ended
from ....store.catalog.reports import Answered, Place, Report, Sender
from ....store.catalog.state import Effects
from ....store.errors import OperationTimeoutError, ShardUnavailableError, StorageError
from ....store.holders import Request
from ....store.metrics import CATALOG_COMMIT
from ....store.segments.segment import File, SegmentId
from ....store.versions.manifest import check_metadata
from ....store.versions.slots import unpacked_slots
from ....store.waiting import Deadline
from ...rpc.calls import answers
from ...rpc.catalog_calls import KeeperCalls
from ...rpc.catalog_messages import Committed, Located, Proposal, Refused, Term
from ..context import CatalogContext, Change
from ..copies import JournalCopies
from ..durable import DurableSaves, ManifestWriter
from ..lines import Line, Lines
from ..placement import Placement
from ..retaining import Retaining
from .versions import Versions

SECURED_S = 10.0
"""How long a commit waits for copies before the shard asks again."""


class Shards:
    """What the catalog does for shards.

    Args:
        context: the catalog's.
        lines: to the shards.
        placement: takes reports.
        copies: of the journal.
        durable: saves that wait for files.
        writer: writes manifests; None: there is no path.
        retaining: asks the retention policy.
        versions: says where versions are.
    """

    def __init__(
        self,
        context: CatalogContext,
        lines: Lines,
        *,
        placement: Placement,
        copies: JournalCopies,
        durable: DurableSaves,
        writer: ManifestWriter | None,
        retaining: Retaining,
        versions: Versions,
    ) -> None:
        self._context = context
        self._state = context.state
        self._lock = context.lock
        self._lines = lines
        self._placement = placement
        self._copies = copies
        self._durable = durable
        self._writer = writer
        self._retaining = retaining
        self._versions = versions
        self._saving: dict[Request, asyncio.Task[Committed | Refused]] = {}
        """Durable saves under way."""
        self._places: dict[SegmentId, Place | None] = {}
        """Where the segments lie of commits that are being decided."""
        context.followers.append(self._push)

    @answers(KeeperCalls.present)
    async def present(self, shard: int, incarnation: int) -> Term:
        with self._lock:
            self._context.lease.check()
            line = self._lines.get(shard)
            if shard not in self._context.topology.shards or (line is not None and line.incarnation > incarnation):
                raise ShardUnavailableError(f"shard {shard}: expected its newest process; another one has reported")
            if line is not None and line.incarnation == incarnation:
                line.heard = time.monotonic()
            return self._context.term

    @answers(KeeperCalls.report)
    async def report(self, report: Report) -> Answered:
        answer = self._placement.report(report)
        if self._writer is not None and report.stored:
            self._writer.soon()
        return answer

    @answers(KeeperCalls.commit)
    async def commit(self, sender: Sender, proposal: Proposal) -> Committed | Refused:
        begun = time.perf_counter()
        answer = await self._commit(sender, proposal)
        self._context.counts.observe(CATALOG_COMMIT, time.perf_counter() - begun)
        return answer

    async def _commit(self, sender: Sender, proposal: Proposal) -> Committed | Refused:
        draft, deadline = proposal.draft, Deadline.after(proposal.timeout)
        check_metadata(draft.name, draft.metadata, self._context.config.metadata_bytes)
        holds = unpacked_slots(draft.slots)
        inherited = [segment for segment in holds if segment not in proposal.staged]
        await self._replicated(inherited, deadline)
        with self._lock:
            self._line(sender)
            self._context.requests += 1
            answered = self._state.answer(draft.save) or self._state.brought(proposal.staged)
            if answered is not None:
                self._placement.brought_again(sender.shard, proposal.staged)
            done = self._saving.get(draft.save) if answered is None else Committed(*answered)
            if done is None:
                self._state.requests.check(draft.save)
                self._state.requests.open(draft.save.client, time.monotonic())
                if silent := self._placement.silent(inherited):  # its next process may lack them
                    raise ShardUnavailableError(f"shards {silent}, which have tensors that it inherits, are silent")
                refusal = self._state.refusal(draft, proposal.default_parent, proposal.staged.keys())
                if refusal is not None:
                    return Refused(*refusal)
                proposal = self._with_present(proposal)
                done = self._begun(proposal, deadline) if proposal.durable else self._decided(proposal)
        found = done if isinstance(done, Committed) else await asyncio.shield(done)
        if isinstance(found, Committed) and not proposal.durable:
            deadline = Deadline.after(SECURED_S)
            await self._replicated(list(proposal.staged), deadline)
            await self._copies.secured(deadline)
        return found

    def _with_present(self, proposal: Proposal) -> Proposal:
        """Leave out the copies of shards that have started again since they made them. Call it with the lock held."""
        lines = {shard: self._lines.get(shard) for shard in proposal.kept}
        gone = [s for s, line in lines.items() if line is not None and line.incarnation > proposal.kept[s]]
        if not gone:
            return proposal
        staged = {
            segment: replace(one, shards=tuple(shard for shard in one.shards if shard not in gone))
            for segment, one in proposal.staged.items()
        }
        return replace(proposal, staged=staged)

    def _decided(self, proposal: Proposal) -> Committed:
        """Make a version exist. Call it with the lock held."""
        self._places = {segment: staged.place for segment, staged in proposal.staged.items()}
        self._context.decide(lambda: self._state.decide_commit(proposal.draft, proposal.staged, time.time_ns()))
        return self._committed(proposal)

    async def _replicated(self, segments: Sequence[SegmentId], deadline: Deadline) -> None:
        """Wait until as many nodes have segments as there are to be."""
        if self._context.topology.replicas == 1:
            return

        def look() -> bool | None:
            return None if self._placement.lacking(segments) else True

        if not await self._context.notifier.until(Change.COPIES, look, deadline):
            raise ShardUnavailableError(
                "save: expected copies of its tensors on enough nodes in time; some are missing"
            )

    def _committed(self, proposal: Proposal) -> Committed:
        """Return the answer of a commit that was decided just now, and end its request. With the lock held."""
        answered = self._state.answer(proposal.save)
        if answered is None:
            raise ShardUnavailableError(f"save {proposal.save}: expected its version; found none")
        self._state.end_request(proposal.save)
        self._retaining.soon(answered[0].name)
        return Committed(*answered)

    def _note_places(self) -> None:
        """Note where the segments of a commit lie, before anybody is told of it. With the lock held."""
        places, self._places = self._places, {}
        for segment, place in places.items():
            known = self._state.references.get(segment)
            if known is not None:
                known.place = place

    def _begun(self, proposal: Proposal, deadline: Deadline) -> asyncio.Task[Committed | Refused]:
        """Begin a durable save, which goes on however often it is asked for. Call it with the lock held."""
        draft, writer = proposal.draft, self._writer
        if writer is None:
            raise StorageError(
                f"save of {draft.name!r}: durability 'disk': expected a repository with path=; found one without"
            )
        draft = writer.begin(self._durable, draft, proposal.staged)

        async def save() -> Committed | Refused:
            refusal = await writer.save(self._durable, draft, proposal.staged, deadline)
            if refusal is not None:
                return Refused(*refusal)
            with self._lock:
                committed = self._committed(proposal)
                self._places = {segment: staged.place for segment, staged in proposal.staged.items()}
                self._note_places()
            return committed

        task = self._saving[draft.save] = asyncio.ensure_future(save())
        task.add_done_callback(lambda done: self._saving.pop(draft.save, None) and done.cancelled())
        return task

    @answers(KeeperCalls.watch)
    async def watch(self, sender: Sender, names: Sequence[str]) -> list[Located]:
        with self._lock:
            self._lines.watch(self._line(sender), names)
            return [located for name in names if (located := self._versions.in_use(name)) is not None]

    @answers(KeeperCalls.files)
    async def files(self, segments: Sequence[SegmentId]) -> dict[SegmentId, File]:
        with self._lock:
            self._context.lease.check()
            known = {segment: self._state.references.get(segment) for segment in segments}
            return {s: one.file.file(s) for s, one in known.items() if one is not None and one.file is not None}

    @answers(KeeperCalls.ended)
    async def ended(self, sender: Sender, clients: Sequence[str]) -> None:
        with self._lock:
            self._line(sender)
            for client in clients:
                self._state.end_client(client)
                self._placement.renewed(client)
            self._lines.order_all(Ended(tuple(clients)))
        self._placement.settle()

    def _line(self, sender: Sender) -> Line:
        """Return the line to a shard that asks. Call it with the lock held.

        Raises:
            ShardUnavailableError: it goes by another term, or has not reported to this one.
        """
        self._context.lease.check()
        line = self._lines.get(sender.shard)
        if sender.term != self._context.lease.number or line is None or line.incarnation != sender.incarnation:
            raise ShardUnavailableError(
                f"shard {sender.shard}: expected a report to term {self._context.lease.number} first"
            )
        if sender.allocated is not None:
            line.allocated = sender.allocated
        if not line.reported:
            raise OperationTimeoutError(f"shard {sender.shard}: expected its report to be taken")
        return line

    def _push(self, effects: Effects) -> None:
        """Send new versions, and those that aliases name now, to the shards where clients wait for them.

        Call it with the lock held.
        """
        self._note_places()
        published = (ref.name for ref in effects.published)
        for asked in dict.fromkeys((*published, *(moved for moved in effects.changed if "@" in moved))):
            shards = self._lines.watchers(asked)
            located = self._versions.in_use(asked) if shards else None
            if located is not None:
                self._lines.push(shards, located)
