"""What one shard tells the catalog: who it is, what it has, what changed, and which clients have ended.

Rules
- One thread asks for the term, and sends reports one at a time, each until it was answered (`store.catalog.reports`).
- It asks every `LOOK_S`, and whenever somebody could not reach the catalog or has news. So a new term has the whole
  report soon, whatever the shard does meanwhile.
- Nothing is proposed to a term before its whole report was answered (`reported`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

from ...store.catalog.reports import Report
from ...store.errors import OperationTimeoutError, ShardUnavailableError
from ...store.segments.segment import SegmentId
from ...store.waiting import Deadline
from ..rpc.catalog_calls import CatalogCalls
from ..rpc.ticker import Ticker
from .context import Change, ShardContext

log = logging.getLogger(__name__)

LOOK_S, RETRY_S = 1.0, 0.1
"""How often the catalog is asked for its term, and how soon again when it could not be reached."""
ANSWER_S = 15.0
"""How long it may take to answer."""


class Reporting:
    """The reports of one shard.

    Args:
        context: the shard's.
        settle: called after the state changed, without the lock.
    """

    def __init__(self, context: ShardContext, settle: Callable[[], None]) -> None:
        self.refused: Callable[[Collection[SegmentId]], None] = _ignored
        """Called, without the lock, with segments of which the catalog does not take the new files."""
        self.has_begun: Callable[[], None] = _ignored
        """Called, without the lock, when a new term has the whole report."""
        self._context = context
        self._state = context.state
        self._lock = context.lock
        self._catalog = context.catalog
        self._lease = context.lease
        self._notifier = context.notifier
        self._settle = settle
        self._node = context.engine.this_node()
        self._ended: dict[str, None] = {}
        """Clients of which the catalog has not heard that they have ended."""
        self._reached = True
        self._ticker: Ticker | None = None

    def start(self) -> None:
        """Report from now on, in a thread, as long as the process lives."""
        self._ticker = Ticker("report", f"shard {self._context.index}", self._pause, self._step)
        self._ticker.soon()

    def soon(self) -> None:
        """Have the catalog asked, and told what is new, now."""
        if self._ticker is not None:
            self._ticker.soon()

    def ended(self, clients: Iterable[str]) -> None:
        """Have the catalog told that clients have ended."""
        with self._lock:
            self._ended |= dict.fromkeys(clients)
        self.soon()

    async def reported(self, deadline: Deadline) -> bool:
        """Wait until the present term has this shard's whole report; False: not before the deadline."""

        def look() -> bool | None:
            return self._state.has_reported or None

        return bool(await self._notifier.until(Change.TERM, look, deadline))

    def _step(self) -> None:
        if self._lease.is_over:
            return
        try:
            self._report()
            self._reached = True
        except (ShardUnavailableError, OperationTimeoutError) as exc:
            level = logging.WARNING if self._reached else logging.DEBUG
            log.log(level, "shard %d is waiting for the catalog: %s", self._context.index, exc)
            self._reached = False

    def _report(self) -> None:
        """Ask the catalog for its term, and report to it until there is nothing new. What fails is said again later."""
        term = self._catalog.call(CatalogCalls.present(self._context.index, self._state.incarnation), ANSWER_S)
        with self._lock:
            self._state.begin_term(term.number, term.token)
        while (report := self._next()) is not None:
            answer = self._catalog.call(CatalogCalls.report(report), ANSWER_S)
            with self._lock:
                self._state.answered(report, answer)
            self.refused(answer.refused)
            if report.whole is not None:
                self.has_begun()
            self._settle()
            self._notifier.tell(Change.TERM)
        self._tell_ended()

    def _pause(self) -> float:
        return LOOK_S if self._reached or self._lease.is_over else RETRY_S

    def _next(self) -> Report | None:
        with self._lock:
            if not self._state.has_news:
                return None
            return self._state.report(self._node, self._context.tcp_address, self._context.config.capacity)

    def _tell_ended(self) -> None:
        with self._lock:
            ended, sender = list(self._ended), self._context.sender
        if ended:
            self._catalog.call(CatalogCalls.ended(sender, ended), ANSWER_S)
            with self._lock:
                for client in ended:
                    self._ended.pop(client, None)


def _ignored(*_: object) -> None:
    """Nobody wants to know."""
