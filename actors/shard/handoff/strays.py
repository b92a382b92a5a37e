"""Holders here of versions that do not exist: their home died before it could have them let go.

Rules
- A shard that starts again has the others let go of what an earlier incarnation held (`release_homes`). While the
  topology changes that counts for nothing, and nobody names what that incarnation had begun and told no ledger of, or
  what it had retired and told nobody of.
- A version is a stray when two looks, `LOOK_S` apart, found that it is not among those that exist by the ledger here,
  and its home does not know it either. Then it is released, unless it was held anew while its home was asked: a number
  that no ledger has heard of may be given again.
- There is no look while names or segments move, or while others have not said yet what they name here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from ....store.errors import TensorVineError
from ....store.refs import ModelRef
from ....store.shard import ShardState
from ..calls import ShardCalls
from ..context import ShardContext

log = logging.getLogger(__name__)

LOOK_S = 30.0
ANSWER_S = 5.0


class Strays:
    """The strays of one shard.

    Args:
        context: the shard's.
        calm: tells whether others have said what they name here. Called with the lock held.
    """

    def __init__(self, context: ShardContext, calm: Callable[[], bool]) -> None:
        self._state = context.state
        self._lock = context.lock
        self._peers = context.peers
        self._calm = calm
        self._looked = time.monotonic()
        self._suspects: set[ModelRef] = set()
        self._asked: set[ModelRef] = set()
        """Versions of which their home is being asked, and that nobody has held anew since."""

    def held(self, ref: ModelRef) -> None:
        """Hear that a version is held here. Call it with the lock held."""
        self._asked.discard(ref)

    def look(self) -> int:
        """Release the strays, if it is time to look for them; gives how many.

        Call it in one thread, which waits for the homes; the caller settles afterwards.
        """
        if time.monotonic() - self._looked < LOOK_S:
            return 0
        try:
            return self._look()
        finally:
            self._looked = time.monotonic()

    def _look(self) -> int:
        version = self._settled()
        if version is None:
            self._suspects = set()
            return 0
        with self._lock:
            refs = self._state.version_holders()
        found = {ref for ref in refs if not self._state.lineage.lives(ref)}
        again, self._suspects = found & self._suspects, found
        by_home: dict[int, list[ModelRef]] = {}
        for ref in sorted(again):
            by_home.setdefault(self._state.home_of(ref.name), []).append(ref)
        return sum(self._release(home, some, version) for home, some in by_home.items())

    def _settled(self) -> int | None:
        """Return the version of the topology; None: something moves, or it is not known yet what is held here."""
        topology = self._peers.topology
        with self._lock:
            calm = self._state.index in topology.shards and not topology.former and not topology.leaving
            return topology.version if calm and self._calm() else None

    def _release(self, home: int, refs: Sequence[ModelRef], version: int) -> int:
        with self._lock:
            self._asked = set(refs)
        try:
            unknown = self._unknown_at(home, refs, version)
        except TensorVineError as exc:
            log.info("shard %d: shard %d did not return its versions: %s", self._state.index, home, exc)
            return 0
        with self._lock:
            strays = [ref for ref in unknown if ref in self._asked]
            if self._settled() != version:
                return 0
            if home == self._state.index:  # a save may have begun since
                strays = unknown_here(self._state, strays)
            for ref in strays:
                self._state.release(ref)
        if strays:
            log.warning(
                "shard %d: released %s, which do not exist", self._state.index, ", ".join(map(str, strays[:10]))
            )
        return len(strays)

    def _unknown_at(self, home: int, refs: Sequence[ModelRef], version: int) -> list[ModelRef]:
        if home != self._state.index:
            return self._peers.call(home, ShardCalls.unknown(refs, version), ANSWER_S)
        with self._lock:
            return unknown_here(self._state, refs)


def unknown_here(state: ShardState, refs: Iterable[ModelRef]) -> list[ModelRef]:
    """Return those of some versions of this home that are none: not live, pinned, being committed or unread.

    Call it with the lock held.
    """
    begun = state.begun()
    return [ref for ref in refs if state.known(ref) is None and ref not in begun and ref not in state.unread]
