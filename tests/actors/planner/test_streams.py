"""The planner's bookkeeping of streams, without an engine."""

from __future__ import annotations

import math

from tensorvine.actors.planner.streams import IDLE_S, Delivered, Observed, Streams
from tensorvine.planner.schedules.stream import PlanRequest


def losses(first: int, last: int) -> tuple[tuple[int, float], ...]:
    return tuple((i, 2 * math.exp(-i / 60) + 0.1) for i in range(first, last + 1))


def told(place: int, first: int, last: int, *, run: str = "r", request: PlanRequest | None = None, **more: object):
    given: dict = {"iterations_s": (0.1,), "updates": ()} | more
    return Observed(run, request, place, losses(first, last), **given)


REQUEST = PlanRequest(warmup=20, stop=400)


def delivered(ref: str, seconds: float, way: str = "shared", ways: tuple[str, ...] = ("shared",), **more: object):
    return Delivered(
        ref=ref,
        seconds=seconds,
        fetch_s=seconds / 2,
        nbytes=1_000_000,
        way=way,
        ways=ways,
        **({"inference_s": 0.01, "node": "n"} | more),
    )


class TestObserved:
    def test_the_first_version_is_planned_after_the_warm_up_and_the_rest_when_its_cost_is_known(self):
        streams = Streams()
        assert streams.observed("m", told(0, 1, 19, request=REQUEST)).schedule is None
        first = streams.observed("m", told(19, 20, 25, request=REQUEST))
        assert first.schedule.iterations == (26,)
        then = streams.observed("m", told(25, 26, 30, request=REQUEST, updates=((26, 0.05, 0.0),)))
        assert len(then.schedule.iterations) > 3
        assert min(then.schedule.iterations) > 30
        assert then.curve.form in ("exp3", "expd3")  # two ways to write one curve: rounding says which fits better
        assert then.costs.stall_s == 0.05

    def test_a_training_with_a_schedule_of_its_own_is_watched_and_not_planned(self):
        streams = Streams()
        advice = streams.observed("m", told(0, 1, 100, updates=((50, 0.1, 0.0),)))
        assert advice.schedule is None
        assert advice.costs.iteration_s == 0.1
        assert list(streams.statuses()) == ["m"]

    def test_a_status_has_the_losses_and_the_updates_that_were_reported(self):
        streams = Streams()
        streams.observed("m", told(0, 1, 1000, updates=((50, 0.1, 0.0), (900, 0.1, 0.0))))
        status = streams.statuses()["m"]
        assert (status.iteration, status.updates) == (1000, (50, 900))
        assert len(status.losses) == 250
        assert status.losses[-1] == losses(1000, 1000)[0]

    def test_a_planner_that_forgot_asks_for_all(self):
        streams = Streams()
        advice = streams.observed("m", told(40, 41, 50, request=REQUEST))
        assert advice.known == 0
        assert streams.observed("m", told(0, 1, 50, request=REQUEST)).known == 50

    def test_a_training_that_stopped_reporting_is_dropped_and_can_continue(self):
        now = [1000.0]
        streams = Streams(lambda: now[0])
        streams.observed("ended", told(0, 1, 50, request=REQUEST))
        streams.observed("m", told(0, 1, 50, request=REQUEST))
        now[0] += IDLE_S / 2
        streams.observed("m", told(50, 51, 60, request=REQUEST))
        assert list(streams.statuses()) == ["ended", "m"]
        now[0] += IDLE_S / 2
        assert streams.observed("m", told(60, 61, 70, request=REQUEST)).known == 70
        assert list(streams.statuses()) == ["m"]
        assert streams.observed("ended", told(50, 51, 60, request=REQUEST)).known == 0
        assert streams.observed("ended", told(0, 1, 60, request=REQUEST)).known == 60

    def test_a_report_that_comes_twice_counts_once(self):
        streams = Streams()
        streams.observed("m", told(0, 1, 10, request=REQUEST))
        assert streams.observed("m", told(0, 1, 10, request=REQUEST)).known == 10

    def test_a_training_that_starts_anew_replaces_the_one_before(self):
        streams = Streams()
        streams.observed("m", told(0, 1, 50, request=REQUEST))
        assert streams.observed("m", told(0, 1, 5, run="other", request=REQUEST)).known == 5

    def test_iterations_may_be_left_out(self):
        streams = Streams()
        given = (*losses(1, 5), *losses(9, 12))
        advice = streams.observed("m", Observed("r", REQUEST, 0, given, (), ()))
        assert advice.known == 9

    def test_losses_that_are_no_numbers_break_no_report(self):
        streams = Streams()
        given = tuple((i, math.nan) for i in range(1, 60))
        advice = streams.observed("m", Observed("r", REQUEST, 0, given, (0.1,), ((50, 0.1, 0.1),)))
        assert advice.known == 59


class TestDelivered:
    def test_a_delivery_counts_with_the_commit_before_it(self):
        streams = Streams()
        streams.observed("m", told(0, 1, 30, request=REQUEST, updates=((26, 0.05, 0.2),)))
        streams.delivered("m", delivered("m@1", 0.3))
        costs = streams.statuses()["m"].costs
        assert costs.delivery_s == 0.5
        assert costs.inference_s == 0.01

    def test_what_consumers_measured_before_the_training_is_known_counts_too(self):
        streams = Streams()
        streams.delivered("m", delivered("m@1", 0.3))
        streams.observed("m", told(0, 1, 30, request=REQUEST, updates=((26, 0.05, 0.0),)))
        assert streams.statuses()["m"].costs.inference_s == 0.01

    def test_the_faster_way_is_chosen_once_both_are_known(self):
        streams = Streams()
        both = ("socket", "object_store")
        assert streams.delivered("m", delivered("m@1", 0.1, "socket", both)) == "object_store"  # never tried
        assert streams.delivered("m", delivered("m@2", 0.9, "object_store", both)) == "socket"

    def test_each_node_has_its_own_choice(self):
        streams = Streams()
        both = ("socket", "object_store")
        for node, fast, slow in (("a", *both), ("b", *reversed(both))):
            streams.delivered("m", delivered("m@1", 0.1, fast, both, node=node))
            assert streams.delivered("m", delivered("m@2", 0.9, slow, both, node=node)) == fast
