"""Schedules by rules: against the paper's algorithms, run step by step as it prints them where they can run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.planner.curves.losses import UpdateCosts, arrivals, cumulative_inference_loss
from tensorvine.planner.schedules.optimal import optimal_schedule
from tensorvine.planner.schedules.schedule import (
    Schedule,
    closed_form_schedule,
    epoch_schedule,
    fixed_schedule,
    greedy_schedule,
    greedy_threshold,
)

Method = Callable[..., Schedule]
METHODS: dict[str, Method] = {
    "fixed": fixed_schedule,
    "greedy": lambda *args: greedy_schedule(*args, threshold=0.01),
    "epoch": lambda *args: epoch_schedule(*args, epoch=5),
    "closed form": closed_form_schedule,
    "optimal": optimal_schedule,
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)

seconds = st.one_of(st.floats(0, 5), st.integers(0, 5))
costs_drawn = st.builds(UpdateCosts, st.floats(0.1, 4), seconds, st.floats(0, 15), st.floats(0.1, 4))
losses_drawn = st.lists(st.integers(-20, 100).map(lambda n: n / 10), min_size=2, max_size=30)
COSTS = UpdateCosts(iteration_s=1.0, stall_s=1.0, delivery_s=2.0, inference_s=0.5)


def falling(iteration: int) -> float:
    return 0.9**iteration


def algorithm_2(losses: Sequence[float], costs: UpdateCosts, inferences: float) -> tuple[float, int]:
    """Return the least loss and its interval: Algorithm 2 with counts in real numbers, line by line."""
    best = (math.inf, 0)
    for interval in range(1, len(losses)):
        total, left, loss, iteration, number = 0.0, inferences, losses[0], interval, 1
        while iteration < len(losses):
            period = interval * costs.iteration_s + costs.stall_s + (costs.delivery_s if number == 1 else 0)
            answered = min(period / costs.inference_s, left)
            total, left, loss = total + loss * answered, left - answered, losses[iteration]
            iteration, number = iteration + interval, number + 1
        total += loss * left
        best = min(best, (total, interval))
    return best


@given(losses_drawn, costs_drawn, st.integers(0, 60))
def test_the_fixed_interval_is_algorithm_2s_or_no_checkpoint_where_that_is_better(
    losses: list[float], costs: UpdateCosts, inferences: int
) -> None:
    found = fixed_schedule(losses.__getitem__, costs, 0, len(losses) - 1, inferences)
    expected = min(algorithm_2(losses, costs, inferences)[0], losses[0] * inferences)
    assert found.predicted_loss == pytest.approx(expected, rel=1e-9, abs=1e-9)
    if found.interval is not None:
        assert set(np.diff((0, *found.iterations))) == {found.interval}


def test_among_equal_intervals_the_longest_wins() -> None:
    steps = [3.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    found = fixed_schedule(steps.__getitem__, UpdateCosts(1.0, 0.0, 0.0, 1.0), 0, 6, 10)
    assert (found.interval, found.iterations) == (2, (2, 4, 6))
    late = [3.0] * 6 + [1.0]
    assert fixed_schedule(late.__getitem__, UpdateCosts(1.0, 0.0, 0.0, 1.0), 0, 6, 10).iterations == (6,)


@given(losses_drawn, costs_drawn, st.integers(0, 60), st.floats(0, 3))
def test_greedy_takes_what_has_fallen_by_more_than_the_threshold(
    losses: list[float], costs: UpdateCosts, inferences: int, threshold: float
) -> None:
    found = greedy_schedule(losses.__getitem__, costs, 0, len(losses) - 1, inferences, threshold)
    reached, taken = losses[0], list[int]()
    for iteration in range(1, len(losses)):
        if losses[iteration] < reached and abs(losses[iteration] - reached) > threshold:
            taken.append(iteration)
            reached = losses[iteration]
    in_time = [i for i, at in zip(taken, arrivals(taken, costs, 0), strict=True) if at < inferences * costs.inference_s]
    assert found.iterations == tuple(in_time)


def test_the_greedy_threshold_is_mean_plus_standard_deviation_of_the_steps() -> None:
    assert greedy_threshold([9.0, 7.0, 8.0, 5.0]) == pytest.approx(2.0 + math.sqrt(2 / 3))


def test_noise_drives_the_greedy_threshold_up_until_nothing_is_taken() -> None:
    """The fragility of the paper's rule: the same curve, losses measured with and without noise."""
    smooth = [falling(i) for i in range(50)]
    noisy = smooth + np.random.default_rng(0).normal(0, 0.5, 50)
    assert len(greedy_schedule(falling, COSTS, 10, 60, 200, greedy_threshold(smooth)).iterations) > 1
    assert greedy_schedule(falling, COSTS, 10, 60, 200, greedy_threshold(noisy.tolist())).iterations == ()


def test_epochs_end_at_their_multiples() -> None:
    assert epoch_schedule(falling, COSTS, 0, 20, 100, epoch=5).iterations == (5, 10, 15, 20)
    assert epoch_schedule(falling, COSTS, 12, 29, 100, epoch=5).iterations == (15, 20, 25)
    assert epoch_schedule(falling, COSTS, 15, 21, 100, epoch=5).iterations == (20,)
    assert epoch_schedule(falling, COSTS, 0, 20, 100, epoch=21).iterations == ()
    assert epoch_schedule(falling, COSTS, 0, 20, 100, epoch=5).interval == 5


def test_the_closed_form_spaces_an_exponential_evenly_far_from_its_end() -> None:
    """There l(x) - l(e) is about |l'| / b: the interval is sqrt(2 t_p / (b t)), here 20."""
    costs = UpdateCosts(iteration_s=0.1, stall_s=0.02, delivery_s=1.0, inference_s=0.01)
    gaps = np.diff(closed_form_schedule(lambda i: np.exp(-i / 1000), costs, 0, 10_000, 500_000).iterations)
    assert gaps[:50].min() >= 19
    assert gaps[:50].max() <= 21


@pytest.mark.parametrize("exponent", [0.3, 0.5, 1.0])
def test_the_closed_form_is_close_to_the_optimum_on_smooth_curves(exponent: float) -> None:
    costs = UpdateCosts(iteration_s=0.1, stall_s=0.05, delivery_s=1.0, inference_s=0.01)
    args = (lambda i: (i + 1.0) ** -exponent, costs, 0, 5000, 60_000)
    assert closed_form_schedule(*args).predicted_loss <= optimal_schedule(*args).predicted_loss * 1.02


def test_without_a_stall_the_closed_form_takes_every_improvement() -> None:
    costs = UpdateCosts(1.0, 0.0, 0.0, 1.0)
    assert closed_form_schedule([5.0, 4, 6, 3, 3, 2].__getitem__, costs, 0, 5, 100).iterations == (1, 3, 5)


@every_method
@given(losses=losses_drawn, costs=costs_drawn, start=st.integers(0, 20), inferences=st.integers(0, 60))
def test_every_schedule_keeps_to_its_window_and_predicts_what_it_takes(
    method: Method, losses: list[float], costs: UpdateCosts, start: int, inferences: int
) -> None:
    stop = start + len(losses) - 1

    def curve(iteration: int) -> float:
        return losses[iteration - start]

    found = method(curve, costs, start, stop, inferences)
    assert all(start < each <= stop for each in found.iterations)
    assert all(arrivals(found.iterations, costs, start) < inferences * costs.inference_s)
    again = cumulative_inference_loss(found.iterations, curve, costs, start, inferences)
    assert found.predicted_loss == pytest.approx(again)


@given(losses_drawn, costs_drawn, st.integers(0, 60), st.floats(0, 3), st.integers(1, 9))
def test_no_rule_is_better_than_the_exact_schedule(
    losses: list[float], costs: UpdateCosts, inferences: int, threshold: float, epoch: int
) -> None:
    args = (losses.__getitem__, costs, 0, len(losses) - 1, inferences)
    best = optimal_schedule(*args).predicted_loss
    for found in (
        fixed_schedule(*args),
        greedy_schedule(*args, threshold),
        epoch_schedule(*args, epoch),
        closed_form_schedule(*args),
    ):
        assert best <= found.predicted_loss + 1e-9


@every_method
def test_a_horizon_before_the_first_delivery_leaves_nothing_to_take(method: Method) -> None:
    costs = UpdateCosts(iteration_s=1.0, stall_s=0.0, delivery_s=50.0, inference_s=1.0)
    assert method(falling, costs, 0, 20, 50) == Schedule((), method(falling, costs, 0, 20, 50).interval, 50.0)


@every_method
def test_no_inferences_need_no_checkpoint(method: Method) -> None:
    found = method(falling, COSTS, 0, 20, 0)
    assert (found.iterations, found.predicted_loss) == ((), 0.0)


@pytest.mark.parametrize("method", ["fixed", "greedy", "closed form", "optimal"])
@pytest.mark.parametrize("curve", [lambda i: 0.1 * i, lambda i: 2.0], ids=["rising", "constant"])
def test_a_curve_that_never_falls_is_worth_no_checkpoint(method: str, curve: Callable[[int], float]) -> None:
    assert METHODS[method](curve, COSTS, 3, 20, 100).iterations == ()


@every_method
@pytest.mark.parametrize(("start", "stop"), [(5, 5), (5, 4)])
def test_a_window_without_iterations_is_refused(method: Method, start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=rf"expected stop to be after start={start}; found {stop}"):
        method(falling, COSTS, start, stop, 10)


@every_method
def test_a_curve_with_nan_is_refused(method: Method) -> None:
    with pytest.raises(ValueError, match="curve at iteration 7: expected a finite loss; found nan"):
        method(lambda i: math.nan if i == 7 else 1.0 / (1 + i), COSTS, 0, 20, 100)


@every_method
@pytest.mark.parametrize("inferences", [-1, math.nan])
def test_a_negative_number_of_inferences_is_refused(method: Method, inferences: float) -> None:
    with pytest.raises(ValueError, match="inferences: expected a finite number of at least 0"):
        method(falling, COSTS, 0, 20, inferences)


@pytest.mark.parametrize("threshold", [math.nan, math.inf, -0.1])
def test_a_threshold_that_compares_with_nothing_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match="greedy schedule: expected a finite threshold of at least 0"):
        greedy_schedule(falling, COSTS, 0, 20, 100, threshold)


@pytest.mark.parametrize("losses", [[], [1.0], [1.0, math.nan], [[1.0, 2.0]]])
def test_a_warm_up_without_steps_gives_no_threshold(losses: list[float]) -> None:
    with pytest.raises(ValueError, match="greedy threshold: expected"):
        greedy_threshold(losses)


@pytest.mark.parametrize("epoch", [0, -3])
def test_an_epoch_without_iterations_is_refused(epoch: int) -> None:
    with pytest.raises(ValueError, match="expected an epoch of at least one iteration"):
        epoch_schedule(falling, COSTS, 0, 20, 100, epoch)


NOISE = np.random.default_rng(0).normal(0, 0.05, 10_001)
LONG: dict[str, Callable[..., object]] = {
    "exponential": lambda i: np.exp(-i / 2000),
    "power law": lambda i: (i + 1.0) ** -0.5,
    "measured": lambda i: np.exp(-i / 2000) + NOISE[i],
    "line": lambda i: 1 - i / 20_000,
    "one by one": lambda i: math.exp(-i / 2000),
}


@pytest.mark.parametrize("method", ["fixed", "greedy", "epoch", "closed form", "optimal"])
@pytest.mark.parametrize("curve", LONG.values(), ids=LONG)
@pytest.mark.parametrize("stall", [0.0, 0.01, 30.0, 100.0])
def test_ten_thousand_iterations_are_planned_within_a_second(
    method: str, curve: Callable[..., object], stall: float
) -> None:
    costs = UpdateCosts(iteration_s=0.1, stall_s=stall, delivery_s=0.5, inference_s=0.01)
    began = time.process_time()
    METHODS[method](curve, costs, 0, 10_000, 110_000)
    assert time.process_time() - began < 3.0, "a second on a free machine"


def test_on_tc1s_shape_the_methods_stand_as_in_the_paper() -> None:
    """216 iterations an epoch, 50,000 requests, 16 epochs: all plans beat the epochs, the exact one all others."""
    costs = UpdateCosts(iteration_s=0.06, stall_s=0.05, delivery_s=0.6, inference_s=0.005)

    def curve(iteration: np.ndarray) -> np.ndarray:
        return 2.5 * (1 + iteration / 150) ** -0.8 + 0.2

    args = (curve, costs, 216, 216 * 17, 50_000)
    epochs, exact = epoch_schedule(*args, 216), optimal_schedule(*args)
    greedy = greedy_schedule(*args, greedy_threshold(curve(np.arange(216)).tolist()))
    assert len(epochs.iterations) == 16
    for plan in (fixed_schedule(*args), greedy, closed_form_schedule(*args)):
        assert exact.predicted_loss < plan.predicted_loss < 0.99 * epochs.predicted_loss
