"""What follows from a shard's whole report: what is placed there is there, and all else has a keeper or is missing."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorvine.store.catalog.comparing import compared
from tensorvine.store.catalog.records import FileRecord
from tensorvine.store.catalog.references import References
from tensorvine.store.catalog.reports import Held

SHARDS = (0, 1, 2)
SLOTS = 3


@st.composite
def knowledge(draw: st.DrawFn) -> References:
    """Segments with references, at shards or in files."""
    references = References()
    for serial in range(draw(st.integers(1, 5))):
        copies = tuple(draw(st.lists(st.sampled_from(SHARDS), unique=True, max_size=3)))
        file = FileRecord(1, 9, ((0, SLOTS),)) if draw(st.booleans()) else None
        keeper = draw(st.sampled_from((*SHARDS, 9)))
        references.place((0, serial), SLOTS, keeper=keeper, copies=copies, file=file)
        references.add({(0, serial): draw(st.lists(st.integers(0, SLOTS - 1), unique=True, min_size=1))})
    return references


HELD = st.dictionaries(
    st.integers(0, 7).map(lambda serial: (0, serial)),
    st.builds(
        Held,
        st.lists(st.integers(0, SLOTS - 1), unique=True, min_size=1).map(lambda slots: tuple(sorted(slots))),
        st.booleans(),
        st.none(),
        st.booleans(),
        st.sampled_from([None, 1, 2]),
    ),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(knowledge(), HELD, st.sampled_from(SHARDS))
def test_after_a_comparison(references: References, held: dict[tuple[int, int], Held], shard: int) -> None:
    found = compared(references, shard, held, SHARDS)
    for segment, known in references.items():
        keeper, copies = found.spots.get(segment, (known.keeper, known.copies))
        one = held.get(segment)
        has = one is not None and one.in_memory and set(one.slots) >= set(known.live())
        assert (shard in copies) == has
        assert set(copies) - {shard} == set(known.copies) - {shard}
        touched = one is not None or shard in (known.keeper, *known.copies) or known.keeper not in SHARDS
        if touched:
            assert keeper in SHARDS
            assert not copies or keeper in copies or keeper not in (shard, 9)
        if keeper == shard:
            told = segment in found.takes.get(shard, {})
            assert told or (one is not None and one.keeper) or not touched
        elif one is not None and one.keeper:
            assert segment in found.yields
        if touched and not copies and known.file is None:
            assert segment in found.missing
    for segment, one in held.items():
        known = references.get(segment)
        unused = {slot for slot in one.slots if known is None or not known.counts[slot]}
        assert set(found.strangers.get(segment, ())) == unused


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(knowledge(), st.sampled_from(SHARDS))
def test_a_shard_without_memory_keeps_only_files(references: References, shard: int) -> None:
    found = compared(references, shard, {}, SHARDS)
    for segment, known in references.items():
        keeper, copies = found.spots.get(segment, (known.keeper, known.copies))
        assert shard not in copies
        if keeper == shard and known.file is not None:
            assert found.takes[shard][segment] == known.file.file(segment)
