"""What other homes' versions name in a shard that started again, and what they let go while it could not hear it.

Rules
- Every other shard is asked, again and again until it has answered: it may be starting again as well. All are asked
  anew where names have moved meanwhile: who has one now may have answered before.
- What the disk or a replica gave back is held by nobody's name until all have answered; then what nobody named goes.
  A shard does not drain before.
- What a home releases while its answer is on its way was named too early: it is not held again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ....store.errors import StorageError, TensorVineError
from ....store.holders import Reason
from ....store.refs import ModelRef
from ....store.segments.segment import SegmentId
from ....store.shard import ShardState
from ....store.versions.manifest import decode_body, slots_of
from ..calls import ShardCalls
from ..context import ShardContext

log = logging.getLogger(__name__)

ANSWER_S = 30.0
Named = dict[ModelRef, dict[SegmentId, list[int]]]
"""Version -> segment -> slots."""


class Reconciliation:
    """The claims of other homes on one shard.

    Args:
        context: the shard's.
        recovered: versions that the disk named; what their homes do not name any more is released.
    """

    def __init__(self, context: ShardContext, recovered: Iterable[ModelRef]) -> None:
        self._state = context.state
        self._lock = context.lock
        self._peers = context.peers
        self._waiting = set(self._peers.others)
        self._version = self._peers.topology.version
        self._recovered = list(recovered)
        self._released: set[ModelRef] = set()
        self._round = 0
        """Counts how often all were asked anew: an answer to an earlier question says nothing of what came since."""

    @property
    def open(self) -> bool:
        """Whether some have not answered yet."""
        return bool(self._waiting)

    def released(self, ref: ModelRef) -> None:
        """Hear that a home let a version go. Call it with the lock held."""
        if self._waiting:
            self._released.add(ref)

    def gather(self) -> None:
        """Ask those that have not answered; the caller settles afterwards."""
        with self._lock:
            version = self._peers.topology.version
            if version != self._version:
                self._ask_all()
            asked, waiting = self._round, sorted(self._waiting)
        for shard in waiting:
            try:
                named = self._peers.call(shard, ShardCalls.claims(self._state.index), ANSWER_S)
            except TensorVineError as exc:
                log.info("shard %d: shard %d has not returned its claims yet: %s", self._state.index, shard, exc)
                continue
            with self._lock:
                if self._take(shard, named) and (self._round, self._peers.topology.version) == (asked, version):
                    self._waiting.discard(shard)
                    self._release_if_all_have_answered()

    def ask_anew(self, recovered: Iterable[ModelRef] = ()) -> None:
        """Ask all others once more: they did not say what they name of segments that came into this shard's care since.

        Call it with the lock held.

        Args:
            recovered: versions that the disk named since.
        """
        self._recovered += recovered
        self._round += 1
        self._ask_all()

    def _ask_all(self) -> None:
        self._version, self._waiting = self._peers.topology.version, set(self._peers.others)
        self._release_if_all_have_answered()  # there may be no others any more

    def _release_if_all_have_answered(self) -> None:
        if not self._waiting:  # this home says as well what it names here: names have come to it since it started
            self._take(self._state.index, claims_on(self._state, self._state.index))
            self._state.release(Reason.RESTORED)

    def _take(self, shard: int, named: Named) -> bool:
        """Hold what a home names; False: not all of it can be told now, for a manifest cannot be read."""
        done = True
        for ref in self._recovered if not self._peers.topology.former else ():  # else it may be at home elsewhere
            if self._state.home_of(ref.name) == shard and ref not in named:
                self._state.release(ref)
        for ref, holds in named.items():
            for segment, slots in holds.items() if ref not in self._released else ():
                try:
                    self._state.hold(ref, {segment: slots})
                except StorageError as exc:
                    log.debug("shard %d: %s cannot be held yet: %s", self._state.index, ref, exc)
                    done = False
                except TensorVineError as exc:
                    log.warning("shard %d: %s is partly lost: %s", self._state.index, ref, exc)
        return done


def claims_on(state: ShardState, shard: int) -> Named:
    """Return what this home's versions, and commits on their way, name of what another shard holds.

    Call it with the lock held.
    """
    claims: Named = {}
    for ref, holds in state.begun().items():
        claims[ref] = {segment: list(slots) for segment, slots in holds.items() if state.where(segment) == shard}
    for record in state.records():
        if any(state.where(segment) == shard for segment in record.segments):
            ref = record.header.ref
            entries = decode_body(record.body, ref).values()
            claims[ref] = slots_of(entry for entry in entries if state.where(entry.segment) == shard)
    for ref in state.unread:  # what they name there is not known here, but they are not gone
        claims.setdefault(ref, {})
    return claims
