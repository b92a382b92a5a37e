"""The calls of PyTorch's `ProcessGroupGloo` that a group needs.

Rules
- PyTorch's default process group is neither used nor touched.
- Waits are in whole milliseconds, and 0 would be for ever: each is at least one.
- Gloo ends the process where a message is longer than the memory that is to receive it. So a message's tag is made of
  its number between two ranks, its size and its dtype: under another tag Gloo finds nobody, in time. Collectives have
  no such tags: all ranks must bring the same.
- Nothing but a wait that fails makes Gloo end its connections, all of the group at once. So that is what cuts them: a
  wait for what nobody sends.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterable, Mapping
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ....store.waiting import Deadline
from ..member import TimedOutError
from .store import Values, store_of

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Work

NATIVE = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
"""Dtypes that Gloo reduces; NumPy and PyTorch call them alike."""
OPS = {"sum": "SUM", "mean": "SUM", "min": "MIN", "max": "MAX", "product": "PRODUCT"}
"""Gloo has no mean."""
MESSAGE, PART = 0, 1
"""What a tag is for: a message, or the part of an all-gather."""
_TAGS = 2**30 - 35
"""Tags of either kind: a prime, over which numbers and sizes spread."""
_SPREAD = 618_033_989
_NOBODYS = 2**31 - 1
"""A tag that nobody sends."""
_LATE = re.compile("timed out|wait timeout", re.IGNORECASE)

Bytes = NDArray[np.uint8]
Library = Any
"""A `ProcessGroupGloo`, whose calls PyTorch's own stubs lack."""
Handle: TypeAlias = "Work"
"""PyTorch's end of something under way. It keeps the memory, but not against being forgotten itself."""

_IMPORTING = threading.Lock()
"""Held while PyTorch is imported: two threads that do it at once may find half of it."""


def load() -> None:
    """Import PyTorch, which takes seconds.

    Raises:
        ImportError: it is not installed, or without Gloo.
    """
    with _IMPORTING:
        _c10d()


def connected(rank: int, size: int, host: str, values: Values, deadline: Deadline) -> Library:
    """Connect the members.

    Args:
        rank: this member.
        size: how many there are.
        host: address of this machine.
        values: where they tell each other how their ends are reached.
        deadline: until when all must be there.

    Raises:
        RuntimeError: PyTorch's, also where the deadline has passed.
        TimedOutError: a member did not tell in time.
        ConnectionError: a member was lost, or the group broke.
    """
    gloo = _c10d().ProcessGroupGloo
    options = gloo._Options()
    options._timeout = _limit(deadline)
    options._devices = [gloo.create_device(hostname=host, lazy_init=False)]
    store = store_of(values, deadline)
    return gloo(store, rank, size, options)


def send(library: Library, memory: Bytes, peer: int, number: int, kind: int = MESSAGE, code: int = 0) -> Handle:
    """Start to send the so-many-th message to a rank; `code` says its dtype."""
    return library.send([_tensor(memory)], peer, _tag(number, memory.nbytes, kind, code))


def receive(library: Library, memory: Bytes, peer: int, number: int, kind: int = MESSAGE, code: int = 0) -> Handle:
    """Start to receive the so-many-th message of a rank; `code` says its dtype."""
    return library.recv([_tensor(memory)], peer, _tag(number, memory.nbytes, kind, code))


def exchange(library: Library, own: Bytes, others: Mapping[int, Bytes], number: int, code: int) -> list[Handle]:
    """Start to send this rank's part to all others, and to receive theirs; empty parts do not travel.

    Args:
        library: the group.
        own: this rank's part.
        others: where the others' parts go, by rank.
        number: of the collective.
        code: says what the ranks bring to it.
    """
    handles = [receive(library, part, peer, number, PART, code) for peer, part in others.items() if part.size]
    return handles + [send(library, own, peer, number, PART, code) for peer in others if own.size]


def broadcast(library: Library, memory: Bytes, root: int, seconds: float) -> Handle:
    """Start to give all ranks what the root has."""
    options = _c10d().BroadcastOptions()
    options.rootRank, options.timeout = root, _whole(seconds)
    return library.broadcast([_tensor(memory)], options)


def all_reduce(library: Library, memory: Bytes, dtype: str, op: str, seconds: float) -> Handle:
    """Start to combine all ranks' numbers of a dtype of `NATIVE`, in place; a mean is left undivided."""
    options = _c10d().AllreduceOptions()
    options.reduceOp, options.timeout = getattr(_c10d().ReduceOp, OPS[op]), _whole(seconds)
    return library.allreduce([_numbers(memory, dtype)], options)


def divide(memory: Bytes, dtype: str, count: int) -> None:
    """Make a sum of numbers of a dtype of `NATIVE` their mean, in place."""
    _numbers(memory, dtype).div_(count)


def wait(handle: Handle, deadline: Deadline) -> None:
    """Wait for the end of what is under way. A message must be waited for once only.

    Raises:
        TimedOutError: the deadline has passed.
        RuntimeError: it failed.
    """
    try:
        handle.wait(_limit(deadline))
    except RuntimeError as exc:
        if late(exc):
            raise TimedOutError(str(exc)) from exc
        raise


def late(error: Exception) -> bool:
    """Tell whether PyTorch means a timeout of this process's own."""
    return _LATE.search(str(error)) is not None


def cut(library: Library, peers: Iterable[int]) -> None:
    """End all connections: whatever waits, here or there, fails."""
    nothing = np.zeros(1, np.uint8)
    for peer in peers:
        try:
            library.recv([_tensor(nothing)], peer, _NOBODYS).wait(timedelta(milliseconds=1))
        except RuntimeError as exc:
            if late(exc):  # this ended the connections to all peers; otherwise, that to this one had ended before
                return


def _tag(number: int, nbytes: int, kind: int, code: int = 0) -> int:
    return (number * _SPREAD + nbytes + code) % _TAGS * 2 + kind


def _tensor(memory: Bytes) -> torch.Tensor:
    """View memory as a tensor; PyTorch would warn of memory that is read-only, even where it is only sent."""
    import torch

    return torch.from_numpy(np.asarray(_Memory(memory)) if memory.size else np.empty(0, np.uint8))


def _numbers(memory: Bytes, dtype: str) -> torch.Tensor:
    import torch

    return _tensor(memory).view(getattr(torch, dtype))


class _Memory:
    """Memory of an array, writable or not, and what keeps it."""

    def __init__(self, array: Bytes) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _limit(deadline: Deadline) -> timedelta:
    return _whole(deadline.left())


def _whole(seconds: float) -> timedelta:
    return timedelta(milliseconds=max(1, math.ceil(1e3 * seconds)))


def _c10d() -> ModuleType:
    from torch._C import _distributed_c10d

    return _distributed_c10d
