"""What a rank is made of, and what it tells of itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...store.refs import ModelRef
from .training import Build, TensorSpec

LEAST_STEP_S = 1e-4
"""What steps that take less count as, where it is chosen how many to be ahead."""
LEAST_AHEAD = 2


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a run's ranks are made of; a clone of a rank is made of the same."""

    build: Build
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The latest ones."""
    backend: str = "auto"
    """What carries the bytes between the ranks: "auto", "shared", "gloo" or "nccl"."""
    repository: str | None = None
    """Name of the repository that the run saves to."""
    cpus: float = 0.0
    """CPU slots of each rank."""
    gpus: float = 0.0
    """GPUs of each rank."""


class Options(dict[str, Any]):
    """Options that a training is built with; records which names were looked up, given or not."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return an option, or the default."""
        self.read.add(name)
        return super().get(name, default)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The state and progress of one rank, as returned by `Trainers.describe`."""

    run: str
    """Name of the run."""
    rank: int
    """Number of the rank, from 0 to `size - 1`."""
    size: int
    """Number of ranks in the run."""
    steps_done: int
    """Number of steps trained so far. In a clone, this number includes the steps trained before the fork."""
    training: bool
    """Whether the rank is training or about to start training."""
    step_s: float
    """Mean duration of the last 64 steps, in seconds. 0 before the first step ends. If `own_loop` is true: mean time
    from the end of one step to the end of the next step, and 0 before the second step ends."""
    losses: int
    """Number of losses computed in the rank's process: one per step trained in that process."""
    specs: tuple[TensorSpec, ...]
    """Tensors of the training state, in the order in which a step updates the tensors."""
    forward_order: tuple[str, ...]
    """Names of the tensors, in the order in which a forward pass reads the tensors."""
    backend: str | None
    """Back end for collective communication: "shared", "gloo" or "nccl". None if `size` is 1 or `own_loop` is true."""
    node: str
    """Id of the node that the rank runs on."""
    pid: int
    """Process id of the rank."""
    saved: ModelRef | None = None
    """The version that the rank saved or restored last. None if there is no such version. This version becomes the
    parent of the next version that the rank saves.

    A clone that `fork` created starts with the value of rank 0 of the original run. However, the clone starts with None
    if the `repository` passed to `fork` differs from the repository of the original run, or if both `build` and
    `repository` were passed to `fork`."""
    fork: str | None = None
    """Id of the fork in progress. None if no fork is in progress."""
    own_loop: bool = False
    """Whether the rank runs the user's own training loop, with `ForkableRank` or `ForkCallback`. If true, `training` is
    false between two steps."""


def steps_ahead(reports: Sequence[RankReport], seconds: float, least: int = LEAST_AHEAD) -> int:
    """Return how many steps take about so many seconds, by the slowest rank; `least` where no step has ended yet."""
    step_s = max(report.step_s for report in reports)
    return max(math.ceil(seconds / max(step_s, LEAST_STEP_S)), least) if step_s else least
