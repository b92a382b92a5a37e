"""Clocks of the day differ: that of host 2 is an hour ahead, that of host 3 an hour behind. The monotonic clocks are as
they are. Shown is what docs/design/hosts.md says of clocks.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from tests.hosts.cluster import WAIT_S, Hosts, hosts
from tests.hosts.network import address, missing
from tests.support.clock import clock_off
from tests.support.preload import compiler

pytestmark = [pytest.mark.own_cluster, pytest.mark.timeout(900)]

HOUR_S = 3600
OFF = {1: 0, 2: HOUR_S, 3: -HOUR_S}
MEMORY, PATH = "memory", "path"
NAMES = tuple(f"n{number}" for number in range(6))


@pytest.fixture(scope="module")
def at() -> Iterator[Hosts]:
    lacking = missing() or ("no C compiler was found, so clocks stay right" if compiler() is None else None)
    if lacking is not None:
        pytest.skip(lacking)

    def own(folder: Path) -> Mapping[int, Mapping[str, str]]:
        return {host: clock_off(seconds, folder) for host, seconds in OFF.items() if seconds}

    with hosts(len(OFF), joined=2, own=own) as started:
        yield started


@pytest.fixture(autouse=True)
def _closed() -> None:
    """Stand in for that of the other files, who share other hosts."""


class Saves:
    """What was saved: the seed of a version is its number."""

    def __init__(self, at: Hosts) -> None:
        self.at = at
        self.newest = dict.fromkeys(NAMES, 0)

    def save(self, host: int, name: str, repositories: Sequence[str] = (MEMORY, PATH)) -> None:
        self.newest[name] += 1
        for repository in repositories:
            asked = {"repository": repository, "name": name, "seed": self.newest[name], "durability": "memory"}
            assert self.at.client(host).do("save", timeout=WAIT_S, **asked) == self.newest[name]

    def check(self, repository: str, *readers: int) -> None:
        """Each reader finds the newest, and what was before it; no version is older than that."""
        for host in readers:
            client = self.at.client(host)
            for name, newest in self.newest.items():
                refs = [f"{name}@{version}" for version in range(1, newest + 1)]
                found = [client.do("load", repository=repository, model=m, timeout=WAIT_S) for m in (*refs, name)]
                assert found == [*range(1, newest + 1), newest]
                created = [client.do("created", repository=repository, model=ref) for ref in refs]
                assert created == sorted(created)


def placed(at: Hosts, *wanted: int) -> None:
    for repository in (MEMORY, PATH):
        at.await_placed(repository, *wanted)


def hours(shown: float) -> float:
    """Return by how many hours a clock is off that has just shown this."""
    return round((shown - time.time()) / HOUR_S, 1)


def shown_by_raylet(at: Hosts, host: int) -> float:
    """Return the latest time in the log of a host's raylet; hosts of other tests have the same addresses."""
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or [""]
        ours = command[0].endswith("/raylet") and any(str(at.folder) in word for word in command)
        if ours and f"--node_ip_address={address(host)}" in command:
            said = Path(f"/proc/{process.pid}/fd/1").read_text()
            stamp = re.findall(r"^\[([-\d]+ [:\d]+),", said, re.MULTILINE)[-1]
            return datetime.fromisoformat(stamp).timestamp()
    raise ProcessLookupError(f"expected a raylet on host {host}")


def test_numbers_and_monotonic_clocks_count(at: Hosts) -> None:
    first = at.client(1)
    first.do("start", repository=MEMORY, options={})
    on_path = {"path": str(at.folder / "path"), "keep": "last(1)"}
    at.client(2).do("start", repository=PATH, options=on_path)
    placed(at, 1, 2)
    saves = Saves(at)
    for host in (1, 2):
        for name in NAMES:
            saves.save(host, name)
    at.join(3)
    placed(at, 1, 2, 3)
    for host, seconds in OFF.items():
        assert hours(at.client(host).do("clock")) == hours(shown_by_raylet(at, host)) == seconds / HOUR_S
    for repository, host in ((MEMORY, 1), (PATH, 2)):
        assert first.do("catalog", repository=repository) == at.id_of(host)
        first.do("candidate", repository=repository, name="first", kinds="2yz")
        assert hours(first.do("created", repository=repository, model="first")) == OFF[host] / HOUR_S
    waiting = [
        at.client(host).begin("await_newer", repository=MEMORY, name=NAMES[0], after=2, timeout=WAIT_S) for host in OFF
    ]
    for host in (2, 1, 3):
        for name in NAMES:
            saves.save(host, name)
    assert all(each.result(WAIT_S) in (3, 4, 5) for each in waiting)  # the newest when it looked
    for repository in (MEMORY, PATH):
        saves.check(repository, *OFF)

    # from here on the path's catalog is where it is earlier than its newest versions were created
    ids = [at.id_of(host) for host in OFF]
    first.do("train", run="run", nodes=[ids[2]] * 2)
    first.do("fork", run="run", clones="clones", timeout=WAIT_S)
    first.do("end", run="run")
    first.do("warn", node=ids[1])
    placed(at, 1, 3)
    at.forget(2)
    at.end(2)
    assert first.do("candidate", repository=PATH, name="first", kinds="2yz") == "first@1"
    assert first.do("candidate", repository=PATH, name="other", kinds="2yz") == "first@2"
    assert hours(first.do("created", repository=PATH, model="first")) > 0.5
    assert hours(first.do("created", repository=PATH, model="other")) <= 0.0
    for host in (3, 1):
        for name in NAMES:
            saves.save(host, name)
    for repository in (MEMORY, PATH):
        saves.check(repository, 1, 3)

    first.do("flush", repository=PATH)
    first.do("stop", prefix=PATH)
    at.forget(3)
    at.client(3).do("start", repository=PATH, options=on_path)
    saves.check(PATH, 3)
    for name in NAMES:
        saves.save(3, name, [PATH])
    saves.check(PATH, 3)
    assert at.client(3).do("checked", repository=PATH) == []
