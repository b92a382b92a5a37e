"""A model that answers while it is updated: two copies of it, one of which answers (Viper, section 4.2).

Rules
- A new version goes into the copy that does not answer; then one pointer is swapped. An answer ends on the copy on
  which it began, and a copy is filled only when no answer is left on it: no answer is from half a version.
- All of a version is checked before anything of it is written: names, shapes, dtypes, and the architecture where one
  was stored. A version that does not fit is refused by name, and the one before goes on answering.
- Nothing here knows an engine: consumers in the cluster and on the edge share it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import numpy as np

from ...store.errors import OperationTimeoutError, VersionNotServedError
from ...store.graphs.graph import ModelGraph
from ...store.refs import ModelRef
from .filler import Filler

if TYPE_CHECKING:
    from torch import nn

QUIET_S = 60.0
"""How long an update waits for the answers that began two versions ago."""
KEPT_REFUSED = 64
"""Refused versions that are kept."""


@runtime_checkable
class Servable(Protocol):
    """Interface of a model that is not written in Keras or PyTorch, for example a NumPy or CuPy model."""

    def assign(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Set the tensors of the model to the tensors of a version.

        Args:
            tensors: Mapping of tensor names to read-only arrays. Each array stays valid while a reference to it exists.
        """
        ...

    def __call__(self, batch: object) -> object:
        """Compute the outputs for a batch."""
        ...


@dataclass(frozen=True, slots=True)
class Inference:
    """The answer to a request. One call of the model computes its outputs with one version."""

    outputs: Any
    """Outputs of the model. If the model is a torch module, tensors are converted to NumPy arrays."""
    ref: ModelRef
    """The version that computed the outputs. With `generate`, the version of the last call of the model."""
    seconds: float
    """Seconds that the model took to compute the outputs."""
    first: ModelRef
    """The version of the first call of the model. It differs from `ref` only if an update came during `generate`."""


Generate = Callable[[Callable[[object], object], object], object]
"""Computes the outputs for a batch by several calls of a model: `generate(model, batch)`."""


class _Copy:
    """One of the two copies."""

    def __init__(self, model: object, helper: ThreadPoolExecutor) -> None:
        self.answer, self.fill, self.compiles = _sides(model, helper)
        self.ref: ModelRef | None = None
        self.answering = 0
        """Answers under way."""


@dataclass(frozen=True, slots=True)
class _Allowed:
    """Which versions may answer a request."""

    at_least: int | None
    exactly: int | None

    @classmethod
    def of(cls, at_least: int | None, exactly: int | None) -> _Allowed:
        for name, number in (("at_least", at_least), ("exactly", exactly)):
            if number is not None and (type(number) is not int or number < 1):
                raise ValueError(f"infer: {name}: expected the number of a version, 1 or more; found {number!r}")
        if at_least is not None and exactly is not None:
            raise ValueError(f"infer: expected at_least or exactly; found both: {at_least} and {exactly}")
        return cls(at_least, exactly)

    def check(self, ref: ModelRef) -> None:
        if self.exactly is not None and ref.version != self.exactly:
            expected = f"{ref.name}@{self.exactly}"
        elif self.at_least is not None and ref.version < self.at_least:
            expected = f"{ref.name}@{self.at_least} or newer"
        else:
            return
        raise VersionNotServedError(f"infer: expected {expected} in use; found {ref}; retry later", str(ref))


class Serving:
    """Two copies of a model: the active copy answers requests, and the inactive copy is updated (Viper, section 4.2).

    `Consumer` and `EdgeConsumer` use this class. Use `Serving` directly to serve a model without a consumer.

    Args:
        build: Function that builds a model: a Keras model, a torch module, or a `Servable`. The function is called
            twice, once for each copy.
        name: Name of the model, for error messages.
        generate: Function `generate(model, batch)` that computes the outputs of a request by several calls of
            `model(inputs)`, such as one call per token. Each call uses the version that is in use by then. None means
            one call: `model(batch)`.

    Raises:
        TypeError: if the object that `build` returns is not such a model.

    >>> class Scale:
    ...     def assign(self, tensors): self.by = tensors["by"]
    ...     def __call__(self, batch): return batch * self.by
    >>> serving = Serving(Scale, "scale")
    >>> serving.take(ModelRef("scale", 1), {"by": np.float32([3])}, ModelGraph(()))
    >>> serving.infer(np.float32([2, 4]))
    Inference(outputs=array([ 6., 12.], dtype=float32), ref=ModelRef('scale@1'), seconds=..., first=ModelRef('scale@1'))
    >>> serving.close()
    """

    def __init__(self, build: Callable[[], object], name: str, generate: Generate | None = None) -> None:
        self._name = name
        self._generate = generate
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="tensorvine-fill")
        self._active, self._other = _Copy(build(), self._helper), _Copy(build(), self._helper)
        self._changed = threading.Condition()
        self._filling = threading.Lock()
        self._sample: object = None
        self._refused: dict[ModelRef, str] = {}

    @property
    def ref(self) -> ModelRef | None:
        """The version in use, which answers requests. None before the first version."""
        return self._active.ref

    def take(self, ref: ModelRef, tensors: Mapping[str, np.ndarray], graph: ModelGraph) -> None:
        """Write a version to the inactive copy of the model, then activate this copy.

        If the version does not fit the model, the previous version stays in use. A version for a `Servable` is checked
        only by `Servable.assign`.

        Args:
            ref: Reference of the version.
            tensors: Mapping of tensor names to arrays.
            graph: Architecture of the version. If the graph has no layers, the architecture is not checked.

        Raises:
            GraphError: if the architectures of the version and the model differ, or if a Keras layer cannot restore its
                state (data of the layer other than weights, such as a vocabulary).
            TensorNotFoundError: if the version lacks a tensor of the model, or has a tensor that the model lacks.
            TensorMismatchError: if a tensor has a shape or dtype that differs from the model's tensor of the same name,
                or a torch module rejects the tensors.
            Exception: any error that `Servable.assign` raises.
            OperationTimeoutError: if the inactive copy still processes earlier requests after 60 seconds.
        """
        with self._filling:
            copy = self._other
            with self._changed:
                if not self._changed.wait_for(lambda: not copy.answering, QUIET_S):
                    raise OperationTimeoutError(
                        f"update to {ref}: expected the requests to {copy.ref} to end within {QUIET_S} s; "
                        f"{copy.answering} are still running"
                    )
            first = copy.ref is None
            void = copy.fill(tensors, graph)
            copy.ref = ref
            if (first or void) and copy.compiles and self._sample is not None:
                copy.answer(self._sample)  # it compiles at its first answer: now, and not when somebody waits
            with self._changed:
                self._active, self._other = copy, self._active
                self._changed.notify_all()

    @property
    def refused(self) -> dict[ModelRef, str]:
        """The last 64 versions passed to `refuse`, each with its reason."""
        with self._changed:
            return dict(self._refused)

    def refuse(self, ref: ModelRef, why: str) -> None:
        """Record why a version does not fit the model.

        `refused` contains the reason. The timeout errors of `infer` and `wait_for` contain the last reason.
        """
        with self._changed:
            self._refused[ref] = why
            if len(self._refused) > KEPT_REFUSED:
                del self._refused[next(iter(self._refused))]

    def infer(
        self, batch: object, timeout: float = 30.0, *, at_least: int | None = None, exactly: int | None = None
    ) -> Inference:
        """Compute the outputs of the model for a batch, with the version in use.

        Args:
            batch: Input of the model, passed as one argument. For a torch module: an array, a tensor, a nested list of
                numbers, or a dict or tuple of these. The input is moved to the module's device.
            timeout: Seconds to wait for the first version. Once a version is in use, calls do not wait.
            at_least: Number of the oldest version that may compute the outputs. None means any version.
            exactly: Number of the only version that may compute the outputs. None means any version.

        Raises:
            ValueError: if both `at_least` and `exactly` are given, one of them is not a positive integer, or `generate`
                did not call the model.
            VersionNotServedError: if another version is in use than `at_least` or `exactly` allows. Retry later.
            OperationTimeoutError: if no version is available in time. If versions were refused, the message contains
                the reason for the last refusal.
            Exception: any error that the model raises.
        """
        allowed = _Allowed.of(at_least, exactly)
        begun = time.perf_counter()
        used: list[ModelRef] = []

        def call(given: object) -> object:
            with self._in_use(allowed, timeout) as (copy, ref):
                used.append(ref)
                return self._answer(copy, given)

        if self._generate is None:
            outputs = call(batch)
        elif exactly is None:
            outputs = self._generate(call, batch)
        else:
            with self._in_use(allowed, timeout) as (copy, ref):  # an update cannot replace it before the last call
                used.append(ref)
                outputs = self._generate(lambda given: self._answer(copy, given), batch)
        if not used:
            raise ValueError(f"infer: expected generate= of {self._name!r} to call the model; it made no call")
        return Inference(outputs, used[-1], time.perf_counter() - begun, used[0])

    @contextmanager
    def _in_use(self, allowed: _Allowed, timeout: float) -> Generator[tuple[_Copy, ModelRef]]:
        """Keep the copy in use from being updated."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._active.ref is not None, timeout):
                raise OperationTimeoutError(
                    f"infer: expected a first version of {self._name!r} within {timeout} s; found none{self._why()}"
                )
            copy, ref = self._active, cast("ModelRef", self._active.ref)
            allowed.check(ref)
            copy.answering += 1
        try:
            yield copy, ref
        finally:
            with self._changed:
                copy.answering -= 1
                self._changed.notify_all()

    def _answer(self, copy: _Copy, given: object) -> object:
        outputs = copy.answer(given)
        self._sample = given if copy.compiles else None
        return outputs

    def wait_for(self, version: int, timeout: float) -> ModelRef:
        """Wait until version number `version` or a newer version is in use.

        Args:
            version: Number of the version.
            timeout: Seconds to wait.

        Returns:
            The version in use.

        Raises:
            OperationTimeoutError: if neither `version` nor a newer version is in use in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.ref is not None and self.ref.version >= version, timeout)
            if self.ref is None or self.ref.version < version:
                raise OperationTimeoutError(
                    f"expected {self._name}@{version} or newer to answer within {timeout} s; "
                    f"found {self.ref}{self._why()}"
                )
            return self.ref

    def _why(self) -> str:
        """Return the end of a message that no version came: the last one that was refused."""
        if not self._refused:
            return ""
        ref, why = list(self._refused.items())[-1]
        return f"; {ref} was refused: {why}"

    def close(self) -> None:
        """Stop the background thread that `take` uses to copy tensors. Do not call `take` afterwards."""
        self._helper.shutdown()


_Sides = tuple[Callable[[object], object], Callable[[Mapping[str, np.ndarray], ModelGraph], bool | None], bool]


def _sides(model: Any, helper: ThreadPoolExecutor) -> _Sides:
    """Return how a model answers, how it is filled, and whether it compiles at its first answer."""
    roots = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    if not roots & {"keras", "torch"}:
        if isinstance(model, Servable):
            return model, lambda tensors, _: model.assign(tensors), False
        raise TypeError(
            "build: expected a Keras model, a torch module, or an object with assign(tensors) and a call; "
            f"found {type(model).__name__}"
        )
    filler = Filler(model, helper)
    if "torch" in roots:
        return _torch_answer(model), filler.fill, False
    return model.predict_on_batch, filler.fill, True


def _torch_answer(module: nn.Module) -> Callable[[object], object]:
    import torch

    module.eval()

    def arrays(outputs: object) -> object:
        if isinstance(outputs, torch.Tensor):
            return outputs.cpu().numpy()
        if isinstance(outputs, dict):
            return {name: arrays(output) for name, output in cast("dict[object, object]", outputs).items()}
        if isinstance(outputs, (list, tuple)):
            several = cast("list[object] | tuple[object, ...]", outputs)
            return type(several)(map(arrays, several))
        return outputs

    def moved(batch: object, device: torch.device) -> object:
        if isinstance(batch, dict):
            return {name: moved(part, device) for name, part in cast("dict[object, object]", batch).items()}
        if isinstance(batch, tuple):
            return tuple(moved(part, device) for part in cast("tuple[object, ...]", batch))
        if batch is None or isinstance(batch, str):
            return batch
        return (batch if isinstance(batch, torch.Tensor) else torch.as_tensor(np.asarray(batch))).to(device)

    def answer(batch: object) -> object:
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        with torch.inference_mode():
            return arrays(module(moved(batch, device)))

    return answer
