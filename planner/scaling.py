"""How many shards a repository needs: bytes, requests and nodes, followed over time.

Rules
- A shard joins when what is held, or asked, is more than the shards should carry, and has been for `join_after_s`.
- A shard drains, one at a time, when the others could carry everything with room to spare (`SLACK`), and could have
  for `drain_after_s`. The two bounds lie apart, so that a steady load settles, whatever it is.
- More shards than nodes share the same memory and cores; so the nodes there are bound the number from above, unless
  the policy names another bound.
- Nothing here knows a clock or an actor: who observes says when.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

SLACK = 0.7
"""After a drain, the others carry at most this part of what would make one join."""


@dataclass(frozen=True, slots=True)
class ScalePolicy:
    """A policy for the number of shards: when to add shards (join) and when to remove shards (drain).

    Args:
        least: Minimum number of shards, at least 1.
        most: Maximum number of shards. None means the number of nodes, but at least `least`.
        full: Limit for the fraction of the shards' memory that is in use, above 0 and at most 1.
        requests_per_s: Limit for the average number of requests per second and shard.
        join_after_s: Shards are added after `full` or `requests_per_s` has been exceeded for this number of seconds.
        drain_after_s: A shard is removed after the load has been low for this number of seconds. The load is low if
            fewer shards could carry the load without exceeding 70% of `full` or 70% of `requests_per_s`.

    Raises:
        ValueError: if an argument is out of range.

    >>> ScalePolicy(least=2, most=8).bound(nodes=3), ScalePolicy().bound(nodes=3)
    (8, 3)
    """

    least: int = 1
    most: int | None = None
    full: float = 0.75
    requests_per_s: float = 1500.0
    join_after_s: float = 2.0
    drain_after_s: float = 60.0

    def __post_init__(self) -> None:
        where = "ScalePolicy"
        problems = [
            (self.least < 1, f"least: expected at least 1 shard; found {self.least}"),
            (
                self.most is not None and self.most < self.least,
                f"most: expected at least {self.least}, the value of least; found {self.most}",
            ),
            (not 0 < self.full <= 1, f"full: expected a share above 0 and at most 1; found {self.full}"),
            (not self.requests_per_s > 0, f"requests_per_s: expected a number above 0; found {self.requests_per_s}"),
            (not self.join_after_s >= 0, f"join_after_s: expected at least 0; found {self.join_after_s}"),
            (not self.drain_after_s >= 0, f"drain_after_s: expected at least 0; found {self.drain_after_s}"),
        ]
        for wrong, text in problems:
            if wrong:
                raise ValueError(f"{where}: {text}")

    def bound(self, nodes: int) -> int:
        """Return the maximum number of shards in a cluster of `nodes` nodes."""
        return max(self.most if self.most is not None else nodes, self.least)


@dataclass(frozen=True, slots=True)
class ShardLoad:
    """What one shard carries."""

    bytes_held: int
    """Bytes of its memory that are in use."""
    capacity: int
    """Bytes of its memory."""
    requests: int
    """Requests that it answered since it started."""


class Scaler:
    """Follows the load of a repository, and says how many shards it should have.

    Args:
        policy: when shards join and drain.

    >>> scaler, busy = Scaler(ScalePolicy(join_after_s=1.0)), {0: ShardLoad(95, 100, 0)}
    >>> scaler.observe(0.0, 2, busy), scaler.observe(2.0, 2, busy)
    (1, 2)
    """

    def __init__(self, policy: ScalePolicy) -> None:
        self._policy = policy
        self._last: tuple[float, Mapping[int, ShardLoad]] | None = None
        self._short_since: float | None = None
        """Since when more shards are needed."""
        self._spare_since: float | None = None
        """Since when fewer would do."""

    def observe(self, now_s: float, nodes: int, shards: Mapping[int, ShardLoad]) -> int:
        """Take what there is, and give the number of shards that there should be.

        Args:
            now_s: seconds, by any clock that only goes on.
            nodes: nodes that a shard can be on.
            shards: shard -> what it carries.

        Raises:
            ValueError: there is no shard, or no node.
        """
        if not shards or nodes < 1:
            raise ValueError(
                f"Scaler.observe: expected at least one shard and one node; found {len(shards)} and {nodes}"
            )
        rate = self._rate(now_s, shards)
        self._last = (now_s, dict(shards))
        count = len(shards)
        most = self._policy.bound(nodes)
        wanted = min(self._needed(shards, rate, 1.0), most)
        enough = min(self._needed(shards, rate, SLACK), most)
        self._short_since = _since(self._short_since, now_s, wanted > count)
        self._spare_since = _since(self._spare_since, now_s, enough < count)
        if self._short_since is not None and now_s - self._short_since >= self._policy.join_after_s:
            self._short_since = None
            return wanted
        if count > most or (self._spare_since is not None and now_s - self._spare_since >= self._policy.drain_after_s):
            self._spare_since = None
            return count - 1
        return count

    def _needed(self, shards: Mapping[int, ShardLoad], rate: float, part: float) -> int:
        """Return how many shards carry it all, each at most that part of what it should."""
        held = sum(load.bytes_held for load in shards.values())
        room = part * self._policy.full * sum(load.capacity for load in shards.values()) / len(shards)
        by_bytes = math.ceil(held / room) if room else 1
        by_requests = math.ceil(rate / (part * self._policy.requests_per_s))
        return max(self._policy.least, by_bytes, by_requests)

    def _rate(self, now_s: float, shards: Mapping[int, ShardLoad]) -> float:
        """Return requests a second since the last observation; a shard that began anew counts from 0."""
        if self._last is None or now_s <= self._last[0]:
            return 0.0
        before_s, before = self._last
        asked = 0
        for shard, load in shards.items():
            known = before[shard].requests if shard in before else 0
            asked += load.requests - known if load.requests >= known else load.requests
        return asked / (now_s - before_s)


def _since(since: float | None, now_s: float, holds: bool) -> float | None:
    """Return since when something holds: None where it does not."""
    if not holds:
        return None
    return now_s if since is None else since
