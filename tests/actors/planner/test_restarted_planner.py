"""A planner that restarts asks all shards, but does not wait for those that have ended for good."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

from tensorvine.actors.planner.planner import Planner
from tensorvine.store.errors import OperationTimeoutError, RepositoryNotFoundError, ShardUnavailableError


def answering(outcome: Any) -> Any:
    """Return a channel whose answers raise an error, or are a value."""

    def result(timeout: float) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return SimpleNamespace(send=lambda request: SimpleNamespace(result=result))


def test_it_does_not_wait_for_a_shard_that_has_ended_for_good() -> None:
    shards = {
        0: answering("its account"),
        1: answering(RepositoryNotFoundError("shard 1: it was stopped")),
        2: answering(OperationTimeoutError("shard 2: late")),
        3: answering(ShardUnavailableError("shard 3: it is being restarted")),
    }
    planner = SimpleNamespace(_shards=shards, _lock=threading.Lock(), _again={3})
    assert Planner._hear(cast("Any", planner), [*shards]) == {0: "its account", 1: None, 3: None}
