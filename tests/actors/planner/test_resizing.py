"""Changes of the shards as the planner makes them: what fails is undone, and what was left is finished first."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tensorvine.actors.engine.engine import Node
from tensorvine.actors.planner.reservations import Reservations
from tensorvine.actors.planner.resizing import Resizing
from tensorvine.actors.rpc.channel import Channel
from tensorvine.actors.rpc.shard_channels import ShardChannels
from tensorvine.planner.membership import Move
from tensorvine.planner.topology import Topology
from tensorvine.store.errors import (
    OperationTimeoutError,
    OptionError,
    RepositoryNotFoundError,
    ShardUnavailableError,
    StoreFullError,
)
from tensorvine.store.shard import ShardStats

from tests.support.direct import Answering, answered, call_directly

NAME = "resizing"


def stats(shard: int, nbytes: int = 0, capacity: int = 100) -> ShardStats:
    return ShardStats(
        shard=shard, tensors=0, bytes_memory=nbytes, bytes_allocated=nbytes, bytes_disk=0, capacity=capacity
    )


@dataclass
class Cluster:
    """An engine whose shards and catalog do at once what they are asked; it notes what that was."""

    topology: Topology
    drains: bool = True
    """Whether a shard that drains leaves when it is waited for."""
    asked: list[tuple[str, object]] = field(default_factory=list[tuple[str, object]])
    running: set[int] = field(default_factory=set[int])
    silent: set[int] = field(default_factory=set[int])
    away: int = 0
    """How many calls the catalog does not answer."""
    held: dict[int, ShardStats] = field(default_factory=dict[int, ShardStats])

    def find(self, name: str) -> str:
        return name

    def this_node(self) -> str:
        return "here"

    def actors(self) -> dict[str, str | None]:
        return {f"{NAME}/shard-{shard}": "here" for shard in self.running}

    def spawn(self, cls: type, name: str, arguments: Any, node: str) -> str:
        self.running.add(int(name.rpartition("-")[2]))
        return name

    def kill(self, name: str) -> None:
        self.asked.append(("kill", int(name.rpartition("-")[2])))
        self.running.discard(int(name.rpartition("-")[2]))

    def reserve(self, name: str, node: str, nbytes: int, *, wait: bool = True) -> bool:
        return True

    def unreserve(self, name: str) -> None: ...

    def reach(self, actor: str, timeout: float, who: str) -> list[Answering]:
        return [partial(self._answer, actor)]

    def _answer(self, actor: str, method: str, *arguments: Any) -> Future[Any]:
        if not actor.endswith("catalog"):
            shard = int(actor.rpartition("-")[2])
            silent = shard in self.silent
            error = OperationTimeoutError(f"shard {shard} does not answer") if silent else None
            self.asked += [("silence", shard)] if silent else []
            return answered(self.held.get(shard, stats(shard)), error)
        if self.away:
            self.away -= 1
            return answered(error=ShardUnavailableError("the catalog restarts"))
        if method != "topology":
            self.asked.append((method, arguments[0]))
        try:
            return answered(getattr(self, f"_{method}")(*arguments))
        except ValueError as exc:
            return answered(error=exc)

    def _topology(self) -> Topology:
        return self.topology

    def _grow(self, count: int) -> Topology:
        self.topology = self.topology.grown(count)
        return self.topology

    def _drain(self, shards: list[int]) -> Topology:
        self.topology = self.topology.draining(shards)
        return self.topology

    def _stay(self, shards: list[int]) -> Topology:
        self.topology = self.topology.draining([s for s in self.topology.leaving if s not in shards])
        return self.topology

    def _drained(self, shards: list[int], timeout: float) -> list[int]:
        if self.drains:
            self._forget(shards)
        return [shard for shard in shards if shard not in self.topology.shards]

    def _forget(self, shards: list[int]) -> Topology:
        self.topology = self.topology.left(shards)
        return self.topology


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    call_directly(monkeypatch)


def made(*shards: int, replicas: int = 1) -> tuple[Cluster, Resizing]:
    topology = Topology(NAME, shards, "starter", replicas=replicas)
    cluster = Cluster(topology, running=set(shards))
    engine = cast("Any", cluster)
    return cluster, Resizing(
        engine,
        Channel(engine, f"{NAME}/catalog", missing=RepositoryNotFoundError),
        ShardChannels(engine, NAME, missing=RepositoryNotFoundError),
        Reservations(engine, NAME, "starter"),
        start=topology,
        plan=cast("Any", SimpleNamespace(config=lambda *_: None, store_bytes=1 << 20)),
        nodes=lambda: [Node("here", 1 << 20)],
        check=lambda: None,
    )


def test_shards_join_and_drain_one_after_the_other() -> None:
    cluster, resizing = made(0)
    grown = resizing.scale(3, timeout=60.0)
    assert (grown.shards_before, grown.shards_after, cluster.running) == (1, 3, {0, 1, 2})
    cluster.held = {0: stats(0, 30), 1: stats(1, 20), 2: stats(2, 10)}
    shrunk = resizing.scale(1, timeout=60.0)
    assert (shrunk.shards_before, shrunk.shards_after, shrunk.tensor_bytes_moved) == (3, 1, 30)
    assert cluster.topology.shards == (0,)
    assert cluster.running == {0}
    assert [what for what in cluster.asked if what[0] in ("drain", "kill")] == [
        ("drain", [2]),
        ("kill", 2),
        ("drain", [1]),
        ("kill", 1),
    ]


def test_a_catalog_that_restarts_is_asked_again() -> None:
    cluster, resizing = made(0, 1)
    cluster.away = 2
    assert resizing.scale(1, timeout=60.0).shards_after == 1


def test_shards_that_do_not_come_in_time_are_forgotten() -> None:
    cluster, resizing = made(0)
    cluster.silent = {2}
    with pytest.raises(OperationTimeoutError):
        resizing.scale(3, timeout=0.05)
    assert cluster.topology.shards == (0,)
    assert cluster.running == {0}
    cluster.silent.clear()
    assert resizing.scale(2, timeout=60.0).shards_after == 2
    assert cluster.topology.shards == (0, 3), "no number is used twice"


def test_a_drain_that_takes_too_long_is_given_up() -> None:
    cluster, resizing = made(0, 1)
    cluster.drains = False
    with pytest.raises(OperationTimeoutError):
        resizing.scale(1, timeout=0.05)
    assert (cluster.topology.shards, cluster.topology.leaving, cluster.running) == ((0, 1), (), {0, 1})


def test_a_drain_without_room_is_not_begun() -> None:
    cluster, resizing = made(0, 1)
    cluster.held = {0: stats(0, 60), 1: stats(1, 50)}
    with pytest.raises(StoreFullError, match=r"drain of shard 1: expected 50 B of free memory .* found 40 B"):
        resizing.scale(1, timeout=60.0)
    assert cluster.topology.leaving == ()


def test_another_change_finishes_first_what_a_former_planner_left() -> None:
    """It died when a shard drained, another one was decided on and not started, and a third had left."""
    cluster, resizing = made(0, 1, 2)
    cluster.topology = cluster.topology.grown(2).left([4]).draining([2])
    cluster.running = {0, 1, 2, 4}
    report = resizing.scale(2, timeout=60.0)
    assert (report.shards_before, report.shards_after) == (2, 2)
    assert cluster.topology.shards == (0, 1)
    assert cluster.running == {0, 1}


def test_a_change_that_was_drawn_from_another_topology_is_not_made() -> None:
    cluster, resizing = made(0, 1)
    assert resizing.make(Move(drain=(1,)), cluster.topology.version + 1, 60.0) is None
    cluster.silent = {0}
    assert resizing.make(Move(drain=(1,)), cluster.topology.version, 60.0) is None
    cluster.silent = set()
    report = resizing.make(Move(drain=(1,)), cluster.topology.version, 60.0)
    assert report is not None
    assert report.shards_after == 1


def test_a_shard_that_is_about_to_join_is_ended_when_the_repository_is_stopped() -> None:
    cluster, resizing = made(0)
    cluster.silent = {1}
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(resizing.scale, 2, 60.0)
        while ("silence", 1) not in cluster.asked:
            assert not joining.done()
        resizing.rest(60.0)
        with pytest.raises(ShardUnavailableError, match="it is being stopped"):
            joining.result(60.0)
    assert cluster.running == {0}
    assert cluster.topology.shards == (0,)
    with pytest.raises(ShardUnavailableError, match="it is being stopped"):
        resizing.scale(2, 1.0)
    with pytest.raises(ShardUnavailableError, match="it is being stopped"):  # else its memory may be reserved again
        resizing.places(cluster.topology)


@pytest.mark.parametrize(("shards", "replicas"), [(0, 1), (1, 2)])
def test_fewer_shards_than_there_can_be_are_refused_by_an_error_of_the_tree(shards: int, replicas: int) -> None:
    _, resizing = made(0, 1, replicas=replicas)
    with pytest.raises(OptionError, match=f"scale: shards: expected at least .* found {shards}"):
        resizing.check(shards)
