"""A rank of a PyTorch training that is not ours, made forkable: DDP under torchrun, a Ray Train worker, any loop.

Rules
- The user's loop stays as it is, but for a `with forkable.step():` around what one step does: forward and backward
  pass, optimizer, schedule. The state is captured at the end of that block: there is no finer place in a loop that is
  not ours. Sending it overlaps with what follows.
- Between blocks the loop does not change the state. A block that ends with an error was no step.
- The state has the names that it has in a `TorchTraining` of the same model, optimizer and schedule: that is what its
  clones are.
"""

# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Self, cast

import torch
from torch import nn

from ....store.arrays import Array
from ...collective.connect import connect
from ...collective.rendezvous import ActorRendezvous
from ...engine.choice import EngineChoice, engine_for
from ..fork.fork_hooks import ForkHooks
from ..loop import LAST_STEPS
from ..mailbox import MailboxServer
from ..outside_rank import OutsideRank
from ..training import Facts, TensorSpec, Training
from .state import Scheduler, TorchState


class ForkableRank(OutsideRank):
    """A forkable rank for your own PyTorch training loop, for example with DDP under torchrun or in Ray Train.

    Create a `ForkableRank` in each process of the training run, and use the `ForkableRank` in a `with` block. While
    this block runs, any process of the cluster can find the ranks with `find_trainers` and fork the run with `fork`.
    Enclose the forward pass, the backward pass and the optimizer and scheduler steps in a `with forkable.step()` block.
    Do not change the training state outside the `step` blocks.

    Args:
        run: Name of the run. Two runs cannot use the same name at the same time.
        rank: Number of this rank, from 0 to `size - 1`.
        size: Number of ranks in the run.
        model: The model, which can be wrapped in `DistributedDataParallel`.
        optimizer: The optimizer of the model's parameters.
        scheduler: The learning-rate scheduler. Your loop must call its `step` method. None means no scheduler.
        steps_done: Number of steps trained before this loop began.
        engine: Engine of the cluster, as in `Repository.connect`. Defaults to the engine running in this process.

    Raises:
        ForkError: if the same run name and rank are already registered.
        ValueError: if `rank` or `steps_done` is out of range; if the optimizer is LBFGS, has parameters that the model
            does not have, or keeps state other than tensors and JSON-like values; or if the scheduler is
            ReduceLROnPlateau.
        RepositoryNotFoundError: if no cluster of the engine is running.

    >>> with ForkableRank("resnet", dist.get_rank(), dist.get_world_size(), model, optimizer) as forkable:
    ...     for batch in loader:                                                 # doctest: +SKIP
    ...         with forkable.step():
    ...             optimizer.zero_grad()
    ...             loss_of(model, batch).backward()
    ...             optimizer.step()
    """

    def __init__(
        self,
        run: str,
        rank: int,
        size: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Scheduler | None = None,
        steps_done: int = 0,
        engine: EngineChoice = None,
    ) -> None:
        if not 0 <= rank < size or steps_done < 0:
            raise ValueError(
                f"rank of {run!r}: expected a rank below {size} and steps_done from 0; found {rank} and {steps_done}"
            )
        self.run, self.rank, self.size = run, rank, size
        self._engine = engine_for(engine)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = cast(nn.Module, model.module)
        self._state = TorchState(model, optimizer, scheduler, rank, f"rank {rank} of {run!r}")
        self._done, self._counted = steps_done, 0
        self._inside = False
        """Whether a step is in progress."""
        self._lock = threading.Lock()
        """Held while a step begins or ends, and while a state is captured between two steps."""
        self._ends: deque[float] = deque(maxlen=LAST_STEPS)
        joins = partial(connect, rendezvous=ActorRendezvous(self._engine))
        self._fork_hooks = ForkHooks(cast("Training", self), run, rank, size, joins)  # it reads the state, and no more
        self._node = self._engine.this_node()
        self._handle = optimizer.register_step_pre_hook(self._before_update)
        try:
            self._mailbox = MailboxServer(self._engine, run, rank, self)
        except BaseException:
            self._handle.remove()
            raise

    # ---- the loop's side ------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Generator[int]:
        """Return a context manager that encloses one training step and yields the step number, `steps_done + 1`.

        A `with` block that raises an exception does not count as a step.
        """
        with self._lock:
            number, self._inside = self._done + 1, True
            self._fork_hooks.step_begins(number)
        try:
            yield number
        except BaseException:
            self._inside = False
            raise
        with self._lock:
            self._done, self._inside = number, False
            self._counted += 1
            self._ends.append(time.monotonic())
            self._fork_hooks.step_ended(number)

    def __repr__(self) -> str:
        return f"ForkableRank({self.run!r}, rank {self.rank} of {self.size})"

    def __enter__(self) -> Self:
        return self

    def _before_update(self, *_: object) -> None:
        self._fork_hooks.before_update()

    # ---- what the hooks read --------------------------------------------------------------------------

    @property
    def steps_done(self) -> int:
        """Number of steps trained so far, including the constructor argument `steps_done`."""
        return self._done

    def specs(self) -> Sequence[TensorSpec]:
        """List the tensors of the training state."""
        return self._state.specs()

    def tensor(self, name: str) -> Array:
        """Return the current value of a tensor. Buffers, states of random generators and GPU tensors are copied."""
        return self._state.view(name)[0]

    def facts(self) -> Facts:
        """Return the non-tensor part of the training state, in the form that `TorchTraining.restore` accepts."""
        return {"steps_done": self._done, "read": None, "options": {}, **self._state.facts()}

    def _read_order(self) -> Sequence[str]:
        return self._state.read_order()

    def _unhook(self) -> None:
        self._handle.remove()
