"""The planner's sums of what clients report."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tensorvine.actors.planner.counting import LIVE_S, ClientCounts

CLIENTS = st.sampled_from("abc")


class Clock:
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(CLIENTS, st.integers(1, 4), st.booleans())))
def test_a_report_counts_once_however_often_it_arrives(reports: list[tuple[str, int, bool]]) -> None:
    counts, serials, total = ClientCounts(), dict.fromkeys("abc", 0), 0
    for client, amount, again in reports:
        serials[client] += 1
        total += amount
        for _ in range(1 + again):
            counts.report(client, serials[client], {"versions_refused": [float(amount)]}, {})
    assert counts.total.get("versions_refused", [0.0]) == [total]


@given(st.lists(st.tuples(CLIENTS, st.integers(0, 100))))
def test_gauges_are_sums_or_greatest_values_of_the_last_reports(reports: list[tuple[str, int]]) -> None:
    counts, last = ClientCounts(), dict[str, float]()
    for serial, (client, lag) in enumerate(reports, 1):
        last[client] = float(lag)
        counts.report(client, serial, {}, {"consumers": 1.0, "consumer_lag_versions": float(lag)})
    found = counts.gauges()
    assert found.get("consumers", 0.0) == counts.live() == len(last)
    assert found.get("consumer_lag_versions", 0.0) == max(last.values(), default=0.0)


def test_counts_of_clients_that_ended_stay_and_their_gauges_go() -> None:
    clock = Clock()
    counts = ClientCounts(clock)
    counts.report("closed", 1, {"versions_refused": [1.0]}, {"consumers": 1.0})
    counts.report("silent", 1, {"versions_refused": [2.0]}, {"consumers": 1.0})
    counts.report("closed", 2, {"versions_refused": [4.0]}, None)
    assert (counts.gauges(), counts.live()) == ({"consumers": 1.0}, 1)
    clock.now += LIVE_S + 1.0
    assert (counts.gauges(), counts.live()) == ({}, 0)
    counts.report("closed", 2, {"versions_refused": [4.0]}, None)
    assert counts.total == {"versions_refused": [7.0]}
