"""What is promised, on hosts whose links are cut: each cell of the table in docs/design/hosts.md."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.hosts.cluster import WAIT_S, FailedError, Hosts, hosts
from tests.hosts.ground import LOAD, NAMES, SAVE, TIMEOUT_S, Ground, Loading, Saving
from tests.hosts.network import Link, around, both, missing

LACKING = missing()
pytestmark = [
    pytest.mark.own_cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(LACKING is not None, reason=LACKING or ""),
]

HOSTS = 3
SECOND_S = 1.0
GIVEN_UP_S = 120.0
"""By when a host that does not answer is given up, on a busy machine."""
PAIRS = ((1, 2), (1, 3), (2, 3))
CUTS: dict[str, tuple[Link, ...]] = {
    **{f"{a}-{b}": both(a, b) for a, b in PAIRS},
    **{f"{a}>{b}": ((a, b),) for pair in PAIRS for a, b in both(*pair)},
    **{f"{host} alone": around(host, HOSTS) for host in range(1, HOSTS + 1)},
}
"""Both directions of a pair, one of them, and all links of a host."""
BATCHES = (SAVE[:3], SAVE[3:5], SAVE[5:])
"""Steps at which saves of different hosts are when links are cut."""
JOIN, DRAIN = (
    ("learn.before", "hand_over.before", "take.before"),
    ("copy_out.before", "move_segments.before", "arrived.before"),
)
"""Steps of a change of the shards, in the order in which it comes there."""
FORK = ("describe.before", "arm.before", "arm.after", "start.before", "adopt.before")
"""Steps of a fork, at the training's ranks or at the clones'."""


@pytest.fixture(scope="module")
def cluster_of_hosts() -> Iterator[Hosts]:
    with hosts(HOSTS) as started:
        yield started


@pytest.fixture(scope="module")
def ground(cluster_of_hosts: Hosts) -> Ground:
    return Ground(cluster_of_hosts)


@pytest.fixture(autouse=True)
def _closed(ground: Ground) -> Iterator[None]:
    yield
    ground.close()


@pytest.fixture(scope="module")
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
        names = dict(zip(SAVE, NAMES, strict=False))
        for batch in BATCHES:
            begun: list[Saving | Loading] = []
            for step in batch:
                name, host = names[step], ground.host()
                begun += ground.begin_until(step, lambda r: ground.save(r, name, host))  # noqa: B023
            for step in LOAD if batch is BATCHES[0] else ():
                host = ground.host()
                begun += ground.begin_until(step, lambda r: ground.load(r, NAMES[-1], host))  # noqa: B023
            ground.cut_for(CUTS[cut], SECOND_S)
            ground.settle(begun, certain=True)
        ground.judge(ground.hosts.network.hosts, names.values())

    @pytest.mark.parametrize("cut", ["2-3", "1>3"])
    @pytest.mark.parametrize(("shards", "steps"), [(4, JOIN), (3, DRAIN)], ids=["join", "drain"])
    def test_changes_of_the_shards_go_on(self, ground: Ground, shards: int, steps: tuple[str, ...], cut: str) -> None:
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

    @pytest.mark.parametrize("step", FORK)
    def test_forks_go_on(self, ground: Ground, run: str, step: str) -> None:
        clones = f"clones-{step}"
        gate = ground.hosts.gate(clones if step in ("start.before", "adopt.before") else run, step)
        forking = ground.hosts.client(1).begin("fork", run=run, clones=clones, timeout=TIMEOUT_S)
        ground.await_stops([gate], [forking])
        assert not forking.done()
        ground.cut_for(both(2, 3), SECOND_S)
        forking.result(TIMEOUT_S + WAIT_S)

    def test_all_go_on(self, ground: Ground) -> None:
        """Every step was come to, and all that was ever saved is there, on all hosts."""
        ground.judge(ground.hosts.network.hosts, whole=True)
        assert ground.reached == {*SAVE, *LOAD, *JOIN, *DRAIN, *FORK}


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
            until(lambda: not at.is_alive(host), f"host {host} to be given up")
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


def until(reached: Any, what: str) -> None:
    """Wait until something is so."""
    for _ in range(int(GIVEN_UP_S / 0.1)):
        try:
            if reached():
                return
        except FailedError:
            pass
        threading.Event().wait(0.1)
    pytest.fail(f"expected within {GIVEN_UP_S} s: {what}")
