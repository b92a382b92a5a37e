"""A repository starts on one host and follows four: they join, one is told to leave, one is cut off for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from tests.hosts.cluster import WAIT_S, FailedError, Hosts, hosts
from tests.hosts.network import around, missing

pytestmark = [pytest.mark.own_cluster, pytest.mark.timeout(900)]

HOSTS = 4
MEMORY, PATH = "grown", "kept"
SEEDS = {f"m{number}": number for number in range(24)}


@pytest.fixture(scope="module")
def at() -> Iterator[Hosts]:
    lacking = missing()
    if lacking is not None:
        pytest.skip(lacking)
    with hosts(HOSTS, joined=1) as started:
        yield started


@pytest.fixture(autouse=True)
def _closed() -> None:
    """Stand in for that of the other files, who share other hosts."""


def placed(at: Hosts, *wanted: int) -> None:
    """Wait until there is one shard on each of these hosts, and no other."""
    for repository in (MEMORY, PATH):
        at.await_placed(repository, *wanted)


def save(at: Hosts, host: int, seeds: dict[str, int]) -> None:
    for repository in (MEMORY, PATH):
        for name, seed in seeds.items():
            at.client(host).do("save", repository=repository, name=name, seed=seed, durability="memory", timeout=60.0)


def check(at: Hosts, repository: str, seeds: dict[str, int], *readers: int) -> None:
    for host in readers:
        found = {name: at.client(host).do("load", repository=repository, model=name, timeout=60.0) for name in seeds}
        assert found == seeds, f"{repository}, read on host {host}"


def test_hosts_join_leave_and_are_cut_off(at: Hosts) -> None:
    first = at.client(1)
    first.do("start", repository=MEMORY, options={})
    first.do("start", repository=PATH, options={"path": str(at.folder / "path")})
    placed(at, 1)
    save(at, 1, SEEDS)
    reading = [first.begin("read", repository=repository, seeds=SEEDS) for repository in (MEMORY, PATH)]
    for host in range(2, HOSTS + 1):
        at.join(host)
        placed(at, *range(1, host + 1))
    late = {host: {f"late{host}-{number}": 10 * host + number for number in range(3)} for host in (2, 3, 4)}
    for host, some in late.items():
        save(at, host, some)
    everything = SEEDS | late[2] | late[3] | late[4]
    first.do("warn", node=at.id_of(4))
    placed(at, 1, 2, 3)
    at.forget(4)
    at.end(4)
    first.do("enough")
    for told in reading:
        read = told.result(WAIT_S)
        assert read["wrong"] == []
        assert read["loads"] > len(SEEDS)
    for repository in (MEMORY, PATH):
        check(at, repository, everything, 1, 2, 3)

    first.do("flush", repository=PATH)
    there = at.id_of(3)
    lost = {name for name in everything if there in first.do("holders", repository=MEMORY, name=name)}
    assert late[3].keys() <= lost < everything.keys()
    with at.cut(*around(3, HOSTS)):
        deadline = time.monotonic() + WAIT_S
        while at.is_alive(3):
            assert time.monotonic() < deadline, "expected host 3 to be given up"
            threading.Event().wait(0.1)
        placed(at, 1, 2)
        check(at, PATH, everything, 1, 2)
        kept = {name: seed for name, seed in everything.items() if name not in lost}
        check(at, MEMORY, kept, 1, 2)
        for name in lost:
            with pytest.raises(FailedError, match=f"ModelLostError.*{name}"):
                first.do("load", repository=MEMORY, model=name, timeout=60.0)
    at.forget(3)
    at.join(3)
    placed(at, 1, 2, 3)
    save(at, 3, dict.fromkeys(lost, 7))
    for host in (1, 2, 3):
        check(at, MEMORY, kept | dict.fromkeys(lost, 7), host)
        assert at.client(host).do("checked", repository=PATH) == []
