"""What tests on hosts share: three hosts with four repositories for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.cluster import hosts
from tests.hosts.ground import Ground
from tests.hosts.network import missing

HOSTS = 3


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    """The repositories, and the record of what was saved in them."""
    lacking = missing()
    if lacking is not None:
        pytest.skip(lacking)
    with hosts(HOSTS) as started:
        yield Ground(started)


@pytest.fixture(autouse=True)
def _closed(ground: Ground) -> Iterator[None]:
    yield
    ground.close()
