"""Changes of the shards, by a planner that starts again in the middle of one: what was decided is finished first."""

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
from tensorvine.actors.rpc.messages import Moved
from tensorvine.actors.rpc.shard_channels import ShardChannels
from tensorvine.planner.topology import Topology
from tensorvine.store.errors import OperationTimeoutError, OptionError, RepositoryNotFoundError, ShardUnavailableError
from tensorvine.store.versions.ledger import Told

from tests.support.direct import Answering, answered, call_directly

ANSWERS: dict[str, Any] = {
    "hand_over": Moved(2, 100),
    "stats": SimpleNamespace(bytes_metadata=100, bytes_memory=0, bytes_disk=0, shard=0),
    "is_needed": False,
    "move_segments": 0,
    "copy_out": 0,
    "has_moved": False,
}


@dataclass
class Shards:
    """An engine whose shards do at once what they are asked; it notes what that was."""

    asked: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    killed: list[str] = field(default_factory=list[str])
    answers: dict[str, Any] = field(default_factory=lambda: dict(ANSWERS))

    def find(self, name: str) -> str:
        return name

    def this_node(self) -> str:
        return "here"

    def spawn(self, cls: type, name: str, arguments: Any, node: str) -> str:
        return name

    def reach(self, actor: str, timeout: float, who: str) -> list[Answering]:
        return [partial(self._answer, actor)]

    def _answer(self, actor: str, method: str, *arguments: Any) -> Future[Any]:
        self.asked.append((actor, method))
        answer = self.answers.get(f"{actor} {method}", self.answers.get(method))
        return answered(error=answer) if isinstance(answer, Exception) else answered(answer)

    def kill(self, name: str) -> None:
        self.killed.append(name)

    def reserve(self, name: str, node: str, nbytes: int, *, wait: bool = True) -> bool:
        return True

    def unreserve(self, name: str) -> None: ...


class Planner:
    """What a planner knows that has just started again."""

    def __init__(self, topology: Topology, plan: Any = None) -> None:
        self.topology = topology
        self.shards = Shards()
        engine = cast("Any", self.shards)
        self.resizing = Resizing(
            engine,
            ShardChannels(engine, topology.repository, missing=RepositoryNotFoundError),
            Reservations(engine, topology.repository, topology.started_by),
            plan=plan,
            nodes=lambda: [Node("here", 1 << 20)],
            topology=lambda: self.topology,
            record=lambda topology: None,
            decide=self.decide,
            finished=lambda shard: None,
            ledger=lambda: Told({}),
        )

    def decide(self, topology: Topology) -> None:
        self.topology = topology

    def handed_over(self) -> list[str]:
        return [shard for shard, method in self.shards.asked if method == "hand_over"]


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    call_directly(monkeypatch)


@pytest.fixture
def planner() -> Planner:
    """It was decided that shard 1 drains; its names have not moved."""
    return Planner(Topology("resizing", (0, 1), "starter").warned((1,)).shrunk((1,)))


def test_another_change_finishes_the_one_before_first(planner: Planner) -> None:
    report = planner.resizing.scale(1, timeout=60.0)
    assert planner.handed_over() == ["resizing/shard-0", "resizing/shard-1"]
    assert planner.shards.killed == ["resizing/shard-1"]
    assert (planner.topology.shards, planner.topology.former) == ((0,), ())
    assert (report.shards_before, report.shards_after) == (1, 1)


def test_a_drain_that_was_not_decided_yet_is_done_before_another_change() -> None:
    planner = Planner(Topology("resizing", (0, 1, 2), "starter").warned((2,)))
    planner.resizing.scale(2, timeout=60.0)
    methods = [method for shard, method in planner.shards.asked if shard == "resizing/shard-2"]
    assert [m for m in methods if m in ("copy_out", "move_segments", "hand_over")] == [
        "copy_out",
        "move_segments",
        "hand_over",
    ]
    assert planner.topology.shards == (0, 1)


def test_a_shard_that_is_about_to_join_is_ended_when_the_repository_is_stopped() -> None:
    planner = Planner(
        Topology("resizing", (0,), "starter"), plan=SimpleNamespace(config=lambda *_: None, store_bytes=1 << 20)
    )
    planner.shards.answers["resizing/shard-1 stats"] = OperationTimeoutError("it does not answer yet")
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(planner.resizing.scale, 2, 60.0)
        while ("resizing/shard-1", "stats") not in planner.shards.asked:
            assert not joining.done()
        planner.resizing.rest(60.0)
        with pytest.raises(ShardUnavailableError, match="it is being stopped"):
            joining.result(60.0)
    assert planner.shards.killed == ["resizing/shard-1"]
    assert planner.topology.shards == (0,)
    with pytest.raises(ShardUnavailableError, match="it is being stopped"):
        planner.resizing.scale(2, 1.0)


def test_who_asks_before_the_planner_has_resumed_waits(planner: Planner) -> None:
    planner.resizing.resume_first()
    with pytest.raises(OperationTimeoutError, match="another change of the shards is still in progress"):
        planner.resizing.scale(1, timeout=0.01)
    assert planner.handed_over() == []
    planner.resizing.resume()
    assert planner.handed_over() == ["resizing/shard-0", "resizing/shard-1"]
    planner.resizing.scale(1, timeout=60.0)
    assert len(planner.handed_over()) == 2


def test_a_planner_that_starts_again_tells_all_what_was_recorded_and_perhaps_not_told() -> None:
    """All names had arrived, or a drain was given up: it died before it had told that."""
    calm = Topology("resizing", (0, 1), "starter").warned((1,)).warned(())
    planner = Planner(calm)
    planner.resizing.resume()
    assert planner.shards.asked == [("resizing/shard-0", "learn"), ("resizing/shard-1", "learn")]
    assert planner.topology is calm


@pytest.mark.parametrize("moved", [False, True])
def test_a_drain_is_given_up_only_where_the_segments_have_not_moved(moved: bool) -> None:
    """An earlier life of the planner had them moved, and died before the topology said so."""
    planner = Planner(Topology("resizing", (0, 1, 2), "starter").warned((2,)))
    planner.shards.answers |= {"copy_out": OperationTimeoutError("shard 2 is silent"), "has_moved": moved}
    if moved:
        planner.resizing.resume()
        assert (planner.topology.shards, planner.topology.leaving) == ((0, 1), ())
        assert ("resizing/shard-2", "move_segments") in planner.shards.asked
    else:
        with pytest.raises(OperationTimeoutError):
            planner.resizing.resume()
        assert (planner.topology.shards, planner.topology.leaving) == ((0, 1, 2), ())
        assert ("resizing/shard-2", "move_segments") not in planner.shards.asked


@pytest.mark.parametrize(("shards", "replicas"), [(0, 1), (1, 2)])
def test_fewer_shards_than_there_can_be_are_refused_by_an_error_of_the_tree(shards: int, replicas: int) -> None:
    planner = Planner(Topology("resizing", (0, 1), "starter", replicas=replicas))
    with pytest.raises(OptionError, match=f"scale: shards: expected at least .* found {shards}"):
        planner.resizing.check(shards)
