"""A Dask with two workers, whose client is the current one, and repositories on it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from distributed import Client

from tests.support.dask_cluster import local_cluster

_serial = itertools.count()


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with local_cluster(2) as cluster, Client(cluster) as made:
        yield made


@pytest.fixture
def name() -> str:
    """Name a repository that no other test has."""
    return f"arrays-{next(_serial)}"
