"""When an update is trigger, by everything that a user may say."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tensorvine.actors.updates.trigger import trigger_of
from tensorvine.planner.schedules.schedule import Schedule
from tensorvine.planner.schedules.stream import PlanRequest


def dates(trigger: object, until: int = 30) -> list[int]:
    return [i for i in range(1, until + 1) if trigger.due(i - 1, i)]


def test_an_interval():
    assert dates(trigger_of(10, "t")) == [10, 20, 30]


@pytest.mark.parametrize("given", [[7, 3], {3, 7}, Schedule((3, 7), None, 1.0), iter((3, 7))])
def test_given_iterations(given):
    assert dates(trigger_of(given, "t")) == [3, 7]


@pytest.mark.parametrize(
    ("schedule", "due"), [(10, [10, 22]), ([2, 4, 18], [3, 4, 22]), (PlanRequest(warmup=12), [16])], ids=str
)
def test_a_step_of_several_iterations_is_due_if_one_of_them_is(schedule, due):
    trigger = trigger_of(schedule, "t")
    steps = [0, 3, 4, 9, 10, 16, 17, 22]
    assert [now for last, now in pairwise(steps) if trigger.due(last, now)] == due


def test_a_plan_is_due_when_it_comes_and_a_new_one_replaces_it():
    trigger = trigger_of(None, "t")
    assert trigger.request == PlanRequest()
    assert dates(trigger, 100) == [50]  # the first version, at the end of the warm-up
    trigger = trigger.planned(Schedule((64, 90), None, 1.0))
    assert dates(trigger, 100) == [50, 64, 90]
    assert dates(trigger.planned(Schedule((72,), None, 1.0)), 100) == [50, 72]


def test_a_plan_does_not_replace_what_was_given():
    assert dates(trigger_of(10, "t").planned(Schedule((4,), None, 1.0))) == [10, 20, 30]


def test_each_epoch_is_known_when_its_length_is():
    trigger = trigger_of("epoch", "t")
    assert trigger.each_epoch
    assert dates(trigger.told(stop=100, epoch=12)) == [12, 24]


def test_what_the_training_knows_fills_in_what_the_request_left_open():
    assert trigger_of(None, "t").told(500, 100).request == PlanRequest(stop=500)
    assert trigger_of(PlanRequest(stop=7), "t").told(500, 100).request == PlanRequest(stop=7)


def test_a_warmup_replaces_that_of_the_plan():
    assert trigger_of("greedy", "t", warmup=9).request == PlanRequest("greedy", warmup=9)


@pytest.mark.parametrize("wrong", ["often", 0, -1, True, [], [0], [1.5], 2.5, object()])
def test_what_is_no_schedule_is_refused(wrong):
    with pytest.raises(ValueError, match=r"^t: schedule: expected None"):
        trigger_of(wrong, "t")
