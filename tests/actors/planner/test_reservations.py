"""What a repository reserves of its nodes' memory: the rules on a model of an engine, and on Ray."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, cast

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.actors import Repository
from tensorvine.actors.engine.engine import Node
from tensorvine.actors.engine.ray.engine import RayEngine
from tensorvine.actors.planner import reservations as reserving
from tensorvine.actors.planner.reservations import LEAST_BYTES, Reservations
from tensorvine.store.errors import StoreFullError
from tensorvine.store.sizes import size
from tensorvine.store.waiting import Backoff, Deadline

MIB = 1 << 20
PATIENCE_S = 60.0


class Memory:
    """The nodes' memory, as an engine would tell of it."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.taken: dict[str, tuple[str, int]] = {}

    def nodes(self) -> list[Node]:
        return [Node(node, self.free(node)) for node in self.sizes]

    def free(self, node: str) -> int:
        return self.sizes.get(node, 0) - sum(nbytes for where, nbytes in self.taken.values() if where == node)

    def reserve(self, name: str, node: str, nbytes: int, *, wait: bool = True) -> bool:
        assert name not in self.taken
        if self.free(node) < nbytes:
            return False
        self.taken[name] = node, nbytes
        return True

    def unreserve(self, name: str) -> None:
        self.taken.pop(name, None)

    def reserved(self, prefix: str) -> dict[str, str | None]:
        return {
            name: node if node in self.sizes else None
            for name, (node, _) in self.taken.items()
            if name.startswith(prefix)
        }


def reservations(memory: Memory, name: str = "default") -> Reservations:
    return Reservations(cast("Any", memory), name, "start")


@pytest.fixture(scope="class")
def impatient() -> Iterator[None]:
    """Who finds no room gives up at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reserving, "RACE_S", 0.0)
        yield


class Lagging(Memory):
    """Tells of what was let go only when it was asked some times more."""

    def __init__(self, sizes: dict[str, int], late: int) -> None:
        super().__init__(sizes)
        self.late = late

    def free(self, node: str) -> int:
        self.late -= 1
        return super().free(node) if self.late < 0 else LEAST_BYTES


class TestLate:
    @pytest.mark.parametrize("late", range(6))
    def test_room_that_shows_late_is_found(self, late: int) -> None:
        memory = Lagging({"a": 9 * LEAST_BYTES}, late)
        rooms = reservations(memory).take({0: memory.nodes()[0]}, None)
        assert LEAST_BYTES <= rooms[0] <= 4 * LEAST_BYTES


@pytest.mark.usefixtures("impatient")
class TestRules:
    @given(
        st.lists(st.integers(1, 64), min_size=1, max_size=4),
        st.lists(st.tuples(st.integers(1, 4), st.none() | st.integers(1, 40)), max_size=6),
    )
    def test_no_node_promises_more_than_it_has(self, sizes: list[int], starts: list[tuple[int, int | None]]) -> None:
        memory = Memory({str(number): size * LEAST_BYTES for number, size in enumerate(sizes)})
        for number, (shards, wanted) in enumerate(starts):
            nodes = memory.nodes()
            chosen = {shard: nodes[shard % len(nodes)] for shard in range(shards)}
            before = dict(memory.taken)
            nbytes = wanted * LEAST_BYTES if wanted is not None else None
            try:
                rooms = reservations(memory, str(number)).take(chosen, nbytes)
            except StoreFullError:
                assert memory.taken == before
            else:
                assert rooms == {shard: memory.taken[f"{number}:start:{shard}"][1] for shard in chosen}
                assert all(room == nbytes if nbytes is not None else room >= LEAST_BYTES for room in rooms.values())
            assert all(memory.free(node) >= 0 for node in memory.sizes)

    def test_a_share_leaves_half_to_others(self) -> None:
        memory = Memory({"a": 9 * LEAST_BYTES, "b": 5 * LEAST_BYTES})
        first, second = memory.nodes()
        assert reservations(memory).take({0: first, 1: second, 2: first}, None) == {
            0: 2 * LEAST_BYTES,
            1: 2 * LEAST_BYTES,
            2: 2 * LEAST_BYTES,
        }

    def test_a_share_too_small_is_refused_by_name(self) -> None:
        memory = Memory({"a": LEAST_BYTES})
        with pytest.raises(StoreFullError, match=f"expected {size(LEAST_BYTES)} of unreserved memory on node a"):
            reservations(memory).take({3: memory.nodes()[0]}, None)

    def test_a_reservation_goes_where_its_shard_goes(self, caplog: pytest.LogCaptureFixture) -> None:
        memory = Memory({"a": 100, "b": 100, "c": 10})
        held = reservations(memory)
        held.take({0: memory.nodes()[0], 1: memory.nodes()[1]}, 60)
        del memory.sizes["a"]
        for _ in range(2):
            held.follow({0: "c", 1: "b"}, lambda shard: 60)
        assert memory.taken == {"default:start:1": ("b", 60)}
        assert [r.getMessage().count("shard 0") for r in caplog.records if r.levelname == "WARNING"] == [1]
        memory.sizes["c"] = 100
        held.follow({0: "c", 1: "b"}, lambda shard: 60)
        assert memory.taken["default:start:0"] == ("c", 60)

    def test_a_shard_that_is_no_more_has_none(self) -> None:
        memory = Memory({"a": 100})
        held, other = reservations(memory), reservations(memory, "other")
        held.take(dict.fromkeys((0, 1), memory.nodes()[0]), 30)
        other.take({0: memory.nodes()[0]}, 30)
        held.follow({1: "a"}, lambda shard: 30)
        assert set(memory.taken) == {"default:start:1", "other:start:0"}
        held.release_all()
        assert set(memory.taken) == {"other:start:0"}


def _node() -> Node:
    return RayEngine().nodes()[0]


def _await_taken(expected: int) -> None:
    """Wait until so much is reserved; an actor takes a byte of its own."""
    deadline, pauses = Deadline.after(PATIENCE_S), Backoff(0.05, 0.5)
    while not expected <= (taken := (node := _node()).resources["memory"] - node.memory_free) < expected + 1024:
        told = ray.util.placement_group_table().values()
        groups = [(group["name"], group["state"], group["bundles"]) for group in told if group["state"] != "REMOVED"]
        assert pauses.wait(deadline), f"expected {expected} reserved bytes; found {taken}: {groups}"


class TestOnRay:
    def test_repositories_share_what_is_left(self, cluster: object) -> None:
        total, held = int(_node().resources["memory"]), list[Repository]()
        try:
            for name in ("first", "second", "third"):
                held.append(Repository.start(name, shards=1, preallocate_bytes=0))
                assert 0 <= _node().memory_free <= total - sum(repo.stats().shards[0].capacity for repo in held)
            for nbytes in (total, 2 * total):
                with pytest.raises(StoreFullError, match="of unreserved memory"):
                    Repository.start("fourth", shards=1, store_bytes=nbytes, preallocate_bytes=0)
        finally:
            for repo in held:
                repo.close()

    def test_repositories_that_start_at_once_leave_room_for_one_another(self, cluster: object) -> None:
        _await_taken(0)
        total = int(_node().resources["memory"])
        with ThreadPoolExecutor(4) as pool, ExitStack() as stack:
            starts = [pool.submit(Repository.start, f"at-once-{n}", shards=1, preallocate_bytes=0) for n in range(4)]
            for start in starts:
                stack.callback(lambda start=start: start.exception() or start.result().close())
            held = [start.result() for start in starts]
            taken = sum(repo.stats().shards[0].capacity for repo in held)
            assert 4 * LEAST_BYTES <= taken <= total - _node().memory_free <= total - MIB

    def test_what_raced_for_memory_leaves_none_of_it_behind(self, cluster: object) -> None:
        _await_taken(0)
        engine, node = RayEngine(), _node()
        nbytes = int(node.resources["memory"] * 0.6)  # there is room for one of them

        def race(name: str) -> int:
            made = 0
            for _ in range(4):
                made += engine.reserve(name, node.id, nbytes, wait=False)
                engine.unreserve(name)
            return made

        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(race, [f"race-{n}" for n in range(4)])) >= 1
        _await_taken(0)

    def test_shards_that_join_reserve_and_those_that_drain_let_go(self, cluster: object) -> None:
        _await_taken(0)
        with Repository.start("reserving", shards=1, store_bytes=32 * MIB, preallocate_bytes=0) as repo:
            _await_taken(32 * MIB)
            repo.scale(2)
            _await_taken(64 * MIB)
            repo.scale(1)
            _await_taken(32 * MIB)
        _await_taken(0)
