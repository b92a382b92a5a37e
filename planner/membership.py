"""Which shards a repository should have on which nodes, followed while nodes come and go.

Rules
- Without a number there is one shard on each node that may hold one, now and later. With a number there are so many.
- A shard whose node leaves, or may hold none, drains. Where too few others would stay, another one joins first.
- A node that has several, since a lost node's shard started again there, keeps one of them.
- There are never fewer shards than replicas, though they share nodes.
- What failed is tried again after a pause, each time a longer one, and then alone: a node that cannot be joined, or a
  shard that cannot drain, keeps no other one waiting. A node whose shard started elsewhere could not be joined.
- Nothing here knows a clock or an actor: who observes says when.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias, cast

from ..store.errors import OptionError

NodeRule: TypeAlias = Mapping[str, "float | str"]
"""What a node must have to hold a shard: resource -> least amount, label -> its value. Empty: every node may."""

SETTLE_S = 10.0
"""How long a node has several shards before one of them drains: the node of another one may be back soon."""
JOIN_MOST = 16
"""Shards that join in one change: who finds a change unfinished looks for as many."""
PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""Before what failed is tried again."""


def check_rule(rule: object) -> dict[str, float | str]:
    """Return a rule that can be one.

    Raises:
        OptionError: it is none; says what was expected.

    >>> check_rule({"tensorvine": 1, "ray.io/market-type": "on-demand"})
    {'tensorvine': 1, 'ray.io/market-type': 'on-demand'}
    """
    where = "nodes: expected a mapping such as {'RESOURCE': 1, 'LABEL': 'value'}"
    if not isinstance(rule, Mapping):
        raise OptionError(f"{where}; found {rule!r:.100}")
    checked: dict[str, float | str] = {}
    for name, value in cast("Mapping[object, object]", rule).items():
        if not isinstance(name, str) or not name:
            raise OptionError(f"{where}; found the name {name!r:.100}")
        if isinstance(value, bool) or not isinstance(value, int | float | str) or value == "":
            raise OptionError(f"{where}; found {name!r}: {value!r:.100}")
        if not isinstance(value, str) and not (math.isfinite(value) and value > 0):
            raise OptionError(f"{where} with amounts above 0; found {name!r}: {value!r}")
        checked[name] = value
    return checked


def selects(rule: NodeRule, resources: Mapping[str, float], labels: Mapping[str, str]) -> bool:
    """Tell whether a node of these resources and labels may hold a shard.

    >>> selects({"GPU": 1, "zone": "a"}, {"GPU": 4.0}, {"zone": "a"}), selects({"GPU": 1}, {}, {})
    (True, False)
    """
    return all(
        labels.get(name) == value if isinstance(value, str) else resources.get(name, 0.0) >= value
        for name, value in rule.items()
    )


def spread(nodes: Sequence[str], on_node: Mapping[str, int], count: int) -> tuple[str, ...]:
    """Choose nodes for so many shards: those that have the fewest, of several the first.

    >>> spread(["a", "b"], {"a": 2}, 3)
    ('b', 'b', 'a')
    """
    load, chosen = Counter(on_node), list[str]()
    for _ in range(count):
        chosen.append(min(nodes, key=lambda node: load[node]))
        load[chosen[-1]] += 1
    return tuple(chosen)


@dataclass(frozen=True, slots=True)
class Move:
    """The next change of the shards; at most one of both."""

    join: tuple[str, ...] = ()
    """Nodes on each of which a shard joins."""
    drain: tuple[int, ...] = ()
    """Shards of which one drains."""

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.join or self.drain)

    def __str__(self) -> str:
        """Say it in a log.

        >>> str(Move(join=("a", "b"))), str(Move(drain=(1, 3)))
        ('a shard joins on each of a, b', 'one of the shards 1, 3 drains')
        """
        if self.join:
            return f"a shard joins on each of {', '.join(self.join)}"
        return f"one of the shards {', '.join(map(str, self.drain))} drains" if self.drain else "nothing"


@dataclass(slots=True)
class _Pause:
    until: float
    seconds: float


class Membership:
    """Follows the nodes of a repository, and says which shard joins or drains next.

    Args:
        least: shards that there must be: as many as replicas.

    >>> membership = Membership(least=1)
    >>> membership.observe(0.0, ["a", "b"], {0: "a"}, None)
    Move(join=('b',), drain=())
    >>> membership.observe(1.0, ["b"], {0: "a", 1: "b"}, None)
    Move(join=(), drain=(0,))
    """

    def __init__(self, least: int) -> None:
        self._least = max(least, 1)
        self._crowded: dict[str, float] = {}
        """Node that has several shards -> since when."""
        self._pauses: dict[str | int, _Pause] = {}
        """Node that could not be joined, or shard that could not drain."""
        self._joined: tuple[str, ...] = ()
        """Nodes on which shards joined in the last change."""

    def observe(
        self,
        now_s: float,
        nodes: Sequence[str],
        at: Mapping[int, str],
        count: int | None,
        settle_s: float = SETTLE_S,
    ) -> Move:
        """Take how things stand, and give the next change.

        Args:
            now_s: seconds, by any clock that only goes on.
            nodes: those that may hold shards, and stay.
            at: shard -> the node that it is on.
            count: how many shards there are to be; None: one on each node.
            settle_s: how long a node has several before one of them drains.
        """
        able = set(nodes)
        staying = {shard: node for shard, node in at.items() if node in able}
        on_node = Counter(staying.values())
        self._note_crowds(now_s, on_node)
        self._note_strays(now_s, able, on_node)
        least = max(count, self._least) if count is not None else self._least
        drain = self._drainable(now_s, sorted(at.keys() - staying.keys()))
        if drain and len(staying) >= least:
            return Move(drain=drain)
        bare = [node for node in nodes if not on_node[node]] if count is None else []
        if bare and (join := self._joinable(now_s, bare)):
            return Move(join=join)
        if len(staying) < least and nodes:
            return Move(join=self._spread(now_s, nodes, on_node, min(least - len(staying), JOIN_MOST)))
        return Move(drain=self._surplus(now_s, settle_s, staying, count))

    def failed(self, now_s: float, move: Move) -> bool:
        """Take note that a change failed: what it was about waits for a while. Tells whether it failed before."""
        again = any(about in self._pauses for about in (*move.join, *move.drain))
        for about in (*move.join, *move.drain):
            self._pause(now_s, about)
        return again

    def succeeded(self, move: Move) -> None:
        """Take note that a change was made."""
        self._joined = move.join
        for shard in move.drain:
            self._pauses.pop(shard, None)

    # ---- within -----------------------------------------------------------------------------------------

    def _note_crowds(self, now_s: float, on_node: Counter[str]) -> None:
        self._crowded = {node: self._crowded.get(node, now_s) for node, count in on_node.items() if count > 1}

    def _note_strays(self, now_s: float, able: Set[str], on_node: Counter[str]) -> None:
        """See whether shards that joined are where they should be."""
        for node in self._joined:
            if node in able and not on_node[node]:
                self._pause(now_s, node)
            else:
                self._pauses.pop(node, None)
        self._joined = ()

    def _pause(self, now_s: float, about: str | int) -> None:
        known = self._pauses.get(about)
        seconds = min(2 * known.seconds, LONGEST_PAUSE_S) if known is not None else PAUSE_S
        self._pauses[about] = _Pause(now_s + seconds, seconds)

    def _waits(self, now_s: float, about: str | int) -> bool:
        return about in self._pauses and now_s < self._pauses[about].until

    def _surplus(self, now_s: float, settle_s: float, staying: Mapping[int, str], count: int | None) -> tuple[int, ...]:
        """Return the shards one of which is too many: of a node, where that has had several for so long."""
        if len(staying) <= max(count or 1, self._least):
            return ()
        if count is not None:
            return self._drainable(now_s, sorted(staying))
        for node, since in self._crowded.items():
            there = self._drainable(now_s, sorted(shard for shard, at in staying.items() if at == node))
            if now_s - since >= settle_s and there:
                return there
        return ()

    def _drainable(self, now_s: float, shards: Sequence[int]) -> tuple[int, ...]:
        """Return the shards of which the emptiest may drain: those that never failed to, or one that did."""
        fresh = tuple(shard for shard in shards if shard not in self._pauses)
        return fresh or tuple(shard for shard in shards if not self._waits(now_s, shard))[:1]

    def _joinable(self, now_s: float, nodes: Sequence[str]) -> tuple[str, ...]:
        """Return the nodes that may be joined at once: those that never failed, or one that did."""
        fresh = tuple(node for node in nodes if node not in self._pauses)
        return fresh[:JOIN_MOST] or tuple(node for node in nodes if not self._waits(now_s, node))[:1]

    def _spread(self, now_s: float, nodes: Sequence[str], on_node: Counter[str], missing: int) -> tuple[str, ...]:
        """Choose nodes for so many shards: those that have the fewest."""
        able = [node for node in nodes if not self._waits(now_s, node)]
        return spread(able, on_node, missing if able else 0)
