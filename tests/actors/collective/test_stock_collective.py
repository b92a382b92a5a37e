"""Code that is written for `ray.util.collective`, on our groups.

Rules
- Three actors, one module-wide set, are members of all groups; each test has a name of its own.
- What Ray's own GLOO gets wrong comes first: its groups share one world.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
import ray
from tensorvine.store.errors import PeerLostError

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
TIMEOUT_S = 60
_serial = count()


class Member:
    """An actor of somebody who has never heard of us, but for one line."""

    def __init__(self) -> None:
        from tensorvine.actors.collective.stock import register

        register()
        register()

    def run(self, act: Callable[..., Any], *given: Any) -> Any:
        from ray.util import collective

        return act(collective, *given)


@pytest.fixture(scope="module")
def members(cluster: object) -> Iterator[list[Any]]:
    actor: Any = ray.remote(num_cpus=0)(Member)
    started = [actor.remote() for _ in range(3)]
    yield started
    for one in started:
        ray.kill(one)


def each(actors: list[Any], act: Callable[..., Any], *given: Any) -> list[Any]:
    """Let actors act at once, each told its place among them."""
    calls = [one.run.remote(act, place, *given) for place, one in enumerate(actors)]
    return ray.get(calls, timeout=TIMEOUT_S)


def init(collective: Any, rank: int, size: int, backend: str, name: str) -> None:
    collective.init_collective_group(size, rank, backend=backend, group_name=name)


@pytest.fixture(params=["TENSORVINE", "TENSORVINE_GLOO"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def group(members: list[Any], backend: str) -> Iterator[str]:
    """The name of a group of all."""
    name = f"group-{next(_serial)}"
    each(members, init, 3, backend, name)
    yield name
    each(members, lambda collective, rank: collective.destroy_collective_group(name))


def test_groups_overlap_and_the_other_order_of_ranks_has_another_root(members: list[Any], backend: str) -> None:
    first, second, turned = (f"overlap-{next(_serial)}" for _ in range(3))
    each(members[:2], init, 2, backend, first)
    each(members[1:], init, 2, backend, second)
    each(members[1::-1], init, 2, backend, turned)

    def broadcast(collective: Any, place: int, name: str) -> list[int]:
        array = np.full(2, collective.get_rank(name) + 10 * place)
        collective.broadcast(array, src_rank=0, group_name=name)
        return array.tolist()

    assert each(members[:2], broadcast, first) == [[0, 0]] * 2
    assert each(members[1:], broadcast, second) == [[0, 0]] * 2
    assert each(members[:2], broadcast, turned) == [[10, 10]] * 2, "the second actor is rank 0"

    def destroy(collective: Any, place: int, *names: str) -> None:
        for name in names:
            if collective.is_group_initialized(name):
                collective.destroy_collective_group(name)

    each(members, destroy, first, second, turned)


def test_a_group_is_made_anew_with_more_members(members: list[Any], backend: str) -> None:
    name = f"growing-{next(_serial)}"

    def use(collective: Any, place: int, size: int) -> list[float]:
        init(collective, place, size, backend, name)
        array = np.ones(2, np.float32)
        collective.allreduce(array, group_name=name)
        found = [float(collective.get_collective_group_size(name)), *array.tolist()]
        collective.destroy_collective_group(name)
        return found

    assert each(members[:2], use, 2) == [[2, 2, 2]] * 2
    assert each(members, use, 3) == [[3, 3, 3]] * 3
    assert each(members[:2], use, 2) == [[2, 2, 2]] * 2


def test_messages_keep_to_their_group(members: list[Any], group: str, backend: str) -> None:
    other = f"other-{next(_serial)}"
    each(members[::-1], init, 3, backend, other)  # in which the third actor is rank 0

    def act(collective: Any, place: int) -> Any:
        first, second = np.full(2, 1), np.full(2, 2)
        if place == 0:
            collective.send(first, 2, group_name=group)
            collective.send(second, 0, group_name=other)
        elif place == 2:
            first[:] = second[:] = 0
            collective.recv(first, 0, group_name=group)
            collective.recv(second, 2, group_name=other)
        return first.tolist(), second.tolist()

    assert each(members, act) == [([1, 1], [2, 2])] * 3
    each(members, lambda collective, rank: collective.destroy_collective_group(other))


def test_a_declared_group_is_joined_at_its_first_use(members: list[Any], backend: str) -> None:
    from ray.util import collective
    from tensorvine.actors.collective.stock import register

    register()
    name = f"declared-{next(_serial)}"
    collective.create_collective_group(members, 3, [2, 0, 1], backend=backend, group_name=name)

    def use(collective: Any, place: int) -> list[int]:
        array = np.full(1, place)
        collective.broadcast(array, src_rank=0, group_name=name)
        collective.barrier(group_name=name)
        return [collective.get_rank(name), *array.tolist()]

    assert each(members, use) == [[2, 1], [0, 1], [1, 1]]
    each(members, lambda collective, rank: collective.destroy_collective_group(name))


# ---- all calls ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_all_calls_do_what_they_say(members: list[Any], group: str, framework: str) -> None:
    def act(collective: Any, rank: int) -> dict[str, Any]:
        from ray.util.collective.types import ReduceOp

        def tensor(*values: float) -> Any:
            array = np.array(values, np.float32)
            if framework == "numpy":
                return array
            import torch

            return torch.from_numpy(array)

        mine = {name: tensor(rank + 1, 2) for name in ("sum", "product", "min", "max", "reduce", "own")}
        collective.allreduce(mine["sum"], group)
        collective.allreduce(mine["product"], group, ReduceOp.PRODUCT)
        collective.allreduce(mine["min"], group, ReduceOp.MIN)
        collective.allreduce(mine["max"], group, ReduceOp.MAX)
        collective.reduce(mine["reduce"], dst_rank=1, group_name=group)
        gathered = [tensor(0, 0) for _ in range(3)]
        collective.allgather(gathered, mine["own"], group)
        lists = [tensor(10 * place + rank) for place in range(3)]
        part = tensor(0)
        collective.reducescatter(part, lists, group)
        result = {name: found.tolist() for name, found in mine.items()}
        return {
            **result,
            "gathered": [found.tolist() for found in gathered],
            "part": part.tolist(),
            "lists": [found.tolist() for found in lists],
        }

    for rank, found in enumerate(each(members, act)):
        assert found == {
            "sum": [6, 6],
            "product": [6, 8],
            "min": [1, 2],
            "max": [3, 2],
            "reduce": [6, 6] if rank == 1 else [rank + 1, 2],
            "own": [rank + 1, 2],
            "gathered": [[1, 2], [2, 2], [3, 2]],
            "part": [30 * rank + 3],
            "lists": [[rank], [10 + rank], [20 + rank]],
        }


def test_a_member_that_left_is_named(members: list[Any], backend: str) -> None:
    name = f"left-{next(_serial)}"
    each(members, init, 3, backend, name)

    def leave(collective: Any, rank: int) -> None:
        collective.destroy_collective_group(name)

    each(members[:1], leave)
    with pytest.raises(PeerLostError, match="rank 0 left"):
        each(members[1:], lambda collective, place: collective.barrier(name))
    each(members[1:], leave)


def test_other_back_ends_of_our_names_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.util.collective import backend_registry
    from tensorvine.actors.collective import stock

    stock.register()
    registry = backend_registry.BackendRegistry()
    monkeypatch.setitem(registry._map, "TENSORVINE_GLOO", stock.AutoGroup)
    with pytest.raises(ValueError, match="expected no back end TENSORVINE_GLOO but ours"):
        stock.register()
