"""Actors to call: one in a loop of this process, one in another process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tensorvine.actors.engine.sockets.blocking import BlockingConnections

from tests.support.call_targets import Away, Loop, Serving


@pytest.fixture
def serving() -> Iterator[Serving]:
    made = Serving()
    yield made
    made.close()


@pytest.fixture
def caller(serving: Serving) -> Iterator[BlockingConnections]:
    made = BlockingConnections(serving.address)
    yield made
    made.close()


@pytest.fixture
def away() -> Iterator[Away]:
    made = Away()
    yield made
    made.kill()


@pytest.fixture
def away_loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()
