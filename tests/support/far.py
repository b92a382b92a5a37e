"""Clients that take themselves for ones on another node, from their first thread on: they map no shard's memory."""

from __future__ import annotations

from unittest import mock

from tensorvine.actors import Repository
from tensorvine.actors.engine.choice import engine_for

ELSEWHERE = "another"


def connect_from_afar(repository: str) -> Repository:
    """Connect as from another node; whoever asks for this process's node meanwhile is told the same."""
    with mock.patch.object(type(engine_for()), "this_node", return_value=ELSEWHERE):
        return Repository.connect(repository)
