"""A shard's rules, held to a plain model over random histories: segments, orders, reports.

The model is what the catalog may believe: it commits saves, frees slots, and hears reports. Answers are lost, orders
come twice, and terms change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensorvine.store.catalog.orders import Cool, Discard, Free, Order, Take
from tensorvine.store.catalog.reports import Answered, Report
from tensorvine.store.errors import ShardUnavailableError
from tensorvine.store.holders import Request
from tensorvine.store.segments.segment import ABSENT, GONE, File, Segment, SegmentId
from tensorvine.store.shard import ShardState

CLIENTS = ["a", "b"]
SIZES = st.lists(st.integers(0, 200), min_size=1, max_size=4)


@dataclass
class Model:
    """A segment as it should be."""

    sizes: list[int]
    live: set[int]
    save: Request | None
    files: dict[str, frozenset[int]] = field(default_factory=dict)
    """All that were written, until they are dead."""


class OneShard(RuleBasedStateMachine):
    """Saves, orders and reports of one shard."""

    @initialize()
    def start(self) -> None:
        self.state = ShardState(0, 1)
        self.models: dict[SegmentId, Model] = {}
        self.sent: set[Request] = set()
        self.handles: set[int] = set()
        self.kept_alive: list[bytearray] = []
        self.orders: list[Order] = []
        self.serial = self.number = self.term = 0
        self.unanswered: Report | None = None
        self.answered: list[Report] = []
        self.new_term()

    # ---- help -----------------------------------------------------------------------------------------

    def block(self, nbytes: int) -> bytearray:
        """Make a block that is known by its identity."""
        made = bytearray(nbytes)
        self.kept_alive.append(made)
        self.handles.add(id(made))
        return made

    def drawn(self, data: Any, committed: bool) -> SegmentId | None:
        names = sorted(s for s, model in self.models.items() if (model.save is None) == committed)
        return data.draw(st.sampled_from(names)) if names else None

    def slots(self, data: Any, segment: SegmentId) -> set[int]:
        live = sorted(self.models[segment].live)
        return set(data.draw(st.lists(st.sampled_from(live), unique=True))) if live else set()

    def end_slots(self, segment: SegmentId, slots: set[int]) -> None:
        model = self.models[segment]
        model.live -= slots
        if not model.live:
            del self.models[segment]

    def take_what_is_left(self) -> None:
        """Do what a shell does after each call."""
        for handle in self.state.residents.freed:
            self.handles.remove(id(handle))  # once each
        self.state.residents.freed.clear()
        used = {file for model in self.models.values() for file in model.files}
        for name in self.state.dead_files:
            if name in used:
                (model,) = [model for model in self.models.values() if name in model.files]
                del model.files[name]
        self.state.dead_files.clear()

    def teardown(self) -> None:
        if hasattr(self, "state"):
            self.take_what_is_left()

    # ---- saves ----------------------------------------------------------------------------------------

    @rule(client=st.sampled_from(CLIENTS), parts=st.lists(SIZES, min_size=1, max_size=2))
    def stage(self, client: str, parts: list[list[int]]) -> None:
        self.number += 1
        save = Request(client, self.number)
        for sizes in parts:
            self.serial += 1
            segment = (0, self.serial)
            self.state.stage(save, segment, self.block(1), sizes)
            self.models[segment] = Model(sizes, set(range(len(sizes))), save)

    @rule(data=st.data())
    def send(self, data: Any) -> None:
        saves = sorted({model.save for model in self.models.values() if model.save is not None})
        if saves:
            save = data.draw(st.sampled_from(saves))
            self.state.sent.add(save)
            self.sent.add(save)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def commit(self, data: Any) -> None:
        save = data.draw(st.sampled_from(sorted(self.sent)))
        mine = sorted(segment for segment, model in self.models.items() if model.save == save)
        named = {segment: sorted(self.slots(data, segment)) for segment in mine}
        self.state.commit(save, {segment: slots for segment, slots in named.items() if slots})
        self.sent.discard(save)
        for segment in mine:
            self.models[segment].save = None
            self.end_slots(segment, self.models[segment].live - set(named[segment]))

    @rule(data=st.data())
    def give_up(self, data: Any) -> None:
        saves = sorted({model.save for model in self.models.values() if model.save is not None})
        if not saves:
            return
        save = data.draw(st.sampled_from(saves))
        assert self.state.end(save) is (save not in self.sent)
        assert self.state.requests.is_over(save)
        if save not in self.sent:
            self.models = {segment: model for segment, model in self.models.items() if model.save != save}

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def refuse(self, data: Any) -> None:
        """The catalog refuses a proposal: what was staged goes only if the client gave the save up."""
        save = data.draw(st.sampled_from(sorted(self.sent)))
        self.state.sent.discard(save)
        self.sent.discard(save)
        self.state.sweep_saves()
        if self.state.requests.is_over(save):
            self.models = {segment: model for segment, model in self.models.items() if model.save != save}

    # ---- orders ---------------------------------------------------------------------------------------

    @rule(data=st.data(), again=st.integers(0, 3))
    def free(self, data: Any, again: int) -> None:
        segment = self.drawn(data, committed=True)
        if segment is not None:
            slots = self.slots(data, segment)
            self.order(Free({segment: tuple(sorted(slots))}), again)
            self.end_slots(segment, slots)

    @rule(data=st.data(), again=st.integers(0, 3))
    def cool(self, data: Any, again: int) -> None:
        segment = self.drawn(data, committed=True)
        if segment is not None:
            self.order(Cool((segment,)), again)

    @rule(data=st.data(), again=st.integers(0, 3))
    def discard_what_is_in_use(self, data: Any, again: int) -> None:
        segment = self.drawn(data, committed=True)
        if segment is not None:
            found = self.state.segment(segment)
            names = [file.name for file in (self.state.offered().get(segment), found.file if found else None) if file]
            self.order(Discard(tuple(names)), again)
            assert not self.state.to_discard

    @rule(data=st.data(), again=st.integers(0, 3))
    def take(self, data: Any, again: int) -> None:
        """Be told again to keep a segment changes nothing for its keeper."""
        segment = self.drawn(data, committed=True)
        if segment is not None:
            self.order(Take({segment: None}), again)

    def order(self, order: Order, again: int) -> None:
        """Send an order with up to three that were sent before."""
        self.orders.append(order)
        first = max(1, len(self.orders) - again)
        assert self.state.ordered(first, self.orders[first - 1 :]) == len(self.orders)
        assert self.state.ordered(1, self.orders) == len(self.orders)  # all again: nothing happens

    @rule()
    def orders_with_a_gap_wait(self) -> None:
        gap = Free({segment: tuple(model.live) for segment, model in self.models.items()})
        assert self.state.ordered(len(self.orders) + 2, [gap]) == len(self.orders)

    # ---- files and reports ----------------------------------------------------------------------------

    @rule(data=st.data())
    def write(self, data: Any) -> None:
        unwritten = self.state.unwritten()
        if not unwritten:
            return
        segment = data.draw(st.sampled_from(unwritten))
        found = self.state.segment(segment)
        assert found is not None
        self.serial += 1
        file = File(f"segments/{self.serial}", found.files, 10, frozenset(found.live))
        found.files += 1
        self.models[segment].files[file.name] = file.slots
        assert self.state.offer(segment, file)

    @rule()
    def report(self) -> None:
        """Send a report; one that was not answered is the same, whatever happened."""
        report = self.state.report("node", None, 1 << 20)
        if self.unanswered is not None:
            assert report.stored == self.unanswered.stored
            assert report.serial == self.unanswered.serial
        elif report.serial == 1:
            assert report.stored == self.state.offered()
        self.unanswered = report
        assert (report.whole is not None) == (report.serial == 1)
        if report.whole is not None:
            committed = {s: tuple(sorted(model.live)) for s, model in self.models.items() if model.save is None}
            assert {segment: held.slots for segment, held in report.whole.segments.items()} == committed

    @precondition(lambda self: self.unanswered is not None)
    @rule(data=st.data(), twice=st.booleans())
    def answer(self, data: Any, twice: bool) -> None:
        report = self.unanswered
        assert report is not None
        stored = sorted(report.stored)
        refused = data.draw(st.lists(st.sampled_from(stored), unique=True)) if stored else []
        for _ in range(1 + twice):
            self.state.answered(report, Answered(refused=tuple(refused)))
        self.unanswered = None
        self.answered.append(report)
        assert self.state.has_reported
        for segment in set(stored) - set(refused):
            found = self.state.segment(segment)
            assert found is None or segment in self.state.offered() or found.file == report.stored[segment]

    @precondition(lambda self: self.answered)
    @rule(data=st.data())
    def a_late_answer_changes_nothing(self, data: Any) -> None:
        report = data.draw(st.sampled_from(self.answered))
        before = self.state.offered()
        self.state.answered(report, Answered(refused=tuple(report.stored)))
        assert self.state.offered() == before

    @rule()
    def new_term(self) -> None:
        self.term += 1
        self.state.begin_term(self.term, b"token")
        self.orders, self.unanswered = [], None
        assert not self.state.has_reported
        for term, token in ((self.term, b"other"), (self.term - 1, b"token")):
            with pytest.raises(ShardUnavailableError, match="expected a catalog of term"):
                self.state.begin_term(term, token)
        self.state.begin_term(self.term, b"token")

    # ---- memory ---------------------------------------------------------------------------------------

    @rule(data=st.data())
    def evict(self, data: Any) -> None:
        segment = self.drawn(data, committed=True)
        if segment is not None:
            found = self.state.segment(segment)
            assert found is not None
            may = found.handle is not None and found.is_safe
            assert self.state.residents.evict(segment) is may

    @rule(data=st.data())
    def load(self, data: Any) -> None:
        segment = self.drawn(data, committed=True)
        found = self.state.segment(segment) if segment is not None else None
        if found is not None and found.absent(found.live):
            offsets, length = found.arranged(found.live)
            moved = self.state.residents.move(found.id, found.generation, self.block(1), offsets, length)
            assert moved

    @rule(data=st.data())
    def compact(self, data: Any) -> None:
        if self.state.residents.compactable:
            segment = data.draw(st.sampled_from(sorted(self.state.residents.compactable)))
            found = self.state.segment(segment)
            assert found is not None
            offsets, length = found.compacted()
            assert self.state.residents.move(segment, found.generation, self.block(1), offsets, length)
            assert segment not in self.state.residents.compactable

    # ---- what always holds ----------------------------------------------------------------------------

    @invariant()
    def everything_is_as_the_model_has_it(self) -> None:
        if not hasattr(self, "state"):
            return
        self.take_what_is_left()
        self.state.check()
        segments = {segment.id: segment for segment in self.state.segments()}
        assert {key: segment.live for key, segment in segments.items()} == {
            key: model.live for key, model in self.models.items()
        }
        assert {id(segment.handle) for segment in segments.values() if segment.handle is not None} == self.handles
        for key, segment in segments.items():
            self.check_slots(segment)
            offered = self.state.offered().get(key)
            assert set(self.models[key].files) == {file.name for file in (offered, segment.file) if file is not None}
        if self.state.offered() or self.unanswered is not None:
            assert self.state.has_news

    @staticmethod
    def check_slots(segment: Segment) -> None:
        """Each live slot is in memory, or in a file that the catalog knows."""
        for slot in segment.live:
            offset = segment.offsets[slot]
            assert offset != GONE
            if offset == ABSENT:
                assert segment.file is not None
                assert slot in segment.file.slots
            else:
                assert segment.handle is not None


OneShard.TestCase.settings = settings(deadline=None, stateful_step_count=60)
TestOneShard = OneShard.TestCase


def test_what_is_lost_is_said_again_to_a_term_that_may_not_have_heard_it() -> None:
    state, segment = ShardState(0, 1), (0, 5)
    state.begin_term(1, b"first")
    state.answered(state.report("node", None, 0), Answered())
    state.note_lost(segment, [1])
    assert state.report("node", None, 0).lost == {segment: (1,)}
    state.note_lost(segment, [2])
    state.begin_term(2, b"second")
    assert state.report("node", None, 0).lost == {segment: (1, 2)}
