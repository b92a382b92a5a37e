"""Messages and collectives of each back end, compared with `ray.util.collective` and a raw loopback socket.

Rules
- Members are actors on this machine. A message goes back and forth, half of that counts; a collective counts from the
  last member's beginning to the last one's end.
- The floor of each case is the same array once through a raw TCP connection of this machine.
- Parties take turns; before, each must deliver the right numbers. Arrays are made and touched before.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from .core.clusters import repository
from .core.fleet import Fleet
from .core.measure import GIB, MIB, expect, in_turn, progress, sample
from .core.report import Goal, Report
from .update_latency import receive

KIB, MESSAGE = 1 << 10, "send"
RAW, STOCK, OURS = "raw", "stock", ("shared", "gloo")
HEADLINE, SHARE = ("gloo", MESSAGE, 64 * MIB), 0.5
"""The headline, and the share of the raw socket's bandwidth that it should have."""
PEER, FLOOR = "ray.util.collective GLOO", "a raw loopback socket"
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Case:
    """What is timed."""

    kind: str
    nbytes: int
    size: int
    """Ranks."""

    @property
    def repeats(self) -> int:
        """How often in one turn: small arrays more often."""
        return max(1, min(100, 32 * MIB // self.nbytes))

    def __str__(self) -> str:
        length = f"{self.nbytes // MIB} MiB" if self.nbytes >= MIB else f"{self.nbytes // KIB} KiB"
        return f"{self.kind} {length}" + ("" if self.kind == MESSAGE else f", {self.size} ranks")


def run(report: Report) -> None:
    """Measure all back ends, each number of ranks with members of its own."""
    rounds, messages, collectives, sizes = report.pick(
        quick=(1, (KIB,), (MIB,), (2,)), normal=(9, (KIB, MIB, 64 * MIB, 256 * MIB), (KIB, MIB, 64 * MIB), (2, 4))
    )
    with repository(GIB // 8):
        for size in sizes:
            cases = [Case(MESSAGE, nbytes, size) for nbytes in messages] if size == sizes[0] else []
            cases += [Case(kind, nbytes, size) for kind in ("broadcast", "all_reduce") for nbytes in collectives]
            with Fleet(Member, [()] * size) as members:
                _join(members, size)
                for case in cases:
                    progress(str(case))
                    _measure(report, members, case, rounds)


def _join(members: Fleet, size: int) -> None:
    """Make a group of each party, and check that each delivers the right numbers."""
    port = members.each("port", [()])[0]
    for party in (*OURS, STOCK, RAW):
        ranks = 2 if party == RAW else size
        members.each("join", [(party, rank, ranks, port) for rank in range(ranks)])
        members.each("check", [(party, ranks)] * ranks)


def _measure(report: Report, members: Fleet, case: Case, rounds: int) -> None:
    """Let all parties take turns; the first round does not count. Add a row for each back end."""
    parties = (*OURS, STOCK, RAW)
    times: dict[str, list[float]] = {party: [] for party in parties}
    for turn in range(1 + rounds):
        for party in in_turn(parties, turn):
            if case.kind == MESSAGE or party == RAW:
                took = members.each("back_and_forth", [(party, case.nbytes, case.repeats)] * 2)[0]
            else:
                moments = zip(*members.all("all_at_once", party, case.kind, case.nbytes, case.repeats), strict=True)
                took = median(max(end for _, end in each) - max(start for start, _ in each) for each in moments)
            if turn:
                times[party].append(took)
    found = {party: sample(each) for party, each in times.items()}
    for backend in OURS:
        ours, raw = found[backend], found[RAW]
        headline = (backend, case.kind, case.nbytes) == HEADLINE
        goal = Goal("of a raw loopback socket's bandwidth", raw.median / ours.median, at_least=SHARE)
        report.add(
            f"{backend}: {case}",
            ours,
            case.nbytes,
            peer=(PEER, found[STOCK]),
            floor=(FLOOR, raw),
            goals=[goal] if headline else [],
            headline=headline,
            gb_per_s=case.nbytes / ours.median / 1e9,
        )


class Member:
    """An actor that is a rank of a group of each party."""

    def __init__(self) -> None:
        self._parties: dict[str, Any] = {}
        self._rank: dict[str, int] = {}
        self._arrays: dict[int, Any] = {}
        self._server = socket.create_server(("127.0.0.1", 0))

    def port(self) -> int:
        """Return the port of the raw socket."""
        return int(self._server.getsockname()[1])

    def join(self, party: str, rank: int, size: int, port: int) -> None:
        """Become a rank of a party; `port` is rank 0's, of the raw socket."""
        if party == RAW:
            self._parties[party] = _Raw(self._server, port if rank else None)
        elif party == STOCK:
            self._parties[party] = _Stock(rank, size)
        else:
            from tensorvine.actors.collective.connect import connect

            self._parties[party] = connect(f"{party} {size}", rank, size, backend=party, timeout=TIMEOUT_S)
        self._rank[party] = rank

    def check(self, party: str, size: int) -> None:
        """Check that the right numbers arrive."""
        group, rank, array = self._parties[party], self._rank[party], self._array(4000)

        def holds(value: float, what: str) -> None:
            expect(bool((array == value).all()), "collective", f"{value} everywhere after {party}: {what}")
            array[:] = rank + 1

        array[:] = rank + 1
        if rank < 2:
            (group.recv if rank else group.send)(array, 1 - rank)
            holds(1, "send")
        if party != RAW:
            group.broadcast(array, 0)
            holds(1, "broadcast")
            group.all_reduce(array)
            holds(size * (size + 1) // 2, "all_reduce")
        array[:] = 0

    def back_and_forth(self, party: str, nbytes: int, repeats: int) -> float:
        """Send an array to rank 1 and get it back; return the seconds of one way."""
        group, array, other = self._parties[party], self._array(nbytes), 1 - self._rank[party]
        steps = (group.send, group.recv) if other else (group.recv, group.send)
        start = time.perf_counter()
        for _ in range(repeats):
            for step in steps:
                step(array, other)
        return (time.perf_counter() - start) / repeats / 2

    def all_at_once(self, party: str, kind: str, nbytes: int, repeats: int) -> list[tuple[float, float]]:
        """Run a collective, a barrier before each; return when each began and ended here."""
        group, array = self._parties[party], self._array(nbytes)
        act, moments = getattr(group, kind), list[tuple[float, float]]()
        for _ in range(repeats):
            group.barrier()
            start = time.monotonic()
            act(array)
            moments.append((start, time.monotonic()))
        return moments

    def close(self) -> None:
        """Leave all groups."""
        for party in self._parties.values():
            party.close()
        self._server.close()

    def _array(self, nbytes: int) -> Any:
        return self._arrays.setdefault(nbytes, np.full(nbytes // 4, 0, np.float32))


class _Raw:
    """One end of a TCP connection; without `port`, of a peer that connects to this server."""

    def __init__(self, server: socket.socket, port: int | None) -> None:
        if port is None:
            server.settimeout(TIMEOUT_S)
            self._socket, _ = server.accept()
        else:
            self._socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(None)  # a socket with a timeout polls before each piece
        self.close = self._socket.close

    def send(self, array: Any, to: int) -> None:
        """Send an array's bytes."""
        self._socket.sendall(array.view(np.uint8))

    def recv(self, array: Any, source: int) -> None:
        """Fill an array."""
        receive(self._socket, memoryview(array.view(np.uint8)))


class _Stock:
    """A rank of `ray.util.collective`'s GLOO: there is one such group in a process."""

    def __init__(self, rank: int, size: int) -> None:
        from ray.util import collective

        collective.init_collective_group(size, rank, backend="GLOO", group_name="default")
        self.send, self.recv, self.broadcast = collective.send, collective.recv, collective.broadcast
        self.all_reduce, self.barrier = collective.allreduce, collective.barrier
        self.close = collective.destroy_collective_group
