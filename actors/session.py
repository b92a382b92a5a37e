"""A client's session: its connections to the shards, its heartbeat, and what it lets go.

Rules
- Calls that may be repeated are repeated until their timeout while a shard restarts; others fail at once.
- A session lasts as long as its heartbeat. One thread per client renews it and lets go of the pins of collected
  matches; it starts with the first save or prefix query and ends with `close`.
- A connection maps the shard's memory when both are on one node: see `memory`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..planner.placement import home_of
from ..store.errors import (
    OperationTimeoutError,
    RepositoryNotFoundError,
    ShardUnavailableError,
    TensorVineError,
)
from .engine import Actor, Engine, Future
from .memory import MemoryView
from .messages import Hello, actor_name, planner_name
from .planner import Topology

log = logging.getLogger(__name__)

TICK_S = 1.0
RENEW_S = 15.0
RETRY_S = 0.05
CONTROL_TIMEOUT_S = 30.0


@dataclass(slots=True)
class Connection:
    """What a client knows of one life of a shard."""

    actor: Actor
    hello: Hello
    view: MemoryView | None
    """Its memory; None when the shard is on another node."""

    def counters(self) -> tuple[int, int] | None:
        """Give the shard's epoch and freeings; None when its board cannot be seen or its process has ended."""
        return self.view.counters() if self.view is not None else None


class Session:
    """One client of one repository.

    Args:
        engine: what runs the repository's actors.
        repository: its name.

    Raises:
        RepositoryNotFoundError: no such repository runs.
    """

    def __init__(self, engine: Engine, repository: str) -> None:
        self.engine = engine
        self.repository = repository
        self.client = uuid.uuid4().hex[:16]
        self.node = engine.this_node()
        try:
            planner = engine.find(planner_name(repository))
        except LookupError as exc:
            raise RepositoryNotFoundError(
                f"expected a running repository named {repository!r}; found none in this cluster"
            ) from exc
        topology: Topology = engine.result(engine.call(planner, "topology"), CONTROL_TIMEOUT_S, "planner")
        self.shards = topology.shards
        self.path = topology.path
        self._actors: dict[int, Actor] = {}
        self._connections: dict[int, Connection] = {}
        self._lock = threading.Lock()
        self._dropped: deque[str] = deque()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- shards -----------------------------------------------------------------------------------------

    def home(self, name: str) -> int:
        """Give the shard that keeps the metadata of `name`."""
        return home_of(name, self.shards)

    def near(self, home: int) -> int:
        """Give the shard that should hold bytes made here: the home if it is on this node, else one that is."""
        if self.connection(home).hello.node == self.node:
            return home
        return next((s for s in self.shards if self.connection(s).hello.node == self.node), home)

    def connection(self, shard: int) -> Connection:
        """Give the connection to a shard's present life, made anew when its process has ended."""
        with self._lock:
            known = self._connections.get(shard)
            if known is not None and (known.view is None or known.view.counters() is not None):
                return known
        hello: Hello = self.call(shard, "hello", self.client, self.node, os.getpid(), again=True)
        made = Connection(self._actor(shard), hello, self._view(hello))
        with self._lock:
            self._connections[shard] = made
        return made

    def forget(self, shard: int) -> None:
        """Drop the connection to a shard that did not answer; the next use makes a new one."""
        with self._lock:
            gone = self._connections.pop(shard, None)
        if gone is not None and gone.view is not None:
            gone.view.close()

    def call(
        self,
        shard: int,
        method: str,
        *arguments: Any,
        timeout: float = CONTROL_TIMEOUT_S,
        again: bool = False,
    ) -> Any:
        """Call a shard and wait.

        Args:
            shard: its index.
            method: a method of `shard.Shard`.
            arguments: for the method.
            timeout: seconds to wait in all.
            again: the call may be repeated while the shard is restarting: it changes nothing, or not twice.

        Raises:
            ShardUnavailableError: the shard died; a call that changes something may or may not have happened.
            OperationTimeoutError: no answer came in time.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                return self.result(self.send(shard, method, *arguments), shard, deadline - time.monotonic())
            except ShardUnavailableError:
                self.forget(shard)
                if not again or time.monotonic() + RETRY_S > deadline or self._closing.wait(RETRY_S):
                    raise

    def broadcast(self, method: str, *arguments: Any, timeout: float = CONTROL_TIMEOUT_S) -> list[Any]:
        """Ask all shards the same at once, and wait for all answers; repeated as in `call` with `again`."""
        return self.ask(dict.fromkeys(self.shards, (method, *arguments)), timeout)

    def ask(self, questions: Mapping[int, tuple[Any, ...]], timeout: float) -> list[Any]:
        """Ask several shards at once: shard -> (method, arguments). Repeated as in `call` with `again`."""
        deadline = time.monotonic() + timeout
        futures = {shard: self.send(shard, *question) for shard, question in questions.items()}
        answers: list[Any] = []
        for shard, future in futures.items():
            try:
                answers.append(self.result(future, shard, deadline - time.monotonic()))
            except ShardUnavailableError:
                self.forget(shard)
                left = deadline - time.monotonic()
                answers.append(self.call(shard, *questions[shard], timeout=left, again=True))
        return answers

    def send(self, shard: int, method: str, *arguments: Any) -> Future:
        """Call a shard without waiting."""
        return self.engine.call(self._actor(shard), method, *arguments)

    def result(self, future: Future, shard: int, timeout: float) -> Any:
        """Wait for an answer of `shard`."""
        return self.engine.result(future, timeout, f"{actor_name(self.repository, shard)}")

    # ---- leases -----------------------------------------------------------------------------------------

    def unpin(self, leases: Sequence[str]) -> None:
        """Let pins go, and wait until they went: what they kept may be freed when this returns."""
        if leases:
            self.ask({shard: ("unpin", part) for shard, part in _by_shard(leases).items()}, CONTROL_TIMEOUT_S)

    def drop(self, lease: str) -> None:
        """Let a pin go soon; safe in a finalizer, which may run in the middle of anything."""
        self._dropped.append(lease)

    def keep_alive(self) -> None:
        """Have the session renewed from now on."""
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._housekeep, name="tensorvine-session", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the session: its pins and unfinished saves are dropped by the shards at once."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        farewells: list[tuple[int, Future]] = []
        for shard in list(self._connections):
            with contextlib.suppress(TensorVineError):
                farewells.append((shard, self.send(shard, "goodbye", self.client)))
        for shard, farewell in farewells:
            try:
                self.result(farewell, shard, 2.0)
            except TensorVineError as exc:
                log.debug("shard %d did not hear goodbye: %s", shard, exc)
            self.forget(shard)

    def _housekeep(self) -> None:
        renewed = time.monotonic()
        while not self._closing.wait(TICK_S):
            try:
                dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
                self.unpin(dropped)
                if time.monotonic() - renewed >= RENEW_S:
                    renewed = time.monotonic()
                    self.broadcast("renew", self.client, timeout=RENEW_S)
            except Exception:
                log.exception("housekeeping of client %s failed; it goes on in %s s", self.client, TICK_S)

    # ---- within -----------------------------------------------------------------------------------------

    def _actor(self, shard: int) -> Actor:
        actor = self._actors.get(shard)
        if actor is None:
            try:
                actor = self._actors[shard] = self.engine.find(actor_name(self.repository, shard))
            except LookupError as exc:
                raise RepositoryNotFoundError(
                    f"repository {self.repository!r}: expected shard {shard}; it was stopped"
                ) from exc
        return actor

    def _view(self, hello: Hello) -> MemoryView | None:
        if hello.node != self.node:
            return None
        try:
            return MemoryView(hello.pid, hello.memory_fd, hello.capacity)
        except OSError as exc:
            log.warning("shard %d: its memory cannot be opened, using the object store: %s", hello.index, exc)
            return None


def time_left(deadline: float, what: str) -> float:
    """Give the seconds until `deadline`.

    Raises:
        OperationTimeoutError: there are none; names `what`.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise OperationTimeoutError(f"{what}: expected to finish within its timeout; it ran out")
    return left


def _by_shard(leases: Sequence[str]) -> dict[int, list[str]]:
    """Sort leases by the shard that gave them, which their text names: client/shard.serial."""
    grouped: dict[int, list[str]] = {}
    for lease in leases:
        grouped.setdefault(int(lease.partition("/")[2].partition(".")[0]), []).append(lease)
    return grouped
