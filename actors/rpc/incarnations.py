"""The incarnations of shards, as a client hears of them while it waits: did one die meanwhile?

Rules
- A shard that was heard before died if another incarnation of it answers.
- A shard that joined meanwhile died if it has started again: what it took over from others may have been lost with it.
- One that answers for the first time died if it has started again since the wait began: the incarnation that was to
  answer did not live to do so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from .messages import Tag


class Incarnations:
    """Who died since this was made.

    >>> def tag(shard: int, incarnation: str, again: bool, age_s: float = 60.0) -> Tag:
    ...     return Tag(1, "", False, shard, incarnation, again, age_s)
    >>> incarnations = Incarnations()
    >>> incarnations.heard([tag(0, "a", again=True)])
    >>> incarnations.heard([tag(0, "a", again=True), tag(1, "b", again=False)])
    >>> incarnations.died
    set()
    >>> incarnations.heard([tag(1, "c", again=True), tag(2, "d", again=True)])
    >>> sorted(incarnations.died)
    [1, 2]
    >>> incarnations = Incarnations()
    >>> incarnations.heard([tag(0, "a", again=True, age_s=0.0), tag(1, "b", again=False, age_s=0.0)])
    >>> incarnations.died
    {0}
    """

    def __init__(self) -> None:
        self.died: set[int] = set()
        """Numbers of shards."""
        self._began = time.monotonic()
        self._incarnations: dict[int, str] = {}

    def heard(self, tags: Sequence[Tag]) -> None:
        """Take note of what all shards said when they answered."""
        waited = time.monotonic() - self._began
        for tag in tags:
            known = self._incarnations.get(tag.shard)
            anew = tag.again and (bool(self._incarnations) or tag.age_s < waited)
            if anew if known is None else known != tag.incarnation:
                self.died.add(tag.shard)
        self._incarnations = {tag.shard: tag.incarnation for tag in tags} | self._incarnations
