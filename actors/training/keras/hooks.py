"""Operations in a compiled training step that call Python: to tell of updates, and to wait before reads.

Rules
- They are traced into the step at its end, by which TensorFlow knows who wrote last to each variable and who reads it.
  So a tensor is told as soon as its last update is done, while the backward pass goes on; how the optimizer works,
  averages or constrains weights makes no difference.
- Each is behind a flag: nothing of Python runs in a step in which nobody forks. Tensors are taken in groups, as each
  flag costs tens of milliseconds when the step is traced (and microseconds when it runs).
- What Python raises there is kept, for TensorFlow hides it in an error of its own.
- TensorFlow keeps the functions that a graph calls for ever; so they hold what they call weakly.
"""

# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false, reportPrivateImportUsage=false
# pyright: reportAttributeAccessIssue=false
# (tensorflow's types are partial)

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import keras
import tensorflow as tf

from ..training import Hooks
from .state import KerasState

GROUP_BYTES = 1 << 20
"""Bytes that are told, or waited for, at once."""
GROUPS = 32
"""Groups of a state at most, but for large tensors."""

_WRITES = ("Assign", "ResourceApply", "ResourceScatter")
"""How the names of operations begin that write to a variable."""

log = logging.getLogger(__name__)

Call = Callable[..., object]


class Failure:
    """The first error of what a compiled step called."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    @contextmanager
    def kept(self) -> Generator[None]:
        """Keep what is raised within, and raise it."""
        try:
            yield
        except BaseException as exc:
            self.error = self.error or exc
            raise

    @contextmanager
    def told(self) -> Generator[None]:
        """Raise, in place of TensorFlow's error, what was kept within."""
        self.error = None
        try:
            yield
        except cast("type[Exception]", tf.errors.OpError) as exc:
            if self.error is not None:
                raise self.error from exc
            raise


def call_python(call: Call, inputs: Sequence[object] = (), outputs: Sequence[object] = ()) -> list[tf.Tensor]:
    """Add an operation that calls a method of Python, which the graph does not keep alive.

    Args:
        call: a bound method.
        inputs: what it is called with.
        outputs: dtypes of what it gives.
    """
    method = weakref.WeakMethod(call)

    def weakly(*values: object) -> object:
        bound = method()
        if bound is None:
            raise ReferenceError("expected the training that this step was compiled for; it was closed")
        return bound(*values)

    return cast("list[tf.Tensor]", tf.py_function(weakly, list(inputs), list(outputs)))


class _Flagged:
    """Calls for groups of tensors, behind one flag."""

    def __init__(self, state: KerasState, names: Sequence[str], failure: Failure) -> None:
        self._state = state
        self._failure = failure
        self._parts = [_Part(self, group) for group in state.grouped(names, GROUP_BYTES, GROUPS)]
        self._flag = tf.Variable(tf.constant(False), trainable=False, name="flag")
        self._up = False

    def called(self, names: Sequence[str]) -> None:
        """Take the call for a group, from a thread of TensorFlow's."""
        raise NotImplementedError

    def _raise_flag(self, up: bool) -> None:
        if up != self._up:
            self._flag.assign(up)
            self._up = up

    def _add_call(self, part: _Part, after: Sequence[object]) -> tf.Operation:
        """Add the operation that calls Python for a group, if the flag is up, when other operations are done."""

        def call() -> tf.Tensor:
            call_python(part.called)
            self._flag.read_value()  # what uses no variable is put behind all other calls of Python
            return tf.constant(0)

        with tf.control_dependencies(after):
            return cast("tf.Tensor", tf.cond(self._flag, call, lambda: tf.constant(0))).op


class _Part:
    """A group of tensors."""

    def __init__(self, owner: _Flagged, names: list[str]) -> None:
        self.names = names
        self._owner = owner

    def called(self) -> None:
        self._owner.called(self.names)

    def users(self, variables: Mapping[str, keras.Variable]) -> list[tf.Operation]:
        """List the operations that read the group's variables, or write to them, in the step that is being traced."""
        graph = cast(Any, tf.compat.v1.get_default_graph())
        handles = [graph.capture(variables[name].value.handle) for name in self.names]
        return list({id(user): user for handle in handles for user in handle.consumers()}.values())


class Tells(_Flagged):
    """Tells hooks of all tensors in the steps in which they want to know.

    Args:
        state: the training's.
        failure: keeps what hooks raise.
    """

    def __init__(self, state: KerasState, failure: Failure) -> None:
        super().__init__(state, [spec.name for spec in state.specs()], failure)
        self.hooks: Hooks | None = None
        """What is called from the next step on."""
        self._now: Hooks | None = None

    def begin(self, step: int) -> None:
        """Tell that a step is about to begin."""
        self._now = self.hooks
        self._raise_flag(self._now is not None and self._now.step_begins(step))

    def end(self, step: int) -> None:
        """Tell that a step has ended."""
        if self._now is not None:
            self._now.step_ended(step)

    def trace(self) -> None:
        """Add the operations to the step that is being traced, after all else; a step not compiled tells here."""
        if tf.executing_eagerly():
            for part in self._parts if self._up else ():
                part.called()
            return
        self._warn_of_others()
        for part in self._parts:
            self._add_call(part, part.users(self._state.variables))

    def called(self, names: Sequence[str]) -> None:
        """Tell a group; nothing in the step writes to its variables any more."""
        hooks = self._now
        if hooks is not None:
            with self._failure.kept():
                for name in names:
                    hooks.updated(name, self._state.tensor(name), stable=True)

    def _warn_of_others(self) -> None:
        graph = cast(Any, tf.compat.v1.get_default_graph())
        known = self._state.handles()
        writers = [
            user.name
            for variable, inside in graph.captures
            if variable.dtype == tf.resource and id(variable) not in known
            for user in inside.consumers()
            if user.type.startswith(_WRITES)
        ]
        if writers:
            log.warning(
                "%s: a step writes to variables that belong to neither a layer nor the optimizer. Clones continue with "
                "other values of them. The operations are %s",
                self._state.where,
                ", ".join(writers),
            )


class Gates(_Flagged):
    """Waits for tensors that are still on their way, in one step, before it reads them.

    Args:
        state: the training's.
        failure: keeps what waiting raises.
    """

    def __init__(self, state: KerasState, failure: Failure) -> None:
        super().__init__(state, state.forward_order(), failure)
        self._wait: Callable[[str], None] | None = None

    def set(self, wait: Callable[[str], None] | None) -> None:
        """Have the next step wait; None: it does not."""
        self._wait = wait
        self._raise_flag(wait is not None)

    def trace(self) -> None:
        """Add the operations to the step that is being traced, after all else.

        The gates follow one another, so that one thread at most is kept waiting while others compute.
        """
        before: list[tf.Operation] = []
        for part in self._parts:
            users = part.users(self._state.variables)
            gate = self._add_call(part, before)
            before = [gate]
            for user in users:
                user._add_control_input(gate)  # as TensorFlow itself orders the uses of a variable

    def called(self, names: Sequence[str]) -> None:
        """Wait for a group."""
        wait = self._wait
        if wait is not None:
            with self._failure.kept():
                for name in names:
                    wait(name)
