"""The incarnations of shards, as a client hears of them while it waits: did one die meanwhile?

Rules
- A shard that was heard before died if another incarnation of it answers.
- A shard that joined meanwhile died if it has started again: what it took over from others may have been lost with it.
- One that answers for the first time died if it has started again since the wait began: the incarnation that was to
  answer did not live to do so. How long it has been there is held against the time that all took to answer, so one that
  started just before may count, unless the client had heard of it before it began to wait.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from .messages import Tag


class Incarnations:
    """Who died since this was made.

    Args:
        before: incarnations of which the client has heard, by shard.

    >>> def tag(shard: int, incarnation: str, again: bool, age_s: float = 60.0) -> Tag:
    ...     return Tag(1, "", False, shard, incarnation, again, age_s)
    >>> incarnations = Incarnations({})
    >>> incarnations.heard([tag(0, "a", again=True)])
    >>> incarnations.heard([tag(0, "a", again=True), tag(1, "b", again=False)])
    >>> incarnations.died
    set()
    >>> incarnations.heard([tag(1, "c", again=True), tag(2, "d", again=True)])
    >>> sorted(incarnations.died)
    [1, 2]
    >>> incarnations = Incarnations({1: "b"})
    >>> incarnations.heard([tag(shard, incarnation, again=True, age_s=0.0) for shard, incarnation in enumerate("ab")])
    >>> incarnations.died
    {0}
    """

    def __init__(self, before: Mapping[int, str]) -> None:
        self.died: set[int] = set()
        """Numbers of shards."""
        self._before = before
        self._began = time.monotonic()
        self._incarnations: dict[int, str] = {}

    def heard(self, tags: Sequence[Tag]) -> None:
        """Take note of what all shards said when they answered."""
        waited = time.monotonic() - self._began
        self.died |= {tag.shard for tag in tags if self._is_another(tag, waited)}
        self._incarnations = {tag.shard: tag.incarnation for tag in tags} | self._incarnations

    def _is_another(self, tag: Tag, waited: float) -> bool:
        known = self._incarnations.get(tag.shard)
        if known is not None:
            return tag.incarnation != known
        if self._incarnations or not tag.again:
            return tag.again
        return tag.age_s < waited and tag.incarnation != self._before.get(tag.shard)
