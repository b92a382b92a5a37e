"""Where versions come from, and what derives from them.

Rules
- A lineage names retired ancestors, too: the homes keep who derived from whom.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...store.refs import ModelRef
from ..shard.calls import ShardCalls
from .session import Session


class Lineage:
    """Answers for one client."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def to_root(self, ref: ModelRef) -> list[ModelRef]:
        """Return a version, its parent, and so on to the root."""
        chain = {ref: None}
        while True:
            last = next(reversed(chain))
            more = self._session.at_home(last.name, ShardCalls.chain(last))
            if chain.keys() >= set(more):
                return list(chain)
            chain |= dict.fromkeys(more)

    def qualities(self, refs: Iterable[ModelRef]) -> dict[ModelRef, float]:
        """Return the qualities of versions; see `Repository.qualities`."""
        versions: dict[str, list[int]] = {}
        for ref in refs:
            versions.setdefault(ref.name, []).append(ref.version)
        found: dict[ModelRef, float] = {}
        for name, numbers in versions.items():
            found |= self._session.at_home(name, ShardCalls.qualities(name, numbers))
        return found

    def descendants(self, ref: ModelRef) -> list[ModelRef]:
        """Return all live versions that derive from one, sorted."""
        seen: dict[ModelRef, bool] = {}
        frontier = [ref]
        while frontier:
            found = [pair for part in self._session.broadcast(ShardCalls.offspring(frontier)) for pair in part]
            frontier = [ref for ref, _ in found if ref not in seen]
            for ref, live in found:  # its home knows, others perhaps not
                seen[ref] = live or seen.get(ref, False)
            if len(self._session.shards) == 1:
                break
        return sorted(ref for ref, live in seen.items() if live)
