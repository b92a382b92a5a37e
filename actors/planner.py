"""The planner actor: it knows which shards there are and, by name only, what each ever held.

Rules
- The census outlives a shard: it is how a shard that starts again can name what it lost, and never uses a version
  number twice. A commit counts only after it was noted here.
- A planner that starts again asks the shards for their census.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ..store.archive import LOCK_NAME, Archive
from ..store.errors import StorageError, TensorVineError
from ..store.refs import ModelRef
from .engine import Engine, group
from .messages import PEER_TIMEOUT_S, actor_name

log = logging.getLogger(__name__)

CLAIM_S = 3.0
"""How long a repository that starts waits for another one to leave its path."""

Census = dict[ModelRef, tuple[ModelRef | None, bool]]
"""Version -> its parent, and whether it lives."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The shape of a repository."""

    repository: str
    shards: tuple[int, ...]
    started_by: str
    """Chosen by whoever started it: of two starters at once, one finds its own word here."""
    path: str | None = None
    """Where its history is; None: in memory only."""


class Planner:
    """The planner of one repository, as an actor."""

    def __init__(self, engine: Engine, topology: Topology) -> None:
        self._engine = engine
        self._topology = topology
        self._lock = threading.Lock()
        self._census: dict[int, Census] = {shard: {} for shard in topology.shards}
        self._claim: int | None = None
        """Keeps other repositories off the path for as long as this process lives."""
        if engine.restarted():
            self._recover()

    @group("ctl")
    async def topology(self) -> Topology:
        """Give the shape of the repository."""
        return self._topology

    @group("ctl")
    async def claim(self) -> None:
        """Take the path for this repository, and sweep what a crash left half-written there.

        Raises:
            StorageError: another repository runs on it.
        """
        deadline = time.monotonic() + CLAIM_S
        while True:
            try:
                return self._take_path(sweep=True)
            except StorageError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.1)  # the one that was stopped just now may not have ended yet

    @group("ctl")
    async def note(self, shard: int, news: Mapping[ModelRef, tuple[ModelRef | None, bool]]) -> None:
        """Take what a shard committed or retired."""
        with self._lock:
            census = self._census[shard]
            for ref, (parent, live) in news.items():
                known = census.get(ref)
                census[ref] = (known[0] if known else parent, live)

    @group("ctl")
    async def census_of(self, shard: int) -> Census:
        """Give what a shard ever held; what lived counts as lost from now on."""
        with self._lock:
            return dict(self._census[shard])

    def _take_path(self, sweep: bool) -> None:
        if self._topology.path is not None and self._claim is None:
            archive = Archive(self._topology.path, len(self._topology.shards))
            self._claim = archive.directory.claim(LOCK_NAME)
            if sweep:
                archive.sweep()

    def _recover(self) -> None:
        try:
            self._take_path(sweep=False)  # shards may be writing
        except TensorVineError as exc:
            log.error("planner started again: %s", exc)
        for shard in self._topology.shards:
            try:
                actor = self._engine.find(actor_name(self._topology.repository, shard))
                future = self._engine.call(actor, "census")
                self._census[shard] = self._engine.result(future, PEER_TIMEOUT_S, f"shard {shard}")
            except (LookupError, TensorVineError) as exc:
                log.warning("planner started again: shard %d told no census: %s", shard, exc)
