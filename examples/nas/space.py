"""What is searched: a space is a list of decisions, a candidate is one option for each.

Rules
- A candidate is a tuple of option numbers, one per decision, in the decisions' order; it is JSON as a list.
- A space also says what the options mean for the shapes: `check` walks a candidate and names the decision whose option
  cannot be built. `validate` does so for every option of every decision before a search begins.
- Widths are a parameter: the same number of options at a size that a CPU trains.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tensorvine.store.errors import GraphError

Candidate = tuple[int, ...]
"""Number of the option that each decision takes."""

UNITS = range(50, 2000, 25)
"""Widths of a dense layer in the ATTN space, as published."""
SMALL_UNITS = range(8, 242, 3)
"""As many, about an eighth as wide: for a CPU."""
ACTIVATIONS = ("none", "swish", "relu", "tanh", "sigmoid")
CELLS = 3
"""Of one sub-graph; each cell may skip to the sub-graph's input and to the cells before it."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice that a candidate makes."""

    name: str
    options: tuple[Any, ...]
    """What may be chosen: JSON-like values, no two the same."""


class Space(Protocol):
    """What a search needs to know of its space."""

    name: str
    decisions: tuple[Decision, ...]

    def check(self, candidate: Candidate) -> None:
        """See that a candidate can be built.

        Raises:
            GraphError: it cannot; names the decision.
        """
        ...


@dataclass(frozen=True, slots=True)
class Dense:
    """A dense layer."""

    units: int
    activation: str


@dataclass(frozen=True, slots=True)
class Cell:
    """A dense layer, or the identity, plus what is skipped to."""

    dense: Dense | None
    """None: the identity."""
    skips: tuple[int, ...]
    """Numbers of the anchors that are added: 0 is the sub-graph's input, n the output of its n-th cell."""


class AttnSpace:
    """The ATTN cell space (EvoStore, section 5.3; AgEBO-Tabular): a chain of dense cells with skips.

    In the space that AgEBO-Tabular's authors publish, each input has a sub-graph, their outputs are concatenated, and
    one more sub-graph follows: ATTN has one input, so its sub-graphs follow one another. A cell takes the output of the
    one before it, puts a dense layer or nothing in between, adds up to three anchors, each through a projection where
    its width differs, and ends with a relu.

    Args:
        subgraphs: 2 gives 18 decisions and 1.46e19 candidates, 6 gives 54 and the paper's 3.1e57.
        units: widths of a dense layer.

    >>> space = AttnSpace(2, UNITS)
    >>> len(space.decisions), len(space.decisions[0].options), f"{size_of(space):.3g}"
    (18, 391, '1.46e+19')
    >>> f"{size_of(AttnSpace(6, SMALL_UNITS)):.2g}"
    '3.1e+57'
    """

    def __init__(self, subgraphs: int = 2, units: Sequence[int] = SMALL_UNITS) -> None:
        self.name = f"attn-{subgraphs}"
        self.subgraphs = subgraphs
        dense = ("identity", *((width, activation) for width in units for activation in ACTIVATIONS))
        decisions: list[Decision] = []
        for graph in range(subgraphs):
            for cell in range(CELLS):
                where = f"sub-graph {graph + 1}, cell {cell + 1}"
                decisions.append(Decision(f"{where}: dense", dense))
                decisions += [Decision(f"{where}: skip to {_anchor(n)}", (False, True)) for n in range(cell + 1)]
        self.decisions = tuple(decisions)

    def chain(self, candidate: Candidate) -> Iterator[tuple[Cell, ...]]:
        """Return the sub-graphs of a candidate, from the input on, each as its cells; one takes what the other gives.

        The anchors of a sub-graph are what it takes and the outputs of its own cells.
        """
        chosen = iter(chosen_of(self, candidate))
        for _ in range(self.subgraphs):
            cells: list[Cell] = []
            for number in range(CELLS):
                dense = next(chosen)
                skips = tuple(anchor for anchor in range(number + 1) if next(chosen))
                cells.append(Cell(None if dense == "identity" else Dense(*dense), skips))
            yield tuple(cells)

    def cells(self, candidate: Candidate) -> Iterator[Cell]:
        """Return the cells of a candidate, from the input on; a sub-graph is `CELLS` of them."""
        for cells in self.chain(candidate):
            yield from cells

    def check(self, candidate: Candidate) -> None:
        """See that a candidate can be built."""
        for decision, option in zip(self.decisions, chosen_of(self, candidate), strict=True):
            if isinstance(option, tuple) and not (option[0] > 0 and option[1] in ACTIVATIONS):
                raise GraphError(
                    f"decision {decision.name!r}: expected a positive width and one of {ACTIVATIONS}; found {option!r}"
                )


def _anchor(number: int) -> str:
    return f"cell {number}" if number else "the input"


@dataclass(frozen=True, slots=True)
class Stage:
    """A convolution, its activation and the pooling after it."""

    kernel: int
    """0: no convolution."""
    activation: str
    pool: int
    """1: no pooling."""


class Nt3Space:
    """A small space for NT3: two convolution stages and a dense layer; 8 decisions, 624,000 candidates.

    The number of decisions and of candidates are the published ones; which options make them up is our choice.

    Args:
        length: features of a sample, seen as a sequence of one channel.
        filters: of each convolution.

    >>> space = Nt3Space(60)
    >>> len(space.decisions), size_of(space)
    (8, 624000)
    """

    def __init__(self, length: int, filters: int = 8) -> None:
        self.name = "nt3"
        self.length, self.filters = length, filters
        activations = ("none", "relu", "tanh", "sigmoid")
        kernels, widths = (0, 3, 4, 5, 6), (*range(10, 70, 10), *range(80, 200, 20), 200)
        self.decisions = (
            Decision("stage 1: kernel", kernels),
            Decision("stage 1: activation", activations),
            Decision("stage 1: pooling", (1, 2, 3, 4, 5)),
            Decision("stage 2: kernel", kernels),
            Decision("stage 2: activation", activations),
            Decision("stage 2: pooling", (1, 2, 3, 4, 5, 6)),
            Decision("dense: units", widths),
            Decision("dense: activation", activations),
        )

    def parts(self, candidate: Candidate) -> tuple[Stage, Stage, Dense]:
        """Return what a candidate is made of."""
        first, second, last = (chosen_of(self, candidate)[i : i + 3] for i in (0, 3, 6))
        return Stage(*first), Stage(*second), Dense(*last)

    def check(self, candidate: Candidate) -> None:
        """See that a candidate can be built: what a convolution or a pooling takes must be there."""
        length = self.length
        for number, stage in enumerate(self.parts(candidate)[:2], 1):
            for what, needs in (("kernel", stage.kernel), ("pooling", stage.pool)):
                if needs > length:
                    raise GraphError(
                        f"decision 'stage {number}: {what}': expected at most {length}, the length of its input; "
                        f"found {needs}"
                    )
                length = length // needs if what == "pooling" else length - max(needs - 1, 0)


def chosen_of(space: Space, candidate: Candidate) -> tuple[Any, ...]:
    """Return the options that a candidate chose.

    Raises:
        GraphError: it has too few or too many, or a number that names no option.
    """
    if len(candidate) != len(space.decisions):
        raise GraphError(f"space {space.name!r}: expected {len(space.decisions)} decisions; found {len(candidate)}")
    for decision, number in zip(space.decisions, candidate, strict=True):
        if not 0 <= number < len(decision.options):
            raise GraphError(
                f"decision {decision.name!r}: expected an option 0 to {len(decision.options) - 1}; found {number}"
            )
    return tuple(decision.options[number] for decision, number in zip(space.decisions, candidate, strict=True))


def size_of(space: Space) -> int:
    """Count the candidates."""
    return math.prod(len(decision.options) for decision in space.decisions)


def validate(space: Space) -> None:
    """See that a space can be searched: something to choose everywhere, and every option can be built.

    Each option is tried with the first and with the last option of all other decisions. What else cannot be built is
    found when it is drawn, and costs that candidate.

    Raises:
        GraphError: names the decision.
    """
    if not space.decisions:
        raise GraphError(f"space {space.name!r}: expected decisions; found none")
    for decision in space.decisions:
        if len(decision.options) < 2 or len(set(decision.options)) < len(decision.options):
            raise GraphError(
                f"decision {decision.name!r}: expected two or more options, all different; found {decision.options!r}"
            )
    last = [len(decision.options) - 1 for decision in space.decisions]
    for others in ([0] * len(last), last):
        for place, decision in enumerate(space.decisions):
            for option in range(len(decision.options)):
                space.check((*others[:place], option, *others[place + 1 :]))


def draw(space: Space, rng: random.Random) -> Candidate:
    """Draw a candidate, all alike."""
    return tuple(rng.randrange(len(decision.options)) for decision in space.decisions)


def mutate(space: Space, candidate: Candidate, rng: random.Random) -> Candidate:
    """Change exactly one decision to another option."""
    place = rng.randrange(len(candidate))
    other = rng.randrange(len(space.decisions[place].options) - 1)
    return (*candidate[:place], other + (other >= candidate[place]), *candidate[place + 1 :])
