"""Policies keep what a plain reading of their rule keeps, whatever the versions and their order."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.store.refs import ModelRef
from tensorvine.store.versions.retention import Candidate, KeepAny, KeepBest, KeepBytes, KeepEvery, KeepLast, Retention

qualities = st.none() | st.sampled_from([math.nan, -math.inf, -1.0, 0.0, 0.5, math.inf]) | st.floats()
histories = st.lists(
    st.builds(
        Candidate,
        st.integers(1, 30).map(lambda version: ModelRef("m", version)),
        qualities,
        st.integers(0, 9),  # unrelated to the version: a clock that was set back
        st.integers(0, 50),
    ),
    max_size=12,
    unique_by=lambda candidate: candidate.ref,
)
counts = st.integers(1, 14)
policies = st.one_of(
    counts.map(KeepLast), counts.map(KeepBest), counts.map(KeepEvery), st.integers(0, 300).map(KeepBytes)
)


def numbers(policy: Retention, versions: Sequence[Candidate]) -> set[int]:
    return {ref.version for ref in policy.keep(versions)}


def version(number: int, quality: float | None = None, nbytes: int = 1) -> Candidate:
    return Candidate(ModelRef("m", number), quality, -number, nbytes)


class TestAgainstAPlainReading:
    @given(histories, counts)
    def test_keep_last_keeps_those_that_fewer_than_n_are_newer_than(self, versions: list[Candidate], n: int) -> None:
        expected = {v.ref for v in versions if sum(other.ref > v.ref for other in versions) < n}
        assert KeepLast(n).keep(versions) == expected

    @given(histories, counts)
    def test_keep_best_keeps_those_that_fewer_than_n_are_better_than(self, versions: list[Candidate], n: int) -> None:
        rated = {v.ref: v.quality for v in versions if v.quality is not None and v.quality == v.quality}

        def better(a: ModelRef, b: ModelRef) -> bool:
            return rated[a] > rated[b] or (rated[a] == rated[b] and a > b)

        assert KeepBest(n).keep(versions) == {ref for ref in rated if sum(better(o, ref) for o in rated) < n}

    @given(histories, counts)
    def test_keep_every_keeps_the_multiples_of_n(self, versions: list[Candidate], n: int) -> None:
        assert numbers(KeepEvery(n), versions) == {v.ref.version for v in versions} & set(range(0, 31, n))

    @given(histories, st.integers(0, 300))
    def test_keep_bytes_keeps_the_longest_run_of_newest_versions_that_fits(
        self, versions: list[Candidate], nbytes: int
    ) -> None:
        newest = sorted(versions, key=lambda v: -v.ref.version)
        fitting = [
            n for n in range(len(newest) + 1) if n == min(1, len(newest)) or sum(v.nbytes for v in newest[:n]) <= nbytes
        ]
        assert KeepBytes(nbytes).keep(versions) == {v.ref for v in newest[: max(fitting)]}


class TestAnyPolicy:
    @given(policies, policies, policies, histories)
    def test_joined_policies_keep_what_any_of_them_keeps(
        self, a: Retention, b: Retention, c: Retention, versions: list[Candidate]
    ) -> None:
        expected = a.keep(versions) | b.keep(versions) | c.keep(versions)
        assert (a | b | c).keep(versions) == (a | (b | c)).keep(versions) == expected

    @given(policies, histories, st.randoms())
    def test_the_order_of_the_versions_does_not_matter(
        self, policy: Retention, versions: list[Candidate], random
    ) -> None:
        mixed = list(versions)
        random.shuffle(mixed)
        assert policy.keep(mixed) == policy.keep(versions)

    @given(policies, policies)
    def test_policies_are_values_that_travel(self, a: Retention, b: Retention) -> None:
        joined = a | b
        assert pickle.loads(pickle.dumps(joined)) == joined == KeepAny((a, b))  # noqa: S301 (written here)
        assert len({joined, a | b}) == 1

    def test_a_policy_cannot_be_changed(self) -> None:
        with pytest.raises(AttributeError):
            KeepLast(1).n = 2  # pyright: ignore[reportAttributeAccessIssue]

    def test_a_policy_of_ones_own_joins_with_the_others(self) -> None:
        class KeepFirst(Retention):
            def keep(self, versions: Sequence[Candidate]) -> set[ModelRef]:
                return {min(v.ref for v in versions)}

        history = [version(n) for n in (2, 3, 5)]
        assert numbers(KeepFirst() | KeepLast(1), history) == {2, 5}
        assert numbers(KeepLast(1) | KeepFirst(), history) == {2, 5}

    def test_a_policy_joins_with_policies_only(self) -> None:
        with pytest.raises(TypeError):
            _ = KeepLast(1) | 3  # pyright: ignore[reportOperatorIssue]


def test_ties_in_quality_go_to_the_newer_version() -> None:
    assert numbers(KeepBest(2), [version(1, 0.5), version(3, 0.5), version(2, 0.5)]) == {2, 3}


def test_versions_without_a_quality_are_never_the_best() -> None:
    assert numbers(KeepBest(3), [version(1), version(2, math.nan), version(3, -math.inf)]) == {3}


def test_a_newest_version_larger_than_the_budget_stays_alone() -> None:
    assert numbers(KeepBytes(10), [version(1, nbytes=1), version(2, nbytes=11)]) == {2}


def test_an_older_version_that_would_fit_goes_with_the_newer_one_that_did_not() -> None:
    assert numbers(KeepBytes(10), [version(1, nbytes=1), version(2, nbytes=9), version(3, nbytes=8)]) == {3}


@pytest.mark.parametrize("policy", [KeepLast, KeepBest, KeepEvery, KeepBytes])
@pytest.mark.parametrize("value", [-1, 1.0, True, "3", None])
def test_an_argument_that_is_no_count_is_refused_by_name(policy: Callable[[object], Retention], value: object) -> None:
    with pytest.raises(
        ValueError,
        match=rf"{policy.__name__}: n(bytes)?: expected an integer of at least [01]; found",  # pyright: ignore[reportFunctionMemberAccess]
    ):
        policy(value)


@pytest.mark.parametrize("policy", [KeepLast, KeepBest, KeepEvery])
def test_keeping_none_is_refused(policy: Callable[[int], Retention]) -> None:
    with pytest.raises(ValueError, match="expected an integer of at least 1; found 0"):
        policy(0)
