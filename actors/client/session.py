"""A client's session: its calls of the catalog and the shards, and its heartbeat.

Rules
- Calls that may be repeated are repeated until their timeout while the catalog or a shard restarts; others fail at
  once.
- A session lasts as long as its heartbeat. One thread per client renews it, which declares the numbers of its open
  requests, looks after its `pins` and reports its counts; it starts with the first save, load or prefix query and ends
  with `close`.
- After a catalog was away, its clients come back at moments of their own (`JITTER_S`).
- No lock is held during a call.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ...store.counting import Counts
from ...store.errors import (
    ClosedError,
    EngineStoppedError,
    MovedError,
    OperationTimeoutError,
    RepositoryNotFoundError,
    ShardUnavailableError,
    TensorVineError,
    without_frames,
)
from ...store.holders import Request as RequestNumber
from ...store.waiting import NEVER, Backoff, Deadline
from ..engine.engine import Engine
from ..engine.opened import Opened
from ..memory.counters import CounterView
from ..memory.process import this_process
from ..rpc.calls import Request
from ..rpc.catalog_calls import CatalogCalls
from ..rpc.catalog_messages import Declared, Page, Renewed, Welcome
from ..rpc.channel import Answer, Channel
from ..rpc.closing import close_all
from ..rpc.messages import catalog_name, planner_name, repositories
from ..rpc.shard_channels import ShardChannels
from ..shard.calls import ShardCalls
from .connections import Connection, Connections
from .pins import Pins
from .reporting import Reporting
from .requests import Numbered, Requests

log = logging.getLogger(__name__)

TICK_S = 1.0
RENEW_S = 15.0
RETRY_S = (0.05, 1.0)
"""Shortest and longest pause before a call is repeated; each is cut by chance to a half at most."""
JITTER_S = 3.0
"""Within how many seconds after a catalog was away its clients renew their sessions."""
CONTROL_TIMEOUT_S = 30.0
LOOK_TIMEOUT_S = 5.0
LOOK_S = 0.1
"""How long what the catalog said of the repository's shape counts as new."""
NEAR_S = 15.0
"""How long a client without a shard on its node goes before it looks for one again."""
NEW_S = 2.0
"""How long a client waits for a shard of which nobody has heard, and after which it asks for it again."""
FAREWELL_S = 2.0

_CHANCE = random.SystemRandom()  # a program that seeds `random` would have all its processes come back at once
_R = TypeVar("_R")


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
        self.opened = Opened(f"repository {repository!r}")
        self.client = uuid.uuid4().hex[:16]
        self.node = engine.this_node()
        self.catalog = Channel(engine, catalog_name(repository), missing=RepositoryNotFoundError)
        self.planner = Channel(engine, planner_name(repository))
        self._channels = ShardChannels(engine, repository, missing=RepositoryNotFoundError)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._page: CounterView | None = None
        self._mappable = False
        """The catalog is on this node, and its page could be mapped as far as is known."""
        self._looked = time.monotonic()
        self.stopped = False
        """There was no catalog when it was asked last."""
        self._thread: threading.Thread | None = None
        self._due = self._looked + RENEW_S
        """When the session is to be renewed."""
        try:
            welcome = self.ask(CatalogCalls.hello(self.client, self.node))
        except RepositoryNotFoundError as exc:
            running = sorted(repositories(engine.actors()))
            found = f"; found {', '.join(map(repr, running))}" if running else "; found none in this cluster"
            raise RepositoryNotFoundError(f"expected a running repository named {repository!r}{found}") from exc
        self.topology = welcome.topology
        self.path = welcome.topology.path
        self.metadata_bytes = welcome.metadata_bytes
        self.nodes: dict[int, str] = dict(welcome.nodes)
        """Shard -> its node, as it was known last."""
        self._term = welcome.term
        self._catalog_node = welcome.node
        self._map(welcome.page)
        self.connections = Connections()
        self._greeted: set[int] = set()
        """Shards that may know this client, whether there still is a connection or not."""
        self.at_renewal: Callable[[], None] = lambda: None
        """Called whenever the session was renewed."""
        self.requests = Requests(self.client)
        self.pins = Pins(self.client, self.opened, self.requests, self.ask)
        self.counts = Counts()
        """Counts of this client."""
        self._reporting = Reporting(self.planner, self.client, self.counts)

    # ---- the catalog ----------------------------------------------------------------------------------

    def ask(self, request: Request[_R], timeout: float = CONTROL_TIMEOUT_S) -> _R:
        """Ask the catalog, and wait; repeated while it restarts.

        Args:
            request: one of `CatalogCalls` that may be repeated.
            timeout: seconds to wait in all.

        Raises:
            EngineStoppedError: the engine was shut down in this process.
            RepositoryNotFoundError: the repository was stopped.
            ShardUnavailableError, OperationTimeoutError: no catalog answered in time.
            Exception: what the catalog raised.
        """
        return self._repeated(lambda left: self._asked(request).result(left), request, timeout, self._away)

    def ask_aside(self, request: Request[_R], meanwhile: Callable[[], None]) -> _R:
        """Ask as `ask` does, and do something else until the answer is waited for; what that raises is raised."""
        answer = self._asked(request)
        meanwhile()
        try:
            return answer.result(CONTROL_TIMEOUT_S)
        except EngineStoppedError:
            raise
        except ShardUnavailableError:
            return self.ask(request)

    def _asked(self, request: Request[_R]) -> Answer[_R]:
        self.opened.check()
        return self.catalog.send(request)

    def _away(self, error: TensorVineError) -> None:
        """Note that the catalog does not answer: its next process knows no pins, and hears of this client soon."""
        self.stopped = isinstance(error, RepositoryNotFoundError)
        if not self.stopped:
            with self._lock:
                self._due = min(self._due, time.monotonic() + _CHANCE.uniform(0.0, JITTER_S))

    def refresh(self, least_s: float = 0.0, timeout: float = LOOK_TIMEOUT_S) -> None:
        """Learn how the repository is made up now, unless that was learned less than `least_s` seconds ago."""
        self.opened.check()
        with self._lock:
            now = time.monotonic()
            if now - self._looked < least_s:
                return
            self._looked = now
        try:
            welcome = self.catalog.call(CatalogCalls.hello(self.client, self.node), timeout)
        except TensorVineError as exc:
            self._away(exc)
            log.log(logging.DEBUG if self.stopped else logging.WARNING, "no topology from the catalog: %s", exc)
            return
        self._take(welcome)

    def _take(self, welcome: Welcome) -> None:
        with self._lock:
            known = self.topology
            self.stopped = welcome.topology.started_by != known.started_by  # another one has its name now
            if self.stopped or welcome.topology.version < known.version:
                return
            self.topology, self.nodes = welcome.topology, dict(welcome.nodes)
            self._catalog_node = welcome.node
        self._map(welcome.page)
        self.connections.keep_only(welcome.topology.shards)
        self._channels.keep_only(welcome.topology.shards)

    # ---- the version page -----------------------------------------------------------------------------

    def counter_of(self, name: str) -> int | None:
        """Return, without a message, the counter of a name on the version page; None: it cannot be seen."""
        page = self._page
        return page.value_of(name) if page is not None else None

    def look_for_page(self, name: str) -> None:
        """Map the version page of the present catalog, if that is on this node and none is mapped that holds."""
        if self._mappable and self.counter_of(name) is None:
            self.refresh(LOOK_S)

    def _map(self, page: Page) -> None:
        """Map the catalog's version page, where that can be."""
        made: CounterView | None = None
        self._mappable = self._catalog_node == self.node
        if self._mappable:
            try:
                made = CounterView(page.pid, page.fd, page.file)
            except (OSError, ShardUnavailableError) as exc:
                self._mappable = False
                log.info("the catalog's version page cannot be mapped, repeated loads ask it: %s", exc)
        with self._lock:
            former, self._page = self._page, made
        if former is not None:
            former.close()

    # ---- shards ---------------------------------------------------------------------------------------

    @property
    def shards(self) -> tuple[int, ...]:
        """The shards that there are."""
        return self.topology.shards

    def near(self, name: str = "", deadline: Deadline = NEVER) -> int:
        """Return the shard that should hold bytes made here: one of this node, else any; the same for one name."""
        first = zlib.crc32(name.encode())
        if any(shard not in self.nodes for shard in self.topology.staying):  # it may have started since
            self.refresh(NEW_S)
        for again in (False, True):
            staying = self.topology.staying
            near = [shard for shard in staying if self.nodes.get(shard) == self.node]
            new = [shard for shard in staying if shard not in self.nodes]
            found = self._first_here(near, first, deadline)
            found = found if found is not None else self._first_here(new, first, deadline.sooner(NEW_S))
            if found is not None:
                return found
            if not again:
                self.refresh(NEAR_S)
        known = [shard for shard in staying if shard in self.nodes] or staying
        return known[first % len(known)]

    def _first_here(self, shards: Sequence[int], first: int, deadline: Deadline) -> int | None:
        """Return the first of these shards, from one on, that says that it is on this node."""
        for place in range(len(shards)):
            shard = shards[(first + place) % len(shards)]
            try:
                if self.connection(shard, deadline).hello.node == self.node:
                    return shard
            except MovedError:  # it has left just now
                continue
            except (ShardUnavailableError, OperationTimeoutError) as exc:
                if shard in self.nodes or isinstance(exc, EngineStoppedError):
                    raise
                log.info("client %s: shard %d has not started yet: %s", self.client, shard, exc)
        return None

    def is_staying(self, shard: int) -> bool:
        """Tell whether a shard is there and not about to drain."""
        return shard in self.topology.staying

    def connection(self, shard: int, deadline: Deadline = NEVER) -> Connection:
        """Return the connection to a shard's present incarnation, made anew when its process has ended.

        Args:
            shard: its index.
            deadline: until when; it waits for no longer than `CONTROL_TIMEOUT_S` in any case.
        """
        if (known := self.connections.present(shard)) is not None:
            return known
        return self._greet(shard, deadline)

    def _greet(self, shard: int, deadline: Deadline) -> Connection:
        timeout = deadline.left(CONTROL_TIMEOUT_S)
        self._greeted.add(shard)
        hello = self.call(shard, ShardCalls.hello(self.client, self.node, this_process()), timeout)
        self.nodes[shard] = hello.node
        return self.connections.add(hello, near=hello.node == self.node)

    def call(self, shard: int, request: Request[_R], timeout: float = CONTROL_TIMEOUT_S, incarnation: int = 0) -> _R:
        """Call a shard and wait; a request that may be repeated is, while the shard is restarting.

        Args:
            shard: its index.
            request: one of `ShardCalls`.
            timeout: seconds to wait in all.
            incarnation: process id of the shard, of which alone the call makes sense; 0: of any.

        Raises:
            EngineStoppedError: the engine was shut down in this process.
            RepositoryNotFoundError: the repository was stopped.
            ShardUnavailableError: the shard died; a call that changes something may or may not have happened.
            MovedError: it has left the repository.
            OperationTimeoutError: no answer came in time.
        """

        deadline = Deadline.after(timeout)

        def lost(error: TensorVineError) -> None:
            self.lost(shard, error)
            if incarnation and self.connection(shard, deadline).hello.pid != incarnation:
                raise ShardUnavailableError(f"shard {shard}: expected it to run on; it has restarted") from error

        return self._repeated(lambda left: self.send(shard, request).result(left), request, timeout, lost)

    def lost(self, shard: int, error: TensorVineError) -> None:
        """Drop the connection to a shard that did not answer; tell one that died from one that has left.

        Raises:
            MovedError: it has left.
            RepositoryNotFoundError: the repository was stopped.
        """
        self.connections.drop(shard)
        self.refresh()
        if self.stopped:
            raise RepositoryNotFoundError(f"{self.repository!r}: expected it to run; it was stopped") from error
        if shard not in self.topology.shards:
            raise MovedError(f"shard {shard} has left the repository", self.topology.version) from error

    def moved(self, shard: int | None, what: str, deadline: Deadline) -> None:
        """Learn the topology, in which a shard that takes nothing more drains or has left, before another try.

        Raises:
            OperationTimeoutError: there is no time for one; names `what`.
        """
        deadline.left_for(what)
        self.refresh()
        if shard is None or self.is_staying(shard):  # not yet, as far as the catalog says
            self._closing.wait(RETRY_S[0])

    def call_each(self, requests: Mapping[int, Request[_R]], timeout: float) -> list[_R]:
        """Call several shards at once, each as `call` does, and wait for all answers."""
        deadline = Deadline.after(timeout)
        sent = {shard: self.send(shard, request) for shard, request in requests.items()}
        answers: list[_R] = []
        for shard, answer in sent.items():
            try:
                answers.append(answer.result(deadline.left()))
            except EngineStoppedError:
                raise
            except (ShardUnavailableError, RepositoryNotFoundError) as exc:
                self.lost(shard, exc)
                answers.append(self.call(shard, requests[shard], deadline.left()))
        return answers

    def call_all(self, request: Request[_R], timeout: float = CONTROL_TIMEOUT_S) -> list[_R]:
        """Call all shards at once, as `call_each` does."""
        deadline = Deadline.after(timeout)
        while True:
            try:
                return self.call_each(dict.fromkeys(self.topology.shards, request), deadline.left())
            except MovedError:  # one has left just now
                deadline.left_for(f"{self.repository!r}: {request.remote.name}")

    def poll(self, request: Request[_R], timeout: float) -> dict[int, _R | TensorVineError]:
        """Ask each shard once, and give what it answered, or why it did not within `timeout` seconds in all."""
        deadline = Deadline.after(timeout)
        self.refresh(LOOK_S, deadline.left(LOOK_TIMEOUT_S))  # a shard may have joined
        sent = {shard: _tried(partial(self.send, shard, request)) for shard in self.topology.shards}
        found: dict[int, _R | TensorVineError] = {}
        for shard, answer in sent.items():
            told = answer if isinstance(answer, TensorVineError) else _tried(partial(answer.result, deadline.left()))
            if isinstance(told, TensorVineError) and not isinstance(told, OperationTimeoutError):
                self.connections.drop(shard)
            found[shard] = told
        if any(isinstance(told, TensorVineError) for told in found.values()):
            self.refresh()  # a shard may have left
        return {shard: told for shard, told in found.items() if shard in self.topology.shards}

    def send(self, shard: int, request: Request[_R]) -> Answer[_R]:
        """Call a shard, and do not wait."""
        self.opened.check()
        return self._channels[shard].send(request)

    def _repeated(
        self,
        call: Callable[[float], _R],
        request: Request[_R],
        timeout: float,
        lost: Callable[[TensorVineError], None],
    ) -> _R:
        """Make a call until it is answered; `lost` is told of each failure, and ends the tries by what it raises."""
        deadline, pauses = Deadline.after(timeout), Backoff(*RETRY_S)
        before: TensorVineError | None = None
        while True:
            try:
                return call(deadline.left())
            except EngineStoppedError:
                raise
            except OperationTimeoutError as exc:
                if before is None:
                    raise
                raise OperationTimeoutError(f"{exc}; before that: {before}") from exc
            except (ShardUnavailableError, RepositoryNotFoundError) as exc:
                lost(exc)
                if isinstance(exc, RepositoryNotFoundError) and self.stopped:
                    raise
                pause = pauses.next() * _CHANCE.uniform(0.5, 1.0)
                sent = not isinstance(exc, RepositoryNotFoundError)
                if (sent and not request.remote.repeatable) or pause > deadline.left() or self._closing.wait(pause):
                    if sent:
                        raise
                    raise ShardUnavailableError(str(exc)) from exc
                log.debug("client %s: calling %s again: %s", self.client, request.remote.name, exc)
                before = without_frames(exc)

    # ---- requests -------------------------------------------------------------------------------------

    def number(self) -> Numbered:
        """Number a request, and have the session renewed from now on, so that it is declared while it is open."""
        self.opened.check()  # a forked child starts no thread, and takes no lock that its parent had
        self.keep_alive()
        return self.requests.begin()

    def keep_alive(self) -> None:
        """Have the session renewed, and its counts reported, from now on."""
        with self._lock:
            alive = self._thread is not None and self._thread.is_alive()  # an interrupt may keep it from starting
            if not alive and not self._closing.is_set():
                self._thread = threading.Thread(target=self._housekeep, name="tensorvine-session", daemon=True)
                self._thread.start()

    def abort(self, request: RequestNumber) -> None:
        """Have a request end at the catalog and at all shards that may have memory of it; does not wait.

        Where a message is lost, the next renewal says that the request is over.
        """
        with contextlib.suppress(TensorVineError):
            self.catalog.post(CatalogCalls.abort(request))
        for shard in [shard for shard in list(self._greeted) if shard in self.topology.shards]:
            with contextlib.suppress(TensorVineError):
                self._channels[shard].post(ShardCalls.abort(request))

    def give_up(self, numbered: Numbered) -> None:
        """End a request that came to nothing, as `abort` does."""
        self.requests.end(numbered)
        self.abort(numbered.request)

    # ---- heartbeat ------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the session: its pins and unfinished saves are dropped at once. Does nothing in a forked child."""
        if self.opened.closed:
            return
        self._closing.set()
        self.pins.wake()
        if self._thread is not None:
            self._thread.join(timeout=LOOK_TIMEOUT_S)
        if not self.opened.close():  # another thread closed it meanwhile
            return
        report = self._reporting.send(last=True)
        farewells: list[Answer[None]] = [report] if report is not None else []
        with contextlib.suppress(TensorVineError):
            farewells.append(self.catalog.send(CatalogCalls.goodbye(self.client)))
        for shard in [shard for shard in self.topology.shards if shard in self._greeted]:
            with contextlib.suppress(TensorVineError):
                farewells.append(self._channels[shard].send(ShardCalls.goodbye(self.client)))
        for farewell in farewells:
            with contextlib.suppress(TensorVineError):  # the session lapses by itself
                farewell.result(FAREWELL_S)
        if self._page is not None:
            self._page.close()
        channels = (self._channels, self.catalog, self.planner)
        close_all(f"client {self.client}", lambda: self.connections.keep_only(()), *(one.close for one in channels))

    def _housekeep(self) -> None:
        quiet = False
        while not self._closing.is_set():
            try:
                self.pins.wait(TICK_S, self._closing)
                for request in self.requests.given_up():
                    self.abort(request)
                self.pins.tidy()
                if time.monotonic() >= self._due:
                    self._reporting.send()
                    self._renew()
                    quiet = False
            except TensorVineError as exc:  # such as: the repository was stopped, and this client was not closed
                level = logging.DEBUG if quiet else logging.WARNING
                log.log(level, "client %s: session renewal failed, retrying: %s", self.client, exc)
                quiet = True
            except Exception:
                log.exception("housekeeping of client %s failed; retrying in %s s", self.client, TICK_S)

    def _renew(self) -> None:
        """Renew the session, and pin again what a catalog does not know.

        Raises:
            TensorVineError: the catalog or a shard did not answer; the others were renewed.
        """
        with self._lock:
            self._due = time.monotonic() + RENEW_S
        declared = self.requests.declared()
        shards = [shard for shard in self.topology.shards if shard in self._greeted]
        sent = {shard: self.send(shard, ShardCalls.renew(self.client, declared)) for shard in shards}
        deadline = Deadline.after(RENEW_S)
        try:
            self._renew_at_catalog(declared)
        finally:
            failed = self._answered(sent, deadline)
        self.at_renewal()
        if failed is not None:
            raise failed

    def _renew_at_catalog(self, declared: Declared) -> None:
        """Renew the session at the catalog, and pin again what it does not know."""
        renewed = self._declare(declared)
        other = renewed.term != self._term
        if other or not renewed.known:
            self.pins.pin_again(RENEW_S)
            self._term = renewed.term
            renewed = self._declare(declared)  # now it knows all pins
        if other or renewed.topology_version != self.topology.version:
            self.refresh()  # it may be on another node, as its version page is

    def _declare(self, declared: Declared) -> Renewed:
        return self.ask(CatalogCalls.renew(self.client, replace(declared, pinned_in=self._term)), RENEW_S)

    def _answered(self, sent: Mapping[int, Answer[bool]], deadline: Deadline) -> TensorVineError | None:
        """Wait for what shards answer to a renewal; return why one did not."""
        failed: TensorVineError | None = None
        for shard, answer in sent.items():
            try:
                if not answer.result(deadline.left()):
                    log.warning("client %s: shard %d did not know its session; opening it again", self.client, shard)
                    self._greet(shard, deadline)
            except MovedError:
                self._greeted.discard(shard)
            except TensorVineError as exc:
                self.connections.drop(shard)
                failed = without_frames(exc)
        return failed


def _tried(ask: Callable[[], _R]) -> _R | TensorVineError:
    """Give the error in the place of an answer, but for one that all would give."""
    try:
        return ask()
    except (EngineStoppedError, ClosedError):
        raise
    except TensorVineError as exc:
        return without_frames(exc)
