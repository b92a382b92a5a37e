"""Channels: calls from threads and event loops have the same answers, errors and timeouts."""

from __future__ import annotations

import asyncio
import gc
import pickle
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tensorvine.actors import Repository
from tensorvine.actors.engine.groups import GROUPS
from tensorvine.actors.engine.sockets import awaited
from tensorvine.actors.engine.sockets.awaited import AwaitedConnection
from tensorvine.actors.engine.sockets.framing import SocketAddress
from tensorvine.actors.engine.sockets.lines import background_loop
from tensorvine.actors.rpc.calls import Request
from tensorvine.actors.rpc.channel import Channel
from tensorvine.actors.rpc.shard_channels import ShardChannels
from tensorvine.store.errors import (
    EngineStoppedError,
    MovedError,
    OperationTimeoutError,
    RepositoryNotFoundError,
    ShardUnavailableError,
)
from tensorvine.store.graphs.graph import Layer, ModelGraph
from tensorvine.store.refs import ModelRef

from tests.support.asking import request
from tests.support.call_targets import WAIT_S, Away, Loop, Serving, TargetCalls
from tests.support.forked import in_child, outcomes
from tests.support.waiting import eventually

NAME = "repo/shard-0"
LARGE_BYTES = 24 << 20
NOWHERE = SocketAddress("tensorvine-none", 1, b"")


class StandInEngine:
    """Knows the addresses of actors that had one name after another.

    Args:
        found: addresses of the first actor, or the error that `reach` raises.
    """

    def __init__(self, *found: SocketAddress | Exception) -> None:
        self.actors = [found]
        """What `reach` finds of each actor; the last one has the name."""
        self.asked: list[str] = []
        """The methods that were called."""
        self.runs = True
        """Whether an actor has the name."""
        self.stopped = False
        self.started = threading.Event()
        """Until it is set, `reach` waits."""
        self.started.set()

    def find(self, name: str) -> int:
        assert name == NAME
        self.asked.append("find")
        if self.stopped:
            raise EngineStoppedError("the engine was shut down")
        if not self.runs:
            raise LookupError(name)
        return len(self.actors) - 1

    def reach(self, actor: int, timeout: float, who: str) -> list[SocketAddress]:
        assert who == NAME
        self.asked.append("reach")
        assert self.started.wait(WAIT_S)
        addresses = [one for one in self.actors[actor] if isinstance(one, SocketAddress)]
        for error in self.actors[actor]:
            if isinstance(error, Exception):
                raise error
        return addresses

    @property
    def finds(self) -> int:
        return self.asked.count("find")

    @property
    def reaches(self) -> int:
        return self.asked.count("reach")


def channel_of(engine: StandInEngine, **options: Any) -> Channel:
    made: Any = engine
    return Channel(made, NAME, **options)


class Face:
    """One of the two kinds of callers of a channel: a thread, or an event loop."""

    def __init__(self, kind: str) -> None:
        self.loop = Loop() if kind == "loop" else None
        self._channels: list[Channel] = []

    def channel(self, engine: StandInEngine, **options: Any) -> Channel:
        """Return a channel that is closed with this caller."""
        self._channels.append(channel_of(engine, **options))
        return self._channels[-1]

    def call(self, channel: Channel, request: Request[Any], timeout: float = WAIT_S) -> Any:
        if self.loop is None:
            return channel.call(request, timeout)
        return self.loop.run(channel.ask(request, timeout))

    def begin(self, channel: Channel, request: Request[Any]) -> Callable[[], Any]:
        """Send a call; return a function that waits for the answer."""
        if self.loop is None:
            return partial(channel.send(request).result, WAIT_S)
        asking = channel.ask(request, WAIT_S)
        return partial(asyncio.run_coroutine_threadsafe(asking, self.loop.loop).result, WAIT_S)

    def post(self, channel: Channel, request: Request[Any]) -> None:
        async def posted() -> None:
            channel.post(request)

        if self.loop is None:
            channel.post(request)
        else:
            self.loop.run(posted())

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        loop, self.loop = self.loop, None
        if loop is not None:
            loop.close()


@pytest.fixture(params=["thread", "loop"])
def face(request: pytest.FixtureRequest) -> Iterator[Face]:
    made = Face(request.param)
    yield made
    made.close()


@pytest.fixture(params=[None, "127.0.0.1"], ids=["same machine", "other machine"])
def actor(request: pytest.FixtureRequest) -> Iterator[Serving]:
    """An actor, as callers of its machine or of another one reach it."""
    made = Serving(host=request.param)
    yield made
    made.close()


def waiting(group: str = "watch", gate: str = "gate") -> Request[Any]:
    """Return a call that is sent with those of a group and waits until `gate` is open."""
    return request("wait", gate, group=group)


class TestAnswers:
    """What a call returns or raises while the actor runs."""

    def test_answers_are_those_of_the_methods(self, actor: Serving, face: Face) -> None:
        channel = face.channel(StandInEngine(actor.address))
        assert [face.call(channel, TargetCalls.note(number)) for number in range(50)] == list(range(50))
        assert face.call(channel, TargetCalls.bytes()) is None
        face.call(channel, TargetCalls.open("gate"))
        assert face.call(channel, waiting()) == "gate"

    def test_the_engine_is_asked_once_for_each_group(self, serving: Serving, face: Face) -> None:
        engine = StandInEngine(serving.address)
        channel = face.channel(engine)
        serving.run(serving.target.open("gate"))
        for number in range(20):
            assert face.call(channel, TargetCalls.note(number)) == number
            assert face.call(channel, TargetCalls.bytes()) is None
            assert face.call(channel, waiting()) == "gate"
        assert (engine.finds, engine.reaches) == (1, 3)

    def test_errors_are_those_of_the_methods(self, actor: Serving, face: Face) -> None:
        engine = StandInEngine(actor.address)
        channel = face.channel(engine)
        for _ in range(2):  # the second time by a thread's own connection
            for error in (
                MovedError("gone", 1),
                ValueError("its own"),
                TimeoutError("its own"),
                OperationTimeoutError("its own"),
            ):
                with pytest.raises(type(error), match=str(error)) as caught:
                    face.call(channel, TargetCalls.fail(error))
                assert type(caught.value) is type(error)
            with pytest.raises(TypeError, match="odd: its answer cannot be sent"):
                face.call(channel, TargetCalls.odd())
            with pytest.raises(AttributeError, match="found 'unknown'"):
                face.call(channel, request("unknown", group="ctl"))
            with pytest.raises(TypeError, match="lock"):
                face.call(channel, TargetCalls.note(threading.Lock()))
        assert face.call(channel, TargetCalls.note(7)) == 7
        assert engine.reaches == 1, "none of these errors ends a connection"

    def test_a_call_times_out_and_its_answer_disturbs_no_other(self, actor: Serving, face: Face) -> None:
        channel = face.channel(StandInEngine(actor.address))
        face.call(channel, TargetCalls.note(0))
        for group in ("ctl", "watch"):
            with pytest.raises(
                OperationTimeoutError, match=rf"{NAME}: wait: expected an answer within 0\.0 s; the call timed out"
            ):
                face.call(channel, waiting(group), 0.02)
        with pytest.raises(OperationTimeoutError):
            face.call(channel, waiting(), -1.0)
        face.call(channel, TargetCalls.open("gate"))  # the answers arrive, and nobody waits
        assert [face.call(channel, TargetCalls.note(number)) for number in range(3)] == [0, 1, 2]
        assert face.call(channel, waiting()) == "gate"

    def test_large_arguments_and_answers(self, actor: Serving, face: Face) -> None:
        channel = face.channel(StandInEngine(actor.address))
        weights = np.random.default_rng(0).integers(0, 255, LARGE_BYTES, np.uint8)
        sent = {"weights": weights, "more": [np.arange(30_000.0), np.ones(3)], "text": b"x" * (LARGE_BYTES // 4)}
        found = face.call(channel, TargetCalls.note(sent))
        assert np.array_equal(found["weights"], weights)
        assert [each.tolist() for each in found["more"]] == [each.tolist() for each in sent["more"]]
        assert found["text"] == sent["text"]
        assert not found["weights"].flags.writeable
        assert face.call(channel, TargetCalls.note(1)) == 1

    def test_an_argument_may_be_overwritten_once_the_call_is_sent(self, actor: Serving, face: Face) -> None:
        engine = StandInEngine(actor.address)
        channel = face.channel(engine)
        array = np.zeros(LARGE_BYTES, np.uint8)

        async def asked() -> Any:
            asking = asyncio.ensure_future(channel.ask(TargetCalls.note(array), WAIT_S))
            await asyncio.sleep(0)
            array[:] = 1
            return await asking

        for _ in range(2):  # without a connection, and with one
            array[:] = 0
            if face.loop is None:
                answer = channel.send(TargetCalls.note(array))
                array[:] = 1
                found = answer.result(WAIT_S)
            else:
                found = face.loop.run(asked())
            assert not found.any()

    def test_lambdas_and_local_classes_as_arguments(self, actor: Serving, face: Face) -> None:
        class Point:
            x = 3

        channel = face.channel(StandInEngine(actor.address))
        assert face.call(channel, TargetCalls.note(lambda number: number + 1))(41) == 42
        assert face.call(channel, TargetCalls.note(Point())).x == 3
        assert face.call(channel, TargetCalls.note(Point))().x == 3

    def test_calls_that_wait_long_delay_no_short_call(self, face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(GROUPS, "watch", 60)
        serving = Serving()
        channel = face.channel(StandInEngine(serving.address))
        answers = [face.begin(channel, waiting()) for _ in range(61)]
        eventually(lambda: serving.target.waiting == 60, "60 calls wait", pause=0.002)
        assert [face.call(channel, TargetCalls.note(number)) for number in range(50)] == list(range(50))
        assert serving.target.waiting == 60, "one more than the group allows waits for its turn"
        face.call(channel, TargetCalls.open("gate"))
        assert [answer() for answer in answers] == ["gate"] * 61
        answers = [face.begin(channel, TargetCalls.note(number)) for number in range(200)]
        assert [answer() for answer in answers] == list(range(200)), "however many at once"
        face.close()
        serving.close()


def test_an_argument_that_the_actor_cannot_unpickle_fails_its_call_alone(
    away: Away, face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("tensorvine_only_here")
    module.Thing = type("Thing", (), {"__module__": module.__name__})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    engine = StandInEngine(away.address)
    channel = face.channel(engine)
    face.call(channel, TargetCalls.note(0))
    for group in ("ctl", "watch"):
        answer = face.begin(channel, waiting(group, group))
        with pytest.raises(
            TypeError, match=f"that the actor can unpickle; found ModuleNotFoundError.*{module.__name__}"
        ):
            face.call(channel, request("note", module.Thing(), group=group))
        face.call(channel, TargetCalls.open(group))
        assert answer() == group
    assert engine.reaches == 2


@pytest.mark.parametrize("group", ["ctl", "data", "watch"])
def test_an_answer_that_timed_out_may_be_waited_for_again(actor: Serving, group: str) -> None:
    face = Face("thread")
    channel = face.channel(StandInEngine(actor.address))
    channel.call(TargetCalls.note(0), WAIT_S)
    answer = channel.send(waiting(group))
    for timeout in (0.0, 0.01, -1.0):
        with pytest.raises(OperationTimeoutError, match=f"{NAME}: wait: expected an answer within"):
            answer.result(timeout)
    channel.call(TargetCalls.open("gate"), WAIT_S)
    assert [answer.result(WAIT_S), answer.result(0.0)] == ["gate", "gate"]
    face.close()


def test_a_loop_s_call_that_is_cancelled_leaves_nothing(
    away: Away, away_loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    channel = channel_of(StandInEngine(away.address))

    async def cancelled() -> None:
        asking = asyncio.ensure_future(channel.ask(waiting(), WAIT_S))
        await channel.ask(TargetCalls.note(1), WAIT_S)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    away_loop.run(cancelled())
    connection = connection_of(channel, away_loop, "watch")
    away.kill()
    eventually(lambda: not connection.open, "the connection has ended", pause=0.002)
    channel.close()
    gc.collect()
    assert caplog.records == []


class TestStart:
    """Calls of an actor that has not started yet, or does not."""

    def test_calls_wait_for_the_start_in_their_order(self, actor: Serving, face: Face) -> None:
        engine = StandInEngine(actor.address)
        engine.started.clear()
        channel = face.channel(engine)
        with pytest.raises(OperationTimeoutError, match=r"note: expected an answer within 0\.0 s"):
            face.call(channel, TargetCalls.note(-1), 0.01)
        answers = [face.begin(channel, TargetCalls.note(number)) for number in range(5)]
        face.post(channel, TargetCalls.note(5))
        engine.started.set()
        assert [answer() for answer in answers] == list(range(5))
        eventually(lambda: 5 in actor.target.seen, "the post arrived", pause=0.002)
        assert [number for number in actor.target.seen if number in range(5)] == list(range(5))

    def test_a_thread_waits_again_for_an_actor_that_starts_late(self, serving: Serving) -> None:
        engine = StandInEngine(serving.address)
        engine.started.clear()
        channel = channel_of(engine)
        answer = channel.send(TargetCalls.note(1))
        with pytest.raises(OperationTimeoutError):
            answer.result(0.01)
        engine.started.set()
        assert answer.result(WAIT_S) == 1
        channel.close()

    def test_an_error_of_the_constructor_is_raised_to_every_caller(self, serving: Serving, face: Face) -> None:
        engine = StandInEngine(FileNotFoundError("no such folder"))
        engine.started.clear()
        channel = face.channel(engine)
        answers = [face.begin(channel, TargetCalls.note(number)) for number in range(3)]
        engine.started.set()
        for answer in answers:
            with pytest.raises(FileNotFoundError, match="no such folder"):
                answer()
        with pytest.raises(FileNotFoundError, match="no such folder"):
            face.call(channel, TargetCalls.note(4))
        engine.actors = [(serving.address,)]
        assert face.call(channel, TargetCalls.note(5)) == 5
        assert serving.target.seen == [5]

    @pytest.mark.parametrize("missing", [ShardUnavailableError, RepositoryNotFoundError])
    def test_an_actor_that_does_not_exist_raises_the_error_of_the_channel(
        self, serving: Serving, face: Face, missing: type[Exception]
    ) -> None:
        engine = StandInEngine(serving.address)
        engine.runs = False
        channel = face.channel(engine, missing=missing)
        for _ in range(2):
            with pytest.raises(missing, match=f"{NAME}: expected it to run; it was stopped, or has drained"):
                face.call(channel, TargetCalls.note(1))
        engine.runs = True
        assert face.call(channel, TargetCalls.note(3)) == 3, "it is started later"

    def test_the_error_of_a_stopped_engine_is_passed_on(self, face: Face) -> None:
        stopped = StandInEngine(EngineStoppedError("the engine was shut down"))
        for engine in (stopped, StandInEngine(NOWHERE)):
            engine.stopped = engine is not stopped
            with pytest.raises(EngineStoppedError, match="the engine was shut down"):
                face.call(face.channel(engine), TargetCalls.note(1))

    def test_the_next_address_is_tried_where_the_first_does_not_answer(self, serving: Serving, face: Face) -> None:
        channel = face.channel(StandInEngine(NOWHERE, SocketAddress("away", 1, b"", ("127.0.0.1", 9)), serving.address))
        assert [face.call(channel, TargetCalls.note(number)) for number in range(20)] == list(range(20))

    def test_an_actor_that_answers_at_no_address_is_unavailable(self, serving: Serving, face: Face) -> None:
        engine = StandInEngine(NOWHERE)
        channel = face.channel(engine)
        with pytest.raises(
            ShardUnavailableError, match=f"{NAME}: note: expected an answer; it does not answer at its address"
        ):
            face.call(channel, TargetCalls.note(1))
        engine.actors = [(serving.address,)]
        assert face.call(channel, TargetCalls.note(1)) == 1


class TestDeath:
    """Calls of an actor whose process ends."""

    def test_open_calls_fail_and_later_ones_reach_the_next_incarnation(
        self, away: Away, serving: Serving, face: Face
    ) -> None:
        engine = StandInEngine(away.address)
        channel = face.channel(engine)
        face.call(channel, TargetCalls.note(0))
        answers = [face.begin(channel, waiting(group)) for group in ("ctl", "data", "watch")]
        eventually(lambda: face.call(channel, TargetCalls.waits()) == 3, "all calls wait", pause=0.002)
        engine.actors = [(serving.address,)]
        away.kill()
        for answer in answers:
            with pytest.raises(
                ShardUnavailableError, match=f"{NAME}: wait: expected an answer; it died or is being restarted"
            ):
                answer()
        reached(face, channel)
        assert [face.call(channel, TargetCalls.note(number)) for number in range(20)] == list(range(20))
        assert serving.target.seen[-20:] == list(range(20))
        assert face.call(channel, TargetCalls.bytes()) is None
        serving.run(serving.target.open("gate"))
        assert face.call(channel, waiting()) == "gate"

    def test_an_actor_that_failed_is_looked_up_by_name_again(self, away: Away, serving: Serving, face: Face) -> None:
        """A planner that was stopped and started again is another actor of the same name."""
        engine = StandInEngine(away.address)
        channel = face.channel(engine)
        face.call(channel, TargetCalls.note(0))
        answer = face.begin(channel, waiting("data"))
        eventually(lambda: face.call(channel, TargetCalls.waits()) == 1, "the call waits", pause=0.002)
        assert engine.finds == 1
        engine.runs = False
        engine.actors = [(ShardUnavailableError("it died"),)]
        away.kill()
        with pytest.raises(ShardUnavailableError, match="it died or is being restarted"):
            answer()
        with pytest.raises(ShardUnavailableError, match="it was stopped"):
            face.call(channel, TargetCalls.bytes())
        engine.actors.append((serving.address,))
        engine.runs = True
        assert face.call(channel, TargetCalls.bytes()) is None
        reached(face, channel)
        assert serving.target.seen

    def test_an_actor_that_the_engine_reports_dead_is_looked_up_by_name_again(
        self, serving: Serving, face: Face
    ) -> None:
        engine = StandInEngine(ShardUnavailableError(f"{NAME}: it died"))
        channel = face.channel(engine)
        with pytest.raises(ShardUnavailableError, match=f"{NAME}: it died"):
            face.call(channel, TargetCalls.note(1))
        engine.actors.append((serving.address,))
        assert face.call(channel, TargetCalls.note(1)) == 1
        assert engine.finds == 2

    @pytest.mark.parametrize("error", [ShardUnavailableError, ValueError])
    def test_after_an_actor_that_is_unavailable_another_process_is_reached(
        self, away: Away, serving: Serving, face: Face, error: type[Exception]
    ) -> None:
        """A host behind a cut link was replaced; its process still answers those that reach it."""
        engine = StandInEngine(away.address)
        channel = face.channel(engine)
        assert [face.call(channel, TargetCalls.note(number)) for number in range(2)] == [0, 1]
        late = face.begin(channel, TargetCalls.wait("gate"))
        eventually(lambda: face.call(channel, TargetCalls.waits()) == 1, "the call waits", pause=0.002)
        engine.actors = [(serving.address,)]
        with pytest.raises(error, match="no lease"):
            face.call(channel, TargetCalls.fail(error("no lease")))
        for number in range(3):
            assert face.call(channel, TargetCalls.note(number)) == number
        face.call(channel, TargetCalls.open("gate"))
        assert serving.target.seen == ([0, 1, 2] if error is ShardUnavailableError else [])
        if error is ValueError:
            assert late() == "gate"
            return
        assert face.call(channel, waiting()) == "gate"
        away.kill()
        with pytest.raises(ShardUnavailableError, match="it died or is being restarted"):
            late()

    def test_a_given_actor_is_never_looked_up(self, away: Away, serving: Serving, face: Face) -> None:
        engine = StandInEngine(away.address)
        channel = face.channel(engine, actor=0)
        face.call(channel, TargetCalls.note(0))
        engine.actors = [(serving.address,)]
        away.kill()
        reached(face, channel)
        assert serving.target.seen
        assert engine.finds == 0


def reached(face: Face, channel: Channel) -> None:
    """Call until an actor answers; a connection may not have noticed yet that the one before it ended."""
    eventually(
        lambda: face.call(channel, TargetCalls.note(True)),
        "the actor answers",
        pause=0.002,
        ignoring=(ShardUnavailableError,),
    )


def connection_of(channel: Channel, loop: Loop, group: str) -> AwaitedConnection:
    connection = channel._lines._open._lines[loop.loop, group]._connection
    assert connection is not None
    return connection


def test_the_end_of_one_connection_ends_no_other(serving: Serving) -> None:
    """A server refuses one, for example. A call that waits on another connection goes on."""
    channel = channel_of(StandInEngine(serving.address))
    first, second, thread = Face("loop"), Face("loop"), Face("thread")
    for face in (first, second, thread):
        face.call(channel, TargetCalls.note(0))
    answers = [face.begin(channel, waiting(group)) for face in (second, thread) for group in ("ctl", "watch")]
    answers.append(first.begin(channel, waiting()))
    eventually(lambda: serving.target.waiting == len(answers), "all calls wait", pause=0.002)
    assert first.loop is not None
    connection = connection_of(channel, first.loop, "ctl")
    first.loop.loop.call_soon_threadsafe(connection.close)
    eventually(lambda: not connection.open, "the connection is closed", pause=0.002)
    assert first.call(channel, TargetCalls.note("after its end")) == "after its end"
    assert first.call(channel, TargetCalls.open("gate")) is None
    assert [answer() for answer in answers] == ["gate"] * len(answers)
    channel.close()
    for face in (first, second):
        face.close()


def test_several_loops_and_threads_use_one_channel(serving: Serving) -> None:
    engine = StandInEngine(serving.address)
    channel = channel_of(engine)
    faces = [Face("loop"), Face("loop"), Face("thread"), Face("thread")]
    for face in reversed(faces):
        assert face.call(channel, TargetCalls.note(0)) == 0
    answers = [face.begin(channel, TargetCalls.note(n)) for n in range(100) for face in faces]
    assert [answer() for answer in answers] == [n for n in range(100) for _ in faces]
    assert engine.reaches == 3, "one connection of each loop, and one of the process's own"
    channel.close()
    for face in faces:
        face.close()


# ---- calls without an answer ------------------------------------------------------------------------------


def test_a_post_is_carried_out_and_its_answer_dropped(actor: Serving, face: Face) -> None:
    channel = face.channel(StandInEngine(actor.address))
    face.post(channel, TargetCalls.fail(ValueError("dropped")))
    face.post(channel, TargetCalls.note("posted"))
    eventually(lambda: "posted" in actor.target.seen, "the post arrived", pause=0.002)
    assert face.call(channel, TargetCalls.note(1)) == 1


def test_a_post_to_an_actor_that_does_not_exist_is_dropped(face: Face) -> None:
    engine = StandInEngine(NOWHERE)
    engine.runs = False
    face.post(face.channel(engine), TargetCalls.note("dropped"))
    eventually(lambda: engine.finds == 1, "the actor is looked up", pause=0.002)


def test_a_post_keeps_its_channel_until_it_was_answered(serving: Serving, face: Face) -> None:
    engine = StandInEngine(serving.address)
    engine.started.clear()
    face.post(channel_of(engine), TargetCalls.note("posted"))
    gc.collect()
    engine.started.set()
    eventually(lambda: "posted" in serving.target.seen, "the post arrived", pause=0.002)


# ---- the end of a channel ---------------------------------------------------------------------------------


def connections(serving: Serving) -> int:
    """Return the number of connections to an actor."""

    async def count() -> int:
        return len(serving.server._served)

    return serving.run(count())


def test_close_ends_the_connections_and_a_later_call_makes_new_ones(actor: Serving, face: Face) -> None:
    channel = face.channel(StandInEngine(actor.address))
    for _ in range(2):
        for _ in range(2):
            assert face.call(channel, TargetCalls.note(1)) == 1
        assert face.call(channel, TargetCalls.bytes()) is None
        assert connections(actor) >= 2
        channel.close()
        channel.close()
        eventually(lambda: not connections(actor), "no connection is left", pause=0.002)


def test_close_fails_calls_whose_answer_is_awaited(actor: Serving, face: Face) -> None:
    channel = face.channel(StandInEngine(actor.address))
    answer = face.begin(channel, waiting())
    eventually(lambda: actor.target.waiting == 1, "the call waits", pause=0.002)
    channel.close()
    with pytest.raises(ShardUnavailableError, match=f"{NAME}: wait: expected an answer; the connection was closed"):
        answer()


def test_close_fails_calls_that_wait_for_a_connection(serving: Serving, face: Face) -> None:
    engine = StandInEngine(serving.address)
    engine.started.clear()
    channel = face.channel(engine)
    answers = [face.begin(channel, TargetCalls.note(number)) for number in range(3)]
    eventually(lambda: engine.reaches == 1, "the engine is asked", pause=0.002)
    if face.loop is not None:
        face.loop.run(asyncio.sleep(0))  # it has sent all three calls
    channel.close()
    for answer in answers:
        with pytest.raises(ShardUnavailableError, match="the connection was closed"):
            answer()
    engine.started.set()
    assert face.call(channel, TargetCalls.note(3)) == 3
    assert serving.target.seen == [3]


def test_close_fails_a_call_whose_connection_was_not_begun(serving: Serving) -> None:
    channel, goes_on = channel_of(StandInEngine(serving.address)), threading.Event()
    background_loop().call_soon_threadsafe(goes_on.wait, WAIT_S)
    answer = channel.send(TargetCalls.note(1))
    channel.close()
    goes_on.set()
    with pytest.raises(ShardUnavailableError, match="the connection was closed"):
        answer.result(WAIT_S)
    eventually(lambda: not connections(serving), "no connection is left", pause=0.002)


def test_a_channel_that_is_closed_while_it_is_accepted_keeps_no_connection(
    serving: Serving, face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = face.channel(StandInEngine(serving.address))
    receive = AwaitedConnection.buffer_updated

    def receive_and_close(connection: AwaitedConnection, nbytes: int) -> None:
        receive(connection, nbytes)
        channel.close()

    monkeypatch.setattr(awaited.AwaitedConnection, "buffer_updated", receive_and_close)
    with pytest.raises(ShardUnavailableError, match="the connection was closed"):
        face.call(channel, TargetCalls.note(1))
    eventually(lambda: not connections(serving), "no connection is left", pause=0.002)


def test_a_channel_that_nobody_refers_to_keeps_no_connection(actor: Serving, face: Face) -> None:
    channel = channel_of(StandInEngine(actor.address))
    for _ in range(2):
        face.call(channel, TargetCalls.note(1))
    answer = face.begin(channel, waiting())
    eventually(lambda: actor.target.waiting == 1, "the call waits", pause=0.002)
    del channel
    gc.collect()
    actor.run(actor.target.open("gate"))
    assert answer() == "gate", "its answer refers to it"
    del answer
    eventually(lambda: gc.collect() >= 0 and not connections(actor), "no connection is left", pause=0.002)


def test_the_channels_of_shards_are_closed_with_their_shards(serving: Serving) -> None:
    engine: Any = StandInEngine(serving.address)
    engine.find = lambda name: 0
    engine.reach = lambda actor, timeout, who: [serving.address]
    channels = ShardChannels(engine, "repo")
    kept = channels[0]
    for number in (0, 1, 2):
        assert channels[number].call(TargetCalls.bytes(), WAIT_S) is None
    assert (channels[0], channels[1].name) == (kept, "repo/shard-1")
    assert connections(serving) == 3
    channels.forget(2)
    eventually(lambda: connections(serving) == 2, "one connection is closed", pause=0.002)
    channels.keep_only({0, 7})
    eventually(lambda: connections(serving) == 1, "another one is closed", pause=0.002)
    assert channels[0] is kept
    channels.close()
    eventually(lambda: not connections(serving), "no connection is left", pause=0.002)


# ---- other processes --------------------------------------------------------------------------------------


def test_a_forked_child_is_refused_and_ends_nothing(actor: Serving) -> None:
    engine = StandInEngine(actor.address)
    channel = channel_of(engine)
    for _ in range(2):
        channel.call(TargetCalls.note(0), WAIT_S)
    answers = [channel.send(waiting(group)) for group in ("ctl", "watch")]

    def child() -> object:
        found = outcomes(
            {
                "call": lambda: channel.call(TargetCalls.note(1), WAIT_S),
                "send": lambda: channel.send(TargetCalls.note(1)),
                "post": lambda: channel.post(TargetCalls.note(1)),
                "ask": lambda: asyncio.run(channel.ask(TargetCalls.note(1), WAIT_S)),
                "results": lambda: [answer.result(WAIT_S) for answer in answers],
            }
        )
        channel.close()
        own = channel_of(engine)
        return [found, [own.call(TargetCalls.note(number), WAIT_S) for number in range(3)]]

    gc.collect()  # otherwise the child might finalize what other tests left
    found, own = in_child(child)
    assert set(found.values()) == {"ClosedError"}, found
    assert own == [0, 1, 2], "a channel of its own works"
    channel.call(TargetCalls.open("gate"), WAIT_S)
    assert [answer.result(WAIT_S) for answer in answers] == ["gate", "gate"]
    assert engine.reaches == 2, "the parent's connections go on"
    channel.close()


SCRIPT = """
import pickle, sys
from tensorvine.actors.rpc.channel import Channel
from tests.support.call_targets import WAIT_S, TargetCalls

class Engine:
    def find(self, name):
        return name

    def reach(self, actor, timeout, who):
        return [pickle.loads(bytes.fromhex(sys.argv[1]))]

class Point:
    def __init__(self, x):
        self.x = x

class Wrong(Exception):
    pass

channel = Channel(Engine(), "repo/shard-0")
for _ in range(2):
    found = channel.call(TargetCalls.note([Point(3), lambda number: number + 1]), WAIT_S)
    assert isinstance(found[0], Point) and found[0].x == 3, found
    assert found[1](41) == 42
    try:
        channel.call(TargetCalls.fail(Wrong("of its own class")), WAIT_S)
    except Wrong as exc:
        assert str(exc) == "of its own class"
"""


def test_functions_and_classes_of_a_program_travel_by_value(serving: Serving) -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", SCRIPT, pickle.dumps(serving.address).hex()]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=WAIT_S * 3)
    assert run.returncode == 0, run.stderr[-3000:]
    points = [point for point, _ in serving.target.seen]
    assert [(type(point).__name__, point.x) for point in points] == [("Point", 3)] * 2
    assert [add(1) for _, add in serving.target.seen] == [2, 2]


# ---- a repository -----------------------------------------------------------------------------------------


@pytest.mark.both_engines
def test_a_client_with_connections_asks_the_engine_nothing(cluster: object, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    graph = ModelGraph([Layer("in", {"class": "Input"}, tensors=["t"])])
    with Repository.start(f"lines-{uuid.uuid4().hex[:8]}", shards=2, preallocate_bytes=0) as repo:

        def use(name: str) -> None:
            ref = repo.save(name, {"t": np.ones(5)}, graph=graph).ref
            assert repo.save(name, {"t": np.zeros(5)}).ref.version == 2
            assert repo.load(ref)["t"].tolist() == [1.0] * 5
            match = repo.longest_prefix(graph)
            assert match is not None
            match.release()
            assert repo.wait_newer(name, 1) == ModelRef(name, 2)
            repo.retire(ref)

        use("first")
        repo.stats()  # connects to all shards
        for number in range(8):  # names of both shards
            use(f"warm-{number}")
        for method in ("find", "reach"):
            monkeypatch.setattr(type(repo.engine), method, lambda *_, method=method: asked.append(method))
        use("m")
        assert repo.stats().models == 10
        monkeypatch.undo()
    assert asked == []
