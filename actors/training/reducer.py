"""The ranks' gradients averaged beside the backward pass.

Rules
- Gradients lie in buckets, in the order of the backward pass. One thread reduces bucket after bucket, in this order on
  all ranks, each as soon as it is complete: so the ranks' calls match whatever the order in which gradients come.
- A bucket of several gradients goes through one flat buffer that is kept, with a copy in and a copy out; a gradient
  alone in its bucket is reduced where it lies.
- Buckets depend on nothing but sizes and dtypes: the same gradients give the same bits in each run.
- A failure comes out of every wait, and no step begins after it: ranks that are out of step stay so.
- One rank has nobody to wait for: nothing is copied, and no thread is started.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from ...store.arrays import dtype_of
from ...store.errors import OperationTimeoutError, PeerLostError, TensorMismatchError
from ..collective.buffers import typed
from ..collective.group import Group

BUCKET_BYTES = 4 << 20
"""Bytes of a bucket: large enough that its latency does not count, small enough that the first is soon complete."""
CLOSE_S = 1.0
"""How long `close` waits for a bucket that is being reduced."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are reduced at once."""

    members: tuple[int, ...]
    """In the order of the backward pass, one after the other."""
    nbytes: int


def buckets_of(sizes: Sequence[int], dtypes: Sequence[str], most: int) -> list[Bucket]:
    """Put gradients into buckets of one dtype each.

    Args:
        sizes: bytes of each gradient, in the order of the backward pass.
        dtypes: their names; as many.
        most: bytes of a bucket at most; a gradient that is larger has a bucket of its own.

    Returns:
        Buckets, in the order in which they are complete when gradients come in theirs.

    >>> [bucket.members for bucket in buckets_of([6, 3, 3, 9], ["float32"] * 4, 8)]
    [(0,), (1, 2), (3,)]
    >>> [bucket.members for bucket in buckets_of([2, 2, 2], ["float32", "float16", "float32"], 8)]
    [(1,), (0, 2)]
    """
    done: list[Bucket] = []
    open_: dict[str, tuple[list[int], int]] = {}
    for index, (nbytes, dtype) in enumerate(zip(sizes, dtypes, strict=True)):
        members, filled = open_.get(dtype, ([], 0))
        if members and filled + nbytes > most:
            done.append(Bucket(tuple(members), filled))
            members, filled = [], 0
        open_[dtype] = ([*members, index], filled + nbytes)
    done += [Bucket(tuple(members), filled) for members, filled in open_.values()]
    return sorted(done, key=lambda bucket: bucket.members[-1])


class Reducer:
    """Averages one rank's gradients with those of its peers; any thread may call it.

    Args:
        group: the ranks' group; None: a single rank.
        sizes: bytes of each gradient, in the order of the backward pass; the same on all ranks.
        bucket_bytes: of a bucket at most.
        dtypes: names of the gradients' dtypes; None: all are float32.
        names: what errors call the gradients; None: their numbers.

    Raises:
        ValueError: unequal numbers of sizes, dtypes and names, or a size that is negative.

    >>> gradients = [np.ones(4, np.float32), np.ones(2, np.float32)]
    >>> with Reducer(None, [array.nbytes for array in gradients]) as reducer:
    ...     reducer.begin()
    ...     for index, gradient in enumerate(gradients):
    ...         reducer.ready(index, gradient)
    ...     reducer.wait_all()
    """

    def __init__(
        self,
        group: Group | None,
        sizes: Sequence[int],
        bucket_bytes: int = BUCKET_BYTES,
        *,
        dtypes: Sequence[str] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        dtypes = ["float32"] * len(sizes) if dtypes is None else dtypes
        names = [str(index) for index in range(len(sizes))] if names is None else names
        if not len(sizes) == len(dtypes) == len(names) or min(sizes, default=0) < 0 or bucket_bytes < 1:
            raise ValueError(
                f"reducer: expected a dtype and a name for each size, sizes from 0 and buckets from 1 byte; found "
                f"{len(sizes)} sizes, {len(dtypes)} dtypes, {len(names)} names, buckets of {bucket_bytes} bytes"
            )
        self._group = group if group is not None and group.size > 1 else None
        self._sizes, self._dtypes, self._names = list(sizes), [dtype_of(name) for name in dtypes], list(names)
        self._where = f"gradients of {group.name!r}, rank {group.rank}" if group is not None else "gradients"
        self._buckets = buckets_of(sizes, dtypes, bucket_bytes)
        shared = [bucket.nbytes for bucket in self._buckets if len(bucket.members) > 1]
        self._flat = np.zeros(max(shared, default=0) if self._group is not None else 0, np.uint8)
        self._changed = threading.Condition()
        self._arrays: dict[int, np.ndarray] = {}
        """Those of this step that are ready."""
        self._reduced: set[int] = set()
        self._begun = False
        """A step has begun, and not all of it is reduced."""
        self._error: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begin a step.

        Raises:
            PeerLostError: an earlier step failed, or was not finished: the ranks are not in step any more.
        """
        if self._group is None:
            return
        with self._changed:
            self._check()
            if self._begun:
                raise PeerLostError(
                    f"{self._where}: expected all gradients of the previous step; {self._missing()} are missing"
                )
            self._arrays, self._reduced, self._begun = {}, set(), bool(self._buckets)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tensorvine-reduce", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def ready(self, index: int, array: object) -> None:
        """Tell that a gradient is final; returns at once.

        Args:
            index: its place in `sizes`.
            array: NumPy's, or any that is contiguous and writable in this machine's memory. It must not be touched
                until `wait` has returned; then it holds the mean.

        Raises:
            ValueError: there is no such gradient, it came before in this step, or no step has begun.
            TensorMismatchError: another size or dtype, or nothing that can be written to.
            PeerLostError, OperationTimeoutError: the group is broken.
        """
        if self._group is None:
            return
        if not 0 <= index < len(self._sizes):
            raise ValueError(f"{self._where}: expected a gradient's index below {len(self._sizes)}; found {index}")
        memory = typed(array, f"gradient {self._names[index]!r}")
        if (memory.nbytes, memory.dtype) != (self._sizes[index], self._dtypes[index]):
            raise TensorMismatchError(
                f"{self._where}: gradient {self._names[index]!r}: expected {self._sizes[index]} bytes of "
                f"{self._dtypes[index].name}; found {memory.nbytes} of {memory.dtype.name}"
            )
        with self._changed:
            self._check()
            if not self._begun or index in self._arrays:
                found = "it twice in a step" if self._begun else "it before begin()"
                raise ValueError(f"{self._where}: gradient {self._names[index]!r}: expected it once; found {found}")
            self._arrays[index] = memory
            self._changed.notify_all()

    def wait(self, index: int, timeout: float | None = None) -> None:
        """Wait until a gradient's memory holds the mean of the ranks'.

        Args:
            index: its place in `sizes`.
            timeout: seconds; None: so long that the group's own timeout is noticed first.

        Raises:
            OperationTimeoutError: it, or one that goes before it, never came; names them, or the peer that is silent.
            PeerLostError: a peer died or left; names it.
            TensorVineError: what else the group raised.
        """
        self._wait(lambda: index in self._reduced, f"gradient {self._names[index]!r}", timeout)

    def wait_all(self, timeout: float | None = None) -> None:
        """Wait until all gradients' memory holds the mean of the ranks'; arguments and errors as in `wait`."""
        self._wait(lambda: not self._begun, "all gradients", timeout)

    def close(self) -> None:
        """Let go of the gradients; who waits gets an error. The group is its owner's to close."""
        with self._changed:
            self._closed = True
            self._arrays = {}
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self, ended: Callable[[], bool], what: str, timeout: float | None) -> None:
        if self._group is None:
            return
        allowed = 2 * self._group.timeout if timeout is None else timeout
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._closed or ended(), allowed)
            if ended():
                return
            self._check()
            raise OperationTimeoutError(
                f"{self._where}: expected the mean of {what} within {allowed:.1f} s; "
                + (f"{missing} are missing" if (missing := self._missing()) else "other ranks are late")
            )

    def _check(self) -> None:
        """Raise what ended it. The lock is held."""
        if self._error is not None:
            raise self._error
        if self._closed:
            raise PeerLostError(f"{self._where}: expected an open reducer; it was closed")

    def _missing(self) -> str:
        """Name the gradients that have not come in this step. The lock is held."""
        names = [name for index, name in enumerate(self._names) if index not in self._arrays]
        return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

    def _run(self) -> None:
        """Reduce step after step, until a failure or the end."""
        try:
            while True:
                for bucket in self._buckets:
                    arrays = self._complete(bucket)
                    if arrays is None:
                        return
                    self._reduce(bucket, arrays)
                    with self._changed:
                        self._reduced.update(bucket.members)
                        self._begun = len(self._reduced) < len(self._sizes)
                        self._arrays = self._arrays if self._begun else {}
                        self._changed.notify_all()
        except BaseException as exc:  # noqa: BLE001  handed to the caller that waits
            with self._changed:
                self._error = exc
                self._changed.notify_all()

    def _complete(self, bucket: Bucket) -> list[np.ndarray] | None:
        """Wait for a bucket's gradients; None: it was closed."""

        def complete() -> bool:
            return self._begun and all(index in self._arrays for index in bucket.members)

        with self._changed:
            self._changed.wait_for(lambda: self._closed or complete())
            return None if self._closed else [self._arrays[index] for index in bucket.members]

    def _reduce(self, bucket: Bucket, arrays: Sequence[np.ndarray]) -> None:
        if self._group is None or not bucket.nbytes:
            return
        if len(arrays) == 1:
            self._group.all_reduce(arrays[0], "mean")
            return
        flat = self._flat[: bucket.nbytes].view(arrays[0].dtype)
        parts = np.split(flat, np.cumsum([array.size for array in arrays])[:-1])
        for part, array in zip(parts, arrays, strict=True):
            np.copyto(part, array)
        self._group.all_reduce(flat, "mean")
        for part, array in zip(parts, arrays, strict=True):
            np.copyto(array, part)
