"""A client's session: its calls of the shards, and its heartbeat.

Rules
- Calls that may be repeated are repeated until their timeout while a shard restarts; others fail at once.
- A session lasts as long as its heartbeat. One thread per client renews it, looks after its `pins` and reports its
  counts; it starts with the first save, load or prefix query and ends with `close`.
- A shard that does not answer for a name (any more, or yet) says so. Then the session learns the newest topology and
  asks again, by turns where the name was and where it is to be, while it is on its way.
- What all shards are asked counts when all were asked at one time: where names were on their way, all are asked again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from ...planner.topology import Topology
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
from ...store.waiting import NEVER, Backoff, Deadline
from ..engine.engine import Engine
from ..engine.opened import Opened
from ..memory.process import this_process
from ..planner.calls import PlannerCalls
from ..planner.nearby import Nearby
from ..rpc.calls import Request
from ..rpc.channel import Answer, Channel
from ..rpc.closing import close_all
from ..rpc.messages import Tag, planner_name, repositories
from ..rpc.shard_channels import ShardChannels
from ..shard.calls import ShardCalls
from .connections import Connection, Connections
from .pins import Pins
from .reporting import Reporting

log = logging.getLogger(__name__)

TICK_S = 1.0
RENEW_S = 15.0
RETRY_S = 0.05
CONTROL_TIMEOUT_S = 30.0
MOVE_S = 0.005
"""Pause between two tries while a name, or its neighbour in a question to all, is on its way."""
LOOK_S = 0.1
"""How long a topology counts as new enough."""
LOOK_TIMEOUT_S = 5.0

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
        self.planner = Channel(engine, planner_name(repository), missing=RepositoryNotFoundError)
        try:
            self.topology = self.planner.call(PlannerCalls.topology(), CONTROL_TIMEOUT_S)
        except RepositoryNotFoundError as exc:
            running = sorted(repositories(engine.actors()))
            found = f"; found {', '.join(map(repr, running))}" if running else "; found none in this cluster"
            raise RepositoryNotFoundError(f"expected a running repository named {repository!r}{found}") from exc
        self.path = self.topology.path
        self._refused: dict[str, int] = {}
        """Name that is on its way -> the shard that refused it last."""
        self._looked = time.monotonic()
        self._heard = True
        """The planner answered last time."""
        self.stopped = False
        """There was no planner when it was asked last."""
        self._channels = ShardChannels(engine, repository, missing=RepositoryNotFoundError)
        self.connections = Connections()
        self._nearby = Nearby(self.planner, self.node, lambda shard, until: self.connection(shard, until).hello.node)
        self.incarnations: dict[int, str] = {}
        """Of the shards that answered when all were asked last."""
        self._greeted: set[int] = set()
        """Shards that may know this client, whether there still is a connection or not."""
        self._lock = threading.Lock()
        self.at_renewal: Callable[[], None] = lambda: None
        """Called whenever the session was renewed."""
        self.pins = Pins(self)
        self.counts = Counts()
        """Counts of this client."""
        self._reporting = Reporting(self.planner, self.client, self.counts)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- shards ---------------------------------------------------------------------------------------

    @property
    def shards(self) -> tuple[int, ...]:
        """The shards that there are."""
        return self.topology.shards

    @property
    def staying(self) -> list[int]:
        """Those that are not about to drain."""
        topology = self.topology
        return [shard for shard in topology.shards if shard not in topology.leaving]

    def home(self, name: str) -> int:
        """Return the shard that keeps the metadata of `name`; on its way, the one that did not refuse it last."""
        topology = self.topology
        home = topology.home(name)
        if not topology.former:
            return home
        former = topology.former_home(name)
        return home if self._refused.get(name) == former else former

    def maker(self, serial: int) -> int:
        """Return the shard that made a segment of this serial number."""
        return self.topology.maker(serial)

    def near(self, home: int | None = None, deadline: Deadline = NEVER) -> int:
        """Return the shard that should hold bytes made here: the home if it is on this node, else one that is."""
        return self._nearby.choose(home, self.staying, self.topology.version, deadline)

    def moved(self, name: str, shard: int, error: MovedError, deadline: Deadline) -> None:
        """Take note that a shard does not answer for a name, so that the next try goes elsewhere.

        Raises:
            OperationTimeoutError: there is no time for another try.
        """
        before = self.topology.version
        self.refresh(error.version)
        again = self._refused.get(name) == shard or (self.topology.version == before and not self.topology.former)
        if self.topology.former:
            self._refused[name] = shard
        if again and not self._pause(MOVE_S, deadline):  # neither has it just now
            raise OperationTimeoutError(f"{name!r}: expected its move to another shard to end in time; {error}")

    def refresh(self, version: int | None = None) -> None:
        """Learn the newest topology; with `version`, soon enough if this is known."""
        self.opened.check()
        with self._lock:
            now = time.monotonic()
            if version is not None and version <= self.topology.version and now - self._looked < LOOK_S:
                return
            self._looked = now
        try:
            newest = self.planner.call(PlannerCalls.topology(), LOOK_TIMEOUT_S)
        except TensorVineError as exc:
            level = logging.WARNING if self._heard else logging.DEBUG
            log.log(level, "no topology from the planner: %s", exc)
            self._heard, self.stopped = False, isinstance(exc, RepositoryNotFoundError)
            return
        with self._lock:
            self._heard, self.stopped = True, False
            known = self.topology
            if newest.version <= known.version or newest.started_by != known.started_by:  # another one has its name now
                return
            self.topology = newest
            self._refused.clear()
        self.connections.keep_only(newest.alive)
        self._channels.keep_only(newest.alive)

    def at_home(self, name: str, request: Request[_R], timeout: float = CONTROL_TIMEOUT_S) -> _R:
        """Call the shard that is home to `name`, wherever that moves; else as `call`."""
        deadline = Deadline.after(timeout)
        while True:
            shard = self.home(name)
            try:
                return self.call(shard, request, deadline.left())
            except MovedError as exc:
                self.moved(name, shard, exc, deadline)

    def connection(self, shard: int, deadline: Deadline = NEVER) -> Connection:
        """Return the connection to a shard's present incarnation, made anew when its process has ended.

        Args:
            shard: its index.
            deadline: until when; it waits for no longer than `CONTROL_TIMEOUT_S` in any case.
        """
        if (known := self.connections.present(shard)) is not None:
            return known
        return self._greet(shard, deadline)

    def reopen(self, shard: int) -> None:
        """Introduce this client again to a shard that has no session of it, if it ever was introduced there."""
        if shard in self._greeted:
            log.warning("client %s: its session at shard %d had expired; opening it again", self.client, shard)
            self._greet(shard, NEVER)

    def _greet(self, shard: int, deadline: Deadline) -> Connection:
        timeout = deadline.left(CONTROL_TIMEOUT_S)
        self._greeted.add(shard)
        hello = self.call(shard, ShardCalls.hello(self.client, self.node, this_process()), timeout)
        return self.connections.add(hello, near=hello.node == self.node)

    def connect_all(self) -> None:
        """Have a connection to every shard."""
        for shard in self.topology.alive:
            try:
                self.connection(shard)
            except MovedError:
                log.debug("shard %d has drained just now", shard)

    def call(self, shard: int, request: Request[_R], timeout: float = CONTROL_TIMEOUT_S) -> _R:
        """Call a shard and wait; a request that may be repeated is, while the shard is restarting.

        Args:
            shard: its index.
            request: one of `ShardCalls`.
            timeout: seconds to wait in all.

        Raises:
            EngineStoppedError: the engine was shut down in this process.
            RepositoryNotFoundError: the repository was stopped.
            ShardUnavailableError: the shard died; a call that changes something may or may not have happened.
            MovedError: it drained, or does not answer for the name; nothing has happened.
            OperationTimeoutError: no answer came in time.
        """
        deadline = Deadline.after(timeout)
        before: TensorVineError | None = None
        while True:
            try:
                return self.send(shard, request).result(deadline.left())
            except EngineStoppedError:
                raise
            except OperationTimeoutError as exc:
                if before is None:
                    raise
                raise OperationTimeoutError(f"{exc}; before that: {before}") from exc
            except (ShardUnavailableError, RepositoryNotFoundError) as exc:
                self.connections.drop(shard)
                self._check_left(shard, exc)
                if isinstance(exc, RepositoryNotFoundError):
                    raise
                if not request.remote.repeatable or not self._pause(RETRY_S, deadline):
                    raise
                before = exc

    def broadcast(
        self,
        request: Request[_R],
        timeout: float = CONTROL_TIMEOUT_S,
        spoiled: Callable[[list[_R]], None] | None = None,
        heard: Callable[[Sequence[Tag]], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[_R]:
        """Ask all shards the same at one time, and wait for all answers; repeated as in `call`.

        Args:
            request: one of `ShardCalls` that may be repeated.
            timeout: seconds to wait in all.
            spoiled: told answers that do not count, for names were on their way.
            heard: told how things stood whenever all have answered.
            meanwhile: called while the shards are at it, whenever they are asked; it must not raise.
        """
        deadline = Deadline.after(timeout)
        while True:
            topology = self.topology
            try:
                question = ShardCalls.gathered(request.remote.name, request.arguments)
                told = self.call_each(dict.fromkeys(topology.alive, question), deadline.left(), meanwhile)
                tags = [tag for tag, _ in told]
                if heard is not None:
                    heard(tags)
                self.incarnations = {tag.shard: tag.incarnation for tag in tags}
                if self._fits(topology, tags, deadline):
                    return [answer for _, answer in told]
                if spoiled is not None:
                    spoiled([answer for _, answer in told])
                newest = max(tag.version for tag in tags)
            except MovedError as exc:
                newest = exc.version
            self.refresh(newest)
            if not self._pause(MOVE_S, deadline):
                what = f"{request.remote.name}: expected all shards to answer while names move"
                raise OperationTimeoutError(f"{what}; they did not in time")

    def _fits(self, topology: Topology, tags: list[Tag], deadline: Deadline) -> bool:
        """Tell whether answers were given at one time, with all names in their places."""
        if any(tag.sending or tag.version > topology.version for tag in tags):
            return False
        if not topology.former:
            return True
        return self.call_each(dict.fromkeys(topology.alive, ShardCalls.tag()), deadline.left()) == tags

    def call_each(
        self, requests: Mapping[int, Request[_R]], timeout: float, meanwhile: Callable[[], None] | None = None
    ) -> list[_R]:
        """Call several shards at once, each as `call` does, and wait for all answers; call `meanwhile` in between."""
        deadline = Deadline.after(timeout)
        sent = {shard: self.send(shard, request) for shard, request in requests.items()}
        if meanwhile is not None:
            meanwhile()
            deadline = Deadline.after(timeout)  # what is done meanwhile takes no time from the answers
        answers: list[_R] = []
        for shard, answer in sent.items():
            try:
                answers.append(answer.result(deadline.left()))
            except EngineStoppedError:
                raise
            except (ShardUnavailableError, RepositoryNotFoundError) as exc:
                self.connections.drop(shard)
                self._check_left(shard, exc)
                answers.append(self.call(shard, requests[shard], deadline.left()))
        return answers

    def poll(self, request: Request[_R], timeout: float) -> dict[int, _R | TensorVineError]:
        """Ask each shard once, and give what it answered, or why it did not within `timeout` seconds in all."""
        deadline, version = Deadline.after(timeout), self.topology.version
        question = ShardCalls.gathered(request.remote.name, request.arguments)
        sent = {shard: _tried(partial(self.send, shard, question)) for shard in self.topology.alive}
        found: dict[int, _R | TensorVineError] = {}
        for shard, answer in sent.items():
            told = answer if isinstance(answer, TensorVineError) else _tried(partial(answer.result, deadline.left()))
            if isinstance(told, TensorVineError):
                version = -1
                if not isinstance(told, OperationTimeoutError):
                    self.connections.drop(shard)
            elif told[0].version > version:
                version = -1
            found[shard] = told if isinstance(told, TensorVineError) else told[1]
        if version < 0:
            self.refresh()  # a shard may have drained, or joined
        return {shard: told for shard, told in found.items() if shard in self.topology.alive}

    def send(self, shard: int, request: Request[_R]) -> Answer[_R]:
        """Call a shard, and do not wait."""
        self.opened.check()
        return self._channels[shard].send(request)

    # ---- heartbeat ------------------------------------------------------------------------------------

    def keep_alive(self) -> None:
        """Have the session renewed, and its counts reported, from now on."""
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._housekeep, name="tensorvine-session", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the session: the shards drop its pins and unfinished saves at once. Does nothing in a forked child."""
        if self.opened.closed:
            return
        self._closing.set()
        self.pins.wake()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        if not self.opened.close():  # another thread closed it meanwhile
            return
        report = self._reporting.send(last=True)
        farewells: list[Answer[None]] = [report] if report is not None else []
        alive = set(self.topology.alive)  # of names that moved, a shard may have pins of whom it never met
        for shard in alive if self.topology.version else alive & self._greeted:
            with contextlib.suppress(TensorVineError):
                farewells.append(self._channels[shard].send(ShardCalls.goodbye(self.client)))
        for farewell in farewells:
            with contextlib.suppress(TensorVineError):  # the session lapses by itself
                farewell.result(2.0)
        channels = (self._channels, self.planner)
        close_all(f"client {self.client}", lambda: self.connections.keep_only(()), *(one.close for one in channels))

    def _housekeep(self) -> None:
        renewed, quiet = time.monotonic(), False
        while not self._closing.is_set():
            try:
                self.pins.wait(TICK_S, self._closing)
                self.pins.tidy()
                if time.monotonic() - renewed >= RENEW_S:
                    renewed = time.monotonic()
                    self._reporting.send()
                    self.pins.renew(RENEW_S)
                    self.at_renewal()
                    quiet = False
            except TensorVineError as exc:  # such as: the repository was stopped, and this client was not closed
                level = logging.DEBUG if quiet else logging.WARNING
                log.log(level, "client %s: session renewal failed, retrying: %s", self.client, exc)
                quiet = True
            except Exception:
                log.exception("housekeeping of client %s failed; retrying in %s s", self.client, TICK_S)

    # ---- within ---------------------------------------------------------------------------------------

    def _pause(self, seconds: float, deadline: Deadline) -> bool:
        """Pause before the next try; False: there is no time for one."""
        return Backoff(seconds, seconds, self._closing).wait(deadline)

    def _check_left(self, shard: int, error: TensorVineError) -> None:
        """Tell a shard that died from one that drained, and from a repository that is no more.

        Raises:
            MovedError: it drained.
            RepositoryNotFoundError: the repository was stopped.
        """
        self.refresh()
        if self.stopped:
            raise RepositoryNotFoundError(f"{self.repository!r}: expected it to run; it was stopped") from error
        if shard not in self.topology.alive:  # it answered for nothing any more: what it was asked has not happened
            raise MovedError(f"shard {shard} has left the repository", self.topology.version) from error


def _tried(ask: Callable[[], _R]) -> _R | TensorVineError:
    """Give the error in the place of an answer, but for one that all would give."""
    try:
        return ask()
    except (EngineStoppedError, ClosedError):
        raise
    except TensorVineError as exc:
        return without_frames(exc)
