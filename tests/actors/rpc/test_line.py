"""Lines over real sockets: what is called, what goes wrong at either end, and what goes by the engine instead."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.actors import Repository
from tensorvine.actors.client.planner_calls import PlannerCalls
from tensorvine.actors.engine.engine import group, methods_by_line
from tensorvine.actors.engine.ray import RayEngine
from tensorvine.actors.rpc import line as line_module
from tensorvine.actors.rpc import line_server
from tensorvine.actors.rpc.line import HEADER, MESSAGE_BYTES, Line, LineAddress, LineAnswer, first_of
from tensorvine.actors.rpc.line_server import LineDoor, LineServer
from tensorvine.actors.rpc.link import AGAIN_S, Link
from tensorvine.store.errors import MovedError, OperationTimeoutError, ShardUnavailableError
from tensorvine.store.graphs.graph import Layer, ModelGraph
from tensorvine.store.refs import ModelRef

WAIT_S = 30.0


class Target:
    """An actor with short calls and one that waits."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.gates: dict[str, asyncio.Event] = {}

    @group("ctl")
    async def note(self, value: Any) -> Any:
        self.seen.append(value)
        return value

    @group("ctl")
    async def fail(self, error: Exception) -> None:
        raise error

    @group("watch", line=True)
    async def wait(self, gate: str) -> str:
        await self.gates.setdefault(gate, asyncio.Event()).wait()
        return gate

    @group("ctl")
    async def open(self, gate: str) -> None:
        self.gates.setdefault(gate, asyncio.Event()).set()

    @group("ctl")
    async def odd(self) -> Any:
        return threading.Lock()

    @group("ctl", line=False)
    async def carried(self) -> None: ...

    @group("data")
    async def bytes(self) -> None: ...


METHODS = frozenset({"note", "fail", "wait", "open", "odd"})


async def at_rest() -> None:
    """Bring to its end what this loop has begun."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(WAIT_S)

    def close(self) -> None:
        self.run(at_rest())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()


class Serving(Loop):
    """A target that is served."""

    def __init__(self) -> None:
        super().__init__()
        self.target = Target()

        async def start() -> LineServer:
            return LineServer(self.target, METHODS)

        self.server = self.run(start())
        self.address: LineAddress = self.server.address

    def close(self) -> None:
        last = Line(self.address)
        called(last, "note", "last")  # who came before is served by now: a server that is closed while somebody comes
        last.close()  # leaves a socket open (CPython, `_accept_connection2`)
        self.run(self.server.close())
        super().close()


@pytest.fixture
def serving() -> Iterator[Serving]:
    made = Serving()
    yield made
    made.close()


@pytest.fixture
def line(serving: Serving) -> Iterator[Line]:
    made = Line(serving.address)
    yield made
    made.close()


def sent(line: Line, method: str, *arguments: Any) -> LineAnswer:
    answer = line.send(method, arguments)
    assert answer is not None
    return answer


def called(line: Line, method: str, *arguments: Any) -> Any:
    return sent(line, method, *arguments).result(WAIT_S, "an actor")


class TestCalls:
    """What is asked and answered."""

    def test_only_methods_that_are_marked_are_carried(self, line: Line) -> None:
        assert methods_by_line(Target) == METHODS
        assert [line.carries(name) for name in ("note", "carried", "bytes", "__init__")] == [True, False, False, False]

    def test_answers_come_to_who_asked(self, line: Line) -> None:
        answers = [sent(line, "note", number) for number in range(20)]
        assert [answer.result(WAIT_S, "x") for answer in reversed(answers)] == list(range(19, -1, -1))
        assert answers[3].result(WAIT_S, "x") == 3, "and may be asked for again"

    def test_what_one_thread_sends_arrives_in_order_also_if_it_does_not_wait(
        self, serving: Serving, line: Line
    ) -> None:
        for number in range(300):
            if number % 7:
                sent(line, "note", number)  # nobody waits for it
            else:
                called(line, "note", number)
        called(line, "note", "end")
        assert serving.target.seen == [*range(300), "end"]

    def test_threads_call_at_the_same_time(self, line: Line) -> None:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda number: called(line, "note", number), range(800)))
        assert found == list(range(800))

    def test_an_answer_that_waits_holds_up_no_other(self, line: Line) -> None:
        waiting = sent(line, "wait", "gate")
        assert called(line, "note", 1) == 1
        with pytest.raises(OperationTimeoutError, match=r"shard 7: expected an answer within 0\.0 s; none came"):
            waiting.result(0.01, "shard 7")
        called(line, "open", "gate")
        assert waiting.result(WAIT_S, "shard 7") == "gate", "after a timeout it may be waited for again"

    def test_what_has_come_is_given_without_a_wait(self, line: Line) -> None:
        waiting = sent(line, "wait", "gate")
        with pytest.raises(OperationTimeoutError):
            waiting.result(0.0, "x")
        called(line, "open", "gate")
        until(lambda: given(waiting))

    def test_an_answer_that_nobody_waits_for_is_skipped(self, line: Line) -> None:
        waiting = sent(line, "wait", "late")
        del waiting
        assert called(line, "open", "late") is None, "on the socket that has the other answer to come"
        assert called(line, "note", 5) == 5

    @pytest.mark.parametrize("nbytes", [0, 100, (1 << 16) - 60, 1 << 17, 900_000])
    def test_messages_of_any_length(self, line: Line, nbytes: int) -> None:
        content = os.urandom(nbytes)
        assert called(line, "note", content) == content

    def test_an_answer_may_be_larger_than_a_call(self, serving: Serving, line: Line) -> None:
        large = b"x" * (5 * MESSAGE_BYTES)

        async def much(gate: str) -> bytes:
            return large

        serving.target.wait = much  # type: ignore[method-assign]
        assert called(line, "wait", "") == large

    def test_a_call_that_is_too_large_is_left_to_the_engine(self, serving: Serving, line: Line) -> None:
        assert line.send("note", (bytes(MESSAGE_BYTES + 1),)) is None
        called(line, "note", 1)
        assert serving.target.seen == [1]

    @given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=50)), max_size=6), st.data())
    def test_messages_are_found_however_the_bytes_come(
        self, messages: list[tuple[int, bytes]], data: st.DataObject
    ) -> None:
        stream = b"".join(HEADER.pack(len(content), number) + content for number, content in messages)
        buffer, found = bytearray(), []
        while stream:
            cut = data.draw(st.integers(1, len(stream)))
            buffer += stream[:cut]
            stream = stream[cut:]
            while (message := first_of(buffer)) is not None:
                found.append(message)
        assert (found, buffer) == (messages, b"")


class TestErrors:
    """What the method raises, and what is no call."""

    def test_an_error_of_the_tree_comes_as_it_is(self, line: Line) -> None:
        with pytest.raises(MovedError, match="'m' has left") as caught:
            called(line, "fail", MovedError("'m' has left", 7))
        assert caught.value.version == 7
        assert not hasattr(caught.value, "__notes__")

    def test_another_error_comes_with_where_it_was_raised(self, line: Line) -> None:
        with pytest.raises(TimeoutError, match="its own") as caught:
            called(line, "fail", TimeoutError("its own"))
        assert "in fail" in caught.value.__notes__[0]
        with pytest.raises(TypeError, match="positional argument"):
            called(line, "note")

    def test_an_answer_that_cannot_be_sent_is_an_error_at_once(self, line: Line) -> None:
        with pytest.raises(TypeError, match=r"odd: its answer cannot be sent: .*pickle"):
            called(line, "odd")
        assert called(line, "note", 1) == 1

    def test_what_is_not_served_is_refused_by_the_server_too(self, serving: Serving) -> None:
        line = Line(replace(serving.address, methods=frozenset({"bytes"})))
        with pytest.raises(AttributeError, match=r"expected one of \['fail', .*'wait'\]; found 'bytes'"):
            called(line, "bytes")
        line.close()

    def test_what_cannot_be_read_ends_the_connection_and_no_other(
        self, serving: Serving, line: Line, caplog: pytest.LogCaptureFixture
    ) -> None:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(WAIT_S)
            stranger.connect(f"\0{serving.address.name}")
            assert stranger.recv(1) == b"+"
            stranger.sendall(HEADER.pack(3, 1) + b"abc")
            assert stranger.recv(1) == b""
        assert called(line, "note", 1) == 1
        assert "a call cannot be read" in caplog.text


class TestTrouble:
    """Ends, and what a line is not."""

    def test_nobody_there_is_left_to_the_engine(self, serving: Serving) -> None:
        assert Line(replace(serving.address, name="tensorvine-nobody")).send("note", (1,)) is None

    def test_another_process_under_its_name_is_not_trusted(self, serving: Serving) -> None:
        assert Line(replace(serving.address, pid=1)).send("note", (1,)) is None
        assert serving.target.seen == []

    def test_one_connection_too_many_is_left_to_the_engine(
        self, serving: Serving, line: Line, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(line_server, "CONNECTIONS", 2)
        held = [sent(line, "wait", "gate") for _ in range(2)]
        assert line.send("note", (1,)) is None
        assert "2 connections are served" in caplog.text
        other = Line(serving.address)
        assert other.send("note", (1,)) is None
        assert caplog.text.count("are served") == 1, "it is logged once"
        serving.run(serving.target.open("gate"))
        assert [answer.result(WAIT_S, "x") for answer in held] == ["gate"] * 2
        assert called(line, "note", 2) == 2

    def test_a_server_that_takes_nothing_is_left_to_the_engine(
        self, serving: Serving, line: Line, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        called(line, "note", 0)
        monkeypatch.setattr(line_module, "SEND_S", 0.05)
        stop, stopped = threading.Event(), threading.Event()
        serving.loop.call_soon_threadsafe(lambda: (stopped.set(), stop.wait(WAIT_S)))
        assert stopped.wait(WAIT_S)
        assert line.send("note", (bytes(MESSAGE_BYTES - 100),)) is None
        stop.set()
        assert called(line, "note", 1) == 1
        assert serving.target.seen == [0, 1], "a call that came in part is none"

    def test_a_closed_line_is_opened_no_more_by_who_still_waits(self, serving: Serving, line: Line) -> None:
        waiting = sent(line, "wait", "gate")
        line.close()
        line.close()
        serving.run(serving.target.open("gate"))
        assert waiting.result(WAIT_S, "x") == "gate"
        assert connections(serving) == 0

    def test_an_interrupted_wait_ends_its_connection(
        self, serving: Serving, line: Line, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waiting = sent(line, "wait", "gate")

        def interrupted(*_: Any) -> bytes:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(line_module._Wire, "receive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                waiting.result(WAIT_S, "x")
        with pytest.raises(ShardUnavailableError, match="broken off"):
            waiting.result(WAIT_S, "x")
        assert called(line, "note", 1) == 1
        assert connections(serving) == 1

    def test_a_line_that_nobody_closes_is_closed_when_it_is_collected(self, serving: Serving) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            line: Line | None = Line(serving.address)
            answers: list[Any] = [sent(line, "note", 1), sent(line, "wait", "gate")]
            answers.append((line, answers))  # a circle
            answers[0].result(WAIT_S, "x")
            del line, answers
            gc.collect()
        assert connections(serving) == 0

    def test_an_answer_that_outlives_its_line_closes_its_connection_when_it_is_collected(
        self, serving: Serving
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            line: Line | None = Line(serving.address)
            answers: list[Any] = [sent(line, "wait", "gate") for _ in range(3)]
            line.close()
            del line
            answers.append(answers)  # a circle, as an error's traceback makes it
            del answers
            gc.collect()
        assert connections(serving) == 0

    def test_a_caller_that_ends_leaves_its_call_to_be_carried_out(self, serving: Serving) -> None:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(WAIT_S)
            caller.connect(f"\0{serving.address.name}")
            assert caller.recv(1) == b"+"
            message = pickle.dumps(("wait", ("gate",)))
            caller.sendall(HEADER.pack(len(message), 1) + message)
            until(lambda: "gate" in serving.target.gates)
        assert connections(serving) == 0
        serving.run(serving.target.open("gate"))

    def test_a_machine_without_such_sockets_has_no_line(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refuse(*_: Any) -> Any:
            raise OSError("no more sockets")

        monkeypatch.setattr(line_server.socket, "socket", refuse)
        door = LineDoor(Target(), "shard 3")
        assert (door.address(), door.address()) == (None, None)
        assert caplog.text.count("shard 3: no line, all calls go by the engine: no more sockets") == 1


def given(answer: LineAnswer) -> bool:
    try:
        return answer.result(0.0, "x") is not None
    except OperationTimeoutError:
        return False


def until(reached: Any) -> None:
    end = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.002)


def connections(serving: Serving) -> int:
    """Return how many are served, once those that have ended are not."""
    end = time.monotonic() + 2.0
    while (found := len(serving.server._served)) and time.monotonic() < end:
        time.sleep(0.002)
    return found


# ---- a process of its own ---------------------------------------------------------------------------------

SCRIPT = """
import asyncio, pickle, sys
from tensorvine.actors.rpc.line_server import LineServer
from tests.actors.rpc.test_line import METHODS, Target

async def serve():
    server = LineServer(Target(), METHODS)
    print(pickle.dumps(server.address).hex(), flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""


class Away:
    """A target that is served by another process."""

    def __init__(self) -> None:
        root = Path(__file__).parents[3]
        self.process = subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=root, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address: LineAddress = pickle.loads(bytes.fromhex(self.process.stdout.readline()))  # noqa: S301  its own

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=WAIT_S)


@pytest.fixture
def away() -> Iterator[Away]:
    made = Away()
    yield made
    made.kill()


class TestDeath:
    """The actor's process dies."""

    def test_who_waits_hears_it_at_once(self, away: Away) -> None:
        line = Line(away.address)
        called(line, "note", 1)
        waiting = [sent(line, "wait", "gate") for _ in range(3)]
        away.kill()
        for answer in waiting:
            with pytest.raises(ShardUnavailableError, match=r"repo/shard-2: expected an answer; it died or is being"):
                answer.result(WAIT_S, "repo/shard-2")
        assert line.send("note", (1,)) is None
        line.close()

    def test_a_connection_that_was_idle_is_left_to_the_engine(self, away: Away) -> None:
        line = Line(away.address)
        called(line, "note", 1)
        away.kill()
        assert line.send("note", (2,)) is None
        line.close()

    def test_one_that_stands_still_is_a_timeout(self, away: Away) -> None:
        line = Line(away.address)
        called(line, "note", 1)
        away.process.send_signal(signal.SIGSTOP)
        answer = sent(line, "note", 2)
        with pytest.raises(OperationTimeoutError, match=r"within 0\.1 s"):
            answer.result(0.1, "shard 0")
        away.process.send_signal(signal.SIGCONT)
        assert answer.result(WAIT_S, "shard 0") == 2
        line.close()

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
    def test_another_user_is_not_heard(self, serving: Serving) -> None:
        script = f"import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.settimeout({WAIT_S})"
        script += f"; s.connect('\\0{serving.address.name}'); print(s.recv(1))"
        found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S)
        assert found.stdout == "b''\n", found.stderr


# ---- links ------------------------------------------------------------------------------------------------


class Slow:
    """An engine that calls a target in this loop, and counts it."""

    def __init__(self, target: Any, address: LineAddress | None) -> None:
        self.target, self.line_address = target, address
        self.calls: list[str] = []

    def this_node(self) -> str:
        return "here"

    def call(self, actor: Any, method: str, *arguments: Any) -> Any:
        self.calls.append(method)
        return method, arguments

    async def awaitable(self, future: Any, timeout: float, who: str) -> Any:
        method, arguments = future
        if method == "line":
            assert arguments == ("here",)
            if isinstance(self.line_address, Exception):
                raise self.line_address
            return self.line_address
        return await getattr(self.target, method)(*arguments)


async def until_by_line(link: Link, engine: Slow) -> None:
    """Call until a call goes by the line."""
    end = time.monotonic() + WAIT_S
    while True:
        before = engine.calls.count("note")
        assert await link.call(WAIT_S, "note", 0) == 0
        if engine.calls.count("note") == before:
            return
        assert time.monotonic() < end
        await asyncio.sleep(0.002)


async def closed(link: Link) -> None:
    link.close()
    await asyncio.sleep(0)


class TestLink:
    """Calls between actors."""

    def test_the_first_calls_go_by_the_engine_and_the_others_by_the_line(self, serving: Serving) -> None:
        engine = Slow(Target(), serving.address)

        async def scene() -> list[int]:
            link = Link(engine, None, "planner")  # type: ignore[arg-type]
            await until_by_line(link, engine)
            by_engine = list(engine.calls)
            found = await asyncio.gather(*(link.call(WAIT_S, "note", number) for number in range(50)))
            assert engine.calls == by_engine
            assert by_engine.count("line") == 1
            await link.call(WAIT_S, "bytes")
            assert engine.calls[-1] == "bytes", "what the line does not carry"
            with pytest.raises(MovedError):
                await link.call(WAIT_S, "fail", MovedError("gone", 1))
            with pytest.raises(TimeoutError, match="its own"):
                await link.call(WAIT_S, "fail", TimeoutError("its own"))
            with pytest.raises(OperationTimeoutError, match="planner: expected an answer within"):
                await link.call(0.01, "wait", "gate")
            await link.call(WAIT_S, "open", "gate")  # the answer comes, and nobody waits
            link.close()
            assert await link.call(WAIT_S, "note", 7) == 7
            assert engine.calls[-1] == "note"
            return found

        assert asyncio.run(scene()) == list(range(50))

    @pytest.mark.parametrize("answer", [None, ShardUnavailableError("planner: died")])
    def test_without_a_line_all_goes_by_the_engine(self, answer: Any) -> None:
        engine = Slow(Target(), answer)

        async def scene() -> None:
            link = Link(engine, None, "planner")  # type: ignore[arg-type]
            for number in range(20):
                assert await link.call(WAIT_S, "note", number) == number

        asyncio.run(scene())
        assert engine.calls.count("line") == 1
        assert engine.calls.count("note") == 20

    def test_another_loop_goes_by_the_engine(self, serving: Serving) -> None:
        engine = Slow(Target(), serving.address)
        link = Link(engine, None, "planner")  # type: ignore[arg-type]
        first, second = Loop(), Loop()
        first.run(until_by_line(link, engine))
        before = engine.calls.count("note")
        assert second.run(link.call(WAIT_S, "note", 1)) == 1
        assert engine.calls.count("note") == before + 1
        first.run(closed(link))
        first.close()
        second.close()

    def test_one_that_dies_is_told_to_who_waits_and_its_next_life_is_met(
        self, away: Away, serving: Serving, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = Slow(Target(), away.address)

        async def scene() -> None:
            link = Link(engine, None, "planner")  # type: ignore[arg-type]
            await until_by_line(link, engine)
            waiting = [asyncio.create_task(link.call(WAIT_S, "wait", "gate")) for _ in range(3)]
            await asyncio.sleep(0)
            away.kill()
            for task in waiting:
                with pytest.raises(ShardUnavailableError, match="planner: expected an answer; it died"):
                    await task
            engine.line_address = serving.address
            assert await link.call(WAIT_S, "note", 1) == 1
            link._again = 0.0
            await until_by_line(link, engine)
            assert engine.calls.count("line") == 2
            link.close()

        assert AGAIN_S > 1
        asyncio.run(scene())


# ---- the planner ------------------------------------------------------------------------------------------


class Planning:
    """An engine that runs a planner in a loop, and counts the calls that it carries."""

    def __init__(self, loop: Loop, target: Target, address: LineAddress | None) -> None:
        self.loop, self.target, self.line_address = loop, target, address
        self.calls: list[str] = []
        self.there = True

    def find(self, name: str) -> str:
        assert name == "repo/planner"
        if not self.there:
            raise LookupError(name)
        return name

    def call(self, actor: str, method: str, *arguments: Any) -> Any:
        self.calls.append(method)
        if method == "line":
            return "line", self.line_address
        return asyncio.run_coroutine_threadsafe(getattr(self.target, method)(*arguments), self.loop.loop)

    def result(self, future: Any, timeout: float, who: str) -> Any:
        if not isinstance(future, tuple):
            return future.result(timeout)
        if isinstance(future[1], Exception):
            raise future[1]
        return future[1]


@pytest.fixture
def away_loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


class TestPlannerCalls:
    """A client's calls to its planner."""

    def test_they_go_by_the_line_that_the_planner_names(self, serving: Serving) -> None:
        engine = Planning(serving, serving.target, serving.address)
        planner = PlannerCalls(engine, "repo", "here")  # type: ignore[arg-type]
        assert [planner.call("note", number, timeout=WAIT_S) for number in range(5)] == list(range(5))
        assert engine.calls == ["line"]
        planner.close()
        assert planner.call("note", 6, timeout=WAIT_S) == 6
        assert engine.calls == ["line", "note"], "after its end all goes by the engine"

    @pytest.mark.parametrize("answer", [None, ShardUnavailableError("planner: died")])
    def test_without_a_line_they_go_by_the_engine(self, serving: Serving, answer: Any) -> None:
        engine = Planning(serving, serving.target, answer)
        planner = PlannerCalls(engine, "repo", "here")  # type: ignore[arg-type]
        assert [planner.call("note", number, timeout=WAIT_S) for number in range(5)] == list(range(5))
        assert engine.calls == ["line", *["note"] * 5]
        planner.close()

    def test_a_planner_that_dies_is_an_error_and_its_next_life_is_met(
        self, away: Away, serving: Serving, away_loop: Loop
    ) -> None:
        engine = Planning(away_loop, Target(), away.address)
        planner = PlannerCalls(engine, "repo", "here")  # type: ignore[arg-type]
        assert planner.call("note", 1, timeout=WAIT_S) == 1
        waiting = planner.send("wait", "gate")
        away.kill()
        with pytest.raises(ShardUnavailableError, match="repo/planner: expected an answer; it died"):
            planner.result(waiting, WAIT_S)
        engine.line_address = serving.address
        assert planner.call("note", 2, timeout=WAIT_S) == 2
        assert engine.calls == ["line", "note"], "by the engine, as long as no line is known"
        planner._again = 0.0
        assert [planner.call("note", number, timeout=WAIT_S) for number in (3, 4)] == [3, 4]
        assert serving.target.seen == [4]
        planner.close()

    def test_one_that_was_stopped_is_named(self, away: Away, away_loop: Loop) -> None:
        engine = Planning(away_loop, Target(), away.address)
        planner = PlannerCalls(engine, "repo", "here")  # type: ignore[arg-type]
        waiting = planner.send("wait", "gate")
        away.kill()
        engine.there = False
        with pytest.raises(ShardUnavailableError):
            planner.result(waiting, WAIT_S)
        with pytest.raises(ShardUnavailableError, match="repo/planner: expected a planner; it was stopped"):
            planner.call("note", 1, timeout=WAIT_S)
        planner.close()
        with pytest.raises(LookupError):
            PlannerCalls(engine, "repo", "here")  # type: ignore[arg-type]


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
