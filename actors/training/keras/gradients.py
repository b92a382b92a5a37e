"""Gradients of a compiled training step, averaged over the ranks while the backward pass goes on.

Rules
- Gradients lie in buckets, in the order of the backward pass. The step calls Python twice for a bucket: when it is
  complete, and `LAG` buckets later to wait for its mean. TensorFlow makes these calls one after the other, in the order
  in which they were traced; so one thread at most waits while others compute, and there is always a bucket to reduce.
- A gradient is copied once into its bucket's memory, which is kept, and once out of it.
- A weight that has no gradient counts as zeros, and still has none afterwards. Sparse gradients are made dense.
"""

# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false, reportPrivateImportUsage=false
# pyright: reportAttributeAccessIssue=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (keras's and tensorflow's types are partial)

from __future__ import annotations

import math
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from ....store.arrays import Array, as_numpy, dtype_name, dtype_of
from ...collective.group import Group
from ..reducer import BUCKET_BYTES, Reducer, buckets_of
from .hooks import Failure, call_python
from .state import KerasState

LAG = 2
"""Buckets that are being reduced while the next one is computed."""


class Gradients:
    """The ranks' means of the gradients of a model's weights.

    Args:
        state: the training's.
        group: the ranks'.
        failure: keeps what goes wrong within a step.
    """

    def __init__(self, state: KerasState, group: Group, failure: Failure) -> None:
        self._where = state.where
        weights = [state.variables[name] for name in state.trained]
        self._places = {id(weight): place for place, weight in enumerate(weights)}
        dtypes = [dtype_name(weight.dtype) for weight in weights]
        sizes = [math.prod(weight.shape) for weight in weights]
        nbytes = [size * dtype_of(dtype).itemsize for size, dtype in zip(sizes, dtypes, strict=True)]
        buckets = buckets_of(nbytes, dtypes, BUCKET_BYTES)
        self._reducer = Reducer(
            group,
            [bucket.nbytes for bucket in buckets],
            1,
            dtypes=[dtypes[bucket.members[0]] for bucket in buckets],
            names=[state.trained[bucket.members[0]] for bucket in buckets],
        )
        self._buckets = [
            _Bucket(self, place, [weights[member] for member in bucket.members], dtypes[bucket.members[0]])
            for place, bucket in enumerate(buckets)
        ]
        self._failure = failure

    def begin(self) -> None:
        """Begin a step; errors as in `Reducer.begin`."""
        self._reducer.begin()

    def trace(
        self, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None], weights: Sequence[object]
    ) -> list[tf.Tensor | None]:
        """Add the reduction to the step that is being traced.

        Args:
            gradients: of the weights; None where there is none.
            weights: in any order.

        Returns:
            The means, in the order of `gradients`.
        """
        given = {self._places[id(weight)]: gradient for weight, gradient in zip(weights, gradients, strict=True)}
        means: dict[int, tf.Tensor] = {}
        waiting: list[_Bucket] = []
        for bucket in self._buckets:
            own = [given.get(self._places[id(weight)]) for weight in bucket.weights]
            call_python(bucket.ready, [_dense(*pair) for pair in zip(own, bucket.weights, strict=True)])
            waiting.append(bucket)
            if len(waiting) > LAG:
                means |= self._mean(waiting.pop(0))
        for bucket in waiting:
            means |= self._mean(bucket)
        return [
            None if gradient is None else means[self._places[id(weight)]]
            for weight, gradient in zip(weights, gradients, strict=True)
        ]

    def finish(self) -> None:
        """Wait for what the step did not wait for; errors as in `Reducer.wait_all`."""
        self._reducer.wait_all()

    def close(self) -> None:
        """Let go of the reducer."""
        self._reducer.close()

    def ready(self, place: int, bucket: _Bucket, gradients: Sequence[object]) -> None:
        """Take a bucket's gradients, from a thread of TensorFlow's."""
        with self._failure.kept():
            for part, gradient in zip(bucket.parts, gradients, strict=True):
                np.copyto(part, as_numpy(gradient, f"{self._where}: a gradient"))
            self._reducer.ready(place, bucket.flat)

    def wait(self, place: int) -> None:
        """Wait for a bucket's mean, in a thread of TensorFlow's."""
        with self._failure.kept():
            self._reducer.wait(place)

    def _mean(self, bucket: _Bucket) -> dict[int, tf.Tensor]:
        outputs = call_python(bucket.mean, outputs=[weight.value.dtype for weight in bucket.weights])
        for output, weight in zip(outputs, bucket.weights, strict=True):
            output.set_shape(weight.shape)
        return {self._places[id(weight)]: output for output, weight in zip(outputs, bucket.weights, strict=True)}


class _Bucket:
    """Gradients that are reduced at once, in memory of their own."""

    def __init__(self, owner: Gradients, place: int, weights: list[keras.Variable], dtype: str) -> None:
        self._owner, self._place = owner, place
        self.weights = weights
        sizes = [math.prod(weight.shape) for weight in weights]
        self.flat = np.zeros(sum(sizes), dtype_of(dtype))
        ends = np.cumsum(sizes)
        self.parts: list[Array] = [
            self.flat[end - size : end].reshape(tuple(weight.shape))
            for size, end, weight in zip(sizes, ends, weights, strict=True)
        ]

    def ready(self, *gradients: object) -> None:
        """Take the gradients."""
        self._owner.ready(self._place, self, gradients)

    def mean(self) -> list[Array]:
        """Wait for their means, and give them."""
        self._owner.wait(self._place)
        return self.parts


def _dense(gradient: tf.Tensor | tf.IndexedSlices | None, weight: keras.Variable) -> tf.Tensor:
    if gradient is None:
        return tf.zeros_like(weight.value)
    return tf.convert_to_tensor(gradient)
