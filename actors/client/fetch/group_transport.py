"""The transports by collective groups: Gloo between host memories, NCCL from GPU to GPU (see `pair_sender`).

Rules
- A reader has a group of two with a shard, a pair, which both keep. It asks, is told what comes and by which pair, and
  receives it straight into the memory where it stays.
- A pair in which something went wrong is closed, and made anew once in a load.
- One question at a time per shard: its order is that of the bytes.
- Nothing is imported before somebody asks for such a transport by name; only then may "auto" take it, too.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Mapping
from dataclasses import replace

from ....store.errors import (
    ModelLostError,
    OperationTimeoutError,
    PeerLostError,
    ShardUnavailableError,
    TensorVineError,
)
from ....store.segments.segment import SegmentId
from ....store.waiting import Deadline
from ...collective.group import Group
from ...collective.rendezvous import Endpoint, Endpoints
from ...memory.buffers import Buffers
from ...shard.calls import ShardCalls
from ...transport.backends import TROUBLE, connect_pair, is_here, load
from ...transport.frames import Asked, Digests, Received
from ...transport.pair_sender import CONNECT_S
from ...transport.parcels import PairAnswer, PairQuestion, check_parcels, cut
from ...transport.targets import received
from ..session import Session

log = logging.getLogger(__name__)

TRIES = 2
"""By the pair that there is, by a new one."""
MEET_S = 10.0
"""How much longer than a meeting the shard's answer may take."""
_serial = itertools.count(1)


class GroupTransport:
    """Reads by groups of one back end.

    Args:
        session: the client's.
        backend: "gloo" or "nccl".
    """

    checks = False
    exact = True

    def __init__(self, session: Session, backend: str) -> None:
        self.name = backend
        self._session = session
        self._buffers = Buffers()
        self._readers: dict[int, _PairReader] = {}
        self._lock = threading.Lock()
        self._worked = False

    @property
    def automatic(self) -> bool:
        """Whether it has worked from here: otherwise a load would wait for libraries that nobody asked for."""
        return self._worked

    def brings(self, shard: int, deadline: Deadline) -> bool:
        """Tell whether what it needs is installed here."""
        return is_here(self.name)

    def blocks(
        self, shard: int, places: Asked, digests: bool, deadline: Deadline, what: str
    ) -> dict[SegmentId, Received]:
        """Ask the shard, and receive by the pair that it names."""
        load(self.name, what)
        with self._lock:
            reader = self._readers.get(shard)
            if reader is None:
                reader = self._readers[shard] = _PairReader(self._session, shard, self.name, self._buffers)
        if not reader.turn.acquire(timeout=deadline.left_for(what)):
            raise OperationTimeoutError(f"{what}: expected other loads from shard {shard} to end in time; they did not")
        try:
            found = reader.read(places, digests, deadline, what)
        finally:
            reader.turn.release()
        self._worked = True
        return found

    def close(self) -> None:
        """Leave all groups; a read under way fails."""
        with self._lock:
            readers = list(self._readers.values())
            self._readers.clear()
        for reader in readers:
            reader.close()


class _PairReader:
    """Reads from one shard, by a pair with it."""

    def __init__(self, session: Session, shard: int, backend: str, buffers: Buffers) -> None:
        self.turn = threading.Lock()
        """Held by whoever reads."""
        self._session = session
        self._shard = shard
        self._backend = backend
        self._buffers = buffers
        self._member = f"{session.client}.{next(_serial)}"
        self._pair: Group | None = None
        self._closed = False
        self._lock = threading.Lock()
        """Guards the pair."""

    def read(self, places: Asked, digests: bool, deadline: Deadline, what: str) -> dict[SegmentId, Received]:
        """Read slots of segments; errors as in `transports.Transport.blocks`."""
        reason = "this transport is closed"
        for _ in range(TRIES):
            if self._closed:
                break
            with self._lock:
                held = self._pair.name if self._pair is not None else None
            asked = {segment: list(slots) for segment, slots in places.items()}
            answer = self._ask(PairQuestion(asked, deadline.left_for(what), held), what)
            hashes = self._session.send(self._shard, ShardCalls.digests(list(places))) if digests else None
            try:
                check_parcels(answer.parcels, places, what)
                found = self._received(answer, held, deadline, what)
            except TROUBLE as exc:
                self._leave()
                deadline.left_for(what)
                log.info("%s: receiving by %s failed, asking again: %s", what, answer.pair, exc)
                reason = str(exc)
                continue
            except BaseException:
                self._leave()
                raise
            if hashes is None:
                return found
            return _with_digests(found, hashes.result(deadline.left_for(what)), what)
        raise ShardUnavailableError(f"{what}: expected shard {self._shard} to send by {self._backend!r}; {reason}")

    def close(self) -> None:
        """Leave the pair."""
        self._closed = True
        self._leave()

    def exchange(self, key: str, rank: int, size: int, endpoint: Endpoint, timeout: float) -> Endpoints:
        """Meet at the shard, so there is nobody else to fail; see `Rendezvous.exchange`."""
        request = ShardCalls.meet(key, rank, size, dict(endpoint), timeout)
        return self._session.call(self._shard, request, timeout + MEET_S)

    # ---- one try --------------------------------------------------------------------------------------

    def _ask(self, question: PairQuestion, what: str) -> PairAnswer:
        try:
            return self._session.call(
                self._shard, ShardCalls.send_by(self._backend, self._member, question), question.timeout
            )
        except BaseException as exc:
            known = isinstance(exc, TensorVineError) and not isinstance(exc, OperationTimeoutError)
            if not known or isinstance(exc, ShardUnavailableError):  # it may be sending
                self._leave()
            raise

    def _received(
        self, answer: PairAnswer, held: str | None, deadline: Deadline, what: str
    ) -> dict[SegmentId, Received]:
        group = self._group(answer.pair, held, deadline, what)
        memories = [self._buffers.take(parcel.nbytes) for parcel in answer.parcels]
        parts = [part for m, parcel in zip(memories, answer.parcels, strict=True) for part in cut(m, parcel.lengths)]
        left = deadline.left_for(what)
        works = [group.irecv(part, 0, timeout=left) for part in parts]
        for work in works:
            work.wait()
        found: dict[SegmentId, Received] = {}
        for memory, parcel in zip(memories, answer.parcels, strict=True):
            found |= received(parcel.rows, self._buffers.block(memory))
        return found

    # ---- the pair -------------------------------------------------------------------------------------

    def _group(self, pair: str, held: str | None, deadline: Deadline, what: str) -> Group:
        """Return the pair by which the bytes come; one that is not here yet is connected."""
        with self._lock:
            group = self._pair
        if group is not None and group.name == pair:
            return group
        if pair == held or self._closed:
            raise PeerLostError(f"{what}: expected to be in group {pair}; this process has just left it")
        self._leave()
        made = connect_pair(pair, 1, self._backend, min(deadline.left_for(what), CONNECT_S), self)
        with self._lock:
            self._pair = made
        if self._closed:
            self._leave()
        return made

    def _leave(self) -> None:
        with self._lock:
            pair, self._pair = self._pair, None
        if pair is not None:
            pair.close()


def _with_digests(found: Mapping[SegmentId, Received], known: Digests, what: str) -> dict[SegmentId, Received]:
    lost = sorted(found.keys() - known.keys())
    if lost:
        raise ModelLostError(f"{what}: expected content hashes of segments {lost}; the segments were released")
    return {s: replace(part, digests={slot: known[s][slot] for slot in part.offsets}) for s, part in found.items()}
