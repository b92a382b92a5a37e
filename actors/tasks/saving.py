"""Dask's arrays as tensors of a version: each chunk goes from the process that has it to the shard.

Rules
- No process gathers an array: the shard has memory for it as soon as its save begins, and fetches each chunk to where
  it belongs when the task of that chunk says so (`client.save.place`).
- Nothing is visible before the commit, which follows when all chunks are there. A task that fails fails the save, and
  nothing of it remains.
- Chunks may come twice, as Dask does a task again whose worker it has lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, cast

import numpy as np

from ...store.arrays import as_numpy, dtype_name
from ...store.errors import OperationTimeoutError, TensorMismatchError, TensorVineError
from ...store.graphs.graph import ModelGraph
from ...store.refs import Model
from ...store.waiting import Deadline
from ..client.repository import Repository
from ..client.save.place import Place
from ..client.save.request import Saved
from .arrays import dask_array
from .connection import connected, start_of


class PlacedTensor:
    """A tensor that is being saved, of which tasks bring slices.

    Args:
        where: names the tensor in errors.
        repository: where it is saved. A task in another process has its own connection.
        place: the tensor's.
        dtype: its own.
        timeout: seconds for each slice.
    """

    def __init__(
        self, where: str, repository: Repository, place: Place, dtype: np.dtype[np.generic], timeout: float
    ) -> None:
        self._where = where
        self._repository: Repository | None = repository
        self._source = repository.name, start_of(repository)
        self._place, self._dtype, self._timeout = place, dtype, timeout

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_repository": None}

    def bring(self, start: tuple[int, ...], shape: tuple[int, ...], chunk: object) -> None:
        """Save the chunk that starts at `start` and has this shape.

        Raises:
            TensorMismatchError: it is of another dtype or shape.
            TensorVineError: see `Place.bring`.
        """
        array = as_numpy(chunk, f"{self._where}: a chunk")
        if array.dtype != self._dtype:
            raise TensorMismatchError(
                f"{self._where}: expected chunks of {dtype_name(self._dtype)}, as in their array; found "
                f"{dtype_name(array.dtype)}"
            )
        if array.shape != shape:
            raise TensorMismatchError(
                f"{self._where}: expected a chunk of shape {shape} at {start}, as in its array; found {array.shape}"
            )
        repository = self._repository or connected(*self._source)
        self._place.bring(repository._session, start, array, self._timeout)


def save_arrays(
    repository: Repository,
    name: str,
    arrays: Mapping[str, object],
    *,
    graph: ModelGraph | None = None,
    parent: Model | None = None,
    quality: float | None = None,
    metadata: Mapping[str, object] | None = None,
    durability: Literal["memory", "disk"] = "memory",
    timeout: float = 600.0,
) -> Saved:
    """Save a new version of a model from Dask arrays, without collecting the arrays in one process.

    The current Dask scheduler computes the arrays, on a cluster or in threads of this process. A task that several
    arrays share runs once. All tensors are written, even if the parent has equal tensors. Other saves of this client,
    including saves that the tasks make, do not wait for this save.

    If the call raises an exception, threads of this process may continue until their current chunks are computed.

    Args:
        repository: Repository in which to save.
        name: Name of the model.
        arrays: Mapping of tensor names to Dask arrays, or to arrays that `Repository.save` accepts.
        graph: Architecture of the model, as in `Repository.save`.
        parent: Version from which the new version derives, as in `Repository.save`.
        quality: A number, as in `Repository.save`. Higher is better.
        metadata: Mapping of keys to JSON values to store with the version, as in `Repository.save`.
        durability: `"memory"` or `"disk"`, as in `Repository.save`.
        timeout: Seconds to wait for the save, including the computation of the arrays.

    Returns:
        The new version, and the number of bytes written. The number of bytes inherited is always 0.

    Raises:
        TensorMismatchError: if the length of a chunk is unknown, or if the dtype or shape of a computed chunk differs
            from the metadata of the Dask array.
        OperationTimeoutError: if the save takes longer than `timeout`.
        EngineUnavailableError: if `dask.array` is not installed.
        TensorVineError: the errors of `Repository.save`.
        Exception: any error that a task raises.

    >>> import dask.array
    >>> with Repository.connect("docs") as repo:                                  # doctest: +SKIP
    ...     save_arrays(repo, "m", {"w": dask.array.ones((1000, 100), chunks=100)}).bytes_written
    800000
    """
    where = f"save_arrays of {name!r}"
    if not isinstance(arrays, Mapping):
        raise TensorMismatchError(
            f"{where}: arrays: expected a mapping of names to arrays; found {type(arrays).__name__}"
        )
    sources = {tensor: _as_dask(value, f"{where}: tensor {tensor!r}") for tensor, value in arrays.items()}
    compute = _Computation(where)

    like = {
        tensor: np.broadcast_to(np.zeros((), source.dtype.newbyteorder("=")), source.shape)
        for tensor, source in sources.items()
    }

    def bring(places: Mapping[str, Place], deadline: Deadline) -> None:
        left = deadline.left()
        placed = {
            tensor: PlacedTensor(f"{where}: tensor {tensor!r}", repository, place, like[tensor].dtype, left)
            for tensor, place in places.items()
        }
        compute.run([task for tensor, target in placed.items() for task in _tasks(sources[tensor], target)], deadline)

    pending = repository._submit(
        name,
        like,
        graph,
        parent=parent,
        inherit=None,
        quality=quality,
        metadata=metadata,
        durability=durability,
        timeout=timeout,
        bring=bring,
        until="committed",
    )
    return pending.committed()


class _Computation:
    """Dask's scheduler that is current where this is made, for another thread.

    Args:
        what: names it in errors.
    """

    def __init__(self, what: str) -> None:
        import dask.base

        self._what = what
        self._get = cast(Any, dask.base).get_scheduler()
        client: Any = getattr(self._get, "__self__", None)  # the client whose method it is
        self._client = client if hasattr(client, "compute") else None

    def run(self, tasks: Sequence[Any], deadline: Deadline) -> None:
        """Carry tasks out.

        Args:
            tasks: delayed ones.
            deadline: until when.

        Raises:
            OperationTimeoutError: it took longer.
            Exception: what a task raised.
        """
        work = _delayed(len)(tasks)
        if self._client is None:
            work.compute(scheduler=self._get)
            return
        future = self._client.compute(work)
        try:
            future.result(timeout=deadline.left_for(self._what))
        except TensorVineError:
            raise
        except TimeoutError as exc:
            raise OperationTimeoutError(f"{self._what}: expected all chunks to be saved in time; some are not") from exc
        finally:
            future.cancel()  # what was done stays done


def _tasks(source: Any, placed: PlacedTensor) -> Iterator[Any]:
    """Give the delayed tasks that bring an array, chunk by chunk.

    Graphs are taken as they are: optimized one by one, each array would compute anew what it has in common with others.
    """
    bring = _delayed(PlacedTensor.bring)
    starts: list[list[int]] = [list(accumulate(axis, initial=0)) for axis in source.chunks]
    chunks: np.ndarray = source.to_delayed(optimize_graph=False)
    for where, chunk in np.ndenumerate(chunks):
        number = cast("tuple[int, ...]", where)
        start = tuple(at[n] for at, n in zip(starts, number, strict=True))
        shape = tuple(int(lengths[n]) for lengths, n in zip(source.chunks, number, strict=True))
        yield bring(placed, start, shape, chunk)


def _delayed(function: Callable[..., Any]) -> Any:
    import dask

    return cast(Any, dask).delayed(function, pure=False)


def _as_dask(value: Any, where: str) -> Any:
    """Return an array of Dask, whose chunks have lengths that are known."""
    array = dask_array(where)
    if not isinstance(value, array.Array):
        return array.from_array(as_numpy(value, where), -1)
    if any(np.isnan(length) for axis in value.chunks for length in axis):
        raise TensorMismatchError(
            f"{where}: expected chunks whose lengths are known; found {value.chunks}: call compute_chunk_sizes()"
        )
    return value
