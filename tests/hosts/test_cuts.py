"""Links are cut: for a second, and then until a host is given up. The promises of docs/design/hosts.md."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import pytest

from tests.hosts.cluster import WAIT_S, FailedError
from tests.hosts.conftest import HOSTS
from tests.hosts.ground import FORK, LOAD, NAMES, SAVE, TIMEOUT_S, Ground, Loading, Saving, forks_at
from tests.hosts.network import cuts
from tests.support.waiting import eventually

pytestmark = [pytest.mark.own_cluster, pytest.mark.timeout(900)]

SECOND_S = 1.0
GIVEN_UP_S = 120.0
"""By when a host that does not answer is given up, on a busy machine."""
CUTS = cuts(HOSTS)
PAIRS = [cut for cut in CUTS if "-" in cut]
BATCHES = (SAVE[:3], SAVE[3:5], SAVE[5:])
"""Steps at which saves of different hosts are when links are cut."""
JOIN, DRAIN = (
    ("catalog.grow.before", "catalog.present.before", "catalog.report.before"),
    ("catalog.drain.before", "shard.orders.before", "catalog.drained.before"),
)
"""Steps of a change of the shards, in the order in which it comes there."""


@pytest.fixture(scope="class")
def run(ground: Ground) -> Iterator[str]:
    """A training on hosts 2 and 3, begun on host 1."""
    at, client = ground.hosts, ground.hosts.client(1)
    client.do("train", run="run", nodes=[at.id_of(2), at.id_of(3)])
    yield "run"
    client.do("end", run="run")


class TestASecond:
    """Links are cut for a second: nobody is given up, and nothing fails."""

    @pytest.mark.parametrize("cut", CUTS)
    def test_saves_and_loads_go_on(self, ground: Ground, cut: str) -> None:
        ground.expected.update(SAVE, LOAD)
        names = dict(zip(SAVE, NAMES, strict=False))
        for batch in BATCHES:
            begun: list[Saving | Loading] = []
            for step in batch:
                name, host = names[step], ground.host()
                if "begin" in step:  # the saver does not know the parent's table yet
                    other = ground.host()
                    ground.settle([ground.save(r, name, other) for r in ground.records], certain=True)
                begun += ground.begin_until(step, lambda r: ground.save(r, name, host))  # noqa: B023
            for step in LOAD if batch is BATCHES[0] else ():
                host = ground.host()
                begun += ground.begin_until(step, lambda r: ground.load(r, NAMES[-1], host))  # noqa: B023
            ground.cut_for(CUTS[cut], SECOND_S)
            ground.settle(begun, certain=True)
        ground.judge(ground.hosts.network.hosts, names.values())

    @pytest.mark.parametrize("cut", [*PAIRS, "1>3"])
    @pytest.mark.parametrize(("shards", "steps"), [(4, JOIN), (3, DRAIN)], ids=["join", "drain"])
    def test_changes_of_the_shards_go_on(self, ground: Ground, shards: int, steps: tuple[str, ...], cut: str) -> None:
        ground.expected.update(steps)
        client = ground.hosts.client(1)
        changes = ground.begin_until(
            steps[0], lambda r: client.begin("scale", repository=r, shards=shards, timeout=TIMEOUT_S)
        )
        meanwhile: list[Saving | Loading] = []
        for following in (*steps[1:], None):
            gates = ground.arm(following) if following else []
            meanwhile += [ground.save(r, NAMES[0], 2) for r in ground.records]
            meanwhile += [ground.load(r, NAMES[1], 3) for r in ground.records]
            ground.cut_for(CUTS[cut], SECOND_S)
            ground.await_stops(gates, changes if gates else ())
        for change in changes:
            change.result(TIMEOUT_S + WAIT_S)
        ground.settle(meanwhile, certain=True)
        ground.judge(ground.hosts.network.hosts, NAMES[:2])

    @pytest.mark.parametrize(("step", "cut"), list(zip(FORK, cycle(PAIRS))))
    def test_forks_go_on(self, ground: Ground, run: str, step: str, cut: str) -> None:
        ground.expected.add(step)
        clones = f"clones-{step}-{cut}"
        gate = ground.hosts.gate(forks_at(step, run, clones), step)
        forking = ground.hosts.client(1).begin("fork", run=run, clones=clones, timeout=TIMEOUT_S)
        assert ground.await_stops([gate], [forking])
        ground.cut_for(CUTS[cut], SECOND_S)
        forking.result(TIMEOUT_S + WAIT_S)

    def test_all_go_on(self, ground: Ground) -> None:
        """Every step was come to, and all that was ever saved is there, on all hosts."""
        ground.judge(ground.hosts.network.hosts, whole=True)
        assert ground.reached == ground.expected


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


def test_nothing_is_left(ground: Ground) -> None:
    ground.retire_all()
    assert ground.left() == {}


def flush(ground: Ground) -> None:
    """Have all that has a path on it: what is not yet, may be lost with a host."""
    for repository in ("path", "both"):
        ground.hosts.client(1).do("flush", repository=repository)
