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
    """An operation under way."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end; once it has ended, again and again the same.

        Args:
            timeout: seconds from now; None: the time that the operation was given.

        Raises:
            PeerLostError: a peer died or left.
            OperationTimeoutError: a peer did not take part in time.
            TensorMismatchError: ranks brought different things; names them.
        """
        ...

    def done(self) -> bool:
        """Tell whether it has ended, well or not."""
        ...


class Group(ABC):
    """One member's end of a group. `connect` makes them; whoever has one closes it.

    The methods with an `i` start an operation (MPI's names); those without wait for its end.
    """

    backend: ClassVar[str]
    """What carries the bytes: "shared", "gloo" or "nccl"."""
    name: str
    epoch: int
    rank: int
    """0 to size - 1."""
    size: int
    timeout: float
    """Seconds that an operation waits for its peers, where the call says nothing else."""

    @abstractmethod
    def check(self, array: object, what: str, *, writes: bool) -> None:
        """Refuse an array that an operation would refuse, before one begins.

        Args:
            array: any.
            what: it, in words, for the error.
            writes: it is to be written to.

        Raises:
            TensorMismatchError: as in `isend`, or it cannot be written to.
        """

    @abstractmethod
    def isend(self, array: object, to: int, *, timeout: float | None = None) -> Work:
        """Start to send an array's bytes to a rank.

        Raises:
            ValueError: there is no such rank, or it is this one.
            TensorMismatchError: no contiguous array of numbers.
            PeerLostError, OperationTimeoutError: the group is broken.
        """

    @abstractmethod
    def irecv(self, array: object, source: int, *, timeout: float | None = None) -> Work:
        """Start to receive a rank's next array into this one, which has as many bytes; errors as in `isend`."""

    @abstractmethod
    def ibroadcast(self, array: object, root: int = 0, *, timeout: float | None = None, part_of: str = "") -> Work:
        """Start to give all ranks what `root` has in the array; errors as in `isend`.

        Args:
            array: on all ranks of one dtype and shape.
            root: whose array all get.
            timeout: seconds; None: the group's.
            part_of: a larger call that this is a part of, in words; must be the same on all ranks, too.
        """

    @abstractmethod
    def iall_gather(self, array: object, bounds: Sequence[int] | None = None, *, timeout: float | None = None) -> Work:
        """Start to give all ranks all parts of an array, in place: each rank has its own part there already.

        Args:
            array: the whole, 1-d.
            bounds: size + 1 rising numbers of elements: rank r has array[bounds[r]:bounds[r + 1]], which may be empty.
                None: `even_bounds`.
            timeout: seconds; None: the group's.
        """

    @abstractmethod
    def iall_reduce(self, array: object, op: Op = "sum", *, timeout: float | None = None, part_of: str = "") -> Work:
        """Start to combine the ranks' arrays, in place, elementwise; all ranks get the same bits.

        `part_of` is as in `ibroadcast`.

        The same arrays give the same bits each time, in groups of one size and back end.
        """

    @abstractmethod
    def ibarrier(self, *, timeout: float | None = None) -> Work:
        """Start to wait for all ranks."""

    @abstractmethod
    def close(self) -> None:
        """Leave; what is under way fails, here and, as `PeerLostError`, at the peers. A second call does nothing."""

    def send(self, array: object, to: int, *, timeout: float | None = None) -> None:
        """Send an array's bytes to a rank; see `isend`."""
        self.isend(array, to, timeout=timeout).wait()

    def recv(self, array: object, source: int, *, timeout: float | None = None) -> None:
        """Receive a rank's next array into this one; see `irecv`."""
        self.irecv(array, source, timeout=timeout).wait()

    def broadcast(self, array: object, root: int = 0, *, timeout: float | None = None) -> None:
        """Send what `root` has in the array to all ranks; see `ibroadcast`."""
        self.ibroadcast(array, root, timeout=timeout).wait()

    def all_gather(self, array: object, bounds: Sequence[int] | None = None, *, timeout: float | None = None) -> None:
        """Send all parts of an array to all ranks; see `iall_gather`."""
        self.iall_gather(array, bounds, timeout=timeout).wait()

    def all_reduce(self, array: object, op: Op = "sum", *, timeout: float | None = None, part_of: str = "") -> None:
        """Combine the ranks' arrays in place; see `iall_reduce`."""
        self.iall_reduce(array, op, timeout=timeout, part_of=part_of).wait()

    def barrier(self, *, timeout: float | None = None) -> None:
        """Wait for all ranks."""
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
