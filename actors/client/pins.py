"""The pins of one client: taken by saves and prefix queries, kept by matches.

Rules
- Each pin belongs to a save or a query (`holders.Lease`). One that fails or is interrupted is aborted on every shard,
  which drops its pins there and refuses its requests that arrive later.
- `abort` and `unpin` are sent again until the shard has answered or left: no pin stays because a message or its answer
  was lost. Where an interrupt ends `abort` itself, the query is aborted when it is garbage.
- Pins that are removed without waiting are queued. The session's thread sends those of `GATHER_S` as one message.
- Each message that is not answered yet occupies a connection, so a shard has at most `UNANSWERED` of them at a time.
- A shard that restarted, or whose session of this client lapsed, has lost its pins. The next renewal finds that: it
  pins again what still lives, and a match on what was retired meanwhile raises from then on. Both are logged.
- The owner of a pin or an operation may become garbage at any moment. The callback is the queue's `put`, which is C
  code: no exception of a signal handler interrupts it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Protocol, TypeVar

from ...planner.topology import Topology
from ...store.errors import ModelLostError, ModelNotFoundError, MovedError, OperationTimeoutError, TensorVineError
from ...store.holders import Lease, Query, Save
from ...store.refs import ModelRef
from ..engine.opened import Opened
from ..rpc.calls import Request
from ..rpc.channel import Answer
from ..shard.calls import ShardCalls

log = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 30.0
GATHER_S = 0.005
"""How long pins gather that are removed by one message."""
RETRY_S = 0.05
"""How soon a shard is asked again that had too many unanswered messages."""
UNANSWERED = 8

Operation = Save | Query
_R = TypeVar("_R")


class _Session(Protocol):
    """What pins need of their session; see `Session`."""

    client: str
    opened: Opened
    topology: Topology
    stopped: bool

    def home(self, name: str) -> int: ...
    def refresh(self) -> None: ...
    def reopen(self, shard: int) -> None: ...
    def send(self, shard: int, request: Request[_R]) -> Answer[_R]: ...
    def at_home(self, name: str, request: Request[_R]) -> _R: ...
    def broadcast(self, request: Request[_R]) -> list[_R]: ...
    def call_each(self, requests: Mapping[int, Request[_R]], timeout: float) -> list[_R]: ...
    def poll(self, request: Request[_R], timeout: float) -> dict[int, _R | TensorVineError]: ...


class Owned(weakref.ref[object]):
    """A reference to the owner of a pin or an operation, which is removed or aborted when the owner is garbage."""

    __eq__, __hash__ = object.__eq__, object.__hash__
    pinned: Lease | Operation


class Asked:
    """A query under way, or a save that was announced: it is aborted when this is garbage, unless it was `kept`.

    Args:
        operation: the query or save.
        pins: aborts it.
    """

    def __init__(self, operation: Operation, pins: Pins) -> None:
        self.operation = operation
        self._pins = pins
        self._owned = pins.own(self, operation)

    def abort(self) -> None:
        """Drop what it pinned and staged, on every shard, now."""
        self._pins.abort(self.operation)
        self.kept()

    def kept(self) -> None:
        """Leave its pins to the matches that have them, or to a commit that ended it."""
        self._pins.disown(self._owned)


class Pins:
    """The pins of one client.

    Args:
        session: calls the shards; its thread calls `tidy` and `renew`.
    """

    def __init__(self, session: _Session) -> None:
        self._session = session
        self._queries = count(1)
        self._held: dict[Lease, ModelRef] = {}
        """What matches have pinned."""
        self._lost: dict[Lease, str] = {}
        """Pins that went with a session and could not be made again -> why."""
        self._owned: set[Owned] = set()
        """References that count; it keeps them alive."""
        self._dropped: queue.SimpleQueue[Lease | Owned | None] = queue.SimpleQueue()
        """What is to be unpinned or aborted; None: only wakes the thread."""
        self._unsent: deque[tuple[int, Save | Query | list[Lease]]] = deque()
        """What each shard is still to be asked to abort or unpin."""
        self._sent: deque[tuple[int, Save | Query | list[Lease], Answer[None] | None]] = deque()
        """What each shard was asked to abort or unpin, and its answer to come; None: it could not be asked."""

    def query(self) -> tuple[Query, Asked]:
        """Number a prefix query."""
        query = Query(self._session.client, next(self._queries))
        return query, Asked(query, self)

    def hold(self, lease: Lease, ref: ModelRef) -> None:
        """Keep a pin alive until it is removed."""
        self._held[lease] = ref

    def own(self, owner: object, pinned: Lease | Operation) -> Owned:
        """Have a pin removed, or an operation aborted, soon after its owner has become garbage."""
        owned = Owned(owner, self._dropped.put)
        owned.pinned = pinned
        self._owned.add(owned)
        return owned

    def disown(self, owned: Owned) -> None:
        """Undo `own`; a second call is no error."""
        self._owned.discard(owned)

    def is_owned(self, owned: Owned) -> bool:
        """Tell whether `own` is still in force."""
        return owned in self._owned

    def check(self, lease: Lease) -> None:
        """Check that a pin was not lost.

        Raises:
            ModelNotFoundError: it was, and its version does not live any longer.
        """
        if lease in self._lost:
            raise ModelNotFoundError(self._lost[lease])

    # ---- removing -------------------------------------------------------------------------------------

    def abort(self, operation: Save | Query, shards: Iterable[int] | None = None) -> None:
        """Drop what an operation pinned and staged; does not wait.

        Args:
            operation: the save or query.
            shards: the ones that may have something of it; None: all.
        """
        for shard in self._session.topology.alive if shards is None else shards:
            self._send(shard, operation)

    def unpin(self, leases: Sequence[Lease]) -> None:
        """Remove pins and wait: what they kept may be freed when this returns. Does nothing once the client is closed.

        Raises:
            TensorVineError: a shard did not answer; it is asked again until it does.
        """
        if self._session.opened.closed:
            return
        self._forget(leases)
        requests = {shard: ShardCalls.unpin(part) for shard, part in self._by_shard(leases).items()}
        try:
            self._session.call_each(requests, CONTROL_TIMEOUT_S)
        except MovedError:  # one that gave some has drained just now
            self._session.broadcast(ShardCalls.unpin(list(leases)))
        except BaseException:
            self._unsent.extend((lease.shard, [lease]) for lease in leases)
            raise

    def unpin_behind(self, leases: Sequence[Lease]) -> None:
        """Remove pins soon; does not wait. Does nothing once the client is closed."""
        if self._session.opened.closed:
            return
        self._forget(leases)
        for lease in leases:
            self._dropped.put(lease)

    def _forget(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self._held.pop(lease, None)
            self._lost.pop(lease, None)

    def _by_shard(self, leases: Sequence[Lease]) -> dict[int, list[Lease]]:
        """Sort pins by the shards to ask: the ones that pinned first, or all where that one has left."""
        alive = self._session.topology.alive
        found = {shard: [one for one in leases if one.shard == shard or one.shard not in alive] for shard in alive}
        return {shard: part for shard, part in found.items() if part}

    def _send(self, shard: int, what: Save | Query | list[Lease]) -> None:
        """Have a shard abort or unpin; `tidy` sends that again until the shard has answered or left."""
        if sum(other == shard for other, _, _ in list(self._sent)) >= UNANSWERED:
            self._unsent.append((shard, what))
            return
        request = ShardCalls.unpin(what) if isinstance(what, list) else ShardCalls.abort(what)
        answer = None
        try:
            answer = self._session.send(shard, request)
        except TensorVineError as exc:
            log.debug("shard %d: sending %s again: %s", shard, request, exc)
        self._sent.append((shard, what, answer))

    # ---- the session's thread -------------------------------------------------------------------------

    def wait(self, timeout: float, closing: threading.Event) -> None:
        """Wait for something to remove, `timeout` seconds at most, and a moment longer for more of it."""
        with contextlib.suppress(queue.Empty):
            self._dropped.put(self._dropped.get(timeout=RETRY_S if self._unsent else timeout))
            closing.wait(GATHER_S)

    def wake(self) -> None:
        """End `wait`."""
        self._dropped.put(None)

    def tidy(self) -> None:
        """Remove what is queued, and send again what failed."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._sort(self._dropped.get(block=False))
        self._confirm()
        leases: list[Lease] = []
        for _ in range(len(self._unsent)):
            shard, what = self._unsent.popleft()
            if isinstance(what, list):
                leases += what
            elif shard in self._session.topology.alive:
                self._send(shard, what)
        self._forget(leases)
        for shard, part in self._by_shard(leases).items():
            self._send(shard, part)

    def _sort(self, dropped: Lease | Owned | None) -> None:
        """Note which shards are to be asked."""
        if isinstance(dropped, Owned) and dropped not in self._owned:  # disowned meanwhile
            return
        pinned = dropped.pinned if isinstance(dropped, Owned) else dropped
        if isinstance(pinned, Lease):
            self._unsent.append((pinned.shard, [pinned]))
        elif pinned is not None:
            self._unsent.extend((shard, pinned) for shard in self._session.topology.alive)
        if isinstance(dropped, Owned):
            self._owned.discard(dropped)

    def renew(self, timeout: float) -> None:
        """Renew the session at all shards, and pin again what some have lost.

        Raises:
            TensorVineError: a shard did not answer; the others were renewed.
        """
        held = dict(self._held)
        answers = self._session.poll(ShardCalls.renew(self._session.client, list(held)), timeout)
        for shard, answer in answers.items():
            if answer is None:
                self._session.reopen(shard)
        kept = {lease for answer in answers.values() if isinstance(answer, list) for lease in answer}
        for lease, ref in held.items():
            if lease not in kept and not isinstance(answers.get(self._session.home(ref.name)), TensorVineError):
                self._pin_again(lease, ref)
        for answer in answers.values():
            if isinstance(answer, TensorVineError):
                raise answer

    def _pin_again(self, lease: Lease, ref: ModelRef) -> None:
        """Pin a version whose pin a shard has lost."""
        if lease not in self._held:  # removed meanwhile
            return
        try:
            self._session.at_home(ref.name, ShardCalls.pin(lease, ref))
        except (ModelNotFoundError, ModelLostError) as exc:
            self._held.pop(lease, None)
            self._lost[lease] = (
                f"{ref}: expected it to be pinned; its pin expired with the session, and cannot be renewed: {exc}"
            )
            log.error("client %s: %s", self._session.client, self._lost[lease])
            return
        log.warning("client %s: the pin of %s had expired with the session; pinned again", lease.client, ref)
        if lease not in self._held:
            self._dropped.put(lease)

    def _confirm(self) -> None:
        """Take off what was answered; what failed is to be sent again."""
        failed = False
        for _ in range(len(self._sent)):
            shard, what, answer = self._sent.popleft()
            if shard not in self._session.topology.alive:
                if isinstance(what, list):  # its names are elsewhere: all are asked
                    self._unsent.append((shard, what))
                continue
            try:
                if answer is not None:
                    answer.result(0.0)
                    continue
            except OperationTimeoutError:
                self._sent.append((shard, what, answer))
                continue
            except TensorVineError as exc:
                log.info("shard %d may still keep pins of %s, asking again: %s", shard, self._session.client, exc)
            failed = True
            self._unsent.append((shard, what))
        if failed:
            self._session.refresh()
            if self._session.stopped:  # all pins went with the repository
                self._sent.clear()
                self._unsent.clear()
