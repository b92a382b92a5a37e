"""The benchmarks of a repository that grows and shrinks: what was served in a span, and both of them, small."""

from __future__ import annotations

import pytest

from benchmarks import elastic, query_scaling
from benchmarks.measure import Effort
from benchmarks.traffic import Served


def test_what_was_under_way_in_a_span_counts() -> None:
    served = Served((0.0, 1.0, 2.0, 3.0), (0.5, 1.5, 0.1, 1.0), ())
    assert served.between(2.2, 3.5).took_s == (1.5, 1.0)
    assert served.between(2.2, 3.5).longest_s == 1.5
    assert served.between(9.0, 10.0).longest_s == 0.0


def test_shards_join_and_drain_under_traffic(cluster: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(elastic.SIZES, Effort.QUICK, elastic.Sizes(24, 4096))
    monkeypatch.setattr(elastic, "STEADY_S", 0.1)
    grown, shrunk = elastic.run(Effort.QUICK).rows
    for row in (grown, shrunk):
        assert row.facts["metadata_bytes_total"] > 0
        assert row.facts["metadata_bytes_moved"] > 0  # of what is saved meanwhile, too: there is no bound
        assert row.facts["reads_per_s_during"] > 0
        assert row.facts["saves_per_s_before"] > 0
    assert grown.facts["tensor_bytes_moved"] == 0
    assert grown.limit_s is None
    assert shrunk.facts["tensor_bytes_moved"] > 0
    assert shrunk.limit_s


def test_queries_are_asked_at_each_number_of_callers_and_shards(
    cluster: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(query_scaling.SIZES, Effort.QUICK, query_scaling.Sizes(200, 8, (1, 2), (1, 2)))
    report = query_scaling.run(Effort.QUICK)
    assert [(row.facts["callers"], row.facts["shards"]) for row in report.rows] == [(1, 1), (2, 1), (1, 2), (2, 2)]
    assert all(row.ratio and row.ratio > 0 for row in report.rows)
