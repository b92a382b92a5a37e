"""What a shard reports, what it does by order, and the new versions that are pushed to those who wait there."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from tensorvine.actors.memory.process import ProcessId, pid_namespace, this_process
from tensorvine.actors.rpc.catalog_messages import Declared, Located, Term
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.actors.shard.parts import orders
from tensorvine.actors.shard.parts.sessions import Sessions
from tensorvine.store.catalog.orders import Backups, Ended, Free
from tensorvine.store.errors import ShardUnavailableError
from tensorvine.store.holders import Request

from tests.support.shard_room import CLIENT, Room, located, room
from tests.support.waiting import eventually

LARGE = b"x" * 100_000


@pytest.fixture
def one() -> Iterator[Room]:
    with room() as made:
        made.start()
        yield made


class TestReports:
    def test_a_shard_says_what_it_has_to_each_term(self, one: Room) -> None:
        handed = one.save(1, LARGE)
        one.call(ShardCalls.commit(handed))
        one.catalog.term = Term(2, b"second")
        one.catalog.until(lambda: len(one.catalog.reports) == 2)
        first, second = (report.whole for report in one.catalog.reports)
        assert first is not None
        assert not first.segments
        assert first.clients in ((), (CLIENT,))
        assert second is not None
        assert second.node == "node"
        assert second.clients == (CLIENT,)
        (held,) = second.segments.values()
        assert held.slots == (0,)
        assert held.in_memory
        assert held.place is not None

    def test_a_process_that_starts_again_has_nothing(self, one: Room) -> None:
        one.call(ShardCalls.commit(one.save(1, LARGE)))
        one.start()
        report = one.catalog.until(lambda: next((r for r in one.catalog.reports if r.incarnation == 2), None))
        assert report.whole is not None
        assert not report.whole.segments

    def test_it_reports_when_the_catalog_can_be_reached_again(self, one: Room) -> None:
        one.catalog.reachable = False
        one.catalog.term = Term(2, b"second")
        assert one.call(ShardCalls.is_short()) is False
        one.catalog.reachable = True
        one.catalog.until(lambda: 2 in [report.term for report in one.catalog.reports])

    def test_a_client_whose_process_died_is_told(self, one: Room) -> None:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            one.call(ShardCalls.hello("other", "node", ProcessId(pid_namespace(), process.pid)))
            one.call(ShardCalls.grant("other", Request("other", 1), [1000], 1.0))
            assert one.call(ShardCalls.stats()).bytes_staged
            process.kill()
        assert one.catalog.until(lambda: one.catalog.ended_clients) == ["other"]
        assert one.call(ShardCalls.stats()).bytes_staged == 0
        with pytest.raises(Exception, match="ended"):
            one.call(ShardCalls.renew("other", Declared((), 1)))


def test_memory_that_a_shard_fills_for_a_client_elsewhere_goes_with_the_session(one: Room) -> None:
    """Nobody else may still write to it; the process of that client cannot be watched."""
    one.call(ShardCalls.hello("far", "elsewhere", this_process()))
    one.call(ShardCalls.allocate("far", Request("far", 1), [100_000], 1.0))
    one.call(ShardCalls.allocate(CLIENT, Request(CLIENT, 1), [200_000], 1.0))
    with one.part(Sessions)._lock:
        for client in ("far", CLIENT):
            one.state().requests.open(client, time.monotonic() - 100.0)
    eventually(lambda: 0 < one.call(ShardCalls.stats()).bytes_staged < 300_000, "the memory to go back")
    assert one.call(ShardCalls.stats()).bytes_staged >= 200_000


class TestOrders:
    def test_each_is_applied_once_and_in_sequence(self, one: Room) -> None:
        assert one.order(Backups((1,)), Backups((2,))) == 2
        assert one.order(Backups((3,)), first=2) == 2
        assert one.order(Backups((5,)), first=4) == 2
        assert one.state().backups == (2,)
        assert one.order(Backups((4,)), first=3) == 3
        assert one.state().backups == (4,)

    @pytest.mark.parametrize("term", [Term(0, b"older"), Term(1, b"another")])
    def test_one_of_another_catalog_is_refused(self, one: Room, term: Term) -> None:
        one.order(Backups((1,)))
        for call in (
            ShardCalls.orders(term, 1, 2, [Backups((2,))]),
            ShardCalls.push(term, []),
            ShardCalls.append_journal(term, 1, 0, b"frame"),
        ):
            with pytest.raises(ShardUnavailableError, match="expected a catalog of term 1"):
                one.call(call)
        assert one.state().backups == (1,)

    def test_one_for_an_earlier_process_is_refused(self, one: Room) -> None:
        one.start()
        with pytest.raises(ShardUnavailableError, match="incarnation"):
            one.call(ShardCalls.orders(one.catalog.term, 1, 1, [Backups((1,))]))

    def test_what_a_client_staged_whose_session_ended_goes_and_what_it_fills_stays_its(self, one: Room) -> None:
        one.catalog.open.clear()
        one.call(ShardCalls.grant(CLIENT, Request(CLIENT, 1), [1000], 1.0))
        block = one.filled(2, one.segment(), [LARGE])
        one.state().stage(Request(CLIENT, 3), one.segment(), b"few!", [4])
        one.order(Ended((CLIENT,)))
        stats = one.call(ShardCalls.stats())
        assert stats.tensors == 0
        assert stats.bytes_staged > 100_000
        assert block.place is not None

    def test_places_that_readers_know_come_to_hold_something_else(self, one: Room) -> None:
        handed = one.save(1, LARGE)
        one.call(ShardCalls.commit(handed))
        segment = handed.blocks[0].id
        one.order(Free({segment: (0,)}))
        assert one.state().segment(segment) is None
        assert one.call(ShardCalls.stats()).bytes_allocated == 0


class TestPush:
    def test_a_wait_ends_with_the_version_and_its_table(self, one: Room) -> None:
        waits = one.send(ShardCalls.wait_newer("m", 1, 60.0))
        one.catalog.until(lambda: one.catalog.watched == ["m"])
        one.call(ShardCalls.push(one.catalog.term, [located("n", 5, 1), located("m", 2, 1)]))
        found = waits.result(60.0)
        assert isinstance(found, Located)
        assert found.header.ref.version == 2

    def test_a_version_that_is_there_is_answered_at_once(self, one: Room) -> None:
        one.catalog.newest["m"] = located("m", 3, 1)
        assert one.call(ShardCalls.wait_newer("m", 2, 60.0)) == one.catalog.newest["m"]
        assert one.call(ShardCalls.wait_newer("m", 3, 0.0)) is None

    def test_what_was_said_later_counts_in_whatever_order_it_comes(self, one: Room) -> None:
        one.catalog.newest["m"] = located("m", 1, 1)
        one.call(ShardCalls.wait_newer("m", 0, 60.0))
        for said in (located("m", 3, 3), located("m", 2, 2)):
            one.call(ShardCalls.push(one.catalog.term, [said]))
        found = one.call(ShardCalls.wait_newer("m", 1, 0.0))
        assert found is not None
        assert found.header.ref.version == 3
        one.call(ShardCalls.push(one.catalog.term, [located("m", 2, 4)]))
        assert one.call(ShardCalls.wait_newer("m", 2, 0.0)) is None

    def test_a_new_term_is_told_what_is_watched(self, one: Room) -> None:
        waits = one.send(ShardCalls.wait_newer("m", 0, 60.0))
        one.catalog.until(lambda: one.catalog.watched == ["m"])
        one.catalog.watched = []
        one.catalog.newest["m"] = located("m", 1, 0)
        one.catalog.term = Term(2, b"second")
        assert waits.result(60.0).header.ref.version == 1

    def test_a_name_for_which_nobody_waits_any_more_is_watched_no_longer(
        self, one: Room, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one.call(ShardCalls.wait_newer("m", 0, 0.0))
        one.catalog.until(lambda: one.catalog.watched == ["m"])
        monkeypatch.setattr(orders, "KEEP_S", 0.0)
        one.call(ShardCalls.wait_newer("n", 0, 0.0))

        def ended() -> bool:
            one.part(orders.Orders).watching.soon()
            return one.catalog.watched == []

        eventually(ended, "the name to be watched no longer")
