"""Commits that a shard sends on: what they leave, whatever becomes of client, catalog, lease and shard."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import pytest
from tensorvine.actors.rpc.catalog_messages import Committed, Declared, Proposal, Refused, Term
from tensorvine.actors.shard import proposals
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.actors.shard.parts.sessions import Sessions
from tensorvine.store.catalog.orders import Drain, Ended, Free, Leave
from tensorvine.store.errors import MovedError, OperationTimeoutError, ShardUnavailableError, StoreFullError
from tensorvine.store.holders import Request
from tensorvine.store.refs import ModelRef

from tests.support.shard_room import BYTES, CLIENT, Room, room
from tests.support.waiting import eventually

LARGE = bytes(range(256)) * 400
SAVE = Request(CLIENT, 1)


@pytest.fixture
def one() -> Iterator[Room]:
    with room() as made:
        made.start()
        yield made


def in_use(one: Room) -> int:
    stats = one.call(ShardCalls.stats())
    one.call(ShardCalls.check())
    return stats.bytes_allocated + stats.bytes_staged


def refuse(proposal: Proposal) -> Refused:
    return Refused("parent", "another version is the latest")


@pytest.mark.parametrize("content", [b"few", LARGE], ids=["in the message", "in the memory"])
def test_what_a_version_names_stays_and_the_rest_goes(one: Room, content: bytes) -> None:
    handed = one.save(1, content, content[::-1])
    (segment,) = (block.id for block in handed.blocks)
    handed = one.handed(1, handed.blocks, names={segment: [1]})
    assert one.call(ShardCalls.commit(handed)).ref == ModelRef("m", 1)
    assert one.content(segment, [1]) == [content[::-1]]
    assert one.state().segment(segment).live == {1}
    assert one.order(Free({segment: (1,)})) == 1
    eventually(lambda: in_use(one) == 0, "the memory to be free")


def test_a_proposal_says_what_the_save_brings_and_where_it_lies(one: Room) -> None:
    handed = one.save(1, LARGE, LARGE)
    one.call(ShardCalls.commit(handed))
    ((sender, proposal),) = one.catalog.proposals
    (segment,) = proposal.staged
    assert (sender.shard, sender.incarnation, sender.term) == (0, 1, 1)
    staged = proposal.staged[segment]
    assert (staged.slots, staged.shards) == (2, (0,))
    assert staged.place is not None
    assert staged.place.offset == handed.blocks[0].place.offset


class TestRefused:
    def test_the_save_commits_again_with_what_it_brought(self, one: Room) -> None:
        one.catalog.answers = refuse
        handed = one.save(1, LARGE)
        assert isinstance(one.call(ShardCalls.commit(handed)), Refused)
        one.catalog.answers = one.catalog.commits
        assert isinstance(one.call(ShardCalls.commit(handed)), Committed)
        assert one.content(handed.blocks[0].id, [0]) == [LARGE]

    def test_an_abort_leaves_nothing_and_the_save_is_refused_from_then_on(self, one: Room) -> None:
        one.catalog.answers = refuse
        handed = one.save(1, LARGE)
        one.call(ShardCalls.commit(handed))
        one.call(ShardCalls.abort(SAVE))
        assert in_use(one) == 0
        for call in (ShardCalls.commit(handed), ShardCalls.grant(CLIENT, SAVE, [100], 1.0)):
            with pytest.raises(OperationTimeoutError, match="it has ended"):
                one.call(call)

    @pytest.mark.parametrize("error", [StoreFullError("no room for the record"), OperationTimeoutError("not in time")])
    def test_the_catalog_s_own_errors_come_through(self, one: Room, error: Exception) -> None:
        def fails(proposal: Proposal) -> Any:
            raise error

        one.catalog.answers = fails
        with pytest.raises(type(error), match=str(error)):
            one.call(ShardCalls.commit(one.save(1, LARGE)))
        assert len(one.catalog.proposals) == 1

    def test_what_is_declared_over_goes(self, one: Room) -> None:
        one.catalog.answers = refuse
        for number in (1, 2, 3):
            one.call(ShardCalls.commit(one.save(number, LARGE)))
        one.call(ShardCalls.grant(CLIENT, Request(CLIENT, 4), [1000], 1.0))
        assert one.call(ShardCalls.renew(CLIENT, Declared((2, 4), 4)))
        assert {save.number for save in one.state().saves()} == {2}
        one.call(ShardCalls.renew(CLIENT, Declared((), 4)))
        assert in_use(one) == 0


class TestSentOn:
    """The proposal is on its way, and not answered."""

    @pytest.fixture
    def late(self, one: Room) -> concurrent.futures.Future[Any]:
        one.catalog.open.clear()
        handed = one.save(1, LARGE)
        late = one.send(ShardCalls.commit(handed))
        one.catalog.until(lambda: one.catalog.proposals)
        return late

    def test_an_abort_waits_for_the_answer(self, one: Room, late: concurrent.futures.Future[Any]) -> None:
        abort = one.send(ShardCalls.abort(SAVE))
        one.call(ShardCalls.is_short())
        assert not abort.done()
        assert in_use(one) > 0
        one.catalog.open.set()
        abort.result(60.0)
        assert isinstance(late.result(60.0), Committed)
        assert one.call(ShardCalls.stats()).tensors == 1

    def test_an_abort_ends_a_save_that_is_refused_then(self, one: Room, late: concurrent.futures.Future[Any]) -> None:
        one.catalog.answers = refuse
        abort = one.send(ShardCalls.abort(SAVE))
        one.call(ShardCalls.is_short())
        one.catalog.open.set()
        abort.result(60.0)
        assert in_use(one) == 0

    def test_a_client_that_ends_leaves_the_version(self, one: Room, late: concurrent.futures.Future[Any]) -> None:
        one.call(ShardCalls.goodbye(CLIENT))
        assert one.catalog.until(lambda: one.catalog.ended_clients) == [CLIENT]
        assert one.call(ShardCalls.stats()).tensors == 1
        one.catalog.open.set()
        late.result(60.0)
        assert one.call(ShardCalls.stats()).tensors == 1

    def test_a_session_that_ended_at_the_catalog_leaves_the_version(
        self, one: Room, late: concurrent.futures.Future[Any]
    ) -> None:
        one.order(Ended((CLIENT,)))
        one.catalog.open.set()
        assert isinstance(late.result(60.0), Committed)
        assert one.call(ShardCalls.stats()).tensors == 1

    def test_a_call_that_is_repeated_gets_the_same_answer(
        self, one: Room, late: concurrent.futures.Future[Any]
    ) -> None:
        handed = one.handed(1, [])
        again = one.send(ShardCalls.commit(handed))
        one.call(ShardCalls.is_short())
        one.catalog.open.set()
        assert again.result(60.0) == late.result(60.0) == one.call(ShardCalls.commit(handed))
        assert len(one.catalog.proposals) == 1

    def test_the_next_term_has_the_report_first_and_is_asked_again(
        self, one: Room, late: concurrent.futures.Future[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (segment,) = one.catalog.proposals[0][1].staged
        monkeypatch.setattr(proposals, "LOOK_S", 0.01)
        one.catalog.term = Term(2, b"second")
        one.catalog.open.set()
        assert isinstance(late.result(60.0), Committed)
        whole = next(report.whole for report in one.catalog.reports if report.term == 2)
        assert whole is not None
        assert set(whole.sent) == {segment}
        assert not whole.segments
        assert [sender.term for sender, _ in one.catalog.proposals] == [1, 2]

    def test_an_order_may_end_what_the_version_had_before_the_answer_comes(
        self, one: Room, late: concurrent.futures.Future[Any]
    ) -> None:
        (segment,) = one.catalog.proposals[0][1].staged
        one.order(Free({segment: (0,)}))
        one.catalog.open.set()
        assert isinstance(late.result(60.0), Committed)
        assert in_use(one) == 0

    def test_a_shard_that_is_stopped_waits_no_longer(
        self, one: Room, late: concurrent.futures.Future[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one.call(ShardCalls.end())
        one.catalog.reachable = False
        one.catalog.open.set()
        with pytest.raises(ShardUnavailableError, match="stopped"):
            late.result(60.0)


def test_a_client_that_does_not_wait_as_long_hears_that_the_outcome_is_not_known(
    one: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorvine.actors.shard.parts.writes.LATE_S", 0.0)
    one.catalog.open.clear()
    handed = one.save(1, LARGE, timeout=0.2)
    with pytest.raises(OperationTimeoutError, match="not known whether"):
        one.call(ShardCalls.commit(handed))
    one.catalog.open.set()
    assert isinstance(one.call(ShardCalls.commit(handed)), Committed)


def test_an_answer_that_was_lost_is_asked_for_again(one: Room) -> None:
    answers = [None, None]
    one.catalog.answers = lambda proposal: answers.pop() if answers else one.catalog.commits(proposal)
    assert isinstance(one.call(ShardCalls.commit(one.save(1, LARGE))), Committed)
    assert len(one.catalog.proposals) == 3
    assert one.call(ShardCalls.stats()).tensors == 1


def test_nothing_is_proposed_before_the_whole_report_was_answered(one: Room) -> None:
    one.catalog.reachable = False
    one.catalog.term = Term(2, b"second")
    one.call(ShardCalls.push(one.catalog.term, []))
    late = one.send(ShardCalls.commit(one.save(1, LARGE)))
    one.call(ShardCalls.is_short())
    assert not one.catalog.proposals
    one.catalog.reachable = True
    late.result(60.0)
    assert [report.term for report in one.catalog.reports if report.whole is not None] == [1, 2]
    assert one.catalog.proposals[0][0].term == 2


class TestLease:
    def test_nothing_is_sent_without_one(self, one: Room) -> None:
        lease = one.part(Sessions)._context.lease
        ends, lease._ends, lease._keep = lease._ends, 0.0, lambda: None
        with pytest.raises(OperationTimeoutError, match="lease"):
            one.call(ShardCalls.commit(one.save(1, LARGE, timeout=0.1)))
        assert not one.catalog.proposals
        lease._ends = ends + 60.0
        assert isinstance(one.call(ShardCalls.commit(one.save(2, LARGE))), Committed)


class TestAnotherIncarnation:
    def test_a_commit_that_the_catalog_has_is_answered(self, one: Room) -> None:
        handed = one.save(1, LARGE)
        answer = one.call(ShardCalls.commit(handed))
        one.start()
        handed = one.handed(1, handed.blocks, incarnation=1)
        assert one.call(ShardCalls.commit(handed)) == answer
        assert not one.catalog.proposals[-1][1].staged
        assert in_use(one) == 0

    def test_one_that_it_has_not_is_refused_by_name(self, one: Room) -> None:
        handed = one.save(1, LARGE)
        one.start()
        one.catalog.answers = refuse
        with pytest.raises(ShardUnavailableError, match="restarted"):
            one.call(ShardCalls.commit(one.handed(1, handed.blocks, incarnation=1)))
        assert in_use(one) == 0

    def test_what_it_had_fetched_is_not_there(self, one: Room) -> None:
        from dataclasses import replace

        handed = one.save(1, LARGE)
        blocks = [replace(block, place=None) for block in handed.blocks]
        with pytest.raises(ShardUnavailableError, match="fetched"):
            one.call(ShardCalls.commit(one.handed(2, blocks)))


class TestDraining:
    def test_it_grants_nothing_and_finishes_what_is_under_way(self, one: Room) -> None:
        handed = one.save(1, LARGE)
        one.order(Drain())
        assert one.call(ShardCalls.reserve(CLIENT, Request(CLIENT, 2), [100])) == []
        for call in (
            ShardCalls.grant(CLIENT, Request(CLIENT, 2), [100], 1.0),
            ShardCalls.pull(Request(CLIENT, 2), {}, None, 1.0),
        ):
            with pytest.raises(MovedError, match="draining"):
                one.call(call)
        assert isinstance(one.call(ShardCalls.commit(handed)), Committed)

    def test_one_that_left_answers_no_save(self, one: Room) -> None:
        handed = one.save(1, b"few")
        one.order(Drain(), Leave())
        with pytest.raises(MovedError):
            one.call(ShardCalls.commit(handed))


def test_memory_of_a_save_that_is_over_is_granted_to_others(one: Room) -> None:
    one.call(ShardCalls.grant(CLIENT, SAVE, [BYTES - 1000], 1.0))
    waits = one.send(ShardCalls.grant(CLIENT, Request(CLIENT, 2), [BYTES // 2], 60.0))
    eventually(lambda: one.call(ShardCalls.is_short()), "the second save to wait")
    one.call(ShardCalls.abort(SAVE))
    assert len(waits.result(60.0)) == 1
