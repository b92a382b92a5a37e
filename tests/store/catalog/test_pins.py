"""Pins: each belongs to a request, which pins once however often it is repeated, and go with it or with its client."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tensorvine.store.catalog.pins import Pins
from tensorvine.store.catalog.reports import Staged
from tensorvine.store.catalog.state import CatalogState
from tensorvine.store.errors import ModelNotFoundError, OperationTimeoutError
from tensorvine.store.graphs.graph import Layer, ModelGraph
from tensorvine.store.graphs.index import PrefixQuery
from tensorvine.store.holders import Lease, Request
from tensorvine.store.refs import ModelRef
from tensorvine.store.versions.architectures import packed
from tensorvine.store.versions.slots import packed_slots
from tensorvine.store.versions.version import Draft

CLIENT = "client"
GRAPH = ModelGraph([Layer("in", {"class": "In"}), Layer("dense", {"units": 1}, ["in"])])
ASKED = [PrefixQuery.of(GRAPH)]


@pytest.fixture
def state() -> CatalogState:
    return CatalogState("start")


def saved(state: CatalogState, name: str = "m", quality: float | None = None) -> ModelRef:
    serial = state.sequence + 1
    draft = Draft(
        name=name,
        save=Request("saver", serial),
        parent=None,
        quality=quality,
        metadata="{}",
        graph_key=b"key",
        architecture=packed((GRAPH.to_json(), None)),
        fingerprints=ASKED[0],
        body=b"",
        slots=packed_slots({(0, serial): [0]}),
        bytes_owned=0,
        bytes_total=0,
    )
    state.apply_all(state.decide_commit(draft, {(0, serial): Staged(1, (0,))}, now_ns=1))
    ref = state.newest(name)
    assert ref is not None
    return ref


def retire(state: CatalogState, ref: ModelRef) -> None:
    state.apply_all(state.decide_retire(Request("retiring", 1), ref.name, ref.version))


def test_a_query_that_is_repeated_pins_once_and_is_answered_as_at_first(state: CatalogState) -> None:
    first = saved(state, quality=0.1)
    query = Request(CLIENT, 1)
    answers = state.match(ASKED * 2, query, 0.0)
    assert [answer.ref for answer in answers if answer is not None] == [first, first]
    better = saved(state, "better", quality=0.9)
    assert state.match(ASKED * 2, query, 0.0) == answers
    assert len(state.pins) == 2
    (other,) = state.match(ASKED, Request(CLIENT, 2), 0.0)
    assert other is not None
    assert other.ref == better


def test_a_save_that_is_repeated_pins_the_parent_that_it_pinned_at_first(state: CatalogState) -> None:
    first, lease = saved(state), Lease(Request(CLIENT, 1))
    for _ in range(2):
        assert state.pin("m", None, lease, 0.0).header.ref == first
        saved(state)
    retire(state, first)
    assert state.pin("m", None, lease, 0.0).header.ref == first
    assert len(state.pins) == 1


def test_the_end_of_a_request_drops_its_pins_alone(state: CatalogState) -> None:
    saved(state)
    for number in (1, 2):
        state.match(ASKED * 3, Request(CLIENT, number), 0.0)
        state.pin("m", None, Lease(Request(CLIENT, number + 2)), 0.0)
    state.end_request(Request(CLIENT, 1))
    assert len(state.pins) == 5
    state.end_request(Request(CLIENT, 4))
    assert len(state.pins) == 4


def test_a_request_that_is_over_is_refused(state: CatalogState) -> None:
    ref = saved(state)
    state.end_request(Request(CLIENT, 1))
    assert not state.declare(CLIENT, [3], highest=3, now=0.0)
    for number in (1, 2):
        lease = Lease(Request(CLIENT, number))
        with pytest.raises(OperationTimeoutError, match=rf"request client/{number}: expected to be in progress; it"):
            state.match(ASKED, lease.request, 0.0)
        with pytest.raises(OperationTimeoutError, match=rf"request client/{number}: expected to be in progress; it"):
            state.pin("m", None, lease, 0.0)
        with pytest.raises(OperationTimeoutError, match=rf"request client/{number}: expected to be in progress; it"):
            state.pin_again(lease, ref, 0.0)
    assert len(state.pins) == 0


def test_an_answer_is_forgotten_with_its_pin(state: CatalogState) -> None:
    saved(state, quality=0.1)
    query = Request(CLIENT, 1)
    (answer,) = state.match(ASKED, query, 0.0)
    assert answer is not None
    state.pins.remove([answer.lease])
    better = saved(state, "better", quality=0.9)
    (answer,) = state.match(ASKED, query, 0.0)
    assert answer is not None
    assert answer.ref == better
    assert len(state.pins) == 1


def test_a_session_that_ran_out_pins_again_what_is_not_freed(state: CatalogState) -> None:
    ref = saved(state)
    (answer,) = state.match(ASKED, Request(CLIENT, 1), 0.0)
    assert answer is not None
    assert state.declare(CLIENT, [1], highest=1, now=30.0)
    assert state.sweep(89.0) == []
    assert state.sweep(90.0) == [CLIENT]
    assert len(state.pins) == 0
    retire(state, ref)
    assert not state.declare(CLIENT, [1], highest=1, now=90.0)
    state.pin_again(answer.lease, ref, 91.0)
    assert state.decide_free() == []
    state.end_client(CLIENT)
    state.apply_all(state.decide_free())
    with pytest.raises(ModelNotFoundError, match="m@1 was retired"):
        state.pin_again(Lease(Request("other", 1)), ref, 92.0)


def test_a_lease_whose_version_was_lost_pins_another_one_alone(state: CatalogState) -> None:
    first, lease = saved(state), Lease(Request(CLIENT, 1))
    state.pin("m", None, lease, 0.0)
    (segment,) = dict(state.references.items())
    state.references.place(segment, 1, keeper=0, copies=(), file=None)
    state.apply_all(state.decide_lost([segment]))
    second = saved(state)
    assert state.pin("m", None, lease, 0.0).header.ref == second
    assert (state.pins.holds(first), state.pins.holds(second)) == (False, True)


def test_a_client_that_ended_pins_nothing(state: CatalogState) -> None:
    ref = saved(state)
    state.end_client(CLIENT)
    with pytest.raises(OperationTimeoutError, match="request client/1: expected to be in progress; it has ended"):
        state.pin(ref.name, ref.version, Lease(Request(CLIENT, 1)), 0.0)
    with pytest.raises(OperationTimeoutError, match="client client: expected a client that runs; it has ended"):
        state.declare(CLIENT, [], highest=0, now=0.0)
    assert len(state.pins) == 0


LEASES = st.builds(Lease, st.builds(Request, st.sampled_from(["a", "b"]), st.integers(1, 3)), st.integers(0, 2))
REFS = [ModelRef("m", 1), ModelRef("m", 2), ModelRef("n", 1)]


class AgainstOneDict(RuleBasedStateMachine):
    """The three indexes of `Pins` beside one dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.pins = Pins()
        self.plain: dict[Lease, ModelRef] = {}

    @rule(lease=LEASES, ref=st.sampled_from(REFS))
    def add(self, lease: Lease, ref: ModelRef) -> None:
        self.pins.add(lease, ref)
        self.plain[lease] = ref

    @rule(leases=st.lists(LEASES, max_size=4))
    def remove(self, leases: list[Lease]) -> None:
        gone = {self.plain.pop(lease) for lease in dict.fromkeys(leases) if lease in self.plain}
        assert set(self.pins.remove(leases)) == gone - set(self.plain.values())

    @precondition(lambda self: self.plain)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted({lease.request for lease in self.plain})))
        self.pins.remove(self.pins.leases(request))
        self.plain = {lease: ref for lease, ref in self.plain.items() if lease.request != request}

    @invariant()
    def agrees(self) -> None:
        assert len(self.pins) == len(self.plain)
        for client in ("a", "b"):
            mine = [lease for lease in self.plain if lease.client == client]
            assert set(self.pins.requests(client)) == {lease.request for lease in mine}
            for request in {lease.request for lease in mine}:
                assert set(self.pins.leases(request)) == {lease for lease in mine if lease.request == request}
            for ref in REFS:
                assert self.pins.holds(ref, client) == any(self.plain[lease] == ref for lease in mine)
        assert {lease: self.pins.of(lease) for lease in self.plain} == self.plain


TestAgainstOneDict = AgainstOneDict.TestCase
TestAgainstOneDict.settings = settings(deadline=None, max_examples=60)
