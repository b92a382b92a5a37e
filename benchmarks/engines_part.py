"""What `engines` runs for one engine: `python -m benchmarks.engines_part ENGINE PART AMOUNT`.

Rules
- It starts a cluster and a repository, measures a turn for each line on its standard input, and prints one line of JSON
  for it: what -> seconds; after the last turn `null`. With the end of its input it ends all.
- It times what users call, with the default options, and single calls of a shard.
- Models are new each time, and retired untimed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from socket import socketpair
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from tensorvine.actors.engine.sockets.lines import background_loop
from tensorvine.actors.rpc.channel import Channel
from tensorvine.actors.rpc.messages import Tag, actor_name
from tensorvine.actors.shard.calls import ShardCalls

from .architectures import nas_graphs, synthetic
from .calls import connected, echo
from .measure import GIB, MIB, Action, Tensors, alternate, buffers_like, copy_action
from .quiet import quiet
from .session import NAME, Names, fill, retire
from .update_ours import Mapped, delivery_of

if TYPE_CHECKING:
    from tensorvine.actors import Consumer, Publisher, Repository

RAY, DASK = "ray", "dask"
SAVE, LOAD, FIRST_LOAD = "save", "load into buffers", "first load, as views"
SMALL_SAVE, QUERY, UPDATE, INFO = "save of 1 KiB", "prefix query", "update", "info of a version"
CALL, IN_FLIGHT = "a call of a shard", "1000 calls of a shard in flight"
KILLED, START = "a killed shard serves from its path", "cluster and repository started"
COPY, BYTE, BYTES = "one warm memory copy", "one byte there and back", "1000 bytes there and back, one by one"
IMPORT = "a Python that imports the library"
"""The floors."""
FLIGHT = 1000
LAYERS = 10
EACH, QUERIES = 3, 1000
"""Saves, loads and queries in a turn; the most queries that there are of any plan."""
TIMEOUT_S = 120.0
Times: TypeAlias = dict[str, list[float]]
"""What -> seconds."""
Measure: TypeAlias = "Callable[[], Times]"


class Part(Enum):
    """What is measured: where callers and shards are, or how long it takes until there are any."""

    WITHIN = "within a node"
    BETWEEN = "between nodes"
    START = "start"


@dataclass(frozen=True)
class Amount:
    """How much a part measures."""

    model_bytes: int
    graphs: int
    """That are stored when prefixes are asked for."""
    warmup: int
    """Turns that do not count."""
    turns: int
    """That do."""
    calls: int
    """In each turn."""
    kills: int


# ---- the parts: each gives the times of a turn ------------------------------------------------------------


def within(engine: str, amount: Amount) -> Iterator[Times]:
    """Measure what there is on one node."""
    from tensorvine.actors import Consumer, Publisher, Repository

    ends = socketpair()
    with (
        Repository.start(NAME, engine=engine) as repo,
        Consumer.start(repo, "net", Mapped) as consumer,
        Publisher(repo, "net", 1, keep=1) as publisher,
        echo(ends) as floor,
    ):
        tensors = synthetic(amount.model_bytes, LAYERS).tensors()
        transfers = Transfers(repo, tensors, amount.graphs)
        updates = Updates(consumer, publisher, {name: each.copy() for name, each in tensors.items()})
        measures = [
            transfers,
            updates,
            calls(repo, 0, floor, amount.calls),
            in_flight(repo, ends[0].sendall, ends[0].recv),
        ]
        yield from turns(measures, amount)
        transfers.check()
        updates.check()
        for _ in range(amount.kills):
            yield {KILLED: [killed(engine)], IMPORT: [import_s()]}


def between(engine: str, amount: Amount) -> Iterator[Times]:
    """Measure calls of a shard on another node."""
    from tensorvine.actors import Repository

    options: dict[str, Any] = {"shards": 2, "store_bytes": GIB // 8, "preallocate_bytes": 0}
    with (
        NODES[engine]() as running,
        Repository.start(NAME, engine=running, **options) as repo,
        echo(connected()) as floor,
    ):
        session = repo._session
        nodes = {shard: session.connection(shard).hello.node for shard in session.shards}
        expect(sum(node == session.node for node in nodes.values()) == 1, f"one shard on each node in {nodes}")
        shard = next(shard for shard, node in nodes.items() if node != session.node)
        yield from turns([calls(repo, shard, floor, amount.calls)], amount)


def start(engine: str, amount: Amount) -> Iterator[Times]:
    """Measure the start of a cluster with a repository: until a client of it is there."""
    from tensorvine.actors import Repository

    del amount
    floor_s, began = import_s(), time.perf_counter()
    with Repository.start(NAME, engine=engine):
        yield {START: [time.perf_counter() - began], IMPORT: [floor_s]}


PARTS = {Part.WITHIN: within, Part.BETWEEN: between, Part.START: start}


def turns(measures: list[Measure], amount: Amount) -> Iterator[Times]:
    """Measure all in each turn; the first ones do not count."""
    for turn in range(amount.warmup + amount.turns):
        found: Times = {}
        for measure in measures:
            found |= measure()
        yield found if turn >= amount.warmup else {}


# ---- models -----------------------------------------------------------------------------------------------


class Transfers:
    """Saves and loads of a model, and prefix queries.

    Args:
        repo: the client.
        tensors: of the model.
        graphs: how many are saved first, which queries meet.
    """

    def __init__(self, repo: Repository, tensors: Tensors, graphs: int) -> None:
        self._repo, self._tensors, self._names = repo, tensors, Names("model")
        self._buffers = buffers_like(tensors)
        fill(nas_graphs(graphs), Names("nas"))
        fresh = islice(nas_graphs(graphs + QUERIES), graphs, None)
        kept = repo.save(self._names.fresh(), tensors).ref
        self._left = 0
        """Bytes that were stored before the turn."""
        self._actions = {
            SAVE: Action(
                lambda: repo.save(self._names.fresh(), tensors), lambda saved: retire(repo, saved.ref, self._left)
            ),
            LOAD: Action(lambda: repo.load(kept, into=self._buffers)),
            QUERY: Action(lambda: repo.longest_prefix(next(fresh)), lambda match: match.release()),
            COPY: copy_action(tensors, self._buffers),
        }

    def __call__(self) -> Times:
        """Measure each some times, and a first load once."""
        repo = self._repo
        self._left = repo.stats().bytes_memory
        found = measured(self._actions, EACH)
        ref = repo.save(self._names.fresh(), self._tensors).ref
        found |= measured({FIRST_LOAD: Action(lambda: repo.load(ref))}, 1)
        retire(repo, ref, self._left)
        return found

    def check(self) -> None:
        """See that the last load brought what was saved."""
        for buffer in self._buffers.values():
            buffer.fill(0)
        self._actions[LOAD].run()
        expect(all(np.array_equal(self._buffers[name], each) for name, each in self._tensors.items()), "tensors")


class Updates:
    """From the hand-over of a version until a consumer, a process of its own, answers with it.

    Args:
        consumer: of `Mapped`.
        publisher: of the same name.
        tensors: what is published; all of it changes each time.
    """

    def __init__(self, consumer: Consumer, publisher: Publisher, tensors: Tensors) -> None:
        self._consumer, self._publisher, self._tensors = consumer, publisher, tensors

    def __call__(self) -> Times:
        """Measure one."""
        for each in self._tensors.values():
            each += 1
        quiet(since=time.monotonic())
        handed = time.time()
        ref = self._publisher.publish(self._tensors).committed(TIMEOUT_S).ref
        self._consumer.wait_for(ref.version, TIMEOUT_S)
        return {UPDATE: [delivery_of(self._consumer, ref.version, TIMEOUT_S).swapped_at - handed]}

    def check(self) -> None:
        """See that the consumer answers with the last one."""
        answer = self._consumer.infer(5, TIMEOUT_S).outputs
        expect(answer == {name: float(each[5]) for name, each in self._tensors.items()}, "the consumer's answer")


def killed(engine: str) -> float:
    """Return the seconds from a shard's death until its next life has given a version that only the path had."""
    from tensorvine.actors import Repository

    tensors = synthetic(MIB, LAYERS).tensors()
    with tempfile.TemporaryDirectory(prefix="engines-") as folder, ExitStack() as stack:
        options: dict[str, Any] = {"path": folder, "store_bytes": GIB // 8, "preallocate_bytes": 0, "engine": engine}
        repo = stack.enter_context(Repository.start("kept", shards=1, **options))
        ref = repo.save("model", tensors, durability="disk").ref
        reader = stack.enter_context(Repository.connect("kept", engine=engine))
        pid = reader._session.connection(0).hello.pid
        began = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        found = reader.load(ref, timeout=TIMEOUT_S)
        took = time.perf_counter() - began
        expect(all(np.array_equal(found[name], each) for name, each in tensors.items()), "tensors of the path")
        expect(reader._session.connection(0).hello.pid != pid, "another process")
        return took


def import_s() -> float:
    """Time the floor of whatever starts a process."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import tensorvine.actors"], check=True, timeout=TIMEOUT_S)
    return time.perf_counter() - began


# ---- calls ------------------------------------------------------------------------------------------------


def calls(repo: Repository, shard: int, floor: Callable[[], None], count: int) -> Measure:
    """Return what times calls of a shard, one after the other, and a small save to it."""
    names, tensors, session = Names("call"), {"t": np.ones(128)}, repo._session

    def fresh() -> str:
        while session.home(name := names.fresh()) != shard:
            pass
        return name

    kept = repo.save(fresh(), tensors).ref
    actions = {
        CALL: Action(lambda: session.call(shard, ShardCalls.tag())),
        INFO: Action(lambda: repo.info(kept)),
        SMALL_SAVE: Action(lambda: repo.save(fresh(), tensors), lambda saved: repo.retire(saved.ref)),
        BYTE: Action(floor),
    }
    return lambda: measured(actions, count)


def in_flight(repo: Repository, send: Callable[[bytes], object], receive: Callable[[int], bytes]) -> Measure:
    """Return what times calls that are all sent before an answer is waited for; beside it, as many bytes sent back."""
    channel = Channel(repo._session.engine, actor_name(repo.name, 0))

    async def asked() -> list[Tag]:
        return await asyncio.gather(*(channel.ask(ShardCalls.tag(), TIMEOUT_S) for _ in range(FLIGHT)))

    def all_at_once() -> None:
        answers = asyncio.run_coroutine_threadsafe(asked(), background_loop()).result(TIMEOUT_S)
        expect(len(answers) == FLIGHT, f"{FLIGHT} answers")

    def bytes_back() -> None:
        send(b"x" * FLIGHT)
        left = FLIGHT
        while left:
            left -= len(receive(left))

    return lambda: measured({IN_FLIGHT: Action(all_at_once), BYTES: Action(bytes_back)}, 1)


def measured(actions: dict[str, Action], count: int) -> Times:
    """Time actions in turn."""
    return {name: list(found.times) for name, found in alternate(actions, rounds=count, warmup=0).items()}


# ---- two nodes --------------------------------------------------------------------------------------------


@contextmanager
def _raylets() -> Iterator[str]:
    from .raylets import two_raylets

    with two_raylets(GIB // 4):
        yield RAY


@contextmanager
def _dask_nodes() -> Iterator[Any]:
    import dask.config

    from tests.support.dask_cluster import dask_processes

    with dask.config.set({"tensorvine.node": "one"}), dask_processes("one", "two") as (_, engine):
        yield engine


NODES = {RAY: _raylets, DASK: _dask_nodes}
"""Engine -> starts two nodes, on one of which this process is; gives what `engine=` takes."""


def expect(holds: bool, what: str) -> None:
    """Raise `RuntimeError` where something is not as it should be."""
    if not holds:
        raise RuntimeError(f"benchmark engines: expected {what}; found otherwise")


def main() -> None:
    """Measure a part."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anybody prints is no answer
    engine, part, amount = sys.argv[1:]
    with closing(PARTS[Part(part)](engine, Amount(**json.loads(amount)))) as measuring:
        for _ in sys.stdin:
            print(json.dumps(next(measuring, None)), file=answers, flush=True)


if __name__ == "__main__":
    main()
