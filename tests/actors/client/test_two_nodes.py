"""Two nodes on one machine: bytes stay where they were made; readers elsewhere get them by the ways that carry."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.own_cluster

SCRIPT = textwrap.dedent("""
    from contextlib import ExitStack
    from pathlib import Path
    import numpy as np, os, psutil, ray
    from ray.cluster_utils import Cluster
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    from tensorvine.actors import Repository
    from tensorvine.store import Layer, ModelGraph
    from tests.support.waiting import eventually
    from tests.support.warm import warm_workers
    from tests.support.warm.worker import FOLDER

    arguments = dict(num_cpus=1, object_store_memory=256 << 20)
    warm = ExitStack()
    warm.enter_context(warm_workers())
    cluster = Cluster(initialize_head=True, head_node_args={**arguments, "include_dashboard": False})
    other = cluster.add_node(**arguments)
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()

    @ray.remote(num_cpus=1)
    class Probe:
        def ready(self):
            return True

    for row in ray.nodes():  # until actors can be placed there, Ray puts a shard that prefers a node elsewhere
        here = NodeAffinitySchedulingStrategy(row["NodeID"], soft=False)
        probe = Probe.options(scheduling_strategy=here).remote()
        ray.get(probe.ready.remote(), timeout=60)
        ray.kill(probe)
    def maps_of(pid):
        try:
            return Path(f"/proc/{pid}/maps").read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has ended since
            return ""

    repo = Repository.start("pair", preallocate_bytes=0)
    hellos = {s: repo._session.connection(s).hello for s in repo._session.shards}
    print("shards on nodes:", len({h.node for h in hellos.values()}))
    mine = ray.get_runtime_context().get_node_id()
    engine = repo.engine
    sockets = {s: engine.reach(engine.find(f"pair/shard-{s}"), 60.0, "a shard")[0] for s in hellos}
    print("a socket of their own machine:", [(sockets[s].place is None) == (h.node == mine) for s, h in hellos.items()])

    tensors = {"a": np.arange(1 << 20, dtype=np.int64), "b": np.ones(7)}
    graph = ModelGraph([Layer("in", {"class": "Input"}, [], ["a", "b"])])
    refs = [repo.save(f"m{i}", tensors, graph=graph).ref for i in range(6)]
    stats = {s.shard: s for s in repo.stats().shards}
    here = next(s for s, h in hellos.items() if h.node == ray.get_runtime_context().get_node_id())
    far = 1 - here
    made = 6 * ((8 << 20) + 56)
    print("bytes are where they were made:", stats[here].bytes_memory == made, stats[far].bytes_memory)

    @ray.remote(num_cpus=1)
    def elsewhere(names):
        client = Repository.connect("pair")
        transports = ("socket", "object_store")
        ways = [client._reader.fetch(names[0], transport=way, verify=True).transports for way in transports]
        for name in names:
            loaded = client.load(name)
            assert np.array_equal(loaded["a"], np.arange(1 << 20)) and loaded["b"].sum() == 7, name
            assert not loaded["a"].flags.writeable
        child = {**{k: v.copy() for k, v in loaded.items()}, "c": np.zeros(100_000)}
        mine = client.save("child", child, parent=names[0])
        with client.longest_prefix(graph) as match:
            assert match.layers == {"in": "in"}
        node = ray.get_runtime_context().get_node_id()
        client.close()
        return node, mine.bytes_written, str(mine.ref), ways

    node, written, child, ways = ray.get(
        elsewhere.options(scheduling_strategy=NodeAffinitySchedulingStrategy(hellos[far].node, soft=False)).remote(
            [str(r) for r in refs]
        ),
        timeout=100,
    )
    print("a reader elsewhere got all:", node == hellos[far].node, written)
    print("by these ways:", ways)
    loaded = repo.load(child)
    print("and back:", sorted(loaded), loaded["c"].shape, np.array_equal(loaded["a"], tensors["a"]))
    for ref in refs:
        repo.retire(ref)
    # shards free by orders, after the answer
    shared = lambda: sum(s.tensors for s in repo.stats().shards) == 3  # the catalog may move them, to balance memory
    eventually(shared, "the tensors that the child shares to stay alone")
    print("shared tensors stay: True")
    repo.retire(child)
    empty = lambda: all(s.tensors == s.bytes_allocated == 0 for s in repo.stats().shards)
    eventually(empty, "nothing to be left")
    print("nothing left: True")

    lone = Repository.start("lone", shards=1, preallocate_bytes=0)
    hello = lone._session.connection(0).hello
    other = next(row["NodeID"] for row in ray.nodes() if row["NodeID"] != hello.node)

    @ray.remote(num_cpus=1)
    def from_elsewhere():
        client = Repository.connect("lone")
        connection = client._session.connection(0)
        assert connection.view is None
        given = {"a": np.arange(5 << 20), "b": np.arange(7)}
        first = client.save("m", given, inherit=None)
        fetched = not connection.unreached
        connection.unreached = True
        given["a"][:] = 3
        second = client.save("m", given, inherit=None)
        client.close()
        return fetched, str(first.ref), str(second.ref)

    there = NodeAffinitySchedulingStrategy(other, soft=False)
    fetched, first, second = ray.get(from_elsewhere.options(scheduling_strategy=there).remote(), timeout=100)
    folder = os.environ[FOLDER]
    ours = [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get(FOLDER) == folder]
    maps = [maps_of(process.pid) for process in ours]
    workers = [each for each in maps if "_raylet.so" in each]  # and what they are forked from
    framework = any(f"lib{name}" in each for each in workers for name in ("torch", "tensorflow", "jax"))
    print("workers, and a framework in one:", len(workers) >= 7, framework)
    whole = np.array_equal(lone.load(first)["a"], np.arange(5 << 20)), (lone.load(second)["a"] == 3).all()
    print("a save from elsewhere is fetched:", fetched, *map(bool, whole))
    lone.close()
    repo.close()
    ray.shutdown()
    cluster.shutdown()
    warm.close()
""")

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(240)
def test_two_raylets_share_a_repository() -> None:
    command = [sys.executable, "-c", SCRIPT]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines()[-10:] == [
        "shards on nodes: 2",
        "a socket of their own machine: [True, True]",
        "bytes are where they were made: True 0",
        "a reader elsewhere got all: True 800000",
        "by these ways: [{'socket': 8388664}, {'object_store': 8388664}]",
        "and back: ['a', 'b', 'c'] (100000,) True",
        "shared tensors stay: True",
        "nothing left: True",
        "workers, and a framework in one: True False",
        "a save from elsewhere is fetched: True True True",
    ]
