"""Saves and loads of 1 to 16 clients on 1 to 4 hosts at once, compared with h5py (DStore's and EvoStore's figure 4).

Rules
- A host is a raylet on this machine, with a shard of its own; the clients are shared out evenly, each with a model.
- Models are of two shapes: small ones, and the papers', of 100 even layers, but of 512 MiB instead of 4 GB.
- All clients save at the same moment, then all load, into arrays of their own: from the first one's beginning to the
  last one's end. Cleaning up is not timed, and begins when all are done.
- The floor is the same number of processes that copy the same bytes at the same moment.
- The peer is h5py, into files in one folder in memory that all reach: it pays for no network and no disk.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from .core.clusters import NAME, raylets
from .core.fleet import START_S, Fleet, Span, fairness_of, seconds_of
from .core.measure import GIB, MIB, buffers_like, copying, progress, sample
from .core.models import synthetic
from .core.peers import H5py
from .core.report import Goal, Report

MEMORY = "/dev/shm"  # noqa: S108  a folder in memory
PEER, FLOOR = "h5py, one folder in memory", "as many copies at once"
SAVE, LOAD, COPY, FILE_SAVE, FILE_LOAD = "save", "load", "copy", "file_save", "file_load"
ORDER = (COPY, SAVE, LOAD, FILE_SAVE, FILE_LOAD)
"""The steps of a round, in the necessary order: a loaded model was saved before."""
SHARE, CLIENTS = 0.9, 4
"""Of the memory's bandwidth, with this number of clients on one host."""


def run(report: Report) -> None:
    """Measure each number of clients on each number of hosts."""
    shapes = report.pick(
        quick=(((2,), (2,), MIB, 8, 1, 0),),
        normal=(((1, 2, 4, 8, 16), (1, 2, 4), 32 * MIB, 8, 15, 2), ((1, 2, 4), (1,), 512 * MIB, 100, 9, 2)),
    )
    for clients, hosts, *shape in shapes:
        for number in hosts:
            _measure(report, number, [count for count in clients if count >= number], *shape)


def _measure(report: Report, hosts: int, counts: list[int], size: int, layers: int, rounds: int, warmup: int) -> None:
    """Measure each number of clients on `hosts` hosts."""
    from tensorvine.actors import Repository

    room = 3 * size * counts[-1] // hosts  # for saved models, and for retired ones that still take memory
    with (
        raylets(hosts, GIB // 4) as nodes,
        Repository.start(NAME, shards=hosts, store_bytes=room, preallocate_bytes=room),
        tempfile.TemporaryDirectory(prefix="weak_scaling-", dir=MEMORY) as folder,
    ):
        for count in counts:
            progress(f"{count} clients on {hosts} hosts")
            with Fleet(Client, [(number, size, layers, folder) for number in range(count)], nodes=nodes) as clients:
                clients.all("ready", timeout=START_S)
                found: list[dict[str, list[Span]]] = []
                for _ in range(warmup + rounds):
                    found.append({step: clients.spans(step) for step in ORDER})
                    clients.all("tidy")
            for what, peer in ((SAVE, FILE_SAVE), (LOAD, FILE_LOAD)):
                case = f"{count} clients on {hosts} hosts, {size // MIB} MiB: {what}"
                _add(report, case, found[warmup:], what, peer, count * size, (count, hosts) == (CLIENTS, 1))


def _add(
    report: Report, case: str, found: list[dict[str, list[Span]]], what: str, peer: str, size: int, goal: bool
) -> None:
    ours, theirs, floor = (sample([seconds_of(each[step]) for each in found]) for step in (what, peer, COPY))
    share = median(copy / mine for copy, mine in zip(floor.times, ours.times, strict=True))
    fair, gb_per_s = median(fairness_of(each[what]) for each in found), size / ours.median / 1e9
    report.add(
        f"{case}, {gb_per_s:.2f} GB/s, {share:.2f} of memory's, slowest {fair:.2f} of mean",
        ours,
        size,
        peer=(PEER, theirs),
        floor=(FLOOR, floor),
        goals=[Goal("of the memory's bandwidth", share, at_least=SHARE)] if goal else [],
        headline=goal and what == SAVE,
        aggregate_gb_per_s=gb_per_s,
        memory_gb_per_s=size / floor.median / 1e9,
        share_of_memory=share,
        fairness=fair,
    )


class Client:
    """A client with a model of its own."""

    def __init__(self, number: int, size: int, layers: int, folder: str) -> None:
        from tensorvine.actors import Repository

        model = synthetic(size, layers)
        self._repo = Repository.connect(NAME)
        self._name, self._path = f"weak/{number}", Path(folder, f"{number}.h5")
        self._graph, self._tensors = model.graph, model.tensors(number)
        self._buffers = buffers_like(self._tensors)
        self.copy = copying(self._tensors, self._buffers)
        self._peer = H5py()
        self._peer.hold(self._tensors)

    def ready(self) -> None:
        """Return when the client is connected and has its model."""

    def save(self) -> None:
        """Save the model."""
        self._saved = self._repo.save(self._name, self._tensors, graph=self._graph)

    def load(self) -> None:
        """Load the model into warm arrays."""
        self._repo.load(self._saved.ref, into=self._buffers)

    def file_save(self) -> None:
        """Write the model with h5py."""
        self._peer.save(self._path)

    def file_load(self) -> None:
        """Fill warm arrays from the file, as h5py can: `Dataset.read_direct`."""
        import h5py

        with h5py.File(self._path, "r") as file:
            datasets: Any = file
            for name, buffer in self._buffers.items():
                datasets[name].read_direct(buffer)

    def tidy(self) -> None:
        """Retire the saved model, and delete the file."""
        self._repo.retire(self._saved.ref)
        self._path.unlink()

    def close(self) -> None:
        """Disconnect."""
        self._repo.close()
