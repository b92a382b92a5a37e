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
    """The argument of the step function of `NumpyTraining`, with methods to read and change the training state.

    For a context `now`, `now["w"]` returns a read-only view of the array "w" of the state. In the first step of a
    clone, `now["w"]` waits until the clone has received the array. Do not use a context after its step.
    """

    def __init__(self, training: NumpyTraining, step: int, hooks: Hooks | None, telling: bool) -> None:
        self.step = step
        """Number of the step, from 1. Choose the batch by `step`, `rank` and `size`."""
        self.rank = training.context.rank
        """Number of this rank, from 0."""
        self.size = training.context.size
        """Number of ranks of the run."""
        self.options: Mapping[str, Any] = training.options
        """Current options of the training."""
        self._training = training
        self._hooks, self._telling = hooks, telling
        self._means: dict[str, np.ndarray] = {}
        self._written: set[str] = set()

    @property
    def random(self) -> np.random.Generator:
        """The random generator passed to `NumpyTraining`.

        Raises:
            ValueError: if `NumpyTraining` was created without a random generator.
        """
        if self._training.random is None:
            raise ValueError(f"{self._training.where}: random: expected NumpyTraining(random=...); found None")
        return self._training.random

    def __getitem__(self, name: str) -> np.ndarray:
        """Return a read-only view of an array of the state.

        In the first step of a clone, wait until the clone has received the array.
        """
        self._training.await_tensor(name)
        return self._training.views[name]

    def reduce(self, name: str, gradient: object) -> None:
        """Start averaging a gradient over the ranks, and return immediately. Call `reduce` in the backward pass.

        Args:
            name: Name of a parameter.
            gradient: Array with the shape of the parameter. Do not read or change the array before `mean` returns.

        Raises:
            ValueError: if `name` is not in the `parameters` of `NumpyTraining`, or if `reduce` was already called with
                this name in this step.
            TensorMismatchError: if the shape of the gradient differs from the shape of the parameter.
            PeerLostError: if another rank died or left the group.
            OperationTimeoutError: if another rank did not respond in time.
        """
        training = self._training
        place = training.gradients.get(name)
        if place is None or name in self._means:
            expected = f"one of the parameters {list(training.gradients)}, once per step"
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
        """Wait until the gradient of a parameter is averaged over the ranks, and return the mean.

        Args:
            name: Name of a parameter that was passed to `reduce` in this step.
            timeout: Seconds to wait. Defaults to twice the timeout of the ranks' group.

        Raises:
            ValueError: if `reduce` was not called with this name in this step.
            PeerLostError: if another rank died or left the group. The message names that rank.
            OperationTimeoutError: if another rank does not respond in time.
        """
        if name not in self._means:
            raise ValueError(
                f"{self._training.where}: mean: expected a call of reduce({name!r}, ...) in this step; found none"
            )
        self._training.reducer.wait(self._training.gradients[name], timeout)
        return self._means[name]

    @contextmanager
    def changing(self, name: str) -> Generator[np.ndarray]:
        """Return a context manager that yields a writable array of the training state, for changes in place.

        Each array can be changed only once per step. At the end of the `with` block, the array must contain its final
        value for this step.

        Raises:
            ValueError: if the array was already changed in this step.
            TensorNotFoundError: if the state has no array of this name.
        """
        training = self._training
        training.await_tensor(name)
        if name in self._written:
            raise ValueError(
                f"{training.where}: step {self.step}: expected one change of {name!r}; found a second change"
            )
        if self._hooks is not None and not self._written:
            self._hooks.before_update()
        self._written.add(name)
        yield training.state[name]
        if self._hooks is not None and self._telling:
            self._hooks.updated(name, training.state[name])

    def update(self, name: str, value: ArrayLike) -> None:
        """Set the value of an array of the training state. Each array can be changed only once per step.

        Raises:
            ValueError: if the array was already changed in this step.
            TensorNotFoundError: if the state has no array with this name.
            TensorMismatchError: if the shapes of the value and the array differ, or if NumPy cannot cast the value to
                the dtype of the array with the casting rule "same_kind".
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
    """One rank of a data-parallel training run in plain NumPy. Implements `Training`.

    Args:
        context: The context passed to the `build` function.
        state: Mapping of names to arrays (parameters, momenta, statistics), in the order of use in a forward pass.
            C-contiguous, writable arrays are changed in place: do not use them elsewhere. Other arrays are copied.
        step: Function that takes a `StepContext`, trains one step and returns the loss.
        parameters: Names of the arrays whose gradients are averaged. Each step must pass each name to
            `StepContext.reduce`.
        random: Random generator for the steps. The generator's state is part of the training state.
        updates: Names of arrays, in the order in which a step changes the arrays. The other arrays follow in the order
            of `state`. Defaults to the reverse order of `state`.
        local: Names of the arrays that can differ between ranks, such as statistics.
        options: Mapping of option names to default values. Values in `context.options` replace the default values.

    Raises:
        ValueError: if a name in `parameters`, `updates` or `local` is missing from `state` or given twice, or if the
            type of a value in `context.options` differs from the type of its default (integers and floats count as one
            type).
        TensorMismatchError: if a value in `state` is not an array of numbers.

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
        """Name of this rank for error messages."""
        self.state = {
            name: np.require(as_numpy(array, f"{self.where}: {name!r}"), requirements=["C", "W"])
            for name, array in state.items()
        }
        self.views = {name: read_only(array) for name, array in self.state.items()}
        """Read-only views of the state's arrays, by name."""
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
        """Tensors that a clone's first step has not waited for yet."""
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
        """Parameter name -> its position in the backward pass."""
        sizes, dtypes = [self.state[name].nbytes for name in names], [self.state[name].dtype.name for name in names]
        self.reducer = Reducer(context.group, sizes, dtypes=dtypes, names=names)

    @property
    def steps_done(self) -> int:
        """Number of steps trained so far. In a clone, this number includes the steps trained before the fork."""
        return self._done

    def step(self) -> float:
        """Train one step and return the loss from the step function."""
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
        """Wait until this rank has received a tensor. Only the first step of a clone needs to wait.

        Raises:
            TensorNotFoundError: if the state has no array with this name.
        """
        if name in self._gated and self._gate is not None:
            self._gate(name)
            self._gated.discard(name)
        if name not in self.state:
            raise TensorNotFoundError(f"{self.where}: expected one of {list(self.state)}; found {name!r}")

    def hook(self, hooks: Hooks | None) -> None:
        """Set the hooks that each step calls. None removes the hooks."""
        self._hooks = hooks

    def configure(self, options: Mapping[str, object]) -> None:
        """Change the values of the given options.

        Raises:
            ValueError: if an option is unknown, or if the type of its value changes (integers and floats count as one
                type).
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
        """Return whether `configure` accepts an option with this name."""
        return option in self.options

    def specs(self) -> Sequence[TensorSpec]:
        """List the tensors of the training state, in the order in which a step changes the tensors."""
        return self._specs

    def forward_order(self) -> Sequence[str]:
        """List the names of all tensors, in the order of the constructor argument `state`."""
        return list(self.state)

    def tensor(self, name: str) -> np.ndarray:
        """Return a read-only view of a tensor."""
        return self.views[name]

    def facts(self) -> Facts:
        """Return the step count, the random generator's state, and the options whose values are numbers or strings."""
        state = None if self.random is None else _plain(self.random.bit_generator.state)
        options = {
            name: _plain(cast(object, value)) for name, value in self.options.items() if isinstance(value, _TRAVELS)
        }
        return {"steps_done": self._done, "random": state, "options": options}

    def memory(self, name: str) -> np.ndarray:
        """Return the memory of a tensor as a writable array. The caller writes the new value into this array."""
        return self.state[name]

    def filled(self, name: str) -> None:
        """Do nothing, because `memory` returns the array of the tensor itself, not a copy."""

    def restore(self, facts: Facts) -> None:
        """Restore the non-tensor part of the training state from the `facts` of another rank.

        Options that were set on this rank, in `context.options` or with `configure`, keep their values.

        Raises:
            ValueError: if `facts` is not from a `NumpyTraining`, or the two ranks do not use the same kind of random
                generator.
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
                raise ValueError(
                    f"{self.where}: facts: random: expected a state of the same kind of generator; {exc}"
                ) from exc
        options = facts["options"]
        self.options.update({name: options[name] for name in (self.options.keys() & options.keys()) - self._told})
        self._done = int(facts["steps_done"])

    def gate(self, wait: Callable[[str], None] | None) -> None:
        """Set a function that the next step calls once per tensor, as `wait(name)`. None removes the function.

        The call is made before the step first reads the tensor, and for unread tensors at the end of the step.
        """
        self._gate = wait
        self._gated = set(self.state) if wait is not None else set()

    def close(self) -> None:
        """Remove the hooks and stop averaging gradients. Do not call `step` afterwards."""
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
