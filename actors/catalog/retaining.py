"""Retention: which versions leave the memory of shards when they are on the path.

Rules
- The policy may be the user's own code: it runs in a thread of its own, without the lock, and nothing waits for it. One
  that fails lets nothing leave; each failure is logged once.
"""

from __future__ import annotations

import logging
import queue
import threading

from ...store.catalog.orders import Cool
from ...store.catalog.state import ask_policy
from ...store.segments.segment import SegmentId
from ...store.versions.retention import Retention
from .context import CatalogContext
from .lines import Lines

log = logging.getLogger(__name__)

BLAMES = 16
"""Failures of a policy that are logged."""


class Retaining:
    """Asks a policy after commits.

    Args:
        context: the catalog's.
        lines: to the shards.
        policy: the repository's; None: all stays, until room is needed.
    """

    def __init__(self, context: CatalogContext, lines: Lines, policy: Retention | None) -> None:
        self._context = context
        self._lines = lines
        self._policy = policy
        self._names: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._blamed: set[str] = set()
        if policy is not None:
            threading.Thread(target=self._run, args=(policy,), name="tensorvine-retain", daemon=True).start()

    def soon(self, name: str) -> None:
        """Ask about the versions of a name."""
        if self._policy is not None:
            self._names.put(name)

    def _run(self, policy: Retention) -> None:
        while True:
            name = self._names.get()
            try:
                self._ask(policy, name)
            except Exception as exc:  # noqa: BLE001 - the policy may be the user's own, and the version is committed
                blamed = f"{type(policy).__name__}: {exc!r}"
                if blamed not in self._blamed and len(self._blamed) < BLAMES:
                    self._blamed.add(blamed)
                    log.error(
                        "catalog: the retention policy failed, all versions stay in memory; correct keep= at the next "
                        "start: %s",
                        blamed,
                    )

    def _ask(self, policy: Retention, name: str) -> None:
        with self._context.lock:
            candidates = self._context.state.candidates(name)
        cold = ask_policy(policy, candidates)
        with self._context.lock:
            orders: dict[int, list[SegmentId]] = {}
            for segment, shards in self._context.state.cool(cold).items():
                for shard in shards:
                    orders.setdefault(shard, []).append(segment)
            for shard, segments in orders.items():
                self._lines.order(shard, Cool(tuple(segments)))
