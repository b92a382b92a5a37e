"""What tests of the catalog share: a Redis server of their own, and the part that posts there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.redis_posts import Posts
    from tests.support.redis_server import RedisServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    from tests.support.redis_server import RedisServer

    with RedisServer(tmp_path) as running:
        yield running


@pytest.fixture
def one(server: RedisServer) -> Iterator[Posts]:
    from tests.support.redis_posts import Posts

    made = Posts(server)
    yield made
    made.close()
