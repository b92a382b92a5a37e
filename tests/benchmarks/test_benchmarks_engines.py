"""The benchmark of Dask beside Ray: all of it, small, and how what was measured is judged."""

from __future__ import annotations

import sys

import pytest

from benchmarks import engines
from benchmarks.engines import FLOORS, Half, Plan
from benchmarks.engines_part import CALL, IN_FLIGHT, KILLED, SAVE, START, Amount, Part, Times
from benchmarks.measure import MIB, Effort

SMALLEST = Amount(MIB, graphs=10, warmup=0, turns=1, calls=2, kills=1)
WARM = """
import runpy
from tests.support.warm import warm_workers
with warm_workers():
    runpy.run_module("benchmarks.engines_part", run_name="__main__", alter_sys=True)
"""
"""The process of an engine, whose workers of Ray are forked."""


@pytest.mark.own_cluster
@pytest.mark.timeout(600)
def test_everything_is_measured_on_both_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "PROGRAM", (sys.executable, "-c", WARM))
    monkeypatch.setitem(engines.PLANS, Effort.QUICK, Plan(dict.fromkeys(Part, 1), SMALLEST))
    report = engines.run(Effort.QUICK)
    assert [row.case for row in report.rows] == [f"{part.value}: {case}" for part in Part for case in FLOORS[part]]
    for row in report.rows:
        assert row.ours.low > 0
        assert row.ratio is not None
        assert row.limit_ratio is not None
        assert row.goals
    assert report.headline is report.rows[0]


def turns_of(part: Part, seconds: float) -> list[Times]:
    """Two turns in which everything takes as long."""
    names = {*FLOORS[part], *FLOORS[part].values()}
    return [{name: [seconds] for name in names}] * 2


def judged(part: Part, dask: list[Times], ray: list[Times]) -> dict[str, list[bool]]:
    rows = engines.rows(part, dask, ray, MIB)
    return {row.case.partition(": ")[2]: [goal.reached for goal in row.goals] for row in rows}


def test_dask_is_held_against_rays_time_of_the_same_run() -> None:
    same = judged(Part.WITHIN, turns_of(Part.WITHIN, 1.0), turns_of(Part.WITHIN, 1.0))
    assert all(all(reached) for reached in same.values())
    slower = judged(Part.WITHIN, turns_of(Part.WITHIN, 1.2), turns_of(Part.WITHIN, 1.0))
    assert (slower[SAVE], slower[CALL], slower[IN_FLIGHT]) == ([False], [False], [True])
    assert judged(Part.BETWEEN, turns_of(Part.BETWEEN, 1.4), turns_of(Part.BETWEEN, 1.0))[CALL] == [True]
    assert judged(Part.BETWEEN, turns_of(Part.BETWEEN, 1.6), turns_of(Part.BETWEEN, 1.0))[CALL] == [False]
    assert judged(Part.START, turns_of(Part.START, 1.1), turns_of(Part.START, 1.0)) == {START: [False]}
    far_slower = judged(Part.WITHIN, turns_of(Part.WITHIN, 2.1), turns_of(Part.WITHIN, 1.0))
    assert far_slower[IN_FLIGHT] == [False]


def test_each_engine_has_five_seconds_for_a_killed_shard() -> None:
    found = judged(Part.WITHIN, turns_of(Part.WITHIN, 4.0), turns_of(Part.WITHIN, 6.0))
    assert found[KILLED] == [True, False]


def test_a_process_that_fails_is_said_to_with_what_it_printed() -> None:
    half = Half("spark", Part.WITHIN, SMALLEST)
    with pytest.raises(RuntimeError, match=r"(?s)within a node, spark: expected figures.*found 'spark'"):
        half.turn()
    half.close()
