"""Forks in one process: ranks and clones are threads over real groups; whatever happens, in whatever phase."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.training.fork.order import CLONE
from tensorvine.actors.training.fork.receiver import ForkReceiver
from tensorvine.store.errors import ForkError, OperationTimeoutError, PeerLostError

from tests.support.fork_runs import AT, TIMEOUT_S, Make, Run, expected, training
from tests.support.plain_training import SHAPES


class TestLeaving:
    """The training comes to its end while a fork is under way."""

    @pytest.mark.parametrize("clones", [1, 3])
    def test_what_was_captured_is_still_sent_as_it_was(self, run: Make, clones: int) -> None:
        one = run(1, clones)
        one.arm()
        one.train(AT)
        (fork_hooks,), (own,) = one.ports, one.trainings
        with ThreadPoolExecutor(1) as pool:
            leaving = pool.submit(fork_hooks.leave)
            assert not fork_hooks.state(one.order.id, 0.05).ended
            one.adopt()  # nobody was there when the training ended
            for receiver in one.intakes:
                receiver.whole(TIMEOUT_S)
            assert one.ended() == [None]
            leaving.result(TIMEOUT_S)
        state, _ = expected(0, 0)
        own.weights[next(iter(own.weights))][...] = np.nan
        assert all({n: c.tensor(n).tobytes() for n in state} == state for c in one.clones)

    def test_what_was_captured_may_change_as_soon_as_the_training_has_ended(self, run: Make) -> None:
        one = run(1, 1)
        one.arm()
        one.train(AT)
        state, _ = expected(0, 0)
        (fork_hooks,), (own,) = one.ports, one.trainings
        fork_hooks.before_update()
        for array in own.weights.values():
            array[...] = np.nan
        with ThreadPoolExecutor(1) as pool:
            leaving = pool.submit(fork_hooks.leave)
            one.adopt()
            one.intakes[0].whole(TIMEOUT_S)
            assert one.ended() == [None]
            leaving.result(TIMEOUT_S)
        assert {name: one.clones[0].tensor(name).tobytes() for name in state} == state

    def test_a_step_that_did_not_come_is_given_up(self, run: Make) -> None:
        one = run(1, 1)
        one.arm()
        one.train(AT - 1)
        one.ports[0].leave()
        (error,) = one.ended()
        assert error
        assert "was closed" in error

    def test_clones_that_do_not_come_hold_it_no_longer_than_the_fork_may_take(self, run: Make) -> None:
        one = run(1, 1, timeout=0.3)
        one.arm()
        one.train(AT)
        with ThreadPoolExecutor(1) as pool:
            leaving = pool.submit(one.ports[0].leave)
            (error,) = one.ended()
            leaving.result(TIMEOUT_S)
        assert error
        assert "within 0" in error

    def test_a_fork_that_is_cancelled_holds_it_no_more(self, run: Make) -> None:
        one = run(1, 1)
        one.arm()
        one.train(AT)
        with ThreadPoolExecutor(1) as pool:
            leaving = pool.submit(one.ports[0].leave)
            one.ports[0].cancel(one.order.id, "no need")
            (error,) = one.ended()
            leaving.result(TIMEOUT_S)
        assert error
        assert "no need" in error


class TestWhole:
    """What clones have, and how they go on."""

    @pytest.mark.parametrize("sources", [1, 2, 3, 4])
    @pytest.mark.parametrize("clones", [1, 2, 3, 4])
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_clones_have_the_state_after_the_step(self, run: Make, sources: int, clones: int, when: str) -> None:
        one = run(sources, clones)
        one.arm()
        if when == "before":
            one.adopt()
        one.train(AT + 2)
        if when == "after":
            one.adopt()
        for clone, receiver in enumerate(one.intakes):
            receiver.whole(TIMEOUT_S)
            state, losses = expected(clone % sources, steps=5)
            own = one.clones[clone]
            assert {name: own.tensor(name).tobytes() for name in state} == state
            assert own.steps_done == AT
            assert [own.step() for _ in range(5)] == losses
        assert one.ended() == [None] * sources

    @pytest.mark.parametrize("backend", ["shared", "gloo"])
    def test_a_clone_goes_on_bit_for_bit_and_the_original_is_not_disturbed(self, run: Make, backend: str) -> None:
        one = run(2, 2, backend)
        one.adopt()
        one.arm()
        originals = one.train(AT + 20)
        for rank, receiver in enumerate(one.intakes):
            receiver.whole(TIMEOUT_S)
            assert [one.clones[rank].step() for _ in range(20)] == originals[rank][AT:]
            assert originals[rank][AT:] == expected(rank, 20)[1]

    def test_the_first_step_waits_for_each_tensor_that_it_reads(self, run: Make) -> None:
        one = run(2, 3)
        one.adopt()
        one.arm()
        with ThreadPoolExecutor(3) as pool:

            def first(place: int) -> float:
                one.intakes[place].received(TIMEOUT_S)
                one.clones[place].gate(one.intakes[place].wait)
                return one.clones[place].step()

            losses = [pool.submit(first, place) for place in range(3)]
            one.train(AT + 1)
            assert [loss.result(TIMEOUT_S) for loss in losses] == [expected(rank % 2, 1)[1][0] for rank in range(3)]
        assert one.clones[0].seen[:2] == ["large", "large/momentum"]

    def test_each_tensor_is_filled_once(self, run: Make) -> None:
        one = run(3, 2)
        one.adopt()
        one.arm()
        one.train(AT)
        for receiver, clone in zip(one.intakes, one.clones, strict=True):
            receiver.whole(TIMEOUT_S)
            assert sorted(clone.filled_names) == sorted(spec.name for spec in one.order.specs)

    def test_a_training_that_stands_still_is_captured_as_it_is(self, run: Make) -> None:
        one = run(2, 2)
        one.train(AT)
        one.adopt()
        one.arm(AT)
        for rank, receiver in enumerate(one.intakes):
            receiver.whole(TIMEOUT_S)
            assert [one.clones[rank].step() for _ in range(3)] == expected(rank, 3)[1]

    def test_an_order_takes_place_at_the_step_that_was_said_last(self, run: Make) -> None:
        one = run(2, 2)
        one.adopt()
        one.arm(AT + 1000)
        one.train(AT)
        one.arm(AT)
        for rank, receiver in enumerate(one.intakes):
            receiver.whole(TIMEOUT_S)
            assert [one.clones[rank].step() for _ in range(3)] == expected(rank, 3)[1]

    def test_a_training_that_goes_on_is_captured_before_its_next_step(self, run: Make) -> None:
        one = run(1, 1)
        one.train(AT)
        one.adopt()
        one.ports[0].arm(one.order, AT)
        assert one.ports[0].agree(one.order.id)
        losses = one.train(3)[0]
        one.ports[0].capture()  # nothing is left to be done
        one.intakes[0].whole(TIMEOUT_S)
        assert [one.clones[0].step() for _ in range(3)] == losses == expected(0, 3)[1]

    def test_one_fork_after_the_other(self, run: Make) -> None:
        one = run(1, 1)
        one.adopt()
        one.arm()
        one.train(AT)
        one.intakes[0].whole(TIMEOUT_S)
        assert one.ended() == [None]
        one.order = one.ordered(2)
        one.arm(AT + 2)
        one.train(2)
        one.adopt()
        one.intakes[1].whole(TIMEOUT_S)
        one.intakes[2].whole(TIMEOUT_S)
        assert one.clones[2].step() == one.train(1)[0][0]

    def test_a_clone_that_comes_late_gets_the_state_of_the_step_all_the_same(self, run: Make) -> None:
        """The training has gone on: what was not sent was set aside."""
        one = run(2, 2)
        one.arm()
        one.train(AT + 30)
        one.adopt()
        for clone, receiver in enumerate(one.intakes):
            receiver.whole(TIMEOUT_S)
            assert {name: one.clones[clone].tensor(name).tobytes() for name in SHAPES}.items() <= expected(clone, 0)[
                0
            ].items()


PHASES = ["armed", "captured", "sending", "sent"]


class TestTrouble:
    """Who goes, and when: the training goes on to the end, and no clone is half."""

    @staticmethod
    def into(one: Run, phase: str) -> None:
        """Bring a fork of two ranks into two clones to a phase; its first clone has come from "sending" on."""
        one.arm()
        if phase == "armed":
            one.train(1)
            return
        one.train(AT)
        if phase != "captured":
            one.adopt([0] if phase == "sending" else None)
        if phase == "sent":
            for receiver in one.intakes:
                receiver.whole(TIMEOUT_S)
            one.ended()

    @pytest.mark.parametrize("phase", PHASES)
    def test_cancelled(self, run: Make, phase: str) -> None:
        one = run(2, 2)
        self.into(one, phase)
        for fork_hooks in one.ports:
            fork_hooks.cancel(one.order.id, "no more")
        errors = one.ended()
        if phase == "sending":  # the clone that has come may have had its share by now; the other one never came
            assert errors[1] is not None
        else:
            assert all((error is None) == (phase == "sent") for error in errors)
        self.goes_on(one)

    @pytest.mark.parametrize("phase", PHASES)
    def test_a_clone_goes(self, run: Make, phase: str) -> None:
        one = run(2, 2, timeout=4.0)
        self.into(one, phase)
        if phase in ("armed", "captured"):
            one.adopt([1])
            one.connect(one.order.group_name(0, 0), CLONE, 2, backend=one.order.transport, timeout=TIMEOUT_S).close()
        else:
            one.intakes[0].fail(PeerLostError("the clone died"))
            with pytest.raises(ForkError, match="clone 0 of 'run': the clone died"):
                one.intakes[0].whole(0.0)
        self.goes_on(one)
        errors = one.ended()
        if phase == "sending":  # this clone may have had its share; the other one never came
            assert "rank 1 of 'run': sending to clone 1" in (errors[1] or "")
        elif phase == "sent":
            assert errors == [None, None]
        else:
            assert "rank 0 of 'run': sending to clone 0" in (errors[0] or "")

    @pytest.mark.parametrize("phase", PHASES)
    def test_a_rank_goes(self, run: Make, phase: str) -> None:
        one = run(2, 2)
        self.into(one, phase)
        if phase == "armed":
            one.adopt()
        elif phase == "sending":
            one.adopt([1])
        one.ports[1].close()
        if phase == "captured":  # clones that were there before might have got all
            one.adopt()
        for own in one.trainings[:1]:
            while own.steps_done < AT + 5:
                own.step()
        if phase == "sent":
            for receiver in one.intakes:
                receiver.whole(0.0)
        elif phase != "sending":  # the second clone cannot have got all; whoever forks ends the first
            with pytest.raises(ForkError, match="clone 1 of 'run'"):
                one.intakes[1].whole(TIMEOUT_S)

    def test_a_clone_that_never_comes(self, run: Make) -> None:
        one = run(1, 1, timeout=1.0)
        one.arm()
        assert one.train(AT + 5)
        error = one.ended()[0] or ""
        assert "rank 0 of 'run': sending to clone 0" in error
        assert "did not" in error

    def test_a_rank_that_never_comes_to_the_step(self, run: Make) -> None:
        one = run(1, 1, timeout=1.0)
        one.arm()
        one.adopt()
        with pytest.raises((ForkError, OperationTimeoutError), match="clone 0 of 'run'"):
            one.intakes[0].whole(TIMEOUT_S)
        assert one.ended()[0]
        self.goes_on(one)

    def test_a_training_that_cannot_tell_its_state_goes_on(self, run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        one = run(1, 1)

        def facts() -> Mapping[str, Any]:
            raise RuntimeError("no facts today")

        monkeypatch.setattr(one.trainings[0], "facts", facts)
        one.arm()
        one.adopt()
        one.train(AT + 2)
        assert "no facts today" in (one.ended()[0] or "")
        with pytest.raises(ForkError):
            one.intakes[0].whole(TIMEOUT_S)

    @staticmethod
    def goes_on(one: Run) -> None:
        """The ranks train to step `AT` + 5, as if nobody had forked them."""
        for rank, own in enumerate(one.trainings):
            losses: list[float] = []
            while own.steps_done < AT + 5:
                losses.append(own.step())
            assert losses[-5:] == expected(rank, 5)[1][-len(losses[-5:]) :]


def test_a_clone_is_not_waited_for_while_it_does_not_read(run: Make) -> None:
    """A clone that takes nothing: the training goes on after a bounded time, and the fork fails."""
    one = run(1, 1)
    started: Future[Any] = Future()
    stuck = threading.Event()
    clone = training(shapes=SHAPES)
    memory = clone.memory

    def slow(name: str) -> np.ndarray:
        started.set_result(None) if not started.done() else None
        stuck.wait(TIMEOUT_S)
        return memory(name)

    clone.memory = slow  # type: ignore[method-assign]
    one.arm()
    thread = threading.Thread(target=lambda: ForkReceiver(one.order, 0, clone, one.connect), daemon=True)
    thread.start()
    started.result(TIMEOUT_S)
    one.train(AT + 3)
    assert one.trainings[0].steps_done == AT + 3
    stuck.set()
    thread.join(TIMEOUT_S)
    assert one.ended() == [None]
