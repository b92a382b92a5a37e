"""A collective group: processes that exchange arrays, whatever carries the bytes.

Rules
- A group is (name, epoch) and its ranks. Its membership never changes: who joins or leaves does so by the next epoch,
  which is a group of its own.
- Between two ranks, the k-th receive takes what the k-th send sent; it must be as many bytes, of one dtype. Collectives
  are called by all ranks in one order, the k-th with the same kind, root, reduction, bounds, dtype and shape. The two
  do not disturb each other.
- Ranks that bring different things are a `TensorMismatchError` on all of them that says who brought what, before any
  of their arrays is written to. A message and a collective are not compared: a peer that is in a collective may yet
  come to the message; if it does not, that is an `OperationTimeoutError`.
- An array is NumPy's, PyTorch's, TensorFlow's or CuPy's, contiguous; a part of one is sent by handing over that slice.
  Nothing is copied to hand it over. What is being sent must not be changed, and what is being received into must not
  be read, until `Work.wait` has returned.
- Every wait has a timeout. A peer that died is a `PeerLostError` that names it, one that is silent an
  `OperationTimeoutError` that names it: never a hang.
- A failed operation breaks the group: what is under way fails, and what comes later is refused, with the first reason.
- A group may be used by several threads; each of its operations keeps the order of the calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import ClassVar, Literal, Protocol, Self

Op = Literal["sum", "mean", "min", "max", "product"]
OPS: tuple[Op, ...] = ("sum", "mean", "min", "max", "product")


class Work(Protocol):
    """A running operation of a group."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the operation has ended. Later calls have the same result.

        An operation that does not end in time breaks the group.

        Args:
            timeout: Seconds to wait from now. None means the operation's own timeout.

        Raises:
            PeerLostError: if a peer died or left.
            OperationTimeoutError: if a peer did not take part in time.
            TensorMismatchError: if the calls of the ranks do not match. The message lists them by rank.
        """
        ...

    def done(self) -> bool:
        """Return whether the operation has ended, with or without success."""
        ...


class Group(ABC):
    """One member of a collective group. `connect` creates it, and `close` or the end of a `with` block leaves it.

    Methods whose name begins with `i` start an operation and return a `Work` to wait for (as in MPI). The others wait
    until the operation has ended.

    Arrays are contiguous arrays of NumPy, PyTorch, TensorFlow or CuPy, or contiguous slices of them. They are not
    copied. Until the operation has ended, do not change an array that is sent, and do not read an array that is
    received.

    All ranks call the collectives in the same order and with the same root, reduction, bounds, dtype and shape. Between
    two ranks, the k-th `recv` receives the k-th `send`, which must have the same size and dtype. Otherwise all ranks
    concerned raise `TensorMismatchError` before any of their arrays is written to. A message to a rank that is in a
    collective waits until its timeout.

    A failed operation breaks the group: running operations fail, and later ones raise the same error. Several threads
    may use a group.
    """

    backend: ClassVar[str]
    """Name of the back end: "shared", "gloo" or "nccl"."""
    name: str
    """Name of the group."""
    epoch: int
    """Generation of the group."""
    rank: int
    """Number of this member, 0 to size - 1."""
    size: int
    """Number of members."""
    timeout: float
    """Default timeout of operations in seconds."""

    @abstractmethod
    def check(self, array: object, what: str, *, writes: bool) -> None:
        """Check that the group accepts an array, before an operation starts.

        Args:
            array: The array.
            what: Description of the array for the error message.
            writes: Whether the array will be written to.

        Raises:
            TensorMismatchError: if it is not a contiguous array of numbers, or cannot be written to although `writes`.
        """

    @abstractmethod
    def isend(self, array: object, to: int, *, timeout: float | None = None) -> Work:
        """Start to send an array to another rank.

        Args:
            array: A contiguous array.
            to: Rank of the receiver.
            timeout: Seconds. None means the group's timeout.

        Raises:
            ValueError: if `to` is not the rank of another member.
            TensorMismatchError: if `array` is not a contiguous array of numbers.
            PeerLostError, OperationTimeoutError: if the group is broken.
        """

    @abstractmethod
    def irecv(self, array: object, source: int, *, timeout: float | None = None) -> Work:
        """Start to receive the next array from another rank.

        Args:
            array: A contiguous, writable array of the same size and dtype as the array sent. Its shape may differ.
            source: Rank of the sender.
            timeout: Seconds. None means the group's timeout.

        Raises:
            ValueError: if `source` is not the rank of another member.
            TensorMismatchError: if `array` is not a contiguous, writable array of numbers.
            PeerLostError, OperationTimeoutError: if the group is broken.
        """

    @abstractmethod
    def ibroadcast(self, array: object, root: int = 0, *, timeout: float | None = None, part_of: str = "") -> Work:
        """Start to copy the root's array to all ranks.

        Args:
            array: A contiguous array of the same dtype and shape on all ranks. It is overwritten except at the root.
            root: Rank whose array is copied.
            timeout: Seconds. None means the group's timeout.
            part_of: Name of the larger call that this operation belongs to, if any. It must be the same on all ranks.

        Raises:
            ValueError: if `root` is not a rank of the group.
            TensorMismatchError: if `array` is not a contiguous array of numbers, or not writable.
            PeerLostError, OperationTimeoutError: if the group is broken.
        """

    @abstractmethod
    def iall_gather(self, array: object, bounds: Sequence[int] | None = None, *, timeout: float | None = None) -> Work:
        """Start to gather the parts of an array on all ranks, in place. Each rank already has its own part there.

        Args:
            array: The whole array, 1-d.
            bounds: `size + 1` ascending indices. The part of rank r is `array[bounds[r]:bounds[r + 1]]`, which may be
                empty. None means parts of equal size, the longer ones first (`even_bounds`).
            timeout: Seconds. None means the group's timeout.

        Raises:
            ValueError: if `bounds` are not ascending indices of the array.
            TensorMismatchError: if `array` is not a contiguous, writable array of numbers.
            PeerLostError, OperationTimeoutError: if the group is broken.
        """

    @abstractmethod
    def iall_reduce(self, array: object, op: Op = "sum", *, timeout: float | None = None, part_of: str = "") -> Work:
        """Start to combine the arrays of all ranks element by element, in place.

        All ranks get the same bits. In groups of the same size and back end, the same arrays always give the same bits.

        Args:
            array: A contiguous array of the same dtype and shape on all ranks.
            op: "sum", "mean", "min", "max" or "product".
            timeout: Seconds. None means the group's timeout.
            part_of: Name of the larger call that this operation belongs to, if any. It must be the same on all ranks.

        Raises:
            ValueError: if `op` is unknown.
            TensorMismatchError: if `array` is not a contiguous, writable array of numbers, or has integers for a mean.
            PeerLostError, OperationTimeoutError: if the group is broken.
        """

    @abstractmethod
    def ibarrier(self, *, timeout: float | None = None) -> Work:
        """Start to wait until all ranks have called this."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group. A second call does nothing.

        Running operations fail, at the other ranks with `PeerLostError`.
        """

    def send(self, array: object, to: int, *, timeout: float | None = None) -> None:
        """Send an array to another rank. See `isend`."""
        self.isend(array, to, timeout=timeout).wait()

    def recv(self, array: object, source: int, *, timeout: float | None = None) -> None:
        """Receive the next array from another rank. See `irecv`."""
        self.irecv(array, source, timeout=timeout).wait()

    def broadcast(self, array: object, root: int = 0, *, timeout: float | None = None) -> None:
        """Copy the root's array to all ranks. See `ibroadcast`."""
        self.ibroadcast(array, root, timeout=timeout).wait()

    def all_gather(self, array: object, bounds: Sequence[int] | None = None, *, timeout: float | None = None) -> None:
        """Gather the parts of an array on all ranks, in place. See `iall_gather`."""
        self.iall_gather(array, bounds, timeout=timeout).wait()

    def all_reduce(self, array: object, op: Op = "sum", *, timeout: float | None = None, part_of: str = "") -> None:
        """Combine the arrays of all ranks element by element, in place. See `iall_reduce`."""
        self.iall_reduce(array, op, timeout=timeout, part_of=part_of).wait()

    def barrier(self, *, timeout: float | None = None) -> None:
        """Wait until all ranks have called this."""
        self.ibarrier(timeout=timeout).wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def even_bounds(length: int, size: int) -> list[int]:
    """Cut a length into parts that differ by one at most, the longer ones first.

    >>> even_bounds(7, 3)
    [0, 3, 5, 7]
    """
    part, rest = divmod(length, size)
    return [rank * part + min(rank, rest) for rank in range(size + 1)]
