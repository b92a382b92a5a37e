"""Sockets between real processes: what is called, what goes wrong at either end, what is left to the engine."""

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
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given as each
from hypothesis import strategies as st
from tensorvine.actors.engine.sockets import blocking
from tensorvine.actors.engine.sockets import server as server_module
from tensorvine.actors.engine.sockets.blocking import BlockingConnections, SocketAnswer
from tensorvine.actors.engine.sockets.framing import HEADER, MESSAGE_BYTES, first_of
from tensorvine.actors.engine.sockets.traffic import SHORT_CALLS
from tensorvine.actors.rpc.calls import Request, remote, socket_methods
from tensorvine.actors.rpc.lazy_server import LazyServer
from tensorvine.store.errors import MovedError, OperationTimeoutError, ShardUnavailableError

from tests.support.call_targets import METHODS, WAIT_S, Away, Serving, Target, TargetCalls, called, sent
from tests.support.interrupts import at_each
from tests.support.waiting import eventually


class TestCalls:
    """What is asked and answered."""

    def test_only_methods_that_are_marked_are_carried(self, caller: BlockingConnections) -> None:
        assert socket_methods(Target).keys() == METHODS
        assert called(caller, TargetCalls.note(1)) == 1
        assert caller.send(TargetCalls.carried()) is None
        assert caller.send(TargetCalls.bytes()) is None

    def test_answers_come_to_who_asked(self, caller: BlockingConnections) -> None:
        answers = [sent(caller, TargetCalls.note(number)) for number in range(20)]
        assert [answer.result(WAIT_S, "x") for answer in reversed(answers)] == list(range(19, -1, -1))
        assert answers[3].result(WAIT_S, "x") == 3, "and may be asked for again"

    def test_what_one_thread_sends_arrives_in_order_also_if_it_does_not_wait(
        self, serving: Serving, caller: BlockingConnections
    ) -> None:
        for number in range(300):
            if number % 7:
                sent(caller, TargetCalls.note(number))  # nobody waits for it
            else:
                called(caller, TargetCalls.note(number))
        called(caller, TargetCalls.note("end"))
        assert serving.target.seen == [*range(300), "end"]

    def test_threads_call_at_the_same_time(self, caller: BlockingConnections) -> None:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda number: called(caller, TargetCalls.note(number)), range(800)))
        assert found == list(range(800))

    def test_an_answer_that_waits_holds_up_no_other(self, caller: BlockingConnections) -> None:
        waiting = sent(caller, TargetCalls.wait("gate"))
        assert called(caller, TargetCalls.note(1)) == 1
        with pytest.raises(
            OperationTimeoutError, match=r"shard 7: expected an answer within 0\.0 s; the call timed out"
        ):
            waiting.result(0.01, "shard 7")
        called(caller, TargetCalls.open("gate"))
        assert waiting.result(WAIT_S, "shard 7") == "gate", "after a timeout it may be waited for again"

    def test_what_has_come_is_given_without_a_wait(self, caller: BlockingConnections) -> None:
        waiting = sent(caller, TargetCalls.wait("gate"))
        with pytest.raises(OperationTimeoutError):
            waiting.result(0.0, "x")
        called(caller, TargetCalls.open("gate"))
        eventually(lambda: given(waiting), "the answer is given without a wait", pause=0.002)

    def test_an_answer_that_nobody_waits_for_is_skipped(self, caller: BlockingConnections) -> None:
        waiting = sent(caller, TargetCalls.wait("late"))
        del waiting
        assert called(caller, TargetCalls.open("late")) is None, "on the socket that has the other answer to come"
        assert called(caller, TargetCalls.note(5)) == 5

    @pytest.mark.parametrize("nbytes", [0, 100, (1 << 16) - 60, 1 << 17, 900_000])
    def test_messages_of_any_length(self, caller: BlockingConnections, nbytes: int) -> None:
        content = os.urandom(nbytes)
        assert called(caller, TargetCalls.note(content)) == content

    def test_an_answer_may_be_larger_than_a_call(self, serving: Serving, caller: BlockingConnections) -> None:
        large = b"x" * (5 * MESSAGE_BYTES)

        async def much(gate: str) -> bytes:
            return large

        serving.target.wait = much  # type: ignore[method-assign]
        assert called(caller, TargetCalls.wait("")) == large

    def test_a_call_that_is_too_large_is_left_to_the_engine(
        self, serving: Serving, caller: BlockingConnections
    ) -> None:
        assert caller.send(TargetCalls.note(bytes(MESSAGE_BYTES + 1))) is None
        called(caller, TargetCalls.note(1))
        assert serving.target.seen == [1]

    @each(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=50)), max_size=6), st.data())
    def test_messages_are_found_however_the_bytes_come(
        self, messages: list[tuple[int, bytes]], data: st.DataObject
    ) -> None:
        stream = b"".join(HEADER.pack(len(content), number) + content for number, content in messages)
        buffer, found = bytearray(), []
        while stream:
            cut = data.draw(st.integers(1, len(stream)))
            buffer += stream[:cut]
            stream = stream[cut:]
            while (message := first_of(buffer, 50)) is not None:
                found.append(message)
        assert (found, buffer) == (messages, b"")


class TestErrors:
    """What the method raises, and what is no call."""

    def test_an_error_of_the_tree_comes_as_it_is(self, caller: BlockingConnections) -> None:
        with pytest.raises(MovedError, match="'m' has left") as caught:
            called(caller, TargetCalls.fail(MovedError("'m' has left", 7)))
        assert caught.value.version == 7
        assert not hasattr(caught.value, "__notes__")

    def test_another_error_comes_with_where_it_was_raised(self, caller: BlockingConnections) -> None:
        with pytest.raises(TimeoutError, match="its own") as caught:
            called(caller, TargetCalls.fail(TimeoutError("its own")))
        assert "in fail" in caught.value.__notes__[0]
        with pytest.raises(TypeError, match="positional argument"):
            called(caller, Request(TargetCalls.note, ()))

    def test_an_answer_that_cannot_be_sent_is_an_error_at_once(self, caller: BlockingConnections) -> None:
        with pytest.raises(TypeError, match=r"odd: its answer cannot be sent: .*pickle"):
            called(caller, TargetCalls.odd())
        assert called(caller, TargetCalls.note(1)) == 1

    def test_what_is_not_served_is_refused_by_the_server_too(self, serving: Serving) -> None:
        class WrongCalls:
            @remote("ctl")
            def bytes(self) -> None: ...

        caller = BlockingConnections(serving.address)
        with pytest.raises(AttributeError, match=r"expected one of \['fail', .*'waits'\]; found 'bytes'"):
            called(caller, WrongCalls.bytes())
        caller.close()

    def test_what_cannot_be_read_ends_the_connection_and_no_other(
        self, serving: Serving, caller: BlockingConnections, caplog: pytest.LogCaptureFixture
    ) -> None:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(WAIT_S)
            stranger.connect(f"\0{serving.server.address.name}")
            stranger.sendall(serving.server.address.secret)
            assert stranger.recv(1) == b"+"
            stranger.sendall(HEADER.pack(3, 1) + b"abc")
            assert stranger.recv(1) == b""
        assert called(caller, TargetCalls.note(1)) == 1
        assert "a call cannot be read" in caplog.text


class TestTrouble:
    """Ends, and what is not there."""

    def test_nobody_there_is_left_to_the_engine(self, serving: Serving) -> None:
        assert BlockingConnections(replace(serving.address, name="tensorvine-nobody")).send(TargetCalls.note(1)) is None

    def test_another_process_under_its_name_is_not_trusted(self, serving: Serving) -> None:
        assert BlockingConnections(replace(serving.address, pid=1)).send(TargetCalls.note(1)) is None
        assert serving.target.seen == []

    def test_one_connection_too_many_is_left_to_the_engine(
        self,
        serving: Serving,
        caller: BlockingConnections,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        serving.server.traffic = replace(SHORT_CALLS, connections=2)
        held = [sent(caller, TargetCalls.wait("gate")) for _ in range(2)]
        assert caller.send(TargetCalls.note(1)) is None
        assert "2 connections are open" in caplog.text
        other = BlockingConnections(serving.address)
        assert other.send(TargetCalls.note(1)) is None
        assert caplog.text.count("connections are open") == 1, "it is logged once"
        serving.run(serving.target.open("gate"))
        assert [answer.result(WAIT_S, "x") for answer in held] == ["gate"] * 2
        assert called(caller, TargetCalls.note(2)) == 2

    def test_a_server_that_takes_nothing_is_left_to_the_engine(
        self, serving: Serving, caller: BlockingConnections, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        called(caller, TargetCalls.note(0))
        stop, stopped = threading.Event(), threading.Event()
        serving.loop.call_soon_threadsafe(lambda: (stopped.set(), stop.wait(WAIT_S)))
        assert stopped.wait(WAIT_S)
        with monkeypatch.context() as patch:
            patch.setattr(blocking, "SEND_S", 0.05)
            assert caller.send(TargetCalls.note(bytes(MESSAGE_BYTES - 100))) is None
        stop.set()
        assert called(caller, TargetCalls.note(1)) == 1
        assert serving.target.seen == [0, 1], "a call that came in part is none"

    def test_one_that_was_closed_is_opened_no_more_by_who_still_waits(
        self, serving: Serving, caller: BlockingConnections
    ) -> None:
        waiting = sent(caller, TargetCalls.wait("gate"))
        caller.close()
        caller.close()
        serving.run(serving.target.open("gate"))
        assert waiting.result(WAIT_S, "x") == "gate"
        eventually(lambda: not serving.server._served, "no connection is left", pause=0.002)

    def test_an_interrupted_wait_ends_its_connection(
        self, serving: Serving, caller: BlockingConnections, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waiting = sent(caller, TargetCalls.wait("gate"))

        def interrupted(*_: Any) -> bytes:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(blocking._Connection, "receive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                waiting.result(WAIT_S, "x")
        with pytest.raises(ShardUnavailableError, match="the wait was interrupted"):
            waiting.result(WAIT_S, "x")
        assert called(caller, TargetCalls.note(1)) == 1
        eventually(lambda: len(serving.server._served) == 1, "one connection is left", pause=0.002)

    @pytest.mark.filterwarnings("ignore:.*unclosed:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
    def test_an_exception_at_any_point_of_a_call_leaves_no_connection(
        self, serving: Serving, caller: BlockingConnections
    ) -> None:
        for first in (True, False):  # also where a connection is made
            points = sum(1 for _ in at_each(lambda: called(caller, TargetCalls.note(1)), "/sockets/"))
            assert points > (40 if first else 20)
        gc.collect()
        assert [called(caller, TargetCalls.note(number)) for number in range(3)] == [0, 1, 2]
        eventually(lambda: len(serving.server._served) == 1, "one connection is left", pause=0.002)

    def test_one_that_nobody_closes_is_closed_when_it_is_collected(self, serving: Serving) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            caller: BlockingConnections | None = BlockingConnections(serving.address)
            answers: list[Any] = [sent(caller, TargetCalls.note(1)), sent(caller, TargetCalls.wait("gate"))]
            answers.append((caller, answers))  # a circle
            answers[0].result(WAIT_S, "x")
            del caller, answers
            gc.collect()
        eventually(lambda: not serving.server._served, "no connection is left", pause=0.002)

    def test_an_answer_that_outlives_its_line_closes_its_connection_when_it_is_collected(
        self, serving: Serving
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            caller: BlockingConnections | None = BlockingConnections(serving.address)
            answers: list[Any] = [sent(caller, TargetCalls.wait("gate")) for _ in range(3)]
            caller.close()
            del caller
            answers.append(answers)  # a circle, as an error's traceback makes it
            del answers
            gc.collect()
        eventually(lambda: not serving.server._served, "no connection is left", pause=0.002)

    def test_a_caller_that_ends_leaves_its_call_to_be_carried_out(self, serving: Serving) -> None:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(WAIT_S)
            caller.connect(f"\0{serving.address.name}")
            caller.sendall(serving.address.secret)
            assert caller.recv(1) == b"+"
            message = pickle.dumps(("wait", ("gate",)))
            caller.sendall(HEADER.pack(len(message), 1) + message)
            eventually(lambda: "gate" in serving.target.gates, "the call is carried out", pause=0.002)
        eventually(lambda: not serving.server._served, "no connection is left", pause=0.002)
        serving.run(serving.target.open("gate"))

    def test_a_machine_without_such_sockets_leaves_all_to_the_engine(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refuse(*_: Any) -> Any:
            raise OSError("no more sockets")

        monkeypatch.setattr(server_module.socket, "socket", refuse)
        lazy = LazyServer(Target(), "shard 3")
        assert (lazy.address(), lazy.address()) == (None, None)
        assert caplog.text.count("shard 3: no socket, all calls are sent by the engine: no more sockets") == 1

    def test_one_that_was_closed_opens_no_more(self) -> None:
        async def scene() -> None:
            lazy = LazyServer(Target(), "shard 3")
            address = lazy.address()
            assert address is not None
            caller = BlockingConnections(address)
            answer = await asyncio.to_thread(sent, caller, TargetCalls.wait("gate"))
            await lazy.close()
            await lazy.close()
            assert lazy.address() is None
            with pytest.raises(ShardUnavailableError):
                await asyncio.to_thread(answer.result, 60.0, "x")
            caller.close()

        asyncio.run(scene())


def given(answer: SocketAnswer[Any]) -> bool:
    try:
        return answer.result(0.0, "x") is not None
    except OperationTimeoutError:
        return False


# ---- a process of its own ---------------------------------------------------------------------------------


class TestDeath:
    """The actor's process dies."""

    def test_who_waits_hears_it_at_once(self, away: Away) -> None:
        caller = BlockingConnections(away.address)
        called(caller, TargetCalls.note(1))
        waiting = [sent(caller, TargetCalls.wait("gate")) for _ in range(3)]
        away.kill()
        for answer in waiting:
            with pytest.raises(ShardUnavailableError, match=r"repo/shard-2: expected an answer; it died or is being"):
                answer.result(WAIT_S, "repo/shard-2")
        assert caller.send(TargetCalls.note(1)) is None
        caller.close()

    def test_a_connection_that_was_idle_is_left_to_the_engine(self, away: Away) -> None:
        caller = BlockingConnections(away.address)
        called(caller, TargetCalls.note(1))
        away.kill()
        assert caller.send(TargetCalls.note(2)) is None
        caller.close()

    def test_one_that_stands_still_is_a_timeout(self, away: Away) -> None:
        caller = BlockingConnections(away.address)
        called(caller, TargetCalls.note(1))
        away.process.send_signal(signal.SIGSTOP)
        answer = sent(caller, TargetCalls.note(2))
        with pytest.raises(OperationTimeoutError, match=r"within 0\.1 s"):
            answer.result(0.1, "shard 0")
        away.process.send_signal(signal.SIGCONT)
        assert answer.result(WAIT_S, "shard 0") == 2
        caller.close()

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
    def test_another_user_is_not_heard(self, serving: Serving) -> None:
        script = f"import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.settimeout({WAIT_S})"
        script += f"; s.connect('\\0{serving.address.name}'); print(s.recv(1))"
        found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S)
        assert found.stdout == "b''\n", found.stderr
