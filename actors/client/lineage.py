"""Where versions come from, and what derives from them.

Rules
- A lineage names retired ancestors, too: the catalog keeps who derived from whom.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...store.refs import ModelRef
from ..rpc.catalog_calls import CatalogCalls
from .session import Session


class Lineage:
    """Answers for one client."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def to_root(self, ref: ModelRef) -> list[ModelRef]:
        """Return a version, its parent, and so on to the root."""
        return self._session.ask(CatalogCalls.chain(ref))

    def qualities(self, refs: Iterable[ModelRef]) -> dict[ModelRef, float]:
        """Return the qualities of versions; see `Repository.qualities`."""
        return self._session.ask(CatalogCalls.qualities(list(refs)))

    def descendants(self, ref: ModelRef) -> list[ModelRef]:
        """Return all live versions that derive from one, sorted."""
        return self._session.ask(CatalogCalls.offspring(ref))
