"""The schedule benchmark's own parts: trainings that can be taken up again, plans, and how runs are judged."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from tensorvine.planner import UpdateCosts

pytest.importorskip("torch")
from benchmarks import learners, schedule
from benchmarks.handover import Answer, Judge, Runs, answers_of
from benchmarks.learners import Net, learner
from benchmarks.measure import Report
from benchmarks.schedule import CASES, LIMITED, METHODS, NOTHING

COSTS = UpdateCosts(iteration_s=0.003, stall_s=0.002, delivery_s=0.02, inference_s=0.02)
FALLING = np.array([math.exp(-i / 200) for i in range(1, CASES[0].start + 1)])


@pytest.mark.parametrize("net", get_args(Net))
def test_a_learner_goes_on_from_a_state_as_it_did_before(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = learners._Patterns.draw
    monkeypatch.setattr(learners._Patterns, "draw", lambda self, count: draw(self, min(count, 4)))
    run, other = learner(net), learner(net)
    run.step(1)
    state = run.state()
    losses = [run.step(iteration) for iteration in (2, 3)]
    run.held_out_loss()
    for each in (run, other):
        each.restore(state)
        assert [each.step(iteration) for iteration in (2, 3)] == losses


def test_nt3_at_cpu_size_has_the_papers_shape() -> None:
    model = learner("nt3").model
    assert sum(parameter.numel() for parameter in model.parameters()) == 62_686


def test_an_answer_is_the_loss_of_the_version_that_was_assigned() -> None:
    run, judge = learner("nt3"), Judge("nt3")
    for iteration in range(1, 6):
        run.step(iteration)
    judge.assign({name: value.numpy() for name, value in run.model.state_dict().items()})
    assert judge(None) == run.held_out_loss()


def test_each_inference_counts_the_version_that_answered_when_it_was_due() -> None:
    asked = [Answer(at, version, 0.0) for at, version in ((9.8, 1), (10.1, 1), (10.2, 2), (10.6, 3), (10.7, 4))]
    found = answers_of(asked, began=10.0, every=0.1, count=8)
    assert [answer.version for answer in found] == [1, 1, 2, 2, 2, 2, 3, 4]


def test_all_schedules_are_planned_and_the_limited_one_keeps_to_its_share() -> None:
    case = CASES[0]
    plans = schedule._plans(case, FALLING, COSTS)
    assert set(plans) == {NOTHING, *METHODS, LIMITED}
    assert plans[NOTHING].iterations == ()
    assert plans["exact"].predicted_loss == min(plan.predicted_loss for plan in plans.values())
    limited = len(plans[LIMITED].iterations)
    assert 0 < limited < len(plans["exact"].iterations)
    assert limited * COSTS.stall_s <= 0.02 * (case.stop - case.start) * COSTS.iteration_s


def test_a_worse_measured_loss_than_the_noise_allows_misses_the_goal() -> None:
    plans = schedule._plans(CASES[0], FALLING, COSTS)
    runs = {name: Runs([100.0, 101.0]) for name in plans}
    assert all(goal.reached for goal in schedule._goals(plans, runs))
    runs["exact"] = Runs([102.0, 103.0])
    assert [goal.reached for goal in schedule._goals(plans, runs)] == [True, False]
    assert len(schedule._goals(plans, {name: Runs([1.0]) for name in plans})) == 1, "one run says nothing of noise"


def test_the_report_has_a_row_per_schedule_with_the_papers_figures_beside_it() -> None:
    case, report = CASES[0], Report("schedule")
    plans = schedule._plans(case, FALLING, COSTS)
    runs = {name: Runs([100.0, 101.0], [3.0, 3.1], [0.0, 0.1], [2, 2]) for name in plans}
    truth = {iteration: math.exp(-iteration / 200) for iteration in range(case.start, case.stop + 1)}
    schedule._report(report, case, COSTS, plans, runs, truth)
    rows = {str(row.facts["method"]): row for row in report.rows}
    assert set(rows) == set(plans)
    assert rows["greedy"].peer == "Viper: 3.0 k, 40 checkpoints"
    assert report.headline is rows["exact"]
    for name, row in rows.items():  # the warm-up's losses are the true ones here, and the fitted form is theirs
        assert row.facts["foreseen_loss"] == pytest.approx(plans[name].predicted_loss, rel=1e-3)


def test_every_case_plans_before_it_ends() -> None:
    for case in CASES:
        assert 0 < case.start < case.stop
        assert replace(case, epochs=1).stop == case.start + case.epoch
