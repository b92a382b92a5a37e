"""Other shards are notified by the call that changed the state, which waits for them, and not by the sweep."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from tensorvine.store.holders import Holder
from tensorvine.store.refs import ModelRef

from tests.support.home import Home

ENTRY = (1, ModelRef("m", 1))


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> tuple[Home, list[str]]:
    """A shard, and the ways in which it notified the others."""
    home, told = Home(), list[str]()

    async def release(holder: Holder, shards: Iterable[int]) -> None:
        told.append("waited")

    monkeypatch.setattr(home.peers, "release", release)
    monkeypatch.setattr(home.peers, "post", lambda shard, request: told.append("posted"))
    return home, told


def test_the_sweep_leaves_new_entries_to_the_call_that_made_them(home: tuple[Home, list[str]]) -> None:
    shard, told = home
    shard.settling.tell_left()
    shard.state.outbox.append(ENTRY)
    shard.settling.settle_from_thread()
    shard.settling.tell_left()
    asyncio.run(shard.settling.settle())
    assert told == ["waited"]
    assert not shard.state.outbox


def test_the_sweep_sends_entries_that_are_older_than_a_period(home: tuple[Home, list[str]]) -> None:
    shard, told = home
    shard.state.outbox.append(ENTRY)
    for _ in range(3):
        shard.settling.tell_left()
    assert told == ["posted"]
    assert not shard.state.outbox


def test_nothing_is_sent_while_successors_learn_the_holders(home: tuple[Home, list[str]]) -> None:
    shard, told = home
    shard.settling._segment_handoff.is_telling = True
    shard.state.outbox.append(ENTRY)
    for _ in range(3):
        shard.settling.tell_left()
    asyncio.run(shard.settling.settle())
    assert not told
    shard.settling._segment_handoff.is_telling = False
    shard.settling.tell_left()
    assert told == ["posted"]
