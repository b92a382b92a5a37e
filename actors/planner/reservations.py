"""The memory that the shards of a repository have reserved on their nodes, so that nobody else is promised it.

Rules (docs/design/memory.md)
- What a shard may fill is reserved before it is started: where a node has not so much left, it is not started.
- The planner reserves, as the shards themselves could not start again on another node while they ask for much of it.
  What it reserved ends with it, at the latest; its next incarnation reserves anew.
- A shard that was started again on another node takes its reservation along. Where that node has no room, it runs
  without one, and the log says so.
- Unless told how much, a shard takes half of what is left: the next repository finds room, and so do tasks that ask
  for memory, and what no reservation knows of. `LEAST_BYTES` of a node are no part of these halves, so what several
  take at the same moment is never all of it: actors that ask for a byte would wait for ever.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping

from ...store.errors import ShardUnavailableError, StoreFullError
from ...store.sizes import size
from ...store.waiting import Backoff, Deadline
from ..engine.engine import Engine, Node

log = logging.getLogger(__name__)

LEAST_BYTES = 64 << 20
"""What a shard takes at least that was not told how much."""
RACE_S, RACE_PAUSE_S = 30.0, (0.05, 0.4)
"""How long a start goes on trying for a share: others let go of what they took in excess, and what is let go of shows
late. And its shortest and longest pause."""


class Reservations:
    """The reservations of one start of a repository.

    Args:
        engine: keeps them.
        repository: its name.
        start: the id of this start.
    """

    def __init__(self, engine: Engine, repository: str, start: str) -> None:
        self._engine = engine
        self._repository = repository
        self._prefix = f"{repository}:{start}:"
        self._missing: dict[int, str] = {}
        """Shards that run without a reservation, which was said -> their node."""

    def take(self, chosen: Mapping[int, Node], nbytes: int | None) -> dict[int, int]:
        """Reserve memory for shards that are about to start; for all of them, or for none.

        Args:
            chosen: the shards, and the node of each.
            nbytes: for each; None: they share half of what their node has left.

        Returns:
            Bytes for each shard.

        Raises:
            StoreFullError: a node has not so much left.
        """
        beside = Counter(node.id for node in chosen.values())
        rooms: dict[int, int] = {}
        try:
            for shard, node in chosen.items():
                if nbytes is None:
                    rooms[shard] = self._take_share(shard, node.id, node.memory_free, beside[node.id])
                elif self._engine.reserve(self._name(shard), node.id, nbytes):
                    rooms[shard] = nbytes
                else:
                    raise self._full(shard, node.id, nbytes)
        except BaseException:
            for shard in rooms:
                self.release(shard)
            raise
        return rooms

    def _take_share(self, shard: int, node: str, free: int, beside: int) -> int:
        """Reserve a share of what is free; less, for as long as that is enough, where others take it meanwhile."""
        pauses, deadline = Backoff(*RACE_PAUSE_S), Deadline.after(RACE_S)
        share = (free - LEAST_BYTES) // 2 // beside
        while True:
            while share >= LEAST_BYTES:
                if self._engine.reserve(self._name(shard), node, share, wait=False):
                    if self._left(node) >= share:
                        return share
                    self.release(shard)
                share //= 2
            if not pauses.wait(deadline):  # others may hold what they are about to let go of, or did just now
                raise self._full(shard, node, LEAST_BYTES)
            share = max((self._left(node) - LEAST_BYTES) // 2 // beside, LEAST_BYTES)

    def _left(self, node: str) -> int:
        return next((known.memory_free for known in self._engine.nodes() if known.id == node), 0)

    def release(self, shard: int) -> None:
        """Let go of what was reserved for a shard; nothing is no error."""
        self._engine.unreserve(self._name(shard))

    def release_all(self) -> None:
        """Let go of all."""
        for name in self._engine.reserved(self._prefix):
            self._engine.unreserve(name)

    def follow(self, places: Mapping[int, str], capacity: Callable[[int], int]) -> None:
        """Have the reservations lie where the shards are.

        Args:
            places: the node of each shard that there is.
            capacity: gives the bytes that one may fill.
        """
        found = self._engine.reserved(self._prefix)
        for name, node in found.items():
            if places.get(int(name.removeprefix(self._prefix))) != node:
                self._engine.unreserve(name)
        for shard, node in places.items():
            if found.get(self._name(shard)) == node:
                self._missing.pop(shard, None)
            elif not self._engine.reserve(self._name(shard), node, nbytes := capacity(shard), wait=False):
                self._say_missing(shard, node, nbytes)

    def _say_missing(self, shard: int, node: str, nbytes: int) -> None:
        if self._missing.get(shard) != node:
            self._missing[shard] = node
            log.warning("%s; the shard runs without a reservation", self._full(shard, node, nbytes))

    def _full(self, shard: int, node: str, needed: int) -> StoreFullError:
        try:
            left = self._left(node)
        except ShardUnavailableError:
            left = 0
        return StoreFullError(
            f"repository {self._repository!r}: shard {shard}: expected {size(needed)} of unreserved memory on "
            f"node {node}; found {size(left)}: set a smaller store_bytes, or stop other users of the memory"
        )

    def _name(self, shard: int) -> str:
        return f"{self._prefix}{shard}"
