"""What lies on which host, and a search whose clients are on two: docs/design/catalog.md."""

from __future__ import annotations

import time
from collections.abc import Iterator
from threading import Event

import pytest

from tests.hosts.cluster import WAIT_S, Hosts, hosts
from tests.hosts.content import WIDTHS
from tests.hosts.network import missing

pytestmark = [pytest.mark.own_cluster, pytest.mark.timeout(600)]

HOSTS = (1, 2)
PLAIN, TWICE = "plain", "twice"
"""Repositories, with one replica and with two."""
BLOCKS = 4 * sum(WIDTHS.values()) // 2
"""Bytes that lie in blocks when a model is saved, at least."""
CANDIDATES = 12


@pytest.fixture(scope="module")
def at() -> Iterator[Hosts]:
    lacking = missing()
    if lacking is not None:
        pytest.skip(lacking)
    with hosts(len(HOSTS)) as started:
        for repository in (PLAIN, TWICE):
            options = {"shards": 2, "replicas": 2 if repository == TWICE else 1}
            started.client(1).do("start", repository=repository, options=options)
        yield started


@pytest.fixture(autouse=True)
def _closed() -> None:
    """Stand in for that of the other files, who share other hosts."""


def stats(at: Hosts, repository: str, fact: str) -> list[int]:
    """Return something of the stats of each host's shard."""
    found = at.client(1).do("stats", repository=repository, fact=fact)
    return [found[at.id_of(host)] for host in HOSTS]


@pytest.mark.parametrize("repository", [PLAIN, TWICE])
def test_bytes_lie_where_they_were_saved_and_copies_elsewhere(at: Hosts, repository: str) -> None:
    names = [f"m{number}" for number in range(8)]
    for host in HOSTS:
        here, there = host - 1, 2 - host
        memory, mirrored = stats(at, repository, "bytes_memory"), stats(at, repository, "bytes_replicated")
        for name in names:
            asked = {"repository": repository, "name": f"{name}-{host}", "seed": 1, "durability": "memory"}
            at.client(host).do("save", timeout=WAIT_S, **asked)
        more = [now - before for now, before in zip(stats(at, repository, "bytes_memory"), memory, strict=True)]
        assert more[here] >= len(names) * BLOCKS
        assert more[there] == 0
        copied = [now - before for now, before in zip(stats(at, repository, "bytes_replicated"), mirrored, strict=True)]
        assert copied[here] == 0
        assert copied[there] >= more[here] if repository == TWICE else copied[there] == 0
    for host in HOSTS:
        for name in names:
            assert at.client(host).do("load", repository=repository, model=f"{name}-{3 - host}", timeout=WAIT_S) == 1


def test_a_search_on_two_hosts_inherits_as_on_one(at: Hosts) -> None:
    repositories = dict(zip(HOSTS, (PLAIN, TWICE), strict=True))
    for host, repository in repositories.items():
        at.client(host).do("search", repository=repository, run="alone", candidates=CANDIDATES)
    alone = [
        at.client(3 - host).do("lineages", repository=repository, prefix="alone")
        for host, repository in repositories.items()
    ]
    assert alone[0] == alone[1]  # whichever host, with replicas and without
    assert len(alone[0]) == CANDIDATES

    begun = [
        at.client(host).begin("search", repository=PLAIN, run=f"both{host}", candidates=CANDIDATES) for host in HOSTS
    ]
    for each in begun:
        each.result(WAIT_S)
    for host in HOSTS:  # each inherits from what the other has stored just before
        name = at.client(host).do("candidate", repository=PLAIN, name=f"both-{host}", kinds="zz" + "xy"[host - 1])
    assert name == "both-1@1"
    both, again = (at.client(host).do("lineages", repository=PLAIN, prefix="both") for host in HOSTS)
    assert both == again
    assert len(both) == len(HOSTS) * (CANDIDATES + 1)
    assert {lineage[-1] for lineage in (both | alone[0]).values()} == {"alone-0@1"}  # all have its input layer

    client = at.client(2)
    for repository in repositories.values():
        for model in client.do("models", repository=repository):
            client.do("retire", repository=repository, model=model)
        deadline = time.monotonic() + WAIT_S
        while left := client.do("left", repository=repository):
            assert time.monotonic() < deadline, left
            Event().wait(0.1)
