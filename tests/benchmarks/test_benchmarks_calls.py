"""The benchmark of short calls, quick."""

from __future__ import annotations

import pytest

from benchmarks import calls
from benchmarks.measure import Effort, Sample


def test_lines_stand_beside_the_engine_and_the_floor(cluster: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(calls.ROUNDS, Effort.QUICK, (5, 1))
    found = calls.run(Effort.QUICK).as_dict()
    cases = [f"{what} {when}" for when in ("one after the other", "after 0.2 s") for what in ("a call", "info", "save")]
    assert len(found["rows"]) == len(cases)
    assert all(row["case"].startswith(case.split()[0]) for row, case in zip(found["rows"], cases, strict=True))
    for row in found["rows"]:
        assert row["ours_s"] > 0
        assert row["limit"] == calls.FLOOR
        assert row["limit_ratio"] == pytest.approx(row["ours_s"] / row["limit_s"])
    assert [row["peer"] for row in found["rows"]] == [calls.ENGINE, None, None] * 2
    assert found["case"] == "a call after 0.2 s", "the headline is of calls as they are made"


def test_a_call_is_held_against_rays() -> None:
    names = (calls.OURS, calls.ENGINE, calls.FLOOR, "info", "save")
    samples = {name: Sample((seconds,)) for name, seconds in zip(names, (1.0, 4.0, 0.5, 2.0, 3.0), strict=True)}
    first, *_ = calls.rows("now and then", samples)
    assert (first.ratio, first.limit_ratio) == (4.0, 2.0)
    assert [goal.reached for goal in first.goals] == [True]


def test_a_byte_comes_back() -> None:
    with calls.echo() as there_and_back:
        for _ in range(3):
            there_and_back()
