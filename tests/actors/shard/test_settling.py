"""Who tells other shards what follows from a call: the call, which waits for it, and not the sweep."""

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
    """A shard, and how it told the others."""
    home, told = Home(), list[str]()

    async def release(holder: Holder, shards: Iterable[int]) -> None:
        told.append("waited")

    monkeypatch.setattr(home.peers, "release", release)
    monkeypatch.setattr(home.peers, "post", lambda shard, request: told.append("posted"))
    return home, told


def test_the_sweep_leaves_what_a_call_has_just_made_to_that_call(home: tuple[Home, list[str]]) -> None:
    shard, told = home
    shard.settling.tell_left()
    shard.state.outbox.append(ENTRY)
    shard.settling.settle_from_thread()
    shard.settling.tell_left()
    asyncio.run(shard.settling.settle())
    assert told == ["waited"]
    assert not shard.state.outbox


def test_the_sweep_tells_what_nobody_told_for_a_period(home: tuple[Home, list[str]]) -> None:
    shard, told = home
    shard.state.outbox.append(ENTRY)
    for _ in range(3):
        shard.settling.tell_left()
    assert told == ["posted"]
    assert not shard.state.outbox


def test_nothing_is_told_while_successors_learn_who_holds_what(home: tuple[Home, list[str]]) -> None:
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
