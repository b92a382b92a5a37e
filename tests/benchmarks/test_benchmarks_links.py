"""The benchmark between two hosts, small."""

from __future__ import annotations

import pytest

from benchmarks import links
from benchmarks.measure import Effort
from tests.hosts.network import missing

pytestmark = pytest.mark.own_cluster


def test_each_case_is_measured_at_a_limited_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = missing()
    if lacking is not None:
        pytest.skip(lacking)
    monkeypatch.setattr(links, "RATES", {"1 Gbit/s": ("1gbit", 1)})
    rows = links.run(Effort.QUICK).rows
    assert len(rows) == 7
    assert all(row.ours.low > 0 and (row.limit_s or row.peer) for row in rows)
    assert not any(row.goals for row in rows)
