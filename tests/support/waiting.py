"""Waiting for a condition: a test that waits does it here, and never sleeps to be in step.

Rules
- The limit holds on a machine that is ten times busier. Who passes another one has a reason: it is longer where more
  has to happen, and shorter where what is waited for would come by itself later on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

PATIENCE_S = 60.0
PROMPT_S = 40.0
"""For what goes because a shard sees that a client is gone: after 60 s it would go by itself, when the session lapses
(`launch.SESSION_S`)."""

T = TypeVar("T")


def eventually(
    condition: Callable[[], T],
    what: str,
    timeout: float = PATIENCE_S,
    pause: float = 0.05,
    ignoring: tuple[type[Exception], ...] = (),
) -> T:
    """Ask until the answer counts as true, and return it; an error of a kind that is ignored is no answer."""
    deadline = time.monotonic() + timeout
    while True:
        found: object
        try:
            if answer := condition():
                return answer
            found = answer
        except ignoring as exc:
            found = exc
        if time.monotonic() > deadline:
            import pytest  # where it is needed: what benchmarks and actors import may wait, too

            pytest.fail(f"expected within {timeout} s: {what}; found {found!r:.300}")
        threading.Event().wait(pause)


def await_shards(repo: Any) -> None:
    """Wait until all shards have started and a client knows their nodes."""

    def knows_all() -> bool:
        repo._session.refresh()
        return len(repo._session.nodes) == len(repo.shards)

    eventually(knows_all, "all shards have reported")
