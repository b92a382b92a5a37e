"""What groups over NCCL need of a device: the seam between their logic and CUDA.

Rules
- Nothing else of the groups calls CuPy, and their logic is tested on whatever has these calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ....store.arrays import Array

Part = tuple[int, int, int]
"""Where a part starts, how many bytes it has, and which rank has it."""


class Event(Protocol):
    """A moment of a stream."""

    @property
    def done(self) -> bool:
        """Whether all that came before is done."""
        ...


@dataclass(frozen=True, slots=True)
class Memory:
    """What an operation reads or writes."""

    nbytes: int
    dtype: str
    pointer: int = 0
    """In device memory."""
    host: Array | None = None
    """The bytes, where the array is in host memory."""
    ready: object = None
    """The device's event: when the contents are there; None: they are."""
    keep: object = None
    """What the memory belongs to."""


class Communicator(Protocol):
    """Some members, and a stream. One thread uses it, but for `abort`, which any may call."""

    # ---- what the stream does; all these return at once ---------------------------------------------------------

    def after(self, event: object) -> None:
        """Let all that follows wait for an event of `Memory.ready`."""
        ...

    def send(self, pointer: int, nbytes: int, peer: int) -> None:
        """Send bytes to a member."""
        ...

    def receive(self, pointer: int, nbytes: int, peer: int) -> None:
        """Receive a member's bytes."""
        ...

    def broadcast(self, parts: Iterable[Part]) -> None:
        """Send to all members the parts that one of them has each, all at once."""
        ...

    def all_reduce(self, pointer: int, count: int, dtype: int, op: int) -> None:
        """Combine the members' numbers in place; dtype and operation are NCCL's numbers."""
        ...

    def mark(self) -> Event:
        """Return when all that was asked for so far is done."""
        ...

    # ---- host memory --------------------------------------------------------------------------------------------

    def scratch(self, nbytes: int) -> Memory:
        """Allocate device memory."""
        ...

    def load(self, target: Memory, source: Array) -> None:
        """Copy bytes of the host into device memory; returns when they are there."""
        ...

    def store(self, target: Array, source: Memory) -> None:
        """Copy device memory into bytes of the host; returns when they are there."""
        ...

    # ---- the end ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise NCCL's error, a `RuntimeError`, if something under way has failed."""
        ...

    def abort(self) -> None:
        """End what is under way, unfinished, and the communicator with it."""
        ...


class Device(Protocol):
    """A GPU."""

    @property
    def types(self) -> Mapping[str, int]:
        """Dtypes that the installed NCCL reduces, and its numbers of them."""
        ...

    def identity(self) -> str:
        """Name the device so that no other one in the world is called so."""
        ...

    def bind(self) -> None:
        """Make it this thread's device."""
        ...

    def new_id(self) -> bytes:
        """Make what the members of a communicator must share."""
        ...

    def channel(self, size: int, shared: bytes, rank: int) -> Communicator:
        """Make a communicator; returns when all its members do.

        Args:
            size: how many members it has.
            shared: what one of them got from `new_id`.
            rank: this one.
        """
        ...

    def memory(self, array: object, where: str, *, writes: bool) -> Memory:
        """View an array of the device or of the host; nothing is copied.

        Args:
            array: contiguous, of NumPy, PyTorch, TensorFlow or CuPy.
            where: what it is, for errors.
            writes: it is to be written to.

        Raises:
            TensorMismatchError: it is none such, is on another device, or is read-only.
        """
        ...
