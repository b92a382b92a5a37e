"""A search of 1000 candidates without transfer, with HDF5 files and Redis, and with the repository (EvoStore, 5.6).

Rules
- Each search is that of `examples/nas` with DeepHyper, in a cluster of its own, one after the other.
- All searches have the same space, data, seed and number of workers. Repository and files are not synced to disk.
- A training has one epoch: each digit is seen nine times, moved by up to a pixel each way, so that an epoch takes about
  a second.
- The baseline HDF5 + Redis writes a file for each architecture, and finds ancestors by Redis-Queries (EvoStore, 5.2). A
  file is written whole and read in part. It is deleted with the last reference to its architecture.
- The target qualities are fixed here. If the search without transfer never reaches one, the ratio is a lower bound: its
  whole time counts. The order in which workers end differs from run to run, and with it the candidates.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, cast

import h5py
import numpy as np
import torch
from deephyper.evaluator.callback import Callback
from tensorvine.actors import Saved
from tensorvine.actors.search import Candidate
from tensorvine.store import ModelGraph, ModelRef

from examples.nas.job import Job
from examples.nas.search import Evaluation, Plan
from examples.nas.space import Data, load
from examples.shared.place import Place

from .core.measure import progress, sample
from .core.redis import RedisQueries, RedisServer
from .core.report import Goal, Report

if TYPE_CHECKING:
    from deephyper.evaluator import RunningJob

WORKERS = 2
TARGETS = (0.96, 0.97, 0.98, 0.985, 0.99)
"""Mean accuracies over the classes."""
NONE, HDF5, REPOSITORY = "no transfer", "HDF5 + Redis", "repository"
Search = Sequence[Mapping[str, Any]]
"""Candidates in the order in which they ended: the lines that the example writes."""


def run(report: Report) -> None:
    """Run all searches, one after the other."""
    candidates, data = report.pick(quick=(3, "wine"), normal=(1000, "digits"))
    found: dict[str, Search] = {}
    with tempfile.TemporaryDirectory(prefix="nas-") as folder:
        for mode in (NONE, HDF5, REPOSITORY):
            progress(f"nas: {mode}: {candidates} candidates")
            kind = FileJob if mode == HDF5 else MemoryJob
            place = Place("nas")
            with place.workers(WORKERS):
                job = kind(Plan(data), place, Path(folder, mode), candidates, WORKERS, mode == REPOSITORY, memory=True)
                found[mode] = job.run()
    add(report, found)


def shifted(name: str, seed: int) -> Data:
    """Load a data set. Digits are there nine times for training, moved by up to a pixel each way."""
    train, test, answers, truth = load(name, seed)
    if name == "digits":
        framed = np.pad(train.numpy().reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)))
        moved = [framed[:, y : y + 8, x : x + 8].reshape(train.shape) for y in range(3) for x in range(3)]
        train, answers = torch.from_numpy(np.concatenate(moved)), answers.repeat(9)
    return train, test, answers, truth


class MemoryJob(Job):
    """A search without transfer, or through a repository in memory, with these data."""

    def evaluation(self, plan: Plan, first: int) -> Evaluation:
        """Return what builds and trains the candidates."""
        return Evaluation(plan, first, shifted)


class FileJob(MemoryJob):
    """A search through HDF5 files and Redis."""

    def parts(self, opened: ExitStack, plan: Plan, lines: Search) -> Any:
        """Start the server, and return the run function and the callback that retires."""
        server = opened.enter_context(RedisServer())
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="nas-")))
        store = FileStore(server.socket, folder)
        opened.callback(store.close)
        evaluation = FileEvaluation(self.evaluation(plan, 0), server.socket, folder)
        return lambda job: evaluation.run(job), [FileRetirement(store, plan.population)], store

    def finish(self, repo: Any, lines: Search) -> None:
        """Do nothing: files have no lineage."""


class FileStore:
    """A client of the baseline: it has the calls of a repository that a candidate makes, and those of its results.

    Args:
        socket: Path of the Unix socket of the Redis server.
        folder: Folder of the files.
    """

    has_path = False

    def __init__(self, socket: str, folder: Path) -> None:
        self._redis, self._folder = RedisQueries(socket), folder

    def close(self) -> None:
        """Disconnect."""
        self._redis.close()

    def longest_prefix(self, graph: ModelGraph) -> FileMatch | None:
        """Find the ancestor. Its file stays until the match is released."""
        found = self._redis.query(graph)
        return None if found is None else FileMatch(self, graph, found.architecture)

    def load(self, ref: ModelRef, *, layers: Sequence[str]) -> dict[str, np.ndarray]:
        """Read the tensors of some layers of an architecture, whose key is the name."""
        with h5py.File(self.path(ref.name)) as file:
            names = [name for layer in layers for name in graph_in(file).by_name[layer].tensors]
            return {name: np.asarray(cast(Any, file[name])[()]) for name in names}

    def save(self, graph: ModelGraph, tensors: Mapping[str, np.ndarray], quality: float) -> Saved:
        """Write the model, unless its architecture is stored, and publish the architecture or add a reference."""
        key, written = graph.fingerprint.hex(), 0
        if not self.path(key).exists():
            part = self._folder / f"{key}.{os.getpid()}.part"
            with h5py.File(part, "w") as file:
                file.attrs["graph"] = np.frombuffer(graph.to_json().encode(), np.uint8)
                for name, tensor in tensors.items():
                    file.create_dataset(name, data=tensor)
            written = part.stat().st_size
            part.replace(self.path(key))
        self._redis.add_all([(graph, quality)])
        return Saved(ModelRef(key, 1), written, 0)

    def release(self, key: str) -> None:
        """Drop a reference to an architecture. The last one deletes its file."""
        if self._redis.release(key):
            self.path(key).unlink(missing_ok=True)

    def stats(self) -> Any:
        """Return the sizes of the files as `bytes_memory`."""
        return type("Stats", (), {"bytes_memory": sum(path.stat().st_size for path in self._folder.glob("*.h5"))})

    def path(self, key: str) -> Path:
        """Return the path of an architecture's file."""
        return self._folder / f"{key}.h5"


class FileMatch:
    """The result of a query, as `PrefixMatch`."""

    def __init__(self, store: FileStore, query: ModelGraph, key: str) -> None:
        self.ref, self._store = ModelRef(key, 1), store
        with h5py.File(store.path(key)) as file:
            self._graph = graph_in(file)
        self.layers = query.common_prefix(self._graph)

    def release(self, wait: bool = True) -> None:
        """Drop the reference of the query."""
        self._store.release(self.ref.name)

    def _ancestor(self) -> ModelGraph:
        return self._graph


def graph_in(file: h5py.File) -> ModelGraph:
    """Return the architecture of a file."""
    return ModelGraph.from_json(np.asarray(file.attrs["graph"]).tobytes().decode())


class FileCandidate(Candidate):
    """A candidate whose ancestors and weights are in files. Everything else is as with a repository."""

    def __init__(self, store: FileStore, name: str, model: Any) -> None:
        self._files = store
        super().__init__(cast(Any, store), name, model)

    def save(self, quality: float, metadata: Mapping[str, object] | None = None, timeout: float = 60.0) -> Saved | None:
        """Save the model. Files have no place for metadata."""
        parts = self._parts
        if parts is None:
            return None
        with self._timed():
            return self._files.save(parts.graph, parts.tensors(), quality)

    def _query(self, repository: object, parts: Any) -> Any:
        return self._files.longest_prefix(parts.graph)

    def _announce(self, *_: object) -> None:
        """Do nothing: a file needs no preparation."""


class FileEvaluation:
    """Evaluates the candidates of the baseline. A process connects once."""

    def __init__(self, evaluation: Evaluation, socket: str, folder: Path) -> None:
        self._evaluation, self._socket, self._folder = evaluation, socket, folder
        self._store: FileStore | None = None

    def run(self, job: RunningJob) -> dict[str, Any]:
        """Evaluate a candidate."""
        self._store = self._store or FileStore(self._socket, self._folder)
        with FileCandidate(self._store, f"nas/{job.id}", self._evaluation.build(job)) as candidate:
            quality = self._evaluation.train(cast(Any, candidate.model))
            saved = cast(Saved, candidate.save(quality))
        told = {"key": saved.ref.name, "repository_s": candidate.seconds, "bytes_written": saved.bytes_written}
        return {"objective": quality, "metadata": told}


class FileRetirement(Callback):
    """Drops the reference of a candidate that leaves the population."""

    def __init__(self, store: FileStore, size: int) -> None:
        self._store, self._size = store, size
        self._population = deque[str]()

    def on_done(self, job: Any) -> None:
        """Add a finished candidate."""
        if "key" in job.metadata:
            self._population.append(job.metadata["key"])
        if len(self._population) > self._size:
            self._store.release(self._population.popleft())


def add(report: Report, found: Mapping[str, Search]) -> None:
    """Add the rows: end to end, each target quality, space."""
    ours, none, files = found[REPOSITORY], found[NONE], found[HDF5]
    ends = {mode: search[-1]["at"] for mode, search in found.items()}
    share = sum(one["repository_s"] for one in ours) / (WORKERS * ends[REPOSITORY])
    goals = [
        Goal("share of the workers' time in the repository", share, at_most=0.015),
        Goal("end to end, of the time without transfer", ends[REPOSITORY] / ends[NONE], at_most=0.75),
    ]
    for peer in (NONE, HDF5):
        report.add(
            f"end to end, beside {peer}",
            sample(ends[REPOSITORY]),
            _sum(ours),
            peer=(peer, sample(ends[peer])),
            goals=goals if peer == NONE else [],
            headline=peer == NONE,
            share=share,
            stored_ms_a_candidate=1e3 * mean(one["repository_s"] for one in ours),
            best=max(one["quality"] or 0.0 for one in ours),
            peer_best=max(one["quality"] or 0.0 for one in found[peer]),
            candidates=len(ours),
        )
    for target in TARGETS:
        at, theirs = _reached(ours, target), _reached(none, target)
        if at is not None:
            what = "times sooner" if theirs is not None else f"times sooner, at least ({NONE} never got there)"
            least = ends[NONE] if theirs is None else theirs
            report.add(
                f"time to {target:.1%}",
                sample(at),
                peer=(NONE, sample(least)),
                goals=[Goal(what, least / at, at_least=2.5)],
                hdf5_s=_reached(files, target),
            )
    most = max(one["space_bytes"] for one in ours)
    half = max(one["space_bytes"] for one in ours[: len(ours) // 2])
    report.add(
        "space",
        sample(mean(one["repository_s"] for one in ours)),
        most,
        peer=(HDF5, sample(mean(one["repository_s"] for one in files))),
        goals=[
            Goal("times less than HDF5 without retirement", _sum(files) / max(most, 1), at_least=5),
            Goal("times less than HDF5, both without retirement", _sum(files) / max(_sum(ours), 1), at_least=5),
            Goal("most in all, of the most in the first half", most / max(half, 1), at_most=1.25),
        ],
        written_bytes=_sum(ours),
        hdf5_written_bytes=_sum(files),
    )


def _sum(search: Sequence[Mapping[str, Any]]) -> int:
    return sum(one["bytes_written"] for one in search)


def _reached(search: Sequence[Mapping[str, Any]], target: float) -> float | None:
    """Return when a quality was first reached, in seconds."""
    return next((one["at"] for one in search if (one["quality"] or 0.0) >= target), None)
