"""What comes after a commit, when shards have gone; and what comes after that which ends it. No Ray: one home only."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import Any

import pytest
from tensorvine.actors.rpc.calls import Request
from tensorvine.actors.rpc.messages import Beginning
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.actors.shard.handoff.segment_handoff import SegmentHandoff
from tensorvine.planner.topology import Topology
from tensorvine.store.errors import MovedError, OperationTimeoutError, RepositoryNotFoundError, ShardUnavailableError
from tensorvine.store.holders import Lease, Save
from tensorvine.store.refs import ModelRef
from tensorvine.store.versions.overtaken import Overtaken
from tensorvine.store.waiting import Deadline

from tests.support.home import BYTES, CLIENT, SAVE, SEGMENT, GoneEngine, Home, QuietSegmentHandoff


@pytest.fixture
def home() -> Home:
    return Home()


def test_a_call_of_a_shard_that_has_gone_is_an_error_of_the_tree(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    peers = home.peers
    hold = partial(peers.hold, ModelRef("m", 1), {(1, 1): [0]}, Deadline.after(1.0))
    for call in (partial(peers.ask, 1, ShardCalls.node()), hold):
        with pytest.raises(ShardUnavailableError, match=r"gone/shard-1: expected it to run; it was stopped"):
            asyncio.run(call())
    with pytest.raises(ShardUnavailableError):
        peers.call(1, ShardCalls.claims(0), 1.0)
    peers.post(1, ShardCalls.release(ModelRef("m", 1)))
    asyncio.run(peers.tell_gently(1, ShardCalls.release(ModelRef("m", 1))))
    asyncio.run(peers.release(ModelRef("m", 1), {1}))
    assert caplog.text.count("shard 1: sending release(ModelRef('m@1')) failed") == 1, "nobody waits for a post"
    assert caplog.text.count("shard 1 could not be notified to release m@1") == 1


def test_a_shard_whose_planner_was_stopped_says_so(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(self: GoneEngine, name: str) -> Any:
        raise LookupError(f"no actor named {name!r}")

    monkeypatch.setattr(GoneEngine, "find", find)
    with pytest.raises(RepositoryNotFoundError, match="gone/planner: expected it to run"):
        home.save([])
    assert home.state.models() == []
    with pytest.raises(RepositoryNotFoundError, match="gone/planner: expected it to run"):
        home.peers.recovery_info()


def test_a_lease_that_was_handed_to_a_shard_that_has_gone_does_not_fail_the_commit(home: Home) -> None:
    lease = Lease(SAVE, 0)
    home.names._onward[lease] = 1
    assert home.save([lease]) == ModelRef("m", 1)
    assert home.state.models() == [ModelRef("m", 1)]


def test_nothing_that_comes_after_a_commit_fails_it(
    home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(*arguments: Any) -> None:
        raise OperationTimeoutError("it is slow")

    monkeypatch.setattr(home.settling, "settle", fails)
    assert home.save([]) == ModelRef("m", 1)
    assert "m@1 is committed, but a later step of its save failed\n" in caplog.text
    assert home.state.held(home.state.models()[0]) == {SEGMENT: [0]}


def test_a_commit_that_a_shard_that_has_gone_makes_fail_leaves_nothing(home: Home) -> None:
    with pytest.raises(ShardUnavailableError, match="gone/shard-1: expected it to run"):
        home.save([], {SEGMENT: [0], (1, 1): [0]})
    assert home.state.models() == []
    assert home.state.version_holders() == []


def test_a_shard_whose_names_move_waits_for_the_first_version_of_a_new_one(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = Topology("gone", (0, 1), "starter")
    home.peers.topology = topology
    name = next(name for name in map(str, range(100)) if topology.home(name) == 0)
    heard: list[str] = []

    async def ask(shard: int, request: Request[Any]) -> int:
        heard.append(request.remote.name)
        return 0

    async def change() -> None:
        with home.names.writing(name):
            home.names.learn(topology.shrunk([0]))
            moving = asyncio.create_task(home.names.hand_over())
            for _ in range(10):
                await asyncio.sleep(0)
            assert heard == []
            with pytest.raises(MovedError), home.names.writing(name):
                pass
        await moving

    monkeypatch.setattr(home.peers, "ask", ask)
    asyncio.run(change())
    assert heard == ["take", "arrived"]


# ---- releases while a shard drains --------------------------------------------------------------------


def test_successors_hear_who_holds_what_before_they_hear_who_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(SegmentHandoff)
    home.state.open(CLIENT, 0.0)
    home.state.adopt(SAVE, SEGMENT, b"abcd", [4])
    for holder in (ModelRef("m", 1), ModelRef("m", 2)):
        home.state.hold(holder, {SEGMENT: [0]})
    after = Topology("gone", (0, 1), "starter").shrunk([0])
    segment_handoff = home.settling._segment_handoff
    segment_handoff._copied.add(SEGMENT)
    heard: list[Any] = []
    slow = asyncio.Event()

    async def ask(shard: int, request: Request[Any], timeout: float = 30.0) -> list[Any]:
        if request.remote is ShardCalls.inherit:
            await slow.wait()
            heard.extend(holder for segment in request.arguments[1] for holder in segment.holders)
        else:
            heard.append((shard, request.remote.name, *request.arguments))
        return []

    async def drain() -> None:
        moving = asyncio.create_task(segment_handoff.hand_over(after))
        await asyncio.sleep(0)
        await home.holders.release(ModelRef("m", 1))
        assert heard == []
        slow.set()
        await moving
        await home.settling.settle()

    monkeypatch.setattr(home.peers, "ask", ask)
    asyncio.run(drain())
    assert heard == [SAVE, ModelRef("m", 1), ModelRef("m", 2), (1, "release", ModelRef("m", 1))]


def test_what_a_shard_that_has_drained_does_not_hear_any_more_its_successors_are_told(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[int] = []

    async def ask(shard: int, request: Request[Any], timeout: float) -> None:
        heard.append(shard)
        if shard not in (0, 3):
            raise ShardUnavailableError(f"shard {shard} has drained")

    monkeypatch.setattr(home.peers, "ask", ask)
    home.peers.topology = Topology("gone", (0, 1, 2, 3), "starter").shrunk([1]).settled().shrunk([2])
    asyncio.run(home.peers.release(ModelRef("m", 1), {1}))
    assert heard == [1, 0, 2, 3, 0, 3]


# ---- a release that comes before what it undoes -------------------------------------------------------


def test_a_hold_that_its_release_overtook_is_refused_and_holds_nothing(home: Home) -> None:
    home.state.open(CLIENT, 0.0)
    home.state.adopt(SAVE, SEGMENT, b"abcd", [4])
    asyncio.run(home.holders.release(ModelRef("m", 7)))
    with pytest.raises(OperationTimeoutError, match="m@7: expected it to be held before its release"):
        asyncio.run(home.holders.hold(ModelRef("m", 7), {SEGMENT: [0]}))
    assert home.state.version_holders() == []
    asyncio.run(home.holders.hold(ModelRef("m", 8), {SEGMENT: [0]}))
    asyncio.run(home.holders.release(ModelRef("m", 8)))
    asyncio.run(home.holders.hold(ModelRef("m", 8), {SEGMENT: [0]}))  # that release had found what it undoes
    assert home.state.version_holders() == [ModelRef("m", 8)]


@pytest.mark.parametrize("late", [1, 2])
def test_a_home_that_started_again_holds_anew_and_what_comes_late_from_its_start_changes_nothing(
    home: Home, late: int
) -> None:
    home.state.open(CLIENT, 0.0)
    home.state.adopt(SAVE, SEGMENT, b"abcd", [4])
    asyncio.run(home.holders.hold(ModelRef("m", 1), {SEGMENT: [0]}))
    asyncio.run(home.holders.hold(ModelRef("m", 2), {SEGMENT: [0]}))
    asyncio.run(home.holders.release_homes(0, [ModelRef("m", 2)], 0, 2))
    assert home.state.version_holders() == [ModelRef("m", 2)]
    asyncio.run(home.holders.hold(ModelRef("m", 3), {SEGMENT: [0]}))
    asyncio.run(home.holders.release_homes(0, [ModelRef("m", 2)], 0, late))
    assert home.state.version_holders() == [ModelRef("m", 2), ModelRef("m", 3)]


def test_a_shard_that_drained_passes_a_home_s_loss_on_by_name() -> None:
    """That home may have made new versions meanwhile, and hold for them at the successors, or be a successor."""
    segment_handoff: Any = QuietSegmentHandoff()
    segment_handoff.successors = {1, 2}
    segment_handoff.is_telling = True
    home = Home(lambda context: segment_handoff)
    home.state.open(CLIENT, 0.0)
    home.state.adopt(SAVE, SEGMENT, b"abcd", [4])
    for holder in (ModelRef("m", 1), ModelRef("m", 2)):
        home.state.hold(holder, {SEGMENT: [0]})
    asyncio.run(home.holders.release_homes(0, [ModelRef("m", 2)], 0, 1))
    assert sorted(home.state.outbox) == [(1, ModelRef("m", 1)), (2, ModelRef("m", 1))]


def test_a_shard_that_started_again_holds_nothing_before_its_earlier_life_holds_nothing(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[str, Any]] = []

    async def ask(shard: int, request: Request[Any], timeout: float = 30.0) -> None:
        await asyncio.sleep(0)
        heard.append((request.remote.name, request.arguments))

    monkeypatch.setattr(home.peers, "ask", ask)
    monkeypatch.setattr(home.peers, "_restarts", 3)
    home.peers.forget_earlier([ModelRef("m", 1)])
    for holder in (ModelRef("m", 5), ModelRef("m", 6)):
        asyncio.run(home.peers.hold(holder, {(1, 1): [0]}, Deadline.after(60.0)))
    assert heard == [
        ("release_homes", (0, [ModelRef("m", 1)], 0, 3)),
        ("hold", (ModelRef("m", 5), {(1, 1): [0]})),
        ("hold", (ModelRef("m", 6), {(1, 1): [0]})),
    ]


def test_saves_are_not_remembered_and_of_versions_only_the_newest() -> None:
    overtaken = Overtaken(limit=2)
    for holder in (ModelRef("m", 1), ModelRef("m", 2), ModelRef("m", 3)):
        overtaken.released(holder)
    overtaken.check(ModelRef("m", 1))
    for holder in (ModelRef("m", 2), ModelRef("m", 3)):
        with pytest.raises(OperationTimeoutError):
            overtaken.check(holder)
        overtaken.check(holder)
    home = Home()
    asyncio.run(home.holders.release(Save("other", 1)))
    assert not home.holders._overtaken._released


# ---- what is asked for a save that has ended ----------------------------------------------------------

ENDED = "save client/s1: expected to be in progress; it has ended"


@pytest.fixture
def roomy() -> Home:
    return Home(roomy=True)


def test_memory_that_is_asked_for_after_its_save_was_given_up_is_not_granted(roomy: Home) -> None:
    asyncio.run(roomy.writes.abort(SAVE))
    for ask in (
        lambda: roomy.writes.grant(CLIENT, SAVE, [BYTES], 60.0),
        lambda: roomy.writes.begin(
            Beginning(
                client=CLIENT,
                name="m",
                version=None,
                optional=True,
                known=None,
                inherits=False,
                compares=False,
                save=SAVE,
                sizes=[BYTES],
                timeout=60.0,
            )
        ),
        lambda: roomy.writes.reserve(CLIENT, SAVE, [BYTES // 4]),
    ):
        with pytest.raises(OperationTimeoutError, match=ENDED):
            asyncio.run(ask())
    assert roomy.context.segment_memory.bytes_filling == 0


def test_memory_that_becomes_free_is_not_granted_to_a_save_that_was_given_up_while_it_waited(roomy: Home) -> None:
    async def both() -> None:
        assert await roomy.writes.grant(CLIENT, Save("client", 0), [BYTES], 60.0)
        waiting = asyncio.create_task(roomy.writes.grant(CLIENT, SAVE, [BYTES], 60.0))
        await asyncio.sleep(0)  # it waits from here on
        await roomy.writes.abort(SAVE)
        await roomy.writes.abort(Save("client", 0))
        with pytest.raises(OperationTimeoutError, match=ENDED):
            await waiting

    asyncio.run(both())
    assert roomy.context.segment_memory.bytes_filling == 0


def test_tensors_that_come_after_their_save_was_given_up_are_not_taken(roomy: Home) -> None:
    roomy.state.open(CLIENT, 0.0)
    asyncio.run(roomy.writes.abort(SAVE))
    with pytest.raises(OperationTimeoutError, match=ENDED):
        asyncio.run(roomy.writes.adopt(SAVE, os.getpid(), [(SEGMENT, b"abcd", [4])]))
    assert roomy.state.segment(SEGMENT) is None


def test_a_home_tells_which_of_its_versions_are_none_and_nothing_while_names_move(home: Home) -> None:
    home.state.open(CLIENT, 0.0)
    saved = home.save([])

    def ask(version: int) -> list[str]:
        return asyncio.run(home.holders.unknown([saved, ModelRef("m", 7)], version))

    assert ask(home.peers.topology.version) == [ModelRef("m", 7)]
    assert ask(home.peers.topology.version + 1) == []
    home.peers.topology = home.peers.topology.grown((5,))
    assert ask(home.peers.topology.version) == []
