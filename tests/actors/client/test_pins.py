"""The pins of a client: none stays after a query or save that failed, and none is lost without a word.

Two shards run in this process, with their own states and parts; a wire between them and a client's session can be
silent, lose answers, or be cut. Nothing here needs Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tensorvine.actors.client.catalog import Catalog
from tensorvine.actors.client.match import Prefixes, PrefixMatch
from tensorvine.actors.client.pins import UNANSWERED
from tensorvine.actors.client.reader import Reader
from tensorvine.actors.client.save.request import requested
from tensorvine.actors.client.save.reserved import ReservedMemory
from tensorvine.actors.client.save.saver import Saver
from tensorvine.actors.client.session import Session
from tensorvine.actors.rpc.messages import Beginning
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.planner.topology import Topology
from tensorvine.store.errors import (
    ModelLostError,
    ModelNotFoundError,
    OperationTimeoutError,
    ShardUnavailableError,
    TensorVineError,
)
from tensorvine.store.graphs.graph import Layer, ModelGraph
from tensorvine.store.holders import Save
from tensorvine.store.refs import ModelRef
from tensorvine.store.versions.version import Draft

from tests.support.direct import Answering, answered, call_directly
from tests.support.home import Home

TOPOLOGY = Topology("repo", (0, 1), "start")
GRAPH = ModelGraph([Layer("in", {"class": "In"}), Layer("dense", {"units": 1}, ["in"])])
PARTS = ("sessions", "queries", "writes")


class Wire:
    """Two shards and the planner, as an engine; what a client sends arrives when it is sent, unless told otherwise."""

    def __init__(self) -> None:
        self.shards = [Home(roomy=True, index=shard, home_of=TOPOLOGY.home) for shard in TOPOLOGY.shards]
        self.silent: set[int] = set()
        """Shards that answer what is sent now only after `speak`."""
        self.losing: Callable[[int, str], bool] = lambda shard, method: False
        """Whether the answer to a call is lost once it was carried out."""
        self.cut: set[int] = set()
        """Shards that nothing reaches."""
        self.at: Callable[[str], None] = lambda method: None
        """Called before each call is sent."""
        self.waiting: dict[int, list[Callable[[], None]]] = {0: [], 1: []}

    def this_node(self) -> str:
        return "there"

    def find(self, name: str) -> str:
        return name

    def reach(self, actor: str, timeout: float, who: str) -> list[Answering]:
        return [partial(self._call, actor)]

    def _call(self, actor: str, method: str, *arguments: Any) -> Future[Any]:
        if actor.endswith("planner"):
            return answered(TOPOLOGY if method == "topology" else None)
        shard = int(actor[-1])
        self.at(arguments[0] if method == "gathered" else method)
        if shard in self.cut:
            return answered(error=ShardUnavailableError(f"{actor}: expected to be reached; the network is cut"))
        answer: Future[Any] = Future()

        def carry_out() -> None:
            try:
                found = asyncio.run(self._answer(shard, method, arguments))
                if self.losing(shard, arguments[0] if method == "gathered" else method):
                    raise ShardUnavailableError(f"{actor}: expected an answer; it was lost")
            except TensorVineError as exc:
                answer.set_exception(exc)
            else:
                answer.set_result(found)

        self.waiting[shard].append(carry_out)
        if shard not in self.silent:
            self.speak(shard)
        return answer

    async def _answer(self, shard: int, method: str, arguments: Any) -> Any:
        home = self.shards[shard]
        if method == "gathered":
            tag = home.names.tag()
            return tag, await self._answer(shard, arguments[0], arguments[1])
        part = next(part for part in (getattr(home, name) for name in PARTS) if hasattr(part, method))
        return await getattr(part, method)(*arguments)

    def speak(self, shard: int, order: Callable[[list[Any]], Iterator[Any]] = iter) -> None:
        """Have a silent shard carry out what it was sent, in some order."""
        self.silent.discard(shard)
        waiting, self.waiting[shard] = self.waiting[shard], []
        for carry_out in order(waiting):
            carry_out()

    def pins(self) -> list[int]:
        return [shard.state.stats().pins for shard in self.shards]

    def save(self, home: int, graph: ModelGraph = GRAPH) -> ModelRef:
        """Publish a version of a name that is at home in a shard."""
        state, name = self.shards[home].state, name_at(home)
        draft = Draft(
            name=name,
            save=Save("saver", 1),
            parent=None,
            quality=None,
            metadata="{}",
            graph_key=b"key",
            architecture=(graph.to_json(), None),
            body=b"",
            holds={},
            bytes_owned=0,
            bytes_total=0,
        )
        return state.publish(state.begin_commit(draft), draft, 1)

    def lapse(self, client: str) -> None:
        """End the sessions of a client as if it had been silent."""
        for shard in self.shards:
            shard.state.sweep(time.monotonic() + 3600.0)
        assert all(client not in shard.state._sessions for shard in self.shards)


def name_at(home: int) -> str:
    return next(name for name in (f"m{i}" for i in range(100)) if TOPOLOGY.home(name) == home)


@pytest.fixture
def wire() -> Wire:
    made = Wire()
    for shard in TOPOLOGY.shards:
        made.save(shard)
    return made


@pytest.fixture
def session(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    call_directly(monkeypatch, waits=False)
    engine: Any = wire
    made = Session(engine, "repo")
    monkeypatch.setattr(made, "keep_alive", lambda: None)  # the tests do what the thread does, when they want it
    yield made
    wire.silent.clear()
    made.close()


@pytest.fixture
def prefixes(session: Session) -> Prefixes:
    catalog = Catalog(session)
    return Prefixes(session, catalog, Reader(session, catalog, []))


def matched(prefixes: Prefixes) -> PrefixMatch:
    (match,) = prefixes.longest([GRAPH])
    assert match is not None
    return match


def test_a_query_pins_its_match_alone_until_that_is_released(wire: Wire, prefixes: Prefixes, session: Session) -> None:
    match = matched(prefixes)
    session.pins.tidy()
    assert sum(wire.pins()) == 1
    match.release()
    match.release()
    assert wire.pins() == [0, 0]


@pytest.mark.parametrize("order", [iter, reversed], ids=["in order", "the abort first"])
def test_a_query_that_failed_with_a_silent_shard_leaves_no_pin(
    wire: Wire, prefixes: Prefixes, session: Session, order: Any
) -> None:
    matched(prefixes).release()
    session.pins.tidy()
    wire.silent.add(1)
    with pytest.raises(OperationTimeoutError):
        prefixes.longest([GRAPH, GRAPH])
    assert wire.pins() == [0, 0]
    wire.speak(1, order)
    assert wire.pins() == [0, 0]


def test_a_query_that_is_interrupted_leaves_no_pin(wire: Wire, prefixes: Prefixes, session: Session) -> None:
    """The interrupt comes while each message is sent in turn, or in the middle of the abort that follows it."""
    matched(prefixes).release()
    for stop in range(12):
        left = stop

        def interrupt(method: str) -> None:
            nonlocal left
            left -= 1
            if left in (-1, -3):
                raise KeyboardInterrupt

        wire.at = interrupt
        with contextlib.suppress(KeyboardInterrupt):
            matched(prefixes)
        wire.at = lambda method: None
        gc.collect()
        session.pins.tidy()
        assert wire.pins() == [0, 0], stop


def test_a_query_whose_work_beside_it_fails_leaves_no_pin(wire: Wire, prefixes: Prefixes) -> None:
    def fail() -> None:
        raise ModelLostError("this is no model")

    with pytest.raises(ModelLostError, match="this is no model"):
        prefixes.longest([GRAPH], meanwhile=fail)
    assert wire.pins() == [0, 0]


def test_a_query_whose_answer_was_lost_pins_once(wire: Wire, prefixes: Prefixes, session: Session) -> None:
    lost = [True, False]
    wire.losing = lambda shard, method: method == "match" and shard == 0 and lost.pop(0)
    match = matched(prefixes)
    session.pins.tidy()
    assert sum(wire.pins()) == 1
    match.release()
    assert wire.pins() == [0, 0]


def test_a_shard_that_does_not_answer_occupies_few_connections(
    wire: Wire, prefixes: Prefixes, session: Session
) -> None:
    matches = [matched(prefixes) for _ in range(30)]
    session.pins.tidy()
    wire.silent |= {0, 1}
    for match in matches:
        match.release(wait=False)
        session.pins.tidy()
    assert len(session.pins._sent) == UNANSWERED
    for shard in (0, 1):
        wire.speak(shard)
    for _ in range(3):
        session.pins.tidy()
    assert wire.pins() == [0, 0]
    assert not session.pins._sent


def test_a_repository_that_was_stopped_is_asked_nothing_more(
    wire: Wire, prefixes: Prefixes, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    match = matched(prefixes)
    session.pins.tidy()
    wire.cut |= {0, 1}
    match.release(wait=False)
    session.pins.tidy()
    monkeypatch.setattr(session, "refresh", lambda: setattr(session, "stopped", True))
    session.pins.tidy()
    assert not session.pins._sent
    assert not session.pins._unsent


@pytest.mark.parametrize("trouble", ["a cut", "lost answers", "silence"])
def test_a_release_that_failed_is_made_up_for(wire: Wire, prefixes: Prefixes, session: Session, trouble: str) -> None:
    match, collected = matched(prefixes), matched(prefixes)
    shard = wire.pins().index(2)
    if trouble == "a cut":
        wire.cut.add(shard)
    elif trouble == "silence":
        wire.silent.add(shard)
    else:
        wire.losing = lambda shard, method: method == "unpin"
    match.release(wait=False)
    del collected
    gc.collect()
    session.pins.tidy()
    wire.cut.clear()
    wire.losing = lambda shard, method: False
    wire.speak(shard)
    for _ in range(3):
        session.pins.tidy()
    assert wire.pins() == [0, 0]
    assert not session.pins._sent


def begin(session: Session, save: Save, name: str) -> Any:
    asked = Beginning(
        client=session.client,
        name=name,
        version=None,
        optional=False,
        known=None,
        inherits=False,
        compares=False,
        save=save,
        sizes=(),
        timeout=60.0,
    )
    return ShardCalls.begin(asked)


def test_a_save_that_was_begun_and_failed_leaves_no_pin_on_any_shard(wire: Wire, session: Session) -> None:
    save = Save(session.client, 1)
    wire.losing = lambda shard, method: method == "begin"
    for shard in TOPOLOGY.shards:
        with pytest.raises(ShardUnavailableError, match="it was lost"):
            session.send(shard, begin(session, save, name_at(shard))).result(1.0)
    assert wire.pins() == [1, 1]
    session.pins.abort(save)
    assert wire.pins() == [0, 0]
    with pytest.raises(OperationTimeoutError, match="expected to be in progress; it has ended"):
        session.call(1, begin(session, save, name_at(1)))
    assert wire.pins() == [0, 0]


def test_a_begin_that_is_repeated_pins_once(wire: Wire, session: Session) -> None:
    first = session.call(0, begin(session, Save(session.client, 1), name_at(0)))
    wire.save(0)
    again = session.call(0, begin(session, Save(session.client, 1), name_at(0)))
    assert (again.header.ref, again.lease) == (first.header.ref, first.lease)
    assert wire.pins() == [1, 0]


def test_a_begin_that_fails_after_it_pinned_leaves_no_pin(
    wire: Wire, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(segments: object) -> None:
        raise ModelLostError("the bytes are gone")

    monkeypatch.setattr(wire.shards[0].writes, "digests", fail)
    save = Save(session.client, 1)
    asked = begin(session, save, name_at(0))
    object.__setattr__(asked.arguments[0], "inherits", True)
    with pytest.raises(ModelLostError, match="the bytes are gone"):
        session.call(0, asked)
    session.pins.abort(save)
    assert wire.pins() == [0, 0]


@pytest.mark.parametrize("end", ["collected", "withdrawn"])
def test_a_save_that_was_announced_and_does_not_come_leaves_no_pin(wire: Wire, session: Session, end: str) -> None:
    catalog = Catalog(session)
    saver = Saver(session, catalog, Reader(session, catalog, []))
    announced = saver.announce(name_at(0), None, {})
    assert wire.pins() == [1, 0]
    if end == "withdrawn":
        saver.withdraw(announced)
        assert wire.pins() == [0, 0]
    del announced
    gc.collect()
    session.pins.tidy()
    assert wire.pins() == [0, 0]
    saver.close()


@pytest.mark.parametrize("order", [iter, reversed], ids=["in order", "the abort first"])
def test_memory_reserved_for_a_save_to_come_goes_back_when_its_shard_did_not_answer(
    wire: Wire, session: Session, monkeypatch: pytest.MonkeyPatch, order: Any
) -> None:
    home, view = wire.shards[0], SimpleNamespace(alive=True, close=lambda: None)
    session.connection(0).view = cast(Any, view)
    monkeypatch.setattr(session, "near", lambda home: 0)
    monkeypatch.setattr(home.writes._admission._clients, "watches", lambda client: True)
    with ThreadPoolExecutor(1) as helper:
        reserved = ReservedMemory(session, helper)
        wire.silent.add(0)
        with pytest.raises(OperationTimeoutError):
            reserved.renew(requested(name_at(0), {"w": np.ones(1 << 15)}, None))
    wire.speak(0, order)
    assert home.context.segment_memory.bytes_filling == 0
    session.pins.tidy()
    assert not session.pins._sent


def test_a_match_is_pinned_again_after_the_session_lapsed(
    wire: Wire, prefixes: Prefixes, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    match = matched(prefixes)
    wire.lapse(session.client)
    assert wire.pins() == [0, 0]
    with caplog.at_level(logging.WARNING):
        session.pins.renew(5.0)
        session.pins.renew(5.0)
    assert sum(wire.pins()) == 1
    assert caplog.text.count(f"the pin of {match.ref} had expired with the session; pinned again") == 1
    home = wire.shards[TOPOLOGY.home(match.ref.name)].state
    home.retire(match.ref)
    assert home.record(match.ref.name, match.ref.version, session.client).header.ref == match.ref
    assert match.layers == {"in": "in", "dense": "dense"}
    match.release()
    assert wire.pins() == [0, 0]


def test_a_match_whose_version_was_retired_while_the_session_had_lapsed_raises(
    wire: Wire, prefixes: Prefixes, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    match = matched(prefixes)
    wire.lapse(session.client)
    wire.shards[TOPOLOGY.home(match.ref.name)].state.retire(match.ref)
    with caplog.at_level(logging.ERROR):
        session.pins.renew(5.0)
        session.pins.renew(5.0)
    why = f"{match.ref}: expected it to be pinned; its pin expired with the session"
    assert caplog.text.count(why) == 1
    for read in (lambda: match.layers, lambda: match.tensors):
        with pytest.raises(ModelNotFoundError, match=why):
            read()
    match.release()
    assert wire.pins() == [0, 0]


def test_a_silent_shard_keeps_no_other_from_pinning_again(wire: Wire, prefixes: Prefixes, session: Session) -> None:
    match = matched(prefixes)
    home = TOPOLOGY.home(match.ref.name)
    wire.lapse(session.client)
    wire.silent.add(1 - home)
    with pytest.raises(OperationTimeoutError):
        session.pins.renew(5.0)
    assert wire.pins()[home] == 1
