"""The ledger: merged in any order it says the same, and what is retired costs next to nothing."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.store.holders import Save
from tensorvine.store.refs import ModelRef
from tensorvine.store.shard import ShardState
from tensorvine.store.versions.ledger import FLOOR, Ledger, Told
from tensorvine.store.versions.lineage import Lineage
from tensorvine.store.versions.version import Draft

NAMES = ("a", "b")
refs = st.builds(ModelRef, st.sampled_from(NAMES), st.integers(1, 6))
Fact = tuple[ModelRef, bool]
facts = st.lists(st.tuples(refs, st.booleans()), max_size=12)


def parent_of(ref: ModelRef) -> ModelRef | None:
    """Return what a version derives from: mostly the number before, sometimes the other name, or nothing."""
    if ref.version == 1:
        return None if ref.name == "a" else ModelRef("a", 2)
    return ModelRef(ref.name, ref.version - (2 if ref.version == 5 else 1))


def ledger_of(said: Sequence[Fact]) -> Ledger:
    ledger = Ledger()
    for ref, exists in said:
        ledger.note({ref: (parent_of(ref), exists)})
    return ledger


def merged(*parts: Told) -> Ledger:
    ledger = Ledger()
    for part in parts:
        ledger.merge(part)
    return ledger


def says(ledger: Ledger) -> Any:
    """What of it does not depend on the order in which it was heard."""
    return {n: (part.used, dict(part.living)) for n, part in ledger.told().names.items()}, ledger.floor


@given(one=facts, other=facts, third=facts)
def test_merging_is_commutative_associative_and_idempotent(
    one: list[Fact], other: list[Fact], third: list[Fact]
) -> None:
    a, b, c = (ledger_of(said).told() for said in (one, other, third))
    assert says(merged(a, b)) == says(merged(b, a))
    assert says(merged(merged(a, b).told(), c)) == says(merged(a, merged(b, c).told()))
    assert says(merged(a, b, a, b)) == says(merged(a, b))
    assert says(merged(a, b)) == says(ledger_of([*one, *other]))


@given(one=facts, other=facts)
def test_what_was_used_stays_used_and_a_retirement_beats_a_life(one: list[Fact], other: list[Fact]) -> None:
    ledger = merged(ledger_of(one).told(), ledger_of(other).told())
    for ref, _ in (*one, *other):
        assert ledger.used(ref)
        assert ledger.next(ref.name) > ref.version
        assert ledger.retired(ref) == ((ref, False) in (*one, *other))


@given(said=st.lists(st.tuples(refs, st.booleans()), max_size=25))
def test_a_lineage_names_all_that_exists_and_all_that_it_comes_from_and_nothing_else(said: list[Fact]) -> None:
    lineage, kept = Lineage(), dict[ModelRef, bool]()
    for ref, exists in said:
        if exists:
            lineage.add(ref, parent_of(ref))
            kept[ref] = True
        else:
            lineage.retire(ref)
            if ref in kept:
                kept[ref] = False
        derived = {parent_of(known) for known in kept}
        while over := [known for known, lives in kept.items() if not lives and known not in derived]:
            for known in over:
                del kept[known]
            derived = {parent_of(known) for known in kept}
        assert {r for name in NAMES for r, _ in lineage.known(name)} == kept.keys()
        for known, lives in kept.items():
            assert lineage.lives(known) == lives
            chain = lineage.chain(known)
            assert all(parent_of(child) == parent for child, parent in pairwise(chain))
            assert (parent_of(chain[-1]) if chain[-1] in kept else None) is None
            assert set(lineage.offspring([known])) == {
                other for other in kept if other != known and known in lineage.chain(other)
            }


def test_qualities_outlive_their_versions_in_a_run() -> None:
    lineage = Lineage()
    chain = [ModelRef("m", version) for version in range(1, 9)]
    for ref in chain:
        quality = None if ref.version == 3 else float("nan") if ref.version == 5 else ref.version / 10
        lineage.add(ref, ModelRef("m", ref.version - 1) if ref.version > 1 else None, quality)
    for ref in chain[:-1]:
        lineage.retire(ref)
    found = lineage.qualities(chain)
    assert found.pop(chain[4]) != 0.5  # it is no number
    assert found == {ref: ref.version / 10 for ref in chain if ref.version not in (3, 5)}
    assert lineage.runs("m") == ((2, 5), (6, 8))
    lineage.add(chain[2], chain[1])  # the disk knows better
    assert (lineage.runs("m"), lineage.lives(chain[2])) == (((2, 3), (4, 5), (6, 8)), True)
    assert lineage.chain(chain[-1]) == chain[::-1]


def test_after_all_that_knew_have_died_numbers_begin_above_the_floor() -> None:
    ledger = Ledger()
    ledger.merge(Told({}, FLOOR))
    assert ledger.next("m") == FLOOR + 1
    ledger.note({ModelRef("m", FLOOR + 1): (None, True)})
    assert (ledger.next("m"), ledger.next("n")) == (FLOOR + 2, FLOOR + 1)


RETIRED = 20_000


def of_planner() -> Callable[[int], None]:
    ledger = Ledger()

    def save_and_retire(version: int) -> None:
        ledger.note({ModelRef("m", version): (ModelRef("m", version - 1) if version > 1 else None, True)})
        if version > 1:
            ledger.note({ModelRef("m", version - 1): (None, False)})
        assert version < RETIRED or len(ledger.lineage.chain(ModelRef("m", version))) == version

    return save_and_retire


def of_shard() -> Callable[[int], None]:
    state = ShardState(0, lambda name: 0)
    state.open("c", 0.0)

    def save_and_retire(version: int) -> None:
        parent = ModelRef("m", version - 1) if version > 1 else None
        draft = Draft(
            name="m",
            save=Save("c", 1),
            parent=parent,
            quality=None,
            metadata="{}",
            graph_key=b"key",
            architecture=('{"layers": []}', None),
            body=b"",
            holds={},
            bytes_owned=0,
            bytes_total=0,
        )
        state.publish(state.begin_commit(draft), draft, version)
        if parent is not None:
            state.retire(parent)
        assert version < RETIRED or len(state.lineage.chain(ModelRef("m", version))) == version

    return save_and_retire


@pytest.mark.parametrize("kept", [of_planner, of_shard])
def test_a_retired_version_costs_its_place_in_a_range(kept: Callable[[], Callable[[int], None]]) -> None:
    save_and_retire = kept()
    for version in range(1, 1001):
        save_and_retire(version)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for version in range(1001, RETIRED + 1):
            save_and_retire(version)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / (RETIRED - 1000) < 16
