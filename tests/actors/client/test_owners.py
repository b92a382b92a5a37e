"""Two users on one Ray: who starts or connects without a name never gets into the other one's repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from tensorvine.actors import Repository
from tensorvine.actors.rpc.catalog_calls import CatalogCalls
from tensorvine.planner.owner import Owner
from tensorvine.planner.topology import Topology
from tensorvine.store.errors import ForeignRepositoryError

from tests.support.actors import joining
from tests.support.other_user import OTHER, needs_root

ADA = Owner("ada", 12345, "elsewhere")
BOB = """
import ctypes, json, os, sys
ctypes.CDLL(None).prctl(28, 4)  # PR_SET_SECUREBITS: all threads go on reading root's files, such as the packages
from tensorvine.actors import Repository
from tensorvine.actors.engine.choice import engine_for
from tensorvine.store.errors import ForeignRepositoryError

def tried(call, *arguments, **options):
    try:
        with call(*arguments, **options) as repo:
            return [str(ref) for ref in repo.models()]
    except ForeignRepositoryError as exc:
        return str(exc)

engine_for(os.environ.get("ENGINE"))
os.seteuid(int(sys.argv[1]))
told = [tried(Repository.start), tried(Repository.start, shards=1), tried(Repository.connect)]
told += [tried(call, "default") for call in (Repository.start, Repository.connect)]
told += [tried(Repository.connect, name="default")]
with Repository.connect("default") as repo:
    repo.retire("m@1")
with Repository.start("bobs", shards=1, preallocate_bytes=0):
    told.append(tried(Repository.start, "bobs"))
os.seteuid(0)
print(json.dumps(told))
"""


@pytest.fixture
def default(cluster: object) -> Iterator[Repository]:
    """The repository of the default name, with one model."""
    with Repository.start(shards=1, preallocate_bytes=0) as started:
        started.save("m", {"w": np.ones(3)})
        yield started


@pytest.fixture
def foreign(cluster: object) -> Iterator[Repository]:
    """The same, of another user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Owner, "here", classmethod(lambda _: ADA))
        started = Repository.start(shards=1, preallocate_bytes=0)
    with started:
        started.save("m", {"w": np.ones(3)})
        yield started


def topology(repository: Repository) -> Topology:
    return repository._session.ask(CatalogCalls.topology())


@needs_root
def test_another_user_gets_in_only_by_name(default: Repository) -> None:
    environment = {**os.environ, **joining(default.engine)}
    command = [sys.executable, "-c", BOB, str(OTHER)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    for refused in told[:3]:
        assert refused.startswith("repository 'default': expected owner nobody (user 65534)")
        assert str(Owner.here()) in refused
    assert told[3:] == [["m@1"], ["m@1"], ["m@1"], []]
    assert default.models() == []


def test_the_same_user_joins_as_before(default: Repository) -> None:
    assert topology(default).owner == Owner.here()
    with Repository.start() as joined, Repository.connect() as connected, Repository.connect("default") as named:
        for repo in (joined, connected, named):
            assert (repo.name, repo.load("m")["w"].sum()) == ("default", 3)
    assert topology(default).started_by == joined._session.topology.started_by


def test_who_is_refused_leaves_it_as_it_was(foreign: Repository) -> None:
    assert topology(foreign).owner == ADA
    for call in (Repository.start, Repository.connect):
        with pytest.raises(ForeignRepositoryError, match=r"found owner ada \(user 12345\) on elsewhere"):
            call()
    assert [str(ref) for ref in foreign.models()] == ["m@1"]
    with Repository.start("default") as joined:
        assert topology(joined).owner == ADA
    foreign.scale(2)
    assert topology(foreign).owner == ADA


@pytest.mark.parametrize("way", ["close", "stop"])
def test_who_ends_a_repository_that_was_stopped_leaves_the_next_ones_of_its_name_alone(
    cluster: object, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = Repository.start(shards=1, preallocate_bytes=0)
    client = Repository.connect()
    with Repository.connect() as other:
        other.stop()
    with Repository.start(shards=1, preallocate_bytes=0) as second:
        second.save("m", {"w": np.ones(3)})
        second.scale(2)
        client._session.refresh()
        assert client.shards == (0,)
        first.close() if way == "close" else client.stop()
        assert "another repository of this name keeps running" in caplog.text
        assert [str(ref) for ref in second.models()] == ["m@1"]
        with Repository.connect() as found:
            assert found._session.topology.started_by == second._session.topology.started_by
    for one in (first, client):
        one.close()


def test_an_unknown_owner_is_joined_as_before(cluster: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Owner, "here", classmethod(lambda _: None))  # as what an earlier version has written down
        started = Repository.start(shards=1, preallocate_bytes=0)
    with started, Repository.start() as joined, Repository.connect() as connected:
        assert joined._session.topology.owner is connected._session.topology.owner is None
