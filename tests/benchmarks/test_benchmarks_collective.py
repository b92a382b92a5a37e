"""The benchmark of groups: its parties, and all of it, quick."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks import collective
from benchmarks.collective import Case
from benchmarks.collective_member import RAW, Member, _expect
from benchmarks.measure import MIB, Effort


@pytest.fixture
def ends() -> Iterator[list[Member]]:
    """Two members, with a raw socket between them."""
    members = [Member(), Member()]
    joining = threading.Thread(target=members[0].join, args=(RAW, RAW, 0, 2, 0))
    joining.start()
    members[1].join(RAW, RAW, 1, 2, members[0].port())
    joining.join(10)
    yield members
    for member in members:
        member.close()


def test_the_raw_socket_brings_what_was_sent_there_and_back(ends: list[Member]) -> None:
    found: list[Any] = [None, None]

    def act(rank: int) -> None:
        ends[rank].check(RAW, 2, collectives=False)
        found[rank] = ends[rank].back_and_forth(RAW, MIB, 3)

    other = threading.Thread(target=act, args=(1,))
    other.start()
    act(0)
    other.join(10)
    assert all(0 < seconds < 5 for seconds in found)


def test_wrong_numbers_are_noticed() -> None:
    with pytest.raises(RuntimeError, match="gloo 2: broadcast: expected 1 everywhere"):
        _expect(np.array([1, 2]), 1, "gloo 2: broadcast")


def test_small_arrays_are_sent_more_often() -> None:
    assert [Case("send", nbytes, 2).repeats for nbytes in (1 << 10, MIB, 64 * MIB)] == [100, 32, 1]
    assert str(Case("broadcast", 1 << 10, 4)) == "broadcast 1 KiB, 4 ranks"


def test_the_quick_benchmark_measures_all_back_ends(cluster: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(collective.PLANS, Effort.QUICK, collective.Plan(1, (4 * MIB,), (MIB,), (2,)))
    monkeypatch.setattr(collective, "HEADLINE", ("gloo", collective.MESSAGE, 4 * MIB))
    report = json.loads(json.dumps(collective.run(Effort.QUICK).as_dict()))
    assert report["benchmark"] == "collective"
    assert (report["case"], report["size_bytes"]) == ("gloo: send 4 MiB", 4 * MIB)
    assert report["goals"][0]["goal"].partition(": ")[2].startswith("of a raw loopback socket's bandwidth")
    for key in ("ours_s", "peer_s", "ratio", "limit_s", "limit_ratio"):
        assert report[key] > 0
    cases = {(row["backend"], row["kind"]) for row in report["rows"]}
    assert cases >= {(backend, kind) for backend in ("shared", "gloo") for kind in ("send", "broadcast", "all_reduce")}
