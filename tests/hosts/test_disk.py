"""The disk is full for one host of two. Modelled is a file system that both reach and that gives that host no room, as
with a quota of a host: of its processes, what takes room on the path fails with ENOSPC, while what they read and
delete, and all that the other host does there, goes on (`tests.soak.disk`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.hosts.cluster import WAIT_S, FailedError, Hosts, hosts
from tests.hosts.network import missing
from tests.soak.disk import Disk, why_not

pytestmark = [pytest.mark.own_cluster, pytest.mark.timeout(600)]

FULL, OTHER = 2, 1
"""Hosts."""
ALONE, TWICE = "alone", "twice"
"""Repositories, with one replica and with two."""
NAMES = ("n0", "n1")
NO_ROOM = "StorageError.*No space left on device"
SHORT_S = 5.0
"""Of what waits for a disk that is full."""


class Ground:
    """The hosts, and what was saved."""

    def __init__(self, at: Hosts, disk: Disk) -> None:
        self.at, self.disk, self.path = at, disk, disk.folder
        self.saved: dict[str, dict[str, int]] = {ALONE: {}, TWICE: {}}
        """Repository -> version -> seed."""
        self._seed = 0

    def save(self, host: int, repository: str, name: str, durability: str = "memory", timeout: float = WAIT_S) -> None:
        self._seed += 1
        asked = {"repository": repository, "name": name, "seed": self._seed, "durability": durability}
        version = self.at.client(host).do("save", timeout=timeout, **asked)
        self.saved[repository][f"{name}@{version}"] = self._seed

    def check(self, repository: str) -> None:
        """Both hosts find what was saved, and nothing else."""
        for host in (OTHER, FULL):
            client = self.at.client(host)
            assert client.do("models", repository=repository) == sorted(self.saved[repository])
            found = {
                model: client.do("load", repository=repository, model=model, timeout=WAIT_S)
                for model in self.saved[repository]
            }
            assert found == self.saved[repository], f"{repository}, on host {host}"

    def start(self, repository: str) -> None:
        options = {"shards": 2, "path": str(self.path / repository), "replicas": 2 if repository == TWICE else 1}
        self.at.client(OTHER).do("start", repository=repository, options=options)

    def flush_refused(self, repository: str) -> None:
        """Flush until that fails because the disk is full, which it may not have said the first time."""
        deadline = time.monotonic() + WAIT_S
        while True:
            with pytest.raises(FailedError) as failed:
                self.at.client(OTHER).do("flush", repository=repository, timeout=SHORT_S / 10)
            if failed.value.kind == "StorageError":
                failed.match(NO_ROOM)
                return
            assert failed.value.kind == "OperationTimeoutError"
            assert time.monotonic() < deadline, "expected the disk to be full"


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    lacking = missing() or why_not()
    if lacking is not None:
        pytest.skip(lacking)
    made: list[Disk] = []

    def own(folder: Path) -> Mapping[int, Mapping[str, str]]:
        made.append(Disk(folder / "path", folder))
        return {FULL: made[0].environment}

    with hosts(2, own=own) as started:
        yield Ground(started, made[0])


@pytest.fixture(autouse=True)
def _closed(ground: Ground) -> Iterator[None]:
    yield
    ground.disk.heal()


def test_saves_go_on_or_fail_by_name(ground: Ground) -> None:
    ground.start(ALONE)
    for host in (OTHER, FULL):
        for name in NAMES:
            ground.save(host, ALONE, name, "disk")
    ground.disk.trouble("full disk")
    for name in NAMES:
        ground.save(OTHER, ALONE, name, "disk")  # nothing of it that is not on the path is the full host's
        with pytest.raises(FailedError, match=NO_ROOM):
            ground.save(FULL, ALONE, name, "disk", SHORT_S)
    ground.check(ALONE)  # versions that failed are not there
    for host in (OTHER, FULL):
        for name in NAMES:
            ground.save(host, ALONE, name)
    ground.flush_refused(ALONE)
    ground.save(OTHER, ALONE, NAMES[0], "disk")  # what it inherits is on the path
    ground.check(ALONE)
    ground.disk.heal()
    ground.at.client(FULL).do("flush", repository=ALONE)
    ground.save(FULL, ALONE, NAMES[0], "disk")
    assert ground.at.client(OTHER).do("checked", repository=ALONE) == []
    ground.at.client(OTHER).do("stop", prefix=ALONE)
    ground.at.forget(FULL)
    assert not list((ground.path / ALONE).rglob("*.tmp"))
    ground.start(ALONE)
    ground.check(ALONE)
    assert ground.at.client(FULL).do("checked", repository=ALONE) == []
    ground.at.client(OTHER).do("stop", prefix=ALONE)


def test_another_host_writes_what_a_full_one_could_not(ground: Ground) -> None:
    """The full host ends: replicas have what waited there, and go to the path by the other host."""
    ground.start(TWICE)
    ground.disk.trouble("full disk")
    for host in (OTHER, FULL):
        for name in NAMES:
            ground.save(host, TWICE, name)
    ground.flush_refused(TWICE)
    ground.at.forget(FULL)
    ground.at.end(FULL)
    ground.at.await_placed(TWICE, OTHER, OTHER)  # the full host's shard starts there
    ground.at.client(OTHER).do("flush", repository=TWICE)
    assert ground.at.client(OTHER).do("checked", repository=TWICE) == []
    ground.at.join(FULL)
    ground.check(TWICE)
