"""Commits, sent on to the catalog.

Rules
- What was sent is sent again, to whatever term there is, until a catalog answers: nothing else says whether the version
  exists. Only a shard that is stopped, or replaced, gives up.
- Nothing is sent without the lease, nor to a term that has not answered the whole report.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from ...store.catalog.reports import Staged
from ...store.errors import OperationTimeoutError, ShardUnavailableError
from ...store.holders import Request
from ...store.segments.segment import SegmentId
from ...store.waiting import NEVER, Backoff, Deadline
from ..rpc.catalog_calls import CatalogCalls
from ..rpc.catalog_messages import Committed, Proposal, Refused
from .context import ShardContext
from .reporting import Reporting

ANSWER_S = 30.0
"""How long the catalog may take to answer, beyond what a durable save may take."""
LOOK_S = 1.0
"""How often to look, while an answer is waited for, whether there is another term by now."""
PAUSE_S = (0.02, 1.0)
"""Shortest and longest pause between two tries."""


class Proposals:
    """The commits that one shard sends on.

    Args:
        context: the shard's.
        reporting: its reports.
    """

    def __init__(self, context: ShardContext, reporting: Reporting) -> None:
        self._context = context
        self._state = context.state
        self._lock = context.lock
        self._catalog = context.catalog
        self._lease = context.lease
        self._reporting = reporting
        self.refusals: dict[Request, str] = {}
        """Saves under way -> why the catalog did not decide the last time."""

    async def ready(self, what: str, deadline: Deadline) -> None:
        """Wait until something may be proposed.

        Raises:
            ShardUnavailableError: the shard was stopped, or another process has replaced it.
            OperationTimeoutError: it may not, until the deadline.
        """
        while True:
            await self._lease.held(deadline)
            if await self._reporting.reported(deadline.sooner(LOOK_S)):
                return
            if deadline.passed:
                raise OperationTimeoutError(
                    f"{what}: expected the catalog to take the report of this shard; it did not"
                )

    async def answer(self, proposal: Proposal, deadline: Deadline) -> Committed | Refused:
        """Propose a version until the catalog answers, however long that takes.

        Args:
            proposal: what to propose.
            deadline: until when the files of a durable version are waited for.

        Raises:
            ShardUnavailableError: the shard was stopped, or another process has replaced it: the outcome is not known.
            TensorVineError: what the catalog raised.
        """
        try:
            return await self._answer(proposal, deadline)
        finally:
            self.refusals.pop(proposal.save, None)

    async def _answer(self, proposal: Proposal, deadline: Deadline) -> Committed | Refused:
        pauses = Backoff(*PAUSE_S)
        while True:
            await self.ready(f"save {proposal.save}", NEVER)
            left = deadline.left() if proposal.durable else 0.0
            trial = Deadline.after(left + ANSWER_S)
            try:
                answer = await self._asked(replace(proposal, timeout=left), trial)
                if answer is not None:
                    return answer
            except ShardUnavailableError as exc:
                self.refusals[proposal.save] = str(exc)
                self._reporting.soon()
            except OperationTimeoutError:
                if not trial.passed:  # the catalog's own word
                    raise
            await pauses.wait_async()

    async def _asked(self, proposal: Proposal, trial: Deadline) -> Committed | Refused | None:
        """Propose to the present term; None: there is another one by now."""
        with self._lock:
            sender = self._context.sender
            if proposal.durable:
                proposal = replace(proposal, staged={s: self._with_file(s, one) for s, one in proposal.staged.items()})
        asking = asyncio.ensure_future(self._catalog.ask(CatalogCalls.commit(sender, proposal), trial.left()))
        try:
            while not asking.done():
                await asyncio.wait([asking], timeout=LOOK_S)
                with self._lock:
                    if not asking.done() and self._state.term != sender.term:
                        return None
            return asking.result()
        finally:
            asking.cancel()

    def _with_file(self, segment_id: SegmentId, staged: Staged) -> Staged:
        segment = self._state.segment(segment_id)
        return replace(staged, file=segment.file if segment is not None else None)
