"""Channels: by whichever way a call goes, from a thread or from a loop, it is answered alike."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tensorvine.actors import Repository
from tensorvine.actors.engine.engine import GROUPS
from tensorvine.actors.engine.ray.engine import RayEngine
from tensorvine.actors.engine.sockets import awaited
from tensorvine.actors.engine.sockets.framing import SocketAddress
from tensorvine.actors.engine.sockets.traffic import SHORT_CALLS
from tensorvine.actors.rpc.calls import Request, answers, remote, socket_methods
from tensorvine.actors.rpc.channel import Answer, Channel
from tensorvine.store.errors import (
    MovedError,
    OperationTimeoutError,
    RepositoryNotFoundError,
    ShardUnavailableError,
    TensorVineError,
)
from tensorvine.store.graphs.graph import Layer, ModelGraph
from tensorvine.store.refs import ModelRef

from tests.support.call_targets import WAIT_S, Away, Loop, Serving, Target, TargetCalls
from tests.support.waiting import eventually

NAME = "repo/actor"


class StandInEngine:
    """Runs an actor in a loop of another thread, and counts the calls that it carries."""

    def __init__(self, loop: Loop, target: Target, address: SocketAddress | TensorVineError | None) -> None:
        self.loop, self.target, self.address = loop, target, address
        self.calls: list[str] = []
        self.found = 0
        self.there = True

    def this_node(self) -> str:
        return "here"

    def find(self, name: str) -> str:
        assert name == NAME
        self.found += 1
        if not self.there:
            raise LookupError(name)
        return name

    def call(self, actor: str, method: str, *arguments: Any) -> Any:
        self.calls.append(method)
        if method == "socket_address":
            assert arguments == ("here",)
            return self.address
        return asyncio.run_coroutine_threadsafe(getattr(self.target, method)(*arguments), self.loop.loop)

    def result(self, future: Any, timeout: float, who: str) -> Any:
        assert who.startswith(NAME)
        if isinstance(future, TensorVineError):
            raise future
        if future is None or isinstance(future, SocketAddress):
            return future
        try:
            return future.result(timeout)
        except FutureTimeoutError as exc:
            if future.done():  # the method's own
                raise
            raise OperationTimeoutError(
                f"{who}: expected an answer within {timeout:.1f} s; the call timed out"
            ) from exc

    async def awaitable(self, future: Any, timeout: float, who: str) -> Any:
        return await asyncio.to_thread(self.result, future, timeout, who)


Caller = Callable[..., Any]


class Face:
    """One of the two kinds of callers of a channel: `call` returns the answer, or raises."""

    def __init__(self, kind: str) -> None:
        self.loop = Loop() if kind == "loop" else None

    def call(self, channel: Channel, request: Request[Any], timeout: float = WAIT_S) -> Any:
        if self.loop is None:
            return channel.call(request, timeout)
        return self.loop.run(channel.ask(request, timeout))

    def close(self) -> None:
        if self.loop is not None:
            self.loop.close()


@pytest.fixture(params=["thread", "loop"])
def face(request: pytest.FixtureRequest) -> Iterator[Face]:
    made = Face(request.param)
    yield made
    made.close()


def channel_of(engine: StandInEngine, *, follows: bool = True, **options: Any) -> Channel:
    made: Any = engine
    return Channel(made, NAME, follows=follows, **options)


def until_by_socket(face: Face, channel: Channel, engine: StandInEngine) -> None:
    """Call until a call does not go by the engine."""

    def reached() -> bool:
        before = engine.calls.count("note")
        assert face.call(channel, TargetCalls.note(0)) == 0
        return engine.calls.count("note") == before

    eventually(reached, "a call goes by the socket", pause=0.002)


class TestCalls:
    """What is declared and what is asked for."""

    def test_a_request_is_made_of_positions_names_and_defaults(self) -> None:
        class Calls:
            @remote("ctl")
            def add(self, number: int, times: int = 2, *, sign: str = "+") -> int: ...

        assert Calls.add(1).arguments == (1,)
        assert repr(Calls.add(1, times=3)) == "add(1, 3)"
        with pytest.raises(TypeError, match="missing a required argument: 'number'"):
            Calls.add(times=3)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="unexpected keyword argument 'tmies'"):
            Calls.add(1, tmies=3)  # type: ignore[call-arg]

    def test_the_mark_of_a_method_is_its_declaration_s(self) -> None:
        class Calls:
            @remote("watch", by_socket=True)
            def slow(self) -> None:
                """Take long."""

            @remote("data")
            def much(self) -> None: ...

        class Actor:
            @answers(Calls.slow)
            async def slow(self) -> None: ...

            @answers(Calls.much)
            async def much(self) -> None: ...

        assert socket_methods(Actor) == {"slow": "watch"}
        assert Actor.slow.__doc__ == "Take long."
        groups = [getattr(method, "concurrency_group", None) for method in (Actor.slow, Actor.much)]
        assert groups == ["watch", "data"]


class TestBothFaces:
    """Threads and loops, by socket and by the engine."""

    def test_first_by_the_engine_and_then_by_the_socket(self, serving: Serving, face: Face) -> None:
        engine = StandInEngine(serving, serving.target, serving.address)
        channel = channel_of(engine)
        until_by_socket(face, channel, engine)
        carried = list(engine.calls)
        assert [face.call(channel, TargetCalls.note(number)) for number in range(50)] == list(range(50))
        assert engine.calls == carried
        assert carried.count("socket_address") == 1
        face.call(channel, TargetCalls.bytes())
        assert engine.calls[-1] == "bytes", "what a socket does not carry"
        channel.close()
        assert face.call(channel, TargetCalls.note(7)) == 7
        assert engine.calls[-1] == "note", "after its end all goes by the engine"

    @pytest.mark.parametrize("by", ["socket", "engine"])
    def test_what_goes_wrong_is_said_alike(self, serving: Serving, face: Face, by: str) -> None:
        engine = StandInEngine(serving, serving.target, serving.address if by == "socket" else None)
        channel = channel_of(engine)
        if by == "socket":
            until_by_socket(face, channel, engine)
        with pytest.raises(MovedError, match="gone"):
            face.call(channel, TargetCalls.fail(MovedError("gone", 1)))
        with pytest.raises(ValueError, match="its own"):
            face.call(channel, TargetCalls.fail(ValueError("its own")))
        with pytest.raises(
            OperationTimeoutError, match=rf"{NAME}: wait: expected an answer within 0\.0 s; the call timed out"
        ):
            face.call(channel, TargetCalls.wait("gate"), 0.02)
        face.call(channel, TargetCalls.open("gate"))  # the answer comes, and nobody waits
        assert face.call(channel, TargetCalls.note(7)) == 7
        channel.close()

    @pytest.mark.parametrize(
        "address",
        [
            None,
            ShardUnavailableError("it died"),
            SocketAddress("tensorvine-none", 1, b""),
            SocketAddress("away", 1, b"", ("127.0.0.1", 9)),
        ],
    )
    def test_without_a_socket_all_goes_by_the_engine(self, serving: Serving, face: Face, address: Any) -> None:
        engine = StandInEngine(serving, serving.target, address)
        channel = channel_of(engine)
        for number in range(20):
            assert face.call(channel, TargetCalls.note(number)) == number
        assert engine.calls.count("socket_address") == 1
        assert engine.calls.count("note") == 20
        channel.close()

    def test_one_that_dies_is_an_error_and_its_next_life_is_met(
        self, away: Away, serving: Serving, face: Face, away_loop: Loop
    ) -> None:
        engine = StandInEngine(away_loop, Target(), away.address)
        channel = channel_of(engine)
        until_by_socket(face, channel, engine)
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(face.call, channel, TargetCalls.wait("gate")) for _ in range(3)]
            eventually(lambda: face.call(channel, TargetCalls.waits()) == 3, "all three calls wait", pause=0.002)
            away.kill()
            for call in waiting:
                with pytest.raises(ShardUnavailableError, match=f"{NAME}: wait: expected an answer; it died"):
                    call.result(WAIT_S)
        engine.address = serving.address
        asked = engine.calls.count("socket_address")
        for number in range(20):
            assert face.call(channel, TargetCalls.note(number)) == number
            assert engine.calls[-1] == "note", "by the engine, as long as nothing else is known"
        assert engine.calls.count("socket_address") == asked
        for side in (channel._threads, *channel._loops.values()):
            side._again = 0.0
        until_by_socket(face, channel, engine)
        assert serving.target.seen
        channel.close()

    def test_a_server_that_has_no_room_leaves_all_to_the_engine(self, serving: Serving, face: Face) -> None:
        serving.server.traffic = replace(SHORT_CALLS, connections=0)
        engine = StandInEngine(serving, serving.target, serving.address)
        channel = channel_of(engine)
        for number in range(20):
            assert face.call(channel, TargetCalls.note(number)) == number
        assert engine.calls.count("note") == 20
        channel.close()

    def test_an_answer_that_is_too_large_for_a_socket_comes_by_the_engine_if_it_may_be_asked_for_again(
        self, serving: Serving, face: Face
    ) -> None:
        serving.server.traffic = replace(SHORT_CALLS, answer_bytes=10_000)
        engine = StandInEngine(serving, serving.target, serving.address)
        channel = channel_of(engine)
        until_by_socket(face, channel, engine)
        before, large = len(engine.calls), b"x" * 10_000
        assert face.call(channel, TargetCalls.note(large)) == large
        assert engine.calls[before:] == ["note"]
        serving.run(serving.target.open("y" * 10_000))
        with pytest.raises(OverflowError, match=r"wait: expected an answer of at most 10000 bytes by a socket; found"):
            face.call(channel, TargetCalls.wait("y" * 10_000))
        assert face.call(channel, TargetCalls.note(1)) == 1
        assert len(engine.calls) == before + 1, "and the socket goes on"
        channel.close()

    def test_an_actor_that_is_not_there_is_the_error_that_was_asked_for(self, serving: Serving, face: Face) -> None:
        engine = StandInEngine(serving, serving.target, None)
        engine.there = False
        for kind in (ShardUnavailableError, RepositoryNotFoundError):
            with pytest.raises(kind, match=f"{NAME}: expected it to run; it was stopped, or has drained"):
                face.call(channel_of(engine, missing=kind), TargetCalls.note(1))

    def test_what_nobody_waits_for_goes_by_the_engine(self, serving: Serving, face: Face) -> None:
        engine = StandInEngine(serving, serving.target, serving.address)
        channel = channel_of(engine)
        until_by_socket(face, channel, engine)
        before = len(engine.calls)
        channel.post(TargetCalls.note("posted"))
        assert engine.calls[before:] == ["note"]
        eventually(lambda: "posted" in serving.target.seen, "what was posted has come", pause=0.002)
        channel.close()


def test_an_owner_that_knows_the_socket_tells_it(serving: Serving) -> None:
    engine = StandInEngine(serving, serving.target, None)
    channel = channel_of(engine, follows=False)
    for address, by_engine in ((None, 1), (serving.address, 1), (serving.address, 1), (None, 2)):
        channel.open(address)
        channel.call(TargetCalls.note(1), WAIT_S)
        assert engine.calls == ["note"] * by_engine
    channel.close()


def test_what_waits_long_on_a_loop_s_connection_stands_in_no_short_call_s_way(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GROUPS, "ctl", 4)
    monkeypatch.setitem(GROUPS, "watch", 60)
    engine = StandInEngine(serving, serving.target, serving.address)
    channel, face = channel_of(engine), Face("loop")
    until_by_socket(face, channel, engine)
    before = len(engine.calls)
    with ThreadPoolExecutor(61) as pool:
        waiting = [pool.submit(face.call, channel, TargetCalls.wait("gate")) for _ in range(60)]
        eventually(lambda: serving.target.waiting == 60, "all 60 calls wait", pause=0.002)
        assert face.call(channel, TargetCalls.note(1)) == 1
        assert engine.calls[before:] == []
        waiting.append(pool.submit(face.call, channel, TargetCalls.wait("gate")))
        eventually(lambda: serving.target.waiting == 61, "the one too many waits, too", pause=0.002)
        assert engine.calls[before:] == ["wait"], "one too many goes by the engine"
        face.call(channel, TargetCalls.open("gate"))
        assert [call.result(WAIT_S) for call in waiting] == ["gate"] * 61
        called = list(pool.map(lambda number: face.call(channel, TargetCalls.note(number)), range(200)))
    assert called == list(range(200)), "however many at once"
    before = len(engine.calls)
    face.call(channel, TargetCalls.note(1))
    face.call(channel, TargetCalls.wait("gate"))
    assert engine.calls[before:] == [], "and by the socket again when these are answered"
    channel.close()
    face.close()


def test_the_end_of_one_loop_s_connection_is_no_other_s(serving: Serving) -> None:
    """Such as: its server refuses what it sent. A call that waits on another connection goes on waiting."""
    engine = StandInEngine(serving, serving.target, serving.address)
    channel = channel_of(engine)
    first, second, thread = Face("loop"), Face("loop"), Face("thread")
    for face in (first, second, thread):
        until_by_socket(face, channel, engine)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(face.call, channel, TargetCalls.wait("gate")) for face in (second, thread)]
        eventually(lambda: serving.target.waiting == 2, "both calls wait", pause=0.002)
        loop = first.loop
        assert loop is not None
        connection = channel._loops[loop.loop]._connection
        assert connection is not None
        loop.loop.call_soon_threadsafe(connection.close)
        eventually(lambda: not connection.open, "the connection is closed", pause=0.002)
        assert first.call(channel, TargetCalls.note("after its end")) == "after its end"
        assert first.call(channel, TargetCalls.open("gate")) is None
        assert [call.result(WAIT_S) for call in waiting] == ["gate", "gate"]
    channel.close()
    for face in (first, second):
        face.close()


def test_a_thread_finds_an_actor_anew_that_failed_it(away: Away, serving: Serving, away_loop: Loop) -> None:
    """A planner that was stopped and started again is another actor of the same name."""
    engine = StandInEngine(away_loop, Target(), away.address)
    channel = channel_of(engine)
    face = Face("thread")
    until_by_socket(face, channel, engine)
    waiting = channel.send(TargetCalls.wait("gate"))
    away.kill()
    with pytest.raises(ShardUnavailableError):
        waiting.result(WAIT_S)
    engine.there = False
    with pytest.raises(ShardUnavailableError, match="it was stopped"):
        channel.call(TargetCalls.note(1), WAIT_S)
    engine.there = True
    assert channel.call(TargetCalls.note(1), WAIT_S) == 1
    assert engine.found == 3
    channel.close()


def test_several_loops_and_threads_use_one_channel(serving: Serving) -> None:
    engine = StandInEngine(serving, serving.target, serving.address)
    channel = channel_of(engine)
    faces = [Face("loop"), Face("loop"), Face("thread"), Face("thread")]
    for face in faces:
        until_by_socket(face, channel, engine)
    carried = list(engine.calls)
    with ThreadPoolExecutor(len(faces)) as pool:
        calls = [pool.submit(face.call, channel, TargetCalls.note(n)) for n in range(100) for face in faces]
        assert [call.result(WAIT_S) for call in calls] == [n for n in range(100) for _ in faces]
    assert engine.calls == carried
    assert carried.count("socket_address") == 3, "by each loop, and once for all threads"
    channel.close()
    for face in faces:
        face.close()


def test_a_channel_that_is_closed_while_a_loop_connects_keeps_no_connection(serving: Serving) -> None:
    engine = StandInEngine(serving, serving.target, serving.address)
    channel, loop = channel_of(engine), Loop()

    async def scene() -> None:
        await channel.ask(TargetCalls.note(1), WAIT_S)
        channel.close()

    loop.run(scene())
    loop.close()
    eventually(lambda: not serving.server._served, "no connection is left", pause=0.002)


def test_a_channel_that_is_closed_in_the_moment_of_its_welcome_keeps_no_connection(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = StandInEngine(serving, serving.target, serving.address)
    channel, loop = channel_of(engine), Loop()
    receive, welcomed = awaited.AwaitedConnection.buffer_updated, threading.Event()

    def receive_and_close(connection: awaited.AwaitedConnection, nbytes: int) -> None:
        receive(connection, nbytes)
        channel.close()
        welcomed.set()

    monkeypatch.setattr(awaited.AwaitedConnection, "buffer_updated", receive_and_close)

    async def scene() -> None:
        await channel.ask(TargetCalls.note(1), WAIT_S)

    loop.run(scene())
    assert welcomed.wait(WAIT_S)
    loop.close()
    eventually(lambda: not serving.server._served, "no connection is left", pause=0.002)


def test_an_answer_that_failed_once_may_be_asked_for_again(serving: Serving) -> None:
    engine = StandInEngine(serving, serving.target, serving.address)
    channel = channel_of(engine)
    waiting: Answer[str] = channel.send(TargetCalls.wait("gate"))
    with pytest.raises(OperationTimeoutError):
        waiting.result(0.0)
    channel.call(TargetCalls.open("gate"), WAIT_S)
    assert waiting.result(WAIT_S) == "gate"
    channel.close()


# ---- a repository -----------------------------------------------------------------------------------------


def test_within_a_node_a_repository_is_used_past_the_engine(cluster: object, monkeypatch: pytest.MonkeyPatch) -> None:
    by_engine: list[str] = []
    call = RayEngine.call

    def counted(self: RayEngine, actor: Any, method: str, *arguments: Any) -> Any:
        by_engine.append(method)
        return call(self, actor, method, *arguments)

    graph = ModelGraph([Layer("in", {"class": "Input"}, tensors=["t"])])
    with Repository.start(f"lines-{uuid.uuid4().hex[:8]}", shards=2, preallocate_bytes=0) as repo:
        repo.save("first", {"t": np.ones(5)})
        repo._session.connect_all()
        monkeypatch.setattr(RayEngine, "call", counted)
        ref = repo.save("m", {"t": np.ones(5)}, graph=graph).ref
        assert repo.save("m", {"t": np.zeros(5)}).ref.version == 2
        assert repo.load(ref)["t"].tolist() == [1.0] * 5
        match = repo.longest_prefix(graph)
        assert match is not None
        match.release()
        assert repo.wait_newer("m", 1) == ModelRef("m", 2)
        repo.retire(ref)
        assert repo.stats().models == 2
        assert by_engine == []
        monkeypatch.undo()
