"""Connections of a process to one actor: they are made when a call needs them, replaced, and closed."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.engine.sockets import awaited, lines
from tensorvine.actors.engine.sockets.awaited import AwaitedConnection
from tensorvine.actors.engine.sockets.blocking import SHORT_BYTES, SocketAnswer
from tensorvine.actors.engine.sockets.framing import SocketAddress
from tensorvine.actors.engine.sockets.lines import Line, Lines, LostError, background_loop, in_thread, result_of
from tensorvine.actors.rpc.calls import Request
from tensorvine.store.errors import ModelLostError, OperationTimeoutError, ShardUnavailableError

from tests.support.call_targets import WAIT_S, Away, Loop, Serving, TargetCalls, packed
from tests.support.forked import in_child
from tests.support.waiting import eventually

HOST = "127.0.0.1"


class Located:
    """Returns addresses when its gate is open, and counts its calls."""

    def __init__(self, *addresses: SocketAddress) -> None:
        self.addresses: Sequence[SocketAddress] = addresses
        self.error: Exception | None = None
        self.count = 0
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self) -> Sequence[SocketAddress]:
        self.count += 1
        assert self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return self.addresses


@pytest.fixture
def located(serving: Serving) -> Located:
    return Located(serving.address)


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def made(located: Located, loop: Loop, away_loop: Loop) -> Iterator[Lines]:
    """Connections to the served actor. They are closed before the loops."""
    made = Lines(located)
    yield made
    made.close()


def send(made: Lines, request: Request[Any]) -> SocketAnswer | Future[Any]:
    return made.send(request.remote.group, packed(request))


def outcome(answer: SocketAnswer | Future[Any]) -> Any:
    if isinstance(answer, SocketAnswer):
        return answer.result(WAIT_S, "an actor")
    return result_of(answer, WAIT_S, "an actor")


def called(made: Lines, request: Request[Any]) -> Any:
    return outcome(send(made, request))


async def asked(made: Lines, request: Request[Any]) -> Any:
    async with asyncio.timeout(WAIT_S):
        return await made.ask(request.remote.group, packed(request))


async def asked_all(made: Lines, requests: Sequence[Request[Any]]) -> list[Any]:
    return await asyncio.gather(*(asked(made, request) for request in requests), return_exceptions=True)


async def closed(serving: Serving) -> None:
    await serving.server.close()


def connections(serving: Serving) -> int:
    return len(serving.server._served)


class TestThreads:
    """Calls of threads."""

    def test_calls_wait_in_order_until_the_address_is_known(
        self, serving: Serving, made: Lines, located: Located
    ) -> None:
        located.gate.clear()
        answers = [send(made, TargetCalls.note(number)) for number in range(50)]
        eventually(lambda: located.count, "the address is asked for", pause=0.002)
        assert not any(isinstance(answer, SocketAnswer) or answer.done() for answer in answers)
        located.gate.set()
        assert [outcome(answer) for answer in answers] == [*range(50)]
        assert serving.target.seen == [*range(50)]
        assert located.count == 1

    def test_an_answer_may_be_waited_for_again_after_a_timeout(self, made: Lines, located: Located) -> None:
        located.gate.clear()
        answer = send(made, TargetCalls.note(1))
        assert isinstance(answer, Future)
        with pytest.raises(OperationTimeoutError, match=r"shard 7: expected an answer within 0\.0 s; the call timed"):
            result_of(answer, 0.01, "shard 7")
        located.gate.set()
        assert result_of(answer, WAIT_S, "shard 7") == 1

    def test_after_the_first_short_call_each_uses_a_blocking_connection(self, serving: Serving, made: Lines) -> None:
        assert called(made, TargetCalls.bytes()) is None
        first = send(made, TargetCalls.note(1))
        assert isinstance(first, Future), "calls of other groups do not ask for the address of threads"
        assert outcome(first) == 1
        later = send(made, TargetCalls.note(2))
        assert isinstance(later, SocketAnswer)
        assert outcome(later) == 2
        for other in (TargetCalls.bytes(), TargetCalls.note(bytes(SHORT_BYTES))):
            answer = send(made, other)
            assert isinstance(answer, Future), "calls of other groups, and large ones, use an event loop"
            outcome(answer)

    def test_a_call_that_a_blocking_connection_does_not_send_uses_the_event_loop(
        self, serving: Serving, made: Lines, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert [called(made, TargetCalls.note(number)) for number in range(2)] == [0, 1]
        monkeypatch.setattr("tensorvine.actors.engine.sockets.blocking.UNANSWERED", 0)
        answer = send(made, TargetCalls.note(2))
        assert isinstance(answer, Future)
        assert outcome(answer) == 2
        assert serving.target.seen == [0, 1, 2]

    def test_errors_of_methods_are_raised(self, made: Lines) -> None:
        for _ in range(2):  # by the event loop, then by a blocking connection
            with pytest.raises(ModelLostError, match="it was lost"):
                called(made, TargetCalls.fail(ModelLostError("it was lost")))
            with pytest.raises(TimeoutError, match="its own") as caught:
                called(made, TargetCalls.fail(TimeoutError("its own")))
            assert not isinstance(caught.value, OperationTimeoutError)

    def test_after_renew_calls_use_new_connections_and_open_ones_go_on(
        self, serving: Serving, made: Lines, located: Located
    ) -> None:
        assert [called(made, TargetCalls.note(number)) for number in range(2)] == [0, 1]
        before, late = send(made, TargetCalls.wait("gate")), send(made, TargetCalls.note(2))
        assert isinstance(late, SocketAnswer)
        eventually(lambda: serving.target.waiting == 1, "the long poll runs", pause=0.002)
        other = Serving()
        located.addresses = [other.address]
        made.renew()
        assert outcome(late) == 2
        assert [called(made, TargetCalls.note(number)) for number in range(3, 6)] == [3, 4, 5]
        assert isinstance(send(made, TargetCalls.note(6)), SocketAnswer)
        assert (serving.target.seen, other.target.seen[:3]) == ([0, 1, 2], [3, 4, 5])
        serving.run(serving.target.open("gate"))
        assert outcome(before) == "gate"
        made.close()
        other.close()

    def test_arrays_are_sent_as_they_were(self, made: Lines) -> None:
        given = np.arange(1 << 20)
        answer = send(made, TargetCalls.note(given))
        given[:] = 0  # the call has been packed
        assert np.array_equal(outcome(answer), np.arange(1 << 20))


class TestLoops:
    """Calls of event loops."""

    def test_calls_wait_in_order_until_the_address_is_known(
        self, serving: Serving, made: Lines, located: Located, loop: Loop
    ) -> None:
        located.gate.clear()
        answers = asyncio.run_coroutine_threadsafe(
            asked_all(made, [TargetCalls.note(number) for number in range(50)]), loop.loop
        )
        eventually(lambda: located.count, "the address is asked for", pause=0.002)
        located.gate.set()
        assert answers.result(WAIT_S) == [*range(50)]
        assert serving.target.seen == [*range(50)]
        assert located.count == 1

    def test_a_call_whose_caller_gave_up_before_it_was_sent_is_not_sent(
        self, serving: Serving, made: Lines, located: Located, loop: Loop
    ) -> None:
        located.gate.clear()

        async def scene() -> object:
            given_up = made.ask("ctl", packed(TargetCalls.note("given up")))
            kept = made.ask("ctl", packed(TargetCalls.note("kept")))
            given_up.cancel()
            located.gate.set()
            return await kept

        assert loop.run(scene()) == "kept"
        assert serving.target.seen == ["kept"]

    def test_an_answer_whose_caller_gave_up_is_skipped(self, made: Lines, loop: Loop) -> None:
        async def scene() -> object:
            given_up = made.ask("watch", packed(TargetCalls.wait("gate")))
            while await made.ask("ctl", packed(TargetCalls.waits())) == 0:
                pass
            given_up.cancel()
            await made.ask("ctl", packed(TargetCalls.open("gate")))
            return await made.ask("watch", packed(TargetCalls.wait("gate")))

        assert loop.run(scene()) == "gate"

    def test_each_group_has_a_connection_of_its_own(self, serving: Serving, made: Lines, loop: Loop) -> None:
        for _ in range(3):
            loop.run(asked_all(made, [TargetCalls.note(1), TargetCalls.bytes(), TargetCalls.note(2)]))
        assert connections(serving) == 2

    def test_loops_and_threads_call_at_once(
        self, serving: Serving, made: Lines, located: Located, loop: Loop, away_loop: Loop
    ) -> None:
        def of_loop(of: Loop, first: int) -> list[Any]:
            requests = [TargetCalls.note(number) for number in range(first, first + 100)]
            return of.run(asked_all(made, [*requests, *(TargetCalls.bytes() for _ in range(20))]))[:100]

        def of_thread(first: int) -> list[Any]:
            return [called(made, TargetCalls.note(number)) for number in range(first, first + 100)]

        with ThreadPoolExecutor(6) as pool:
            found = [pool.submit(of_loop, of, first) for of, first in ((loop, 0), (away_loop, 100))]
            found += [pool.submit(of_thread, first) for first in (200, 300, 400, 500)]
            results = [result.result(WAIT_S) for result in found]
        assert [number for numbers in results for number in numbers] == [*range(600)]
        assert sorted(serving.target.seen) == [*range(600)]
        for first in range(0, 600, 100):  # the calls of a loop keep their order, and those of a thread that waits
            assert [number for number in serving.target.seen if first <= number < first + 100] == [
                *range(first, first + 100)
            ]
        assert located.count <= 5, "once for each connection of a loop"


class TestPosts:
    """Calls without a waiter."""

    def test_they_arrive(self, serving: Serving, made: Lines, loop: Loop) -> None:
        async def post() -> None:
            made.post("ctl", packed(TargetCalls.note("loop")))

        made.post("ctl", packed(TargetCalls.note("thread")))
        loop.run(post())
        eventually(lambda: len(serving.target.seen) == 2, "both calls have arrived", pause=0.002)
        assert serving.target.seen == ["thread", "loop"]

    def test_their_errors_are_dropped(self, made: Lines, located: Located, caplog: pytest.LogCaptureFixture) -> None:
        made.post("ctl", packed(TargetCalls.fail(ModelLostError("it was lost"))))
        assert called(made, TargetCalls.note(1)) == 1
        made.close()
        located.error = ShardUnavailableError("it was stopped")
        made.post("ctl", packed(TargetCalls.note(2)))
        with pytest.raises(ShardUnavailableError, match="it was stopped"):
            called(made, TargetCalls.note(3))
        gc.collect()
        assert not caplog.records

    def test_the_connection_is_kept_until_the_answer(self, serving: Serving, located: Located) -> None:
        made: Lines | None = Lines(located)
        made.post("watch", packed(TargetCalls.wait("gate")))
        del made
        gc.collect()
        eventually(lambda: serving.target.waiting == 1, "the call has arrived", pause=0.002)
        gc.collect()
        assert connections(serving) == 1
        serving.run(serving.target.open("gate"))
        eventually(lambda: gc.collect() >= 0 and not connections(serving), "no connection is left", pause=0.002)


class TestTrouble:
    """Actors that are missing, end, or do not respond."""

    def test_an_error_of_locating_reaches_every_waiting_call(self, made: Lines, located: Located, loop: Loop) -> None:
        located.error = ShardUnavailableError("shard 3: it was stopped")
        located.gate.clear()
        answers = [send(made, TargetCalls.note(number)) for number in range(5)]
        of_loop = asyncio.run_coroutine_threadsafe(asked_all(made, [TargetCalls.note(7)] * 3), loop.loop)
        eventually(lambda: located.count == 2, "the address is asked for", pause=0.002)
        located.gate.set()
        for answer in answers:
            with pytest.raises(ShardUnavailableError, match="shard 3: it was stopped"):
                outcome(answer)
        assert [str(error) for error in of_loop.result(WAIT_S)] == ["shard 3: it was stopped"] * 3
        located.error = None
        assert called(made, TargetCalls.note(8)) == 8, "a later call asks again"
        assert loop.run(asked(made, TargetCalls.note(9))) == 9

    def test_addresses_are_tried_in_order(self, serving: Serving, made: Lines, located: Located, loop: Loop) -> None:
        absent = replace(serving.address, name="tensorvine-nobody")
        stale = replace(serving.address, secret=bytes(32))
        located.addresses = [absent, stale]
        with pytest.raises(LostError, match="it does not answer at its address: expected a welcome"):
            loop.run(asked(made, TargetCalls.note(1)))
        located.addresses = [absent, stale, serving.address]
        assert loop.run(asked(made, TargetCalls.note(2))) == 2
        assert called(made, TargetCalls.note(3)) == 3
        assert called(made, TargetCalls.note(4)) == 4
        assert serving.target.seen == [2, 3, 4]

    def test_after_the_end_of_a_connection_the_actor_is_located_again(
        self, serving: Serving, made: Lines, located: Located, loop: Loop
    ) -> None:
        assert [called(made, TargetCalls.note(number)) for number in range(2)] == [0, 1]
        assert loop.run(asked(made, TargetCalls.note(2))) == 2
        polls = [send(made, TargetCalls.wait("gate")) for _ in range(3)]
        eventually(lambda: serving.target.waiting == 3, "the long polls run", pause=0.002)
        before = located.count
        serving.run(closed(serving))
        for poll in polls:
            with pytest.raises(LostError, match="it died or is being restarted"):
                outcome(poll)
        assert located.count == before, "a connection is made when a call needs it"
        again = Serving()
        located.addresses = [again.address]
        eventually(lambda: called(made, TargetCalls.note(3)) == 3, "threads reach the new one", ignoring=(LostError,))
        eventually(lambda: loop.run(asked(made, TargetCalls.note(4))) == 4, "and so do loops", ignoring=(LostError,))
        assert located.count == before + 2
        assert isinstance(send(made, TargetCalls.note(5)), SocketAnswer)
        assert again.target.seen[:2] == [3, 4]
        made.close()
        again.close()

    def test_calls_wait_while_the_queue_of_new_connections_is_full(
        self, made: Lines, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        connect, tries = awaited.connected, list[int]()

        async def crowded(address: SocketAddress) -> AwaitedConnection:
            tries.append(1)
            if len(tries) < 4:
                raise BlockingIOError("resource temporarily unavailable")
            return await connect(address)

        monkeypatch.setattr(lines, "connected", crowded)
        assert called(made, TargetCalls.note(1)) == 1
        assert len(tries) == 4

    def test_a_queue_that_stays_full_is_an_error(self, made: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
        async def crowded(address: SocketAddress) -> AwaitedConnection:
            raise BlockingIOError("resource temporarily unavailable")

        monkeypatch.setattr(lines, "connected", crowded)
        monkeypatch.setattr(lines, "CROWDED_S", 0.05)
        with pytest.raises(LostError, match="it does not answer at its address"):
            called(made, TargetCalls.note(1))

    def test_a_stale_connection_is_replaced_and_its_calls_may_still_be_answered(
        self, loop: Loop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        away, other = Away(HOST), Serving(host=HOST)
        located = Located(away.address)
        made = Lines(located)
        monkeypatch.setattr(awaited, "PING_S", 0.01)
        try:
            loop.run(asked(made, TargetCalls.note(1)))
            (line,) = made._open._lines.values()
            (old,) = line._connections()
            late = asyncio.run_coroutine_threadsafe(asked(made, TargetCalls.wait("gate")), loop.loop)
            eventually(lambda: loop.run(asked(made, TargetCalls.waits())) == 1, "the long poll runs", pause=0.002)
            away.process.send_signal(signal.SIGSTOP)
            late_too = asyncio.run_coroutine_threadsafe(asked(made, TargetCalls.note("late")), loop.loop)
            monkeypatch.setattr(awaited, "STALE_S", 0.2)
            eventually(lambda: old.stale, "the connection is stale", pause=0.002)
            located.addresses = [other.address]
            assert loop.run(asked(made, TargetCalls.note(2))) == 2
            assert other.target.seen == [2]
            assert located.count == 3, "for each group, and for the new connection"
            assert not late.done()
            away.process.send_signal(signal.SIGCONT)
            assert late_too.result(WAIT_S) == "late"
            away.kill()
            with pytest.raises(LostError, match="it died or is being restarted"):
                late.result(WAIT_S)
        finally:
            made.close()
            away.kill()
            other.close()

    def test_a_stale_connection_without_calls_is_closed(
        self, serving: Serving, made: Lines, loop: Loop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert loop.run(asked(made, TargetCalls.note(1))) == 1
        (served,) = serving.server._served
        monkeypatch.setattr(AwaitedConnection, "stale", property(lambda connection: True))
        assert loop.run(asked(made, TargetCalls.note(2))) == 2
        eventually(lambda: served not in serving.server._served, "the old connection has ended", pause=0.002)
        assert connections(serving) == 1


class TestClose:
    """Ends of connections."""

    def test_it_ends_all_and_later_calls_make_new_connections(
        self, serving: Serving, made: Lines, located: Located, loop: Loop
    ) -> None:
        assert [called(made, TargetCalls.note(number)) for number in range(2)] == [0, 1]
        of_thread = send(made, TargetCalls.wait("gate"))
        of_loop = asyncio.run_coroutine_threadsafe(asked(made, TargetCalls.wait("gate")), loop.loop)
        eventually(lambda: serving.target.waiting == 2, "both calls run", pause=0.002)
        for _ in range(2):  # it may be repeated
            made.close()
        with pytest.raises(LostError, match="the connection was closed"):
            outcome(of_thread)
        with pytest.raises(LostError, match="the connection was closed"):
            of_loop.result(WAIT_S)
        eventually(lambda: not connections(serving), "no connection is left", pause=0.002)
        before = located.count
        assert called(made, TargetCalls.note(2)) == 2
        assert loop.run(asked(made, TargetCalls.note(3))) == 3
        assert located.count == before + 2

    def test_calls_that_wait_for_a_connection_fail(self, made: Lines, located: Located, loop: Loop) -> None:
        located.gate.clear()
        answers = [send(made, TargetCalls.note(number)) for number in range(3)]
        of_loop = asyncio.run_coroutine_threadsafe(asked(made, TargetCalls.note(3)), loop.loop)
        eventually(lambda: located.count == 2, "the address is asked for", pause=0.002)
        made.close()
        for answer in answers:
            with pytest.raises(LostError, match="the connection was closed"):
                outcome(answer)
        with pytest.raises(LostError, match="the connection was closed"):
            of_loop.result(WAIT_S)
        located.gate.set()

    def test_calls_fail_also_if_connecting_has_not_begun(self, serving: Serving, loop: Loop) -> None:
        async def find() -> Sequence[SocketAddress]:
            return [serving.address]

        async def scene() -> None:
            line, answers = Line(find), [asyncio.get_running_loop().create_future() for _ in range(2)]
            line.send(packed(TargetCalls.note(1)), answers[0])
            line.close()
            line.send(packed(TargetCalls.note(2)), answers[1])
            for answer in answers:
                with pytest.raises(LostError, match="the connection was closed"):
                    await asyncio.wait_for(answer, WAIT_S)

        loop.run(scene())
        assert (serving.target.seen, connections(serving)) == ([], 0)

    def test_garbage_collection_closes_the_connections(self, serving: Serving, located: Located, loop: Loop) -> None:
        made: Lines | None = Lines(located)
        assert [called(made, TargetCalls.note(number)) for number in range(3)] == [0, 1, 2]
        called(made, TargetCalls.bytes())
        loop.run(asked(made, TargetCalls.note(3)))
        assert connections(serving) == 4
        del made
        eventually(lambda: gc.collect() >= 0 and not connections(serving), "no connection is left", pause=0.002)

    @pytest.mark.parametrize("request_", [TargetCalls.note(1), TargetCalls.wait("gate")], ids=["short", "long poll"])
    @pytest.mark.parametrize("first", [True, False])
    def test_an_awaited_answer_keeps_its_connection(
        self, serving: Serving, located: Located, request_: Request[Any], first: bool
    ) -> None:
        made: Lines | None = Lines(located)
        if not first:
            called(made, TargetCalls.note(0))
        located.gate.clear()
        answer = send(made, request_)
        del made
        gc.collect()
        located.gate.set()
        serving.run(serving.target.open("gate"))
        assert outcome(answer) in {1, "gate"}
        del answer
        eventually(lambda: gc.collect() >= 0 and not connections(serving), "no connection is left", pause=0.002)

    @pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
    def test_an_event_loop_that_has_ended_does_no_harm(self, serving: Serving, made: Lines) -> None:
        for number in range(3):
            assert asyncio.run(asked(made, TargetCalls.note(number))) == number
        assert len(made._open._lines) == 1, "connections of closed loops are forgotten"
        made.close()
        gc.collect()
        eventually(lambda: not connections(serving), "no connection is left", pause=0.002)


class TestProcess:
    """What a process has once: the event loop of threads' calls, and threads that wait."""

    def test_a_forked_child_has_an_event_loop_of_its_own_and_closes_nothing_of_its_parent(
        self, serving: Serving, made: Lines, located: Located
    ) -> None:
        assert [called(made, TargetCalls.note(number)) for number in range(2)] == [0, 1]
        before, parents = connections(serving), background_loop()

        def work() -> list[object]:
            made.close()
            own = Lines(located)
            return [called(own, TargetCalls.note("child")), background_loop() is parents]

        assert in_child(work) == ["child", False]
        eventually(lambda: connections(serving) == before, "the child's connections have ended", pause=0.002)
        assert called(made, TargetCalls.note(2)) == 2
        assert background_loop() is parents

    def test_work_in_a_thread_does_not_block_its_event_loop(self, loop: Loop) -> None:
        gate = threading.Event()

        async def scene() -> bool:
            waiting = asyncio.ensure_future(in_thread(lambda: gate.wait(WAIT_S)))
            await asyncio.sleep(0)
            gate.set()
            return await waiting

        assert loop.run(scene())

    @pytest.mark.parametrize("ends", ["by a result", "by an error"])
    def test_work_whose_waiter_gave_up_ends_silently(
        self, loop: Loop, ends: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        gate, threads = threading.Event(), list[threading.Thread]()

        def work() -> None:
            threads.append(threading.current_thread())
            gate.wait(WAIT_S)
            if ends == "by an error":
                raise ValueError

        async def scene() -> None:
            waiting = asyncio.ensure_future(in_thread(work))
            while not threads:
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

        loop.run(scene())
        gate.set()
        threads[0].join(WAIT_S)
        assert not threads[0].is_alive()
        assert not caplog.records
