"""Bandwidth and latency of groups: each back end, beside `ray.util.collective`'s GLOO and a raw loopback socket.

Rules
- Members are actors on this machine. A message goes back and forth, half of that counts; a collective counts from when
  the last member began until the last one has ended.
- The floor of each case is the same array once through a raw TCP connection of this machine.
- Parties take turns, each round starting one place further along; before, each must bring the right numbers.
- NCCL takes part where the cluster has as many GPUs as there are ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from .collective_member import RAW, STOCK, TIMEOUT_S, Member
from .measure import GIB, MIB, Effort, Goal, Report, Row, Sample, progress

KIB = 1 << 10
MESSAGE = "send"
HEADLINE = ("gloo", MESSAGE, 64 * MIB)
SHARE = 0.5
"""Of the raw socket's bandwidth, Gloo's messages should have at least this."""
NAMES = {RAW: "a raw loopback socket", STOCK: "ray.util.collective GLOO"}


@dataclass(frozen=True)
class Plan:
    """How much is run."""

    rounds: int
    messages: tuple[int, ...]
    """Bytes of a message."""
    collectives: tuple[int, ...]
    """Bytes of a collective's array."""
    sizes: tuple[int, ...]
    """Numbers of ranks."""


PLANS = {
    Effort.QUICK: Plan(3, (KIB, MIB, 64 * MIB), (KIB, MIB, 16 * MIB), (2,)),
    Effort.NORMAL: Plan(9, (KIB, MIB, 64 * MIB, 256 * MIB), (KIB, MIB, 64 * MIB), (2, 4)),
    Effort.FULL: Plan(25, (KIB, 32 * KIB, MIB, 64 * MIB, 256 * MIB), (KIB, MIB, 64 * MIB, 256 * MIB), (2, 4)),
}


@dataclass(frozen=True)
class Case:
    """What is timed."""

    kind: str
    """ "send", "broadcast" or "all_reduce"."""
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


def run(effort: Effort) -> Report:
    """Measure all back ends, each number of ranks with members of its own."""
    plan = PLANS[effort]
    report = Report("collective")
    with _ray():
        for size in plan.sizes:
            messages = plan.messages if size == plan.sizes[0] else ()
            cases = [Case(MESSAGE, nbytes, size) for nbytes in messages]
            cases += [Case(kind, nbytes, size) for kind in ("broadcast", "all_reduce") for nbytes in plan.collectives]
            with _Members(size) as members:
                for case in cases:
                    progress(str(case))
                    _add(report, case, _times(members, case, plan.rounds))
    return report


class _Members:
    """Actors that are a group of each party."""

    def __init__(self, size: int) -> None:
        import ray

        self._size = size
        gpus = ray.cluster_resources().get("GPU", 0) >= size
        self.backends = ["shared", "gloo", *(["nccl"] if gpus else [])]
        actor: Any = ray.remote(Member).options(num_cpus=0, num_gpus=1 if gpus else 0)
        self._actors = [actor.remote() for _ in range(size)]
        port = self._ask("port", 1)[0]
        for party in (*self.backends, STOCK, RAW):
            ranks = 2 if party == RAW else size
            calls = [
                member.join.remote(f"{party} {size}" if party in self.backends else party, party, rank, ranks, port)
                for rank, member in enumerate(self._actors[:ranks])
            ]
            ray.get(calls, timeout=TIMEOUT_S)
            self._ask("check", ranks, self.name(party), ranks, collectives=party != RAW)

    def name(self, party: str) -> str:
        """Return what the members call a party."""
        return f"{party} {self._size}" if party in self.backends else party

    def time(self, party: str, case: Case) -> float:
        """Let a party have a turn; gives the seconds of a case."""
        if case.kind == MESSAGE or party == RAW:
            return self._ask("back_and_forth", 2, self.name(party), case.nbytes, case.repeats)[0]
        found = self._ask("all_at_once", self._size, self.name(party), case.kind, case.nbytes, case.repeats)
        return median(
            max(end for _, end in moments) - max(start for start, _ in moments) for moments in zip(*found, strict=True)
        )

    def _ask(self, method: str, ranks: int, *given: Any, **named: Any) -> list[Any]:
        import ray

        calls = [getattr(member, method).remote(*given, **named) for member in self._actors[:ranks]]
        return ray.get(calls, timeout=TIMEOUT_S)

    def __enter__(self) -> _Members:
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        try:
            self._ask("close", self._size)
        finally:
            for actor in self._actors:
                ray.kill(actor)


@contextmanager
def _ray() -> Iterator[None]:
    """Start a Ray, with the workers that are told where this package is."""
    from tensorvine.clusters.local import LocalCluster

    with LocalCluster(object_store_bytes=GIB // 8):
        yield


def _times(members: _Members, case: Case, rounds: int) -> dict[str, Sample]:
    """Let all parties take turns; the first round does not count."""
    parties = [*members.backends, STOCK, RAW]
    found: dict[str, list[float]] = {party: [] for party in parties}
    for turn in range(1 + rounds):
        shift = turn % len(parties)
        for party in parties[shift:] + parties[:shift]:
            seconds = members.time(party, case)
            if turn:
                found[party].append(seconds)
    return {party: Sample(tuple(times)) for party, times in found.items()}


def _add(report: Report, case: Case, found: dict[str, Sample]) -> None:
    """Add a row for each back end of ours."""
    for backend in found:
        if backend in NAMES:
            continue
        ours, raw = found[backend], found[RAW].median
        goals: list[Goal] = []
        headline = (backend, case.kind, case.nbytes) == HEADLINE
        if headline:
            goals.append(Goal("of a raw loopback socket's bandwidth", raw / ours.median, at_least=SHARE))
        facts = {
            "backend": backend,
            "kind": case.kind,
            "ranks": case.size,
            "gb_per_s": case.nbytes / ours.median / 1e9,
            "peer_gb_per_s": case.nbytes / found[STOCK].median / 1e9,
            "limit_gb_per_s": case.nbytes / raw / 1e9,
        }
        names = NAMES[STOCK], NAMES[RAW]
        row = Row(f"{backend}: {case}", ours, case.nbytes, names[0], found[STOCK], names[1], raw, tuple(goals), facts)
        report.add(row, headline=headline)
