"""What tests share: one small Ray per session, and a fresh repository on it per test.

Rules
- Nothing is started unless a test asks for it, and no framework is imported here.
- Tests that ask for `cluster` or `repository` are marked `ray`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from tensorvine.actors.repository import Repository
from tensorvine.clusters import LocalCluster

STORE_BYTES = 256 << 20

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
