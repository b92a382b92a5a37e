"""What the catalog has a shard do, and the new versions that it pushes to those who wait here.

Rules
- Orders are applied under the lock, in sequence; what they leave to be done outside is begun then, and not waited for.
- One thread says which names are watched: at once for a new name and in a new term, else every `WATCH_S`. A name is
  watched for `KEEP_S` after the last wait.
- Of two things that are said of a name, the one with the higher counter is the later one within a term.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence

from ....store.catalog.orders import Order
from ....store.errors import OperationTimeoutError, ShardUnavailableError
from ....store.waiting import Deadline
from ...rpc.calls import answers
from ...rpc.catalog_calls import CatalogCalls
from ...rpc.catalog_messages import Located, Term
from ...rpc.ticker import Ticker
from ..calls.orders import OrderCalls
from ..context import ShardContext
from ..disk.history import History
from ..reporting import ANSWER_S, RETRY_S, Reporting
from ..settling import Settling
from .copies import Copies
from .sessions import Sessions

log = logging.getLogger(__name__)

WATCH_S = 15.0
"""How often the catalog is told which names are watched here."""
KEEP_S = 30.0
"""How long a name is watched that nobody waits for."""


class Orders:
    """Orders and pushes of the catalog to one shard.

    Args:
        context: the shard's.
        settling: carries out what follows.
        reporting: reports to new terms.
        history: the shard's disk, if there is one.
        sessions: of its clients.
        copies: copies what is ordered.
    """

    def __init__(
        self,
        context: ShardContext,
        settling: Settling,
        *,
        reporting: Reporting,
        history: History | None,
        sessions: Sessions,
        copies: Copies,
    ) -> None:
        self._context = context
        self._state = context.state
        self._lock = context.lock
        self._settling = settling
        self._reporting = reporting
        self._history = history
        self._sessions = sessions
        self._copies = copies
        self.watching = Watching(context)
        reporting.has_begun = self.watching.soon

    @answers(OrderCalls.orders)
    async def orders(self, term: Term, incarnation: int, first: int, orders: Sequence[Order]) -> int:
        with self._lock:
            if incarnation != self._state.incarnation:
                raise ShardUnavailableError(
                    f"shard {self._context.index}: expected orders for incarnation {self._state.incarnation}; found "
                    f"orders for {incarnation}"
                )
            self._begin(term)
            applied = self._state.ordered(first, orders)
            copies, self._state.to_copy = self._state.to_copy, []
            clients, self._state.clients_ended = self._state.clients_ended, []
            for client in clients:
                self._sessions.end_saves(client)
        self._copies.order(copies)
        self._settling.settle()
        return applied

    @answers(OrderCalls.push)
    async def push(self, term: Term, news: Sequence[Located]) -> None:
        with self._lock:
            self._begin(term)
            self.watching.heard(term.number, news)

    @answers(OrderCalls.wait_newer)
    async def wait_newer(self, name: str, after: int, timeout: float) -> Located | None:
        return await self.watching.newer(name, after, Deadline.after(timeout))

    def _begin(self, term: Term) -> None:
        """Go by a term, and report to it if it is new. Call it with the lock held; errors as in `begin_term`."""
        before = self._state.term
        self._state.begin_term(term.number, term.token)
        if before != term.number:
            self._reporting.soon()


class Watching:
    """The names whose new versions clients of one shard wait for.

    Args:
        context: the shard's.
    """

    def __init__(self, context: ShardContext) -> None:
        self._context = context
        self._lock = context.lock
        self._catalog = context.catalog
        self._notifier = context.notifier
        self._newest: dict[str, tuple[int, Located]] = {}
        """Name -> the term that said it, and the newest version."""
        self._waiting: Counter[str] = Counter()
        self._watched: dict[str, float] = {}
        """Name -> when somebody began or ended to wait for it."""
        self._told: tuple[int, frozenset[str]] = (0, frozenset())
        """The term that was told last, and the names."""
        self._ticker = Ticker("watch", f"shard {context.index}", self._pause, self._step)

    def soon(self) -> None:
        """Have the catalog told now."""
        self._ticker.soon()

    async def newer(self, name: str, after: int, deadline: Deadline) -> Located | None:
        """Wait for a version of `name` above `after`, or of `name@alias` other than that; None: none in time."""

        def look() -> Located | None:
            _, newest = self._newest.get(name, (0, None))
            version = newest.header.ref.version if newest is not None else 0
            return newest if version > after or ("@" in name and version != after) else None

        with self._lock:
            self._waiting[name] += 1
            self._watched[name] = time.monotonic()
            known = name in self._told[1]
        if not known:
            self._ticker.soon()
        try:
            return await self._notifier.until(name, look, deadline)
        finally:
            with self._lock:
                self._waiting[name] -= 1
                self._watched[name] = time.monotonic()

    def heard(self, term: int, news: Sequence[Located]) -> None:
        """Take what a term of the catalog says, unless later news came before. Call it with the lock held."""
        for located in news:
            name = located.asked
            said, known = self._newest.get(name, (0, None))
            if name in self._watched and (known is None or (term, located.counter) >= (said, known.counter)):
                self._newest[name] = term, located
                self._notifier.tell(name)

    def _step(self) -> None:
        if self._context.lease.is_over:
            return
        try:
            self._tell()
        except (ShardUnavailableError, OperationTimeoutError) as exc:  # told again soon
            log.debug("shard %d: sending the watched names to the catalog failed: %s", self._context.index, exc)

    def _tell(self) -> None:
        """Tell the catalog which names are watched, and take the newest version of each."""
        with self._lock:
            self._forget_idle()
            names, before, sender = list(self._watched), dict(self._newest), self._context.sender
        if not names and not self._told[1]:
            return
        if not self._context.state.has_reported:
            self._told = (0, frozenset())
            return
        found = self._catalog.call(CatalogCalls.watch(sender, names), ANSWER_S)
        there = {located.asked for located in found}
        with self._lock:
            for name in names:
                if name not in there and self._newest.get(name) is before.get(name):
                    self._newest.pop(name, None)
            self._told = (sender.term, frozenset(names))
            self.heard(sender.term, found)

    def _pause(self) -> float:
        with self._lock:
            told = self._told == (self._context.state.term, frozenset(self._watched))
        return WATCH_S if told or not self._watched or self._context.lease.is_over else RETRY_S

    def _forget_idle(self) -> None:
        idle = time.monotonic() - KEEP_S
        for name, used in list(self._watched.items()):
            if used < idle and self._waiting[name] <= 0:
                del self._watched[name], self._waiting[name]
                self._newest.pop(name, None)
