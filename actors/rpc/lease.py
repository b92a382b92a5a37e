"""The lease of an actor's process: where a network is cut, another process of the actor may run by now.

Rules (docs/design/catalog.md, *term*)
- A process enters itself at the head of the cluster (`Registry.take`), which gives it a number above all before, and
  asks there every 1.5 s whether its entry is still there and the highest. Each yes gives it a lease of 5 s, from when
  it asked.
- The next process enters itself, and waits until the one before has ended (on its own node), or its lease is over.
- A lease is counted on the monotonic clock of its machine alone; no two machines compare their clocks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from ...store.errors import OperationTimeoutError, ShardUnavailableError, TensorVineError
from ...store.waiting import NEVER, Backoff, Deadline
from .registry import Registry
from .ticker import Ticker

log = logging.getLogger(__name__)

LEASE_S = 5.0
"""How long one answer of the head is good for."""
RENEW_S = 1.5
"""How often the head is asked."""
MARGIN_S = 0.1
"""How much longer the next process waits: clocks may run a little apart."""
PAUSE_S = 0.05
"""Between two looks of a thread that waits for the lease."""


def _unseen(ends: float) -> None:
    """No-op callback for actors without a version page."""


class Lease:
    """The lease of one process of an actor. When this is made, the leases of the processes before are over.

    Args:
        registry: keeps who the actor is.
        actor: "shard-3", "planner" or "catalog".
        node: where this process runs.
        show: given the end of each lease, of `time.monotonic`.
        above: its number is to be above this one.
    """

    def __init__(
        self,
        registry: Registry,
        actor: str,
        node: str,
        show: Callable[[float], None] = _unseen,
        above: int = 0,
    ) -> None:
        self._registry = registry
        self._actor = actor
        self._show = show
        self.token = secrets.token_bytes(16)
        """Tells this process from all others."""
        self._node = node
        self._entry = self._entry_of("")
        self._above = above
        self._ends = 0.0
        self._over = ""
        """Why there will be no lease any more."""
        self._turn = threading.Lock()
        self._reached = True
        """The head answered last time."""
        self.number, before = self._enter()
        """The term of a catalog, the incarnation of a shard."""
        self.before: Mapping[int, str] = {number: json.loads(entry)[3] for number, entry in before.items()}
        """What the entries of earlier processes say, by number."""
        _outlast(before.values(), node, actor)
        self._keep()
        Ticker("lease", actor, lambda: RENEW_S, self._keep)

    @property
    def holds(self) -> bool:
        """Whether the actor may decide now."""
        return time.monotonic() < self._ends

    @property
    def is_over(self) -> bool:
        """Whether there will be no lease any more: the actor was stopped, or another process has replaced it."""
        return bool(self._over)

    def end(self) -> None:
        """Hold no lease from now on."""
        with self._turn:
            self._over, self._ends = "the actor was stopped", 0.0
            self._show(0.0)

    def check(self) -> None:
        """Refuse to decide without a lease.

        Raises:
            ShardUnavailableError: there is none, for now or for good.
        """
        if not self.holds:
            raise ShardUnavailableError(self._lapsed())

    def check_running(self) -> None:
        """Refuse to go on when there will be no lease any more.

        Raises:
            ShardUnavailableError: the actor was stopped, or another process has replaced it.
        """
        if self._over:
            raise ShardUnavailableError(self._lapsed())

    async def held(self, deadline: Deadline) -> None:
        """Wait for the lease.

        Raises:
            ShardUnavailableError: it never comes: another process is in its place, or the actor was stopped.
            OperationTimeoutError: there is none yet.
        """
        pauses = Backoff(PAUSE_S, PAUSE_S)
        while self._is_to_come():
            if not await pauses.wait_async(deadline):
                raise OperationTimeoutError(self._lapsed())

    def wait(self, deadline: Deadline) -> None:
        """Wait as `held` does; for a thread."""
        pauses = Backoff(PAUSE_S, PAUSE_S)
        while self._is_to_come():
            if not pauses.wait(deadline):
                raise OperationTimeoutError(self._lapsed())

    def say(self, about: str) -> None:
        """Have the entry say something else, which the next process reads in `before`.

        Raises:
            ShardUnavailableError: the head does not take it, or this is no longer the actor.
        """
        self.check()
        entry = self._entry_of(about)
        self._registry.renew(self._actor, self.number, entry)
        self._entry = entry

    def forget_earlier(self) -> None:
        """Remove the entries of earlier processes: what they say is not needed any more."""
        self._registry.drop(
            self._actor, [number for number in self._registry.entries(self._actor) if number < self.number]
        )

    def _entry_of(self, about: str) -> bytes:
        return json.dumps([self._node, os.getpid(), self.token.hex(), about]).encode()

    def _is_to_come(self) -> bool:
        """Tell whether there is no lease just now; that there will be none any more is an error."""
        if self._over:
            self.check()
        return not self.holds

    def _lapsed(self) -> str:
        reason = self._over or "the head does not answer"
        return f"{self._actor}: expected the head of the cluster to renew its lease; {reason}"

    def _enter(self) -> tuple[int, dict[int, bytes]]:
        """Take the actor's place, however long the head takes to say so."""
        pauses = Backoff(RENEW_S, RENEW_S)
        while True:
            try:
                return self._registry.take(self._actor, self._entry, self._above)
            except TensorVineError as exc:
                log.warning("%s is waiting for the head of the cluster: %s", self._actor, exc)
            pauses.wait()

    def _renew(self) -> None:
        asked = time.monotonic()
        entries = self._registry.entries(self._actor)
        token = json.loads(entries[self.number])[2] if self.number in entries else ""
        if token == self.token.hex() and max(entries) == self.number:
            with self._turn:
                if not self._over:
                    self._ends = asked + LEASE_S
                    self._show(self._ends)
        else:
            self._over = "another process has replaced it"
            log.error("%s; it no longer decides", self._lapsed())

    def _keep(self) -> None:
        """Take a new lease, if this is the actor still."""
        if self._over:
            return
        try:
            self._renew()
            self._reached = True
        except TensorVineError as exc:
            level = logging.WARNING if self._reached else logging.DEBUG
            log.log(level, "%s: its lease could not be renewed: %s", self._actor, exc)
            self._reached = False


def _outlast(entries: Iterable[bytes], node: str, actor: str) -> None:
    """Wait until earlier processes decide nothing more: they have ended, or their last leases are over."""
    over = Deadline.after(LEASE_S + MARGIN_S)
    elsewhere = False
    for where, pid, *_ in map(json.loads, entries):
        if where == node:
            _await_end(pid, over)
        else:
            elsewhere = True
    if elsewhere:
        log.info(
            "%s: its last process ran on another node, waiting %.1f s for the end of its lease", actor, over.left()
        )
        Backoff(over.left(), over.left()).wait(NEVER)


def _await_end(pid: int, deadline: Deadline) -> None:
    """Wait until a process of this machine has ended. Its id may be another's by now, which takes the whole time."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll(1e3 * deadline.left())
        finally:
            os.close(pidfd)
