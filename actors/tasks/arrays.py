"""Stored tensors as Dask's arrays: each chunk is read by the task that needs it, in the process where that runs.

Rules
- Nothing is read when the arrays are made, but the version's table. What Dask cuts off a chunk is not read either.
- A chunk is a view of the shard's memory where its node is the task's, as of `Repository.load`: read-only, without a
  copy. From another node the tensor that it is a part of travels whole, once for all of its chunks that a process has
  at a time.
- A task reads of the start of the repository that was asked, or fails: another one of its name may have other bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ...store.arrays import dtype_of
from ...store.errors import EngineUnavailableError, TensorMismatchError, TensorNotFoundError
from ...store.lazy import to_install
from ...store.refs import Model, ModelRef
from ...store.waiting import seconds_of
from ..client.repository import Repository
from .connection import connected, start_of

if TYPE_CHECKING:
    from dask.array import Array


class StoredTensor:
    """A tensor of a version, of which tasks read slices; `dask.array.from_array` takes it.

    Args:
        repository: where it is. A task in another process has its own connection.
        ref: the version.
        name: the tensor's.
        shape: its own.
        dtype: its own.
        timeout: seconds for each read.
    """

    def __init__(
        self,
        repository: Repository,
        ref: ModelRef,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[np.generic],
        timeout: float,
    ) -> None:
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)
        self._repository: Repository | None = repository
        self._source = repository.name, start_of(repository)
        self._ref, self._name, self._timeout = ref, name, timeout

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_repository": None}

    def __getitem__(self, index: Any) -> Any:
        repository = self._repository or connected(*self._source)
        return repository.load(self._ref, tensors=[self._name], timeout=self._timeout)[self._name][index]

    @property
    def key(self) -> str:
        """Name its chunks in a graph: the same for the same tensor, which never changes."""
        return "-".join((*self._source, str(self._ref), self._name))


def load_arrays(
    repository: Repository,
    model: Model,
    *,
    tensors: Sequence[str] | None = None,
    chunks: object = None,
    timeout: float = 60.0,
) -> dict[str, Array]:
    """Return tensors of a version as Dask arrays. Each chunk is read by the Dask task that needs the chunk.

    The tasks run on Dask workers, in threads of this process, or on Ray workers. If the version is retired before a
    task reads a chunk, the task raises `ModelNotFoundError`.

    Args:
        repository: Repository that contains the version.
        model: The version. A name without a version number means the latest version at the time of this call.
        tensors: Names of the tensors. None means all tensors.
        chunks: Chunks in any form that `dask.array.from_array` accepts, or a mapping of tensor names to such chunks.
            None divides a tensor along its first axis, according to Dask's option `array.chunk-size`. Tensors that are
            missing from the mapping are divided as with None.
        timeout: Seconds to wait for each read.

    Returns:
        A mapping of tensor names to Dask arrays.

    Raises:
        ModelNotFoundError: if the version does not exist or was retired.
        TensorNotFoundError: if `tensors` or `chunks` contains a name that the version does not have.
        TensorMismatchError: if a tensor cannot be divided into the given chunks.
        EngineUnavailableError: if `dask.array` is not installed.

    >>> with Repository.connect("docs") as repo:                                  # doctest: +SKIP
    ...     load_arrays(repo, "m")["w"].sum().compute()
    np.float32(0.0)
    """
    array = dask_array("load_arrays")
    seconds, where = seconds_of(timeout), f"load_arrays of {model}"
    ref, table = repository._table(model)
    names = list(table) if tensors is None else _names(tensors, where)
    by_name = _by_name(chunks)
    unknown = [name for name in (*names, *by_name) if name not in table]
    if unknown:
        raise TensorNotFoundError(f"{where}: expected names of its {len(table)} tensors; found {unknown}")
    made: dict[str, Array] = {}
    for name in names:
        entry = table[name]
        stored = StoredTensor(repository, ref, name, entry.shape, dtype_of(entry.dtype), seconds)
        asked = cut = by_name.get(name) if by_name else chunks
        if cut is None:
            asked = cut = ("auto", *(-1,) * (stored.ndim - 1))[: stored.ndim]
        try:
            cut = array.core.normalize_chunks(cut, stored.shape, dtype=stored.dtype)
            made[name] = array.from_array(
                stored,
                cut,
                name=f"{stored.key}-{array.core.tokenize(cut)}",
                asarray=False,
                inline_array=True,
                meta=np.empty((0,) * stored.ndim, stored.dtype),
            )
        except (NotImplementedError, TypeError, ValueError) as exc:
            raise TensorMismatchError(
                f"{where}: chunks of {name!r}: expected chunks that dask.array.from_array accepts for {entry.shape}; "
                f"found {asked!r:.100}: {exc}"
            ) from exc
    return made


def dask_array(what: str) -> Any:
    """Return `dask.array`.

    Raises:
        EngineUnavailableError: it is not installed; names `what`.
    """
    try:
        from dask import array
    except ModuleNotFoundError as exc:
        raise EngineUnavailableError(
            f"{what}: expected the packages of dask; found no {exc.name}: {to_install('dask')}"
        ) from exc
    return array


def _by_name(chunks: object) -> Mapping[str, object]:
    """Return tensor -> its chunks, if they are told so: a mapping of axes is Dask's."""
    if not isinstance(chunks, Mapping):
        return {}
    told = cast("Mapping[object, object]", chunks)
    return {key: cut for key, cut in told.items() if isinstance(key, str)}


def _names(tensors: object, where: str) -> list[str]:
    if isinstance(tensors, str) or not isinstance(tensors, Sequence):
        raise TensorNotFoundError(f"{where}: tensors=: expected a sequence of names; found {tensors!r:.100}")
    return list(cast("Sequence[str]", tensors))
