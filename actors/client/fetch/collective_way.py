"""The ways by collective groups: Gloo between host memories, NCCL from GPU to GPU (see `group_sender`).

Rules
- A reader asks, is told what comes and by which group, and receives it straight into the memory where it stays.
- Each reader has a group of two with a shard, its pair, which both keep. Readers that a shard found to want the same
  again and again are invited to a group together; they join it behind their loads, and then share broadcasts.
- Where a broadcast fails, the reader asks again at once and gets the bytes by itself: a load does not fail because
  another reader did. Where the pair fails it is made anew, once.
- A group in which something went wrong is closed. One question at a time per shard: its order is that of the bytes.
- Nothing is imported before somebody asks for such a way by name; only then may "auto" take it, too.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Mapping
from dataclasses import replace

from ....planner.runs.gathering import Seat
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
from ...collective.rendezvous import Card, Cards
from ...memory.buffers import Buffers
from ...shard.calls import ShardCalls
from ...transport.backends import TROUBLE, is_here, load, take_seat
from ...transport.frames import Digests, Received, Slots
from ...transport.group_sender import ALL, CONNECT_S, JOIN_S, PAIR
from ...transport.parcels import GroupAnswer, GroupQuestion, check_parcels, cut, unpacked
from ..session import Session

log = logging.getLogger(__name__)

TRIES = 3
"""Together, by the pair that there is, by a new one."""
MEET_S = 10.0
"""How much longer than a meeting the shard's answer may take."""
_serial = itertools.count(1)


class CollectiveWay:
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
        self._links: dict[int, _Link] = {}
        self._lock = threading.Lock()
        self._worked = False
        self.broadcasts = 0
        """Reads that were shared with others."""

    @property
    def automatic(self) -> bool:
        """Whether it has worked from here: otherwise a load would wait for libraries that nobody asked for."""
        return self._worked

    def brings(self, shard: int, deadline: Deadline) -> bool:
        """Tell whether what it needs is installed here."""
        return is_here(self.name)

    def blocks(
        self, shard: int, places: Slots, digests: bool, deadline: Deadline, what: str
    ) -> dict[SegmentId, Received]:
        """Ask the shard, and receive by the group that it names."""
        load(self.name, what)
        with self._lock:
            link = self._links.get(shard)
            if link is None:
                link = self._links[shard] = _Link(self._session, shard, self.name, self._buffers)
        if not link.turn.acquire(timeout=deadline.left_for(what)):
            raise OperationTimeoutError(f"{what}: expected other loads from shard {shard} to end in time; they did not")
        try:
            found, together = link.read(places, digests, deadline, what)
            self.broadcasts += together
        finally:
            link.turn.release()
        self._worked = True
        return found

    def close(self) -> None:
        """Leave all groups; a read under way fails."""
        with self._lock:
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            link.close()


class _Link:
    """A reader's groups with one shard."""

    def __init__(self, session: Session, shard: int, backend: str, buffers: Buffers) -> None:
        self.turn = threading.Lock()
        """Held by whoever reads."""
        self._session = session
        self._shard = shard
        self._backend = backend
        self._buffers = buffers
        self._member = f"{session.client}.{next(_serial)}"
        self._life: str | None = None
        self._pair: Group | None = None
        self._asked_with: int | None = None
        """Number of the pair that the newest question named."""
        self._epochs: dict[int, Group] = {}
        self._closed = False
        self._lock = threading.Lock()
        """Guards the groups."""

    def read(
        self, places: Slots, digests: bool, deadline: Deadline, what: str
    ) -> tuple[dict[SegmentId, Received], bool]:
        """Read slots of segments, and tell whether they came by a broadcast; errors as in `ways.Way.blocks`."""
        failed: list[Exception] = []
        while len(failed) < TRIES and not self._closed:
            answer = self._ask(places, bool(failed), deadline, what)
            hashes = self._session.send(self._shard, ShardCalls.digests(list(places))) if digests else None
            try:
                check_parcels(answer.parcels, places, what)
                found = self._received(answer, deadline, what)
            except TROUBLE as exc:
                self._part(answer)
                deadline.left_for(what)
                log.info("%s: by %s it went wrong, and is asked for again: %s", what, _group_of(answer), exc)
                failed.append(exc)
                continue
            except BaseException:
                self._part(answer)
                raise
            if answer.invited is not None:
                self._join_soon(answer.life, answer.invited)
            if hashes is not None:
                known = hashes.result(deadline.left_for(what))
                found = _with_digests(found, known, what)
            return found, answer.epoch is not None
        reason = str(failed[-1]) if failed else "this way is closed"
        raise ShardUnavailableError(f"{what}: expected shard {self._shard} to send by {self._backend!r}; {reason}")

    def close(self) -> None:
        """Leave all groups."""
        self._closed = True
        self._begin(None)

    # ---- one try ----------------------------------------------------------------------------------------

    def _ask(self, places: Slots, alone: bool, deadline: Deadline, what: str) -> GroupAnswer:
        timeout = deadline.left_for(what)
        with self._lock:
            pair = self._asked_with = self._pair.epoch if self._pair is not None else None
            question = GroupQuestion(places, timeout, self._life, pair, tuple(self._epochs), alone)
        request = ShardCalls.send_by(self._backend, self._member, question)
        try:
            answer = self._session.call(self._shard, request, timeout)
        except BaseException as exc:
            known = isinstance(exc, TensorVineError) and not isinstance(exc, OperationTimeoutError)
            if not known or isinstance(exc, ShardUnavailableError):  # it may be sending
                self._begin(None)
            raise
        if answer.life != self._life:
            self._begin(answer.life)
        for epoch in answer.over:
            self._leave(epoch)
        return answer

    def _received(self, answer: GroupAnswer, deadline: Deadline, what: str) -> dict[SegmentId, Received]:
        group = self._group(answer, deadline, what)
        memories = [self._buffers.take(parcel.nbytes) for parcel in answer.parcels]
        parts = [part for m, parcel in zip(memories, answer.parcels, strict=True) for part in cut(m, parcel.lengths)]
        left = deadline.left_for(what)
        if answer.epoch is not None:
            works = [group.ibroadcast(part, 0, timeout=min(answer.seconds, left)) for part in parts]
        else:
            works = [group.irecv(part, 0, timeout=left) for part in parts]
        for work in works:
            work.wait()
        found: dict[SegmentId, Received] = {}
        for memory, parcel in zip(memories, answer.parcels, strict=True):
            found |= unpacked(parcel, self._buffers.block(memory))
        return found

    # ---- groups -----------------------------------------------------------------------------------------

    def _group(self, answer: GroupAnswer, deadline: Deadline, what: str) -> Group:
        """Return the group by which the bytes come; a pair that is not here yet is connected."""
        with self._lock:
            group = self._epochs.get(answer.epoch) if answer.epoch is not None else self._pair
            earlier = [epoch for epoch in self._epochs if answer.epoch is not None and epoch < answer.epoch]
        for epoch in earlier:
            self._leave(epoch)
        if group is not None and group.epoch == (answer.epoch if answer.epoch is not None else answer.pair):
            return group
        if answer.pair is None or answer.pair == self._asked_with or self._closed:
            raise PeerLostError(f"{what}: expected to be in {_group_of(answer)}; it was left just now")
        if group is not None:
            group.close()
        name = f"{answer.life}/{PAIR}/{self._member}"
        made = self._connected(name, Seat(answer.pair, 1, 2), min(deadline.left_for(what), CONNECT_S))
        with self._lock:
            self._pair = made
        if self._closed:
            self._begin(None)
        return made

    def _join_soon(self, life: str, seat: Seat) -> None:
        """Join a group with others, which may take until all of them have asked."""

        def join() -> None:
            try:
                group = self._connected(f"{life}/{ALL}", seat, JOIN_S)
            except TROUBLE as exc:
                log.info("%s: epoch %d was not joined: %s", life, seat.epoch, exc)
                return
            with self._lock:
                wanted = not self._closed and life == self._life
                if wanted:
                    self._epochs[seat.epoch] = group
            if not wanted:
                group.close()

        threading.Thread(target=join, name="tensorvine-join", daemon=True).start()

    def _connected(self, name: str, seat: Seat, timeout: float) -> Group:
        return take_seat(name, seat, self._backend, timeout, self)

    def exchange(self, key: str, rank: int, size: int, card: Card, timeout: float) -> Cards:
        """Meet at the shard, so there is nobody else to fail; see `Rendezvous.exchange`."""
        request = ShardCalls.meet(key, rank, size, dict(card), timeout)
        return self._session.call(self._shard, request, timeout + MEET_S)

    def _part(self, answer: GroupAnswer) -> None:
        """Close the group of an answer."""
        if answer.epoch is not None:
            self._leave(answer.epoch)
            return
        with self._lock:
            pair, self._pair = self._pair, None
        if pair is not None:
            pair.close()

    def _leave(self, epoch: int) -> None:
        with self._lock:
            group = self._epochs.pop(epoch, None)
        if group is not None:
            group.close()

    def _begin(self, life: str | None) -> None:
        """Close what there is: the shard has another life, or this end may not be trusted any more."""
        with self._lock:
            self._life = life
            groups = [*self._epochs.values(), *([self._pair] if self._pair is not None else [])]
            self._pair = None
            self._epochs.clear()
        for group in groups:
            group.close()


def _group_of(answer: GroupAnswer) -> str:
    return f"{answer.life}: " + (f"pair {answer.pair}" if answer.epoch is None else f"epoch {answer.epoch}")


def _with_digests(found: Mapping[SegmentId, Received], known: Digests, what: str) -> dict[SegmentId, Received]:
    lost = sorted(found.keys() - known.keys())
    if lost:
        raise ModelLostError(f"{what}: expected content hashes of segments {lost}; they were let go")
    return {s: replace(part, digests={slot: known[s][slot] for slot in part.offsets}) for s, part in found.items()}
