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
    """An operation started by a method of `Group`, such as `isend`."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the operation has ended, and raise its error if the operation failed.

        If the operation has already ended, the call does not wait. If the timeout expires before the operation has
        ended, the operation fails and breaks the group: later operations of the group also fail.

        Args:
            timeout: Seconds to wait from now. None waits until the operation itself times out.

        Raises:
            PeerLostError: if another rank died or left the group.
            OperationTimeoutError: if another rank did not take part in time.
            TensorMismatchError: if the calls of the ranks do not match. The message lists the calls by rank.
        """
        ...

    def done(self) -> bool:
        """Return whether the operation has ended, with or without success."""
        ...


class Group(ABC):
    """The membership of one process in a collective group.

    A collective group consists of processes that exchange arrays. Each member of the group has a number, its rank.
    `connect` joins a group and returns a `Group` object. `close`, or the end of a `with` block, leaves the group.

    As in MPI, the methods `isend`, `irecv`, `ibroadcast`, `iall_gather`, `iall_reduce` and `ibarrier` start an
    operation and return a `Work` to wait for. The methods `send`, `recv`, `broadcast`, `all_gather`, `all_reduce` and
    `barrier` wait until the operation has ended.

    The methods accept contiguous NumPy, PyTorch, TensorFlow and CuPy arrays, and contiguous slices of such arrays. The
    back ends "shared" and "gloo" accept only arrays in CPU memory. TensorFlow tensors are read-only: they can only be
    sent, or broadcast by the root. Until an operation has ended, do not change its input array, and do not read its
    output array.

    All ranks must call the collectives (broadcast, all-gather, all-reduce and barrier) in the same order and with the
    same root, reduction, bounds, dtype and shape. Between two ranks, the k-th `recv` receives the array of the k-th
    `send`. The two arrays must have the same size and dtype. If calls do not match, the affected ranks raise
    `TensorMismatchError` before any of their arrays is written to. However, if one rank calls `send` or `recv` and the
    other rank calls a collective instead, `send` or `recv` fails with `OperationTimeoutError`.

    A failed operation breaks the group: running operations fail, and later operations raise the same error.

    Several threads can use one `Group` object at the same time.
    """

    backend: ClassVar[str]
    """Name of the back end: "shared", "gloo" or "nccl"."""
    name: str
    """Name of the group."""
    epoch: int
    """Epoch of the group. To change the members, or after a failure, call `renew`, which joins the next epoch."""
    rank: int
    """Number of this member, 0 to size - 1."""
    size: int
    """Number of members of the group."""
    timeout: float
    """Default timeout of the group's operations, in seconds."""

    @abstractmethod
    def check(self, array: object, what: str, *, writes: bool) -> None:
        """Check that operations of the group accept an array.

        Args:
            array: The array.
            what: Description of the array for the error message.
            writes: Whether the array must be writable.

        Raises:
            TensorMismatchError: if `array` is not a contiguous array of numbers, or if `writes` is true and `array` is
                read-only.
        """

    @abstractmethod
    def isend(self, array: object, to: int, *, timeout: float | None = None) -> Work:
        """Start sending an array to another rank.

        Args:
            array: A contiguous array.
            to: Rank of the receiver.
            timeout: Seconds until the operation times out. None means the group's timeout.

        Raises:
            ValueError: if `to` is not the rank of another member.
            TensorMismatchError: if `array` is not a contiguous array of numbers.
            TensorVineError: the error that broke the group, if the group is broken.
        """

    @abstractmethod
    def irecv(self, array: object, source: int, *, timeout: float | None = None) -> Work:
        """Start receiving the next array from another rank, into `array`.

        Args:
            array: A contiguous, writable array of the same size and dtype as the sent array. The shapes can differ. The
                received values overwrite the array.
            source: Rank of the sender.
            timeout: Seconds until the operation times out. None means the group's timeout.

        Raises:
            ValueError: if `source` is not the rank of another member.
            TensorMismatchError: if `array` is not a contiguous, writable array of numbers.
            TensorVineError: the error that broke the group, if the group is broken.
        """

    @abstractmethod
    def ibroadcast(self, array: object, root: int = 0, *, timeout: float | None = None) -> Work:
        """Start copying the root's array to all ranks.

        Args:
            array: A contiguous array of the same dtype and shape on all ranks. On all ranks except the root, the array
                is overwritten.
            root: Rank whose array is copied.
            timeout: Seconds until the operation times out. None means the group's timeout.

        Raises:
            ValueError: if `root` is not a rank of the group.
            TensorMismatchError: if `array` is not a contiguous array of numbers, or is read-only on a rank other than
                the root.
            TensorVineError: the error that broke the group, if the group is broken.
        """

    @abstractmethod
    def iall_gather(self, array: object, bounds: Sequence[int] | None = None, *, timeout: float | None = None) -> Work:
        """Start collecting the parts of an array from all ranks, in place.

        Before the call, each rank writes its own part into its array. After the operation, the arrays of all ranks
        contain all parts.

        Args:
            array: The whole array, 1-d, of the same length on all ranks.
            bounds: `size + 1` ascending indices. The part of rank r is `array[bounds[r]:bounds[r + 1]]`, which can be
                empty. None divides the array into parts whose lengths differ by at most one, with longer parts first.
            timeout: Seconds until the operation times out. None means the group's timeout.

        Raises:
            ValueError: if `bounds` is not a sequence of `size + 1` ascending indices of the array.
            TensorMismatchError: if `array` is not a contiguous, writable array of numbers.
            TensorVineError: the error that broke the group, if the group is broken.
        """

    @abstractmethod
    def iall_reduce(self, array: object, op: Op = "sum", *, timeout: float | None = None) -> Work:
        """Start combining the arrays of all ranks element by element, in place.

        The result is bit-for-bit identical on all ranks. With the back ends "shared" and "gloo", the result is also
        reproducible: groups of the same size and back end compute identical results from identical arrays.

        Args:
            array: A contiguous array of the same dtype and shape on all ranks. The result overwrites the array.
            op: The reduction: "sum", "mean", "min", "max" or "product".
            timeout: Seconds until the operation times out. None means the group's timeout.

        Raises:
            ValueError: if `op` is unknown.
            TensorMismatchError: if `array` is not a contiguous, writable array of numbers, or if `op` is "mean" and
                `array` is neither floating-point nor complex.
            TensorVineError: the error that broke the group, if the group is broken.
        """

    @abstractmethod
    def ibarrier(self, *, timeout: float | None = None) -> Work:
        """Start a barrier: an operation that ends when all ranks have called `ibarrier` or `barrier`."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group. A second call does nothing.

        Running and later operations of this rank fail with `PeerLostError`. Operations of the other ranks also fail
        with `PeerLostError` if they need this rank.
        """

    def send(self, array: object, to: int, *, timeout: float | None = None) -> None:
        """Send an array to another rank. See `isend`."""
        self.isend(array, to, timeout=timeout).wait()

    def recv(self, array: object, source: int, *, timeout: float | None = None) -> None:
        """Receive the next array from another rank, into `array`. See `irecv`."""
        self.irecv(array, source, timeout=timeout).wait()

    def broadcast(self, array: object, root: int = 0, *, timeout: float | None = None) -> None:
        """Copy the root's array to all ranks. See `ibroadcast`."""
        self.ibroadcast(array, root, timeout=timeout).wait()

    def all_gather(self, array: object, bounds: Sequence[int] | None = None, *, timeout: float | None = None) -> None:
        """Collect the parts of an array from all ranks, in place. See `iall_gather`."""
        self.iall_gather(array, bounds, timeout=timeout).wait()

    def all_reduce(self, array: object, op: Op = "sum", *, timeout: float | None = None) -> None:
        """Combine the arrays of all ranks element by element, in place. See `iall_reduce`."""
        self.iall_reduce(array, op, timeout=timeout).wait()

    def barrier(self, *, timeout: float | None = None) -> None:
        """Wait until all ranks have called `barrier` or `ibarrier`."""
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
