"""The pulse of a repository: what its shards carry now, and what went on since the last look.

Rules
- A shard that does not answer is shown so, and hides none of the others. What stopped altogether is an error.
- A shard that began anew counts requests and bytes from 0.
- Where shards are is asked again only when one is new or did not answer: it is a question to the head of the cluster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from ..store.errors import TensorVineError
from ..store.shard import ShardStats

Told = Mapping[int, ShardStats | TensorVineError]
"""Shard -> what it holds, or why it did not say so."""


@dataclass(frozen=True, slots=True)
class Beat:
    """One shard at one look."""

    shard: int
    node: str
    """Address of its node; "-" where that is not known."""
    stats: ShardStats | None
    """None: it did not answer."""
    trouble: str = ""
    """Why it did not."""
    requests_per_s: float | None = None
    """Since the look before; None: there was none, or the shard did not answer. So, too, what follows."""
    saved_per_s: float | None = None
    """Bytes of tensors that saves brought."""
    sent_per_s: float | None = None
    """Bytes of tensors that went to readers and to other shards."""

    @property
    def bytes_used(self) -> int:
        """Bytes of its memory that are in use: what it holds, what savers fill, copies of other shards."""
        stats = self.stats
        return stats.bytes_allocated + stats.bytes_staged + stats.bytes_replicated if stats is not None else 0

    def as_dict(self) -> dict[str, object]:
        """Return it as JSON has it."""
        answers = self.stats is not None
        head: dict[str, object] = {"shard": self.shard, "node": self.node, "answers": answers, "trouble": self.trouble}
        if self.stats is None:
            return head
        rates = {name: getattr(self, name) for name in ("requests_per_s", "saved_per_s", "sent_per_s")}
        return head | {"bytes_used": self.bytes_used} | rates | asdict(self.stats)


class Pulse:
    """Looks at a repository again and again.

    Args:
        ask: asks all shards.
        where: tells shard -> address of its node.
        check: asked when no shard answers; raises what `look` is to raise where the repository is gone.
        clock: seconds, by any clock that only goes on.
    """

    def __init__(
        self,
        ask: Callable[[], Told],
        where: Callable[[], Mapping[int, str]],
        check: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._where = where
        self._check = check
        self._clock = clock
        self._nodes: Mapping[int, str] = {}
        self._before: Mapping[int, ShardStats] = {}
        self._looked: float | None = None
        self.when = datetime.now(UTC)
        """Of the last look."""

    def look(self) -> list[Beat]:
        """Look once, and tell of each shard, by number.

        Raises:
            RepositoryNotFoundError: the repository is gone.
            EngineStoppedError: the cluster beneath them is not.
        """
        now, self.when = self._clock(), datetime.now(UTC)
        told = self._ask()
        errors = [found for found in told.values() if isinstance(found, TensorVineError)]
        if len(errors) == len(told):
            self._check()
        if errors or told.keys() - self._nodes.keys():
            self._nodes = self._where()
        seconds = now - self._looked if self._looked is not None else None
        beats = [self._beat(shard, found, seconds) for shard, found in sorted(told.items())]
        self._before = {beat.shard: beat.stats for beat in beats if beat.stats is not None}
        self._looked = now
        return beats

    def _beat(self, shard: int, found: ShardStats | TensorVineError, seconds: float | None) -> Beat:
        node = self._nodes.get(shard) or "-"
        if isinstance(found, TensorVineError):
            return Beat(shard, node, None, " ".join(str(found).split()))
        before = self._before.get(shard)
        if before is None or not seconds:
            return Beat(shard, node, found)

        def rate(count: Callable[[ShardStats], int]) -> float:
            return (count(found) - (count(before) if count(found) >= count(before) else 0)) / seconds

        return Beat(
            shard,
            node,
            found,
            requests_per_s=rate(lambda stats: stats.requests),
            saved_per_s=rate(lambda stats: stats.bytes_saved),
            sent_per_s=rate(lambda stats: stats.bytes_sent),
        )
