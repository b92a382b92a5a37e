"""Copies of the catalog's journal at a shard: opaque bytes, whole streams only in place of others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tensorvine.actors.rpc.catalog_messages import Term
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.actors.shard.calls.orders import Kept
from tensorvine.store.catalog.journal import frame
from tensorvine.store.catalog.records import Began, End, Freed, encoded

from tests.support.shard_room import Room, room

FIRST, SECOND = Term(1, b"first"), Term(2, b"second")
SNAPSHOT = frame(encoded(Began(1, b"first", "start", 0))) + frame(encoded(End(1, 0)))
DECISION = frame(encoded(Freed((("m", 1),))))


@pytest.fixture
def one() -> Iterator[Room]:
    with room() as made:
        made.start()
        yield made


def append(one: Room, term: Term, number: int, offset: int, content: bytes) -> int:
    return one.call(ShardCalls.append_journal(term, number, offset, content))


def test_what_was_sent_is_read_back_piece_by_piece(one: Room) -> None:
    content = SNAPSHOT + DECISION
    for start in range(0, len(content), 10):
        assert append(one, FIRST, 1, start, content[start : start + 10]) == min(start + 10, len(content))
    assert one.call(ShardCalls.journals()) == [Kept(1, 1, len(content))]
    read = b"".join(one.call(ShardCalls.read_journal(1, 1, start, 7)) for start in range(0, len(content), 7))
    assert read == content
    assert one.call(ShardCalls.read_journal(1, 1, len(content), 7)) == b""


def test_bytes_that_are_missing_are_asked_for_and_those_that_come_twice_are_kept_once(one: Room) -> None:
    assert append(one, FIRST, 1, 10, SNAPSHOT[10:]) == 0
    assert append(one, FIRST, 1, 0, SNAPSHOT[:10]) == 10
    assert append(one, FIRST, 1, 5, SNAPSHOT[5:]) == len(SNAPSHOT)
    assert append(one, FIRST, 1, 0, SNAPSHOT[:10]) == len(SNAPSHOT)
    assert one.call(ShardCalls.read_journal(1, 1, 0, 1000)) == SNAPSHOT


def test_a_stream_replaces_the_others_when_its_snapshot_is_whole(one: Room) -> None:
    append(one, FIRST, 1, 0, SNAPSHOT + DECISION)
    append(one, SECOND, 1, 0, SNAPSHOT[:-3])
    assert [kept.term for kept in one.call(ShardCalls.journals())] == [1, 2]
    append(one, SECOND, 1, len(SNAPSHOT) - 3, SNAPSHOT[-3:])
    assert [kept.term for kept in one.call(ShardCalls.journals())] == [2]
    with pytest.raises(LookupError, match=r"stream 1\.1"):
        one.call(ShardCalls.read_journal(1, 1, 0, 1))


def test_a_stream_that_comes_makes_the_shard_report_to_its_term(one: Room) -> None:
    one.catalog.term = SECOND
    append(one, SECOND, 1, 0, SNAPSHOT)
    one.catalog.until(lambda: one.catalog.reports[-1].term == 2)
