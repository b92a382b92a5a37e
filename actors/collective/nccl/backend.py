"""Groups between GPUs by NCCL, through CuPy's communicators: no PyTorch is needed.

Rules
- Each member has a GPU of its own, the one that is current in its process. Two ranks on one GPU are refused.
- Messages and all-gathers are bytes, whatever the dtype. What is reduced is NCCL's to know; other dtypes are refused.
- Collectives have one communicator, and so has each direction between two ranks, from its first message on: a
  communicator does one thing after the other, and nothing is to wait for what it has nothing to do with.
- With each message the sender tells its size by the mesh: NCCL would wait for ever, or write too much.
- Arrays in host memory travel through device memory of their size.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from ....store.arrays import dtype_of
from ....store.errors import TensorMismatchError
from ..group import Op
from ..member import Member, Operation, label_of
from ..mesh import Door, Link, address
from ..reduction import Reduction
from .cuda import Cuda, Memory
from .lane import COLLECTIVE, Act, Call, Lane

CLOSE_S = 1.0
"""How long `close` waits for a thread that NCCL does not let go."""
_OPS: dict[Op, int] = {"sum": 0, "product": 1, "max": 2, "min": 3, "mean": 4}
"""NCCL's numbers."""


class NcclOffer:
    """What a member has opened; its `card` tells the others how to connect.

    Args:
        host: address of this machine.
        device: names the GPU.
    """

    def __init__(self, host: str, device: str) -> None:
        self.door = Door(host)
        self.card: dict[str, Any] = {"door": self.door.card, "device": device}

    def close(self) -> None:
        """Close what is not in use; a second call does nothing."""
        self.door.close()


class NcclBackend:
    """Makes groups over NCCL.

    Args:
        host: address of this machine, as the others reach it; None: that of its default route.
        cuda: the device's calls; None: CuPy's.

    Raises:
        ImportError: CuPy is not installed, or finds no NCCL.
        RuntimeError: there is no GPU.
    """

    name = "nccl"

    def __init__(self, host: str | None = None, cuda: Any = None) -> None:
        self._host = host
        self._cuda = cuda if cuda is not None else Cuda()

    def offer(self) -> NcclOffer:
        """Open what the others will connect to."""
        return NcclOffer(self._host or address(), self._cuda.identity())

    def join(
        self,
        offer: NcclOffer,
        name: str,
        *,
        epoch: int,
        rank: int,
        size: int,
        cards: Sequence[Mapping[str, Any]],
        timeout: float,
        rendezvous: object = None,
    ) -> NcclGroup:
        """Connect to all others.

        Args:
            offer: this member's; it is closed.
            name: of the group.
            epoch: of the group.
            rank: this member.
            size: how many there are.
            cards: all members', by rank.
            timeout: seconds for this, and later the group's.
            rendezvous: not needed.

        Raises:
            ValueError: two ranks have one GPU.
            OperationTimeoutError: some did not come in time.
            PeerLostError: one died meanwhile.
        """
        deadline = time.monotonic() + timeout
        label = label_of(name, epoch)
        try:
            _check_devices(label, [str(card["device"]) for card in cards])
            links = offer.door.meet(label, rank, [card["door"] for card in cards], deadline)
        finally:
            offer.close()
        group = NcclGroup(name, epoch, rank, size, timeout, links, self._cuda)
        try:
            group.barrier(timeout=max(deadline - time.monotonic(), 1e-3))
        except BaseException:
            group.close()
            raise
        return group


class NcclGroup(Member):
    """One member's end of a group over NCCL; `NcclBackend.join` makes it."""

    backend: ClassVar[str] = "nccl"

    def __init__(
        self, name: str, epoch: int, rank: int, size: int, timeout: float, links: Mapping[int, Link], cuda: Any
    ) -> None:
        self.cuda = cuda
        """The device's calls."""
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._starting = threading.Lock()
        """Keeps the order of the calls."""
        super().__init__(name, epoch, rank, size, timeout, links)

    # ---- messages -------------------------------------------------------------------------------------------

    def isend(self, array: Any, to: int, *, timeout: float | None = None) -> Operation:
        """Start to send; see `Group`."""
        memory = self.cuda.memory(array, f"{self.label}: send", writes=False)
        what, route = f"send of {memory.nbytes} bytes", (self.rank, self._peer(to))

        def act(lane: Lane, call: Call) -> None:
            lane.announce(memory.nbytes)
            if memory.nbytes:
                lane.run(call, memory, lambda channel, pointer: channel.send(pointer, memory.nbytes, 1), reads=True)

        return self._start(what, route, [to], timeout, act)

    def irecv(self, array: Any, source: int, *, timeout: float | None = None) -> Operation:
        """Start to receive; see `Group`."""
        memory = self.cuda.memory(array, f"{self.label}: recv", writes=True)
        what, route = f"recv of {memory.nbytes} bytes", (self._peer(source), self.rank)

        def act(lane: Lane, call: Call) -> None:
            told = lane.announced(call)
            if told != memory.nbytes:
                where = f"{self.label}: message from rank {source} to rank {self.rank}"
                raise TensorMismatchError(f"{where}: expected {memory.nbytes} bytes; found {told}")
            if memory.nbytes:
                lane.run(call, memory, lambda channel, pointer: channel.receive(pointer, memory.nbytes, 0), writes=True)

        return self._start(what, route, [source], timeout, act)

    # ---- collectives ----------------------------------------------------------------------------------------

    def ibroadcast(self, array: Any, root: int = 0, *, timeout: float | None = None) -> Operation:
        """Start to give all what the root has; see `Group`."""
        mine = self._root(root) == self.rank
        memory = self.cuda.memory(array, f"{self.label}: broadcast", writes=not mine)

        def launch(channel: Any, pointer: int) -> None:
            channel.broadcast([(pointer, memory.nbytes, root)])

        return self._collective("broadcast", memory, launch, timeout, reads=mine, writes=not mine)

    def iall_gather(
        self, array: Any, bounds: Sequence[int] | None = None, *, timeout: float | None = None
    ) -> Operation:
        """Start to give all ranks all parts; see `Group`."""
        memory = self.cuda.memory(array, f"{self.label}: all_gather", writes=True)
        each = dtype_of(memory.dtype).itemsize
        edges = self._bounds(memory.nbytes // each, bounds)
        parts = [(each * first, each * (end - first), root) for root, (first, end) in enumerate(pairwise(edges))]

        def launch(channel: Any, pointer: int) -> None:
            channel.broadcast([(pointer + offset, nbytes, root) for offset, nbytes, root in parts if nbytes])

        return self._collective("all_gather", memory, launch, timeout, reads=True, writes=True)

    def iall_reduce(self, array: Any, op: Op = "sum", *, timeout: float | None = None) -> Operation:
        """Start to combine the ranks' arrays; see `Group`."""
        where = f"{self.label}: all_reduce"
        memory = self.cuda.memory(array, where, writes=True)
        Reduction(op, dtype_of(memory.dtype), 0, where)  # checks what is asked for
        if memory.dtype not in self.cuda.types:
            raise TensorMismatchError(f"{where}: expected one of {', '.join(self.cuda.types)}; found {memory.dtype}")
        count = memory.nbytes // dtype_of(memory.dtype).itemsize

        def launch(channel: Any, pointer: int) -> None:
            channel.all_reduce(pointer, count, self.cuda.types[memory.dtype], _OPS[op])

        return self._collective("all_reduce", memory, launch, timeout, reads=True, writes=True)

    def ibarrier(self, *, timeout: float | None = None) -> Operation:
        """Start to wait for all; see `Group`."""

        def act(lane: Lane, call: Call) -> None:
            memory = lane.channel(call).scratch(1)
            kind = self.cuda.types["uint8"]
            lane.run(call, memory, lambda channel, pointer: channel.all_reduce(pointer, 1, kind, _OPS["max"]))

        return self._start("barrier", COLLECTIVE, self._others(), timeout, act)

    def _collective(
        self,
        what: str,
        memory: Memory,
        launch: Callable[[Any, int], None],
        timeout: float | None,
        *,
        reads: bool,
        writes: bool,
    ) -> Operation:
        def act(lane: Lane, call: Call) -> None:
            if memory.nbytes:
                lane.run(call, memory, launch, reads=reads, writes=writes)

        return self._start(what, COLLECTIVE, self._others(), timeout, act)

    def _start(
        self, what: str, route: tuple[int, int], peers: Collection[int], timeout: float | None, act: Act
    ) -> Operation:
        """Hand an operation over to the thread of its lane."""
        seconds = self._seconds(timeout)
        self._enter(what, peers)
        with self._starting:
            begun = None
            if route == COLLECTIVE:
                begun = self._begun = self._begun + 1
            call = Call(self, what, peers, seconds, begun, act)
            self._lane(route).put(call)
        return call

    def _lane(self, route: tuple[int, int]) -> Lane:
        with self._changed:
            if route not in self._lanes:
                if route == COLLECTIVE:
                    self._lanes[route] = Lane(self, self.cuda, self.tell, route, self._others(), self.rank)
                else:
                    peers = [rank for rank in route if rank != self.rank]
                    self._lanes[route] = Lane(self, self.cuda, self.tell, route, peers, route.index(self.rank))
            return self._lanes[route]

    def tell(self, peers: Collection[int], message: Mapping[str, Any]) -> None:
        """Send members a message by the mesh."""
        for peer in peers:
            self._mesh.tell(peer, message)

    def _told(self, peer: int, message: Mapping[str, Any]) -> None:
        if "lane" not in message:
            super()._told(peer, message)
            return
        first, second = message["lane"]
        with self._changed:
            self._lane((int(first), int(second))).told(message)
            self._changed.notify_all()

    # ---- the end --------------------------------------------------------------------------------------------

    def _cut(self) -> None:
        with self._changed:
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.abort()

    def _release(self) -> None:
        with self._changed:
            threads = [lane.close() for lane in self._lanes.values()]
        deadline = time.monotonic() + CLOSE_S
        for thread in threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0.0))


def _check_devices(label: str, devices: Sequence[str]) -> None:
    """Refuse two ranks on one GPU, on which NCCL would fail or wait for ever."""
    first: dict[str, int] = {}
    for rank, device in enumerate(devices):
        if device in first:
            raise ValueError(
                f"{label}: expected a GPU for each rank; found ranks {first[device]} and {rank} on one ({device})"
            )
        first[device] = rank
