"""CUDA and NCCL through CuPy: a `Device`, and its communicators.

Rules
- Each communicator has a stream of its own, which waits for nothing but what `Memory.ready` says.
- An array's contents are ready when what its own stream was told to do by now is done. Where that stream is unknown
  (TensorFlow's), everything on the device is waited for.
- Arrays in host memory go through pinned memory, `PIECE_BYTES` at a time, to and from device memory of their size.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ....store.arrays import Array, dtype_name
from ....store.errors import TensorMismatchError
from ..buffers import flat, typed
from .device import Event, Memory, Part

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 16 << 20
"""Of an array in host memory, this much is pinned at a time."""
_TYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64")
_UINT8 = 1
"""NCCL's number of bytes as a dtype."""
_LEGACY_STREAM = 1
"""CUDA's name of the default stream, with which arrays without a stream come about."""


class Cuda:
    """The device that is current in the process.

    Raises:
        ImportError: CuPy is not installed, or finds no NCCL.
        RuntimeError: there is no device.
    """

    def __init__(self) -> None:
        cupy: Any = import_module("cupy")
        nccl: Any = import_module("cupy.cuda.nccl")
        if not nccl.available:
            raise ImportError("nccl: expected CuPy with NCCL; found CuPy without NCCL")
        self._cupy = cupy
        self._nccl = nccl
        self._device = cupy.cuda.Device()
        self.types: Mapping[str, int] = {
            name: getattr(nccl, f"NCCL_{name.upper()}") for name in _TYPES if hasattr(nccl, f"NCCL_{name.upper()}")
        }
        """Dtypes that the installed NCCL reduces, and its numbers of them."""

    def identity(self) -> str:
        """Name the device so that no other one in the world is called so."""
        runtime = self._cupy.cuda.runtime
        uuid = runtime.getDeviceProperties(self._device.id).get("uuid", b"")
        machine = Path("/proc/sys/kernel/random/boot_id")
        booted = machine.read_text().strip() if machine.exists() else ""
        bus = runtime.deviceGetPCIBusId(self._device.id)
        return f"{booted}/{bus}/{bytes(uuid).hex()}"

    def bind(self) -> None:
        """Make it this thread's device."""
        self._device.use()

    def new_id(self) -> bytes:
        """Make what the members of a communicator must share."""
        made = self._nccl.get_unique_id()
        return made if isinstance(made, bytes) else bytes(value & 0xFF for value in made)

    def channel(self, size: int, shared: bytes, rank: int) -> Channel:
        """Make a communicator; see `Device`."""
        given: Any = shared
        if int(self._cupy.__version__.split(".")[0]) < 14:  # which took a tuple of chars
            given = tuple(value - 256 if value > 127 else value for value in shared)
        return Channel(self._cupy, self._nccl.NcclCommunicator(size, given, rank))

    def memory(self, array: object, where: str, *, writes: bool) -> Memory:
        """View an array of the device or of the host; see `Device`."""
        found = _device_array(array, where, writes=writes, cupy=self._cupy)
        if found is None:
            host = typed(array, where) if writes else flat(array, where)
            return Memory(host.nbytes, dtype_name(host.dtype), host=host.view(np.uint8), keep=array)
        runtime = self._cupy.cuda.runtime
        with self._device:
            place = runtime.pointerGetAttributes(found.pointer).device if found.nbytes else self._device.id
            if place != self._device.id:
                raise TensorMismatchError(f"{where}: expected an array on GPU {self._device.id}; found GPU {place}")
            event = None
            if found.stream is None:
                self._device.synchronize()
            else:
                event = self._cupy.cuda.Event(disable_timing=True)
                runtime.eventRecord(event.ptr, found.stream)
        return Memory(found.nbytes, found.dtype, found.pointer, ready=event, keep=found.keep)


class Channel:
    """A communicator and its stream; see `device.Communicator`.

    Args:
        cupy: the package.
        communicator: CuPy's.
    """

    def __init__(self, cupy: ModuleType, communicator: Any) -> None:
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._nccl = cupy.cuda.nccl
        self._communicator = communicator
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._pinned: Any = None

    # ---- what the stream does; all these return at once ---------------------------------------------------------

    def after(self, event: Any) -> None:
        """Let all that follows wait for an event of `Memory.ready`."""
        self._runtime.streamWaitEvent(self._stream.ptr, event.ptr)

    def send(self, pointer: int, nbytes: int, peer: int) -> None:
        """Send bytes to a member."""
        self._communicator.send(pointer, nbytes, _UINT8, peer, self._stream.ptr)

    def receive(self, pointer: int, nbytes: int, peer: int) -> None:
        """Receive a member's bytes."""
        self._communicator.recv(pointer, nbytes, _UINT8, peer, self._stream.ptr)

    def broadcast(self, parts: Iterable[Part]) -> None:
        """Send to all members the parts that one of them has each, all at once."""
        self._nccl.groupStart()
        try:
            for pointer, nbytes, root in parts:
                self._communicator.broadcast(pointer, pointer, nbytes, _UINT8, root, self._stream.ptr)
        finally:
            self._nccl.groupEnd()

    def all_reduce(self, pointer: int, count: int, dtype: int, op: int) -> None:
        """Combine the members' numbers in place; dtype and operation are NCCL's numbers."""
        self._communicator.allReduce(pointer, pointer, count, dtype, op, self._stream.ptr)

    def mark(self) -> Event:
        """Return an event whose attribute `done` tells whether all that was asked for so far is done."""
        return self._stream.record(self._cupy.cuda.Event(disable_timing=True))

    # ---- host memory --------------------------------------------------------------------------------------------

    def scratch(self, nbytes: int) -> Memory:
        """Allocate device memory."""
        made = self._cupy.cuda.alloc(nbytes)
        return Memory(nbytes, "uint8", int(made.ptr), keep=made)

    def load(self, target: Memory, source: Array) -> None:
        """Copy bytes of the host into device memory; returns when they are there."""
        for first in range(0, source.size, PIECE_BYTES):
            piece = source[first : first + PIECE_BYTES]
            pinned, view = self._pinned_piece()
            view[: piece.size] = piece
            self._copy(target.pointer + first, pinned, piece.size, self._runtime.memcpyHostToDevice)

    def store(self, target: Array, source: Memory) -> None:
        """Copy device memory into bytes of the host; returns when they are there."""
        for first in range(0, target.size, PIECE_BYTES):
            piece = target[first : first + PIECE_BYTES]
            pinned, view = self._pinned_piece()
            self._copy(pinned, source.pointer + first, piece.size, self._runtime.memcpyDeviceToHost)
            piece[:] = view[: piece.size]

    def _copy(self, target: int, source: int, nbytes: int, kind: int) -> None:
        self._runtime.memcpyAsync(target, source, nbytes, kind, self._stream.ptr)
        self._stream.synchronize()

    def _pinned_piece(self) -> tuple[int, Array]:
        if self._pinned is None:
            self._pinned = self._cupy.cuda.alloc_pinned_memory(PIECE_BYTES)
        return int(self._pinned.ptr), np.frombuffer(self._pinned, np.uint8, PIECE_BYTES)

    # ---- the end ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise NCCL's error, a `RuntimeError`, if something under way has failed."""
        self._communicator.check_async_error()

    def abort(self) -> None:
        """End what is under way, unfinished, and the communicator with it."""
        self._communicator.abort()


@dataclass(frozen=True, slots=True)
class _DeviceArray:
    pointer: int
    nbytes: int
    dtype: str
    stream: int | None
    """On which its contents come about, as CUDA's runtime calls it; None: unknown."""
    keep: object


def _device_array(array: Any, where: str, *, writes: bool, cupy: ModuleType) -> _DeviceArray | None:
    """Look at an array in device memory; None: it is not there."""
    origins = {base.__module__.partition(".")[0] for base in type(array).__mro__}
    if "torch" in origins:
        return _of_torch(array, where) if array.is_cuda else None
    if origins & {"tensorflow", "keras"}:
        value = getattr(array, "value", array) if "keras" in origins else array
        if "GPU" not in str(getattr(value, "device", "")):
            return None
        if writes:
            raise TensorMismatchError(f"{where}: expected a writable array; found a TensorFlow tensor")
        tensor = value.read_value() if hasattr(value, "read_value") else value
        return replace(_of_interface(cupy.from_dlpack(tensor), where, writes=False), stream=None)
    return _of_interface(array, where, writes=writes) if hasattr(array, "__cuda_array_interface__") else None


def _of_torch(array: torch.Tensor, where: str) -> _DeviceArray:
    if not array.is_contiguous():
        raise TensorMismatchError(f"{where}: expected a contiguous array; found strides {array.stride()}")
    stream = sys.modules["torch"].cuda.current_stream(array.device).cuda_stream
    nbytes = array.numel() * array.element_size()
    return _DeviceArray(array.data_ptr(), nbytes, str(array.dtype).removeprefix("torch."), stream, array)


def _of_interface(array: Any, where: str, *, writes: bool) -> _DeviceArray:
    """Read `__cuda_array_interface__`, versions 2 and 3."""
    told = array.__cuda_array_interface__
    dtype = np.dtype(array.dtype)
    pointer, read_only = told["data"]
    if writes and read_only:
        raise TensorMismatchError(f"{where}: expected a writable array; found a read-only one")
    expected = dtype.itemsize
    for length, stride in reversed(list(zip(told["shape"], told.get("strides") or (), strict=False))):
        if length != 1 and stride != expected:
            raise TensorMismatchError(f"{where}: expected a contiguous array; found strides {told['strides']}")
        expected *= length
    stream = told.get("stream") or _LEGACY_STREAM
    return _DeviceArray(pointer, math.prod(told["shape"]) * dtype.itemsize, dtype_name(dtype), stream, array)
