"""What a prefix query finds: an ancestor, pinned, and how its layers match the query's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cached_property
from types import TracebackType

from ...store.graphs.graph import ModelGraph
from ...store.holders import Lease
from ...store.refs import ModelRef
from .session import Session


class PrefixMatch:
    """The stored model with the longest common prefix (EvoStore, section 4.2).

    It is pinned: its tensors stay, and this client can load them, even when somebody retires the model, until
    `release`, the end of a `with` block, or the end of this client. A match that is garbage is released soon.
    """

    def __init__(
        self,
        session: Session,
        query: ModelGraph,
        ref: ModelRef,
        quality: float | None,
        lease: Lease,
        ancestor: Callable[[], ModelGraph],
    ) -> None:
        self.ref = ref
        self.quality = quality
        self._query = query
        self._ancestor = ancestor
        self._session = session
        self._lease = lease
        self._finalizer = weakref.finalize(self, session.drop, lease)
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        return f"PrefixMatch({self.ref}, {len(self.layers)} of {len(self._query)} layers, quality={self.quality})"

    @cached_property
    def layers(self) -> dict[str, str]:
        """Layer of the query -> matching layer of the ancestor; fits `save(..., inherit=match.layers)`."""
        return self._query.common_prefix(self._ancestor())

    @cached_property
    def tensors(self) -> dict[str, str]:
        """Tensor of the query -> matching tensor of the ancestor."""
        graph = self._ancestor()
        return {
            mine: theirs
            for layer, source in self.layers.items()
            for mine, theirs in zip(self._query.by_name[layer].tensors, graph.by_name[source].tensors, strict=False)
        }

    def release(self, wait: bool = True) -> None:
        """Let the ancestor go; a second call is no error.

        Args:
            wait: until it went, so that what only this match kept is free when this returns.
        """
        if self._finalizer.detach() is not None:
            (self._session.unpin if wait else self._session.unpin_behind)([self._lease])

    def __enter__(self) -> PrefixMatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
