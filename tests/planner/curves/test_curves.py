"""Loss curves: every form is found again through noise, what goes on is foretold, and bad losses are said to be so."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensorvine.planner.curves.curve import INFINITE, MOST_BINS, LossCurve, _series, fit_loss_curve
from tensorvine.planner.curves.forms import FORMS, PAPER_FORMS, LossForm

TRUE = {
    "exp2": {"a": 2.0, "b": 0.002},
    "exp3": {"a": 2.0, "b": 0.005, "c": 0.5},
    "lin2": {"a": -0.0003, "b": 2.0},
    "expd3": {"a": 2.5, "b": 0.003, "c": 0.4},
    "pow3": {"a": 0.3, "b": 2.0, "c": 0.5},
    "pow4": {"a": 0.3, "b": 20.0, "c": 0.9, "d": 30.0},
    "mmf4": {"a": 2.5, "b": 300.0, "c": 0.3, "d": 1.2},
    "wbl4": {"a": 0.01, "b": -2.0, "c": 0.4, "d": 0.8},
    "last1": {"a": 1.0},
}
FORMULAS = {
    "exp2": lambda x, a, b: a * math.exp(-b * x),
    "exp3": lambda x, a, b, c: a * math.exp(-b * x) + c,
    "lin2": lambda x, a, b: a * x + b,
    "expd3": lambda x, a, b, c: c - (c - a) * math.exp(-b * x),
    "pow3": lambda x, a, b, c: a + b * x ** (-c),
    "pow4": lambda x, a, b, c, d: a + b * (x + d) ** (-c),
    "mmf4": lambda x, a, b, c, d: (a * b + c * x**d) / (b + x**d),
    "wbl4": lambda x, a, b, c, d: c - b * math.exp(-a * x**d),
    "last1": lambda x, a: a,
}
SEEN, AHEAD = 2000, 3000


def truth(form: str, n: int = AHEAD) -> np.ndarray:
    first = FORMS[form].first
    return np.array([FORMULAS[form](float(x), **TRUE[form]) for x in range(first, n + first)])


def noisy(losses: np.ndarray, share: float = 0.2, seed: int = 0) -> np.ndarray:
    return losses * (1 + np.random.default_rng(seed).normal(0, share, len(losses)))


class TestForms:
    """Each formula is the literature's, and is found again."""

    def test_all_forms_of_the_issue_are_there(self) -> None:
        assert set(FORMS) == set(TRUE)
        assert PAPER_FORMS == ("exp2", "exp3", "lin2", "expd3")

    @pytest.mark.parametrize("form", FORMS)
    def test_a_form_is_its_formula(self, form: str) -> None:
        x = np.arange(1.0, 50.0)
        expected = [FORMULAS[form](each, **TRUE[form]) for each in x.tolist()]
        assert tuple(TRUE[form]) == FORMS[form].parameters
        assert FORMS[form].function(x, *TRUE[form].values()) == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize("form", FORMS)
    def test_a_curve_without_noise_is_found_exactly(self, form: str) -> None:
        losses = truth(form)
        curve = fit_loss_curve(losses[:SEEN], (form,), choose="mse")
        assert curve.form == form
        assert curve(np.arange(AHEAD)) == pytest.approx(losses, rel=0.01)
        assert curve.mse < 1e-5

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("form", FORMS)
    def test_what_follows_is_foretold_through_noise_of_a_fifth(self, form: str, seed: int) -> None:
        losses = truth(form)
        curve = fit_loss_curve(noisy(losses[:SEEN], seed=seed), (form,), choose="mse")
        ahead = np.arange(SEEN, AHEAD)
        # A tenth of the losses, or of the way that the loss has come: whichever is more.
        assert np.abs(curve(ahead) - losses[ahead]).max() < max(0.1 * losses[ahead].min(), 0.03 * np.ptp(losses))

    @pytest.mark.parametrize("form", FORMS)
    def test_the_choice_among_all_forms_foretells_any_of_them(self, form: str) -> None:
        losses = truth(form)
        curve = fit_loss_curve(noisy(losses[:SEEN], seed=7), tuple(FORMS))
        ahead = np.arange(SEEN, AHEAD)
        assert np.abs(curve(ahead) - losses[ahead]).max() < max(0.1 * losses[ahead].min(), 0.05 * np.ptp(losses))

    @given(
        st.sampled_from(["exp3", "expd3", "pow3", "pow4", "mmf4", "wbl4"]),
        st.floats(0.1, 10),
        st.floats(0, 1),
        st.floats(1.5, 20),
        st.integers(0, 2**31),
    )
    @settings(max_examples=15, deadline=None)
    def test_an_exponential_of_any_speed_and_height_is_foretold(
        self, form: str, height: float, end: float, decays: float, seed: int
    ) -> None:
        x = np.arange(600)
        losses = height * (np.exp(-decays * x / 400) + end)
        noise = np.random.default_rng(seed).normal(0, 0.02 * height, 400)
        curve = fit_loss_curve(losses[:400] + noise, (form, "exp3"))
        assert np.abs(curve(x[400:]) - losses[400:]).max() < 0.12 * height


class TestCurve:
    """What a curve is."""

    def test_it_takes_one_iteration_or_many(self) -> None:
        curve = fit_loss_curve(truth("exp3")[:100])
        assert type(curve(5)) is float
        assert curve([5, 6]).tolist() == [curve(5), curve(6)]
        assert curve(np.arange(6).reshape(2, 3)).shape == (2, 3)
        assert fit_loss_curve([1.0])(np.arange(3)).tolist() == [1.0, 1.0, 1.0]

    def test_a_falling_line_stops_at_zero(self) -> None:
        curve = fit_loss_curve(1 - 0.01 * np.arange(50), ("lin2",))
        assert curve.form == "lin2"
        assert curve(80) == pytest.approx(0.2)
        assert curve(200) == 0.0
        assert curve([50, 1000]).tolist() == pytest.approx([0.5, 0])

    def test_negative_losses_have_no_floor(self) -> None:
        curve = fit_loss_curve(1 - 0.1 * np.arange(50), ("lin2",))
        assert curve(100) == pytest.approx(-9)

    def test_it_is_flat_before_the_first_iteration(self) -> None:
        curve = fit_loss_curve(truth("pow3")[:100], ("pow3",), start=1000)
        assert curve(0) == curve(1000) == pytest.approx(2.3, rel=0.01)

    @pytest.mark.parametrize("form", FORMS)
    def test_where_the_iterations_begin_changes_nothing(self, form: str) -> None:
        losses = noisy(truth(form)[:300])
        here, there = (fit_loss_curve(losses, (form,), start=start, choose="mse") for start in (0, 1_000_000))
        assert here.params == there.params
        assert here(400) == there(1_000_400)

    def test_pairs_are_the_same_as_losses_in_a_row(self) -> None:
        losses = noisy(truth("exp3")[:60])
        assert fit_loss_curve(list(enumerate(losses, 5))) == fit_loss_curve(losses, start=5)

    def test_pairs_may_leave_iterations_out(self) -> None:
        losses = truth("exp3")
        pairs = [(i, losses[i]) for i in range(0, 1000, 50)]
        assert fit_loss_curve(pairs)(2000) == pytest.approx(losses[2000], rel=1e-3)

    @pytest.mark.parametrize("form", FORMS)
    def test_it_travels_between_processes(self, form: str) -> None:
        curve = fit_loss_curve(truth(form)[:50], (form,))
        assert pickle.loads(pickle.dumps(curve)) == curve  # noqa: S301 - ours

    def test_the_errors_are_those_of_all_losses(self) -> None:
        losses = noisy(truth("exp3")[:SEEN])
        curve = fit_loss_curve(losses, ("exp3",))
        assert curve.mse == pytest.approx(np.square(curve(np.arange(SEEN)) - losses).mean())
        head = fit_loss_curve(losses[: SEEN * 4 // 5], ("exp3",), choose="mse")
        tail = np.arange(SEEN * 4 // 5, SEEN)
        assert curve.tail_mse == pytest.approx(np.square(head(tail) - losses[tail]).mean())

    def test_nothing_of_scipy_is_needed_to_import_it(self) -> None:
        program = "import sys, tensorvine.planner.curves.curve; sys.exit('scipy' in sys.modules)"
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


class TestChoice:
    """Which form is taken."""

    def test_the_tail_chooses_what_foretells_and_the_mse_what_fits(self) -> None:
        # Falls, then stays: over all of it a slow exponential fits best of the two, but the end is flat.
        losses = np.concatenate([np.linspace(2, 1, 100), np.ones(40)])
        assert fit_loss_curve(losses, ("lin2",), choose="mse").form == "lin2"
        assert fit_loss_curve(losses, ("lin2",)).form == "last1"

    def test_the_least_mse_wins_as_in_the_paper(self) -> None:
        losses = noisy(truth("exp3")[:SEEN], 0.05)
        best = fit_loss_curve(losses, ("exp2", "exp3", "lin2"), choose="mse")
        each = {form: fit_loss_curve(losses, (form,), choose="mse").mse for form in ("exp2", "exp3", "lin2")}
        assert (best.form, best.mse) == min(each.items(), key=lambda entry: entry[1])
        assert best.form == "exp3"

    def test_of_equals_the_one_with_fewer_parameters_is_taken(self) -> None:
        assert fit_loss_curve(truth("exp2")[:100], ("exp3", "wbl4", "exp2")).form == "exp2"

    def test_a_form_of_ones_own_can_win(self) -> None:
        def ilog2(x: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
            return a + b / np.log(x)

        bounds = ((0, 0), (math.inf, math.inf))
        own = LossForm("ilog2", ("a", "b"), ilog2, lambda x, y: [(y[-1], 1.0)], lambda x, y: bounds, first=2)
        losses = 0.5 + 1 / np.log(np.arange(2, 500))
        curve = fit_loss_curve(losses, ("lin2", own))
        assert curve.form == "ilog2"
        assert curve.params == pytest.approx({"a": 0.5, "b": 1.0}, rel=1e-3)

    def test_a_form_that_yields_no_numbers_loses(self) -> None:
        def broken(x: np.ndarray, a: np.ndarray) -> np.ndarray:
            return np.full_like(x, np.nan) * a

        own = LossForm("broken", ("a",), broken, lambda x, y: [(1.0,)], lambda x, y: ((-1,), (1,)))
        assert fit_loss_curve(truth("exp3")[:50], (own, "exp3")).form == "exp3"
        with pytest.raises(ValueError, match="expected a form that fits with finite losses; found none"):
            fit_loss_curve(truth("exp3")[:50], (own,), choose="mse")

    def test_guesses_of_the_wrong_shape_are_an_error_that_names_the_form(self) -> None:
        own = LossForm("own", ("a", "b"), FORMS["lin2"].function, lambda x, y: [(1.0,)], FORMS["lin2"].bounds)
        with pytest.raises(
            ValueError, match=r"guesses of form own: expected an array of shape \(guesses, 2\); found \(1, 1\)"
        ):
            fit_loss_curve([1.0] * 10, (own,))


class TestTrouble:
    """Losses as they should not be."""

    def test_a_curve_that_rises_is_foretold_to_rise_within_bounds(self) -> None:
        losses = noisy(1 + np.arange(200) / 100, 0.05)
        curve = fit_loss_curve(losses, tuple(FORMS))
        ahead = curve(np.arange(200, 2000))
        assert (np.diff(curve(np.arange(2000))) >= -1e-9).all()
        assert curve(250) > curve(100)
        assert ahead.max() < 25

    def test_a_constant_curve_stays_constant(self) -> None:
        curve = fit_loss_curve([0.25] * 100, tuple(FORMS))
        assert (curve.form, curve(10_000), curve.mse) == ("last1", 0.25, 0.0)

    @pytest.mark.parametrize("value", [0.0, 1e-30, 1e30, -3.0])
    def test_a_constant_of_any_size_can_be_fitted_by_every_form(self, value: float) -> None:
        for form in FORMS:
            curve = fit_loss_curve([value] * 20, (form,), choose="mse")
            assert curve(100) == pytest.approx(value, rel=0.05, abs=1e-12)

    @pytest.mark.parametrize("n", range(1, 12))
    def test_few_losses_give_a_curve_of_few_parameters(self, n: int) -> None:
        curve = fit_loss_curve(truth("exp3")[:n], tuple(FORMS))
        assert len(curve.params) <= max(n - max(1, n // 5), 1)
        assert math.isfinite(curve(1000))
        if n == 1:
            assert (curve.form, curve.tail_mse) == ("last1", None)

    def test_too_few_for_any_form_is_an_error_that_says_how_many(self) -> None:
        with pytest.raises(ValueError, match="expected at least 3 for exp3, 4 for pow4; found 2"):
            fit_loss_curve([2.0, 1.0], ("exp3", "pow4"), choose="mse")
        with pytest.raises(ValueError, match=r"expected at least 1 loss; found none"):
            fit_loss_curve([])

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, INFINITE])
    def test_a_few_losses_that_are_no_numbers_are_left_out_and_counted(self, bad: float) -> None:
        losses = truth("exp3")[:100]
        losses[[0, 17, 99]] = bad
        curve = fit_loss_curve(losses)
        assert (curve.used, curve.left_out, curve.floor) == (97, 3, 0.0)
        assert curve(99) == pytest.approx(truth("exp3")[99], rel=1e-3)

    def test_mostly_no_numbers_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="expected at least half of them finite; found 1 of 3"):
            fit_loss_curve([1.0, math.nan, math.nan])

    @pytest.mark.parametrize("pairs", [[(0, 1.0), (0, 1.0)], [(3, 1.0), (4, 1.0), (2, 1.0)], [(0, 1.0), (math.nan, 1)]])
    def test_iterations_that_do_not_increase_are_an_error(self, pairs: list[tuple[int, float]]) -> None:
        with pytest.raises(ValueError, match="expected increasing iterations; found"):
            fit_loss_curve(pairs)

    def test_an_unknown_form_is_an_error_that_lists_the_known_ones(self) -> None:
        with pytest.raises(ValueError, match=r"expected a LossForm or one of exp2, exp3, .*; found 'exp9'"):
            fit_loss_curve([1.0], ("exp9",))

    def test_other_arguments_that_make_no_sense_are_errors(self) -> None:
        with pytest.raises(ValueError, match="choose: expected 'tail' or 'mse'; found 'best'"):
            fit_loss_curve([1.0], choose="best")  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match="forms: expected at least one"):
            fit_loss_curve([1.0], (), choose="mse")
        with pytest.raises(ValueError, match="start: expected 0, because the losses are pairs"):
            fit_loss_curve([(0, 1.0)], start=5)
        with pytest.raises(ValueError, match="found an array of shape"):
            fit_loss_curve(np.ones((3, 3)))
        with pytest.raises(ValueError, match="losses: expected numbers, or pairs"):
            fit_loss_curve(["low"])  # pyright: ignore[reportArgumentType]

    @given(hnp.arrays(float, st.integers(1, 40), elements=st.floats(-1e90, 1e90)), st.sampled_from(["tail", "mse"]))
    @settings(max_examples=12, deadline=None)
    def test_whatever_the_losses_the_curve_is_finite(self, losses: np.ndarray, choose: str) -> None:
        curve: LossCurve = fit_loss_curve(losses, (*FORMS,), choose=choose)  # pyright: ignore[reportArgumentType]
        values = curve(np.arange(1000))
        assert np.isfinite(values).all()
        assert math.isfinite(curve.mse)

    @given(hnp.arrays(float, st.integers(5, 60), elements=st.floats(0, 10)))
    @settings(max_examples=12, deadline=None)
    def test_losses_from_zero_give_curves_from_zero_that_do_not_explode(self, losses: np.ndarray) -> None:
        curve = fit_loss_curve(losses, tuple(form for form in FORMS if form != "lin2"))
        ahead = curve(np.arange(len(losses), 100_000, 17))
        assume(len(ahead))
        assert ahead.min() >= 0
        assert ahead.max() <= 2 * losses.max() + 1 + np.ptp(losses)


def test_a_few_thousand_losses_are_fitted_with_all_forms_in_well_under_a_second() -> None:
    losses = noisy(truth("pow4", 5000))
    fit_loss_curve(losses[:50], tuple(FORMS))  # imports scipy
    began = time.process_time()
    curve = fit_loss_curve(losses, tuple(FORMS))
    assert time.process_time() - began < 1
    assert curve.used == 5000 > MOST_BINS


@pytest.mark.parametrize("n", [1, MOST_BINS, MOST_BINS + 1, 1000, 100_000])
def test_a_long_series_is_fitted_by_the_means_of_bins(n: int) -> None:
    losses = np.random.default_rng(0).normal(2, 1, n)
    bins = _series(losses, 10).binned()
    assert len(bins.losses) == min(n, len(bins.losses)) <= MOST_BINS
    assert bins.counts.sum() == n
    assert (bins.losses @ bins.counts, bins.iterations @ bins.counts) == pytest.approx(
        (losses.sum(), np.arange(10, n + 10).sum())
    )
    assert bins.counts[0] == 1
    assert bins.counts.max() <= max(1, 3 * n / MOST_BINS)
