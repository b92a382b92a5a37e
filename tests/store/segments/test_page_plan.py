"""Which pages are made ahead, and which go back: held against a plain model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.store.holders import Filling
from tensorvine.store.segments import page_plan
from tensorvine.store.segments.arena import PAGES, Arena
from tensorvine.store.segments.page_plan import IDLE_S, RECENT_S, PagePlan, Span, pieces

CHUNK, SIZE = 64, 64 * 40
OWNER = Filling("test")


def covered(spans: list[Span]) -> set[int]:
    return {byte for start, end in spans for byte in range(start, end)}


class TestAhead:
    """What is made ahead of need."""

    @given(
        taken=st.lists(st.tuples(st.integers(0, 36), st.integers(1, 6)), max_size=8),
        sizes=st.lists(st.integers(1, 8), min_size=1, max_size=6),
    )
    def test_it_is_where_the_arena_grants_the_same_again(self, taken: list[Span], sizes: list[int]) -> None:
        arena = Arena(SIZE)
        for at, count in taken:
            arena.claim(at * CHUNK, count * CHUNK, OWNER)
        plan = PagePlan(SIZE, CHUNK, 0)
        plan.saved([size * CHUNK for size in sizes], 0.0)
        ahead = plan.ahead(arena.free_spans, 1.0)
        granted = arena.grant(Filling("save"), [size * CHUNK for size in sizes])
        where = {(at, at + size * CHUNK) for at, size in zip(granted, sizes, strict=False)}
        assert covered(ahead) == covered(list(where))

    def test_it_is_as_much_as_the_largest_of_late_and_less_when_nobody_comes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(page_plan, "IDLE_BYTES", 2 * CHUNK)
        plan, free = PagePlan(SIZE, CHUNK, 0), [(0, SIZE)]
        assert plan.ahead(free, 0.0) == []
        plan.saved([3 * CHUNK], 0.0)
        plan.saved([CHUNK], 1.0)
        assert plan.ahead(free, 2.0) == [(0, 3 * CHUNK)]
        assert plan.ahead(free, 1.0 + IDLE_S) == [(0, 2 * CHUNK)]
        assert plan.expect(2.0 + IDLE_S)
        assert not plan.expect(2.0 + IDLE_S)
        assert plan.ahead(free, 3.0 + IDLE_S) == [(0, 3 * CHUNK)]
        assert plan.ahead(free, RECENT_S) == [(0, CHUNK)]
        assert plan.ahead(free, RECENT_S + 1.0) == []


class TestIdle:
    """What goes back."""

    @given(
        steps=st.lists(
            st.tuples(st.integers(0, 36), st.integers(1, 200), st.booleans(), st.integers(1, 30)), max_size=12
        ),
        kept=st.integers(0, 200),
    )
    def test_it_is_free_whole_old_and_neither_kept_nor_ahead(
        self, steps: list[tuple[int, int, bool, int]], kept: int
    ) -> None:
        arena, plan, now = Arena(SIZE), PagePlan(SIZE, CHUNK, kept), 0.0
        used = np.full(SIZE // CHUNK, -np.inf)
        for at, length, free, pause in steps:
            if free:
                arena.free(at * CHUNK)
            elif arena.claim(at * CHUNK, length, OWNER):
                plan.used(at * CHUNK, length, now)
                plan.saved([length], now)
                used[at : -(-(at * CHUNK + length) // CHUNK)] = now
            now += pause
            idle, ahead = plan.idle(arena.free_spans, now), plan.ahead(arena.free_spans, now)
            expected: set[int] = set()
            for chunk in range(SIZE // CHUNK):
                here = set(range(chunk * CHUNK, (chunk + 1) * CHUNK))
                if not here <= covered(arena.free_spans):
                    used[chunk] = now
                elif now - used[chunk] >= IDLE_S and chunk * CHUNK >= kept and not here & covered(ahead):
                    expected |= here
            assert covered(idle) == expected
            assert idle == sorted(idle, reverse=True)

    def test_pieces_are_all_of_a_span_from_its_end_on(self) -> None:
        assert pieces((64, 300), 100) == [(264, 300), (164, 264), (64, 164)]
        assert pieces((5, 5), 10) == []


class TestClaim:
    """A certain part, taken for a moment."""

    def test_it_is_had_only_where_all_of_it_is_free_and_counts_as_nobody_s_filling(self) -> None:
        arena = Arena(SIZE)
        assert arena.claim(128, 64, PAGES)
        assert not arena.claim(64, 128, PAGES)
        assert arena.free_spans == [(0, 128), (192, SIZE)]
        assert arena.owners() == set()
        assert arena.used(kept=False) == 0
        arena.free(128)
        assert arena.free_spans == [(0, SIZE)]
