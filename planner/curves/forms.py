"""Forms of loss curves: the formulas that the literature uses for learning curves (Viering and Loog 2022).

Rules
- x is an iteration, counted so that the first one fitted is `first`: 1 for power laws, which have no value at 0.
- Guesses: a grid over what stands in an exponent, and for each point of it the best values of the rest, which enter
  linearly (variable projection, Golub and Pereyra 1973).
- Bounds keep the end of a curve, where there is one, between 0 (or as far below the losses as they are apart, where
  some are negative) and as far above the losses as they are apart.
- Functions are of this module, not lambdas: a curve travels between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Bounds = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True, slots=True)
class LossForm:
    """A form of loss curve: a formula with parameters, and the starting points and bounds for fitting the parameters.

    The variable x of the formula is the number of iterations since the first fitted loss, plus `first`.

    >>> def log2(x, a, b):
    ...     return a - b * np.log(x)
    >>> form = LossForm("log2", ("a", "b"), log2, lambda x, y: [(y[0], 0.1)], lambda x, y: ((0, 0), (10, 10)), first=1)
    >>> from .curve import fit_loss_curve
    >>> fit_loss_curve(5 - 0.5 * np.log(np.arange(1, 200)), [form]).form
    'log2'
    """

    name: str
    """Name of the form. Use different names for forms that are compared with each other."""
    parameters: tuple[str, ...]
    """Names of the parameters, in the order in which `function` takes them after x."""
    function: Callable[..., Array]
    """The formula: a function that takes a float64 array x and the parameters, and returns the losses as an array."""
    guesses: Callable[[Array, Array], ArrayLike]
    """Function that takes x and the losses, and returns starting points for the fit.

    The result has one row per starting point and one column per parameter.
    """
    bounds: Callable[[Array, Array], Bounds]
    """Function that takes x and the losses, and returns the lower bounds and the upper bounds of the parameters.

    Infinity means no bound.
    """
    positive: frozenset[str] = frozenset()
    """Names of the parameters that must be positive. The logarithms of these parameters are fitted."""
    first: int = 0
    """Value of x at the first fitted loss, for example 1 for a formula that is not defined at x = 0."""


def _exp2(x: Array, a: Array, b: Array) -> Array:
    return a * np.exp(-b * x)


def _exp3(x: Array, a: Array, b: Array, c: Array) -> Array:
    return a * np.exp(-b * x) + c


def _expd3(x: Array, a: Array, b: Array, c: Array) -> Array:
    return c - (c - a) * np.exp(-b * x)


def _lin2(x: Array, a: Array, b: Array) -> Array:
    return a * x + b


def _pow3(x: Array, a: Array, b: Array, c: Array) -> Array:
    return a + b * x**-c


def _pow4(x: Array, a: Array, b: Array, c: Array, d: Array) -> Array:
    return a + b * (x + d) ** -c


def _mmf4(x: Array, a: Array, b: Array, c: Array, d: Array) -> Array:
    return c + (a - c) * b / (b + x**d)  # (a b + c x^d) / (b + x^d), where x^d may be large


def _wbl4(x: Array, a: Array, b: Array, c: Array, d: Array) -> Array:
    return c - b * np.exp(-a * x**d)


def _last1(x: Array, a: Array) -> Array:
    return np.broadcast_to(a, np.shape(x))


def _end(y: Array) -> tuple[float, float]:
    """Bounds of where a curve ends."""
    apart = float(np.ptp(y)) or float(np.abs(y).max()) or 1.0
    return (0.0 if y.min() >= 0 else float(y.min()) - apart), float(y.max()) + apart


def _lengths(x: Array) -> tuple[float, float]:
    """The shortest and the longest stretch of x over which a loss can be seen to change."""
    return (float(x[1] - x[0]), float(x[-1])) if len(x) > 1 else (1.0, 1.0)


def _grid(*axes: Array) -> list[Array]:
    """All combinations of values, each axis as a column."""
    return [axis.reshape(-1, 1) for axis in np.meshgrid(*axes)]


def _linear(y: Array, *terms: Array) -> list[Array]:
    """Best factors of terms (each of shape (guesses, points), or one that broadcasts to it), one column per term."""
    matrix = np.stack(np.broadcast_arrays(*terms), axis=-1)
    factors: Array = np.linalg.pinv(np.nan_to_num(matrix)) @ y
    return [factors[:, i : i + 1] for i in range(len(terms))]


def _rates(x: Array) -> Array:
    shortest, longest = _lengths(x)
    return np.geomspace(0.03 / longest, 3 / shortest, 24)


def _rate_bounds(x: Array) -> tuple[float, float]:
    shortest, longest = _lengths(x)
    return 1e-3 / longest, 10 / shortest


def _exp2_guesses(x: Array, y: Array) -> Array:
    (b,) = _grid(_rates(x))
    (a,) = _linear(y, np.exp(-b * x))
    return np.hstack([a, b])


def _exp2_bounds(x: Array, y: Array) -> Bounds:
    slow, fast = _rate_bounds(x)
    return (-np.inf, slow), (np.inf, fast)


def _exp3_guesses(x: Array, y: Array) -> Array:
    (b,) = _grid(_rates(x))
    a, c = _linear(y, np.exp(-b * x), np.ones_like(x))
    return np.hstack([a, b, c])


def _exp3_bounds(x: Array, y: Array) -> Bounds:
    (slow, fast), (low, high) = _rate_bounds(x), _end(y)
    return (-np.inf, slow, low), (np.inf, fast, high)


def _expd3_guesses(x: Array, y: Array) -> Array:
    a, b, c = np.hsplit(_exp3_guesses(x, y), 3)
    return np.hstack([a + c, b, c])


def _lin2_guesses(x: Array, y: Array) -> Array:
    return np.hstack(_linear(y, x[None], np.ones_like(x)))


def _lin2_bounds(x: Array, y: Array) -> Bounds:
    return (-np.inf, -np.inf), (np.inf, np.inf)


def _pow3_guesses(x: Array, y: Array) -> Array:
    (c,) = _grid(np.geomspace(0.05, 5, 16))
    a, b = _linear(y, np.ones_like(x), x**-c)
    return np.hstack([a, b, c])


def _pow3_bounds(x: Array, y: Array) -> Bounds:
    low, high = _end(y)
    return (low, -np.inf, 0.01), (high, np.inf, 10)


def _pow4_guesses(x: Array, y: Array) -> Array:
    shortest, longest = _lengths(x)
    c, d = _grid(np.geomspace(0.1, 5, 8), np.geomspace(shortest, 3 * longest, 8))
    a, b = _linear(y, np.ones_like(x), (x + d) ** -c)
    return np.hstack([a, b, c, d])


def _pow4_bounds(x: Array, y: Array) -> Bounds:
    (low, high), (shortest, longest) = _end(y), _lengths(x)
    return (low, -np.inf, 0.01, 0.01 * shortest), (high, np.inf, 10, 10 * longest)


def _half_way(x: Array) -> list[Array]:
    """Exponents, and where x^d has its effect: a grid."""
    shortest, longest = _lengths(x)
    return _grid(np.geomspace(0.3, 4, 8), np.geomspace(shortest, 3 * longest, 8))


def _power_bounds(x: Array) -> tuple[float, float]:
    """Bounds of h^d, for h from a tenth of the shortest length to ten of the longest, and d up to 6."""
    shortest, longest = _lengths(x)
    return min(0.1, 0.1 * shortest) ** 6, max(10.0, 10 * longest) ** 6


def _mmf4_guesses(x: Array, y: Array) -> Array:
    d, h = _half_way(x)
    b = h**d
    a, c = _linear(y, b / (b + x**d), x**d / (b + x**d))
    return np.hstack([a, b, c, d])


def _mmf4_bounds(x: Array, y: Array) -> Bounds:
    (low, high), (least, most) = _end(y), _power_bounds(x)
    return (-np.inf, least, low, 0.1), (np.inf, most, high, 6)


def _wbl4_guesses(x: Array, y: Array) -> Array:
    d, h = _half_way(x)
    a = h**-d
    c, b = _linear(y, np.ones_like(x), -np.exp(-a * x**d))
    return np.hstack([a, b, c, d])


def _wbl4_bounds(x: Array, y: Array) -> Bounds:
    (low, high), (least, most) = _end(y), _power_bounds(x)
    return (1 / most, -np.inf, low, 0.1), (1 / least, np.inf, high, 6)


def _last1_guesses(x: Array, y: Array) -> Array:
    return y[-1:, None]


def _last1_bounds(x: Array, y: Array) -> Bounds:
    return (-np.inf,), (np.inf,)


PAPER_FORMS = ("exp2", "exp3", "lin2", "expd3")
"""The forms that Viper fits."""

FORMS = {
    form.name: form
    for form in (
        LossForm("exp2", ("a", "b"), _exp2, _exp2_guesses, _exp2_bounds, frozenset("b")),
        LossForm("exp3", ("a", "b", "c"), _exp3, _exp3_guesses, _exp3_bounds, frozenset("b")),
        LossForm("lin2", ("a", "b"), _lin2, _lin2_guesses, _lin2_bounds),
        LossForm("expd3", ("a", "b", "c"), _expd3, _expd3_guesses, _exp3_bounds, frozenset("b")),
        LossForm("pow3", ("a", "b", "c"), _pow3, _pow3_guesses, _pow3_bounds, frozenset("c"), first=1),
        LossForm("pow4", ("a", "b", "c", "d"), _pow4, _pow4_guesses, _pow4_bounds, frozenset("cd"), first=1),
        LossForm("mmf4", ("a", "b", "c", "d"), _mmf4, _mmf4_guesses, _mmf4_bounds, frozenset("bd")),
        LossForm("wbl4", ("a", "b", "c", "d"), _wbl4, _wbl4_guesses, _wbl4_bounds, frozenset("ad")),
        LossForm("last1", ("a",), _last1, _last1_guesses, _last1_bounds),
    )
}
"""Name -> form: exp2 a e^(-bx); exp3 a e^(-bx) + c; lin2 ax + b; expd3 c - (c-a) e^(-bx); pow3 a + b x^(-c);
pow4 a + b (x+d)^(-c); mmf4 (ab + c x^d) / (b + x^d); wbl4 c - b e^(-a x^d); last1 a, the mean of the last fifth."""
