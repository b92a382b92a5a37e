"""The benchmark of short calls, quick."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import calls
from benchmarks.measure import Effort, Report, Sample


def test_calls_stand_beside_the_floor_and_calls_by_a_handle(cluster: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(calls.ROUNDS, Effort.QUICK, (5, 1))
    report = Report("calls")
    calls.within_a_node(report, Effort.QUICK)
    found = report.as_dict()
    cases = [f"{what} {when}" for when in ("one after the other", "after 0.2 s") for what in ("a call", "info", "save")]
    assert len(found["rows"]) == len(cases)
    assert all(row["case"].startswith(case.split()[0]) for row, case in zip(found["rows"], cases, strict=True))
    for row in found["rows"]:
        assert row["ours_s"] > 0
        assert row["limit"] == calls.NEAR
        assert row["limit_ratio"] == pytest.approx(row["ours_s"] / row["limit_s"])
        assert row["peer"] == (calls.PEER if row["case"].startswith("a call") else None)
    assert found["case"] == "a call after 0.2 s", "the headline is of calls as they are made"


def test_each_row_is_compared_with_the_floor_of_its_pace() -> None:
    names = (calls.CALL, calls.PEER, calls.AWAY, calls.INFO, calls.SAVE)
    samples = {name: Sample((seconds,)) for name, seconds in zip(names, (1.0, 4.0, 0.5, 2.0, 3.0), strict=True)}
    rows = list(calls.rows("between nodes: ", "now and then", samples, calls.AWAY))
    assert rows[0].case == "between nodes: a call now and then"
    assert [row.limit_ratio for row in rows] == [2.0, 4.0, 6.0]
    assert rows[0].goals[0].value == 4.0


@pytest.mark.parametrize("ends", [socket.socketpair, calls.connected])
def test_a_byte_comes_back(ends: Callable[[], tuple[socket.socket, socket.socket]]) -> None:
    with calls.echo(ends()) as there_and_back:
        for _ in range(3):
            there_and_back()


SCRIPT = """
import json
from benchmarks import calls
from benchmarks.measure import Effort, Report

calls.ROUNDS[Effort.QUICK] = 5, 1
report = Report("calls")
calls.between_nodes(report, Effort.QUICK)
print(json.dumps(report.as_dict()["rows"]))
"""


@pytest.mark.own_cluster
@pytest.mark.timeout(240)
def test_calls_of_another_raylet_go_by_a_socket() -> None:
    """In a process of its own, for it starts two raylets."""
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, timeout=220)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = json.loads(run.stdout.splitlines()[-1])
    assert len(rows) == 6
    assert all(row["case"].startswith(calls.BETWEEN) and row["limit"] == calls.AWAY for row in rows)
