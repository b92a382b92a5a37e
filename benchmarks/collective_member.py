"""A member of groups: ours, one of `ray.util.collective`, and one end of a raw socket.

Rules
- Arrays are made and touched before anything is timed; all parties of a process use the same ones.
- Moments are of the machine's monotonic clock, which all its processes share.
"""

from __future__ import annotations

import socket
import time
from typing import Any

import numpy as np

TIMEOUT_S = 120.0
RAW, STOCK = "raw", "stock"
"""Parties that are none of ours: a TCP connection between ranks 0 and 1, and Ray's own GLOO."""


class Member:
    """An actor. Its parties have names: a back end of ours and a number of ranks, such as "gloo 2", or those above."""

    def __init__(self) -> None:
        self._parties: dict[str, Any] = {}
        self._rank: dict[str, int] = {}
        self._arrays: dict[tuple[str, int], Any] = {}
        self._server = socket.create_server(("127.0.0.1", 0))

    def port(self) -> int:
        """Return the port of the raw socket."""
        return int(self._server.getsockname()[1])

    def join(self, party: str, backend: str, rank: int, size: int, port: int) -> None:
        """Become a rank of a party; `port` is rank 0's, of the raw socket."""
        if party == RAW:
            self._parties[party] = _Raw(self._server, port if rank else None)
        elif party == STOCK:
            self._parties[party] = _Stock(rank, size)
        else:
            from tensorvine.actors.collective.connect import connect

            self._parties[party] = connect(party, rank, size, backend=backend, timeout=TIMEOUT_S)
        self._rank[party] = rank

    def check(self, party: str, size: int, *, collectives: bool) -> None:
        """See that the right numbers arrive.

        Raises:
            RuntimeError: they did not.
        """
        group, rank = self._parties[party], self._rank[party]
        array = self._array(party, 4000)
        if rank < 2:
            array[:] = rank + 1
            if rank == 0:
                group.send(array, 1)
            else:
                group.recv(array, 0)
            _expect(array, 1, f"{party}: send")
        if collectives:
            array[:] = rank + 1
            group.broadcast(array, 0)
            _expect(array, 1, f"{party}: broadcast")
            array[:] = rank + 1
            group.all_reduce(array)
            _expect(array, size * (size + 1) // 2, f"{party}: all_reduce")
        array[:] = 0

    def back_and_forth(self, party: str, nbytes: int, repeats: int) -> float:
        """Send an array to rank 1 and get it back, so many times; gives the seconds of one way."""
        group, array = self._parties[party], self._array(party, nbytes)
        first = self._rank[party] == 0
        start = time.perf_counter()
        for _ in range(repeats):
            if first:
                group.send(array, 1)
                group.recv(array, 1)
            else:
                group.recv(array, 0)
                group.send(array, 0)
        return (time.perf_counter() - start) / repeats / 2

    def all_at_once(self, party: str, kind: str, nbytes: int, repeats: int) -> list[tuple[float, float]]:
        """Do a collective so many times, a barrier before each; gives when each began and ended here."""
        group, array = self._parties[party], self._array(party, nbytes)
        act = getattr(group, kind)
        moments: list[tuple[float, float]] = []
        for _ in range(repeats):
            group.barrier()
            start = time.monotonic()
            act(array)
            moments.append((start, time.monotonic()))
        return moments

    def close(self) -> None:
        """Leave all."""
        for party in self._parties.values():
            party.close()
        self._server.close()

    def _array(self, party: str, nbytes: int) -> Any:
        place = "nccl" if party.startswith("nccl") else "host"
        if (place, nbytes) not in self._arrays:
            if place == "nccl":
                import cupy

                made: Any = cupy.zeros(nbytes // 4, cupy.float32)
            else:
                made = np.full(nbytes // 4, 0, np.float32)
            self._arrays[place, nbytes] = made
        return self._arrays[place, nbytes]


class _Raw:
    """One end of a TCP connection.

    Args:
        server: where the peer connects to.
        port: of the peer's server; None: it connects to this one.
    """

    def __init__(self, server: socket.socket, port: int | None) -> None:
        if port is None:
            server.settimeout(TIMEOUT_S)
            self._socket, _ = server.accept()
        else:
            self._socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(None)  # a socket with a timeout asks twice for each piece
        self.close = self._socket.close

    def send(self, array: Any, to: int) -> None:
        """Send an array's bytes."""
        self._socket.sendall(array.view(np.uint8))

    def recv(self, array: Any, source: int) -> None:
        """Receive as many bytes as an array has."""
        left = memoryview(array.view(np.uint8))
        while left:
            count = self._socket.recv_into(left)
            if not count:
                raise EOFError(f"raw socket: expected {len(left)} more bytes; found its end")
            left = left[count:]


class _Stock:
    """A rank of `ray.util.collective`'s GLOO: there is one such group in a process."""

    def __init__(self, rank: int, size: int) -> None:
        from ray.util import collective

        collective.init_collective_group(size, rank, backend="GLOO", group_name="default")
        self.send = collective.send
        self.recv = collective.recv
        self.broadcast = collective.broadcast
        self.all_reduce = collective.allreduce
        self.barrier = collective.barrier
        self.close = collective.destroy_collective_group


def _expect(array: Any, value: float, where: str) -> None:
    if not bool((array == value).all()):
        raise RuntimeError(f"{where}: expected {value} everywhere; found {array[:3]}")
