"""The incarnations of shards, as a client hears of them while it waits: did one die meanwhile?

Rules
- A shard that was heard before died if another incarnation of it answers.
- A shard that joined meanwhile died if it has started again: what it took over from others may have been lost with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from .messages import Tag


class Incarnations:
    """Who died since the first time that all answered.

    >>> incarnations = Incarnations()
    >>> incarnations.heard([Tag(1, "", False, shard=0, incarnation="a", again=True)])
    >>> incarnations.heard([Tag(2, "", False, 0, "a", again=True), Tag(2, "", False, 1, "b", again=False)])
    >>> incarnations.died
    set()
    >>> incarnations.heard([Tag(2, "", False, 1, "c", again=True), Tag(2, "", False, 2, "d", again=True)])
    >>> sorted(incarnations.died)
    [1, 2]
    """

    def __init__(self) -> None:
        self.died: set[int] = set()
        """Numbers of shards."""
        self._incarnations: dict[int, str] = {}

    def heard(self, tags: Sequence[Tag]) -> None:
        """Take note of what all shards said when they answered."""
        for tag in tags:
            known = self._incarnations.get(tag.shard)
            died = known != tag.incarnation if known is not None else bool(self._incarnations) and tag.again
            if died:
                self.died.add(tag.shard)
        self._incarnations = {tag.shard: tag.incarnation for tag in tags} | self._incarnations
