"""How members join and leave a collective group, on all back ends: epochs, who does not come, which back end is taken.

Rules
- Members are threads of this process.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.collective.connect import connect, renew
from tensorvine.actors.collective.group import Group
from tensorvine.actors.collective.rendezvous import LocalRendezvous
from tensorvine.store.errors import OperationTimeoutError, PeerLostError

from tests.support.groups import at_once, each, groups, join, new_name
from tests.support.waiting import eventually

# ---- joining and leaving ------------------------------------------------------------------------------


def test_members_join_and_leave_by_the_next_epoch(backend):
    meeting, name = LocalRendezvous(), new_name()
    known = {"rendezvous": meeting, "timeout": 15.0}

    def total(group: Group) -> int:
        array = np.ones(1000, np.int32)
        group.all_reduce(array)
        assert (array == array[0]).all()
        return int(array[0])

    def stays(rank: int) -> list[int]:
        first = join(backend, rank, 3, name=name, **known)
        found = [total(first)]
        second = renew(first, 1 - rank, 2, rendezvous=meeting)  # in another order
        assert (second.epoch, second.size, second.rank, second.timeout) == (1, 2, 1 - rank, 15.0)
        with pytest.raises(PeerLostError, match="this member has left"):
            first.barrier()
        found.append(total(second))
        with renew(second, rank, 4, timeout=14.0, rendezvous=meeting) as third:
            assert (third.name, third.timeout, third.backend) == (name, 14.0, backend)
            return [*found, total(third)]

    def goes() -> list[int]:
        with join(backend, 2, 3, name=name, **known) as group:
            return [total(group)]

    def comes(rank: int) -> list[int]:
        with join(backend, rank, 4, name=name, epoch=2, **known) as group:
            return [total(group)]

    found = at_once([lambda: stays(0), lambda: stays(1), goes, lambda: comes(2), lambda: comes(3)])
    assert found == [[3, 2, 4], [3, 2, 4], [3], [4], [4]]


def test_who_does_not_come_is_named_in_time(backend):
    meeting, name = LocalRendezvous(), new_name()
    begun = time.monotonic()
    found = at_once(
        [lambda rank=rank: join(backend, rank, 4, name=name, rendezvous=meeting, timeout=1.0) for rank in (0, 2)]
    )
    assert time.monotonic() - begun < 15
    assert [type(error) for error in found] == [OperationTimeoutError] * 2
    assert any(f"group '{name}', epoch 0" in str(error) and "1, 3 did not" in str(error) for error in found)
    with groups(backend, 2, name=name, rendezvous=meeting) as members:  # nothing is left of it
        assert each(members, lambda group: group.barrier()) == [None] * 2


def test_two_who_come_as_the_same_rank_are_told_apart(backend):
    meeting, name = LocalRendezvous(), new_name()
    twice = [lambda: join(backend, 0, 2, name=name, rendezvous=meeting, timeout=20.0)] * 2
    with ThreadPoolExecutor(2) as pool:
        first = [pool.submit(call) for call in twice]
        eventually(lambda: any(future.done() for future in first), "one is refused", pause=0.001)
        second = join(backend, 1, 2, name=name, rendezvous=meeting)
    errors = [future.exception() for future in first]
    assert sorted(type(error).__name__ for error in errors) == ["NoneType", "ValueError"]
    assert any(f"group '{name}', epoch 0: expected one member of rank 0" in str(error) for error in errors)
    second.close()
    next(future.result() for future in first if future.exception() is None).close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2, "size": 2}, "expected a rank from 0 to size - 1; found rank 2 of 2"),
        ({"rank": -1, "size": 2}, "found rank -1 of 2"),
        ({"rank": 0, "size": 0}, "found rank 0 of 0"),
        ({"rank": 0, "size": 1, "backend": "mpi"}, "backend: expected auto, shared, gloo, nccl; found 'mpi'"),
        ({"rank": 0, "size": 1, "timeout": 0}, "expected a finite timeout above 0"),
        ({"rank": 0, "size": 1, "timeout": float("nan")}, "expected a finite timeout above 0"),
        ({"rank": 0, "size": 1, "epoch": -1}, "an epoch of at least 0; found 20.0 s, epoch -1"),
    ],
)
def test_a_join_with_wrong_arguments_is_refused(arguments, message):
    options = {"backend": "shared", "timeout": 20.0, "rendezvous": LocalRendezvous(), **arguments}
    with pytest.raises(ValueError, match=message):
        connect("wrong", options.pop("rank"), options.pop("size"), **options)


def test_members_that_want_different_things_hear_of_it():
    meeting = {"rendezvous": LocalRendezvous(), "timeout": 5.0}
    found = at_once(
        [
            lambda: connect("mixed", 0, 2, backend="shared", **meeting),
            lambda: connect("mixed", 1, 2, backend="auto", **meeting),
        ]
    )
    assert "expected back end 'shared' on all ranks; found 'auto' on rank 1" in str(found[0])
    assert "expected back end 'auto' on all ranks; found 'shared' on rank 0" in str(found[1])


def test_auto_is_shared_memory_on_one_machine():
    with groups("auto", 3) as members:
        assert [group.backend for group in members] == ["shared"] * 3


class FarAway(LocalRendezvous):
    """Shows rank 1's endpoint as that of another machine."""

    def exchange(self, key: str, rank: int, size: int, endpoint: Any, timeout: float) -> list[dict[str, Any]]:
        endpoints = super().exchange(key, rank, size, endpoint, timeout)
        if "machine" in endpoints[1].get("endpoint", {}):
            endpoints[1] = {**endpoints[1], "endpoint": {**endpoints[1]["endpoint"], "machine": "another"}}
        return endpoints


def test_auto_is_gloo_where_a_member_is_elsewhere_and_says_why_once(caplog):
    pytest.importorskip("torch")
    caplog.set_level(logging.INFO)
    with groups("auto", 3, name="far", rendezvous=FarAway()) as members:
        assert [group.backend for group in members] == ["gloo"] * 3
        assert each(members, lambda group: group.barrier()) == [None] * 3
    said = [record.getMessage() for record in caplog.records if "Gloo" in record.getMessage()]
    assert len(said) == 1
    assert "group 'far', epoch 0" in said[0]
    assert "rank 1 is on another machine" in said[0]
