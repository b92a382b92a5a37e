"""Streams: when to plan, what a plan may name, and how losses that change their course are followed."""

from __future__ import annotations

import itertools
import math
import time
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorvine.planner.curves.drift import RECENT, drift, jump, spikes
from tensorvine.planner.curves.losses import UpdateCosts
from tensorvine.planner.schedules.request import METHODS, PlanRequest
from tensorvine.planner.schedules.schedule import Schedule, fixed_schedule, greedy_schedule, greedy_threshold
from tensorvine.planner.schedules.stream import (
    CHANGED,
    FURTHEST,
    KEPT,
    MOST_LOSSES,
    SPACING,
    Stream,
)

FORMS = ("exp3",)


def falling(n: int, noise: float = 0.1, seed: int = 0, pace: float = 0.005, end: float = 0.3) -> np.ndarray:
    losses = 2 * np.exp(-pace * np.arange(n)) + end
    return losses * (1 + np.random.default_rng(seed).normal(0, noise, n))


def request(**values: object) -> PlanRequest:
    return PlanRequest(**{"forms": FORMS, **values})  # pyright: ignore[reportArgumentType]


@dataclass
class Run:
    """Drives a stream as a training does: one loss per iteration, a stall for each update that is due."""

    stream: Stream
    stall_s: float = 0.05
    iteration_s: float = 0.1
    published: list[int] = field(default_factory=list)
    plans: list[tuple[int, Schedule]] = field(default_factory=list)

    def train(self, losses: np.ndarray, batch: int = 1) -> Run:
        begin = self.now + 1
        for at in range(0, len(losses), batch):
            part = losses[at : at + batch]
            self.stream.observe(begin + at, part.tolist())
            for i in range(begin + at, begin + at + len(part)):
                self.stream.iteration_took(self.iteration_s)
                if self.plans and i in self.plans[-1][1].iterations:
                    self.published.append(i)
                    self.stream.stalled(self.stall_s)
                self.now = i
            if self.stream.wants_plan(self.now):
                self.plans.append((self.now, self.stream.plan(self.now)))
        return self

    now: int = -1


def running(request: PlanRequest, losses: np.ndarray) -> Run:
    return Run(Stream(request)).train(losses)


@cache
def _steady() -> Run:
    return running(request(stop=4000), falling(1000, 0.05))


def steady() -> Run:
    """A training of 1000 iterations that fell as it should; it may go on."""
    return deepcopy(_steady())


class TestWhen:
    """It is time to plan when something is known that was not before, and not otherwise."""

    def test_first_after_the_warm_up_and_then_once_the_costs_are_known(self) -> None:
        run = running(request(warmup=30, stop=400), falling(100))
        assert [now for now, _ in run.plans][:2] == [29, 30]
        assert run.plans[0][1].iterations == (30,)
        assert math.isnan(run.plans[0][1].predicted_loss)
        assert len(run.plans[1][1].iterations) > 3

    def test_without_a_stall_measured_only_the_first_version_is_published(self) -> None:
        stream = Stream(request(warmup=30, stop=400))
        stream.observe(0, falling(35).tolist())
        stream.iteration_took(0.1)
        assert stream.plan(34).iterations == (35,)
        stream.observe(35, falling(100)[35:].tolist())
        assert stream.plan(99).iterations == ()
        stream.stalled(0.05)
        assert stream.wants_plan(99)
        assert stream.plan(99).iterations

    @pytest.mark.parametrize("noise", [0.0, 0.3])
    @pytest.mark.parametrize("stop", [3000, None])
    def test_a_steady_curve_takes_few_plans(self, noise: float, stop: int | None) -> None:
        run = running(request(stop=stop), falling(3000, noise))
        doublings = math.log2(3000 / 50)
        assert len(run.plans) <= 2 + doublings + 4
        assert len(run.published) > 5

    def test_when_the_losses_have_doubled(self) -> None:
        stream = Stream(request(warmup=50, stop=10_000))
        stream.iteration_took(0.1)
        stream.stalled(0.05)
        losses = falling(400, 0.02)
        stream.observe(0, losses[:100].tolist())
        stream.plan(99)
        stream.observe(100, losses[100:199].tolist())
        assert not stream.wants_plan(198)
        stream.observe(199, losses[199:200].tolist())
        assert stream.wants_plan(199)

    @pytest.mark.parametrize("what", ["iteration_took", "stalled", "answered", "delivered"])
    @pytest.mark.parametrize("factor", [1.1 * CHANGED, 1 / (1.1 * CHANGED)])
    def test_when_a_cost_has_changed_and_not_when_it_only_wavered(self, what: str, factor: float) -> None:
        stream = Stream(request(warmup=50, stop=10_000))
        tell = {
            "iteration_took": stream.iteration_took,
            "stalled": stream.stalled,
            "answered": stream.answered,
            "delivered": lambda seconds: stream.delivered(seconds, 1000, "shared"),
        }
        for each in tell.values():
            each(0.1)
        losses = falling(150, 0.02)
        stream.observe(0, losses[:100].tolist())
        stream.plan(99)
        stream.observe(100, losses[100:150].tolist())
        for _ in range(2 * KEPT):
            tell[what](0.1 * 1.2)
        assert not stream.wants_plan(149)
        for _ in range(KEPT // 2):  # not yet the median
            tell[what](0.1 * factor)
        for _ in range(KEPT):
            tell[what](0.1 * factor)
        assert stream.wants_plan(149)

    def test_not_when_a_stall_that_hardly_matters_has_doubled(self) -> None:
        stream = Stream(request(warmup=50, stop=10_000))
        stream.iteration_took(1.0)
        stream.stalled(0.001)
        stream.observe(0, falling(150, 0.02)[:100].tolist())
        stream.plan(99)
        stream.observe(100, falling(150, 0.02)[100:].tolist())
        for _ in range(KEPT):
            stream.stalled(0.002)
        assert not stream.wants_plan(149)

    def test_never_within_the_spacing(self) -> None:
        run = running(request(warmup=20), np.random.default_rng(1).lognormal(0, 2, 1000))
        times = [now for now, _ in run.plans][1:]
        assert min(np.diff(times)) >= SPACING

    def test_not_before_the_warm_up_nor_from_the_end_on(self) -> None:
        stream = Stream(request(warmup=10, stop=30))
        assert not stream.wants_plan(0)
        stream.observe(0, [1.0] * 9)
        assert not stream.wants_plan(8)
        stream.observe(9, [1.0])
        assert stream.wants_plan(9)
        assert not stream.wants_plan(30)
        assert stream.plan(30).iterations == ()
        assert stream.plan(99).iterations == ()

    def test_the_warm_up_of_a_training_that_is_taken_up_again_counts_what_was_seen(self) -> None:
        stream = Stream(request(warmup=10))
        stream.observe(5000, [1.0] * 9)
        assert not stream.wants_plan(5008)
        stream.observe(5009, [1.0])
        assert stream.wants_plan(5009)

    def test_asking_is_cheap(self) -> None:
        run = running(request(stop=100_000), falling(3000))
        began = time.process_time()
        for _ in range(100):
            run.stream.wants_plan(3001)
        assert time.process_time() - began < 0.5


class TestWhat:
    """What a plan names."""

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize(("stop", "inferences"), [(600, None), (None, None), (None, 500.0), (600, 10_000.0)])
    def test_every_method_plans_from_now_to_the_end(
        self, method: str, stop: int | None, inferences: float | None
    ) -> None:
        asked = request(method=method, stop=stop, inferences=inferences, epoch=40, forms=("exp3", "pow3"))
        run = running(asked, falling(300, 0.05))
        assert run.published[0] == 50
        assert len(run.published) > 2
        for now, schedule in run.plans:
            assert all(now < i <= (stop or 2 * now + 2) for i in schedule.iterations)

    def test_fixed_and_greedy_and_epoch_are_those_of_the_schedules(self) -> None:
        costs = UpdateCosts(0.1, 0.05, 0.2, 0.02)
        losses = falling(100, 0.05)
        for method in ("fixed", "greedy", "epoch"):
            stream = Stream(request(method=method, stop=400, epoch=25))
            stream.observe(0, losses.tolist())
            stream.iteration_took(costs.iteration_s)
            stream.stalled(costs.stall_s)
            stream.delivered(costs.delivery_s, 10**6, "shared")
            stream.answered(costs.inference_s)
            assert stream.costs == costs
            schedule = stream.plan(99)
            curve = stream.curve
            assert curve is not None
            if method == "fixed":
                expected = fixed_schedule(curve, costs, 100, 400, 300 * 5).iterations
            elif method == "greedy":
                expected = greedy_schedule(curve, costs, 100, 400, 1500, greedy_threshold(losses[:50])).iterations
            else:
                expected = tuple(range(125, 400, 25))
            assert schedule.iterations == (100, *expected)

    def test_an_update_that_is_overdue_comes_the_sooner(self) -> None:
        early, late = (Stream(request(stop=1000, slowdown=None)) for _ in range(2))
        for stream in (early, late):
            stream.iteration_took(0.1)
            stream.stalled(1.0)
            stream.observe(0, falling(50, 0.0).tolist())
            stream.plan(49)
        early.observe(50, falling(100, 0.0)[50:].tolist())
        late.schedule = Schedule((50, 99), None, 0.0)  # published just now
        late.observe(50, falling(100, 0.0)[50:].tolist())
        early.schedule = Schedule((50,), None, 0.0)
        assert early.plan(99).iterations[0] < late.plan(99).iterations[0]

    def test_the_inferences_are_used_up(self) -> None:
        stream = Stream(request(stop=10_000, inferences=100))
        stream.iteration_took(1.0)
        stream.stalled(0.01)
        stream.observe(0, falling(50, 0.0).tolist())
        first = stream.plan(49)
        assert 60 < first.iterations[-1] < 50 + 100 + 2
        stream.observe(50, falling(300, 0.0)[50:].tolist())
        assert stream.plan(299).iterations == ()

    def test_a_horizon_that_ends_before_the_first_delivery_has_the_first_version_alone(self) -> None:
        stream = Stream(request(stop=60))
        stream.iteration_took(0.1)
        stream.stalled(0.01)
        stream.delivered(100.0, 10**9, "files")
        stream.observe(0, falling(50).tolist())
        assert stream.plan(49).iterations == (50,)

    def test_an_end_that_is_not_known_is_planned_for_as_far_as_was_seen(self) -> None:
        stream = Stream(request(stop=None))
        stream.iteration_took(0.1)
        stream.stalled(0.001)
        stream.observe(0, falling(200, 0.0).tolist())
        schedule = stream.plan(199)
        assert 380 < schedule.iterations[-1] <= 399
        stream.observe(200, falling(400, 0.0)[200:399].tolist())
        assert not stream.wants_plan(398)
        assert stream.wants_plan(399)

    def test_an_end_that_is_far_away_is_planned_for_in_parts(self) -> None:
        stream = Stream(request(stop=10**9))
        stream.iteration_took(0.1)
        stream.stalled(0.001)
        stream.observe(0, falling(200, 0.0, pace=1e-5).tolist())
        began = time.process_time()
        schedule = stream.plan(199)
        assert time.process_time() - began < 3
        assert schedule.iterations[-1] <= 199 + FURTHEST
        assert stream.wants_plan(199 + FURTHEST)

    def test_a_higher_price_means_fewer_updates(self) -> None:
        counts: list[int] = []
        for price in (0.0, 1.0, 100.0):
            stream = Stream(request(stop=1000, price=price))
            stream.iteration_took(0.1)
            stream.stalled(0.01)
            stream.observe(0, falling(100, 0.0).tolist())
            counts.append(len(stream.plan(99).iterations))
        assert counts[0] > counts[1] > counts[2] >= 1


class TestWhyNone:
    """A plan without an update says why."""

    @staticmethod
    def why(losses: np.ndarray, stall_s: float | None = 0.001, **asked: object) -> str:
        stream = Stream(request(stop=2000, **asked))
        stream.observe(0, losses.tolist())
        stream.iteration_took(0.01)
        stream.published(50)
        if stall_s is not None:
            stream.stalled(stall_s)
        schedule = stream.plan(len(losses) - 1)
        assert bool(schedule.iterations) != bool(stream.why)
        return stream.why

    def test_a_plan_with_updates_has_no_reason(self) -> None:
        assert not self.why(falling(200, 0.0))

    def test_losses_that_are_not_finite(self) -> None:
        assert "not finite" in self.why(np.full(200, math.nan))

    def test_costs_that_are_not_measured(self) -> None:
        assert "not measured yet" in self.why(falling(200, 0.0), None)

    def test_a_stall_that_is_too_long_for_its_share(self) -> None:
        assert self.why(falling(200, 0.0), 100.0) == (
            "updates may use at most 0.02 of the training's time; one update stalls it for 100 s, and an iteration "
            "takes 0.01 s"
        )

    def test_a_loss_that_does_not_fall(self) -> None:
        assert self.why(np.linspace(1, 2, 200)) == "the predicted loss does not fall"

    def test_a_gain_that_is_less_than_the_price(self) -> None:
        assert self.why(falling(200, 0.0), price=1e9) == "no update would gain more than it costs"

    def test_the_end_of_the_training(self) -> None:
        assert self.why(falling(2001, 0.0)) == "the training ends"


class TestAfterAJump:
    def test_updates_go_on_though_the_noise_still_hides_that_the_loss_falls(self):
        rng = np.random.default_rng(5)
        stream = Stream(PlanRequest(warmup=40, stop=2000))
        stream.observe(1, (0.2 + np.exp(-np.arange(400) / 80) + 0.02 * rng.standard_normal(400)).tolist())
        stream.iteration_took(0.01)
        stream.stalled(0.001)
        stream.published(40)
        stream.plan(400)
        jumped = (0.9 + 0.1 * rng.standard_normal(40)).tolist()  # flat, as far as one can tell
        stream.observe(401, jumped)
        assert stream.wants_plan(440)
        plan = stream.plan(440)
        assert plan.iterations[0] <= 440 + 40
        assert np.diff(plan.iterations).max() <= 40


class TestSlowdown:
    @pytest.mark.parametrize(("slowdown", "share"), [(0.02, 0.02), (0.005, 0.005), (None, 1.0)])
    def test_stalls_take_no_more_of_the_training_than_was_allowed(self, slowdown, share):
        stream = Stream(PlanRequest(warmup=40, stop=1000, slowdown=slowdown))
        stream.observe(1, [2 * math.exp(-i / 200) + 0.1 for i in range(1, 41)])
        stream.iteration_took(0.01)
        stream.stalled(0.005)
        stream.delivered(0.001, 1000, "shared")
        stream.published(40)
        planned = 1 + len(stream.plan(40).iterations)  # with the first one
        assert planned * 0.005 <= share * 960 * 0.01
        assert planned > (0.9 * share * 960 * 0.01 / 0.005 if slowdown else 0.02 * 960 * 0.01 / 0.005)


class TestTrouble:
    """Losses that do not do what losses should."""

    def test_after_a_jump_only_what_follows_is_fitted(self) -> None:
        run = steady()
        before = len(run.published)
        again = 1.5 * falling(400, 0.05, seed=1, pace=0.01)
        run.train(again)
        curve = run.stream.curve
        assert curve is not None
        assert 1000 - 3 <= curve.origin + curve.shape.first <= 1000 + 3
        replanned = next(now for now, _ in run.plans if now > 1000)
        assert replanned <= 1000 + RECENT
        truth = 1.5 * falling(800, 0.0, pace=0.01)
        assert curve(1700) == pytest.approx(truth[700], rel=0.15)
        assert len(run.published) > before + 3

    def test_a_drift_that_no_curve_explains_begins_the_window_anew(self) -> None:
        run = steady()
        run.train(0.1 + 0.1 * np.exp(-0.02 * np.arange(200)))
        assert 1000 < next(now for now, _ in run.plans if now > 1000) <= 1000 + RECENT
        curve = run.stream.curve
        assert curve is not None
        assert curve.used < 250
        assert curve(1300) == pytest.approx(0.1, rel=0.1)

    def test_a_drift_adds_nothing_to_epochs(self) -> None:
        run = running(request(method="epoch", epoch=400, stop=1350), falling(1000, 0.05))
        run.train(1.5 * falling(350, 0.05, seed=1, pace=0.01))
        assert [now for now, _ in run.plans if now > 1200]  # planned anew, after the last end of an epoch
        assert run.published[1:] == [400, 800, 1200]

    def test_a_wild_loss_is_no_drift(self) -> None:
        losses = falling(900, 0.05)
        losses[[600, 650, 651, 700]] = 1000.0
        calm = [now for now, _ in steady().plans if now < 900]
        assert [now for now, _ in running(request(stop=4000), losses).plans] == calm

    @pytest.mark.parametrize("losses", [np.full(500, 0.7), np.linspace(1, 3, 500)])
    @pytest.mark.parametrize("method", ["optimal", "closed_form", "fixed", "greedy"])
    def test_a_curve_that_does_not_fall_gets_its_first_version_and_no_update(
        self, losses: np.ndarray, method: str
    ) -> None:
        assert running(request(method=method, stop=1000), losses).published == [50]

    def test_a_curve_that_falls_again_gets_updates_again(self) -> None:
        run = running(request(stop=2000), np.concatenate([np.full(300, 2.0), 2 * 0.99 ** np.arange(300)]))
        assert run.published[:1] == [50]
        assert len(run.published) > 3
        assert run.published[1] > 300

    def test_a_training_that_diverged_publishes_nothing_until_it_is_back(self) -> None:
        lost = np.full(200, math.nan)
        run = running(request(stop=2000), np.concatenate([falling(300), lost]))
        assert run.plans[-1][1].iterations == ()
        assert max(run.published) <= 300 + max(SPACING, RECENT)
        run.train(falling(800)[300:])
        assert max(run.published) > 600
        assert run.stream.curve is not None
        assert math.isfinite(run.stream.curve.mse)

    def test_a_warm_up_that_diverged_publishes_when_losses_are_finite_again(self) -> None:
        run = running(request(stop=500), np.concatenate([np.full(60, math.inf), falling(200)]))
        assert 60 < run.published[0] <= 60 + 2 * RECENT

    def test_some_losses_that_are_no_numbers_do_not_matter(self) -> None:
        losses = falling(400)
        losses[::7] = math.nan
        assert len(running(request(stop=800), losses).published) > 3

    def test_a_batch_that_is_sent_twice_or_overlaps_counts_once(self) -> None:
        once, twice = Stream(request()), Stream(request())
        losses = falling(120).tolist()
        once.observe(0, losses)
        twice.observe(0, losses[:60])
        twice.observe(0, losses[:60])
        twice.observe(40, losses[40:])
        assert once.plan(119) == twice.plan(119) or math.isnan(once.plan(119).predicted_loss)
        assert once.curve == twice.curve
        assert once.curve is not None
        assert once.curve.used == 120

    def test_batches_may_be_missing(self) -> None:
        stream = Stream(request())
        losses = falling(400, 0.0)
        stream.observe(0, losses[:100].tolist())
        stream.observe(300, losses[300:].tolist())
        stream.plan(399)
        assert stream.curve is not None
        assert stream.curve(200) == pytest.approx(losses[200], rel=0.02)

    def test_no_more_than_so_many_losses_are_kept(self) -> None:
        stream = Stream(request())
        stream.observe(0, [1.0] * (MOST_LOSSES + 10))
        stream.plan(MOST_LOSSES)
        assert stream.curve is not None
        assert stream.curve.used == MOST_LOSSES // 2


class TestArguments:
    """What makes no sense is said so."""

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"method": "best"}, "method: expected one of optimal, closed_form, fixed, greedy, epoch; found 'best'"),
            ({"warmup": 0}, "warmup: expected at least 1 iteration; found 0"),
            ({"stop": -1}, "stop: expected an iteration of at least 0, or None; found -1"),
            ({"inferences": -1.0}, "inferences: expected a finite number of at least 0, or None; found -1.0"),
            ({"inferences": math.inf}, "inferences: expected a finite number of at least 0, or None; found inf"),
            ({"method": "epoch"}, "epoch: expected at least 1 iteration per epoch for method 'epoch'; found None"),
            ({"slowdown": 0.0}, "slowdown: expected a share of the training's time above 0, or None; found 0.0"),
            ({"epoch": 0}, "epoch: expected at least 1 iteration per epoch for method 'optimal'; found 0"),
            ({"price": math.nan}, "price: expected finite loss units per checkpoint, at least 0; found nan"),
            ({"forms": ("exp9",)}, "forms: expected LossForm objects or some of exp2, .*, last1; found 'exp9'"),
        ],
    )
    def test_a_request_that_makes_no_sense_is_an_error(self, values: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            PlanRequest(**values)  # pyright: ignore[reportArgumentType]

    @pytest.mark.parametrize("seconds", [-0.1, math.nan, math.inf])
    def test_times_that_cannot_be_are_errors_and_change_nothing(self, seconds: float) -> None:
        stream = Stream(request())
        stream.iteration_took(0.1)
        stream.stalled(0.0)
        before = stream.costs
        for tell in (stream.iteration_took, stream.stalled, stream.answered):
            with pytest.raises(ValueError, match="expected a finite number"):
                tell(seconds)
        with pytest.raises(ValueError, match="seconds of a transfer by shared"):
            stream.delivered(seconds, 1, "shared")
        assert stream.costs == before == UpdateCosts(0.1, 0.0, 0.0, 0.1)

    def test_an_iteration_takes_some_time(self) -> None:
        with pytest.raises(ValueError, match="seconds of iteration: expected a finite number above 0; found 0"):
            Stream(request()).iteration_took(0.0)

    def test_a_plan_without_losses_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="plan at iteration 3: expected observed losses; found none"):
            Stream(request()).plan(3)
        with pytest.raises(ValueError, match="first_iteration: expected at least 0; found -1"):
            Stream(request()).observe(-1, [1.0])

    def test_what_is_not_measured_is_supposed(self) -> None:
        stream = Stream(request())
        assert stream.costs is None
        stream.iteration_took(0.3)
        assert stream.costs is None
        stream.stalled(0.2)
        assert stream.costs == UpdateCosts(iteration_s=0.3, stall_s=0.2, delivery_s=0.2, inference_s=0.3)
        stream.delivered(0.5, 10**6, "socket")
        stream.answered(0.01)
        assert stream.costs == UpdateCosts(0.3, 0.2, 0.5, 0.01)
        assert stream.transports.predict("socket", 10**6) == pytest.approx(0.5)


class TestDrift:
    """Whether losses left the prediction, and where they jumped."""

    @given(st.integers(0, 2**31), st.integers(2 * RECENT, 200), st.integers(RECENT, 60), st.floats(1.8, 10))
    @settings(max_examples=30)
    def test_a_jump_is_found_where_it_is(self, seed: int, before: int, after: int, height: float) -> None:
        losses = np.concatenate([np.ones(before), np.full(after, height)])
        losses *= 1 + np.random.default_rng(seed).normal(0, 0.1, len(losses))
        assert abs(jump(losses) - before) <= 2

    @given(st.integers(0, 2**31), st.floats(0, 0.05), st.sets(st.integers(0, 199), max_size=6))
    @settings(max_examples=30)
    def test_spikes_are_found_and_nothing_else_is(self, seed: int, pace: float, where: set[int]) -> None:
        losses = (np.exp(-pace * np.arange(200)) + 0.2) * (1 + np.random.default_rng(seed).normal(0, 0.1, 200))
        losses[sorted(where)] *= 30
        assert set(np.flatnonzero(spikes(losses)).tolist()) == where

    def test_noise_is_seldom_a_drift_or_a_jump(self) -> None:
        """They are rules of five deviations over 24 values, whose deviation is estimated from the same values."""
        wrong = 0
        for seed in range(2000):
            rng = np.random.default_rng(seed)
            noise, pace = rng.uniform(0.0, 0.5), rng.uniform(0.0, 0.02)
            truth = np.exp(-pace * np.arange(RECENT))
            losses = truth * (1 + rng.normal(0, noise, RECENT))
            wrong += drift(losses, truth, 1.0) != 0 or jump(losses) != 0
        assert wrong <= 2, "one in 1000"


@given(
    st.sampled_from(METHODS),
    st.one_of(st.none(), st.integers(0, 600)),
    st.one_of(st.none(), st.floats(0, 5000)),
    st.integers(1, 60),
    st.integers(0, 2**31),
    st.lists(st.sampled_from(["fall", "flat", "rise", "jump", "lost", "wild"]), min_size=1, max_size=4),
    st.integers(1, 30),
)
@settings(max_examples=20, deadline=None)
def test_whatever_the_losses_a_plan_keeps_its_promises(
    method: str, stop: int | None, inferences: float | None, warmup: int, seed: int, phases: list[str], batch: int
) -> None:
    chance = np.random.default_rng(seed)
    level, parts = 2.0, list[np.ndarray]()
    for phase in phases:
        steps = np.arange(60)
        course = {
            "fall": level * np.exp(-0.02 * steps),
            "flat": np.full(60, level),
            "rise": level * (1 + 0.01 * steps),
            "jump": np.full(60, 3 * level),
            "lost": np.full(60, math.nan),
            "wild": level * chance.lognormal(0, 2, 60),
        }[phase]
        level = float(course[-1]) if phase in ("fall", "rise", "jump") else level
        parts.append(course * (1 + chance.normal(0, 0.05, 60)))
    asked = PlanRequest(method, warmup, stop, inferences, epoch=25, forms=("exp3",))
    run = Run(Stream(asked)).train(np.concatenate(parts), batch)
    for now, schedule in run.plans:
        assert all(now < i and (stop is None or i <= stop) for i in schedule.iterations)
        assert list(schedule.iterations) == sorted(set(schedule.iterations))
    times = [now for now, _ in run.plans]
    pairs = itertools.pairwise(run.plans)
    assert all(later[0] - now >= SPACING for (now, plan), later in pairs if not math.isnan(plan.predicted_loss))
    assert not times or times[0] + 1 >= warmup
    finite = "lost" not in phases and (stop is None or stop > warmup + batch + 1)
    if finite and len(phases) * 60 > warmup + batch + 2:
        assert run.published, "the first version is always published"
