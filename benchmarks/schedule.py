"""When to publish: predicted and measured cumulative inference loss of schedules, beside Viper's figures.

Rules
- All is real: a producer trains in its process and publishes, a consumer in another answers at a fixed rate with the
  version that it has, and what is added up is that version's loss on samples held out. One thread each.
- Plans rest on what is known at the end of the warm-up: the curve fitted to its losses, and the costs measured on
  its last part, in which versions are published now and then and answered with.
- Every schedule starts from the state at the end of the warm-up and takes the same steps, so that runs differ in their
  times alone. Schedules take turns; each round starts one place further along.
- `foreseen` is the predictor's answer if it knew the held-out losses: what it differs from `predicted` by is the
  curve's fault, and what `measured` differs from it by is that of the times.
- The paper's figures are of larger networks and more inferences: their ratios compare, not their sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from tensorvine.planner import (
    Schedule,
    UpdateCosts,
    closed_form_schedule,
    cumulative_inference_loss,
    epoch_schedule,
    fit_loss_curve,
    fixed_schedule,
    greedy_schedule,
    greedy_threshold,
    optimal_schedule,
)
from tensorvine.planner.curves.forms import FORMS

from .handover import Case, Runs, Values, running
from .measure import Effort, Goal, Report, Row, Sample, progress
from .session import repository

if TYPE_CHECKING:
    from tensorvine.actors import Consumer, Repository

METHODS = ("epoch", "fixed", "greedy", "closed form", "exact")
LIMITED = "exact, 2%"
"""The best schedule whose stalls take at most `MOST_STALLED` of the training."""
MOST_STALLED = 0.02
NOTHING = "no update"
"""A training that publishes nothing: how long it takes alone, and what the version in use costs."""
SLACK = 1.1
"""Inferences go on for so many times what the training takes alone."""


CASES = (
    Case("nt3", 56, 4, 17, 0.02, {"epoch": "3.8 k, 7", "fixed": "3.6 k, 49", "greedy": "3.0 k, 40"}),
    Case("tc1", 216, 2, 7, 0.02, {"epoch": "32.8 k, 16", "fixed": "30.6 k, 128", "greedy": "30.4 k, 63"}),
    Case("ptychonn", 40, 1, 3, 0.05, {"epoch": "66.2 k, 13", "fixed": "52.9 k, 16", "greedy": "45.1 k, 6"}),
)


def run(effort: Effort) -> Report:
    """Measure three trainings (only NT3, for a shorter time, when quick)."""
    report = Report("schedule")
    rounds = {Effort.QUICK: 1, Effort.NORMAL: 3, Effort.FULL: 6}[effort]
    with repository() as repo:
        for case in (replace(CASES[0], epochs=7),) if effort is Effort.QUICK else CASES:
            progress(f"{case.net}: warm-up")
            _measure(report, repo, case, rounds)
    return report


def _measure(report: Report, repo: Repository, case: Case, rounds: int) -> None:
    with running(repo, case) as trainer:
        warmup = trainer.warm_up()
        costs = _costs(warmup, trainer.consumer, case)
        plans, inferences = _plans(case, warmup["losses"], costs), _inferences(case, costs)
        runs = {name: Runs() for name in plans}
        names = list(plans)
        for turn in range(rounds):
            for name in names[turn:] + names[:turn]:
                progress(f"{case.net}: {name}, {len(plans[name].iterations)} updates, round {turn + 1} of {rounds}")
                trainer.go(plans[name], inferences, runs[name])
        truth = trainer.truth()
    _report(report, case, costs, plans, runs, truth)


def _plans(case: Case, losses: np.ndarray[Any, Any], costs: UpdateCosts) -> dict[str, Schedule]:
    """Make all schedules from the warm-up."""
    curve = fit_loss_curve(losses.tolist(), tuple(FORMS), start=1)
    window = (curve, costs, case.start, case.stop, _inferences(case, costs))
    allowed_s = MOST_STALLED * (case.stop - case.start) * costs.iteration_s
    return {
        NOTHING: Schedule((), None, cumulative_inference_loss((), curve, costs, case.start, window[-1])),
        "epoch": epoch_schedule(*window, epoch=case.epoch),
        "fixed": fixed_schedule(*window),
        "greedy": greedy_schedule(*window, greedy_threshold(losses.tolist())),
        "closed form": closed_form_schedule(*window),
        "exact": optimal_schedule(*window),
        LIMITED: optimal_schedule(*window, most=int(allowed_s / costs.stall_s)),
    }


def _inferences(case: Case, costs: UpdateCosts) -> int:
    return int(SLACK * (case.stop - case.start) * costs.iteration_s / costs.inference_s)


def _costs(warmup: Values, consumer: Consumer, case: Case) -> UpdateCosts:
    """Take the medians of what was measured during the warm-up."""
    taken = [each.fetch_s + each.swap_s for each in consumer.status().deliveries]
    return UpdateCosts(
        iteration_s=float(median(warmup["iterations_s"])),
        stall_s=float(median(warmup["stalls_s"])),
        delivery_s=float(median(warmup["commits_s"])) + median(taken),
        inference_s=case.inference_s,
    )


def _report(
    report: Report,
    case: Case,
    costs: UpdateCosts,
    plans: Mapping[str, Schedule],
    runs: Mapping[str, Runs],
    truth: Mapping[int, float],
) -> None:
    inferences, alone_s = _inferences(case, costs), median(runs[NOTHING].seconds)
    known = list(truth), list(truth.values())
    for name, plan in plans.items():
        found, updates = runs[name], len(plan.iterations)
        foreseen = cumulative_inference_loss(
            plan.iterations, lambda iteration: np.interp(iteration, *known), costs, case.start, inferences
        )
        facts: dict[str, float | int | str] = {
            "method": name,
            "updates": updates,
            "updates_served": median(found.served),
            "interval": plan.interval or "irregular",
            "predicted_loss": plan.predicted_loss,
            "foreseen_loss": foreseen,
            "measured_loss": found.mean(),
            "measured_loss_min": min(found.losses),
            "measured_loss_max": max(found.losses),
            "inferences": inferences,
            "stalled_share": median(found.stalled) / alone_s,
            **asdict(costs),
        }
        goals = _goals(plans, runs) if name == "exact" else ()
        if name == LIMITED:
            what = "share of the training's time spent on publishing"
            goals = (Goal(what, median(found.stalled) / alone_s, at_most=MOST_STALLED),)
        text = f"{case.net}, {name}: {updates} updates, loss {found.mean():.4g} "
        text += f"(predicted {plan.predicted_loss:.4g}, foreseen {foreseen:.4g})"
        peer = f"Viper: {case.paper[name]} checkpoints" if name in case.paper else None
        row = Row(text, Sample(tuple(found.seconds)), 0, peer, None, NOTHING, alone_s, goals, facts)
        report.add(row, headline=name == "exact" and case.net == CASES[0].net)


def _goals(plans: Mapping[str, Schedule], runs: Mapping[str, Runs]) -> tuple[Goal, ...]:
    others = [name for name in METHODS if name != "exact"]
    predicted = plans["exact"].predicted_loss / min(plans[name].predicted_loss for name in others)
    goal = Goal("times the least predicted loss of the others", predicted, at_most=1 + 1e-9)
    if len(runs["exact"].losses) == 1:
        return (goal,)  # what is noise cannot be told from one run
    best = min(others, key=lambda name: runs[name].mean())
    noise = max((max(runs[name].losses) - min(runs[name].losses)) / runs[name].mean() for name in METHODS)
    measured = runs["exact"].mean() / runs[best].mean()
    what = f"times the least measured loss of the others ({best}), runs of one schedule differ by up to {noise:.1%}"
    return goal, Goal(what, measured, at_most=1 + noise)
