"""What tests of shards share: a Redis server of their own, and a shard's part that posts there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tensorvine.actors.shard.serving.redis_index import RedisIndex

    from tests.support.redis_server import RedisServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    from tests.support.redis_server import RedisServer

    with RedisServer(tmp_path) as running:
        yield running


@pytest.fixture
def one(server: RedisServer) -> Iterator[RedisIndex]:
    from tests.support.redis_posts import redis_index

    made = redis_index(server)
    yield made
    made.close()
