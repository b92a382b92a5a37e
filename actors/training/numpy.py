"""A training loop in plain NumPy as a training that can be forked.

Rules
- The user's function is one step. It reads the state and writes to it through the `StepContext` that it is given, and
  so tells by itself what is reduced, what has its final value, and what a clone must wait for.
- The state is arrays, one random generator and the number of steps. What else a step is to keep, such as the best loss
  so far, is an array of the state without axes.
- Options that are numbers or texts travel with the state, but those that a rank was told itself stay as it was told.
- Arrays are written to in place, each at most once in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike

from ...store.arrays import as_numpy, dtype_name, read_only
from ...store.errors import TensorMismatchError, TensorNotFoundError
from .reducer import Reducer
from .training import Facts, Hooks, RankContext, TensorSpec

_TRAVELS = (bool, int, float, str, np.integer, np.floating, np.bool_)


class StepContext:
    """What a step sees of its training: `context["w"]` reads an array of the state. Good for this step only."""

    def __init__(self, training: NumpyTraining, step: int, hooks: Hooks | None, telling: bool) -> None:
        self.step = step
        """Its number, from 1: with `rank` and `size` it says which batch is to be trained on."""
        self.rank = training.context.rank
        self.size = training.context.size
        """Ranks of the run."""
        self.options: Mapping[str, Any] = training.options
        self._training = training
        self._hooks, self._telling = hooks, telling
        self._means: dict[str, np.ndarray] = {}
        self._written: set[str] = set()

    @property
    def random(self) -> np.random.Generator:
        """The training's random generator.

        Raises:
            ValueError: it has none.
        """
        if self._training.random is None:
            raise ValueError(f"{self._training.where}: random: expected NumpyTraining(random=...); found None")
        return self._training.random

    def __getitem__(self, name: str) -> np.ndarray:
        """Return an array of the state, read-only; in a clone's first step, as soon as it is there."""
        self._training.await_tensor(name)
        return self._training.views[name]

    def reduce(self, name: str, gradient: object) -> None:
        """Begin to average a gradient with those of the other ranks; returns at once. Call it in the backward pass.

        Args:
            name: of the parameter.
            gradient: an array of the parameter's shape. It is given away: `mean` gives it back.

        Raises:
            ValueError: the training was not told of this parameter, or the gradient came before in this step.
            TensorMismatchError: another shape.
            PeerLostError, OperationTimeoutError: a peer is gone.
        """
        training = self._training
        place = training.gradients.get(name)
        if place is None or name in self._means:
            expected = f"a gradient once, of one of the parameters {list(training.gradients)}"
            raise ValueError(f"{training.where}: reduce: expected {expected}; found {name!r}")
        parameter = training.views[name]
        array = np.require(gradient, parameter.dtype, ["C", "W"])
        if array.shape != parameter.shape:
            raise TensorMismatchError(
                f"{training.where}: gradient of {name!r}: expected shape {parameter.shape}; found {array.shape}"
            )
        self._means[name] = array
        training.reducer.ready(place, array)

    def mean(self, name: str, timeout: float | None = None) -> np.ndarray:
        """Wait for the mean of the ranks' gradients of a parameter, and give it.

        Args:
            name: of a parameter whose gradient was given to `reduce` in this step.
            timeout: seconds; None: as the ranks' group has it.

        Raises:
            ValueError: it was not.
            PeerLostError, OperationTimeoutError: a peer is gone, or does not come; names it.
        """
        if name not in self._means:
            raise ValueError(f"{self._training.where}: mean: expected reduce({name!r}, ...) before it; found none")
        self._training.reducer.wait(self._training.gradients[name], timeout)
        return self._means[name]

    @contextmanager
    def changing(self, name: str) -> Generator[np.ndarray]:
        """Change an array of the state in place: in the block it is writable, after it, it has its final value.

        Raises:
            ValueError: it was changed before in this step.
            TensorNotFoundError: there is no such array.
        """
        training = self._training
        training.await_tensor(name)
        if name in self._written:
            raise ValueError(f"{training.where}: step {self.step}: expected one change of {name!r}; found another")
        if self._hooks is not None and not self._written:
            self._hooks.before_update()
        self._written.add(name)
        yield training.state[name]
        if self._hooks is not None and self._telling:
            self._hooks.updated(name, training.state[name])

    def update(self, name: str, value: ArrayLike) -> None:
        """Set what an array of the state is at the end of the step; errors as in `changing`.

        Raises:
            TensorMismatchError: another shape, or a kind of numbers that the array cannot hold.
        """
        with self.changing(name) as array:
            if np.shape(value) != array.shape:
                raise TensorMismatchError(
                    f"{self._training.where}: {name!r}: expected shape {array.shape}; found {np.shape(value)}"
                )
            try:
                np.copyto(array, value, casting="same_kind")
            except TypeError as exc:
                raise TensorMismatchError(f"{self._training.where}: {name!r}: expected {array.dtype}; {exc}") from exc


class NumpyTraining:
    """A training whose step is a function (`training.Training`).

    Args:
        context: what the rank's training is built from.
        state: name -> array, in the order in which a forward pass reads them: parameters, momenta, statistics. The
            training writes to the arrays themselves, where they are contiguous; nobody else may.
        step: trains one step and gives the loss.
        parameters: those of the state whose gradients `StepContext.reduce` takes. Each step must reduce all of them.
        random: the generator that steps draw from.
        updates: names in the order in which a step changes them; the others come last. None: reversed as in `state`.
        local: names of those that may differ between ranks.
        options: options of the step and their values where the user says nothing.

    Raises:
        ValueError: an option or a name that is not known, or given twice.
        TensorMismatchError: what is in `state` is no array of numbers.

    >>> def step(now: StepContext) -> float:
    ...     error = now["w"] - now.random.normal(size=2)
    ...     now.reduce("w", error)
    ...     now.update("w", now["w"] - now.options["rate"] * now.mean("w"))
    ...     return float(error @ error)
    >>> context = RankContext("docs", 0, 1, None, {"rate": 0.5})
    >>> random = np.random.default_rng(0)
    >>> training = NumpyTraining(context, {"w": np.ones(2)}, step, parameters=["w"], random=random)
    >>> round(training.step(), 2), training.steps_done
    (2.05, 1)
    """

    def __init__(
        self,
        context: RankContext,
        state: Mapping[str, object],
        step: Callable[[StepContext], float],
        *,
        parameters: Sequence[str] = (),
        random: np.random.Generator | None = None,
        updates: Sequence[str] | None = None,
        local: Collection[str] = (),
        options: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        self.context = context
        self.where = f"training {context.run!r}, rank {context.rank}"
        """For errors."""
        self.state = {
            name: np.require(as_numpy(array, f"{self.where}: {name!r}"), requirements=["C", "W"])
            for name, array in state.items()
        }
        self.views = {name: read_only(array) for name, array in self.state.items()}
        """What steps read."""
        self.options: dict[str, Any] = dict(options)
        self._check_kinds({name: value for name, value in context.options.items() if name in options})
        self.options.update(context.options)
        self._told = set(context.options)
        """Options that the user set."""
        self.random = random
        self._step = step
        self._done = 0
        self._hooks: Hooks | None = None
        self._gate: Callable[[str], None] | None = None
        self._gated: set[str] = set()
        """Tensors that the gate has not let through yet."""
        self._check_names("parameters", parameters)
        self._check_names("local", local)
        self._check_names("updates", updates or ())
        first = list(reversed(self.state)) if updates is None else list(updates)
        order = first + [name for name in self.state if name not in first]
        self._specs = [
            TensorSpec(name, dtype_name(array.dtype), array.shape, array.nbytes, name in local)
            for name, array in ((name, self.state[name]) for name in order)
        ]
        names = [name for name in order if name in parameters]
        self.gradients = {name: place for place, name in enumerate(names)}
        """Parameter -> its place in the backward pass."""
        sizes, dtypes = [self.state[name].nbytes for name in names], [self.state[name].dtype.name for name in names]
        self.reducer = Reducer(context.group, sizes, dtypes=dtypes, names=names)

    @property
    def steps_done(self) -> int:
        """Steps since the training's beginning."""
        return self._done

    def step(self) -> float:
        """Train one step; gives the loss."""
        number, hooks = self._done + 1, self._hooks
        telling = hooks is not None and hooks.step_begins(number)
        self.reducer.begin()
        loss = float(self._step(StepContext(self, number, hooks, telling)))
        self.reducer.wait_all()
        for name in sorted(self._gated):
            self.await_tensor(name)
        self._gate = None
        self._done = number
        if hooks is not None:
            hooks.step_ended(number)
        return loss

    def await_tensor(self, name: str) -> None:
        """Wait, in a clone's first step, until a tensor is there.

        Raises:
            TensorNotFoundError: there is no such tensor.
        """
        if name in self._gated and self._gate is not None:
            self._gate(name)
            self._gated.discard(name)
        if name not in self.state:
            raise TensorNotFoundError(f"{self.where}: expected one of {list(self.state)}; found {name!r}")

    def hook(self, hooks: Hooks | None) -> None:
        """Attach what is called in each step; None: nothing."""
        self._hooks = hooks

    def configure(self, options: Mapping[str, object]) -> None:
        """Go on with other options; a value must be of the same kind as that before.

        Raises:
            ValueError: an option that it does not have, or a value of another kind.
        """
        unknown = sorted(options.keys() - self.options.keys())
        if unknown:
            raise ValueError(f"{self.where}: options: expected some of {sorted(self.options)}; found {unknown}")
        self._check_kinds(options)
        self.options.update(options)
        self._told.update(options)

    def _check_kinds(self, options: Mapping[str, object]) -> None:
        for name, value in options.items():
            old = self.options[name]
            if old is not None and _kind(value) != _kind(old):
                raise ValueError(
                    f"{self.where}: option {name!r}: expected {_kind(old)} such as {old!r}; found {value!r}"
                )

    def knows(self, option: str) -> bool:
        """Return whether `configure` takes an option of this name."""
        return option in self.options

    def specs(self) -> Sequence[TensorSpec]:
        """List the tensors, in the order in which a step changes them."""
        return self._specs

    def forward_order(self) -> Sequence[str]:
        """Name the tensors as they stand in the state."""
        return list(self.state)

    def tensor(self, name: str) -> np.ndarray:
        """Return a tensor, read-only, without a copy."""
        return self.views[name]

    def facts(self) -> Facts:
        """Return steps done, the random generator's state, and the options that are numbers or texts."""
        state = None if self.random is None else _plain(self.random.bit_generator.state)
        options = {
            name: _plain(cast(object, value)) for name, value in self.options.items() if isinstance(value, _TRAVELS)
        }
        return {"steps_done": self._done, "random": state, "options": options}

    def memory(self, name: str) -> np.ndarray:
        """Return a tensor's own memory."""
        return self.state[name]

    def filled(self, name: str) -> None:
        """Tell that all of a tensor's `memory` has been written."""

    def restore(self, facts: Facts) -> None:
        """Take over another rank's facts; options that this one was told stay.

        Raises:
            ValueError: they are not those of such a training, or of one with another kind of random generator.
        """
        if set(facts) != {"steps_done", "random", "options"} or (facts["random"] is None) != (self.random is None):
            random = "none" if self.random is None else type(self.random.bit_generator).__name__
            raise ValueError(
                f"{self.where}: facts: expected steps_done, random ({random}) and options; found {dict(facts)}"
            )
        if self.random is not None:
            try:
                self.random.bit_generator.state = facts["random"]
            except (KeyError, TypeError, ValueError) as exc:
                raise ValueError(f"{self.where}: facts: random: expected a state that fits; {exc}") from exc
        options = facts["options"]
        self.options.update({name: options[name] for name in (self.options.keys() & options.keys()) - self._told})
        self._done = int(facts["steps_done"])

    def gate(self, wait: Callable[[str], None] | None) -> None:
        """Have the next step call `wait(name)` before it first reads a tensor, or at its end if it reads it never."""
        self._gate = wait
        self._gated = set(self.state) if wait is not None else set()

    def close(self) -> None:
        """Let go of the hooks and the gradients."""
        self._hooks = None
        self.reducer.close()

    def _check_names(self, argument: str, names: Collection[str]) -> None:
        wrong = [name for name in names if name not in self.state]
        if wrong or len(set(names)) != len(names):
            raise ValueError(
                f"{self.where}: {argument}: expected names of {list(self.state)}, each once; found {list(names)}"
            )


def _kind(value: object) -> str:
    """Tell what kind of option a value is."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return type(value).__name__
    return "number"


def _plain(value: object) -> object:
    """Write a bit generator's state with numbers and lists alone."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in cast("Mapping[str, object]", value).items()}
    return cast(Any, value).tolist() if isinstance(value, (np.ndarray, np.generic)) else value
