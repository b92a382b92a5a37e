"""Which shard is on a client's node, as the planner knows it: a client meets no other shard for that.

Rules
- The planner is asked again after `TOLD_S`, and when the topology has changed. What it told is checked with the shard
  itself, which may have started again elsewhere.
- Where the planner does not answer, or does not know, its last word counts; without one all shards are met in turn.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from ...store.errors import TensorVineError
from ...store.waiting import Deadline
from ..rpc.channel import Channel
from .calls import PlannerCalls

log = logging.getLogger(__name__)

TOLD_S = 15.0
"""How long the planner's word counts."""
UNKNOWN_S = 1.0
"""The same, where it does not know yet."""
ASK_S = 2.0
"""How long the planner may take."""


class Nearby:
    """Finds the shards of one client's node.

    Args:
        planner: of the repository.
        node: the client's.
        node_of: tells a shard's node, as it says itself.
    """

    def __init__(self, planner: Channel, node: str, node_of: Callable[[int, Deadline], str]) -> None:
        self._planner = planner
        self._node = node
        self._node_of = node_of
        self._lock = threading.Lock()
        self._version = -1
        """Of the topology for which the planner was asked last."""
        self._until = Deadline.after(0.0)
        self._told: Sequence[int] | None = None

    def choose(self, home: int | None, staying: Sequence[int], version: int, deadline: Deadline) -> int:
        """Return the shard that should hold bytes made here: the home if it is on this node, else one that is.

        Args:
            home: the home of the name; None: of any.
            staying: the shards that there are, but for those about to drain.
            version: of the topology that says so.
            deadline: until when shards may be met.
        """
        home = home if home in staying else None
        if home is not None and self._node_of(home, deadline) == self._node:
            return home
        told = self._shards(version, deadline)
        asked = staying if told is None else [shard for shard in told if shard in staying]
        near = next((shard for shard in asked if self._node_of(shard, deadline) == self._node), None)
        return near if near is not None else home if home is not None else staying[0]

    def _shards(self, version: int, deadline: Deadline) -> Sequence[int] | None:
        """Return the shards on this node; None: nobody knows."""
        with self._lock:
            if self._version != version:
                self._version, self._told, self._until = version, None, Deadline.after(0.0)
            if self._until.passed:
                self._until = Deadline.after(TOLD_S)
                self._ask(deadline)
            return self._told

    def _ask(self, deadline: Deadline) -> None:
        request = PlannerCalls.shards_on(self._node, self._version)
        try:
            told = self._planner.call(request, deadline.left(ASK_S))
        except TensorVineError as exc:
            log.info("the list of shards on this node cannot be updated: %s", exc)
            return
        if told is None:  # it has not looked yet, or not since it was started again
            self._until = Deadline.after(UNKNOWN_S)
        else:
            self._told = told
