"""What tests share: one small Ray per session, and a fresh repository on it per test.

Rules
- Nothing is started unless a test asks for it, and no framework is imported here.
- Tests that ask for `cluster` or `repository` are marked `ray`.
- A Ray that runs on this machine already, such as another test's, is not joined.
- Property tests draw the same examples everywhere and are not timed, so that what fails in CI fails at home, and a busy
  machine fails nothing. `pytest --hypothesis-profile=default` draws others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import settings
from tensorvine.actors.client.repository import Repository
from tensorvine.clusters import LocalCluster

STORE_BYTES = 256 << 20
os.environ.setdefault("RAY_ADDRESS", "local")

settings.load_profile("ci")

_serial = count(1)


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """The embedded Ray, started once."""
    with LocalCluster(object_store_bytes=STORE_BYTES, cpus=2) as started:
        yield started


@pytest.fixture
def repository(cluster: LocalCluster) -> Iterator[Repository]:
    """A repository of its own for each test: one shard, no memory touched ahead."""
    with Repository.start(f"test-{next(_serial)}", shards=1, preallocate_bytes=0) as started:
        yield started
