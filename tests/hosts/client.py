"""A client on one host: `python -m tests.hosts.client HOST`. It carries out what lines on its standard input ask for.

Rules
- A line in is an operation with a number, a line out its answer or its error; many go on at once.
- It ends with its standard input, in whatever it is.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2
from tensorvine.actors.client.repository import Repository
from tensorvine.actors.edge.consumer import EdgeConsumer
from tensorvine.actors.memory.process import this_process
from tensorvine.actors.rpc.catalog_calls import CatalogCalls
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.clusters.cli.options import keep_from
from tensorvine.store.errors import TensorVineError

from tests.hosts import content, gates, searching
from tests.hosts.node import connect
from tests.hosts.runs import Run

SHARD = ("tensors", "bytes_allocated", "bytes_staged", "bytes_replicated")
CATALOG = ("models", "pins")
"""Statistics that are 0 where nothing is left."""


class _Taking:
    """A model that answers with its tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}

    def assign(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = {name: array.copy() for name, array in tensors.items()}

    def __call__(self, batch: Any) -> dict[str, Any]:
        return self.tensors


class Operations:
    """What may be asked for, by the name of the method."""

    def __init__(self) -> None:
        self._repositories: dict[str, Repository] = {}
        self._runs: dict[str, Run] = {}
        self._lock = threading.Lock()
        self._enough = threading.Event()

    def start(self, repository: str, options: dict[str, Any]) -> None:
        """Start a repository."""
        if "keep" in options:
            options["keep"] = keep_from(options["keep"])
        self._repositories[repository] = Repository.start(repository, preallocate_bytes=0, **options)

    def save(self, repository: str, name: str, seed: int, durability: str, timeout: float) -> int:
        """Save a version; give its number."""
        tensors = content.tensors(name, seed)
        saved = self._at(repository).save(name, tensors, durability=durability, timeout=timeout)  # pyright: ignore[reportArgumentType]
        return saved.ref.version

    def load(self, repository: str, model: str, timeout: float) -> int:
        """Load a version; give the seed of its content."""
        return content.seed_of(model.partition("@")[0], self._at(repository).load(model, timeout=timeout))

    def retire(self, repository: str, model: str) -> None:
        """Retire a version."""
        self._at(repository).retire(model)

    def stop(self, prefix: str) -> None:
        """Stop the repositories that this client started or connected to, by the beginning of their names."""
        for repository in [name for name in self._repositories if name.startswith(prefix)]:
            self._repositories.pop(repository).stop()

    def flush(self, repository: str, timeout: float = 60.0) -> None:
        """Wait until all is on the path."""
        self._at(repository).flush(timeout=timeout)

    def models(self, repository: str) -> list[str]:
        """Name all versions."""
        return sorted(map(str, self._at(repository).models()))

    def scale(self, repository: str, shards: int, timeout: float) -> None:
        """Change the number of shards."""
        self._at(repository).scale(shards=shards, timeout=timeout)

    def checked(self, repository: str) -> list[str]:
        """Name what `verify` finds."""
        return [str(problem) for problem in self._at(repository).verify(timeout=60.0)]

    def left(self, repository: str) -> list[str]:
        """Say what the catalog and each shard hold that they should not without models, savers and readers."""
        stats = self._at(repository).stats()
        held = {f"shard {shard.shard}": _left(shard, SHARD) for shard in stats.shards}
        held["catalog"] = _left(stats.catalog, CATALOG)
        return [f"{who}: {left}" for who, left in held.items() if left]

    def stats(self, repository: str, fact: str) -> dict[str, int]:
        """Tell something of each shard's stats: node -> that."""
        places = self.places(repository)
        return {places[shard.shard]: getattr(shard, fact) for shard in self._at(repository).stats().shards}

    def places(self, repository: str) -> dict[int, str]:
        """Tell the node that each shard runs on."""
        session = self._at(repository)._session
        return {shard: session.connection(shard).hello.node for shard in session.shards}

    def placed(self, repository: str) -> list[str]:
        """Name the node of each shard, as the shards say themselves."""
        session = self._at(repository)._session
        session.refresh()
        greeting = ShardCalls.hello(session.client, session.node, this_process())
        return [session.call(shard, greeting).node for shard in session.shards]

    def catalog(self, repository: str) -> str:
        """Name the node of the catalog."""
        session = self._at(repository)._session
        return session.ask(CatalogCalls.hello(session.client, session.node)).node

    def holders(self, repository: str, name: str) -> list[str]:
        """Name the nodes whose shards have tensors of a name's newest version."""
        session = self._at(repository)._session
        located = session.ask(CatalogCalls.locate(session.client, name, None, None))
        places = self.places(repository)
        return sorted({places[shard] for shard, _ in located.places.values()})

    def warn(self, node: str) -> None:
        """Tell a node to drain, as an autoscaler does before it takes a machine away."""
        kind = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        client = GcsClient(address=ray.get_runtime_context().gcs_address)
        accepted, why = client.drain_node(node, kind, "a test", time.time_ns() // 1_000_000 + 600_000)
        if not accepted:
            raise RuntimeError(why)

    def read(self, repository: str, seeds: dict[str, int]) -> dict[str, Any]:
        """Load models in turn until `enough` is called; give how many loads, the slowest, and what was wrong."""
        loads, slowest, wrong = 0, 0.0, list[str]()
        while not self._enough.is_set():
            for name, seed in seeds.items():
                began = time.monotonic()
                try:
                    if self.load(repository, name, 60.0) != seed:
                        wrong.append(f"{name}: other bytes")
                except TensorVineError as exc:
                    wrong.append(f"{name}: {exc!r}")
                loads, slowest = loads + 1, max(slowest, time.monotonic() - began)
        return {"loads": loads, "slowest": slowest, "wrong": wrong}

    def await_newer(self, repository: str, name: str, after: int, timeout: float) -> int | None:
        """Wait for a version above one; give its number."""
        newer = self._at(repository).wait_newer(name, after, timeout)
        return newer.version if newer else None

    def created(self, repository: str, model: str) -> float:
        """Tell when a version was created, as it says, in seconds since 1970."""
        return self._at(repository).info(model).created.timestamp()

    def consumed(self, redis: str, repository: str, name: str) -> int:
        """Take the newest version as a program outside of the cluster does; give the seed of its content."""
        with EdgeConsumer(redis, name, _Taking, repository=repository) as consumer:
            return content.seed_of(name, consumer.infer(None).outputs)

    def candidate(self, repository: str, name: str, kinds: str) -> str | None:
        """Store a model of layers of these kinds; name whom it inherits from."""
        return searching.candidate(self._at(repository), name, kinds)

    def search(self, repository: str, run: str, candidates: int) -> None:
        """Store models whose layers are drawn, each with what it inherits."""
        searching.search(self._at(repository), run, candidates)

    def lineages(self, repository: str, prefix: str) -> dict[str, list[str]]:
        """Hold models of `candidate` and `search` against their owners; give the lineage of each."""
        return searching.verified(self._at(repository), prefix)

    def clock(self) -> float:
        """Tell what time it is here, in seconds since 1970."""
        return time.time()

    def enough(self) -> None:
        """End `read`."""
        self._enough.set()

    def where(self) -> str:
        """Tell the address of the node that this client is on, as Ray takes it."""
        return ray.util.get_node_ip_address()

    def nodes(self) -> dict[str, str]:
        """Tell the nodes that Ray takes to be alive: address -> id."""
        return {row["NodeManagerAddress"]: row["NodeID"] for row in ray.nodes() if row["Alive"]}

    def train(self, run: str, nodes: Sequence[str]) -> None:
        """Start a training."""
        self._runs[run] = Run(run, list(nodes))

    def fork(self, run: str, clones: str, timeout: float) -> int:
        """Fork it, and hold the clones against it."""
        return self._runs[run].forked(clones, timeout)

    def end(self, run: str) -> None:
        """End a training."""
        self._runs.pop(run).close()

    def living(self, prefix: str) -> list[str]:
        """Name the actors that are there, by the beginning of their names."""
        actors = ray.util.list_named_actors(all_namespaces=True)
        return [actor["name"] for actor in actors if actor["name"].startswith(prefix)]

    def _at(self, repository: str) -> Repository:
        with self._lock:
            if repository not in self._repositories:
                self._repositories[repository] = Repository.connect(repository)
            return self._repositories[repository]


def _left(stats: object, wanted: Sequence[str]) -> dict[str, int]:
    return {name: value for name in wanted if (value := getattr(stats, name))}


def main(host: int) -> None:
    """Carry out lines until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed goes to the log
    gates.install()  # Ray takes methods from the class of who starts an actor
    connect(host)
    operations, writing = Operations(), threading.Lock()

    def tell(answer: dict[str, Any]) -> None:
        with writing:
            print(json.dumps(answer), file=answers, flush=True)

    def carry_out(number: int, what: str, arguments: dict[str, Any]) -> None:
        try:
            tell({"number": number, "value": getattr(operations, what)(**arguments)})
        except Exception as exc:  # noqa: BLE001 - the test judges it
            traceback.print_exc()  # for the client's log
            ours = isinstance(exc, TensorVineError)
            tell({"number": number, "error": type(exc).__name__, "ours": ours, "text": str(exc)})

    tell({"number": 0, "value": None})
    for line in sys.stdin:
        asked = json.loads(line)
        thread = threading.Thread(target=carry_out, args=(asked["number"], asked["what"], asked["arguments"]))
        thread.daemon = True
        thread.start()
    os._exit(0)  # whatever hangs


if __name__ == "__main__":
    main(int(sys.argv[1]))
