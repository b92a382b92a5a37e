"""What all who take part in a fork are told.

Rules
- The caller of `fork` makes the order; ranks and clones compute the same plan from it, and send nothing that says what
  it is.
- The state that is described must be the same everywhere: a rank or a clone with other tensors refuses the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....planner.runs.forking import ForkPlan, plan_fork
from ....store.errors import ForkError
from ..training import TensorSpec

RANK, CLONE = 0, 1
"""Ranks in the group of two by which a rank and a clone talk."""


class PeerGoneError(ForkError):
    """Who took part in a fork lost another; the reason is that other's to tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOrder:
    """One fork."""

    id: str
    run: str
    """Name of the run that is forked."""
    sources: int
    """Its ranks."""
    groups: tuple[int, ...]
    """Clones of each group; they are numbered through."""
    specs: tuple[TensorSpec, ...]
    """The tensors of the state, in the order in which a step updates them."""
    forward: tuple[str, ...]
    """Their names in the order in which the next forward pass needs them."""
    transport: str
    """Back end of the groups by which the bytes go."""
    timeout: float
    """Seconds that the fork may take, from when it is ordered."""

    @property
    def clones(self) -> int:
        """Clones of all groups together."""
        return sum(self.groups)

    def plan(self) -> ForkPlan:
        """Plan who sends what to whom."""
        sizes = [spec.nbytes for spec in self.specs]
        return plan_fork(sizes, [spec.local for spec in self.specs], sources=self.sources, groups=self.groups)

    def group_name(self, source: int, clone: int) -> str:
        """Name the group by which a rank and a clone talk."""
        return f"fork/{self.id}/{source}-{clone}"

    def check(self, specs: Sequence[TensorSpec], where: str) -> None:
        """Refuse a training with another state.

        Raises:
            ForkError: names the first tensor that differs.
        """
        found = {spec.name: spec for spec in specs}
        for spec in self.specs:
            other = found.pop(spec.name, None)
            if other != spec:
                raise ForkError(f"{where}: expected {_text(spec)}; found {_text(other) if other else 'no such tensor'}")
        if found:
            raise ForkError(
                f"{where}: expected {len(self.specs)} tensors; also found {_text(next(iter(found.values())))}"
            )
        if [spec.name for spec in specs] != [spec.name for spec in self.specs]:
            raise ForkError(
                f"{where}: expected the tensors in the order of updates of {self.run!r}; found another order"
            )


def _text(spec: TensorSpec) -> str:
    return f"tensor {spec.name!r} of {spec.dtype} {list(spec.shape)}"
