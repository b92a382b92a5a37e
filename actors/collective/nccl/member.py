"""Groups between GPUs by NCCL, through CuPy's communicators: no PyTorch is needed.

Rules
- Messages and all-gathers are bytes, whatever the dtype. What is reduced is NCCL's to know; other dtypes are refused.
- Collectives have one communicator, and so has each direction between two ranks, from its first message on: a
  communicator does one thing after the other, and nothing is to wait for what it has nothing to do with.
- With each message the sender tells its size and dtype by the connections, and with each collective all tell all what
  they bring: NCCL would wait for ever, or write too much. That comes before NCCL is asked.
- Arrays in host memory travel through device memory of their size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import ClassVar

from ....store.arrays import dtype_of
from ....store.errors import TensorMismatchError, TensorVineError
from ....store.waiting import Deadline
from ..brought import Brought, Content, code_of, unlike
from ..group import Op
from ..links import Frame, Link
from ..member import Member, Seat
from ..reduction import Numbers, Reduction
from ..timeouts import TIMEOUTS
from .device import Communicator, Device, Memory
from .lane import COLLECTIVE, Act, Call, Lane, Route, route_of

_OPS: dict[Op, int] = {"sum": 0, "product": 1, "max": 2, "min": 3, "mean": 4}
"""NCCL's numbers."""


class NcclGroup(Member[Memory]):
    """One member's end of a group over NCCL; `NcclBackend.join` makes it.

    Args:
        seat: as in `Member`.
        timeout: as in `Member`.
        links: as in `Member`.
        cuda: the device's calls.
    """

    backend: ClassVar[str] = "nccl"

    def __init__(self, seat: Seat, timeout: float, links: Mapping[int, Link], cuda: Device) -> None:
        super().__init__(seat, timeout, links)
        self._cuda = cuda
        self._lanes: dict[Route, Lane] = {}
        self._starting = threading.Lock()
        """Keeps the order of the calls."""

    def _memory(self, array: object, where: str, *, writes: bool) -> Memory:
        return self._cuda.memory(array, where, writes=writes)

    def _numbers(self, memory: Memory) -> Numbers:
        dtype = dtype_of(memory.dtype)
        return Numbers(dtype, memory.nbytes // dtype.itemsize)

    # ---- messages -------------------------------------------------------------------------------------------

    def _send(self, memory: Memory, to: int, seconds: float) -> Call:
        def act(lane: Lane, call: Call) -> None:
            lane.announce(_content(memory))
            if memory.nbytes:
                lane.run(call, memory, lambda channel, pointer: channel.send(pointer, memory.nbytes, 1), reads=True)

        return self._start(f"send of {memory.nbytes} bytes", (self.rank, to), [to], seconds, act)

    def _receive(self, memory: Memory, source: int, seconds: float) -> Call:
        def act(lane: Lane, call: Call) -> None:
            where = f"{self.label}: message from rank {source} to rank {self.rank}"
            error = unlike(where, lane.announced(call), _content(memory))
            if error is not None:
                raise error
            if memory.nbytes:
                lane.run(call, memory, lambda channel, pointer: channel.receive(pointer, memory.nbytes, 0), writes=True)

        return self._start(f"recv of {memory.nbytes} bytes", (source, self.rank), [source], seconds, act)

    # ---- collectives ----------------------------------------------------------------------------------------

    def _broadcast(self, memory: Memory, root: int, words: Brought, seconds: float) -> Call:
        mine = root == self.rank

        def launch(channel: Communicator, pointer: int) -> None:
            channel.broadcast([(pointer, memory.nbytes, root)])

        return self._collective(words, memory, launch, seconds, reads=mine, writes=not mine)

    def _all_gather(self, memory: Memory, bounds: Sequence[int], words: Brought, seconds: float) -> Call:
        each = dtype_of(memory.dtype).itemsize
        parts = [(each * first, each * (end - first), root) for root, (first, end) in enumerate(pairwise(bounds))]

        def launch(channel: Communicator, pointer: int) -> None:
            channel.broadcast([(pointer + offset, nbytes, root) for offset, nbytes, root in parts if nbytes])

        return self._collective(words, memory, launch, seconds, reads=True, writes=True)

    def _all_reduce(self, memory: Memory, reduction: Reduction, words: Brought, seconds: float) -> Call:
        types = self._cuda.types
        if memory.dtype not in types:
            where = f"{self.label}: all_reduce"
            raise TensorMismatchError(f"{where}: expected one of {', '.join(types)}; found {memory.dtype}")
        count = self._numbers(memory).size

        def launch(channel: Communicator, pointer: int) -> None:
            channel.all_reduce(pointer, count, types[memory.dtype], _OPS[reduction.op])

        return self._collective(words, memory, launch, seconds, reads=True, writes=True)

    def _barrier(self, words: Brought, seconds: float) -> Call:
        kind = self._cuda.types["uint8"]

        def act(lane: Lane, call: Call) -> None:
            lane.agree(call, self.rank, words.words)
            memory = lane.channel(call).scratch(1)
            lane.run(call, memory, lambda channel, pointer: channel.all_reduce(pointer, 1, kind, _OPS["max"]))

        return self._start(words.verb, COLLECTIVE, self.others, seconds, act)

    def _collective(
        self,
        words: Brought,
        memory: Memory,
        launch: Callable[[Communicator, int], None],
        seconds: float,
        *,
        reads: bool,
        writes: bool,
    ) -> Call:
        def act(lane: Lane, call: Call) -> None:
            lane.agree(call, self.rank, words.words)
            if memory.nbytes:
                lane.run(call, memory, launch, reads=reads, writes=writes)

        return self._start(words.verb, COLLECTIVE, self.others, seconds, act)

    def _start(self, what: str, route: Route, peers: Sequence[int], seconds: float, act: Act) -> Call:
        """Hand an operation over to the thread of its lane."""
        self._enter(what, peers)
        with self._starting:
            number = None
            if route == COLLECTIVE:
                number = self._begun = self._begun + 1
            call = Call(self, what, peers, seconds, number, act)
            with self._changed:
                self.standing.check()
                self._lane(route).put(call)
        return call

    def _lane(self, route: Route) -> Lane:
        """Return the lane of a route; the lock is held."""
        if route not in self._lanes:
            peers = self.others if route == COLLECTIVE else [rank for rank in route if rank != self.rank]
            rank = self.rank if route == COLLECTIVE else route.index(self.rank)
            self._lanes[route] = Lane(self, self._cuda, route, peers, rank)
        return self._lanes[route]

    # ---- for lanes ------------------------------------------------------------------------------------------

    def tell(self, peers: Sequence[int], frame: Frame) -> None:
        """Send members a frame."""
        for peer in peers:
            self._connections.post(peer, frame)

    def lacks(self, peers: Sequence[int]) -> bool:
        """Tell whether one of these died, left or gave up."""
        with self._changed:
            return self.standing.lacks(peers)

    # ---- what the connections tell --------------------------------------------------------------------------

    def _take(self, peer: int, frame: Frame) -> None:
        with self._changed:
            self._lane(route_of(frame)).take(peer, frame)
            self._changed.notify_all()

    # ---- the end --------------------------------------------------------------------------------------------

    def _end_all(self, reason: TensorVineError) -> None:
        for lane in self._lanes.values():
            lane.end_all(reason)

    def _cut(self) -> None:
        with self._changed:
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.abort()

    def _release(self) -> None:
        with self._changed:
            threads = [lane.close() for lane in self._lanes.values()]
        deadline = Deadline.after(TIMEOUTS.release)
        for thread in threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(deadline.left())


def _content(memory: Memory) -> Content:
    return Content(memory.nbytes, code_of(memory.dtype))
