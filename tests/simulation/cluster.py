"""The third engine: actors in one process under one scheduler, whose messages come late, out of order or not at all.

Rules
- Arguments and answers are pickled: nothing is shared between simulated processes but what the kernel shares.
- Calls of one caller may overtake one another, for an asynchronous actor promises no order.
- A call to an actor that is being started for the first time waits for it; to one that is dead, or started again, it
  fails at once; one that is being carried out fails when its process ends.
- An actor that crashed is started again on its node after a while, with the arguments of its start.
"""

from __future__ import annotations

import asyncio
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from tensorvine.actors.engine.engine import SERVICE, Lifetime, Node
from tensorvine.actors.engine.groups import GROUPS
from tensorvine.actors.engine.sockets.packing import Packed
from tensorvine.actors.memory.buffers import Buffers
from tensorvine.actors.transport.frames import Received, Row
from tensorvine.actors.transport.targets import NewMemory, received
from tensorvine.actors.transport.tcp import UnreachableError
from tensorvine.store.errors import (
    ModelLostError,
    OperationTimeoutError,
    ShardUnavailableError,
    TensorVineError,
)

from .scheduler import Loop, Process, World
from .threads import Executor, Future, world

STORE_BYTES = 1 << 20
REFUSED_CHANCE = 0.05
"""That a connection cannot be made."""


@dataclass(frozen=True)
class Actor:
    """What a caller has of an actor."""

    name: str
    number: int


@dataclass(frozen=True)
class Handle:
    """A block in the object store."""

    key: int


@dataclass
class Weather:
    """How messages fare."""

    latency_s: float = 0.0005
    slow_chance: float = 0.02
    slow_s: float = 0.05
    lost_chance: float = 0.0
    """Of answers: the call was carried out, and its caller never hears."""


class Hosted:
    """An actor, through all its lives."""

    def __init__(self, ref: Actor, cls: type, arguments: Mapping[str, Any], node: str) -> None:
        self.ref = ref
        self.cls = cls
        self.arguments = {name: value for name, value in arguments.items() if name != "engine"}
        self.packed = pickle.dumps(self.arguments, 5)
        self.node = node
        self.lives = 0
        self.process: Process | None = None
        self.instance: Any = None
        self.loops: dict[str, Loop] = {}
        self.gone = False
        self.pending: list[_Call] = []
        self.running: dict[int, _Call] = {}


@dataclass
class _Call:
    number: int
    caller: Process | None
    future: Future
    method: str
    packed: bytes


class Cluster:
    """The actors, nodes and blocks of a world."""

    def __init__(self, w: World, nodes: Sequence[str], weather: Weather) -> None:
        self.world = w
        self.node_names = list(nodes)
        self.reserved: dict[str, str] = {}
        """What is reserved -> the node."""
        self.leaving: set[str] = set()
        """Nodes that were told to drain."""
        self.weather = weather
        self.actors: dict[int, Hosted] = {}
        self.names: dict[str, Actor] = {}
        self.blocks: dict[int, tuple[Process | None, np.ndarray]] = {}
        self.wires: dict[int, tuple[Process, Any]] = {}
        self.facts: dict[str, bytes] = {}
        """What the cluster keeps, whatever actors die."""
        self.restart_s = 0.3
        self.trouble: Any = None
        """What the disk does to those that start now."""
        self.foreign: list[str] = []
        """Errors outside the tree that left an actor's method."""

    def latency(self) -> float:
        """Draw how long a message takes."""
        draw, weather = self.world.random.random, self.weather
        return (weather.slow_s if draw() < weather.slow_chance else weather.latency_s) * draw()

    # ---- lives ----------------------------------------------------------------------------------------

    def host(self, cls: type, name: str, arguments: Mapping[str, Any], node: str) -> Actor:
        """Start an actor."""
        ref = self.names[name] = Actor(name, self.world.number())
        hosted = self.actors[ref.number] = Hosted(ref, cls, arguments, node)
        self._begin(hosted)
        return ref

    def _begin(self, hosted: Hosted) -> None:
        if hosted.gone:
            return
        hosted.lives += 1
        process = hosted.process = Process(
            self.world, f"{hosted.ref.name.rpartition('/')[2]}.{hosted.lives}", hosted.node
        )
        if self.trouble is not None:
            process.facts["trouble"] = self.trouble
        self.world.note(f"START {process}")
        self.world.spawn(process, "main", partial(self._construct, hosted, process))

    def _construct(self, hosted: Hosted, process: Process) -> None:
        engine = SimulatedEngine()
        try:
            instance = hosted.cls(engine=engine, **pickle.loads(hosted.packed))  # noqa: S301  the simulator's own
        except Exception as exc:  # noqa: BLE001  as Ray: an actor whose constructor failed is dead for good
            if self.world.over or process.dead:
                return
            self.world.note(f"{process}: its start failed: {exc!r}")
            self.foreign.append(f"{process.name} start: {told(exc)}")
            self.end(hosted)
            return
        hosted.instance = instance
        hosted.loops = {group: Loop(process, group) for group in GROUPS}
        for loop in hosted.loops.values():
            loop.executors = partial(Executor, 8, "to-thread")
        self.world.note(f"UP {process}")
        pending, hosted.pending = hosted.pending, []
        for call in pending:
            self._carry_out(hosted, call)

    def crash(self, hosted: Hosted) -> None:
        """End an actor's process; it is started again."""
        if hosted.process is None or hosted.process.dead:
            return
        self.world.kill(hosted.process)
        hosted.instance, hosted.loops = None, {}
        running, hosted.running = hosted.running, {}
        for call in [*running.values(), *hosted.pending]:
            self._fail(call, f"{hosted.ref.name} died")
        hosted.pending = []
        if not hosted.gone:
            delay = self.restart_s * (0.2 + self.world.random.random())
            self.world.at(self.world.now + delay, partial(self._begin, hosted))

    def end(self, hosted: Hosted) -> None:
        """End an actor for good."""
        hosted.gone = True
        if self.names.get(hosted.ref.name) == hosted.ref:
            del self.names[hosted.ref.name]
        self.crash(hosted)

    # ---- calls ----------------------------------------------------------------------------------------

    def send(self, actor: Actor, method: str, arguments: tuple[Any, ...]) -> Future:
        """Send a call on its way."""
        w = self.world
        call = _Call(w.number(), w.process, Future(), method, pickle.dumps(arguments, 5))
        if w.trace is not None:
            w.note(f"call {actor.name}.{method}{_short(arguments)}")
        w.at(w.now + self.latency(), partial(self._deliver, actor, call))
        w.point()
        return call.future

    def _deliver(self, actor: Actor, call: _Call) -> None:
        hosted = self.actors[actor.number]
        if hosted.instance is not None:
            self._carry_out(hosted, call)
        elif hosted.gone or hosted.lives > 1 or hosted.process is None or hosted.process.dead:
            self._fail(call, f"{actor.name} is being restarted" if not hosted.gone else f"{actor.name} was stopped")
        else:
            hosted.pending.append(call)

    def _carry_out(self, hosted: Hosted, call: _Call) -> None:
        method = getattr(hosted.instance, call.method)
        loop = hosted.loops[method.concurrency_group]
        hosted.running[call.number] = call
        loop.call_soon(partial(self._start, hosted, call, loop, method))

    def _start(self, hosted: Hosted, call: _Call, loop: Loop, method: Any) -> None:
        loop.create_task(self._answer(hosted, call, method))

    async def _answer(self, hosted: Hosted, call: _Call, method: Any) -> None:
        process = hosted.process
        try:
            arguments = [self._opened(value) for value in pickle.loads(call.packed)]  # noqa: S301  the simulator's own
            outcome: tuple[bool, Any] = True, await method(*arguments)
        except TensorVineError as exc:
            outcome = False, exc
        except asyncio.CancelledError:
            raise
        except Exception as exc:  # noqa: BLE001  it travels
            if self.world.over:
                return
            exc.add_note(told(exc))
            outcome = False, exc
        if self.world.over or process is None or process.dead:
            return
        hosted.running.pop(call.number, None)
        w = self.world
        packed = pickle.dumps(outcome, 5)
        if w.trace is not None and not outcome[0]:
            w.note(f"{call.method} raises {outcome[1]!r}")
        del outcome
        if self.weather.lost_chance and w.random.random() < self.weather.lost_chance:
            w.note(f"the answer to {call.method} is lost")
            return
        w.at(w.now + self.latency(), partial(self._settle, call, packed))

    def _opened(self, value: Any) -> Any:
        return self.block(value) if isinstance(value, Handle) else value

    def block(self, handle: Handle) -> np.ndarray:
        """Return a block of the object store."""
        owner, block = self.blocks[handle.key]
        if owner is None or owner.dead:
            raise ModelLostError(f"block {handle.key}: its owner has died")
        return block

    def _settle(self, call: _Call, packed: bytes) -> None:
        if (call.caller is not None and call.caller.dead) or call.future.done():
            return
        fine, value = pickle.loads(packed)  # noqa: S301  the simulator's own
        if fine:
            call.future.set_result(value)
        else:
            call.future.set_exception(value)

    def _fail(self, call: _Call, why: str) -> None:
        packed = pickle.dumps((False, ShardUnavailableError(f"{call.method}: expected an answer; {why}")), 5)
        self.world.at(self.world.now + self.latency(), partial(self._settle, call, packed))


class SimulatedEngine:
    """The engine of one simulated process: of the one that runs."""

    def nodes(self) -> list[Node]:
        here = self.this_node()
        names = sorted(_cluster().node_names, key=lambda name: (name != here, name))
        return [Node(name, 2 * STORE_BYTES, leaving=name in _cluster().leaving, address="127.0.0.1") for name in names]

    def this_node(self) -> str:
        return _process().node

    def address(self) -> str:
        return "127.0.0.1"

    def leave(self) -> None:
        raise NotImplementedError("no simulated process ends its cluster")

    def spawn(
        self, cls: type, name: str, arguments: Mapping[str, Any], node: str | None = None, lifetime: Lifetime = SERVICE
    ) -> Actor:
        known = _cluster().names.get(name)
        return known if known is not None else _cluster().host(cls, name, arguments, node or self.this_node())

    def find(self, name: str) -> Actor:
        world().point()
        try:
            return _cluster().names[name]
        except KeyError as exc:
            raise LookupError(f"no actor named {name!r}") from exc

    def actors(self) -> dict[str, str | None]:
        hosted = {name: _cluster().actors[actor.number] for name, actor in _cluster().names.items()}
        return {name: one.node if one.instance is not None else None for name, one in hosted.items()}

    def kill(self, name: str) -> None:
        actor = _cluster().names.get(name)
        if actor is not None:
            _cluster().end(_cluster().actors[actor.number])

    def show(self, gauges: Mapping[str, float], labels: Mapping[str, str]) -> None: ...

    def reserve(self, name: str, node: str, nbytes: int, *, wait: bool = True) -> bool:
        assert name not in _cluster().reserved, name
        _cluster().reserved[name] = node
        return True

    def unreserve(self, name: str) -> None:
        _cluster().reserved.pop(name, None)

    def reserved(self, prefix: str) -> dict[str, str | None]:
        living = _cluster().node_names
        return {n: node if node in living else None for n, node in _cluster().reserved.items() if n.startswith(prefix)}

    def restarted(self) -> bool:
        process = _process()
        return any(hosted.process is process and hosted.lives > 1 for hosted in _cluster().actors.values())

    def reach(self, actor: Actor, timeout: float, who: str) -> Sequence[Actor]:
        return [actor]

    def keep(self, name: str, value: bytes | None) -> None:
        w = world()
        w.sleep(_cluster().latency())
        if value is None:
            _cluster().facts.pop(name, None)
        else:
            _cluster().facts[name] = value
        w.sleep(_cluster().latency())

    def keep_absent(self, name: str, value: bytes) -> bool:
        w = world()
        w.sleep(_cluster().latency())
        new = name not in _cluster().facts
        _cluster().facts.setdefault(name, value)
        w.sleep(_cluster().latency())
        return new

    def kept(self, prefix: str) -> dict[str, bytes]:
        world().sleep(_cluster().latency())
        return {name: value for name, value in _cluster().facts.items() if name.startswith(prefix)}

    def put(self, block: np.ndarray) -> Handle:
        kept = np.array(block)
        kept.flags.writeable = False
        handle = Handle(world().number())
        _cluster().blocks[handle.key] = (_process(), kept)
        return handle

    def get(self, handles: Sequence[Handle], timeout: float, who: str) -> list[np.ndarray]:
        world().sleep(_cluster().latency())
        return [_cluster().block(handle) for handle in handles]


class SimulatedLines:
    """The connections to one actor: messages of the world. Its actor is looked up as for real ones."""

    def __init__(self, locate: Callable[[], Sequence[Any]]) -> None:
        self._locate = locate

    def send(self, group: str, message: Packed) -> Future:
        try:
            (actor,) = self._locate()
        except TensorVineError as exc:
            failed = Future()
            failed.set_exception(exc)
            return failed
        method, arguments = pickle.loads(message.pickled, buffers=message.buffers)  # noqa: S301  the simulator's own
        return _cluster().send(actor, method, arguments)

    def ask(self, group: str, message: Packed) -> asyncio.Future[Any]:
        return asyncio.wrap_future(self.send(group, message))

    def post(self, group: str, message: Packed) -> None:
        self.send(group, message)

    def renew(self) -> None: ...

    def close(self) -> None: ...


def result_of(answer: Future, timeout: float, who: str) -> Any:
    """Wait for an answer; see `lines.result_of`."""
    try:
        return answer.result(max(timeout, 0.0))
    except TimeoutError as exc:
        if answer.done() and answer.exception() is exc:
            raise
        raise OperationTimeoutError(f"{who}: expected an answer within {timeout:.1f} s; the call timed out") from exc


class SimulatedTcpServer:
    """An end of TCP, without sockets."""

    def __init__(self, answer: Any, host: str) -> None:
        port = world().number()
        self.address = (host, port)
        self.token = str(port)
        _cluster().wires[port] = (_process(), answer)

    def close(self) -> None:
        _cluster().wires.pop(self.address[1], None)


class SimulatedTcpClient:
    """The other end."""

    def __init__(self, address: tuple[str, int], token: str, timeout: float = 5.0, target: Any = None) -> None:
        self.address = address
        self.target = target if target is not None else NewMemory(Buffers())

    def read(self, places: Any, timeout: float, what: str, digests: bool = False) -> dict[Any, Received]:
        w = world()
        server = _cluster().wires.get(self.address[1])
        w.sleep(_cluster().latency())
        if server is None or server[0].dead or w.random.random() < REFUSED_CHANCE:
            raise UnreachableError(f"{what}: wire: expected a connection; refused")
        future = Future()
        packed = pickle.dumps({segment: list(slots) for segment, slots in places.items()}, 5)
        w.spawn(server[0], "wire", partial(_serve, server[1], packed, timeout, digests, future))
        end = w.now + timeout
        while not future.done():
            if server[0].dead:
                raise ShardUnavailableError(f"{what}: wire: expected a whole answer; it broke")
            if w.now >= end:
                raise OperationTimeoutError(f"{what}: wire: expected the whole answer within its timeout")
            try:
                future.result(min(0.05, end - w.now))
            except TimeoutError as exc:
                if isinstance(exc, TensorVineError):
                    raise
        w.sleep(_cluster().latency())
        arrived = pickle.loads(future.result())  # noqa: S301  the simulator's own
        found: dict[Any, Received] = {}
        for run, memory in self.target.runs([row for row, _, _ in arrived]):
            w.point()
            memory[:] = b"".join(content for row, content, _ in arrived if row in run)
            found |= received(run, self.target.block(memory))
        return {row.segment: replace(found[row.segment], digests=hashes) for row, _, hashes in arrived}

    def close(self) -> None:
        """Nothing is kept open."""


def _serve(answer: Any, packed: bytes, timeout: float, digests: bool, future: Future) -> None:
    """Answer a reader in a thread of the server's process."""
    places = pickle.loads(packed)  # noqa: S301  the simulator's own
    try:
        served, later = answer(places, timeout, digests)
        found: list[tuple[Row, bytes, Any]] = []
        for segment, part in served.items():
            row = part.row(segment)
            world().point()
            found.append((row, b"".join(part.pieces(row)), None))
        del served, part
        if digests:
            known = later() if later is not None else {}
            found = [(row, content, {s: known[row.segment][s] for s in row.slots}) for row, content, _ in found]
    except TensorVineError as exc:
        future.set_exception(pickle.loads(pickle.dumps(exc)))  # noqa: S301  the simulator's own
        return
    except Exception as exc:  # noqa: BLE001  the connection ends
        _cluster().foreign.append(f"wire: {told(exc)} {getattr(exc, '__notes__', [])[-1:]}")
        future.set_exception(ShardUnavailableError(f"wire: {exc!r}"))
        return
    future.set_result(pickle.dumps(found, 5))


def told(exc: BaseException) -> str:
    """Return an error with the places it came through."""
    frames = [f"{f.filename.rpartition('/')[2]}:{f.lineno} {f.name}" for f in traceback.extract_tb(exc.__traceback__)]
    return f"{type(exc).__name__}: {exc} [{' < '.join(reversed(frames[-5:]))}]"


def _short(arguments: tuple[Any, ...]) -> str:
    text = repr(arguments)
    return text if len(text) < 160 else text[:157] + "..."


def _cluster() -> Cluster:
    return world().cluster  # type: ignore[attr-defined]


def _process() -> Process:
    process = world().process
    if process is None:
        raise RuntimeError("expected a simulated process to run")
    return process
