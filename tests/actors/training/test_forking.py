"""Forks in one process: ranks and clones are threads over real groups; whatever happens, in whatever phase."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.collective.connect import connect
from tensorvine.actors.collective.rendezvous import LocalRendezvous
from tensorvine.actors.training.fork import sender
from tensorvine.actors.training.fork.fork_hooks import ForkHooks
from tensorvine.actors.training.fork.order import CLONE, ForkOrder
from tensorvine.actors.training.fork.receiver import ForkReceiver
from tensorvine.actors.training.training import RankContext
from tensorvine.store.errors import ForkError, OperationTimeoutError, PeerLostError

from tests.support.plain_training import SHAPES, PlainTraining

AT = 3
"""The step that is forked."""
TIMEOUT_S = 60.0


def training(rank: int = 0, size: int = 1, **options: Any) -> PlainTraining:
    return PlainTraining(RankContext("run", rank, size, None, options))


def expected(rank: int, steps: int) -> tuple[dict[str, bytes], list[float]]:
    """What a training that nobody forks has after `AT` steps, and the losses of the steps after that."""
    state, losses = undisturbed(rank, 5 if steps <= 5 else 20)
    return state, losses[:steps]


@cache
def undisturbed(rank: int, steps: int) -> tuple[dict[str, bytes], list[float]]:
    """Train such a training, once for all tests."""
    plain = training(rank)
    for _ in range(AT):
        plain.step()
    state = {spec.name: plain.tensor(spec.name).tobytes() for spec in plain.specs()}
    return state, [plain.step() for _ in range(steps)]


class Run:
    """Ranks and clones of one fork."""

    def __init__(self, sources: int, clones: int, backend: str = "shared", timeout: float = TIMEOUT_S) -> None:
        self.connect = partial(connect, rendezvous=LocalRendezvous())
        self.trainings = [training(rank, sources) for rank in range(sources)]
        self.ports = [ForkHooks(t, "run", rank, sources, self.connect) for rank, t in enumerate(self.trainings)]
        for own, fork_hooks in zip(self.trainings, self.ports, strict=True):
            own.hook(fork_hooks)
        self.order = self.ordered(clones, backend, timeout)
        self.intakes: list[ForkReceiver] = []
        self.clones: list[PlainTraining] = []

    def ordered(self, clones: int, backend: str = "shared", timeout: float = TIMEOUT_S) -> ForkOrder:
        first = self.trainings[0]
        specs, forward = tuple(first.specs()), tuple(first.forward_order())
        return ForkOrder(
            id=uuid.uuid4().hex[:8],
            run="run",
            sources=len(self.trainings),
            groups=(clones,),
            specs=specs,
            forward=forward,
            transport=backend,
            timeout=timeout,
        )

    def adopt(self, only: Sequence[int] | None = None) -> None:
        for clone in range(self.order.clones) if only is None else only:
            self.clones.append(training(clone, self.order.clones, shapes=SHAPES))
            for name in SHAPES:
                self.clones[-1].weights[name][...] = np.nan
            self.intakes.append(ForkReceiver(self.order, clone, self.clones[-1], self.connect))

    def train(self, steps: int) -> list[list[float]]:
        return [[own.step() for _ in range(steps)] for own in self.trainings]

    def arm(self, step: int = AT) -> None:
        for fork_hooks in self.ports:
            fork_hooks.arm(self.order, step)
        for fork_hooks in self.ports:
            if fork_hooks.agree(self.order.id):
                fork_hooks.capture()

    def ended(self) -> list[str | None]:
        """Wait for the end of the fork at the ranks, and give their errors."""
        states = [fork_hooks.state(self.order.id, TIMEOUT_S) for fork_hooks in self.ports]
        assert all(state.ended for state in states)
        return [state.error for state in states]

    def close(self) -> None:
        for fork_hooks in self.ports:
            fork_hooks.close()
        for receiver in self.intakes:
            receiver.fail(ForkError("the test has ended"))


@pytest.fixture
def run() -> Any:
    made: list[Run] = []

    def make(*args: Any, **kwargs: Any) -> Run:
        made.append(Run(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


Make = Callable[..., Run]


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


class TestAgreement:
    """Ranks that hear of an order at different times are forked after the same step."""

    def test_a_rank_stands_still_before_the_step_until_all_have_taken_the_order(self, run: Make) -> None:
        one = run(2, 2)
        one.adopt()
        early, late = one.ports
        early.arm(one.order, 2)
        with ThreadPoolExecutor(2) as pool:
            held = pool.submit(lambda: [one.trainings[0].step() for _ in range(AT + 3)])
            one.trainings[1].step()
            one.trainings[1].step()
            with pytest.raises(ForkError, match="expected a step to come; step 1 is past"):
                late.arm(one.order, 1)
            assert not held.done()
            assert one.trainings[0].steps_done < 2
            one.arm(AT)  # both can still take it
            losses = [held.result(TIMEOUT_S), [one.trainings[1].step() for _ in range(AT + 1)]]
        for rank, receiver in enumerate(one.intakes):
            receiver.whole(TIMEOUT_S)
            assert [one.clones[rank].step() for _ in range(3)] == losses[rank][-3:] == expected(rank, 3)[1]

    def test_a_rank_that_stands_still_does_not_go_on_before_all_have_taken_the_order(self, run: Make) -> None:
        one = run(1, 1)
        one.train(AT)
        one.adopt()
        one.ports[0].arm(one.order, AT)
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(one.train, 3)
            one.ports[0].capture()
            assert not one.ports[0].state(one.order.id, 0.05).captured
            assert not held.done()
            one.ports[0].agree(one.order.id)
            losses = held.result(TIMEOUT_S)[0]
        one.intakes[0].whole(TIMEOUT_S)
        assert [one.clones[0].step() for _ in range(3)] == losses == expected(0, 3)[1]

    def test_without_a_word_the_fork_fails_and_the_training_goes_on(
        self, run: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sender, "AGREE_S", 0.05)
        one = run(1, 1)
        one.ports[0].arm(one.order, AT)
        one.train(AT + 1)
        failed = f"expected the word that all ranks have taken step {AT} within 0.05 s; it did not come"
        with pytest.raises(ForkError, match=failed):
            one.ports[0].agree(one.order.id)
        assert failed in (one.ended()[0] or "")
        assert one.ports[0].state(one.order.id, 0.0).held_s > 0

    def test_a_training_that_went_on_from_another_state_is_not_captured(self, run: Make) -> None:
        one = run(1, 1)
        one.train(AT)
        one.ports[0].arm(one.order, AT)
        assert one.ports[0].agree(one.order.id)
        one.trainings[0].hook(None)
        one.train(1)
        with pytest.raises(ForkError, match=f"expected step {AT} to be the last one that ended; it is {AT + 1}"):
            one.ports[0].capture()

    def test_a_rank_that_sends_nothing_takes_another_step(self, run: Make) -> None:
        """All that there is goes whole, from another rank."""
        one, small = run(1, 1), training(1, 2, shapes={"bias": (5,)})
        order = replace(one.order, sources=2, specs=tuple(small.specs()), forward=("bias",))
        assert (1, 0) not in order.plan().pairs()
        fork_hooks = ForkHooks(small, "run", 1, 2, one.connect)
        for step in (AT, AT + 1):
            fork_hooks.arm(order, step)
        assert not fork_hooks.agree(order.id)

    @pytest.mark.parametrize("end", ["cancel", "close"])
    def test_a_fork_that_is_given_up_keeps_no_training(self, run: Make, end: str) -> None:
        one = run(1, 1)
        one.ports[0].arm(one.order, 1)
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(one.train, 1)
            one.ports[0].cancel(one.order.id, "no more") if end == "cancel" else one.ports[0].close()
            held.result(TIMEOUT_S)

    def test_a_fork_that_has_ended_is_not_ordered_again(self, run: Make) -> None:
        """Its clones have the state of another step."""
        one = run(1, 1)
        one.adopt()
        one.arm()
        one.train(AT)
        assert one.ended() == [None]
        with pytest.raises(ForkError, match="expected a fork that is new, or goes on; it has ended"):
            one.ports[0].arm(one.order, AT + 5)


class TestOrders:
    """Orders that cannot be followed."""

    def test_a_step_that_is_past(self, run: Make) -> None:
        one = run(1, 1)
        one.train(AT + 1)
        with pytest.raises(ForkError, match=f"expected a step to come; step {AT} is past"):
            one.ports[0].arm(one.order, AT)

    def test_another_step_for_a_fork_whose_step_has_come(self, run: Make) -> None:
        one = run(1, 1)
        one.arm()
        one.train(AT)
        with pytest.raises(ForkError, match=f"expected no other fork; fork .* at step {AT} goes on"):
            one.ports[0].arm(one.order, AT + 5)

    def test_a_step_that_has_begun(self, run: Make) -> None:
        one = run(1, 1)
        found: list[str] = []

        def turn(place: str) -> None:
            if place == "bias" and not found:
                try:
                    one.ports[0].arm(one.order, 1)
                except ForkError as exc:
                    found.append(str(exc))

        one.trainings[0].turn = turn
        one.train(2)
        assert "step 1 is past, 1 has begun" in found[0]

    def test_an_order_for_the_step_to_come_is_taken_or_refused_and_never_lost(self, run: Make) -> None:
        one = run(1, 1)
        small = training(shapes={"bias": (5,)})
        small.hook(ForkHooks(small, "run", 0, 1, one.connect))
        fork_hooks, ended = small._hooks, threading.Event()
        assert isinstance(fork_hooks, ForkHooks)

        def train() -> None:
            while not ended.is_set():
                small.step()

        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        taken = 0
        try:
            for attempt in range(40):
                order = replace(one.order, id=uuid.uuid4().hex, specs=tuple(small.specs()), forward=("bias",))
                try:
                    step = small.steps_done + 1 + 20 * attempt
                    fork_hooks.arm(order, step)
                    fork_hooks.agree(order.id)
                except ForkError:
                    continue
                taken += 1
                begun = small.steps_done
                while small.steps_done < max(begun, step) + 1:
                    assert thread.is_alive()
                assert fork_hooks.state(order.id, 0.0).captured
                fork_hooks.cancel(order.id, "it was captured")
        finally:
            ended.set()
            thread.join(TIMEOUT_S)
        assert taken

    def test_a_tensor_that_cannot_be_sent_fails_the_fork_and_not_the_training(self, run: Make) -> None:
        one = run(1, 1)
        one.arm()
        one.trainings[0].turn = lambda place: one.ports[0].updated("nobody", np.zeros(3))
        one.train(AT + 2)
        assert "rank 0 of 'run': 'nobody'" in (one.ended()[0] or "")

    def test_a_second_fork_while_one_is_on_its_way(self, run: Make) -> None:
        one = run(1, 1)
        one.arm()
        with pytest.raises(ForkError, match=f"expected no other fork; fork {one.order.id} at step {AT} goes on"):
            one.ports[0].arm(one.ordered(1), AT + 1)

    def test_after_a_cancelled_one_the_next_is_taken(self, run: Make) -> None:
        one = run(1, 1)
        one.arm()
        one.ports[0].cancel(one.order.id, "the test says so")
        assert "cancelled: the test says so" in (one.ended()[0] or "")
        one.order = one.ordered(1)
        one.arm()
        one.adopt()
        one.train(AT)
        one.intakes[0].whole(TIMEOUT_S)

    def test_another_architecture_is_named(self, run: Make) -> None:
        one = run(1, 1)
        other = training(shapes={**SHAPES, "kernel": (31, 8)})
        with pytest.raises(
            ForkError, match=r"clone 0 of 'run': expected tensor 'kernel/momentum' of float64 \[31, 7\]; found"
        ):
            ForkReceiver(one.order, 0, other, one.connect)
        with pytest.raises(ForkError, match="found no such tensor"):
            ForkReceiver(one.order, 0, training(shapes={"large": (700, 300)}), one.connect)
        fork_hooks = ForkHooks(other, "run", 0, 1, one.connect)
        with pytest.raises(ForkError, match="rank 0 of 'run': expected tensor 'kernel/momentum'"):
            fork_hooks.arm(one.order, AT)

    def test_an_order_for_another_run(self, run: Make) -> None:
        one = run(2, 1)
        with pytest.raises(ForkError, match="expected an order for its 3 ranks; found 'run', 2"):
            ForkHooks(one.trainings[0], "run", 0, 3, one.connect).arm(one.order, AT)

    def test_a_fork_that_is_not_known(self, run: Make) -> None:
        one = run(1, 1)
        with pytest.raises(ForkError, match="expected a fork that was ordered here"):
            one.ports[0].state("nobody", 0.0)
        one.ports[0].cancel("nobody", "is left as it is")


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
