"""Loss curves: how the loss of a training goes on, learned from the losses seen so far (Viper, section 4.3).

Rules
- A form is a formula with parameters (Viering and Loog 2022); a curve is a form with its parameters found.
- Every form is decreasing or rising once and for all, with a bounded end (`lin2` apart): bounds on the parameters see
  to it. So a rising loss gives a rising curve, never an exploding one.
- Minibatch losses are noisy: a series longer than `MOST_BINS` is fitted by the means of bins, weighted by what they
  hold; half of the bins are equally long, half grow geometrically, so that a steep beginning keeps its detail.
  The errors that are told (`mse`, `tail_mse`) are of all losses, not of the bins.
- The error is least squares, not a robust one: what is predicted is the mean loss, and cumulative loss is its sum.
- scipy is imported by the function that fits, since it takes a while: who only evaluates a curve does without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .forms import FORMS, PAPER_FORMS, LossForm

Array = NDArray[np.float64]
Choice = Literal["tail", "mse"]

MOST_BINS = 192
"""Points that a fit sees, at most."""
TAIL = 5
"""One in so many losses, the last ones, is held out when forms are compared (and at least one)."""
STARTS = 3
"""Starting points that are refined, the best of the form's guesses."""
WORST = 1e9
"""A residual that is no number, or larger, counts as this, in units of the largest loss."""
INFINITE = 1e100
"""A loss from here on counts as infinite, and one below its inverse as 0: the squares would leave the numbers."""
LEAST = 1e-300
"""Least positive parameter."""


@dataclass(frozen=True, slots=True)
class LossCurve:
    """A fitted loss curve: a function that returns the expected loss at an iteration.

    Before the iteration of the first fitted loss, the curve is constant.

    >>> curve = fit_loss_curve([2.0 * 0.98**i + 0.5 for i in range(100)], forms=("exp3",))
    >>> curve.form, round(curve.params["c"], 3), round(curve(200), 3), curve([0, 50]).round(2).tolist()
    ('exp3', 0.5, 0.535, [2.5, 1.23])
    """

    shape: LossForm
    """The form of the curve: its formula and the names of its parameters."""
    params: dict[str, float]
    """Mapping of parameter names to fitted values. In the formula, x is the iteration minus `origin`."""
    origin: int
    """The iteration at which x is 0 in the formula: the iteration of the first fitted loss minus `shape.first`."""
    floor: float
    """Lower bound of the curve: 0 if no fitted loss was negative, otherwise -inf."""
    mse: float
    """Mean squared error of the curve over the losses that were used for the fit."""
    tail_mse: float | None
    """Mean squared error on the last fifth of the losses, after a fit of the form to only the earlier losses.

    None if `fit_loss_curve` made no such fit, because `choose` was "mse" or only one loss was finite.
    """
    used: int
    """Number of losses that were used for the fit."""
    left_out: int
    """Number of losses that were ignored because they were NaN or infinite."""

    @property
    def form(self) -> str:
        """Name of the form of the curve, such as "exp3"."""
        return self.shape.name

    @overload
    def __call__(self, iteration: float) -> float: ...
    @overload
    def __call__(self, iteration: Sequence[float] | NDArray[np.number]) -> Array: ...
    def __call__(self, iteration: ArrayLike) -> float | Array:
        """Return the expected loss at an iteration, or at each iteration of an array."""
        x = np.maximum(np.asarray(iteration, np.float64) - self.origin, self.shape.first)
        with np.errstate(all="ignore"):
            loss = np.maximum(self.shape.function(x, *self.params.values()), self.floor)
        return float(loss) if x.ndim == 0 else np.broadcast_to(loss, x.shape).copy()


def fit_loss_curve(
    losses: Sequence[float] | Sequence[tuple[int, float]] | NDArray[np.number],
    forms: Sequence[str | LossForm] = PAPER_FORMS,
    *,
    start: int = 0,
    choose: Choice = "tail",
) -> LossCurve:
    """Fit several forms to the losses of a training run, and return the best curve (Viper, section 4.3).

    A form is a formula with parameters. A form with more parameters than losses to fit is skipped.

    Args:
        losses: Losses in any unit: numbers, or pairs (iteration, loss). Numbers are the losses of the iterations
            `start`, `start` + 1 and so on. The iterations of pairs must increase.
        forms: Forms to fit: names, such as "exp3", or `LossForm` objects.
        start: Iteration of the first loss. Must be 0 if the losses are pairs.
        choose: Criterion for the best form. "tail" fits each form, and also the constant form "last1", to the losses
            without the last fifth. The form that predicts the last fifth best is then fitted again to all losses. "mse"
            chooses the form with the smallest mean squared error over all losses, as Viper does.

    Raises:
        ValueError: if there are no losses, fewer than half of the losses are finite, the iterations do not increase,
            `start` is not 0 for pairs, a form or `choose` is unknown, or `choose` is "mse" and no form fits.

    >>> losses = [3 * 0.9**i + 1 for i in range(30)]
    >>> fit_loss_curve(losses, choose="mse").form, fit_loss_curve([1.0]).form, fit_loss_curve([0.7] * 30).form
    ('exp3', 'last1', 'last1')
    """
    if choose not in ("tail", "mse"):
        raise ValueError(f"choose: expected 'tail' or 'mse'; found {choose!r}")
    named = [_form(form) for form in forms]
    if choose == "tail" and "last1" not in [form.name for form in named]:
        named.append(FORMS["last1"])
    if not named:
        raise ValueError("forms: expected at least one; found none")
    given = _series(losses, start)
    series = given.finite()
    left_out = len(given.iterations) - len(series.iterations)
    if choose == "mse":
        fitting = _fitting(named, series)
        curves = [_curve(form, series, left_out) for form in fitting]
        curve = curves[_least([curve.mse for curve in curves], fitting, series)]
        if math.isinf(curve.mse):
            raise ValueError(f"forms: expected a form that fits with finite losses; found none among {list(forms)}")
        return curve
    form, tail_mse = _best_on_tail(named, series)
    return _curve(form, series, left_out, tail_mse)


@dataclass(frozen=True, slots=True)
class _Series:
    """Losses by iteration."""

    iterations: Array
    losses: Array
    counts: Array
    """Losses that each entry is the mean of."""

    def finite(self) -> _Series:
        keep = np.abs(self.losses) < INFINITE
        if 2 * int(keep.sum()) < len(keep):
            raise ValueError(f"losses: expected at least half of them finite; found {int(keep.sum())} of {len(keep)}")
        whole = self.part(keep)
        return replace(whole, losses=np.where(np.abs(whole.losses) > 1 / INFINITE, whole.losses, 0.0))

    def part(self, keep: slice | NDArray[np.bool_]) -> _Series:
        return _Series(self.iterations[keep], self.losses[keep], self.counts[keep])

    def binned(self) -> _Series:
        """Average bins, so that at most `MOST_BINS` entries remain."""
        n = len(self.losses)
        if n <= MOST_BINS:
            return self
        even, growing = np.linspace(0, n, MOST_BINS // 2 + 1)[:-1], np.geomspace(1, n, MOST_BINS // 2 + 1)[:-1]
        edges = np.unique(np.concatenate([even, growing]).astype(np.intp))
        counts = np.diff(edges, append=n).astype(np.float64)
        return _Series(
            np.add.reduceat(self.iterations, edges) / counts, np.add.reduceat(self.losses, edges) / counts, counts
        )

    @property
    def scale(self) -> float:
        """What losses are divided by before they are squared."""
        return float(np.abs(self.losses).max()) or 1.0

    def origin(self, form: LossForm) -> int:
        """Iteration at which the form's x is 0."""
        return int(self.iterations[0]) - form.first


def _form(form: str | LossForm) -> LossForm:
    if isinstance(form, LossForm):
        return form
    if form not in FORMS:
        raise ValueError(f"forms: expected a LossForm or one of {', '.join(FORMS)}; found {form!r}")
    return FORMS[form]


def _series(losses: object, start: int) -> _Series:
    try:
        array = np.asarray(losses, np.float64)
    except (TypeError, ValueError) as exc:
        raise ValueError(f"losses: expected numbers, or pairs (iteration, loss); {exc}") from exc
    if array.size == 0:
        raise ValueError("losses: expected at least 1 loss; found none")
    if array.ndim == 1:
        iterations = start + np.arange(len(array), dtype=np.float64)
    elif array.ndim == 2 and array.shape[1] == 2:
        if start:
            raise ValueError(f"start: expected 0, because the losses are pairs (iteration, loss); found {start}")
        iterations, array = array[:, 0], array[:, 1]
    else:
        raise ValueError(f"losses: expected numbers, or pairs (iteration, loss); found an array of shape {array.shape}")
    late = np.flatnonzero(~(np.diff(iterations) > 0))
    if len(late) or not np.isfinite(iterations).all():
        at = int(late[0]) if len(late) else 0
        raise ValueError(f"losses: expected increasing iterations; found {iterations[at : at + 2].tolist()}")
    return _Series(iterations, array, np.ones(len(array)))


def _fitting(forms: Sequence[LossForm], series: _Series) -> list[LossForm]:
    fitting = [form for form in forms if len(form.parameters) <= len(series.losses)]
    if not fitting:
        needs = ", ".join(f"{len(form.parameters)} for {form.name}" for form in forms)
        raise ValueError(f"losses: expected at least {needs}; found {len(series.losses)} finite losses")
    return fitting


def _best_on_tail(forms: Sequence[LossForm], series: _Series) -> tuple[LossForm, float | None]:
    """Choose the form that foretells the tail best."""
    held_out = max(1, len(series.losses) // TAIL)
    head, tail = series.part(slice(0, -held_out)), series.part(slice(-held_out, None))
    if len(head.losses) == 0:
        return FORMS["last1"], None
    fitting = _fitting(forms, head)
    errors = [_error(_curve(form, head, 0), tail) for form in fitting]
    best = _least(errors, fitting, series)
    return fitting[best], errors[best]


def _least(errors: Sequence[float], forms: Sequence[LossForm], series: _Series) -> int:
    """Find the least error; of those that are equal but for rounding, that of the fewest parameters, or the first."""
    equal = min(errors) * (1 + 1e-6) + 1e-12 * series.scale**2
    return min((i for i, error in enumerate(errors) if error <= equal), key=lambda i: len(forms[i].parameters))


def _curve(form: LossForm, series: _Series, left_out: int, tail_mse: float | None = None) -> LossCurve:
    """Fit a form."""
    params = {name: float(value) for name, value in zip(form.parameters, _fit(form, series), strict=True)}
    floor = 0.0 if series.losses.min() >= 0 else -math.inf
    curve = LossCurve(
        form,
        params,
        origin=series.origin(form),
        floor=floor,
        mse=0.0,
        tail_mse=tail_mse,
        used=len(series.losses),
        left_out=left_out,
    )
    return replace(curve, mse=_error(curve, series))


def _error(curve: LossCurve, series: _Series) -> float:
    with np.errstate(all="ignore"):
        error = float(np.square(curve(series.iterations) - series.losses).mean())
    return math.inf if math.isnan(error) else error


def _fit(form: LossForm, series: _Series) -> Array:
    """Find the parameters of a form."""
    if form.name == "last1":
        return np.array([series.losses[-max(1, len(series.losses) // TAIL) :].mean()])
    points = series.binned()
    x, y = points.iterations - series.origin(form), points.losses
    weights = np.sqrt(points.counts / points.counts.sum()) / series.scale
    free = _Free(form, x, y)

    def residuals(at: Array) -> Array:
        with np.errstate(all="ignore"):
            off = (form.function(x, *free.params(at)) - y) * weights
        off[np.isnan(off)] = WORST
        return np.clip(off, -WORST, WORST, out=off)

    errors = [float(np.square(residuals(at)).sum()) for at in free.starts]
    order: list[int] = np.argsort(errors, kind="stable")[:STARTS].tolist()
    best, best_error = free.starts[order[0]], errors[order[0]]
    for i in order:
        found, error = _refine(residuals, free.starts[i], (free.low, free.high))
        if error < best_error:
            best, best_error = found, error
    return free.params(best)


def _refine(residuals: Callable[[Array], Array], start: Array, bounds: tuple[Array, Array]) -> tuple[Array, float]:
    """Return the parameters nearby that have the least sum of squares, and that sum."""
    # scipy ships no types.
    from scipy.optimize import least_squares  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    with np.errstate(all="ignore"):
        found = cast(Any, least_squares)(residuals, start, bounds=bounds, x_scale="jac", max_nfev=60)
    return np.asarray(found.x, np.float64), 2 * float(found.cost)


class _Free:
    """Parameters as the solver sees them: the logarithms of those that are positive."""

    def __init__(self, form: LossForm, x: Array, y: Array) -> None:
        self._logs = np.array([name in form.positive for name in form.parameters])
        low, high = (np.asarray(bound, np.float64) for bound in form.bounds(x, y))
        guesses = np.atleast_2d(np.asarray(form.guesses(x, y), np.float64))
        if guesses.shape[1] != len(form.parameters):
            wanted = f"(guesses, {len(form.parameters)})"
            raise ValueError(f"guesses of form {form.name}: expected an array of shape {wanted}; found {guesses.shape}")
        self.low, self.high = self._free(low), self._free(high)
        self.starts = np.clip(self._free(np.nan_to_num(guesses)), self.low, self.high)

    def params(self, free: Array) -> Array:
        """Return the parameters themselves."""
        return np.where(self._logs, np.exp(np.where(self._logs, free, 0)), free)

    def _free(self, params: Array) -> Array:
        return np.where(self._logs, np.log(np.maximum(params, LEAST)), params)
