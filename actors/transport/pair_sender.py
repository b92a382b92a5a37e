"""A shard's end of the groups by which readers get its bytes: a group of two, a pair, with each reader.

Rules
- A question is answered before its bytes are sent: with what comes, and by which pair. A reader has one question at a
  time, so that messages come in the order of its questions.
- Bytes are sent from where they lie in the shard's memory, and are kept there meanwhile.
- A pair in which something went wrong is closed. The reader finds that out by itself, and asks again.
- What blocks has a thread of its own.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count

from ...store.errors import OperationTimeoutError, ShardUnavailableError, TensorVineError
from ...store.segments.segment import SegmentId
from ...store.waiting import Deadline
from ..collective.group import Group
from ..collective.rendezvous import Rendezvous
from . import backends
from .frames import Served, Slots
from .parcels import PairAnswer, PairQuestion, packed

log = logging.getLogger(__name__)

CONNECT_S = 20.0
"""How long a reader that was told of its pair may take to connect."""
IDLE_S = 300.0
"""How long a pair is kept without use."""

Find = Callable[[Slots, float], Mapping[SegmentId, Served]]
"""(slots, seconds) -> what has them, kept in place."""


@dataclass(slots=True, eq=False)
class _Pair:
    """A group of the shard and one reader."""

    name: str
    group: Group | None = None
    """None: it is not connected yet."""
    idle_since: float | None = None
    """Of `time.monotonic`; None: it is in use."""


class PairSender:
    """Sends to readers by pairs of one back end.

    Args:
        backend: what carries the bytes.
        label: names the shard.
        find: gives what the shard has.
        rendezvous: where readers and the shard meet.
    """

    def __init__(self, backend: str, label: str, find: Find, rendezvous: Rendezvous) -> None:
        self._backend = backend
        self._label = f"{label}/{secrets.token_hex(4)}"
        """Begins the names of pairs: those of a shard that started again are others."""
        self._find = find
        self._rendezvous = rendezvous
        self._numbers = count(1)
        self._pairs: dict[str, _Pair] = {}
        """Reader -> its pair."""
        self._lock = threading.Lock()

    def ask(self, member: str, question: PairQuestion) -> Future[PairAnswer]:
        """Take a reader's question; the answer comes when it is known what is sent.

        Raises, with the answer:
            ShardUnavailableError: the back end cannot be used here.
            ModelLostError: a segment is not there any more.
        """
        answer: Future[PairAnswer] = Future()
        answer.set_running_or_notify_cancel()  # who asked cannot withdraw what is being sent
        _in_thread(lambda: self._send(member, question, answer))
        return answer

    def left(self, client: str) -> None:
        """Close the pairs of a client that is gone."""
        self._part(lambda member, pair: member.partition(".")[0] == client)

    def close_idle(self, now: float) -> None:
        """Close the pairs that nobody has used for `IDLE_S`."""
        self._part(lambda member, pair: pair.idle_since is not None and pair.idle_since + IDLE_S <= now)

    def close(self) -> None:
        """Close all pairs."""
        self._part(lambda member, pair: True)

    # ---- one question -----------------------------------------------------------------------------------

    def _send(self, member: str, question: PairQuestion, answer: Future[PairAnswer]) -> None:
        """Answer a question, and send what it asks for."""
        deadline = Deadline.after(question.timeout)
        try:
            backends.load(self._backend, self._label)
            parcels, messages = packed(self._find(question.places, deadline.left()))
        except TensorVineError as exc:
            answer.set_exception(exc)
            return
        except Exception as exc:
            log.exception("%s: an answer to %s failed", self._label, member)
            answer.set_exception(ShardUnavailableError(f"{self._label}: expected an answer; {exc!r}"))
            return
        pair = self._used(member, question.pair)
        answer.set_result(PairAnswer(pair.name, parcels))
        try:
            group = pair.group if pair.group is not None else self._connected(member, pair, deadline)
            works = [group.isend(message, 1, timeout=deadline.left()) for message in messages]
            for work in works:
                work.wait()
        except backends.TROUBLE as exc:
            log.info("%s: the pair %s with %s is closed: %s", self._label, pair.name, member, exc)
            self._part(lambda member, other: other is pair)
        else:
            pair.idle_since = time.monotonic()

    def _used(self, member: str, theirs: str | None) -> _Pair:
        """Return the pair that the reader has, if it is ours; or a new one, which is to be connected."""
        with self._lock:
            known = self._pairs.get(member)
            if known is not None and known.group is not None and known.name == theirs:
                known.idle_since = None
                return known
            made = self._pairs[member] = _Pair(f"{self._label}/{next(self._numbers)}")
        if known is not None:
            _close_soon(known.group)
        return made

    def _connected(self, member: str, pair: _Pair, deadline: Deadline) -> Group:
        group = backends.connect_pair(pair.name, 0, self._backend, deadline.left(CONNECT_S), self._rendezvous)
        with self._lock:
            if self._pairs.get(member) is pair:
                pair.group = group
                return group
        group.close()
        raise OperationTimeoutError(f"{pair.name}: expected {member} to wait for it; it has left or asked again")

    def _part(self, which: Callable[[str, _Pair], bool]) -> None:
        """Close the pairs of which this is true."""
        with self._lock:
            parted = {member: pair for member, pair in self._pairs.items() if which(member, pair)}
            for member in parted:
                del self._pairs[member]
        for pair in parted.values():
            _close_soon(pair.group)


def _in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="tensorvine-pair", daemon=True).start()


def _close_soon(group: Group | None) -> None:
    """Close a group, which may take a moment, in a thread."""
    if group is not None:
        _in_thread(group.close)
