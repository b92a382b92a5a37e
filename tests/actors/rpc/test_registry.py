"""The lasting facts of a repository: processes that count at the same moment, and those of another start."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tensorvine.actors.rpc.registry import FLOOR, Registry
from tensorvine.planner.topology import Topology

WAIT_S = 60.0
AT_ONCE = 3


class Head:
    """Keeps facts as the head of a cluster does. All that count read what there is before one of them writes."""

    def __init__(self) -> None:
        self.facts: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.together: threading.Barrier | None = None
        self.met: set[int] = set()
        """Threads that have read once."""

    def keep(self, name: str, value: bytes | None) -> None:
        with self.lock:
            if value is None:
                self.facts.pop(name, None)
            else:
                self.facts[name] = value

    def keep_absent(self, name: str, value: bytes) -> bool:
        with self.lock:
            return self.facts.setdefault(name, value) is value

    def kept(self, prefix: str) -> dict[str, bytes]:
        with self.lock:
            found = {name: value for name, value in self.facts.items() if name.startswith(prefix)}
            first = threading.get_ident() not in self.met
            self.met.add(threading.get_ident())
        if self.together is not None and first:
            self.together.wait(WAIT_S)
        return found


def counted(head: Head, count: Callable[[Registry], int]) -> list[int]:
    """Count once, and then several times at once."""
    engine: Any = head
    first = count(Registry(engine, "models", "start"))
    head.met.clear()
    head.together = threading.Barrier(AT_ONCE)
    registries = [Registry(engine, "models", "start") for _ in range(AT_ONCE)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = sorted(pool.map(count, registries))
    head.together = None
    return [first, *found]


@pytest.mark.parametrize("shard", [1, 11])
def test_each_process_of_an_actor_has_a_number_of_its_own(shard: int) -> None:
    head, actor = Head(), f"shard-{shard}"
    engine: Any = head
    registry = Registry(engine, "models", "start")
    assert counted(head, lambda registry: registry.take(actor, secrets.token_bytes(8))[0]) == [1, 2, 3, 4]
    assert registry.take("shard-111", b"one")[0] == 1
    assert registry.restarts() == {shard: 3, 111: 0}
    entries = registry.entries(actor)
    assert len(set(entries.values())) == len(entries) == 4
    assert registry.take(actor, b"another") == (5, entries)
    registry.drop(actor, [1, 2, 3, 4])
    assert registry.entries(actor) == {5: b"another"}
    assert registry.take(actor, b"later", above=10)[0] == 11


def test_a_put_whose_answer_was_lost_is_the_process_s_own() -> None:
    class Lossy(Head):
        def keep_absent(self, name: str, value: bytes) -> bool:
            super().keep_absent(name, value)
            return False

    engine: Any = Lossy()
    registry = Registry(engine, "models", "start")
    assert registry.take("catalog", b"one") == (1, {})
    assert registry.take("catalog", b"two") == (2, {1: b"one"})


def test_a_floor_is_above_those_that_were_raised_before() -> None:
    """Processes that raise it at one time may get the same: only one of them has the term and gives numbers."""
    head = Head()
    engine: Any = head
    assert counted(head, lambda registry: registry.raise_floor(7)) == [FLOOR, 2 * FLOOR, 2 * FLOOR, 2 * FLOOR]
    registry = Registry(engine, "models", "start")
    assert registry.floor() == 2 * FLOOR
    assert registry.raise_floor(5 * FLOOR + 3) == registry.floor() == 6 * FLOOR


def test_a_start_has_facts_of_its_own_and_removes_those_of_others() -> None:
    head = Head()
    engine: Any = head
    earlier, other = Registry(engine, "models", "earlier"), Registry(engine, "models2", "start")
    registry = Registry(engine, "models", "start")
    topology = Topology("models", (0, 1), "start")
    for one in (earlier, other, registry):
        assert (one.topology(), one.wanted(), one.floor(), one.entries("catalog")) == (None, None, 0, {})
        one.decide(topology)
        one.want(2)
        one.raise_floor(0)
        one.take("catalog", b"entry")
    registry.clear()
    assert (registry.topology(), registry.wanted()) == (topology, 2)
    assert (earlier.topology(), earlier.wanted(), earlier.floor(), earlier.entries("catalog")) == (None, None, 0, {})
    assert other.topology() == topology
    registry.want(None)
    assert registry.wanted() is None
