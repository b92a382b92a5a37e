"""What our groups refuse of code for `ray.util.collective`, and whom they name: groups, calls, read-only arguments.

Rules
- A case runs in the actors, which tell what they found: a call of an actor costs more than most cases.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
import ray
from tensorvine.store.errors import CollectiveError, PeerLostError, TensorMismatchError

from tests.support.stock_members import TIMEOUT_S, each, init

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.workers_import("ray.util.collective", "torch")
_serial = count()


# ---- what is refused --------------------------------------------------------------------------------------


def test_what_cannot_be_a_group_is_refused(members: list[Any], backend: str) -> None:
    from ray.util import collective
    from tensorvine.actors.collective.stock import register

    register()
    name = f"refused-{next(_serial)}"

    def act(collective: Any, place: int) -> None:
        for rank, size in [(0, 0), (2, 2), (-1, 2)]:
            with pytest.raises(AssertionError):
                init(collective, rank, size, backend, name)
        with pytest.raises(ValueError, match="group_name"):
            init(collective, 0, 1, backend, "")

    each(members[:1], act)
    for ranks, size in [([0, 1, 2], 3), ([0, 0], 2), ([0, 2], 2), ([1, 2], 2), ([0, 1], 0), ([0, 1], -1)]:
        with pytest.raises(RuntimeError):
            collective.create_collective_group(members[:2], size, ranks, backend=backend, group_name=name)


def test_why_a_declared_group_was_not_joined_is_told(members: list[Any]) -> None:
    """Ray takes a ValueError for a group that was never declared."""
    from ray.util import collective
    from tensorvine.actors.collective.stock import register

    register()
    name = f"quarrel-{next(_serial)}"
    collective.create_collective_group(members[:2], 2, [0, 1], backend="TENSORVINE", group_name=name)

    def act(collective: Any, place: int) -> None:
        if place == 0:
            collective.barrier(name)
        else:
            init(collective, 1, 2, "TENSORVINE_GLOO", name)

    for call in [one.run.remote(act, place) for place, one in enumerate(members[:2])]:
        with pytest.raises(CollectiveError, match=r"expected back end '.*' on all ranks; found '.*'") as caught:
            ray.get(call, timeout=TIMEOUT_S)
        assert isinstance(caught.value, RuntimeError)


def transposed() -> Any:
    return np.zeros((3, 2)).T


def strided(collective: Any, group: str, array: Any) -> None:
    collective.allgather([np.zeros(3), np.zeros(6)[::2], np.zeros(3)], array, group)


def others(array: Any, *second: Any) -> list[Any]:
    """Make a list for three of which the second is another one."""
    return [np.zeros_like(array), *(second or (np.zeros_like(array),)), np.zeros_like(array)]


def gather(*second: Any) -> Any:
    return lambda collective, group, array: collective.allgather(others(array, *second), array, group)


def scatter(*second: Any) -> Any:
    return lambda collective, group, array: collective.reducescatter(array, others(array, *second), group)


def on_handle(call: str, **options: Any) -> Any:
    """Call a back end past Ray's functions, some of which ask for CuPy."""

    def act(collective: Any, group: str, array: Any) -> None:
        from types import SimpleNamespace

        from ray.util.collective.collective import get_group_handle

        getattr(get_group_handle(group), call)([array], SimpleNamespace(**options))

    return act


def allreduce_two(collective: Any, group: str, array: Any) -> None:
    from ray.util.collective.collective import get_group_handle

    get_group_handle(group).allreduce([array, array])


def same(collective: Any, group: str, array: Any) -> None:
    collective.allgather([np.zeros(3)] * 3, array, group)


def overlapping(collective: Any, group: str, array: Any) -> None:
    whole = np.zeros(8)
    collective.allgather([whole[:3], whole[5:], whole[2:5]], array, group)


def read_only_outputs(collective: Any, group: str, array: Any) -> None:
    fixed = np.zeros(3)
    fixed.flags.writeable = False
    collective.allgather([np.zeros(3), fixed, np.zeros(3)], array, group)


REFUSED: dict[str, tuple[Any, str]] = {
    "allgather, another shape": (gather(np.zeros(2)), r"list\[1\]: expected float64 of shape \(3,\).*found .* \(2,\)"),
    "allgather, a shape that NumPy fills": (gather(np.zeros((2, 3))), r"found float64 of shape \(2, 3\)"),
    "allgather, as many numbers": (gather(np.zeros((3, 1))), r"found float64 of shape \(3, 1\)"),
    "allgather, another dtype": (gather(np.zeros(3, np.int8)), r"found int8 of shape \(3,\)"),
    "allgather, as many bytes": (gather(np.zeros(3, np.int64)), r"found int64"),
    "allgather, the other byte order": (gather(np.zeros(3, ">f8")), r"found >f8"),
    "allgather, too many": (gather(np.zeros(3), np.zeros(3)), "world_size"),
    "allgather, none": (lambda collective, group, array: collective.allgather([], array, group), "empty list"),
    "allgather, one array": (lambda collective, group, array: collective.allgather(array, array, group), "list"),
    "allgather, a list": (gather([0.0, 0.0, 0.0]), "type"),
    "allgather, strided": (strided, "contiguous"),
    "allgather, one array three times": (same, "separate memory"),
    "allgather, overlapping": (overlapping, r"tensor_list\[0\] and tensor_list\[2\] overlap"),
    "allgather, read-only": (read_only_outputs, "read-only"),
    "reducescatter, another shape": (scatter(np.zeros((1, 3))), r"found float64 of shape \(1, 3\)"),
    "reducescatter, another dtype": (scatter(np.zeros(3, np.float32)), "found float32"),
    "reducescatter, too many": (scatter(np.zeros(3), np.zeros(3)), "world_size"),
    "reducescatter, strided": (
        lambda collective, group, _: collective.reducescatter(transposed(), [np.zeros((2, 3))] * 3, group),
        "contiguous",
    ),
    "allreduce, strided": (lambda collective, group, _: collective.allreduce(transposed(), group), "contiguous"),
    "allreduce, objects": (lambda collective, group, _: collective.allreduce(np.array([None]), group), "numbers"),
    "allreduce, a list": (lambda collective, group, _: collective.allreduce([1.0], group), "type"),
    "allreduce, a number": (lambda collective, group, _: collective.allreduce(np.float64(1), group), "type"),
    "allreduce, two": (allreduce_two, "one tensor per member"),
    "allreduce, no operation": (
        lambda collective, group, array: collective.allreduce(array, group, op="AVERAGE"),
        "found 'AVERAGE'",
    ),
    "reduce, strided": (
        lambda collective, group, _: collective.reduce(transposed(), collective.get_rank(group), group),
        "contiguous",
    ),
    "reduce, no operation": (lambda collective, group, array: collective.reduce(array, 0, group, op=None), "op"),
    "reduce, no rank": (lambda collective, group, array: collective.reduce(array, 3, group), "world size"),
    "reduce, no rank, on the handle": (on_handle("reduce", root_rank=3), "rank from 0 to 2; found 3"),
    "broadcast, no rank": (lambda collective, group, array: collective.broadcast(array, -1, group), "negative"),
    "broadcast, no rank, on the handle": (on_handle("broadcast", root_rank=-1), "rank from 0 to 2; found -1"),
    "broadcast, strided": (lambda collective, group, _: collective.broadcast(transposed(), 0, group), "contiguous"),
    "send, no rank": (lambda collective, group, array: collective.send(array, 3, group), "world size"),
    "send, itself": (
        lambda collective, group, array: collective.send(array, collective.get_rank(group), group),
        "is self",
    ),
    "send, no rank, on the handle": (on_handle("send", dst_rank=5, n_elements=0), "another rank from 0 to 2"),
    "send, strided": (on_handle("send", dst_rank=0, n_elements=0), "contiguous"),
    "send, more than there is": (on_handle("send", dst_rank=0, n_elements=4), "up to 3 elements"),
    "recv, no rank": (lambda collective, group, array: collective.recv(array, 3, group), "world size"),
    "recv, more than there is": (on_handle("recv", src_rank=0, n_elements=4), "up to 3 elements"),
    "allreduce_multigpu": (lambda collective, group, array: collective.allreduce_multigpu([array], group), "Cupy"),
}


def test_what_is_refused_is_refused_on_all_ranks_before_anything_is_written(
    members: list[Any], standing: dict[str, str], backend: str
) -> None:
    def act(collective: Any, rank: int, group: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for what, (call, _) in REFUSED.items():
            array = np.zeros(6)[::2] if what == "send, strided" else np.full(3, rank + 1.0)
            before = array.copy()
            try:
                call(collective, group, array)
            except RuntimeError as exc:
                found[what] = str(exc)
            except ValueError as exc:  # Ray's own, of some ranks
                found[what] = str(exc) if str(exc).startswith("rank '") else f"no RuntimeError: {exc!r}"
            else:
                found[what] = "nothing was raised"
            if not (array == before).all():
                found[what] = f"written to: {array}"
        collective.barrier(group)
        return found

    for found in each(members, act, standing[backend]):
        assert list(found) == list(REFUSED)
        assert {what: told for what, told in found.items() if not re.search(REFUSED[what][1], told)} == {}


def test_the_first_elements_of_a_message(members: list[Any], standing: dict[str, str], backend: str) -> None:
    def act(collective: Any, rank: int, group: str) -> Any:
        array = np.full((2, 2), rank + 1)
        if rank == 0:
            on_handle("send", dst_rank=1, n_elements=3)(collective, group, array)
        elif rank == 1:
            on_handle("recv", src_rank=0, n_elements=3)(collective, group, array)
        return array.tolist()

    assert each(members, act, standing[backend])[1] == [[1, 1], [1, 2]]


def op_of(rank: int) -> Any:
    from ray.util.collective.types import ReduceOp

    return ReduceOp.MAX if rank == 1 else ReduceOp.SUM


def outputs(array: Any) -> list[Any]:
    return [np.zeros_like(array) for _ in range(3)]


DIFFER: dict[str, tuple[Any, str]] = {
    "broadcast, more at the root": (lambda c, g, r, a: c.broadcast(a if r else a[:-1], 1, g), r"broadcast.*\(63,\)"),
    "broadcast, another dtype": (lambda c, g, r, a: c.broadcast(a.view([np.int32, "f4"][r > 0]), 0, g), "int32"),
    "allreduce, another shape": (lambda c, g, r, a: c.allreduce(a.reshape(8 if r else 16, -1), g), r"shape \(16, 4\)"),
    "allreduce, another operation": (lambda c, g, r, a: c.allreduce(a, g, op_of(r)), r"all_reduce \(max\)"),
    "allreduce beside barrier": (lambda c, g, r, a: c.allreduce(a, g) if r else c.barrier(g), "found barrier"),
    "allreduce beside reduce": (
        lambda c, g, r, a: c.allreduce(a, g) if r else c.reduce(a, 0, g),
        "reduce to rank 0 by",
    ),
    "reduce, another root": (lambda c, g, r, a: c.reduce(a, r // 2, g), "reduce to rank 1 by"),
    "allgather, another size": (lambda c, g, r, a: c.allgather(outputs(a[r // 2 :]), a[r // 2 :], g), "allgather by"),
    "allgather beside broadcast": (
        lambda c, g, r, a: c.allgather(outputs(a), a, g) if r else c.broadcast(a, 0, g),
        "allgather by broadcast of rank 0",
    ),
    "reducescatter, another dtype": (
        lambda c, g, r, a: c.reducescatter(
            a.view([np.int32, "f4"][r > 0]), outputs(a.view([np.int32, "f4"][r > 0])), g
        ),
        "reducescatter by all_reduce",
    ),
    "recv, another dtype": (
        lambda c, g, r, a: c.barrier(g) if r > 1 else c.recv(a, 1, g) if not r else c.send(np.zeros(64, "i4"), 0, g),
        "expected float32; found int32",
    ),
}
"""What members do, given Ray's module, the group, the rank and an array; and what all are told."""


def test_calls_that_differ_between_members_are_refused_on_all_before_anything_is_written(
    members: list[Any], backend: str
) -> None:
    serial = next(_serial)

    def act(collective: Any, rank: int) -> dict[str, str]:
        found: dict[str, str] = {}
        for place, (what, (call, _)) in enumerate(DIFFER.items()):
            name, array = f"differ-{serial}-{place}", np.full(64, rank + 1, np.float32)
            init(collective, rank, 3, backend, name)
            with pytest.raises(RuntimeError, match="expected") as caught:  # noqa: PT012  small messages are sent early
                call(collective, name, rank, array)
                collective.barrier(name)
            collective.destroy_collective_group(name)
            found[what] = f"{type(caught.value).__name__}: {caught.value}"
            if not (array == rank + 1).all():
                found[what] = f"written to: {array}"
        return found

    for found in each(members, act):
        wrong = {
            what: told
            for what, told in found.items()
            if not re.search(f"^CollectiveMismatchError: .*{DIFFER[what][1]}", told)
        }
        assert wrong == {}


def test_messages_of_other_sizes_are_refused_at_both_ends(members: list[Any]) -> None:
    name = f"sizes-{next(_serial)}"

    def act(collective: Any, rank: int) -> str:
        init(collective, rank, 2, "TENSORVINE", name)
        large = np.zeros(1 << 16)  # a small message is sent before it is asked for
        with pytest.raises(RuntimeError, match="bytes") as caught:
            collective.send(large, 1, name) if rank == 0 else collective.recv(large[1:], 0, name)
        collective.destroy_collective_group(name)
        return str(caught.value)

    assert all("524288" in text for text in each(members[:2], act))


def test_a_group_that_is_left_while_others_wait(members: list[Any], backend: str) -> None:
    name = f"waiting-{next(_serial)}"
    each(members, init, 3, backend, name)

    def act(collective: Any, rank: int) -> str:
        from ray.util.collective.collective import get_group_handle

        handle = get_group_handle(name)
        if rank == 0:
            collective.destroy_collective_group(name)
            with pytest.raises(RuntimeError, match="this member has left"):
                handle.barrier()
            return ""
        wait = [collective.barrier, lambda group: collective.recv(np.zeros(2), 0, group)][rank - 1]
        with pytest.raises(RuntimeError, match="rank 0 left") as caught:
            wait(name)
        collective.destroy_collective_group(name)
        return type(caught.value).__name__

    assert each(members, act) == ["", "CollectivePeerLostError", "CollectivePeerLostError"]


def test_a_member_that_left_is_named(members: list[Any], backend: str) -> None:
    name = f"left-{next(_serial)}"
    each(members, init, 3, backend, name)

    def leave(collective: Any, rank: int) -> None:
        collective.destroy_collective_group(name)

    each(members[:1], leave)
    with pytest.raises(PeerLostError, match="rank 0 left") as caught:
        each(members[1:], lambda collective, place: collective.barrier(name))
    assert isinstance(caught.value, RuntimeError)
    each(members[1:], leave)


def test_other_back_ends_of_our_names_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.util.collective import backend_registry
    from tensorvine.actors.collective import stock

    stock.register()
    registry = backend_registry.BackendRegistry()
    monkeypatch.setitem(registry._map, "TENSORVINE_GLOO", stock.AutoGroup)
    with pytest.raises(ValueError, match="expected the name TENSORVINE_GLOO to be free"):
        stock.register()


# ---- arguments of actors, which are read-only -------------------------------------------------------------


def read_only(option: str | None) -> None:
    from tensorvine.actors.collective.stock import register

    register(read_only=option)  # type: ignore[arg-type]


@pytest.fixture
def replaced(members: list[Any]) -> Iterator[None]:
    each(members, lambda collective, rank: read_only("replace"))
    yield
    each(members, lambda collective, rank: read_only("refuse"))


def in_all_calls(collective: Any, rank: int, group: str, given: dict[str, Any]) -> dict[str, Any]:
    assert not any(array.flags.writeable for array in [*given["outputs"], *given["inputs"], given["sum"]])
    collective.allreduce(given["sum"], group)
    collective.reduce(given["reduce"], 1, group)
    collective.broadcast(given["broadcast"], 2, group)
    collective.allgather(given["outputs"], given["inputs"][rank], group)
    collective.reducescatter(given["part"], given["inputs"], group)
    if rank == 0:
        collective.send(given["inputs"][2], 1, group)
    elif rank == 1:
        collective.recv(given["message"], 0, group)
    return {what: array if isinstance(array, list) else array.copy() for what, array in given.items()}


def arguments(length: int) -> dict[str, Any]:
    names = ("sum", "reduce", "broadcast", "part", "message")
    arrays = {name: np.full(length, place, np.float32) for place, name in enumerate(names, 1)}
    lists = {name: [np.full(length, place, np.float32) for place in range(3)] for name in ("inputs", "outputs")}
    return {**arrays, **lists}


@pytest.mark.usefixtures("replaced")
@pytest.mark.parametrize("length", [3, 1 << 16], ids=["beside the call", "in the object store"])
def test_arguments_are_given_other_memory_where_asked_for(
    members: list[Any], standing: dict[str, str], backend: str, length: int
) -> None:
    """All three have one stored object, which stays what it was."""
    stored = ray.put(arguments(length))
    found = each(members, in_all_calls, standing[backend], stored)

    def brief(result: dict[str, Any]) -> dict[str, Any]:
        whole = {what: array if isinstance(array, list) else [array] for what, array in result.items()}
        assert all((array == array[0]).all() for arrays in whole.values() for array in arrays)
        return {what: [float(array[0]) for array in arrays] for what, arrays in whole.items()}

    for rank, result in enumerate(found):
        assert brief(result) == {
            "sum": [3],
            "reduce": [6 if rank == 1 else 2],
            "broadcast": [3],
            "inputs": [0, 1, 2],
            "outputs": [0, 1, 2],
            "part": [3 * rank],
            "message": [2 if rank == 1 else 5],
        }
    assert brief(ray.get(stored)) == brief(arguments(length))


def test_arguments_are_refused_where_nothing_else_was_asked_for(
    members: list[Any], standing: dict[str, str], backend: str
) -> None:
    def act(collective: Any, rank: int, group: str, array: Any) -> None:
        with pytest.raises(TensorMismatchError, match=r"found a read-only one.*register\(read_only='replace'\)"):
            collective.allreduce(array, group)
        with pytest.raises(ValueError, match="expected 'refuse' or 'replace'; found 'write'"):
            read_only("write")
        read_only(None)

    each(members, act, standing[backend], np.zeros(3))


@pytest.mark.usefixtures("replaced")
def test_an_argument_of_which_a_part_is_given_is_refused(members: list[Any], standing: dict[str, str]) -> None:
    def act(collective: Any, rank: int, group: str, array: Any) -> None:
        with pytest.raises(RuntimeError, match="another array that uses the same memory"):
            collective.allreduce(array[1], group)

    each(members, act, standing["TENSORVINE"], np.zeros((3, 2)))
