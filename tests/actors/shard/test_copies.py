"""Copies of segments between shards: before a commit, with `replicas`, and by order. Real sockets, without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tensorvine.actors.rpc.catalog_messages import Committed, Refused, Term
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.actors.shard.parts import copies as copies_module
from tensorvine.actors.shard.parts.copies import Copies
from tensorvine.actors.shard.serving import block_server
from tensorvine.store.catalog.orders import Backups, Copy, Drain, Free
from tensorvine.store.errors import MovedError, ShardUnavailableError, StoreFullError
from tensorvine.store.holders import Request
from tensorvine.store.segments.segment import SegmentId

from tests.support.shard_room import CLIENT, Room, room
from tests.support.waiting import eventually

LARGE = bytes(range(256)) * 400


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    """Two shards, of which the second keeps copies of what the first one saves."""
    monkeypatch.setattr(copies_module, "PAUSE_S", (0.01, 0.05))
    with room() as made:
        made.start(0, replicas=2)
        made.start(1, replicas=2)
        made.order(Backups((1,)), shard=0)
        yield made


def saved(pair: Room, number: int, *contents: bytes) -> SegmentId:
    handed = pair.save(number, *contents)
    assert isinstance(pair.call(ShardCalls.commit(handed)), Committed)
    return handed.blocks[0].id


def copied_bytes(pair: Room, shard: int = 1) -> int:
    pair.call(ShardCalls.check(), shard)
    return pair.call(ShardCalls.stats(), shard).bytes_replicated


class TestOfASave:
    @pytest.mark.parametrize("contents", [(b"few", b""), (LARGE, LARGE[::-1])], ids=["few", "many"])
    def test_its_bytes_are_there_before_it_is_proposed(self, pair: Room, contents: tuple[bytes, ...]) -> None:
        segment = saved(pair, 1, *contents)
        ((_, proposal),) = pair.catalog.proposals
        assert proposal.staged[segment].shards == (0, 1)
        assert proposal.kept == {1: pair.state(1).incarnation}
        assert pair.content(segment, [0, 1], shard=1) == list(contents)
        assert pair.state(1).segment(segment).digests == pair.call(ShardCalls.digests([segment]))[segment]
        assert not pair.state(1).segment(segment).keeper
        assert copied_bytes(pair) > 0

    def test_bytes_that_changed_on_their_way_are_refused(self, pair: Room, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(block_server, "_hashed", lambda sent: dict.fromkeys(sent.slots, "0" * 32))
        monkeypatch.setattr(block_server.BlockServer, "_lies_at", lambda self, segment, sent: False)
        with pytest.raises(ShardUnavailableError, match="to keep copies of save"):
            pair.call(ShardCalls.commit(pair.save(1, LARGE, timeout=2.0)))
        assert not pair.catalog.proposals
        assert copied_bytes(pair) == 0

    def test_a_backup_without_room_is_named(self, pair: Room) -> None:
        pair.start(1, replicas=2, capacity=50_000)
        with pytest.raises(StoreFullError, match="shard 1"):
            pair.call(ShardCalls.commit(pair.save(1, LARGE, timeout=10.0)))
        assert not pair.catalog.proposals

    def test_one_that_is_gone_is_waited_for_until_another_is_named(self, pair: Room) -> None:
        pair.order(Backups((7,)), first=2)
        with pytest.raises(ShardUnavailableError, match="shard 7"):
            pair.call(ShardCalls.commit(pair.save(1, LARGE, timeout=0.2)))
        waits = pair.send(ShardCalls.commit(pair.save(2, LARGE)))
        pair.order(Backups((1,)), first=3)
        assert isinstance(waits.result(60.0), Committed)
        assert pair.catalog.proposals[0][1].staged.popitem()[1].shards == (0, 1)

    def test_an_abort_drops_them(self, pair: Room) -> None:
        pair.catalog.answers = lambda proposal: Refused("parent", "another one")
        handed = pair.save(1, LARGE)
        pair.call(ShardCalls.commit(handed))
        assert copied_bytes(pair) > 0
        pair.call(ShardCalls.abort(handed.draft.save))
        eventually(lambda: copied_bytes(pair) == 0, "the copies to go")

    def test_what_a_later_attempt_does_not_name_any_more_goes(self, pair: Room) -> None:
        base = saved(pair, 1, LARGE)
        kept = copied_bytes(pair)
        pair.catalog.answers = lambda proposal: Refused("parent", "another one")
        handed = pair.save(2, LARGE)
        pair.call(ShardCalls.commit(handed))
        pair.catalog.answers = pair.catalog.commits
        pair.call(ShardCalls.commit(pair.handed(2, handed.blocks, names={base: [0]})))
        eventually(lambda: copied_bytes(pair) == kept, "the copy to go")

    def test_a_backup_that_is_none_any_more_keeps_nothing(self, pair: Room) -> None:
        pair.start(2, replicas=2)
        pair.catalog.answers = lambda proposal: Refused("parent", "another one")
        handed = pair.save(1, LARGE)
        pair.call(ShardCalls.commit(handed))
        assert copied_bytes(pair) > 0
        pair.order(Backups((2,)), first=2)
        pair.catalog.answers = pair.catalog.commits
        pair.call(ShardCalls.commit(handed))
        eventually(lambda: copied_bytes(pair) == 0, "the copy to go")
        assert pair.content(handed.blocks[0].id, [0], shard=2) == [LARGE]

    @pytest.mark.parametrize("committed", [True, False])
    def test_the_catalog_is_asked_about_those_of_which_nothing_was_heard(self, pair: Room, committed: bool) -> None:
        segment = saved(pair, 1, LARGE)
        save = Request(CLIENT, 1)
        pair.part(Copies, 1)._ask()
        report = pair.catalog.until(lambda: next((r for r in pair.catalog.reports if r.kept), None))
        assert report.kept == {save: (segment,)}
        pair.catalog.settled[save] = (segment,) if committed else ()
        eventually(lambda: not pair.state(1).has_news, "the answer")
        pair.part(Copies, 1)._ask()
        eventually(lambda: not pair.state(1).unconfirmed(), "the answer")
        assert (copied_bytes(pair) > 0) == committed

    def test_a_new_term_is_asked_too(self, pair: Room) -> None:
        segment = saved(pair, 1, LARGE)
        pair.catalog.term = Term(2, b"second")
        report = pair.catalog.until(
            lambda: next((r for r in pair.catalog.reports if r.term == 2 and r.shard == 1), None)
        )
        assert report.kept == {Request(CLIENT, 1): (segment,)}

    def test_a_shard_that_drains_keeps_none(self, pair: Room) -> None:
        pair.order(Drain(), shard=1)
        with pytest.raises(MovedError, match="draining"):
            pair.call(ShardCalls.keep_copies(0, Request(CLIENT, 1), {}, None, 1.0), 1)

    def test_a_shard_without_a_lease_keeps_none(self, pair: Room) -> None:
        pair.part(Copies, 1)._context.lease.end()
        with pytest.raises(ShardUnavailableError, match="its lease"):
            pair.call(ShardCalls.keep_copies(0, Request(CLIENT, 1), {}, None, 1.0), 1)


class TestByOrder:
    @pytest.fixture
    def two(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
        monkeypatch.setattr(copies_module, "PAUSE_S", (0.01, 0.05))
        with room() as made:
            made.start(0)
            made.start(1)
            yield made

    def report(self, two: Room) -> Any:
        return two.catalog.until(lambda: next((r for r in two.catalog.reports if r.copied), None))

    def test_slots_are_copied_and_reported(self, two: Room) -> None:
        segment = saved(two, 1, b"few", LARGE, b"more")
        two.order(Copy(0, {segment: (1, 2)}), shard=1)
        assert self.report(two).copied == {segment: (1, 2)}
        assert two.content(segment, [1, 2], shard=1) == [LARGE, b"more"]
        assert two.state(1).segment(segment).labels == two.state(0).segment(segment).labels
        two.order(Free({segment: (0, 1, 2)}), shard=0)
        assert two.content(segment, [1], shard=1) == [LARGE]

    def test_a_source_that_cannot_be_reached_is_tried_again(self, two: Room) -> None:
        segment = saved(two, 1, LARGE)
        there = two.engine.actors.pop("alone/shard-0")
        two.order(Copy(0, {segment: (0,)}), shard=1)
        two.call(ShardCalls.is_short(), 1)
        assert not any(report.copied for report in two.catalog.reports)
        two.engine.actors["alone/shard-0"] = there
        assert self.report(two).copied == {segment: (0,)}

    def test_what_the_source_has_not_got_is_not_reported(self, two: Room) -> None:
        segment, other = saved(two, 1, LARGE), saved(two, 2, LARGE)
        two.order(Free({segment: (0,)}))
        two.order(Copy(0, {segment: (0,), other: (0,)}), shard=1)
        assert self.report(two).copied == {other: (0,)}

    def test_what_is_here_already_is_reported_again(self, two: Room) -> None:
        segment = saved(two, 1, LARGE)
        two.order(Copy(0, {segment: (0,)}), shard=1)
        self.report(two)
        two.catalog.reports.clear()
        two.order(Copy(0, {segment: (0,)}), first=2, shard=1)
        assert self.report(two).copied == {segment: (0,)}
