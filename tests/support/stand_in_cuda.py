"""Stands in for CUDA and NCCL where there is no GPU: a `Device` made of threads.

Rules
- It is as unkind as the real ones: a communicator waits for its members for ever, and so does what is launched, but for
  an abort; sizes are not compared; nothing is done when a call returns, only when its event says so.
- "Device memory" is this process's; an array of it is a `DeviceArray`.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.collective.buffers import flat, typed
from tensorvine.actors.collective.nccl import backend
from tensorvine.actors.collective.nccl.cuda import _device_array
from tensorvine.actors.collective.nccl.device import Memory
from tensorvine.store.arrays import dtype_name, dtype_of

TYPES = {"int8": 0, "uint8": 1, "int32": 2, "int64": 4, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
_COMBINE: list[Callable[[np.ndarray], np.ndarray]] = [
    lambda rows: rows.sum(axis=0),
    lambda rows: rows.prod(axis=0),
    lambda rows: rows.max(axis=0),
    lambda rows: rows.min(axis=0),
    lambda rows: rows.sum(axis=0) / len(rows),
]


class DeviceArray:
    """An array in "device memory", as CuPy shows one.

    Args:
        values: what it holds.
        ready: when its producer is done; None: it is.
    """

    def __init__(self, values: np.ndarray, ready: threading.Event | None = None) -> None:
        self.values = values
        self.dtype = values.dtype
        self.ready = ready

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        pointer = (self.values.ctypes.data, not self.values.flags.writeable)
        strides = None if self.values.flags.c_contiguous else self.values.strides
        return {"shape": self.values.shape, "typestr": "|V1", "data": pointer, "strides": strides, "version": 3}


class World:
    """All "GPUs" there are: what connects them."""

    def __init__(self) -> None:
        self.mail: dict[tuple[bytes, int, int], queue.SimpleQueue[bytes]] = {}
        self.meetings: dict[bytes, threading.Barrier] = {}
        self.lock = threading.Lock()
        self.serial = itertools.count()
        self.trouble: str | None = None
        """What communicators report from now on."""

    def meet(self, shared: bytes, size: int) -> None:
        with self.lock:
            barrier = self.meetings.setdefault(shared, threading.Barrier(size))
            pairs = itertools.permutations(range(size), 2)
            self.mail = {(shared, *pair): queue.SimpleQueue() for pair in pairs} | self.mail
        barrier.wait(30)  # NCCL would wait for ever; a test must end


class StandIn:
    """One "GPU"."""

    def __init__(self, world: World, name: str, types: dict[str, int] | None = None) -> None:
        self.world = world
        self.name = name
        self.types = TYPES if types is None else types

    def identity(self) -> str:
        return self.name

    def bind(self) -> None:
        pass

    def new_id(self) -> bytes:
        return b"id" + next(self.world.serial).to_bytes(126, "big")

    def channel(self, size: int, shared: bytes, rank: int) -> StandInChannel:
        self.world.meet(shared, size)
        return StandInChannel(self.world, size, shared, rank)

    def memory(self, array: Any, where: str, *, writes: bool) -> Memory:
        found = _device_array(array, where, writes=writes, cupy=None)
        if found is None:
            host = typed(array, where) if writes else flat(array, where)
            return Memory(host.nbytes, dtype_name(host.dtype), host=host.view(np.uint8), keep=array)
        return Memory(found.nbytes, found.dtype, found.pointer, ready=array.ready, keep=array)


@contextmanager
def stand_in_gpus() -> Iterator[None]:
    """Let each member that joins by NCCL find a "GPU" of its own, all of one world."""
    world, serial = World(), itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "Cuda", lambda: StandIn(world, f"gpu-{next(serial)}"))
        yield


class Mark:
    def __init__(self) -> None:
        self.passed = threading.Event()

    @property
    def done(self) -> bool:
        return self.passed.is_set()


class AbortedError(Exception):
    """The stream is to end."""


class StandInChannel:
    """A communicator, and the thread that is its stream."""

    def __init__(self, world: World, size: int, shared: bytes, rank: int) -> None:
        self._world, self._size, self._shared, self._rank = world, size, shared, rank
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._aborted = threading.Event()
        self._thread = threading.Thread(target=self._stream, name="stand-in-stream", daemon=True)
        self._thread.start()

    def after(self, event: threading.Event) -> None:
        self._jobs.put(lambda: self._until(event.is_set))

    def send(self, pointer: int, nbytes: int, peer: int) -> None:
        self._jobs.put(lambda: self._post(at(pointer, nbytes).tobytes(), peer))

    def receive(self, pointer: int, nbytes: int, peer: int) -> None:
        self._jobs.put(lambda: self._fetch(at(pointer, nbytes), peer))

    def broadcast(self, parts: Iterable[tuple[int, int, int]]) -> None:
        for pointer, nbytes, root in parts:
            self._jobs.put(partial(self._spread, at(pointer, nbytes), root))

    def all_reduce(self, pointer: int, count: int, dtype: int, op: int) -> None:
        name = next(name for name, number in TYPES.items() if number == dtype)
        memory = at(pointer, count * dtype_of(name).itemsize).view(dtype_of(name))
        self._jobs.put(lambda: self._combine(memory, op))

    def mark(self) -> Mark:
        made = Mark()
        self._jobs.put(made.passed.set)
        return made

    def scratch(self, nbytes: int) -> Memory:
        made = np.full(nbytes, 0xAA, np.uint8)
        return Memory(nbytes, "uint8", made.ctypes.data, keep=made)

    def load(self, target: Memory, source: np.ndarray) -> None:
        at(target.pointer, target.nbytes)[:] = source

    def store(self, target: np.ndarray, source: Memory) -> None:
        target[:] = at(source.pointer, source.nbytes)

    def check(self) -> None:
        if self._world.trouble is not None:
            raise RuntimeError(self._world.trouble)

    def abort(self) -> None:
        self._aborted.set()
        self._jobs.put(None)
        self._thread.join()

    # ---- the stream -----------------------------------------------------------------------------------------

    def _stream(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except AbortedError:
                return

    def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            if self._aborted.wait(0.001):
                raise AbortedError

    def _post(self, content: bytes, peer: int) -> None:
        self._world.mail[self._shared, self._rank, peer].put(content)

    def _fetch(self, memory: np.ndarray, peer: int) -> None:
        mail = self._world.mail[self._shared, peer, self._rank]
        self._until(lambda: not mail.empty())
        memory[:] = np.frombuffer(mail.get(), np.uint8)

    def _spread(self, memory: np.ndarray, root: int) -> None:
        if self._rank != root:
            self._fetch(memory, root)
            return
        for peer in range(self._size):
            if peer != root:
                self._post(memory.tobytes(), peer)

    def _combine(self, memory: np.ndarray, op: int) -> None:
        rows = np.empty((self._size, memory.size), memory.dtype)
        for peer in range(self._size):
            if peer != self._rank:
                self._post(memory.tobytes(), peer)
        for peer in range(self._size):
            if peer == self._rank:
                rows[peer] = memory
            else:
                self._fetch(rows[peer].view(np.uint8), peer)
        with np.errstate(all="ignore"):
            memory[:] = _COMBINE[op](rows).astype(memory.dtype)


def at(pointer: int, nbytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer))
