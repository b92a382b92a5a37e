"""A client's connections to the shards.

Rules
- A connection is to one incarnation of a shard. It maps the shard's memory when both are on one node: see `memory`.
- It is closed when another one takes its place, and with the session.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from ..memory.memory import MemoryView
from ..rpc.closing import close_all
from ..rpc.messages import Hello

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Connection:
    """What a client knows of one incarnation of a shard."""

    hello: Hello
    view: MemoryView | None
    """Its memory; None when the shard is on another node."""
    unreached: bool = False
    """The shard cannot connect to this process: saves send their bytes with the calls."""

    def is_of(self, hello: Hello) -> bool:
        """Tell whether it is to the incarnation of a shard that said this, and that has not ended as far as can be
        seen."""
        return self.hello.pid == hello.pid and (self.view is None or self.view.alive)

    def close(self) -> None:
        """Let go of it."""
        if self.view is not None:
            self.view.close()


class Connections:
    """The connections of one client, at most one to each shard."""

    def __init__(self) -> None:
        self._to: dict[int, Connection] = {}
        self._lock = threading.Lock()

    def present(self, shard: int) -> Connection | None:
        """Return the connection to a shard's present incarnation, if there is one. Does not wait."""
        with self._lock:
            known = self._to.get(shard)
        return known if known is not None and known.is_of(known.hello) else None

    def add(self, hello: Hello, near: bool) -> Connection:
        """Return the connection to the incarnation of a shard that said this: a new one, unless another thread was
        faster.

        Args:
            hello: what the shard said.
            near: it is on the client's node, so that its memory can be mapped.
        """
        made = Connection(hello, _view(hello) if near else None)
        with self._lock:
            known = self._to.get(hello.index)
            again = known is not None and known.is_of(hello)
            if not again:
                self._to[hello.index] = made
        if known is None:
            return made
        spare, kept = (made, known) if again else (known, made)
        spare.close()
        return kept

    def drop(self, shard: int) -> None:
        """Drop the connection to a shard that did not answer, if there is one; the next use makes a new one."""
        with self._lock:
            gone = self._to.pop(shard, None)
        if gone is not None:
            gone.close()

    def keep_only(self, shards: Collection[int]) -> None:
        """Close those to all other shards, also where closing one fails; then the first error is raised."""
        with self._lock:
            gone = [shard for shard in self._to if shard not in shards]
        close_all("connections", *(partial(self.drop, shard) for shard in gone))


def _view(hello: Hello) -> MemoryView | None:
    try:
        return MemoryView(hello.pid, hello.memory_fd, hello.memory_file, hello.capacity)
    except OSError as exc:
        log.warning("shard %d: cannot map its memory, tensors are copied by other transports: %s", hello.index, exc)
        return None
