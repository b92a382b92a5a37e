"""Code that is written for `ray.util.collective`, on our groups.

Rules
- What Ray's own GLOO gets wrong comes first: its groups share one world. Then what Ray's tests ask of a back end: each
  call with shapes, dtypes, roots and operations. What is refused is in test_stock_refused.py.
- A case runs in the actors, which tell what they found: a call of an actor costs more than most cases.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import ray

from tests.support.stock_members import each, init

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.workers_import("ray.util.collective", "torch")
_serial = count()


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


# ---- what Ray's own tests ask of a back end ---------------------------------------------------------------

SHAPES: list[tuple[int, ...]] = [(), (0, 2), (2,), (1 << 10,), (1 << 15,), (1 << 19,)]
DTYPES = ["uint8", "int16", "int64", "float16", "bfloat16", "float32", "float64"]
OPS: dict[str, np.ufunc] = {"SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum}


class Tensors:
    """Tensors of a framework with numbers that every dtype holds, as do sums and products of three.

    Args:
        framework: "numpy" or "torch".
    """

    def __init__(self, framework: str) -> None:
        self.framework = framework

    def make(self, values: Any, dtype: str) -> Any:
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
        array = np.array(values).astype(kind)
        if self.framework == "numpy":
            return array
        import torch

        return torch.from_numpy(np.array(values)).to(getattr(torch, dtype))

    def same(self, found: Any, values: Any, dtype: str) -> bool:
        expected = self.make(values, dtype)
        if self.framework == "numpy":
            return (
                found.dtype == expected.dtype
                and found.shape == expected.shape
                and found.tobytes() == expected.tobytes()
            )
        return found.dtype == expected.dtype and found.shape == expected.shape and bool((found == expected).all())


def values_of(rank: int, shape: tuple[int, ...]) -> Any:
    return np.arange(int(np.prod(shape))).reshape(shape) % 4 + rank + 1


def combined(op: str, shape: tuple[int, ...], shift: int = 0) -> Any:
    return OPS[op].reduce([values_of(rank + shift, shape) for rank in range(3)])


class Calls:
    """One call with one shape and dtype; each method tells whether what came is what should.

    Args:
        collective: Ray's module.
        group: of three.
        tensors: of a framework.
        shape: of each tensor.
        dtype: of each tensor.
    """

    def __init__(self, collective: Any, group: str, tensors: Tensors, shape: tuple[int, ...], dtype: str) -> None:
        self.collective, self.group, self.tensors = collective, group, tensors
        self.shape, self.dtype, self.rank = shape, dtype, collective.get_rank(group)
        self.values = [values_of(rank, shape) for rank in range(3)]
        self.ops = ["SUM"] if shape in SHAPES else list(OPS)

    def mine(self) -> Any:
        return self.tensors.make(self.values[self.rank], self.dtype)

    def zeros(self) -> Any:
        return self.tensors.make(np.zeros(self.shape), self.dtype)

    def holds(self, found: Any, values: Any) -> bool:
        return self.tensors.same(found, values, self.dtype)

    def op(self, name: str) -> Any:
        from ray.util.collective.types import ReduceOp

        return ReduceOp[name]

    def allreduce(self) -> Iterator[bool]:
        for op in self.ops:
            tensor = self.mine()
            self.collective.allreduce(tensor, self.group, self.op(op))
            yield self.holds(tensor, combined(op, self.shape))

    def reduce(self) -> Iterator[bool]:
        for root, op in enumerate(["SUM", "PRODUCT", "MAX"]):
            tensor = self.mine()
            if root != self.rank and self.shape and isinstance(tensor, np.ndarray):  # it is only read
                tensor = np.stack([tensor, tensor], -1)[..., 0]
            self.collective.reduce(tensor, root, self.group, self.op(op))
            yield self.holds(tensor, combined(op, self.shape) if root == self.rank else self.values[self.rank])

    def broadcast(self) -> Iterator[bool]:
        for root in range(3):
            tensor = self.mine()
            self.collective.broadcast(tensor, root, self.group)
            yield self.holds(tensor, self.values[root])

    def allgather(self) -> Iterator[bool]:
        tensor, gathered = self.mine(), [self.zeros() for _ in range(3)]
        self.collective.allgather(gathered, tensor, self.group)
        yield self.holds(tensor, self.values[self.rank])
        yield all(self.holds(*pair) for pair in zip(gathered, self.values, strict=True))

    def allgather_of_the_other_framework(self) -> Iterator[bool]:
        other = Tensors({"numpy": "torch", "torch": "numpy"}[self.tensors.framework])
        gathered = [self.zeros() for _ in range(3)]
        self.collective.allgather(gathered, other.make(self.values[self.rank], self.dtype), self.group)
        yield all(self.holds(*pair) for pair in zip(gathered, self.values, strict=True))

    def reducescatter(self) -> Iterator[bool]:
        for op in self.ops[:2]:
            lists = [self.tensors.make(values_of(self.rank + place, self.shape), self.dtype) for place in range(3)]
            tensor = self.zeros()
            self.collective.reducescatter(tensor, lists, self.group, self.op(op))
            yield self.holds(tensor, combined(op, self.shape, self.rank))
            yield self.holds(lists[0], self.values[self.rank])

    def sendrecv(self) -> Iterator[bool]:
        for source, to in [(0, 1), (1, 2), (2, 0), (1, 0)]:
            if self.rank == source:
                self.collective.send(self.mine(), to, self.group)
            elif self.rank == to:
                tensor = self.zeros()
                self.collective.recv(tensor, source, self.group)
                yield self.holds(tensor, self.values[source])
        self.collective.barrier(self.group)


CALLS = [name for name, member in vars(Calls).items() if name[0] != "_" and "Iterator" in str(member.__annotations__)]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("call", CALLS)
def test_each_call_with_each_shape_and_dtype(
    members: list[Any], standing: dict[str, str], backend: str, call: str, framework: str
) -> None:
    def act(collective: Any, place: int, group: str) -> list[str]:
        cases = [((5, 3), dtype) for dtype in DTYPES] + [(shape, "float32") for shape in SHAPES]
        wrong: list[str] = []
        for shape, dtype in cases:
            found = getattr(Calls(collective, group, Tensors(framework), shape, dtype), call)()
            wrong += [f"{dtype} of {shape}: {place}" for place, right in enumerate(found) if not right]
        return wrong

    assert each(members, act, standing[backend]) == [[], [], []]


def test_booleans_are_any_and_all(members: list[Any], standing: dict[str, str], backend: str) -> None:
    def act(collective: Any, rank: int, group: str) -> list[list[bool]]:
        from ray.util.collective.types import ReduceOp

        found = [np.array([True, rank == 1, False]) for _ in ReduceOp]
        for array, op in zip(found, ReduceOp, strict=True):
            collective.allreduce(array, group, op)
        return [array.tolist() for array in found]

    anything, all_ = [True, True, False], [True, False, False]
    assert each(members, act, standing[backend]) == [[anything, all_, all_, anything]] * 3


def test_a_group_of_one(members: list[Any], backend: str) -> None:
    name = f"alone-{next(_serial)}"

    def act(collective: Any, place: int) -> Any:
        from ray.util.collective.types import ReduceOp

        init(collective, 0, 1, backend, name)
        first, second, third = np.arange(3), np.zeros(3, int), np.ones(3, int)
        collective.allreduce(first, name, ReduceOp.MAX)
        collective.reduce(first, 0, name)
        collective.broadcast(first, 0, name)
        collective.allgather([second], first, name)
        collective.reducescatter(third, [first], name)
        collective.barrier(name)
        found = [collective.get_rank(name), collective.get_collective_group_size(name)]
        for call in (collective.send, collective.recv):
            with pytest.raises(RuntimeError, match="self"):
                call(first, 0, name)
        collective.destroy_collective_group(name)
        return found, [array.tolist() for array in (first, second, third)]

    assert each(members[:1], act) == [([0, 1], [[0, 1, 2]] * 3)]


def test_a_group_is_known_while_it_stands(members: list[Any], backend: str) -> None:
    """Also where several stand at once, and by any name."""
    names = [
        "default",
        f"\ud800 {next(_serial)}",
        f"a/b {next(_serial)}",
        f"ä\n🙂 {next(_serial)}",
        f"{next(_serial)}" + "x" * 3000,
    ]

    def facts(collective: Any, name: str) -> list[Any]:
        return [
            collective.is_group_initialized(name),
            collective.get_rank(name),
            collective.get_collective_group_size(name),
        ]

    def act(collective: Any, place: int) -> list[Any]:
        found = [collective.is_backend_available(backend)]
        for serial, name in enumerate(names):
            found += facts(collective, name)
            init(collective, (place + serial) % 3, 3, backend, name)
        for name in names:
            array = np.array([collective.get_rank(name) + 1])
            collective.allreduce(array, name)
            found += [*facts(collective, name), *array.tolist()]
            with pytest.raises(RuntimeError, match="a second time"):
                init(collective, 0, 3, backend, name)
        for name in names:
            collective.destroy_collective_group(name)
            found += facts(collective, name)
            with pytest.raises(RuntimeError, match="not initialized"):
                collective.allreduce(np.zeros(1), name)
        collective.destroy_collective_group(names[0])
        return found

    unknown = [False, -1, -1]
    for place, found in enumerate(each(members, act)):
        known = [fact for serial in range(len(names)) for fact in (True, (place + serial) % 3, 3, 6)]
        assert found == [True, *unknown * len(names), *known, *unknown * len(names)]
