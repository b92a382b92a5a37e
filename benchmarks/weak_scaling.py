"""1 to 16 clients on 1 to 4 hosts, each with a model of the same size (DStore's and EvoStore's figure 4).

Rules
- A host is a raylet on this machine, with a shard of its own; the clients are shared out evenly.
- Models are of two shapes: small ones, and the papers', of 100 even layers, but of 512 MiB in place of 4 GB.
- All clients save at the same moment, then all load, into arrays of their own. What counts is the time from the first
  one's beginning to the last one's end.
- The floor is as many processes that copy as many bytes at the same moment: what the memory gives to so many.
- The peer is h5py, into files in one folder in memory that all reach: it pays for no network and no disk.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from .measure import GIB, MIB, Effort, Goal, Report, Row, Sample, progress
from .raylets import raylets
from .savers import COPY, FILE_LOAD, FILE_SAVE, LOAD, SAVE, Savers, Step
from .session import NAME

MEMORY = "/dev/shm"  # noqa: S108  a folder in memory
PEER = "h5py, one folder in memory"
FLOOR = "as many copies at once"
SHARE = 0.9
"""Of the memory's bandwidth, with `CLIENTS` on one host."""
CLIENTS = 4
WARMUP = 2


@dataclass(frozen=True)
class Sizes:
    """How much to measure."""

    clients: tuple[int, ...]
    hosts: tuple[int, ...]
    size_bytes: int
    """Of each client's model."""
    layers: int
    rounds: int


QUICK = (Sizes((1, 2, 4), (1, 2), 16 * MIB, 8, 5),)
FULL = (Sizes((1, 2, 4, 8, 16), (1, 2, 4), 32 * MIB, 8, 15), Sizes((1, 2, 4), (1,), 512 * MIB, 100, 9))


def run(effort: Effort) -> Report:
    """Measure each number of clients on each number of hosts."""
    report = Report("weak_scaling")
    for sizes in QUICK if effort is Effort.QUICK else FULL:
        for hosts in sizes.hosts:
            measure(report, hosts, sizes)
    return report


def measure(report: Report, hosts: int, sizes: Sizes) -> None:
    """Measure each number of clients on so many hosts."""
    from tensorvine.actors import Repository

    counts = [count for count in sizes.clients if count >= hosts]
    room = 3 * sizes.size_bytes * counts[-1] // hosts
    """On each host: what is saved, and what is retired and not given back yet."""
    with (
        raylets(hosts, GIB // 4) as nodes,
        Repository.start(NAME, shards=hosts, store_bytes=room, preallocate_bytes=room),
        tempfile.TemporaryDirectory(prefix="weak_scaling-", dir=MEMORY) as folder,
    ):
        for count in counts:
            progress(f"{count} clients on {hosts} hosts")
            savers = Savers(NAME, nodes, count, (sizes.size_bytes, sizes.layers), Path(folder))
            found = [savers.round() for _ in range(WARMUP + sizes.rounds)][WARMUP:]
            savers.close()
            for what, peer in ((SAVE, FILE_SAVE), (LOAD, FILE_LOAD)):
                steps = {name: [each[name] for each in found] for name in (what, peer, COPY)}
                case = f"{count} clients on {hosts} hosts, {sizes.size_bytes // MIB} MiB: {what}"
                report.add(
                    row_of(case, steps, what, peer, count * sizes.size_bytes),
                    headline=(count, hosts, what) == (CLIENTS, 1, SAVE),
                )


def row_of(case: str, steps: dict[str, list[Step]], what: str, peer: str, size: int) -> Row:
    """Set a step of ours beside the peer's and the floor; `size` is the bytes of all clients' models."""
    ours, theirs, floor = (Sample(tuple(step.seconds for step in steps[name])) for name in (what, peer, COPY))
    share = median(copy / mine for copy, mine in zip(floor.times, ours.times, strict=True))
    goals = (
        (Goal("of the memory's bandwidth", share, at_least=SHARE),)
        if case.startswith(f"{CLIENTS} clients on 1 ")
        else ()
    )
    fair = {name: median(step.fairness for step in found) for name, found in steps.items()}
    facts = {
        "aggregate_gb_per_s": size / ours.median / 1e9,
        "peer_gb_per_s": size / theirs.median / 1e9,
        "memory_gb_per_s": size / floor.median / 1e9,
        "share_of_memory": share,
        "fairness": fair[what],
        "peer_fairness": fair[peer],
        "memory_fairness": fair[COPY],
    }
    said = f"{case}, {facts['aggregate_gb_per_s']:.2f} GB/s, {share:.2f} of memory's, slowest {fair[what]:.2f} of mean"
    return Row(said, ours, size, PEER, theirs, FLOOR, floor.median, goals, facts)
