"""How members meet and become a group: rendezvous of threads and of the cluster, back ends, failures to join."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from tensorvine.actors.collective.connect import connect
from tensorvine.actors.collective.group import Group
from tensorvine.actors.collective.rendezvous import (
    ActorRendezvous,
    Endpoint,
    Endpoints,
    LocalRendezvous,
    Meeting,
    Rendezvous,
)
from tensorvine.actors.collective.shared import backend as shared
from tensorvine.actors.collective.shared import crossmemory
from tensorvine.actors.engine.ray.engine import RayEngine
from tensorvine.clusters import LocalCluster
from tensorvine.store.errors import OperationTimeoutError, PeerLostError, TensorVineError

from tests.support.ranks import at_once, backends
from tests.support.waiting import PATIENCE_S, eventually


class Coroutines:
    """Where threads meet that run coroutines, each in a loop of its own."""

    def __init__(self) -> None:
        self._place = LocalRendezvous()

    def exchange(self, key: str, rank: int, size: int, endpoint: Endpoint, timeout: float) -> Endpoints:
        return asyncio.run(self._place.met(key, rank, size, endpoint, timeout))


@pytest.fixture(scope="module", params=["threads", "coroutines", pytest.param("cluster", marks=pytest.mark.ray)])
def place(request: pytest.FixtureRequest) -> Iterator[Rendezvous]:
    if request.param == "threads":
        yield LocalRendezvous()
    elif request.param == "coroutines":
        yield Coroutines()
    else:
        request.getfixturevalue("cluster")
        yield ActorRendezvous(RayEngine())


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (TensorVineError, ValueError) as exc:
        return exc


def test_all_get_the_endpoints_of_all_by_rank(place: Rendezvous) -> None:
    def come(rank: int) -> Any:
        return place.exchange("k", rank, 3, {"port": 10 + rank}, 20)

    for _ in range(2):  # the key is free again
        assert at_once([partial(come, rank) for rank in (2, 0, 1)]) == [[{"port": p} for p in (10, 11, 12)]] * 3


def test_who_does_not_come_is_named_and_the_key_is_free_again(place: Rendezvous) -> None:
    for _ in range(2):
        jobs = [partial(place.exchange, "missing", rank, 4, {}, 1.0) for rank in (0, 2)]
        for error in at_once([partial(outcome, job) for job in jobs]):
            assert isinstance(error, OperationTimeoutError)
            assert "expected ranks 0 to 3 to join within 1.0 s; 1, 3 did not" in str(error)
    assert place.exchange("missing", 0, 1, {"a": 1}, 20) == [{"a": 1}]


def test_who_did_not_wait_long_enough_is_named() -> None:
    meeting = Meeting("k", 4)
    assert not meeting.come(0, 4, {})
    assert meeting.leave(0)
    assert not meeting.come(1, 4, {})
    assert str(meeting.late(1.0)).endswith("2, 3 did not")
    assert not meeting.come(2, 4, {})
    assert not meeting.come(3, 4, {})
    assert str(meeting.late(1.0)).endswith("0 had stopped waiting")
    assert meeting.come(0, 4, {})


def test_who_comes_again_after_giving_up_is_welcome(place: Rendezvous) -> None:
    assert isinstance(outcome(lambda: place.exchange("again", 0, 2, {"try": 1}, 0.1)), OperationTimeoutError)
    jobs = [partial(place.exchange, "again", rank, 2, {"try": 2}, 20) for rank in (0, 1)]
    assert at_once(jobs) == [[{"try": 2}] * 2] * 2


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ((0, 2), "expected one member of rank 0; found a second one"),
        ((1, 3), "expected a group of 2; found rank 1 of 3"),
    ],
)
def test_two_that_contradict_each_other_are_refused(place: Rendezvous, second: tuple[int, int], message: str) -> None:
    key = f"contradiction {message}"
    jobs = [partial(place.exchange, key, *given, {}, 1.5) for given in ((0, 2), second)]
    errors = at_once([partial(outcome, job) for job in jobs])
    refused = [error for error in errors if not isinstance(error, OperationTimeoutError)]
    assert len(refused) == 1
    assert isinstance(refused[0], ValueError)
    assert str(refused[0]).startswith(key)
    assert "expected" in str(refused[0])


def test_there_is_no_rank_beyond_the_size(place: Rendezvous) -> None:
    with pytest.raises(ValueError, match="expected a rank from 0 to 1; found 2"):
        place.exchange("beyond", 2, 2, {}, 0.1)


def test_a_group_without_a_rendezvous_meets_on_the_running_ray(cluster: LocalCluster) -> None:
    def act(rank: int) -> str:
        with connect("on ray", rank, 2, timeout=30) as group:
            group.barrier()
            return group.backend

    assert at_once([partial(act, rank) for rank in range(2)]) == ["shared"] * 2


# ---- connect ------------------------------------------------------------------------------------------


def test_auto_takes_shared_memory_on_one_machine() -> None:
    meeting = LocalRendezvous()
    jobs = [partial(connect, "g", rank, 3, timeout=20, rendezvous=meeting) for rank in range(3)]
    groups: list[Group] = at_once(jobs)
    assert [group.backend for group in groups] == ["shared"] * 3
    for group in groups:
        group.close()


@pytest.mark.parametrize("backend", backends("gloo"))
def test_auto_takes_gloo_if_one_cannot_be_read_and_says_why_once(
    backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, asked = crossmemory.trouble, []

    def found(label: str, own: Any, endpoints: Any) -> str | None:
        asked.append(own)
        refused = "the memory of rank 1 cannot be read: Operation not permitted"
        return refused if len(asked) == 1 else real(label, own, endpoints)

    monkeypatch.setattr(crossmemory, "trouble", found)
    meeting = LocalRendezvous()
    with caplog.at_level(logging.WARNING):
        groups: list[Group] = at_once(
            [partial(connect, "g", rank, 2, timeout=20, rendezvous=meeting) for rank in range(2)]
        )
    at_once([group.barrier for group in groups])
    assert [group.backend for group in groups] == [backend] * 2
    for group in groups:
        group.close()
    assert len(caplog.messages) == 1
    assert "Gloo" in caplog.messages[0]
    assert "Operation not permitted" in caplog.messages[0]


def test_shared_memory_that_cannot_be_read_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "trouble", lambda *_: "rank 1 is on another machine")
    with pytest.raises(ValueError, match=r"group 'g', epoch 0: .* rank 1 is on another machine"):
        connect("g", 0, 1, backend="shared", rendezvous=LocalRendezvous())


def test_members_that_want_different_back_ends_are_told() -> None:
    meeting, before = LocalRendezvous(), len(os.listdir("/proc/self/fd"))
    jobs = [
        partial(connect, "g", rank, 2, backend=backend, timeout=2 * PATIENCE_S, rendezvous=meeting)
        for rank, backend in enumerate(["auto", "shared"])
    ]
    for error in at_once([partial(outcome, job) for job in jobs]):
        assert isinstance(error, ValueError)
        assert "back end" in str(error)
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before, "nothing to stay open", pause=0.002)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 2}, "expected a rank from 0 to size - 1; found rank 2 of 2"),
        ({"rank": -1}, "found rank -1 of 2"),
        ({"size": 0}, "found rank 0 of 0"),
        ({"backend": "mpi"}, "expected auto, shared, gloo, nccl; found 'mpi'"),
        ({"timeout": 0}, "expected a finite timeout above 0"),
        ({"epoch": -1}, "epoch -1"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    rank, size = given.pop("rank", 0), given.pop("size", 2)
    with pytest.raises(ValueError, match=message):
        connect("g", rank, size, rendezvous=LocalRendezvous(), **given)


def test_who_ends_before_it_connects_is_missed_and_nothing_stays_open() -> None:
    """Rank 0 brings an endpoint and is gone when rank 1 connects."""
    before = len(os.listdir("/proc/self/fd"))
    backend = shared.SharedBackend()
    offers = [backend.offer(), backend.offer()]
    offers[0].close()
    with pytest.raises(PeerLostError, match="rank 0"):
        backend.join(
            offers[1], "g", epoch=0, rank=1, size=2, endpoints=[offer.endpoint for offer in offers], timeout=5.0
        )
    offers[1].close()
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before, "nothing to stay open", pause=0.002)
