"""Clients of a `catalog_room`: real sessions over real shards and a real catalog, in one process and without Ray.

Rules
- All messages are noted, whoever sends them: "catalog.begin", "shard-0.commit".
- A test may lose the answer to a message, or have something happen before it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from tensorvine.actors import Repository
from tensorvine.store.errors import ShardUnavailableError

from tests.support.catalog_room import CatalogRoom
from tests.support.direct import answered
from tests.support.shard_room import REPOSITORY

BESIDE = {"catalog.report", "catalog.present", "catalog.watch", "catalog.ended", "catalog.goodbye"}
"""Messages that no call of a client waits for, with the orders and pushes to shards."""


class Wire:
    """What goes between the actors and clients of a room."""

    def __init__(self, room: CatalogRoom) -> None:
        self.sent: list[str] = []
        self.losing: set[str] = set()
        """Messages of which the next answer is lost, once they were carried out."""
        self.before: Callable[[str], None] = lambda message: None
        reach = room.engine.reach

        def watched(actor: Any, timeout: float, who: str) -> list[Callable[..., Any]]:
            (answering,) = reach(actor, timeout, who)
            role = str(actor).rpartition("/")[2]

            def answer(method: str, *arguments: Any) -> Future[Any]:
                message = f"{role}.{method}"
                self.before(message)
                self.sent.append(message)
                try:
                    found = answering(method, *arguments)
                except KeyError:
                    return answered(error=ShardUnavailableError(f"{message}: the actor starts again"))
                if message not in self.losing:
                    return found
                self.losing.discard(message)
                found.result(60.0)
                return answered(error=ShardUnavailableError(f"{message}: expected an answer; it was lost"))

            return [answer]

        room.engine.reach = watched  # type: ignore[method-assign]

    @contextmanager
    def during(self) -> Iterator[list[str]]:
        """Give the messages that were sent meanwhile, but for those that nobody waits for."""
        first = len(self.sent)
        found: list[str] = []
        yield found
        found += [
            message
            for message in self.sent[first:]
            if message not in BESIDE and not message.endswith((".orders", ".push", ".reserve", ".renew"))
        ]


@contextmanager
def clients(room: CatalogRoom, count: int = 1) -> Iterator[Sequence[Repository]]:
    """Have clients of a room."""
    engine: Any = room.engine
    made = [Repository(engine, REPOSITORY) for _ in range(count)]
    try:
        yield made
    finally:
        for client in made:
            client.close()
