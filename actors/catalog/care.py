"""What the catalog looks after in the background: the path, its journal, sessions, drains.

Rules
- Each has a thread of its own, because each may wait: for the disk, for shards, for the head of the cluster.
"""

from __future__ import annotations

import logging

from ...store.errors import StorageError
from ...store.waiting import Backoff, Deadline
from ..rpc.ticker import Ticker
from .context import CatalogContext, Change
from .finding import Manifests
from .parts.clients import Clients
from .parts.deploy import Deploy
from .placement import Placement

log = logging.getLogger(__name__)

SWEEP_S, STEP_S, JOURNAL_S = 0.5, 0.1, 1.0
BALANCE_S = 1.0
ORPHANS_S = 60.0
READ_FIRST_S, READ_LAST_S = 0.25, 60.0


class Care:
    """Looks after all this from when it is made, as long as the process lives.

    Args:
        context: the catalog's.
        placement: what is missing, freed, unused.
        clients: their sessions.
        deploy: drains.
        manifests: reads those that could not be read; None: there is no path.
    """

    def __init__(
        self,
        context: CatalogContext,
        *,
        placement: Placement,
        clients: Clients,
        deploy: Deploy,
        manifests: Manifests | None,
    ) -> None:
        self._context = context
        self._placement = placement
        self._clients = clients
        self._deploy = deploy
        self._manifests = manifests
        self._pauses = Backoff(READ_FIRST_S, READ_LAST_S)
        self._read_at = Deadline.after(READ_FIRST_S)
        self._orphans_at = Deadline.after(ORPHANS_S)
        Ticker("sweep", "catalog", lambda: SWEEP_S, self._sweep)
        Ticker("drains", "catalog", lambda: STEP_S if context.topology.leaving else SWEEP_S, deploy.step)
        Ticker("balance", "catalog", lambda: BALANCE_S, placement.balance)
        Ticker("journals", "catalog", lambda: JOURNAL_S, self._renew_journal)
        if manifests is not None:
            Ticker("path", "catalog", lambda: READ_FIRST_S, self._look_at_path)

    def _sweep(self) -> None:
        self._clients.end_expired()
        self._placement.settle()

    def _renew_journal(self) -> None:
        if self._context.lease.holds and self._context.journal.wants_new:
            self._context.journal.renew()

    def _look_at_path(self) -> None:
        if not self._context.lease.holds:
            return
        try:
            self._placement.look_for_missing()
            if self._read_at.passed:
                self._read_again()
            if self._orphans_at.passed:
                self._orphans_at = Deadline.after(ORPHANS_S)
                self._placement.look_for_orphans()
        except StorageError as exc:
            log.info("catalog: looking at the path failed, retrying: %s", exc)

    def _read_again(self) -> None:
        """Try the manifests that could not be read."""
        manifests, state = self._manifests, self._context.state
        if manifests is None or not state.unread:
            return
        found = 0
        for ref, before in list(state.unread.items()):
            why = manifests.read_again(ref, self._context.topology.shards, self._context.lock)
            if why is None:
                found += 1
                log.warning("catalog: %s can be read again", ref)
            elif str(why) != str(before):
                log.error("catalog: %s cannot be restored: %s", ref, why)
                with self._context.lock:
                    if ref in state.unread:
                        state.unread[ref] = why
        if found:
            self._pauses.reset()
            self._context.journal.renew()  # what was read stands in no decision
            self._placement.give_files()
            self._context.notifier.tell(Change.FILES)
        self._read_at = Deadline.after(self._pauses.next())
