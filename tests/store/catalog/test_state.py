"""The catalog's state against a plain model: what exists, what is free, and that a replay gives the same."""

from __future__ import annotations

from collections import Counter
from typing import cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tensorvine.store.catalog.journal import Stream, frame, replay, snapshot_of
from tensorvine.store.catalog.records import FileRecord, Freed, Placed, Record, Written, encoded
from tensorvine.store.catalog.reports import Staged
from tensorvine.store.catalog.state import CatalogState
from tensorvine.store.errors import CorruptDataError, ModelLostError, ModelNotFoundError
from tensorvine.store.graphs.graph import Layer, ModelGraph
from tensorvine.store.graphs.index import PrefixQuery
from tensorvine.store.holders import Lease, Request
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.segment import SegmentId
from tensorvine.store.versions.architectures import packed
from tensorvine.store.versions.slots import packed_slots, segment_bytes
from tensorvine.store.versions.version import Draft

from .facts import facts

GRAPHS = [
    ModelGraph([Layer("in", {"class": "Input"}), Layer("a", {"class": "Dense", "units": n}, ["in"])]) for n in (1, 2)
]
NAMES = st.sampled_from(["a", "b/c"])
SHARDS = (0, 1)


def draft_of(
    name: str,
    save: Request,
    slots: dict[SegmentId, list[int]],
    parent: ModelRef | None = None,
    graph: int = 0,
    quality: float | None = None,
) -> Draft:
    """Return a version that is proposed, with its graph."""
    architecture = packed((GRAPHS[graph].to_json(), None))
    return Draft(
        name=name,
        save=save,
        parent=parent,
        quality=quality,
        metadata="{}",
        graph_key=bytes([graph]),
        architecture=architecture,
        fingerprints=PrefixQuery.of(GRAPHS[graph]),
        body=b"body",
        slots=packed_slots(slots),
        bytes_owned=4,
        bytes_total=8,
    )


class Against(RuleBasedStateMachine):
    """Commits, retirements, pins, files and deaths of shards, beside a model of dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.state = CatalogState("start", on_path=True)
        self.stream = b"".join(snapshot_of(self.state.snapshot(b"token")))
        self.number = 0
        self.serial = 0
        self.versions: dict[ModelRef, dict[SegmentId, list[int]]] = {}
        """Live versions, and those that are not freed."""
        self.ended: set[ModelRef] = set()
        self.used: Counter[str] = Counter()
        self.pinned: dict[Lease, ModelRef] = {}
        self.answers: dict[Request, ModelRef] = {}

    def decide(self, records: list[Record]) -> None:
        for record in records:
            self.stream += frame(encoded(record))
            self.state.apply(record)

    def request(self) -> Request:
        self.number += 1
        return Request("client", self.number)

    @property
    def live(self) -> list[ModelRef]:
        return sorted(ref for ref in self.versions if ref not in self.ended)

    @rule(name=NAMES, own=st.integers(0, 3), inherit=st.booleans(), graph=st.integers(0, 1), data=st.data())
    def commit(self, name: str, own: int, inherit: bool, graph: int, data: st.DataObject) -> None:
        slots: dict[SegmentId, list[int]] = {}
        parent = None
        if inherit and self.live:
            parent = data.draw(st.sampled_from(self.live))
            slots = {segment: list(named) for segment, named in self.versions[parent].items()}
        staged: dict[SegmentId, Staged] = {}
        if own:
            self.serial += 1
            slots[0, self.serial] = list(range(own))
            staged[0, self.serial] = Staged(own, (data.draw(st.sampled_from(SHARDS)),))
        draft = draft_of(name, self.request(), slots, parent, graph)
        refusal = self.state.refusal(draft, False, staged.keys())
        if refusal is not None:
            assert refusal[0] == "slots"
            assert parent is not None
            return
        before = self.state.newest(name)
        self.decide(self.state.decide_commit(draft, staged, now_ns=5))
        ref = self.state.newest(name)
        assert ref is not None
        assert before is None or before < ref
        self.used[name] += 1
        assert ref.version == self.used[name]
        self.versions[ref] = slots
        self.answers[draft.save] = ref

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        ref, request = data.draw(st.sampled_from(self.live)), self.request()
        self.decide(self.state.decide_retire(request, ref.name, ref.version))
        self.ended.add(ref)
        self.answers[request] = ref
        with pytest.raises(ModelNotFoundError):
            self.state.resolve(ref.name, ref.version)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        ref, lease = data.draw(st.sampled_from(self.live)), Lease(self.request())
        assert self.state.pin(ref.name, ref.version, lease, 0.0).header.ref == ref
        self.pinned[lease] = ref

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.pinned)))
        self.state.pins.remove([lease])
        del self.pinned[lease]

    @precondition(lambda self: self.versions)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(sorted(self.versions)))
        self.decide([Written(((ref.name, ref.version),))])

    @rule()
    def free(self) -> None:
        records = self.state.decide_free()
        self.decide(records)
        for record in records:
            for name, version in cast(Freed, record).refs:
                ref = ModelRef(name, version)
                assert ref in self.ended
                assert ref not in self.pinned.values()
                del self.versions[ref]

    @precondition(lambda self: len(self.state.references))
    @rule(data=st.data(), where=st.sampled_from([(), (0,), (1,), (1, 0)]), file=st.booleans())
    def place(self, data: st.DataObject, where: tuple[int, ...], file: bool) -> None:
        segment, known = data.draw(st.sampled_from(sorted(self.state.references.items(), key=lambda item: item[0])))
        others = [s for s, one in self.state.references.items() if s[1] < segment[1] and one.counts[0]]
        bases = ((0, segment_bytes(others[0]), 0),) if others and data.draw(st.booleans()) else ()
        record = FileRecord(1, 9, ((0, len(known.counts)),), bases) if file else None
        self.decide([Placed(((segment_bytes(segment), len(known.counts), where[0] if where else -1, where, record),))])

    @rule()
    def name_lost(self) -> None:
        for record in self.state.decide_lost([segment for segment, _ in self.state.references.items()]):
            self.decide([record])
            for name, version in record.refs:  # type: ignore[union-attr]
                with pytest.raises(ModelLostError):
                    self.state.resolve(name, version)
                del self.versions[ModelRef(name, version)]

    @invariant()
    def agrees(self) -> None:
        self.state.check()
        lost = {ModelRef(n, v) for n, known in self.state._names.items() for v in known.lost}
        assert self.state.models() == self.live
        assert not lost & self.versions.keys()
        for request, ref in self.answers.items():
            answered = self.state.answer(request)
            assert answered is not None
            assert answered[0] == ref
        named = {segment for slots in self.versions.values() for segment, one in slots.items() if one}
        assert named <= {segment for segment, _ in self.state.references.items()}
        if not self.versions:
            assert not len(self.state.references)
            assert not self.state.graphs.nbytes

    @invariant()
    def replay_is_the_same(self) -> None:
        again = CatalogState("start", on_path=True)
        replayed = replay(again, self.stream)
        assert replayed.length == len(self.stream)
        assert facts(again) == facts(self.state)
        torn = CatalogState("start", on_path=True)
        assert replay(torn, self.stream + frame(b"next")[:-1]).length == len(self.stream)

    @invariant()
    def snapshot_is_the_same(self) -> None:
        again = CatalogState("start", on_path=True)
        replay(again, b"".join(snapshot_of(self.state.snapshot(b"token"))))
        assert facts(again) == facts(self.state)
        again.check()


TestAgainst = Against.TestCase
TestAgainst.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_a_stream_without_a_whole_snapshot_counts_for_nothing() -> None:
    content = b"".join(snapshot_of(CatalogState("start").snapshot(b"token")))
    with pytest.raises(CorruptDataError, match="whole snapshot"):
        replay(CatalogState("start"), content[:-1])


def test_streams_are_ordered_by_term_and_number() -> None:
    names = ["catalog/2.1.journal", "catalog/1.12.journal", "catalog/x.journal", "catalog/1.3.journal"]
    found = [stream for stream in map(Stream.parse, names) if stream is not None]
    assert [stream.name for stream in sorted(found)] == [names[3], names[1], names[0]]
