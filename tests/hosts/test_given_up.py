"""A host does not answer until its shards have started again elsewhere; then it comes back. The second table of
docs/design/hosts.md."""

from __future__ import annotations

import pytest

from tests.hosts.cluster import FailedError
from tests.hosts.conftest import HOSTS
from tests.hosts.ground import NAMES, Ground
from tests.hosts.network import cuts
from tests.support.waiting import eventually

pytestmark = [pytest.mark.own_cluster, pytest.mark.timeout(900)]

CUTS = cuts(HOSTS)
GIVEN_UP_S = 120.0
"""By when a host that does not answer is given up, on a busy machine."""


class TestGivenUp:
    """A host does not answer until its shards have started again elsewhere; then it comes back."""

    @pytest.mark.parametrize(("host", "cut"), [(3, "3 alone"), (3, "3>1"), (2, "2 alone")], ids=str)
    def test_others_go_on_and_it_serves_nothing_stale(self, ground: Ground, host: int, cut: str) -> None:
        at = ground.hosts
        others = [other for other in at.network.hosts if other != host]
        ground.settle([ground.save(r, NAMES[-1], host, "disk") for r in ("path", "both")], certain=True)
        ground.records["memory"].may_lose_all()
        ground.settle([ground.load(r, name, host) for r in ground.records for name in NAMES[:3]], certain=True)
        flush(ground)
        with at.cut(*CUTS[cut]):
            cut_off = [ground.save(r, NAMES[0], host) for r in ground.records]
            eventually(
                lambda: not at.is_alive(host),
                f"host {host} to be given up",
                timeout=GIVEN_UP_S,
                pause=0.1,
                ignoring=(FailedError,),
            )
            for name in NAMES[:3]:  # first saves of lost names among them
                ground.settle([ground.save(r, name, others[0]) for r in ground.records], certain=True)
            ground.settle([ground.load(r, name, others[1]) for r in ground.records for name in NAMES[:3]], certain=True)
            stale = [ground.load(r, name, host) for r in ground.records for name in NAMES[:3]]
        ground.settle([*cut_off, *stale], certain=False)
        at.forget(host)
        at.join(host)
        ground.judge(at.network.hosts, whole=True)
        ground.settle([ground.save(r, name, host) for r in ground.records for name in NAMES], certain=True)
        ground.judge(at.network.hosts)

    def test_nothing_is_left(self, ground: Ground) -> None:
        ground.retire_all()
        assert ground.left() == {}


def flush(ground: Ground) -> None:
    """Have all that has a path on it: what is not yet, may be lost with a host."""
    for repository in ("path", "both"):
        ground.hosts.client(1).do("flush", repository=repository)
