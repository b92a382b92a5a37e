"""How long an actor may answer for what it keeps: where a network is cut, its next incarnation may run by then.

Rules (docs/design/hosts.md)
- A shard enters itself at the head of the cluster (`registry`), and asks there again and again whether it still is the
  one. Each answer that it is gives it a lease, from when it was asked. Without a lease it answers for no version,
  commits none, has no part in those of others and changes no file, and the readers of its node see on its version page
  that the lease is over.
- A planner does so, too. Without a lease it decides on no topology.
- The next incarnation enters itself in its place, and answers nothing before the former's lease has run out. A former
  one of its own node has ended, which is quicker to see.
- A lease is counted on the monotonic clock of its machine alone; no two machines compare their clocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import select
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ...store.errors import OperationTimeoutError, ShardUnavailableError, TensorVineError
from ...store.waiting import NEVER, Backoff, Deadline
from ..rpc.registry import Registry
from .ticker import Ticker

log = logging.getLogger(__name__)

LEASE_S = 5.0
"""How long one answer of the head is good for."""
RENEW_S = 1.5
"""How often the head is asked."""
MARGIN_S = 0.1
"""How much longer the next incarnation waits: clocks may run a little apart."""
PAUSE_S = 0.05
"""Between two looks of who waits for the lease."""

_R = TypeVar("_R")


class LapsedError(ShardUnavailableError):
    """A shard has no lease and refused a call. Its next incarnation may be elsewhere."""


def _unseen(ends: float) -> None:
    """Show a lease to nobody."""


class Tenure:
    """The lease of one incarnation of an actor. Made when it starts; a former one's is over by then.

    Args:
        registry: keeps who the actor is.
        actor: "shard 3" or "planner".
        node: where this incarnation runs.
        show: told the end of each lease, of `time.monotonic`.
    """

    def __init__(self, registry: Registry, actor: str, node: str, show: Callable[[float], None] = _unseen) -> None:
        self._registry = registry
        self._actor = actor
        self._show = show
        self._entry = json.dumps([node, os.getpid(), secrets.token_hex(8)]).encode()
        self._ends = 0.0
        self._over = ""
        """Why there will be no lease any more."""
        self._turn = threading.Lock()
        self._reached = True
        """The head answered last time."""
        _outlast(self._enter(), node, actor)
        self._keep()
        Ticker("tenure", actor, lambda: RENEW_S, self._keep)

    @property
    def holds(self) -> bool:
        """Whether the actor may answer for what it keeps."""
        return time.monotonic() < self._ends

    def end(self) -> None:
        """Hold no lease from now on."""
        with self._turn:
            self._over, self._ends = "the actor was stopped", 0.0
            self._show(0.0)

    def check(self) -> None:
        """Refuse to answer while the actor may not.

        Raises:
            LapsedError: it may not, for now or for good.
        """
        if not self.holds:
            raise LapsedError(self._lapsed())

    async def during(self, work: Coroutine[Any, Any, _R]) -> _R:
        """Return the result of a call of another shard; cancel the call when the lease ends.

        Raises:
            LapsedError: the lease has ended.
        """
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                self.check()
                await asyncio.wait([task], timeout=PAUSE_S)
            return await task
        finally:
            task.cancel()

    def check_running(self) -> None:
        """Refuse to answer for good, without regard to the lease.

        Raises:
            ShardUnavailableError: the actor was stopped, or another process has replaced it.
        """
        if self._over:
            raise ShardUnavailableError(self._lapsed())

    async def held(self, deadline: Deadline) -> None:
        """Wait until the actor may answer.

        Raises:
            ShardUnavailableError: it never will: another one is in its place, or it was stopped.
            OperationTimeoutError: it may not yet.
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

    def _is_to_come(self) -> bool:
        """Tell whether there is no lease just now; that there will be none any more is an error."""
        if self._over:
            self.check()
        return not self.holds

    def _lapsed(self) -> str:
        reason = self._over or "the head does not answer"
        return f"{self._actor}: expected the head of the cluster to renew its lease; {reason}"

    def _enter(self) -> bytes | None:
        """Take the actor's place, however long the head takes to say so; give who was in it."""
        pauses = Backoff(RENEW_S, RENEW_S)
        while True:
            try:
                return self._registry.enter(self._actor, self._entry)
            except TensorVineError as exc:
                log.warning("%s is waiting for the head of the cluster: %s", self._actor, exc)
            pauses.wait()

    def _renew(self) -> None:
        asked = time.monotonic()
        if self._registry.tenure(self._actor) == self._entry:
            with self._turn:
                if not self._over:
                    self._ends = asked + LEASE_S
                    self._show(self._ends)
        else:
            self._over = "another process has replaced it"
            log.error("%s; it no longer answers until the head of the cluster does: check the head", self._lapsed())

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


def _outlast(former: bytes | None, node: str, actor: str) -> None:
    """Wait until a former incarnation answers nothing more: it has ended, or its last lease is over."""
    if former is None:
        return
    over = Deadline.after(LEASE_S + MARGIN_S)
    where, pid, _ = json.loads(former)
    if where == node:
        _await_end(pid, over)
        return
    log.info(
        "%s: its previous incarnation ran on another node, waiting %.1f s for the end of its lease", actor, over.left()
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
