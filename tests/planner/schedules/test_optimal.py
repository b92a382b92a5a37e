"""The exact schedule: against all subsets of few iterations, and against a plain table of states for more."""

from __future__ import annotations

import math
import random
import time
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensorvine.planner.curves.losses import UpdateCosts, cumulative_inference_loss
from tensorvine.planner.schedules.optimal import optimal_schedule

whole_costs = st.builds(UpdateCosts, *(st.integers(1, 3), st.integers(0, 4), st.integers(0, 12), st.just(1)))
real_costs = st.builds(UpdateCosts, *(st.floats(0.1, 3), st.floats(0, 4), st.floats(0, 12), st.floats(0.1, 3)))
whole_losses = st.lists(st.integers(-5, 15), min_size=2, max_size=9)
real_losses = st.lists(st.floats(-1, 1), min_size=2, max_size=9)
FREE = UpdateCosts(iteration_s=1.0, stall_s=0.0, delivery_s=0.0, inference_s=1.0)


def brute_force(losses: list[float], costs: UpdateCosts, inferences: float, price: float) -> tuple[float, int]:
    """Return the least loss with the price, of all subsets, and the fewest checkpoints that reach it."""
    length = len(losses)
    return min(
        (cumulative_inference_loss(taken, losses.__getitem__, costs, 0, inferences) + price * count, count)
        for count in range(length)
        for taken in combinations(range(1, length), count)
    )


def table(losses: np.ndarray, costs: UpdateCosts, inferences: float, price: float) -> float:
    """Return the least loss: D[k][j], k checkpoints of which j is the last, by all of its predecessors."""
    horizon, places = inferences * costs.inference_s, np.arange(len(losses))
    times = places * costs.iteration_s
    best = losses[0] * horizon
    until = np.where(places == 0, 0.0, math.inf)
    for count in range(1, len(losses)):
        first = costs.delivery_s if count == 1 else 0.0
        edges = losses[:, None] * (times[None, :] - times[:, None] + costs.stall_s + first)
        edges[places[:, None] >= places[None, :]] = math.inf
        until = (until[:, None] + edges + price * costs.inference_s).min(axis=0)
        left = horizon - times - count * costs.stall_s - costs.delivery_s
        best = min(best, *np.where(left >= 0, until + losses * left, math.inf))
    return float(best / costs.inference_s)


@given(whole_losses, whole_costs, st.integers(0, 60), st.integers(0, 20), st.booleans())
@example([9, 5, 5, 1], UpdateCosts(1, 0, 0, 1), 10, 0, False)  # no stall: still nothing for an equal loss
@example([9, 5, 1], UpdateCosts(1, 0, 12, 1), 12, 0, False)  # the horizon ends before the first delivery
@example([9, 1, 5, 0], UpdateCosts(1, 1, 0, 1), 20, 0, False)  # a rise between
@example([0, -1, -2], UpdateCosts(1, 1, 0, 1), 20, 0, False)  # losses below zero
@settings(max_examples=300)
def test_no_subset_is_better_nor_as_good_with_fewer_checkpoints(
    losses: list[float], costs: UpdateCosts, inferences: int, price: int, ordered: bool
) -> None:
    losses = sorted(losses, reverse=True) if ordered else losses
    found = optimal_schedule(losses.__getitem__, costs, 0, len(losses) - 1, inferences, price=price)
    count = len(found.iterations)
    assert (found.predicted_loss + price * count, count) == brute_force(losses, costs, inferences, price)


@given(real_losses, real_costs, st.floats(0, 60), st.just(0.0) | st.floats(0, 20), st.booleans())
@settings(max_examples=300)
def test_no_subset_is_better_in_real_numbers(
    losses: list[float], costs: UpdateCosts, inferences: float, price: float, ordered: bool
) -> None:
    losses = sorted(losses, reverse=True) if ordered else losses
    found = optimal_schedule(losses.__getitem__, costs, 0, len(losses) - 1, inferences, price=price)
    least = brute_force(losses, costs, inferences, price)[0]
    assert found.predicted_loss + price * len(found.iterations) == pytest.approx(least, rel=1e-9, abs=1e-9)


@given(st.randoms(use_true_random=False), real_costs)
@settings(max_examples=8, deadline=None)
def test_no_subset_of_twelve_iterations_is_better(chance: random.Random, costs: UpdateCosts) -> None:
    losses = [chance.random() for _ in range(13)]
    for each in (losses, sorted(losses, reverse=True)):
        inferences = chance.uniform(1, 20) / costs.inference_s
        found = optimal_schedule(each.__getitem__, costs, 0, 12, inferences)
        assert found.predicted_loss == pytest.approx(brute_force(each, costs, inferences, 0.0)[0], rel=1e-9)


SHAPES = {
    "exponential": lambda i: np.exp(-i / 20),
    "power law": lambda i: (i + 1.0) ** -0.4,
    "line": lambda i: 2 - i / 50,
    "stairs": lambda i: np.exp(-(i // 8) * 0.5) - i * 1e-4,
    "cliff at the end": lambda i: np.where(i < 60, 2 - i * 0.002, 0.1),
    "two phases": lambda i: np.exp(-i / 5.0) + 1 / (1 + np.exp((i - 40) / 3)),
    "noise": lambda i: np.exp(-i / 20) + np.random.default_rng(1).normal(0, 0.1, 90)[i],
    "drops": lambda i: -np.cumsum(np.random.default_rng(2).exponential(size=90) ** 3)[i],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stall", [0.0, 0.01, 0.3, 2.0, 9.0])
@pytest.mark.parametrize("horizon", [20, 60, 75, 100, 400])
def test_no_schedule_of_seventy_iterations_is_better(shape: str, stall: float, horizon: float) -> None:
    costs = UpdateCosts(iteration_s=1.0, stall_s=stall, delivery_s=3.0, inference_s=0.5)
    curve = SHAPES[shape]
    losses = curve(np.arange(71))
    for price in (0.0, 0.5, 5.0):
        found = optimal_schedule(curve, costs, 0, 70, horizon * 2, price=price)
        least = table(losses, costs, horizon * 2, price)
        assert found.predicted_loss + price * len(found.iterations) == pytest.approx(least, rel=1e-9)


def test_losses_that_differ_by_next_to_nothing_do_no_harm() -> None:
    losses = [1.0, 1e-20, 1e-21, 5e-324, 0.0]
    found = optimal_schedule(losses.__getitem__, UpdateCosts(1.0, 0.5, 0.0, 1.0), 0, 4, 100)
    assert found.iterations == (1,)


def test_the_count_of_iterations_starts_where_it_is_told() -> None:
    here = optimal_schedule(lambda i: 0.9**i, UpdateCosts(1.0, 1.0, 1.0, 1.0), 0, 30, 100)
    there = optimal_schedule(lambda i: 0.9 ** (i - 500), UpdateCosts(1.0, 1.0, 1.0, 1.0), 500, 530, 100)
    assert there.iterations == tuple(500 + each for each in here.iterations)


def test_without_a_stall_every_improvement_is_taken() -> None:
    assert optimal_schedule([5.0, 4, 6, 3, 3, 2].__getitem__, FREE, 0, 5, 100).iterations == (1, 3, 5)


def test_a_higher_price_takes_fewer_checkpoints_for_a_higher_loss() -> None:
    args = (lambda i: 0.97**i, UpdateCosts(1.0, 0.2, 1.0, 0.5), 0, 100, 300)
    found = [optimal_schedule(*args, price=price) for price in (0.0, 0.5, 2.0, 10.0, 1000.0)]
    for cheap, dear in pairwise(found):
        assert len(cheap.iterations) > len(dear.iterations)
        assert cheap.predicted_loss < dear.predicted_loss
    assert found[-1].iterations == ()


@pytest.mark.parametrize("price", [-1.0, math.nan, math.inf])
def test_a_price_that_is_negative_or_not_finite_is_refused(price: float) -> None:
    with pytest.raises(ValueError, match="optimal schedule: expected a finite price of at least 0; found"):
        optimal_schedule(lambda i: 1.0 / (1 + i), FREE, 0, 5, 10, price=price)


class TestMost:
    COSTS = UpdateCosts(iteration_s=1.0, stall_s=0.3, delivery_s=1.0, inference_s=1.0)

    @given(whole_losses, whole_costs, st.integers(0, 60), st.integers(0, 8))
    def test_it_is_the_best_schedule_of_its_size(
        self, losses: list[float], costs: UpdateCosts, inferences: int, most: int
    ) -> None:
        found = optimal_schedule(losses.__getitem__, costs, 0, len(losses) - 1, inferences, most=most)
        assert len(found.iterations) <= most
        same_size = combinations(range(1, len(losses)), len(found.iterations))
        least = min(cumulative_inference_loss(taken, losses.__getitem__, costs, 0, inferences) for taken in same_size)
        assert found.predicted_loss == pytest.approx(least)

    @pytest.mark.parametrize("most", [0, 1, 2, 3, 5, 8, 13])
    def test_no_price_gives_a_better_schedule_with_no_more_checkpoints(self, most: int) -> None:
        asked = (lambda i: 3.0 * 0.97**i, self.COSTS, 0, 200, 300.0)
        found = optimal_schedule(*asked, most=most)
        assert len(found.iterations) <= most
        priced = [optimal_schedule(*asked, price=price) for price in np.geomspace(1e-3, 1e3, 30).tolist()]
        least = min(schedule.predicted_loss for schedule in priced if len(schedule.iterations) <= most)
        assert found.predicted_loss <= least * (1 + 1e-9)

    def test_a_bound_above_the_optimum_changes_nothing(self) -> None:
        asked = (lambda i: 3.0 * 0.97**i, self.COSTS, 0, 200, 300.0)
        assert optimal_schedule(*asked, most=10_000) == optimal_schedule(*asked)

    def test_a_negative_bound_is_refused(self) -> None:
        with pytest.raises(ValueError, match="most: expected a number of checkpoints of at least 0; found -1"):
            optimal_schedule(lambda i: 1.0, self.COSTS, 0, 5, 5.0, most=-1)

    def test_ten_thousand_iterations_are_planned_in_less_than_a_second(self) -> None:
        def curve(i: object) -> object:
            return 2.0 * np.exp(-np.asarray(i) / 3000) + 0.1

        begun = time.process_time()
        found = optimal_schedule(curve, self.COSTS, 0, 10_000, 10_000.0, most=200)
        assert time.process_time() - begun < 5
        assert 150 < len(found.iterations) <= 200
