"""Cumulative inference loss: against a simulation that steps through time, and against Algorithm 1 as printed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.planner.curves.losses import (
    UpdateCosts,
    arrivals,
    cumulative_inference_loss,
    inferences_per_version,
    loss_at,
)

whole = st.integers(0, 6)
steps = st.lists(st.integers(1, 5), max_size=6)
whole_costs = st.builds(UpdateCosts, st.integers(1, 6), whole, st.integers(0, 20), st.just(1))
MINUTE = UpdateCosts(iteration_s=1.0, stall_s=0.5, delivery_s=2.0, inference_s=0.25)


def iterations_of(gaps: Sequence[int], start: int) -> list[int]:
    return [start + sum(gaps[: place + 1]) for place in range(len(gaps))]


def curve(iteration: int) -> float:
    return 100.0 / (1 + iteration) + (iteration * 7 % 5)


def simulate(iterations: Sequence[int], costs: UpdateCosts, start: int, inferences: int) -> float:
    """Step through whole seconds: a producer that trains, stalls and sends, a consumer that answers once a second."""
    due = set(iterations)
    arriving: dict[int, int] = {}
    iteration, clock = start, 0
    while due and clock <= inferences:
        iteration, clock = iteration + 1, clock + int(costs.iteration_s)
        if iteration in due:
            due.remove(iteration)
            clock += int(costs.stall_s)
            arriving[clock + int(costs.delivery_s)] = iteration
    total, version = 0.0, start
    for second in range(inferences):
        version = arriving.get(second, version)
        total += curve(version)
    return total


@given(steps, whole_costs, st.integers(0, 9), st.integers(0, 120))
def test_the_loss_is_that_of_a_simulation_in_whole_seconds(
    gaps: list[int], costs: UpdateCosts, start: int, inferences: int
) -> None:
    taken = iterations_of(gaps, start)
    expected = simulate(taken, costs, start, inferences)
    assert cumulative_inference_loss(taken, curve, costs, start, inferences) == pytest.approx(expected, rel=1e-12)


def algorithm_1(iterations: Sequence[int], costs: UpdateCosts, start: int, inferences: int) -> float:
    """Add up Algorithm 1's counts as Algorithm 2 does, in exact fractions."""
    t, stall, delivery, each = (
        Fraction(value).limit_denominator(1000)
        for value in (costs.iteration_s, costs.stall_s, costs.delivery_s, costs.inference_s)
    )
    total, left, version = 0.0, inferences, start
    for number, iteration in enumerate(iterations):
        period = (iteration - version) * t + stall + (delivery if number == 0 else 0)
        answered = min(math.floor(period / each), left)
        total, left, version = total + curve(version) * answered, left - answered, iteration
    return total + curve(version) * left


@given(
    steps,
    st.builds(
        lambda *values: UpdateCosts(*(value / 10 for value in values)),
        *(st.integers(1, 30), st.integers(0, 30), st.integers(0, 90), st.integers(1, 30)),
    ),
    st.integers(0, 9),
    st.integers(0, 200),
)
def test_counting_with_floors_is_algorithm_1(gaps: list[int], costs: UpdateCosts, start: int, inferences: int) -> None:
    taken = iterations_of(gaps, start)
    expected = algorithm_1(taken, costs, start, inferences)
    assert cumulative_inference_loss(taken, curve, costs, start, inferences, floor=True) == pytest.approx(expected)


@given(steps, whole_costs, st.integers(0, 9), st.integers(0, 120), st.booleans())
def test_every_inference_is_answered_by_one_version(
    gaps: list[int], costs: UpdateCosts, start: int, inferences: int, floor: bool
) -> None:
    counts = inferences_per_version(iterations_of(gaps, start), costs, start, inferences, floor)
    assert len(counts) == len(gaps) + 1
    assert counts.min() >= 0
    assert counts.sum() == pytest.approx(inferences)


def test_equation_2_for_a_fixed_interval() -> None:
    """With the interval 4: t'_train = 4.5 s, and 22 s hold floor((22 - 2) / 4.5) = 4 deliveries."""
    expected = sum(curve(k) * n for k, n in zip((0, 4, 8, 12, 16), (26, 18, 18, 18, 8), strict=True))
    assert cumulative_inference_loss([4, 8, 12, 16], curve, MINUTE, 0, 88) == pytest.approx(expected)


def test_a_version_answers_from_its_arrival() -> None:
    assert arrivals([13, 20], MINUTE, start=10).tolist() == [5.5, 13.0]
    assert arrivals([], MINUTE, start=10).tolist() == []


def test_what_arrives_after_the_last_inference_changes_nothing() -> None:
    without = cumulative_inference_loss([4], curve, MINUTE, 0, 40)
    assert cumulative_inference_loss([4, 8], curve, MINUTE, 0, 40) == without
    assert cumulative_inference_loss([4, 6], curve, MINUTE, 0, 40) != without


def test_a_horizon_before_the_first_delivery_is_served_by_the_version_in_use() -> None:
    assert cumulative_inference_loss([1, 2, 3], curve, MINUTE, 0, 13) == 13 * curve(0)


def test_no_inferences_lose_nothing() -> None:
    assert cumulative_inference_loss([3], curve, MINUTE, 0, 0) == 0.0


def test_a_curve_may_take_arrays_or_one_iteration_only() -> None:
    table = [5.0, 4.0, 3.5, 3.0]
    curves = [
        table.__getitem__,
        dict(enumerate(table)).get,
        lambda i: table[int(i)],
        np.array(table).__getitem__,
        lambda i: table[0] if i < 1 else table[i],
    ]
    for each in curves:
        assert loss_at(each, np.array([0, 3, 1])).tolist() == [5.0, 3.0, 4.0]
    assert loss_at(lambda i: 2, np.array([0, 3])).tolist() == [2.0, 2.0], "a curve that ignores the iteration"
    assert loss_at(table.__getitem__, np.array([], dtype=np.int64)).tolist() == []


def test_what_a_curve_raises_is_not_hidden() -> None:
    with pytest.raises(IndexError):
        loss_at([1.0].__getitem__, np.array([0, 1]))
    with pytest.raises(ZeroDivisionError):
        loss_at(lambda i: 1 / 0, np.array([0, 1]))


@pytest.mark.parametrize("name", ["iteration_s", "stall_s", "delivery_s", "inference_s"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_times_that_are_negative_or_not_finite_are_refused(name: str, value: float) -> None:
    times = {"iteration_s": 1.0, "stall_s": 0.0, "delivery_s": 0.0, "inference_s": 1.0, name: value}
    with pytest.raises(ValueError, match=rf"update costs: {name}: expected .*; found {value}"):
        UpdateCosts(**times)


@pytest.mark.parametrize("name", ["iteration_s", "inference_s"])
def test_training_and_answering_take_some_time(name: str) -> None:
    times = {"iteration_s": 1.0, "stall_s": 0.0, "delivery_s": 0.0, "inference_s": 1.0, name: 0.0}
    with pytest.raises(ValueError, match=f"{name}: expected finite seconds above 0; found 0"):
        UpdateCosts(**times)


@pytest.mark.parametrize("iterations", [[5, 4], [4, 4], [3], [2, 5]])
def test_iterations_that_do_not_increase_from_the_start_are_refused(iterations: list[int]) -> None:
    with pytest.raises(ValueError, match=r"schedule: iteration number \d: expected increasing iterations after 3"):
        cumulative_inference_loss(iterations, curve, MINUTE, 3, 10)


def test_iterations_are_whole_numbers() -> None:
    with pytest.raises(TypeError):
        cumulative_inference_loss([4.5], curve, MINUTE, 3, 10)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("inferences", [-1, math.nan, math.inf])
def test_a_negative_or_endless_number_of_inferences_is_refused(inferences: float) -> None:
    with pytest.raises(ValueError, match="inferences: expected a finite number of at least 0"):
        cumulative_inference_loss([4], curve, MINUTE, 3, inferences)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_refused_by_its_iteration(loss: float) -> None:
    with pytest.raises(ValueError, match="curve at iteration 4: expected a finite loss; found"):
        cumulative_inference_loss([4, 5], lambda i: loss if i == 4 else 1.0, MINUTE, 3, 10)
