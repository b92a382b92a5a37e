"""A shard's end of the groups by which readers get its bytes: a pair with each, and one with each steady set.

Rules
- `planner.runs.gathering` decides who is served together; this file sends. What blocks has a thread of its own.
- A question is answered before its bytes are sent: with what comes, and by which group. A reader has one question at a
  time, so that messages come in the order of its questions.
- Bytes are sent from where they lie in the shard's memory, and are kept there meanwhile.
- A group in which something went wrong is closed. The reader finds that out by itself, and asks again.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from ...planner.runs.gathering import (
    IDLE_S,
    WINDOW_S,
    Alone,
    Ask,
    Connect,
    Drop,
    End,
    Gathering,
    Seat,
    Step,
    Together,
)
from ...store.errors import OperationTimeoutError, ShardUnavailableError, TensorVineError
from ...store.segments.segment import SegmentId
from ..collective.group import Group
from ..collective.rendezvous import Rendezvous
from . import backends
from .frames import Served, Slots
from .parcels import GroupAnswer, GroupQuestion, Parcel, packed

log = logging.getLogger(__name__)

CONNECT_S = 20.0
"""How long a reader that was told of its pair may take to connect."""
JOIN_S = 60.0
"""How long the members of an epoch may take to join it: each is told when it asks next."""
STALL_S = 5.0
"""How long a broadcast may take at least, where the questions have so much time."""
SLOWEST_BYTES_PER_S = 50e6
PAIR, ALL = "pair", "all"

Find = Callable[[Slots, float], Mapping[SegmentId, Served]]
"""(slots, seconds) -> what has them, kept in place."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A question that has no answer yet."""

    member: str
    question: GroupQuestion
    deadline: float
    future: Future[GroupAnswer] = field(default_factory=Future[GroupAnswer])

    @property
    def left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.001)


@dataclass(slots=True, eq=False)
class _Pair:
    """A group of the shard and one reader."""

    number: int
    used: float
    group: Group | None = None
    """None: it is being connected."""


class GroupSender:
    """Sends to readers by groups of one back end.

    Args:
        backend: what carries the bytes.
        label: names the shard.
        find: gives what the shard has.
        rendezvous: where readers and the shard meet.
        window_s: how long members of a steady set are waited for.
    """

    def __init__(
        self, backend: str, label: str, find: Find, rendezvous: Rendezvous, window_s: float = WINDOW_S
    ) -> None:
        self.life = f"{label}/{secrets.token_hex(4)}"
        self._backend = backend
        self._find = find
        self._rendezvous = rendezvous
        self._gathering = Gathering(window_s)
        self._changed = threading.Condition(threading.RLock())
        self._numbers = count(1)
        self._pending: dict[int, _Pending] = {}
        """Number of an ask -> its question; those that no step has named."""
        self._pairs: dict[str, _Pair] = {}
        self._epochs: dict[int, Group] = {}
        self._closed = False
        self.served_together = 0
        """Broadcasts that brought all to all."""
        self._clock = threading.Thread(target=self._run, name=f"tensorvine-{backend}", daemon=True)
        self._clock.start()

    def ask(self, member: str, question: GroupQuestion) -> Future[GroupAnswer]:
        """Take a question; the answer comes when it is known how the bytes go.

        Raises, with the answer:
            ShardUnavailableError: the back end cannot be used here.
            ModelLostError: a segment is not there any more.
            OperationTimeoutError: the reader left, or asked anew.
        """
        now = time.monotonic()
        pending = _Pending(member, question, now + question.timeout)
        known = frozenset(question.epochs if question.life == self.life else ())
        alone = question.alone or question.timeout < 2 * self._gathering.window_s
        places = frozenset((segment, tuple(slots)) for segment, slots in question.places.items())
        with self._changed:
            number = next(self._numbers)
            self._pending[number] = pending
            self._carry_out(self._gathering.asked(Ask(number, member, places, known, alone), now))
            self._changed.notify_all()
        return pending.future

    def left(self, client: str) -> None:
        """Close what connects the readers of a client that is gone."""
        with self._changed:
            members = {m for m in (*self._pairs, *self._gathering.known) if m.partition(".")[0] == client}
            for member in members:
                self._carry_out(self._gathering.left(member))
                self._part(member, self._pairs.get(member))

    def close(self) -> None:
        """Close all groups."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            groups = [pair.group for pair in self._pairs.values()] + list(self._epochs.values())
            self._pairs.clear()
            self._epochs.clear()
        self._clock.join()
        for group in groups:
            if group is not None:
                group.close()

    # ---- what was decided -------------------------------------------------------------------------------

    def _carry_out(self, steps: Sequence[Step]) -> None:
        """Do what the gathering decided, in threads. Call it with the lock held."""
        for step in steps:
            match step:
                case Alone(ask, invited):
                    _in_thread(self._send_alone, self._pending.pop(ask.number), invited)
                case Together(epoch, asks, invited):
                    _in_thread(self._send_together, epoch, [self._pending.pop(ask.number) for ask in asks], invited)
                case Connect(epoch, members):
                    _in_thread(self._connect, epoch, len(members) + 1)
                case End(epoch, why):
                    log.info("%s: epoch %d ended: %s", self.life, epoch, why)
                    _close_soon(self._epochs.pop(epoch, None))
                case Drop(ask):
                    late = OperationTimeoutError(f"{self.life}: {ask.member} has left, or asked anew")
                    self._pending.pop(ask.number).future.set_exception(late)

    def _run(self) -> None:
        """Take notice of the time."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                self._carry_out(self._gathering.passed(now))
                for member, pair in list(self._pairs.items()):
                    if pair.group is not None and pair.used + IDLE_S <= now:
                        self._part(member, pair)
                due = [pair.used + IDLE_S for pair in self._pairs.values() if pair.group is not None]
                due += [self._gathering.due] if self._gathering.due is not None else []
                self._changed.wait(max(min(due) - now, 0.001) if due else None)

    # ---- by itself --------------------------------------------------------------------------------------

    def _send_alone(self, pending: _Pending, invited: Seat | None) -> None:
        with _answering([pending]):
            backends.load(self._backend, self.life)
            parcels, messages = packed(self._find(pending.question.places, pending.left))
            pair = self._paired(pending)
            pending.future.set_result(self._answer(pending, parcels, invited, pair=pair.number))
            try:
                group = pair.group if pair.group is not None else self._connected(pending, pair)
                works = [group.isend(message, 1, timeout=pending.left) for message in messages]
                for work in works:
                    work.wait()
            except backends.TROUBLE as exc:
                log.info("%s: pair %d with %s is closed: %s", self.life, pair.number, pending.member, exc)
                self._part(pending.member, pair)
            else:
                pair.used = time.monotonic()

    def _paired(self, pending: _Pending) -> _Pair:
        """Return the pair that the reader has, if it is ours; or a new one, which is to be connected."""
        with self._changed:
            known = self._pairs.get(pending.member)
            theirs = pending.question.pair if pending.question.life == self.life else None
            if known is not None and known.group is not None and known.number == theirs:
                known.used = time.monotonic()
                return known
            self._part(pending.member, known)
            pair = self._pairs[pending.member] = _Pair(next(self._numbers), time.monotonic())
            return pair

    def _connected(self, pending: _Pending, pair: _Pair) -> Group:
        name = f"{self.life}/{PAIR}/{pending.member}"
        seconds = min(pending.left, CONNECT_S)
        group = backends.take_seat(name, Seat(pair.number, 0, 2), self._backend, seconds, self._rendezvous)
        with self._changed:
            if self._pairs.get(pending.member) is pair:
                pair.group = group
                self._changed.notify_all()
                return group
        group.close()
        raise OperationTimeoutError(f"{name}: the reader has left, or asked anew")

    def _part(self, member: str, pair: _Pair | None) -> None:
        """Close a pair, if there is one."""
        with self._changed:
            if pair is not None and self._pairs.get(member) is pair:
                del self._pairs[member]
        if pair is not None:
            _close_soon(pair.group)

    # ---- together ---------------------------------------------------------------------------------------

    def _connect(self, epoch: int, size: int) -> None:
        """Connect an epoch's group."""
        name = f"{self.life}/{ALL}"
        try:
            backends.load(self._backend, self.life)
            group = backends.take_seat(name, Seat(epoch, 0, size), self._backend, JOIN_S, self._rendezvous)
        except backends.TROUBLE as exc:
            log.info("%s: epoch %d: not connected: %s", self.life, epoch, exc)
            with self._changed:
                self._carry_out(self._gathering.failed(epoch, str(exc)))
            return
        with self._changed:
            self._epochs[epoch] = group
            self._carry_out(self._gathering.joined(epoch, time.monotonic()))
            lost = self._closed or not self._gathering.members(epoch)
            if lost:  # who was to join has left meanwhile
                del self._epochs[epoch]
            self._changed.notify_all()
        if lost:
            group.close()

    def _send_together(self, epoch: int, all_pending: Sequence[_Pending], invited: Sequence[Seat | None]) -> None:
        with self._changed:
            group = self._epochs.get(epoch)
        if group is None:  # it ended just now
            for pending, seat in zip(all_pending, invited, strict=True):
                _in_thread(self._send_alone, pending, seat)
            return
        with _answering(all_pending):
            left = min(pending.left for pending in all_pending)
            parcels, messages = packed(self._find(all_pending[0].question.places, left))
            nbytes = sum(parcel.nbytes for parcel in parcels)
            left = min(pending.left for pending in all_pending)
            seconds = min(left / 2, STALL_S + nbytes / SLOWEST_BYTES_PER_S)
            for pending, seat in zip(all_pending, invited, strict=True):
                pending.future.set_result(self._answer(pending, parcels, seat, epoch=epoch, seconds=seconds))
            try:
                works = [group.ibroadcast(message, 0, timeout=seconds) for message in messages]
                for work in works:
                    work.wait()
            except backends.TROUBLE as exc:
                with self._changed:
                    self._carry_out(self._gathering.failed(epoch, str(exc)))
                return
            with self._changed:
                self.served_together += 1
                self._gathering.succeeded(epoch)

    def _answer(
        self,
        pending: _Pending,
        parcels: tuple[Parcel, ...],
        invited: Seat | None,
        *,
        pair: int | None = None,
        epoch: int | None = None,
        seconds: float = 0.0,
    ) -> GroupAnswer:
        theirs = pending.question.epochs if pending.question.life == self.life else ()
        with self._changed:
            over = self._gathering.over(theirs)
        return GroupAnswer(self.life, parcels, pair, epoch, seconds, invited, over)


@contextlib.contextmanager
def _answering(all_pending: Sequence[_Pending]) -> Generator[None]:
    """Answer with what goes wrong, as long as there is no answer."""
    try:
        yield
    except Exception as exc:
        error = exc if isinstance(exc, TensorVineError) else ShardUnavailableError(f"expected an answer; {exc!r}")
        for pending in all_pending:
            if not pending.future.done():
                pending.future.set_exception(error)
        if error is not exc:
            log.exception("an answer failed")


def _in_thread(work: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=work, args=arguments, name="tensorvine-group", daemon=True).start()


def _close_soon(group: Group | None) -> None:
    """Close a group, which may take a moment, in a thread."""
    if group is not None:
        _in_thread(group.close)
