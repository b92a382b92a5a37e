"""Scenarios on three raylets, for `test_replicas`: a JSON line of all names, then each in turn, one of its outcome.

Rules
- They share one cluster; each has a repository of its own. What ends a node comes last.
- Faults are set off from within an actor at a call of choice, never by time.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

os.environ["RAY_ADDRESS"] = "local"

import numpy as np
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from tensorvine.actors import Repository
from tensorvine.actors.shard.parts.copies import Copies
from tensorvine.actors.shard.parts.writes import Writes
from tensorvine.store import Layer, ModelGraph, ModelRef
from tensorvine.store.errors import (
    ModelLostError,
    ModelNotFoundError,
    OperationTimeoutError,
    OptionError,
    ShardUnavailableError,
    TensorVineError,
)

from benchmarks.core.clusters import await_room
from tests.support.commands import on
from tests.support.disk import check
from tests.support.processes import stand_still
from tests.support.waiting import PROMPT_S, eventually
from tests.support.warm import warm_workers

STORE = 256 << 20
BIG = {"a": np.arange(100_000, dtype=np.float32), "b": np.ones(1 << 20, np.float64)}
GRAPH = ModelGraph([Layer("in", {"class": "Input"}, [], ["a", "b"])])

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def node_of(repo: Repository, shard: int) -> str:
    return repo._session.connection(shard).hello.node


def actor(repo: Repository, shard: int) -> Any:
    return ray.get_actor(f"{repo.name}/shard-{shard}", namespace="tensorvine")


def process(repo: Repository, shard: int) -> psutil.Process:
    repo._session.connections.drop(shard)
    return psutil.Process(repo._session.connection(shard).hello.pid)


def kill(repo: Repository, *shards: int) -> None:
    processes = [process(repo, shard) for shard in shards]
    for victim in processes:
        victim.kill()
    psutil.wait_procs(processes, timeout=20)


def patch(repo: Repository, shard: int, change: Callable[[Any], Any]) -> Any:
    """Run something within a shard's process."""
    return ray.get(actor(repo, shard).__ray_call__.remote(change), timeout=30)


def backups(self: Any) -> tuple[int, ...]:
    return self.parts[Writes]._state.backups


def secured(repo: Repository) -> None:
    """Wait until each shard has a backup, and everything has as many copies as it is to have."""

    def complete() -> bool:
        if repo.stats().catalog.replicas_missing:
            return False
        shards = set(repo._session.shards)
        return all((found := set(patch(repo, shard, backups))) and found <= shards for shard in shards)

    eventually(complete, "everything has its copies", ignoring=(TensorVineError, ray.exceptions.RayError, ValueError))


def backup_of(repo: Repository, shard: int) -> int:
    """Return the shard that gets copies of what is saved into this one."""
    secured(repo)
    return patch(repo, shard, backups)[0]


def stat(repo: Repository, shard: int) -> Any:
    return next(s for s in repo.stats().shards if s.shard == shard)


def holder(repo: Repository) -> int:
    """The shard that takes the bytes that are made here."""
    return next(s for s in repo._session.shards if node_of(repo, s) == repo._session.node)


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(np.array_equal(found[k], v) for k, v in expected.items())


def nothing_left(repo: Repository) -> bool:
    try:
        stats = repo.stats()
    except ShardUnavailableError:
        return False
    left = (s.tensors or s.bytes_allocated or s.bytes_staged or s.bytes_replicated for s in stats.shards)
    return not (stats.catalog.pins or any(left))


def retire_all(repo: Repository) -> None:
    for ref in repo.models():
        repo.retire(ref)
    try:
        eventually(lambda: nothing_left(repo), "nothing left", timeout=PROMPT_S)
    except pytest.fail.Exception as exc:
        exc.add_note(f"found {repo.stats().shards}")
        raise


@contextmanager
def repository(name: str, **options: Any) -> Iterator[Repository]:
    options = {"shards": 3, "replicas": 2, "preallocate_bytes": 0, "store_bytes": STORE, **options}
    with Repository.start(name, **options) as repo:
        yield repo


# ---- what is kept -------------------------------------------------------------------------------------


def start_is_checked(cluster: Cluster) -> None:
    del cluster
    for options, message in (
        ({"replicas": 0}, "replicas: expected at least 1; found 0"),
        ({"replicas": 4}, "found replicas=4 with 3 living nodes and 3 shards"),
        ({"replicas": 2, "shards": 1}, "found replicas=2 with 3 living nodes and 1 shards"),
    ):
        with pytest.raises(ValueError, match=message):
            Repository.start("checked", **options)
    with repository("checked"):
        Repository.start("checked").close()
        with pytest.raises(ValueError, match="is already running with replicas=2; found replicas=3"):
            Repository.start("checked", replicas=3)


def each_version_is_on_two_nodes(cluster: Cluster) -> None:
    del cluster
    with repository("two") as repo:
        here = holder(repo)
        backup = backup_of(repo, here)
        repo.save("m", BIG, graph=GRAPH)
        assert node_of(repo, backup) != node_of(repo, here)
        kept = stat(repo, backup).bytes_replicated
        assert kept >= BIG["a"].nbytes + BIG["b"].nbytes, kept
        repo.save("m", {**BIG, "a": BIG["a"] + 1})  # "b" is inherited, and not copied again
        assert stat(repo, backup).bytes_replicated - kept < BIG["b"].nbytes
        retire_all(repo)


def a_killed_shard_comes_back(cluster: Cluster) -> None:
    del cluster
    with repository("killed") as repo:
        here = holder(repo)
        name, small = "m", "small"
        secured(repo)
        repo.save(name, {"a": BIG["a"]}, metadata={"n": 1})
        repo.save(name, BIG, graph=GRAPH, quality=0.5, metadata={"n": 2})
        repo.retire(f"{name}@1")
        repo.save(small, {"x": np.arange(5), "none": np.zeros((0, 3), np.float16)})
        before = repo.info(name)
        kill(repo, here)
        assert same(repo.load(name), BIG)
        assert same(repo.load(small), {"x": np.arange(5), "none": np.zeros((0, 3), np.float16)})
        assert repo.info(name) == before
        assert repo.graph(name) == GRAPH
        assert repo.lineage(name) == [ModelRef(name, 2), ModelRef(name, 1)]
        with repo.longest_prefix(GRAPH) as match:  # pyright: ignore
            assert match.ref == ModelRef(name, 2)
        with pytest.raises(ModelNotFoundError, match="was retired"):
            repo.load(f"{name}@1")
        assert repo.save(name, BIG).ref == ModelRef(name, 3)
        check(repo)
        assert not repo.verify(), repo.verify()
        retire_all(repo)


def one_shard_after_another_is_killed(cluster: Cluster) -> None:
    del cluster
    with repository("turns") as repo:
        secured(repo)
        repo.save("parent", BIG)
        repo.save("child", {**BIG, "c": np.ones(3)}, parent="parent")
        for turn in (0, 1, 2, 0):
            kill(repo, turn)
            assert same(repo.load("child"), {**BIG, "c": np.ones(3)}), turn
            if turn == 0 and repo.models("parent"):
                repo.retire("parent")
            secured(repo)
        retire_all(repo)


def many_versions_come_back_again_and_again(cluster: Cluster) -> None:
    del cluster
    with repository("many") as repo:
        here = holder(repo)
        secured(repo)
        expected: dict[ModelRef, dict[str, Any]] = {}
        for i in range(60):
            tensors = {"a": np.full(10_000 if i % 5 else 100, i), "s": np.arange(i % 7), "b": BIG["a"]}
            expected[repo.save(f"many/{i % 12}", tensors).ref] = tensors
            if i % 3 == 0 and i > 6:
                gone = next(iter(expected))
                repo.retire(gone)
                del expected[gone]
            if i in (20, 40):
                secured(repo)
                kill(repo, here if i == 20 else (here + 1) % 3)
        secured(repo)
        kill(repo, here)
        assert repo.models() == sorted(expected)
        assert all(same(repo.load(ref), tensors) for ref, tensors in expected.items())
        retire_all(repo)


def copies_follow_a_change_of_shards(cluster: Cluster) -> None:
    del cluster
    with repository("scaled") as repo:
        refs = [repo.save(f"scaled/{i}", {**BIG, "a": BIG["a"] + i}).ref for i in range(6)]
        with pytest.raises(OptionError, match="expected at least 2, one per replica; found 1"):
            repo.scale(shards=1)
        code, out, err = on(repo, "scale", "1")
        assert (code, out) == (1, "")
        assert err == "tensorvine: scale: shards: expected at least 2, one per replica; found 1\n"
        for count in (2, 3):
            repo.scale(shards=count)
            for shard in list(repo._session.shards):
                secured(repo)
                kill(repo, shard)
                for i, ref in enumerate(refs):
                    assert same(repo.load(ref), {**BIG, "a": BIG["a"] + i}), (count, shard, ref)
        retire_all(repo)


# ---- phase (of the copy) x event ----------------------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_sending(when: str) -> Callable[[Any], None]:
    """Make a shard's process end at the first save that it sends copies of."""

    def change(self: Any) -> None:
        copies, proposals = self.parts[Copies], self.parts[Writes]._proposals
        real, channels, proposed = copies.sent, copies._shards, proposals._asked

        async def deadly(*arguments: Any) -> Any:
            if when == "before":
                die()
            answer = await real(*arguments)
            if when == "after":
                die()
            return answer

        class Asked:
            def __getitem__(self, shard: int) -> Any:
                return self

            async def ask(self, call: Any, timeout: float) -> Any:
                asking = [asyncio.ensure_future(channels[shard].ask(call, timeout)) for shard in copies._state.backups]
                await asyncio.sleep(0)
                die()
                return asking

        async def decided(*arguments: Any) -> Any:
            await proposed(*arguments)
            die()

        copies.sent = deadly
        if when == "during":
            copies._shards = Asked()
        if when == "at the commit":
            proposals._asked = decided

    return change


def die_keeping(when: str) -> Callable[[Any], None]:
    """Make a shard's process end at the first copy that it is to keep."""

    def change(self: Any) -> None:
        copies = self.parts[Copies]
        real, take = copies._kept, copies._take

        async def deadly(*arguments: Any) -> Any:
            if when == "before":
                die()
            answer = await real(*arguments)
            die()
            return answer

        def last(*arguments: Any) -> None:
            take(*arguments)
            die()

        copies._kept = deadly
        if when == "during":
            copies._take = last

    return change


def home_killed(when: str) -> Callable[[Cluster], None]:
    def scenario(cluster: Cluster) -> None:
        del cluster
        with repository(f"home-{when.replace(' ', '-')}") as repo:
            here = holder(repo)
            secured(repo)
            repo.save("m", {"a": BIG["a"]})
            patch(repo, here, die_sending(when))
            assert repo.save("m", BIG).ref == ModelRef("m", 2)  # it is repeated, or was committed
            repo.load("m@1")
            assert repo.models() == [ModelRef("m", 1), ModelRef("m", 2)]
            assert same(repo.load("m@2"), BIG)
            assert repo.save("m", BIG).ref == ModelRef("m", 3)
            retire_all(repo)

    return scenario


def backup_killed(when: str) -> Callable[[Cluster], None]:
    def scenario(cluster: Cluster) -> None:
        del cluster
        with repository(f"backup-{when}") as repo:
            here = holder(repo)
            secured(repo)
            repo.save("m", {"a": BIG["a"]})
            patch(repo, backup_of(repo, here), die_keeping(when))
            assert repo.save("m", BIG, timeout=60).ref == ModelRef("m", 2)
            secured(repo)
            kill(repo, here)
            assert same(repo.load("m"), BIG)
            retire_all(repo)

    return scenario


def an_idle_backup_is_killed(cluster: Cluster) -> None:
    del cluster
    with repository("idle") as repo:
        here = holder(repo)
        secured(repo)
        repo.save("m", BIG)
        for _ in range(2):
            kill(repo, backup_of(repo, here))
            eventually(
                lambda: sum(s.bytes_replicated for s in repo.stats().shards) >= BIG["b"].nbytes,
                "copied again",
                ignoring=(ShardUnavailableError,),
            )
        secured(repo)
        kill(repo, here)
        assert same(repo.load("m"), BIG)
        retire_all(repo)


def both_are_killed(cluster: Cluster) -> None:
    del cluster
    with repository("both") as repo:
        here = holder(repo)
        backup = backup_of(repo, here)
        repo.save("m", BIG)
        kill(repo, here, backup)
        with pytest.raises(ModelLostError, match=r"^m@1 is lost: "):
            repo.load("m")
        secured(repo)
        assert repo.save("m", BIG).ref == ModelRef("m", 2)
        kill(repo, here)
        assert same(repo.load("m"), BIG)
        retire_all(repo)


def no_backup_answers(cluster: Cluster) -> None:
    del cluster
    with repository("silent") as repo:
        here = holder(repo)
        secured(repo)
        repo.save("m", {"a": BIG["a"]})
        stopped = [process(repo, s) for s in repo._session.shards if s != here]
        for victim in stopped:
            stand_still(victim)
        try:
            with pytest.raises((ShardUnavailableError, OperationTimeoutError), match="to keep copies of save"):
                repo.save("m", BIG, timeout=4)
        finally:
            for victim in stopped:
                victim.resume()
        assert repo.models("m") == [ModelRef("m", 1)]
        assert repo.save("m", BIG).ref == ModelRef("m", 2)
        retire_all(repo)


# ---- nodes --------------------------------------------------------------------------------------------


def save_there(repository: str, node: str, name: str, durability: str = "memory") -> None:
    """Save from a process on a node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    @ray.remote(num_cpus=1)
    def made_there() -> None:
        with Repository.connect(repository) as client:
            client.save(name, {**BIG, "a": BIG["a"] - 1}, durability=durability)  # pyright: ignore

    there = NodeAffinitySchedulingStrategy(node, soft=False)
    ray.get(made_there.options(scheduling_strategy=there).remote(), timeout=60)


def a_node_is_lost(cluster: Cluster) -> None:
    """With replicas: a node that is no driver's goes."""
    with repository("node") as repo:
        secured(repo)
        refs = [repo.save(f"node/{i}", {**BIG, "a": BIG["a"] + i}, graph=GRAPH).ref for i in range(6)]
        far = holder_on_another_node(repo)
        save_there("node", node_of(repo, far), "there")
        assert stat(repo, far).bytes_memory >= BIG["b"].nbytes
        end_node(cluster, node_of(repo, far))
        for i, ref in enumerate(refs):
            assert same(repo.load(ref, timeout=90), {**BIG, "a": BIG["a"] + i}), ref
        assert same(repo.load("there", timeout=90), {**BIG, "a": BIG["a"] - 1})
        assert repo.save("after", BIG, timeout=90).ref == ModelRef("after", 1)
        assert sorted(repo.models()) == sorted([*refs, ModelRef("there", 1), ModelRef("after", 1)])
        secured(repo)
        retire_all(repo)


def a_node_is_lost_with_a_path(cluster: Cluster) -> None:
    """Without replicas, with a path: what is on it survives the node."""
    with tempfile.TemporaryDirectory() as path, repository("disk", replicas=1, path=path) as repo:
        far = holder_on_another_node(repo)
        save_there("disk", node_of(repo, far), "durable", "disk")
        save_there("disk", node_of(repo, far), "flushed")
        repo.flush()
        assert stat(repo, far).bytes_memory >= BIG["b"].nbytes
        end_node(cluster, node_of(repo, far))
        for name in ("durable", "flushed"):
            assert same(repo.load(name, timeout=90), {**BIG, "a": BIG["a"] - 1})
        assert repo.save("durable", BIG, timeout=90).ref == ModelRef("durable", 2)


def with_a_path_only_what_waits_is_replicated(cluster: Cluster) -> None:
    del cluster
    with tempfile.TemporaryDirectory() as path, repository("both-ways", path=path) as repo:
        here = holder(repo)
        secured(repo)
        repo.save("m", BIG)
        repo.flush()
        eventually(lambda: not any(s.bytes_replicated for s in repo.stats().shards), "on disk, so not replicated")
        patch(repo, here, hold_the_disk)
        repo.save("m", {**BIG, "a": BIG["a"] * 2})
        assert sum(s.bytes_replicated for s in repo.stats().shards) >= BIG["a"].nbytes
        kill(repo, here)
        assert same(repo.load("m@1"), BIG)
        assert same(repo.load("m"), {**BIG, "a": BIG["a"] * 2})
        repo.flush()
        assert not repo.verify(), repo.verify()
        kill(repo, here)
        assert same(repo.load("m"), {**BIG, "a": BIG["a"] * 2})


def shard_and_catalog_are_killed_between_a_file_and_its_manifest(cluster: Cluster) -> None:
    del cluster
    with tempfile.TemporaryDirectory() as path, repository("between", path=path) as repo:
        here = holder(repo)
        secured(repo)
        catalog = ray.get_actor(f"{repo.name}/catalog", namespace="tensorvine")
        pid = ray.get(catalog.__ray_call__.remote(hold_manifests), timeout=30)
        repo.save("m", BIG)
        eventually(lambda: any(Path(path).glob("segments/*.arrow")), "the tensors are on disk")
        eventually(lambda: stat(repo, here).bytes_disk > 0, "the shard knows it")
        kill(repo, here)
        os.kill(pid, signal.SIGKILL)
        assert same(repo.load("m"), BIG)
        repo.flush()
        eventually(lambda: not any(s.bytes_replicated for s in repo.stats().shards), "its manifest is on disk")
        assert not repo.verify(), repo.verify()


def hold_manifests(self: Any) -> int:
    """Let no manifest reach the disk any more in this process of the catalog; return its id."""
    self._context.archive.write_manifest = lambda *_: threading.Event().wait(3600)
    return os.getpid()


def hold_the_disk(self: Any) -> None:
    """Let nothing reach the disk any more in this incarnation of a shard."""
    self.parts[Writes]._history._archive.write_segment = lambda *_: threading.Event().wait(3600)


def holder_on_another_node(repo: Repository) -> int:
    """A shard whose node has neither the driver nor the planner: that is another story."""
    return next(s for s in reversed(repo._session.shards) if node_of(repo, s) != repo._session.node)


def end_node(cluster: Cluster, node: str) -> None:
    """Kill a raylet; its workers go with it. Another node comes in its place."""
    victim = next(n for n in cluster.list_all_nodes() if n.node_id == node)
    cluster.remove_node(victim, allow_graceful=False)
    cluster.add_node(num_cpus=1, object_store_memory=STORE)


SCENARIOS: dict[str, Callable[[Cluster], None]] = {
    "start is checked": start_is_checked,
    "each version is on two nodes": each_version_is_on_two_nodes,
    "a killed shard comes back": a_killed_shard_comes_back,
    "one shard after another is killed": one_shard_after_another_is_killed,
    "many versions come back again and again": many_versions_come_back_again_and_again,
    "copies follow a change of shards": copies_follow_a_change_of_shards,
    **{f"home killed {when} its copy": home_killed(when) for when in ("before", "during", "after")},
    "home killed at the commit": home_killed("at the commit"),
    **{f"backup killed {when} a copy": backup_killed(when) for when in ("before", "during", "after")},
    "an idle backup is killed": an_idle_backup_is_killed,
    "both are killed": both_are_killed,
    "no backup answers": no_backup_answers,
    "with a path only what waits is replicated": with_a_path_only_what_waits_is_replicated,
    "shard and catalog are killed between a file and its manifest": (
        shard_and_catalog_are_killed_between_a_file_and_its_manifest
    ),
    "a node is lost": a_node_is_lost,
    "a node is lost with a path": a_node_is_lost_with_a_path,
}


def main(names: list[str]) -> None:
    sys.stdout.write(json.dumps({"all": list(SCENARIOS)}) + "\n")
    with warm_workers(), three_nodes() as cluster:
        for name in names or SCENARIOS:
            began = time.monotonic()
            error = ""
            try:
                SCENARIOS[name](cluster)
            except (Exception, pytest.fail.Exception):  # noqa: BLE001 - it goes to the test of that name
                error = traceback.format_exc()
            seconds = round(time.monotonic() - began, 1)
            sys.stdout.write(json.dumps({"scenario": name, "seconds": seconds, "error": error}) + "\n")
            sys.stdout.flush()


@contextmanager
def three_nodes() -> Iterator[Cluster]:
    """Start three raylets, and join them."""
    arguments = {"num_cpus": 1, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args={**arguments, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(**arguments)
        ray.init(address=cluster.address, log_to_driver=False)
        cluster.wait_for_nodes()
        for row in ray.nodes():
            await_room(row["NodeID"])
        yield cluster
    finally:
        with suppress(Exception):
            ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
