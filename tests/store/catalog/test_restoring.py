"""What a start takes from manifests: every slot that one of them names has a place, in whatever order they are read."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st
from tensorvine.store.archive.manifestfile import Manifest
from tensorvine.store.catalog.state import CatalogState
from tensorvine.store.errors import StorageError
from tensorvine.store.graphs.graph import ModelGraph
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.segment import File, Segment, SegmentId
from tensorvine.store.versions.manifest import Header, TensorEntry

SEGMENTS, SLOTS, SHARDS = 3, 3, (0, 1)
Slot = tuple[SegmentId, int]
Bases = dict[Slot, Slot]
FILES = {(0, serial): (7, 900) for serial in range(SEGMENTS)}
PLACES = [((0, serial), slot) for serial in range(SEGMENTS) for slot in range(SLOTS)]


@st.composite
def bases(draw: st.DrawFn) -> Bases:
    """Slots that are encoded against slots of segments before."""
    found: Bases = {}
    for (_, serial), slot in PLACES[SLOTS:]:
        if draw(st.booleans()):
            found[(0, serial), slot] = (0, draw(st.integers(0, serial - 1))), draw(st.integers(0, SLOTS - 1))
    return found


MANIFESTS = st.lists(st.lists(st.sampled_from(PLACES), unique=True), min_size=1, max_size=4)


def manifest_of(version: int, named: Iterable[Slot]) -> Manifest:
    entries = {f"{s[1]}/{slot}": TensorEntry("uint8", (4,), 4, None, s, slot) for s, slot in named}
    header = Header(
        ref=ModelRef("m", version),
        parent=None,
        quality=None,
        metadata="{}",
        created_ns=version,
        graph_key=b"key",
        bytes_owned=4,
        bytes_total=4,
    )
    return Manifest(header, (ModelGraph(()).to_json(), None), entries, {})


def started(manifests: list[Manifest], late: set[int], against: Bases) -> CatalogState:
    """Start on a path some of whose manifests can be read later only."""
    state = CatalogState("start", on_path=True)
    for version, manifest in enumerate(manifests, 1):
        if version in late:
            state.miss(manifest.header.ref, StorageError("cannot be read now"))
        else:
            state.restore(manifest)
    state.restore_files(FILES, against, SHARDS)
    for version in sorted(late):
        state.found(ModelRef("m", version), manifests[version - 1])
        state.restore_files(FILES, against, SHARDS)
    return state


@given(MANIFESTS, bases(), st.data())
def test_each_slot_that_is_named_or_encoded_against_is_in_a_file(
    named: list[list[Slot]], against: Bases, data: st.DataObject
) -> None:
    manifests = [manifest_of(version, places) for version, places in enumerate(named, 1)]
    late = data.draw(st.sets(st.integers(1, len(named))))
    state = started(manifests, late, against)
    state.check()
    needed = {place for places in named for place in places}
    waiting = list(needed)
    while waiting:
        base = against.get(waiting.pop())
        if base is not None and base not in needed:
            needed.add(base)
            waiting.append(base)
    found: set[Slot] = set()
    for segment, known in state.references.items():
        assert known.missing() == []
        assert known.keeper in SHARDS
        assert known.file is not None
        file = known.file.file(segment)
        assert file.bases == {slot: against[segment, slot] for slot in file.slots if (segment, slot) in against}
        found.update((segment, slot) for slot in known.live())
        assert file.slots == set(known.live())
    assert found == needed
    assert state.decide_lost(list(FILES)) == []


def test_a_file_of_another_generation_says_nothing_of_the_one_that_is_known() -> None:
    state = started([manifest_of(1, [((0, 0), 0)])], set(), {})
    state.restore(manifest_of(2, [((0, 0), 1)]))
    state.restore_files({(0, 0): (8, 900)}, {}, SHARDS)
    known = state.references.get((0, 0))
    assert known is not None
    assert known.missing() == [1]


def test_a_copy_of_what_was_needed_before_is_none_of_a_slot_that_is_named_late() -> None:
    state = started([manifest_of(1, [((0, 0), 0)])], set(), {})
    known = state.references.get((0, 0))
    assert known is not None
    state.references.place((0, 0), 1, keeper=known.keeper, copies=(known.keeper,), file=known.file)
    state.restore(manifest_of(2, [((0, 0), 1)]))
    state.restore_files(FILES, {}, SHARDS)
    assert known.copies == ()
    assert known.file is not None
    assert known.file.has(1)


@given(st.sets(st.integers(0, SLOTS - 1), min_size=1), st.sets(st.integers(0, SLOTS)), st.booleans())
def test_a_segment_that_was_opened_has_the_slots_that_are_named_late(
    first: set[int], then: set[int], read: bool
) -> None:
    every = File("name", 7, 900, frozenset(range(SLOTS)), {2: ((0, 9), 0)})
    segment = Segment.on_disk((0, 1), (4,) * SLOTS, every.cut(first), generation=1)
    if read:
        segment.move(b"block", *segment.arranged(first))
    segment.has_more(every.cut(first | then))
    assert segment.file == every.cut((first | then) & every.slots)
    assert segment.live == (first | then) & every.slots
    assert segment.absent(segment.live) == sorted(segment.live - first if read else segment.live)
