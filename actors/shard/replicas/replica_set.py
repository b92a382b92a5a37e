"""The shards that keep one shard's replicas: who they are now, and what each of them has.

Rules
- Backups are chosen by where the shards are (`planner.backups`), and kept as long as they do.
- They are chosen anew when one has left or moved, when copies share a node, and when one does not answer for so long
  that its node may be lost: it would come back without what it had, so another one is as good.
- A shard that is about to drain is no backup.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from ....planner.backups import backups_of
from ....store.errors import TensorVineError
from ....store.refs import ModelRef
from ....store.segments.segment import SegmentId
from ..calls import ShardCalls
from ..context import ShardContext

log = logging.getLogger(__name__)

SURVEY_S = 5.0
"""How often to look for better backups, while the present ones share a node with the shard or with each other."""
PATIENCE_S = 10.0
"""How long to wait at the start for shards that do not say where they are, before choosing without them."""
SILENT_S = 3.0
"""How long a backup may not answer before others are asked."""


WHERE_S = 10.0
"""How long a shard may take to say where it is."""


@dataclass(slots=True, eq=False)
class Backup:
    """A backup, and what it has."""

    shard: int
    synced: bool = False
    """It was told everything; what is new it is told at once."""
    replica_store: str = ""
    """Name of the backup's incarnation."""
    segments: set[SegmentId] = field(default_factory=set[SegmentId])
    records: set[ModelRef] = field(default_factory=set[ModelRef])
    seen: tuple[int, ...] = ()
    """What the state was like when the backup was last told what went."""
    begun: int = 0
    """Commits' copies that were sent."""
    ended: int = 0
    """Those of them that are over."""
    marked: float = 0.0
    odd: int = 0
    """How often in a row it had another number of things than it should."""
    error: str = "nothing was sent to it yet"
    """Why it is behind."""
    kind: type[Exception] | None = None
    """Of the error that says so."""
    silent_since: float | None = None
    """When it stopped answering."""


class ReplicaSet:
    """The backups of one shard.

    Args:
        context: the shard's, whose lock guards the list of them.
    """

    def __init__(self, context: ShardContext) -> None:
        self.backups: list[Backup] = []
        """Empty until they are chosen."""
        self.former: set[int] = set()
        """Shards that may have a replica still, and should not."""
        self._index = context.index
        self._copies = context.config.replicas - 1
        self._lock = context.lock
        self._peers = context.peers
        self._nodes = {self._index: context.engine.this_node()}
        self._began = time.monotonic()
        self._chosen_at: float | None = None
        """None: to be chosen now."""
        self._apart = False
        """All are on nodes of their own."""

    @property
    def behind(self) -> int:
        """How many other nodes lack a replica that was told all: copies that share a node count once."""
        nodes = {self._nodes.get(backup.shard, "") for backup in self.backups if backup.synced}
        return self._copies - len(nodes - {self._nodes[self._index]})

    @property
    def stay(self) -> bool:
        """Whether none of them is about to drain."""
        return {backup.shard for backup in self.backups} <= set(self._candidates())

    def seen_at(self, shard: int, node: str) -> None:
        """Hear from a backup where it is."""
        if self._nodes.get(shard) != node:
            self._chosen_at = None

    def review(self) -> None:
        """Choose anew, if there is a reason."""
        now = time.monotonic()
        candidates = self._candidates()
        silent = [k for k in self.backups if k.silent_since is not None and now - k.silent_since > SILENT_S]
        left = {backup.shard for backup in self.backups} - set(candidates)
        waited = self._chosen_at is None or now - self._chosen_at > SURVEY_S
        if self._chosen_at is None or left or ((silent or not self._apart) and waited):
            self._choose(candidates)

    def _candidates(self) -> list[int]:
        topology = self._peers.topology
        return [s for s in topology.shards if s != self._index and s not in topology.leaving]

    def _choose(self, candidates: list[int]) -> None:
        nodes = {self._index: self._nodes[self._index]}
        for shard in candidates:
            try:
                nodes[shard] = self._peers.call(shard, ShardCalls.node(), WHERE_S)
            except TensorVineError as exc:
                log.info("shard %d: shard %d did not return its node: %s", self._index, shard, exc)
        missing = [shard for shard in candidates if shard not in nodes]
        if missing and not self.backups and time.monotonic() - self._began < PATIENCE_S:
            return
        if len(nodes) <= self._copies:  # too few answer: those that were backups before will again
            nodes |= {shard: self._nodes[shard] for shard in missing if shard in self._nodes}
        self._nodes, self._chosen_at = nodes, time.monotonic()
        chosen = backups_of(self._index, nodes, self._copies)
        apart = len({nodes[shard] for shard in (self._index, *chosen)}) == self._copies + 1
        if not apart and (self._apart or not self.backups):
            log.warning(
                "shard %d: expected %d nodes for its copies; found shards on %d nodes: copies share a node until "
                "another node joins",
                self._index,
                self._copies + 1,
                len(set(nodes.values())),
            )
        self._apart = apart
        with self._lock:
            known = {backup.shard: backup for backup in self.backups}
            self.former = (self.former | known.keys()) - set(chosen)
            self.backups = [known.get(shard) or Backup(shard) for shard in chosen]
            for backup in self.backups:
                backup.marked = 0.0  # so that they get a later sequence number than those that left
