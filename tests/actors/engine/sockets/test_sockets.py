"""Calls of threads over sockets: answers, errors, and failures of either end."""

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

import numpy as np
import pytest
from tensorvine.actors.engine.sockets import blocking
from tensorvine.actors.engine.sockets import server as server_module
from tensorvine.actors.engine.sockets.blocking import SHORT_BYTES, BlockingConnections, SocketAnswer
from tensorvine.actors.engine.sockets.framing import HEADER
from tensorvine.actors.engine.sockets.packing import APART_BYTES
from tensorvine.actors.rpc.calls import Request, remote
from tensorvine.store.errors import MovedError, OperationTimeoutError, ShardUnavailableError

from tests.support.call_targets import WAIT_S, Away, Serving, TargetCalls, called, packed, sent
from tests.support.interrupts import at_each
from tests.support.waiting import eventually


class TestCalls:
    """Calls and their answers."""

    def test_methods_of_every_group_are_called(self, caller: BlockingConnections) -> None:
        assert called(caller, TargetCalls.note(1)) == 1
        assert called(caller, TargetCalls.bytes()) is None
        waiting = sent(caller, TargetCalls.wait("gate"))
        called(caller, TargetCalls.open("gate"))
        assert waiting.result(WAIT_S, "x") == "gate"

    def test_each_answer_reaches_its_caller(self, caller: BlockingConnections) -> None:
        answers = [sent(caller, TargetCalls.note(number)) for number in range(20)]
        assert [answer.result(WAIT_S, "x") for answer in reversed(answers)] == list(range(19, -1, -1))
        assert answers[3].result(WAIT_S, "x") == 3, "the result may be read again"

    def test_calls_of_one_thread_arrive_in_order_whether_or_not_it_waits(
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

    def test_a_waiting_call_delays_no_other_call(self, caller: BlockingConnections) -> None:
        waiting = sent(caller, TargetCalls.wait("gate"))
        assert called(caller, TargetCalls.note(1)) == 1
        with pytest.raises(
            OperationTimeoutError, match=r"shard 7: expected an answer within 0\.0 s; the call timed out"
        ):
            waiting.result(0.01, "shard 7")
        called(caller, TargetCalls.open("gate"))
        assert waiting.result(WAIT_S, "shard 7") == "gate", "after a timeout it may be waited for again"

    def test_a_received_answer_is_returned_without_a_wait(self, caller: BlockingConnections) -> None:
        waiting = sent(caller, TargetCalls.wait("gate"))
        with pytest.raises(OperationTimeoutError):
            waiting.result(0.0, "x")
        called(caller, TargetCalls.open("gate"))
        eventually(lambda: is_answered(waiting), "the answer is returned without a wait", pause=0.002)

    def test_an_answer_without_a_waiter_is_skipped(self, caller: BlockingConnections) -> None:
        waiting = sent(caller, TargetCalls.wait("late"))
        del waiting
        assert called(caller, TargetCalls.open("late")) is None, "on the connection that will receive the other answer"
        assert called(caller, TargetCalls.note(5)) == 5

    @pytest.mark.parametrize("nbytes", [0, 100, (1 << 16) - 60, 1 << 17, 900_000])
    def test_messages_of_any_length(self, caller: BlockingConnections, nbytes: int) -> None:
        content = os.urandom(nbytes)
        assert called(caller, TargetCalls.note(content)) == content

    @pytest.mark.parametrize("nbytes", [0, 8, APART_BYTES - 8, APART_BYTES, 900_000])
    def test_arrays_of_any_length(self, caller: BlockingConnections, nbytes: int) -> None:
        given = np.frombuffer(os.urandom(nbytes), np.int64).copy()
        expected = given.copy()
        waiting = sent(caller, TargetCalls.note([given, given[:1]]))
        given[:] = 0  # the call has been sent
        whole, first = waiting.result(WAIT_S, "x")
        assert np.array_equal(whole, expected)
        assert np.array_equal(first, expected[:1])

    def test_an_answer_may_be_larger_than_a_call(self, serving: Serving, caller: BlockingConnections) -> None:
        large = b"x" * (5 * SHORT_BYTES)

        async def much(gate: str) -> bytes:
            return large

        serving.target.wait = much  # type: ignore[method-assign]
        assert called(caller, TargetCalls.wait("")) == large

    @pytest.mark.parametrize("large", [bytes(SHORT_BYTES), np.zeros(SHORT_BYTES, np.uint8)], ids=["pickle", "buffer"])
    def test_a_large_call_is_not_sent(self, serving: Serving, caller: BlockingConnections, large: Any) -> None:
        assert caller.send(packed(TargetCalls.note(large))) is None
        called(caller, TargetCalls.note(1))
        assert serving.target.seen == [1]


class TestErrors:
    """Errors of methods, and invalid calls."""

    def test_an_error_of_tensorvine_is_raised_unchanged(self, caller: BlockingConnections) -> None:
        with pytest.raises(MovedError, match="'m' has left") as caught:
            called(caller, TargetCalls.fail(MovedError("'m' has left", 7)))
        assert caught.value.version == 7
        assert not hasattr(caught.value, "__notes__")

    def test_another_error_has_a_note_with_its_traceback(self, caller: BlockingConnections) -> None:
        with pytest.raises(TimeoutError, match="its own") as caught:
            called(caller, TargetCalls.fail(TimeoutError("its own")))
        assert "in fail" in caught.value.__notes__[0]
        with pytest.raises(TypeError, match="positional argument"):
            called(caller, Request(TargetCalls.note, ()))

    def test_an_answer_that_cannot_be_sent_is_an_error_at_once(self, caller: BlockingConnections) -> None:
        with pytest.raises(TypeError, match=r"odd: its answer cannot be sent: .*pickle"):
            called(caller, TargetCalls.odd())
        assert called(caller, TargetCalls.note(1)) == 1

    def test_a_method_that_does_not_exist_is_an_error(self, caller: BlockingConnections) -> None:
        class WrongCalls:
            @remote("ctl")
            def gates(self) -> None: ...

        with pytest.raises(AttributeError, match=r"expected one of \['bytes', 'fail', .*'waits'\]; found 'gates'"):
            called(caller, WrongCalls.gates())
        assert called(caller, TargetCalls.note(1)) == 1

    def test_an_argument_that_the_actor_cannot_unpickle_is_an_error(
        self, serving: Serving, caller: BlockingConnections
    ) -> None:
        class Odd:
            def __reduce__(self) -> tuple[type, tuple[str]]:
                return int, ("no number",)

        with pytest.raises(TypeError, match=r"expected arguments that the actor can unpickle; found ValueError\("):
            called(caller, TargetCalls.note(Odd()))
        assert called(caller, TargetCalls.note(1)) == 1
        assert len(serving.server._served) == 1

    @pytest.mark.parametrize("content", [b"abc", pickle.dumps(7), pickle.dumps((["note"], (1,)))])
    def test_an_invalid_call_ends_its_connection_and_no_other(
        self, serving: Serving, caller: BlockingConnections, caplog: pytest.LogCaptureFixture, content: bytes
    ) -> None:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(WAIT_S)
            stranger.connect(f"\0{serving.server.address.name}")
            stranger.sendall(serving.server.address.secret)
            assert stranger.recv(1) == b"+"
            stranger.sendall(HEADER.pack(len(content), 1) + content)
            assert stranger.recv(1) == b""
        assert called(caller, TargetCalls.note(1)) == 1
        assert "a call cannot be read" in caplog.text


class TestTrouble:
    """Servers that are missing, full, blocked or closed, and callers that are interrupted or collected."""

    def test_without_a_server_no_call_is_sent(self, serving: Serving) -> None:
        absent = BlockingConnections(replace(serving.address, name="tensorvine-nobody"))
        assert absent.send(packed(TargetCalls.note(1))) is None

    def test_another_process_at_the_address_is_not_trusted(self, serving: Serving) -> None:
        other = BlockingConnections(replace(serving.address, pid=1))
        assert other.send(packed(TargetCalls.note(1))) is None
        assert serving.target.seen == []

    def test_above_the_limit_of_connections_no_call_is_sent(
        self,
        serving: Serving,
        caller: BlockingConnections,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(server_module, "CONNECTIONS", 2)
        held = [sent(caller, TargetCalls.wait("gate")) for _ in range(2)]
        assert caller.send(packed(TargetCalls.note(1))) is None
        assert "2 connections are open" in caplog.text
        other = BlockingConnections(serving.address)
        assert other.send(packed(TargetCalls.note(1))) is None
        assert caplog.text.count("connections are open") == 1, "it is logged once"
        serving.run(serving.target.open("gate"))
        assert [answer.result(WAIT_S, "x") for answer in held] == ["gate"] * 2
        assert called(caller, TargetCalls.note(2)) == 2

    def test_a_call_that_a_blocked_server_does_not_receive_is_not_sent(
        self, serving: Serving, caller: BlockingConnections, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        called(caller, TargetCalls.note(0))
        stop, stopped = threading.Event(), threading.Event()
        serving.loop.call_soon_threadsafe(lambda: (stopped.set(), stop.wait(WAIT_S)))
        assert stopped.wait(WAIT_S)
        with monkeypatch.context() as patch:
            patch.setattr(blocking, "SEND_S", 0.05)
            assert caller.send(packed(TargetCalls.note(bytes(SHORT_BYTES - 100)))) is None
        stop.set()
        assert called(caller, TargetCalls.note(1)) == 1
        assert serving.target.seen == [0, 1], "a call that was received in part is not executed"

    def test_after_close_an_awaited_answer_arrives_and_its_connection_ends(
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
    def test_an_exception_at_any_point_of_a_call_leaks_no_connection(
        self, serving: Serving, caller: BlockingConnections
    ) -> None:
        for first in (True, False):  # the first call makes a connection
            points = sum(1 for _ in at_each(lambda: called(caller, TargetCalls.note(1)), "/sockets/"))
            assert points > (40 if first else 20)
        gc.collect()
        assert [called(caller, TargetCalls.note(number)) for number in range(3)] == [0, 1, 2]
        eventually(lambda: len(serving.server._served) == 1, "one connection is left", pause=0.002)

    def test_garbage_collection_closes_the_connections(self, serving: Serving) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            caller: BlockingConnections | None = BlockingConnections(serving.address)
            answers: list[Any] = [sent(caller, TargetCalls.note(1)), sent(caller, TargetCalls.wait("gate"))]
            answers.append((caller, answers))  # a circle
            answers[0].result(WAIT_S, "x")
            del caller, answers
            gc.collect()
        eventually(lambda: not serving.server._served, "no connection is left", pause=0.002)

    def test_garbage_collection_of_an_answer_closes_its_connection(self, serving: Serving) -> None:
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

    def test_the_call_of_a_caller_that_has_disconnected_is_executed(self, serving: Serving) -> None:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(WAIT_S)
            caller.connect(f"\0{serving.address.name}")
            caller.sendall(serving.address.secret)
            assert caller.recv(1) == b"+"
            message = pickle.dumps(("wait", ("gate",)))
            caller.sendall(HEADER.pack(len(message), 1) + message)
            eventually(lambda: "gate" in serving.target.gates, "the call is executed", pause=0.002)
        eventually(lambda: not serving.server._served, "no connection is left", pause=0.002)
        serving.run(serving.target.open("gate"))

    def test_close_of_the_server_cancels_calls_and_ends_connections(
        self, serving: Serving, caller: BlockingConnections
    ) -> None:
        cancelled = threading.Event()

        async def wait(gate: str) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        serving.target.wait = wait  # type: ignore[method-assign]
        answer = sent(caller, TargetCalls.wait("gate"))
        called(caller, TargetCalls.note(1))
        for _ in range(2):  # it may be repeated
            serving.run(serving.server.close())
        with pytest.raises(ShardUnavailableError, match="an actor: expected an answer"):
            answer.result(WAIT_S, "an actor")
        assert cancelled.wait(WAIT_S)
        assert caller.send(packed(TargetCalls.note(2))) is None


def is_answered(answer: SocketAnswer) -> bool:
    try:
        return answer.result(0.0, "x") is not None
    except OperationTimeoutError:
        return False


class TestDeath:
    """The actor's process dies."""

    def test_awaited_answers_fail_at_once(self, away: Away) -> None:
        caller = BlockingConnections(away.address)
        called(caller, TargetCalls.note(1))
        waiting = [sent(caller, TargetCalls.wait("gate")) for _ in range(3)]
        away.kill()
        for answer in waiting:
            with pytest.raises(ShardUnavailableError, match=r"repo/shard-2: expected an answer; it died or is being"):
                answer.result(WAIT_S, "repo/shard-2")
        assert caller.send(packed(TargetCalls.note(1))) is None
        caller.close()

    def test_nothing_is_sent_on_an_idle_connection(self, away: Away) -> None:
        caller = BlockingConnections(away.address)
        called(caller, TargetCalls.note(1))
        away.kill()
        assert caller.send(packed(TargetCalls.note(2))) is None
        caller.close()

    def test_a_stopped_process_is_a_timeout(self, away: Away) -> None:
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
    def test_another_user_is_refused(self, serving: Serving) -> None:
        script = f"import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.settimeout({WAIT_S})"
        script += f"; s.connect('\\0{serving.address.name}'); print(s.recv(1))"
        found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S)
        assert found.stdout == "b''\n", found.stderr
