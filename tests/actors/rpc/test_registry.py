"""The lasting facts of a repository: two incarnations that count at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tensorvine.actors.rpc.registry import Registry
from tensorvine.store.versions.ledger import FLOOR

WAIT_S = 60.0
AT_ONCE = 3


class Head:
    """Keeps facts as the head of a cluster does. All that count read what there is before one of them writes."""

    def __init__(self) -> None:
        self.facts: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.together: threading.Barrier | None = None

    def keep(self, name: str, value: bytes) -> None:
        with self.lock:
            self.facts[name] = value

    def claim(self, name: str) -> bool:
        with self.lock:
            new = name not in self.facts
            self.facts.setdefault(name, b"")
            return new

    def kept(self, prefix: str) -> dict[str, bytes]:
        with self.lock:
            found = {name: value for name, value in self.facts.items() if name.startswith(prefix)}
        if self.together is not None:
            self.together.wait(WAIT_S)
        return found


def counted(head: Head, count: Callable[[Registry], int]) -> list[int]:
    """Count once, and then several times at once."""
    engine: Any = head
    first = count(Registry(engine, "models", "start"))
    head.together = threading.Barrier(AT_ONCE)
    registries = [Registry(engine, "models", "start") for _ in range(AT_ONCE)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = sorted(pool.map(count, registries))
    head.together = None
    return [first, *found]


@pytest.mark.parametrize("shard", [1, 11])
def test_each_restart_has_a_number_of_its_own(shard: int) -> None:
    head = Head()
    engine: Any = head
    assert counted(head, lambda registry: registry.count_restart(shard)) == [1, 2, 3, 4]
    assert Registry(engine, "models", "start").count_restart(111) == 1
    assert Registry(engine, "models", "start").restarts() == {shard: 4, 111: 1}


def test_each_floor_is_above_all_others() -> None:
    assert counted(Head(), Registry.raise_floor) == [FLOOR, 2 * FLOOR, 3 * FLOOR, 4 * FLOOR]
