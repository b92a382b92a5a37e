"""What `links` runs on a host: `python -m benchmarks.links_host far HOST`, or `near FAR_HOST PORT ROUNDS`.

Rules
- `near` measures, and prints one line of JSON. What is saved goes to a shard on the other host and what is loaded comes
  from there; each version is new, and is retired untimed.
- The floor is one TCP connection between the same hosts, from memory into memory that was used before: `sendall` and
  `recv_into`, in both directions. `far` is its other end.
- The peer is Ray's object store: for a save `put` here and `get` by an actor there, for a load `get` of what lies
  there.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from .architectures import nas_graphs, small_tensors, synthetic
from .measure import MIB, Action, Sample, Tensors, alternate, progress
from .raylets import actor_named, node_of, started_on
from .update_ours import Mapped

if TYPE_CHECKING:
    from tensorvine.actors import Repository
    from tensorvine.actors.training.numpy import NumpyTraining, StepContext
    from tensorvine.actors.training.training import RankContext

HERE = 2
"""The host that measures; the other one is 1."""
TIMEOUT_S = 120.0
UP, DOWN = b"u", b"d"
MODELS = {"8 tensors": 8, "2048 tensors": 2048}
MODEL_BYTES, STATE_BYTES, CANDIDATES = 256 * MIB, 64 * MIB, 24
STEPS_AHEAD = 60
"""So that clones stand by when the step comes that is forked."""
TRIED = 3
"""Updates that are not counted: of the first ones each goes by a way that was not measured yet."""
Times = dict[str, list[float]]


# ---- the floor --------------------------------------------------------------------------------------------


def far(host: str) -> None:
    """Print a port, and send or receive what is asked for there until the connection ends."""
    with socket.create_server((host, 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    memory = np.ones(MODEL_BYTES, np.uint8).data
    with connection:
        while asked := connection.recv(9, socket.MSG_WAITALL):
            part = memory[: int.from_bytes(asked[1:], "big")]
            if asked[:1] == DOWN:
                connection.sendall(part)
            else:
                receive(connection, part)
                connection.sendall(UP)


def receive(connection: socket.socket, memory: memoryview) -> None:
    """Fill memory."""
    while memory:
        length = connection.recv_into(memory)
        if not length:
            raise EOFError(f"a raw socket: expected {len(memory)} more bytes; found its end")
        memory = memory[length:]


class Raw:
    """One connection to `far`."""

    def __init__(self, host: str, port: int) -> None:
        self._connection = socket.create_connection((host, port))
        self._memory = np.ones(MODEL_BYTES, np.uint8).data

    def up(self, nbytes: int) -> None:
        """Send so many bytes, and hear that they are there."""
        self._connection.sendall(UP + nbytes.to_bytes(8, "big"))
        self._connection.sendall(self._memory[:nbytes])
        self._connection.recv(1)

    def down(self, nbytes: int) -> None:
        """Receive so many bytes."""
        self._connection.sendall(DOWN + nbytes.to_bytes(8, "big"))
        receive(self._connection, self._memory[:nbytes])


# ---- the peer ---------------------------------------------------------------------------------------------


class Holder:
    """An actor on the other host."""

    def take(self, references: list[Any]) -> int:
        """Get an object that lies elsewhere; gives how many tensors it has."""
        import ray

        return len(ray.get(references[0]))

    def give(self, size: int, tensors: int) -> list[Any]:
        """Put a model; gives its reference."""
        import ray

        return [ray.put(synthetic(size, tensors).tensors())]


# ---- what is measured -------------------------------------------------------------------------------------


class Near:
    """The host that measures.

    Args:
        raw: the floor.
        nodes: ids: this host's, and the other one's.
        rounds: that count; 1: a first look, with small models.
    """

    def __init__(self, raw: Raw, nodes: tuple[str, str], rounds: int) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._raw = raw
        self._here, self._there = nodes
        quick = rounds == 1
        self._rounds, self._warmup = rounds, 0 if quick else 1
        self._size = MIB if quick else MODEL_BYTES
        self._state = MIB if quick else STATE_BYTES
        self._candidates = 3 if quick else CANDIDATES
        self._names = count()
        there: Any = NodeAffinitySchedulingStrategy(self._there, soft=False)
        self._holder: Any = ray.remote(Holder).options(num_cpus=0, scheduling_strategy=there).remote()

    def run(self) -> dict[str, Any]:
        """Measure all."""
        found: dict[str, Any] = {}
        with _repository("links", self._there, self._here, 5 * self._size + 64 * MIB) as repo:
            for model, tensors in MODELS.items():
                progress(f"save and load, {model}")
                found[model] = self._transfers(repo, synthetic(self._size, tensors).tensors(), tensors)
        with _repository("updates", self._here, self._there, 5 * self._size + 64 * MIB) as repo:
            progress("update")
            found["update"] = self._updates(repo)
        progress("fork")
        found["fork"] = self._forks()
        progress("search")
        found["search"] = self._searches()
        return found

    def _transfers(self, repo: Repository, tensors: Tensors, number: int) -> Times:
        import ray

        nbytes = sum(each.nbytes for each in tensors.values())
        given: list[Any] = []
        stored: list[Any] = []

        def fresh() -> str:
            return f"model-{next(self._names)}"

        def prepare(_: object = None) -> None:
            """Have a version and an object lie on the other host that nobody has loaded."""
            for ref in stored:
                repo.retire(ref)
            stored[:] = [repo.save(fresh(), tensors, timeout=TIMEOUT_S).ref]
            given[:] = ray.get(self._holder.give.remote(nbytes, number), timeout=TIMEOUT_S)

        def put() -> None:
            ray.get(self._holder.take.remote([ray.put(tensors)]), timeout=TIMEOUT_S)

        prepare()
        samples = alternate(
            {
                "save": Action(
                    lambda: repo.save(fresh(), tensors, timeout=TIMEOUT_S), lambda saved: repo.retire(saved.ref)
                ),
                "load": Action(lambda: repo.load(stored[0], timeout=TIMEOUT_S), prepare),
                "raw up": Action(lambda: self._raw.up(nbytes)),
                "raw down": Action(lambda: self._raw.down(nbytes)),
                "put": Action(put),
                "get": Action(lambda: ray.get(given[0], timeout=TIMEOUT_S), prepare),
            },
            rounds=self._rounds,
            warmup=self._warmup,
        )
        found = repo.load(stored[0], timeout=TIMEOUT_S)
        expect(all(np.array_equal(found[name], each) for name, each in tensors.items()), "loaded tensors")
        for ref in stored:
            repo.retire(ref)
        return _lists(samples)

    def _updates(self, repo: Repository) -> Times:
        """Publish from here what a consumer on the other host takes; the shard is here."""
        from tensorvine.actors import Consumer, Publisher

        tensors = synthetic(self._size, 8).tensors()
        found: Times = {"update": [], "raw up": []}
        with ExitStack() as stack:
            consumer = stack.enter_context(
                started_on(
                    self._there,
                    lambda: Consumer.start(repo, "net", Mapped, node=self._there),
                    lambda consumer: consumer.actor,
                )
            )
            publisher = stack.enter_context(Publisher(repo, "net", 1, keep=1))
            tried = TRIED if self._warmup else 0
            for turn in range(tried + self._rounds):
                for each in tensors.values():
                    each += 1
                began = time.perf_counter()
                ref = publisher.publish(tensors).committed(TIMEOUT_S).ref
                consumer.wait_for(ref.version, TIMEOUT_S)
                took = time.perf_counter() - began
                began = time.perf_counter()
                self._raw.up(self._size)
                if turn >= tried:
                    found["update"].append(took)
                    found["raw up"].append(time.perf_counter() - began)
            answer = consumer.infer(5, TIMEOUT_S).outputs
            expect(answer == {name: float(each[5]) for name, each in tensors.items()}, "the consumer's answer")
        return found

    def _forks(self) -> Times:
        """Fork a training of this host into a clone on the other one; Ray places it, and what it places here is off."""
        from tensorvine.actors import fork, start_trainers

        found: Times = {"readiness": [], "held": [], "raw up": []}
        items = self._state // 8 // 8  # 8 tensors of float64
        trainers = start_trainers(lambda context: _training(context, items), 1, nodes=[self._here], timeout=TIMEOUT_S)
        try:
            for _ in range(10 * self._rounds):
                at = trainers.describe()[0].steps_done + STEPS_AHEAD
                trainers.train_async(STEPS_AHEAD + 10)
                clones = fork(trainers, at_step=at, timeout=TIMEOUT_S)
                losses = trainers.results(TIMEOUT_S)[0]
                elsewhere = node_of(clones[0]) == self._there
                expect(clones.train(1, TIMEOUT_S)[0][0] == losses[STEPS_AHEAD], "the clone's next loss")
                report = clones.report
                clones.close()
                if not elsewhere:
                    continue
                began = time.perf_counter()
                self._raw.up(self._state)
                found["raw up"].append(time.perf_counter() - began)
                found["readiness"].append(report.readiness_s)
                found["held"].append(report.held_s)
                if len(found["held"]) == self._rounds:
                    break
        finally:
            trainers.close()
        return found

    def _searches(self) -> Times:
        """Run two searchers on one host, and on two."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
        from tensorvine.actors import Repository

        found: Times = {"two hosts": [], "one host": []}
        for turn in range(self._rounds + 1):
            for way, nodes in (("two hosts", (self._here, self._there)), ("one host", (self._here, self._here))):
                with Repository.start("search", shards=2, store_bytes=64 * MIB, preallocate_bytes=0):
                    at: Any = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
                    actors: list[Any] = [
                        ray.remote(Searcher).options(num_cpus=0, scheduling_strategy=each).remote(place)
                        for place, each in enumerate(at)
                    ]
                    ray.get([actor.evaluate.remote(1) for actor in actors], timeout=TIMEOUT_S)
                    began = time.perf_counter()
                    ray.get([actor.evaluate.remote(self._candidates) for actor in actors], timeout=TIMEOUT_S)
                    if turn:
                        found[way].append((time.perf_counter() - began) / self._candidates / len(actors))
                    for actor in actors:
                        ray.kill(actor)
        return found


class Searcher:
    """A worker of a search: asks for the best ancestor of a candidate, loads what it takes of it, saves it."""

    def __init__(self, seed: int) -> None:
        from tensorvine.actors import Repository

        self._seed = seed
        self._repo: Repository = Repository.connect("search")
        self._graphs: Iterator[Any] = nas_graphs(1000, seed, tensors=True)
        self._count = 0

    def evaluate(self, candidates: int) -> None:
        """Evaluate so many; there is no training."""
        for _ in range(candidates):
            graph = next(self._graphs)
            tensors = small_tensors(graph, seed=self._count)
            self._count += 1
            match = self._repo.longest_prefix(graph)
            if match is not None:
                with match:
                    mine = {theirs: own for own, theirs in match.tensors.items()}
                    taken = self._repo.load(match.ref, tensors=list(mine)) if mine else {}
                    tensors |= {mine[name]: array for name, array in taken.items()}
            self._repo.save(f"s{self._seed}/{self._count}", tensors, graph=graph, quality=self._count / 1000)


def _training(context: RankContext, items: int) -> NumpyTraining:
    from tensorvine.actors.training.numpy import NumpyTraining

    state = {f"w{place}": np.full(items, 1.0 + place) for place in range(8)}

    def step(now: StepContext) -> float:
        time.sleep(0.05)  # as a step takes that leaves the processor to others
        for name in state:
            now.reduce(name, now[name])
            now.update(name, now[name] * 0.99)
        return float(sum(now[name][0] for name in state))

    return NumpyTraining(context, state, step, parameters=list(state), random=np.random.default_rng(0))


@contextmanager
def _repository(name: str, node: str, other: str, store_bytes: int) -> Iterator[Repository]:
    """Start a repository whose one shard is on a node; end it."""
    from tensorvine.actors import Repository

    repo = started_on(
        node,
        lambda: Repository.start(name, shards=1, store_bytes=store_bytes, nodes=_only(node)),
        lambda _: actor_named(f"{name}/shard-0"),
    )
    with repo:
        yield repo


def _only(node: str) -> dict[str, float]:
    """Return what only this node has: a resource of Ray's."""
    import ray

    address = next(row["NodeManagerAddress"] for row in ray.nodes() if row["NodeID"] == node)
    return {f"node:{address}": 0.001}


def _lists(samples: dict[str, Sample]) -> Times:
    return {name: list(sample.times) for name, sample in samples.items()}


def expect(true: bool, what: str) -> None:
    """Raise `RuntimeError` unless what came is what was sent."""
    if not true:
        raise RuntimeError(f"benchmark links: {what}: expected what was sent; found other bytes")


def near(host: str, port: int, rounds: int) -> None:
    """Measure, and print what was found."""
    import ray

    from tests.hosts.node import connect

    connect(HERE)
    here = ray.get_runtime_context().get_node_id()
    there = next(str(row["NodeID"]) for row in ray.nodes() if row["NodeID"] != here)
    print(json.dumps(Near(Raw(host, port), (here, there), rounds).run()), flush=True)


ROLES: dict[str, Callable[..., None]] = {
    "far": far,
    "near": lambda host, port, rounds: near(host, int(port), int(rounds)),
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
