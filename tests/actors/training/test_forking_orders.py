"""Orders of forks, in one process: ranks take them for the same step, and refuse what they cannot follow."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from tensorvine.actors.training.fork import sender
from tensorvine.actors.training.fork.fork_hooks import ForkHooks
from tensorvine.actors.training.fork.receiver import ForkReceiver
from tensorvine.store.errors import ForkError

from tests.support.fork_runs import AT, TIMEOUT_S, Make, expected, training
from tests.support.plain_training import SHAPES


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
            with pytest.raises(ForkError, match="expected a step that has not begun; found 1"):
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
        failed = f"expected within 0.05 s that all ranks agree on step {AT}; they did not"
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
        with pytest.raises(ForkError, match=f"expected step {AT} to be the last step that ended; found {AT + 1}"):
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
        with pytest.raises(ForkError, match="expected a fork that is new or in progress; it has ended"):
            one.ports[0].arm(one.order, AT + 5)


class TestOrders:
    """Orders that cannot be followed."""

    def test_a_step_that_is_past(self, run: Make) -> None:
        one = run(1, 1)
        one.train(AT + 1)
        with pytest.raises(ForkError, match=f"expected a step that has not begun; found {AT}"):
            one.ports[0].arm(one.order, AT)

    def test_another_step_for_a_fork_whose_step_has_come(self, run: Make) -> None:
        one = run(1, 1)
        one.arm()
        one.train(AT)
        with pytest.raises(ForkError, match=f"expected no other fork in progress; found fork .* at step {AT}"):
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
        assert "found 1, but 1 has begun" in found[0]

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
        with pytest.raises(
            ForkError, match=f"expected no other fork in progress; found fork {one.order.id} at step {AT}"
        ):
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
        with pytest.raises(ForkError, match="expected an order for its 3 ranks; found 2 ranks of 'run'"):
            ForkHooks(one.trainings[0], "run", 0, 3, one.connect).arm(one.order, AT)

    def test_a_fork_that_is_not_known(self, run: Make) -> None:
        one = run(1, 1)
        with pytest.raises(ForkError, match="expected a fork that this rank has accepted"):
            one.ports[0].state("nobody", 0.0)
        one.ports[0].cancel("nobody", "is left as it is")
