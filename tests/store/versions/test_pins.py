"""Pins: each belongs to a save or a query, which pins once however often it is repeated, and whose abort drops it."""

from __future__ import annotations

import pytest
from tensorvine.store.errors import ModelNotFoundError, OperationTimeoutError
from tensorvine.store.graphs.graph import Layer, ModelGraph
from tensorvine.store.graphs.index import PrefixQuery
from tensorvine.store.holders import Lease, Query, Save
from tensorvine.store.refs import ModelRef
from tensorvine.store.shard import ShardState
from tensorvine.store.versions.version import Draft

CLIENT = "client"
GRAPH = ModelGraph([Layer("in", {"class": "In"}), Layer("dense", {"units": 1}, ["in"])])
ASKED = [PrefixQuery.of(GRAPH)]


@pytest.fixture
def state() -> ShardState:
    return ShardState(0, lambda name: 0)


def saved(state: ShardState, name: str = "m", quality: float | None = None) -> ModelRef:
    draft = Draft(
        name=name,
        save=Save("saver", 1),
        parent=None,
        quality=quality,
        metadata="{}",
        graph_key=b"key",
        architecture=(GRAPH.to_json(), None),
        body=b"",
        holds={},
        bytes_owned=0,
        bytes_total=0,
    )
    return state.publish(state.begin_commit(draft), draft, 1)


def pins(state: ShardState) -> int:
    return state.stats().pins


def abort(state: ShardState, operation: Save | Query) -> None:
    state.ended.end(operation)
    state.unpin(state.pinned_by(operation))


def test_a_query_that_is_repeated_pins_once_and_is_answered_as_at_first(state: ShardState) -> None:
    first = saved(state, quality=0.1)
    query = Query(CLIENT, 1)
    answers = state.match(ASKED * 2, query, 0.0)
    assert [answer.ref for answer in answers if answer is not None] == [first, first]
    better = saved(state, "better", quality=0.9)
    assert state.match(ASKED * 2, query, 0.0) == answers
    assert pins(state) == 2
    (other,) = state.match(ASKED, Query(CLIENT, 2), 0.0)
    assert other is not None
    assert other.ref == better


def test_a_save_that_is_repeated_pins_the_parent_that_it_pinned_at_first(state: ShardState) -> None:
    first, lease = saved(state), Lease(Save(CLIENT, 1), 0)
    for _ in range(2):
        assert state.pin("m", None, lease, 0.0).header.ref == first
        saved(state)
    state.retire(first)
    assert state.pin("m", None, lease, 0.0).header.ref == first
    assert pins(state) == 1


def test_an_abort_drops_the_pins_of_its_operation_alone(state: ShardState) -> None:
    saved(state)
    for number in (1, 2):
        state.match(ASKED * 3, Query(CLIENT, number), 0.0)
        state.pin("m", None, Lease(Save(CLIENT, number), 0), 0.0)
    abort(state, Query(CLIENT, 1))
    assert pins(state) == 5
    abort(state, Save(CLIENT, 2))
    assert pins(state) == 4


def test_requests_of_an_operation_that_was_aborted_are_refused(state: ShardState) -> None:
    saved(state)
    abort(state, Query(CLIENT, 1))
    abort(state, Save(CLIENT, 1))
    with pytest.raises(OperationTimeoutError, match="query client/q1: expected to be in progress; it has ended"):
        state.match(ASKED, Query(CLIENT, 1), 0.0)
    with pytest.raises(OperationTimeoutError, match="save client/s1: expected to be in progress; it has ended"):
        state.pin("m", None, Lease(Save(CLIENT, 1), 0), 0.0)
    assert pins(state) == 0


def test_an_answer_is_forgotten_with_its_pin(state: ShardState) -> None:
    saved(state, quality=0.1)
    query = Query(CLIENT, 1)
    (answer,) = state.match(ASKED, query, 0.0)
    assert answer is not None
    state.unpin([answer.lease])
    better = saved(state, "better", quality=0.9)
    (answer,) = state.match(ASKED, query, 0.0)
    assert answer is not None
    assert answer.ref == better
    assert pins(state) == 1


def test_a_renewal_returns_the_pins_that_are_here_and_none_without_a_session(state: ShardState) -> None:
    ref = saved(state)
    (answer,) = state.match(ASKED, Query(CLIENT, 1), 0.0)
    assert answer is not None
    lease, gone = answer.lease, Lease(Query(CLIENT, 2), 0)
    assert state.renew(CLIENT, [lease, gone], 30.0) == [lease]
    assert state.sweep(89.0) == []
    assert state.sweep(90.0) == [CLIENT]
    assert state.renew(CLIENT, [lease], 90.0) is None
    state.pin(ref.name, ref.version, lease, 91.0)
    assert state.renew(CLIENT, [lease], 91.0) == [lease]
    state.end(CLIENT)
    state.retire(ref)
    with pytest.raises(ModelNotFoundError, match="m@1 was retired"):
        state.pin(ref.name, ref.version, lease, 92.0)
