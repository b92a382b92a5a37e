"""The transfer selector: learns what each way takes, tries each once, avoids what failed, and repeats itself."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorvine.planner.schedules.transfer import (
    AVOIDED,
    FADING,
    KEPT,
    LATENCY_S,
    LONGEST_AVOIDED,
    PRIOR,
    TransferSelector,
    TransportSpeed,
)

TRANSPORTS = {
    "shared": TransportSpeed(0.0002, 1e11),
    "socket": TransportSpeed(0.0008, 2e9),
    "files": TransportSpeed(0.02, 5e8),
}
sizes = st.integers(0, 10**10)
speeds = st.builds(TransportSpeed, st.floats(1e-5, 1), st.floats(1e6, 1e12))


def taught(ways: dict[str, TransportSpeed], nbytes: list[int]) -> TransferSelector:
    selector = TransferSelector()
    for way, speed in ways.items():
        for each in nbytes:
            selector.measured(way, each, speed.seconds(each))
    return selector


class TestLearning:
    """Latency and bandwidth from measurements."""

    @given(speeds, st.lists(sizes, min_size=2, max_size=KEPT, unique=True), sizes)
    def test_a_way_of_two_sizes_is_known(self, speed: TransportSpeed, seen: list[int], asked: int) -> None:
        if max(seen) - min(seen) > 0.01 * speed.latency_s * speed.bytes_per_s:  # else rounding decides
            selector = taught({"way": speed}, seen)
            exact = 1e-3 * speed.seconds(min(seen))  # a thousandth of what was seen: less cannot be told from rounding
            assert selector.predict("way", asked) == pytest.approx(speed.seconds(asked), rel=1e-3, abs=exact)

    @given(st.integers(1, 10**10), st.floats(1e-6, 100))
    def test_one_size_is_split_by_the_latency_supposed(self, nbytes: int, seconds: float) -> None:
        selector = TransferSelector()
        selector.measured("way", nbytes, seconds)
        speed = selector.speed("way")
        assert selector.predict("way", nbytes) == pytest.approx(seconds)
        assert speed.latency_s == pytest.approx(min(seconds, LATENCY_S), rel=1e-6, abs=1e-12)
        assert selector.predict("way", 2 * nbytes) <= 2 * seconds * (1 + 1e-9)

    def test_a_transfer_that_was_held_up_moves_nothing(self) -> None:
        selector = taught({"socket": TRANSPORTS["socket"]}, [10**6, 10**7, 10**8, 10**9])
        selector.measured("socket", 10**7, 30.0)
        for nbytes in (0, 10**6, 10**9):
            assert selector.predict("socket", nbytes) == pytest.approx(TRANSPORTS["socket"].seconds(nbytes))

    @pytest.mark.parametrize("factor", [10.0, 0.1])
    def test_newer_transfers_win_after_seven(self, factor: float) -> None:
        selector = taught({"socket": TRANSPORTS["socket"]}, [10**8] * KEPT)
        before = selector.predict("socket", 10**8)
        after: list[float] = []
        for _ in range(7):
            selector.measured("socket", 10**8, factor * before)
            after.append(selector.predict("socket", 10**8))
        assert after == pytest.approx([before] * 6 + [factor * before])

    @given(st.lists(st.tuples(sizes, st.floats(0, 1000)), min_size=1, max_size=60), sizes, sizes)
    def test_a_prediction_is_never_negative_and_never_falls_with_the_size(
        self, seen: list[tuple[int, float]], a: int, b: int
    ) -> None:
        selector = TransferSelector()
        for nbytes, seconds in seen:
            selector.measured("way", nbytes, seconds)
        small, large = selector.predict("way", min(a, b)), selector.predict("way", max(a, b))
        assert 0 <= small <= large < math.inf

    @given(st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-4, 10)), min_size=1, max_size=8))
    @settings(deadline=None)
    def test_no_line_through_two_transfers_is_nearer(self, seen: list[tuple[int, float]]) -> None:
        def away(latency: float, slope: float) -> float:
            newest_first = enumerate(reversed(seen))
            return sum(FADING**age * abs(math.log((latency + n * slope) / t)) for age, (n, t) in newest_first)

        selector = TransferSelector()
        for nbytes, seconds in seen:
            selector.measured("way", nbytes, seconds)
        lines = [(0.0, t / n) for n, t in seen] + [(t, 0.0) for _, t in seen]
        for (n, t), (m, u) in itertools.combinations(seen, 2):
            slope = (u - t) / (m - n) if m != n else -1.0
            if slope > 0 and t - slope * n > 0:
                lines.append((t - slope * n, slope))
        ours = selector.speed("way")
        assert away(ours.latency_s, 1 / ours.bytes_per_s) <= min(away(*line) for line in lines) + 1e-4


class TestChoice:
    """Which way is taken."""

    @given(st.dictionaries(st.text("abc", min_size=1, max_size=2), speeds, min_size=1, max_size=5), sizes, st.randoms())
    def test_it_takes_the_fastest_of_those_offered(
        self, ways: dict[str, TransportSpeed], nbytes: int, chance: random.Random
    ) -> None:
        selector = taught(ways, [1000, 10**9])
        offered = chance.sample(sorted(ways), chance.randint(1, len(ways)))
        chosen = selector.choose(offered, nbytes)
        assert chosen in offered
        fastest = min(ways[way].seconds(nbytes) for way in offered)
        assert ways[chosen].seconds(nbytes) <= fastest * (1 + 1e-3) + 1e-9

    def test_small_and_large_transfers_may_go_different_ways(self) -> None:
        ways = {"quick": TransportSpeed(0.0001, 1e8), "wide": TransportSpeed(0.01, 1e10)}
        selector = taught(ways, [10**3, 10**8])
        assert selector.choose(["wide", "quick"], 10**4) == "quick"
        assert selector.choose(["wide", "quick"], 10**9) == "wide"

    def test_an_unmeasured_way_is_tried_once_when_the_measured_ones_are_slower_than_is_supposed_of_it(self) -> None:
        selector, slow, fast = TransferSelector(), PRIOR.seconds(10**6) * 3, PRIOR.seconds(10**6) / 3
        taken = []
        for seconds in (slow, slow, slow, slow):
            taken.append(selector.choose(["a", "b", "c"], 10**6))
            selector.measured(taken[-1], 10**6, seconds)
        assert taken[:3] == ["a", "b", "c"]
        selector = TransferSelector()
        selector.measured("a", 10**6, fast)
        assert selector.choose(["b", "a", "c"], 10**6) == "a"

    def test_an_unmeasured_way_is_supposed_to_be_slow(self) -> None:
        assert TransferSelector().speed("new") == PRIOR
        assert TransferSelector().predict("new", 10**9) == PRIOR.seconds(10**9) > 1.0

    def test_the_same_calls_give_the_same_choices(self) -> None:
        def run() -> list[str]:
            chance = random.Random(3)  # noqa: S311 - for a test that repeats itself
            selector, taken = TransferSelector(), list[str]()
            for _ in range(300):
                nbytes = chance.randrange(1, 10**9)
                taken.append(selector.choose(list(TRANSPORTS), nbytes))
                if chance.random() < 0.1:
                    selector.failed(taken[-1])
                else:
                    selector.measured(taken[-1], nbytes, TRANSPORTS[taken[-1]].seconds(nbytes) * chance.uniform(0.5, 2))
            return taken

        assert run() == run()


class TestFailure:
    """A way that failed is avoided, counted in choices."""

    def test_it_is_avoided_for_so_many_choices(self) -> None:
        selector = taught(TRANSPORTS, [10**3, 10**8])
        selector.failed("shared")
        taken = [selector.choose(list(TRANSPORTS), 10**6) for _ in range(AVOIDED + 1)]
        assert taken == ["socket"] * AVOIDED + ["shared"]

    def test_each_further_failure_doubles_that_up_to_a_limit(self) -> None:
        selector = taught(TRANSPORTS, [10**3, 10**8])
        lengths: list[int] = []
        for _ in range(9):
            selector.failed("shared")
            lengths.append(0)
            while selector.choose(list(TRANSPORTS), 10**6) != "shared":
                lengths[-1] += 1
        assert lengths[:7] == [AVOIDED * 2**i for i in range(7)]
        assert set(lengths[7:]) == {LONGEST_AVOIDED}

    def test_a_success_ends_it(self) -> None:
        selector = taught(TRANSPORTS, [10**3, 10**8])
        selector.failed("shared")
        selector.failed("shared")
        selector.measured("shared", 10**6, TRANSPORTS["shared"].seconds(10**6))
        assert selector.choose(list(TRANSPORTS), 10**6) == "shared"
        selector.failed("shared")
        assert [selector.choose(list(TRANSPORTS), 10**6) for _ in range(AVOIDED)] == ["socket"] * AVOIDED

    def test_where_all_failed_the_one_that_failed_first_is_taken(self) -> None:
        selector = taught(TRANSPORTS, [10**3, 10**8])
        selector.failed("files")
        selector.choose(["socket"], 1)
        selector.failed("shared")
        assert selector.choose(["shared", "files"], 10**6) == "files"

    def test_a_way_that_failed_before_it_was_ever_measured_is_tried_again_later(self) -> None:
        selector = taught({"files": TRANSPORTS["files"]}, [10**3, 10**8])
        selector.failed("shared")
        taken = [selector.choose(["files", "shared"], 10**6) for _ in range(AVOIDED + 1)]
        assert taken == ["files"] * AVOIDED + ["shared"]


class TestArguments:
    """What makes no sense is said so, and changes nothing."""

    def test_no_way_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="transports: expected at least one to choose from; found none"):
            TransferSelector().choose([], 1)

    def test_negative_bytes_are_an_error(self) -> None:
        selector = TransferSelector()
        for call in (
            lambda: selector.choose(["a"], -1),
            lambda: selector.predict("a", -1),
            lambda: selector.measured("a", -1, 1.0),
        ):
            with pytest.raises(ValueError, match="nbytes: expected at least 0; found -1"):
                call()

    @pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
    def test_seconds_that_cannot_be_are_an_error(self, seconds: float) -> None:
        selector = TransferSelector()
        with pytest.raises(ValueError, match="seconds of a transfer by a: expected a finite number of at least 0"):
            selector.measured("a", 1, seconds)
        assert selector.speed("a") == PRIOR

    def test_a_transfer_too_short_for_the_clock_is_no_error(self) -> None:
        selector = TransferSelector()
        selector.measured("a", 0, 0.0)
        assert selector.predict("a", 0) <= 1e-9
