"""The benchmark of searches: what it reads from journals, what it makes of it, and all of it, small."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from benchmarks import nas
from benchmarks.measure import Effort
from benchmarks.nas import HDF5, KEPT, NONE, OPTIONS, REPOSITORY, Candidate, Search, Size, read, reported
from examples.nas.plan import Mode
from examples.nas.run import app


def search(seconds: float, best: float, stored_s: float, space: int, written: int) -> Search:
    """Make a search of four candidates, the third of which is the best."""
    qualities = (0.5, None, best, 0.6)
    return Search(
        [
            Candidate(seconds * (n + 1) / 4, space, quality, written // 4, 1.0, stored_s, 0.8)
            for n, quality in enumerate(qualities)
        ]
    )


def found(**changed: list[Search]) -> dict[str, list[Search]]:
    searches = {
        NONE: [search(400, 0.975, 0.0, 0, 0)],
        HDF5: [search(360, 0.985, 0.1, 4000, 8000)],
        REPOSITORY: [search(280, 0.985, 0.01, 1000, 2400)],
        KEPT: [search(300, 0.985, 0.01, 2000, 2000)],
    }
    return searches | changed


def goals(report: Any) -> dict[str, Any]:
    return {goal.what: goal for row in report.rows for goal in row.goals}


def test_rows_say_how_much_sooner_and_smaller() -> None:
    report = reported(found())
    head = report.as_dict()
    assert (head["ours_s"], head["peer"], head["peer_s"]) == (280, NONE, 400)
    reached = goals(report)
    assert reached["share of the workers' time in the repository"].value == pytest.approx(0.01)
    assert reached["end to end, of the time without transfer"].value == pytest.approx(0.7)
    cases = {row.case: row for row in report.rows}
    assert cases["time to 97.0%"].ratio == pytest.approx(300 / 210)
    assert cases[f"space, {REPOSITORY}"].goals[0].value == 8
    assert cases[f"space, {KEPT}"].goals[0].value == 4
    assert not cases[f"space, {KEPT}"].goals[0].reached
    assert cases[f"space, {REPOSITORY}"].goals[1].value == 1
    json.dumps(head)


def test_a_quality_that_nobody_reached_without_transfer_gives_a_lower_bound() -> None:
    cases = {row.case: row for row in reported(found()).rows}
    (goal,) = cases["time to 98.0%"].goals
    assert "at least" in goal.what
    assert goal.value == pytest.approx(400 / 210)
    assert cases["time to 98.0%"].facts["peer_reached"] == 0
    assert cases["time to 98.0%"].facts["hdf5_s"] == 270
    assert "time to 99.0%" not in cases  # the repository's search does not get there


def test_a_journal_is_read_as_the_example_writes_it() -> None:
    told = {
        "quality": 0.9,
        "bytes_written": 10,
        "began": 5.0,
        "ended": 7.0,
        "stored_s": 0.5,
        "trained_s": 1.0,
        "error": None,
    }
    lines = [{"plan": {}}, {"ask": [0, [1], None]}, {"tell": told, "at": 3.0, "space_bytes": 20}]
    found = read("\n".join(map(json.dumps, lines)))
    assert found == Search([Candidate(3.0, 20, 0.9, 10, 2.0, 0.5, 1.0)])
    assert (found.seconds, found.share, found.best, found.time_to(0.9), found.time_to(0.95)) == (3, 0.25, 0.9, 3, None)


def test_a_search_that_does_not_end_well_is_an_error_with_what_it_wrote(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)nas: no transfer: expected exit status 0; found 1.*found 'nothing'"):
        nas.searched(NONE, 0, Size(2, "nothing", (0,)), Effort.QUICK, tmp_path)


@pytest.mark.parametrize("mode", OPTIONS)
def test_the_example_knows_the_options_of_each_search(mode: str) -> None:
    given = typer.main.get_command(app).make_context("run.py", [*OPTIONS[mode]]).params
    assert given["mode"] in list(Mode)
    assert (bool(given["memory"]), given["keep"]) == (mode in (REPOSITORY, KEPT), mode == KEPT)


@pytest.mark.own_cluster
@pytest.mark.timeout(300)
def test_all_of_it_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The repository's search runs, as a process of the example; the others are made up."""
    searched, made = nas.searched, found()
    monkeypatch.setattr(
        nas, "searched", lambda mode, *given: searched(mode, *given) if mode == REPOSITORY else made[mode][0]
    )
    monkeypatch.setitem(nas.SIZES, Effort.QUICK, Size(4, "wine", (0,), workers=1))
    monkeypatch.setattr(nas, "TARGETS", (0.01,))
    report = nas.run(Effort.QUICK)
    facts = {row.case: row for row in report.rows}
    assert facts[f"end to end, beside {HDF5}"].ratio
    assert facts[f"end to end, beside {NONE}"].facts["candidates"] == 4
    assert facts["time to 1.0%"].peer == NONE
    assert facts[f"space, {REPOSITORY}"].facts["written_bytes"] > 0
    report.print(Console(file=io.StringIO(), width=200))
