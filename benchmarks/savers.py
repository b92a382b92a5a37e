"""Clients in processes of their own, each with a model of its own, that all do the same thing at the same moment.

Rules
- A moment is one of the machine's monotonic clock, which all processes share: who is there before waits.
- Cleaning up is not timed, and begins when all are done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .architectures import synthetic
from .callers import Span
from .measure import buffers_like
from .peers import H5py

SAVE, LOAD, COPY, FILE_SAVE, FILE_LOAD = "save", "load", "copy", "h5py save", "h5py load"
ORDER = (COPY, SAVE, LOAD, FILE_SAVE, FILE_LOAD)
"""What a round is, in the order that it needs: what is loaded was saved before."""
AHEAD_S = 0.05
"""How long before its moment a step is asked for."""
START_S, STEP_S = 180.0, 120.0


@dataclass(frozen=True)
class Step:
    """What all clients did at once."""

    spans: Sequence[Span]
    """When each began and ended."""

    @property
    def seconds(self) -> float:
        """From the first one's beginning to the last one's end.

        >>> Step(((0.0, 2.0), (1.0, 4.0))).seconds
        4.0
        """
        return max(end for _, end in self.spans) - min(start for start, _ in self.spans)

    @property
    def fairness(self) -> float:
        """The slowest client's bandwidth, of the mean of all; 1: all had the same.

        >>> Step(((0.0, 1.0), (0.0, 1.0))).fairness, round(Step(((0.0, 1.0), (0.0, 3.0))).fairness, 2)
        (1.0, 0.5)
        """
        rates = [1 / (end - start) for start, end in self.spans]
        return min(rates) * len(rates) / sum(rates)


class Savers:
    """Clients of a repository, spread over nodes.

    Args:
        repository: its name.
        nodes: ids of the nodes; the clients are shared out evenly.
        count: how many clients.
        model: bytes and layers of each client's.
        folder: that all can reach, for the files of the peer.
    """

    def __init__(self, repository: str, nodes: Sequence[str], count: int, model: tuple[int, int], folder: Path) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor: Any = ray.remote(_Saver)
        self._actors: list[Any] = []
        for number in range(count):
            where = NodeAffinitySchedulingStrategy(nodes[number % len(nodes)], soft=False)
            options = actor.options(num_cpus=0, scheduling_strategy=where)
            self._actors.append(options.remote(repository, number, model, str(folder)))
        self._all("ready", timeout=START_S)

    def round(self) -> dict[str, Step]:
        """Let all do each of `ORDER` at once, and clean up."""
        found = {what: Step(self._all("step", what, time.monotonic() + AHEAD_S)) for what in ORDER}
        self._all("tidy")
        return found

    def close(self) -> None:
        """End all."""
        import ray

        self._all("close")
        for actor in self._actors:
            ray.kill(actor)

    def _all(self, method: str, *arguments: Any, timeout: float = STEP_S) -> list[Any]:
        import ray

        return ray.get([getattr(actor, method).remote(*arguments) for actor in self._actors], timeout=timeout)


class _Saver:
    """One of them."""

    def __init__(self, repository: str, number: int, shape: tuple[int, int], folder: str) -> None:
        from tensorvine.actors import Repository

        model = synthetic(*shape, seed=number)
        self._repo = Repository.connect(repository)
        self._name, self._path = f"weak/{number}", Path(folder, f"{number}.h5")
        self._graph, self._tensors = model.graph, model.tensors(number)
        self._buffers = buffers_like(self._tensors)
        self._saved: Any = None
        self._peer = H5py()
        self._peer.hold(self._tensors)
        self._steps = {
            COPY: self._copy,
            SAVE: self._save,
            LOAD: lambda: self._repo.load(self._saved.ref, into=self._buffers),
            FILE_SAVE: lambda: self._peer.save(self._path),
            FILE_LOAD: self._read,
        }

    def ready(self) -> None:
        """Answer as soon as steps may come."""

    def step(self, what: str, at: float) -> Span:
        """Do one of `ORDER` at a moment."""
        time.sleep(max(at - time.monotonic() - 0.001, 0.0))
        while time.monotonic() < at:
            pass
        start = time.monotonic()
        self._steps[what]()
        return start, time.monotonic()

    def tidy(self) -> None:
        """Retire what was saved, and delete the file."""
        self._repo.retire(self._saved.ref)
        self._path.unlink()

    def close(self) -> None:
        """Disconnect."""
        self._repo.close()

    def _copy(self) -> None:
        for name, tensor in self._tensors.items():
            self._buffers[name][...] = tensor

    def _save(self) -> None:
        self._saved = self._repo.save(self._name, self._tensors, graph=self._graph)

    def _read(self) -> None:
        """Fill warm arrays from the file, as h5py can: `Dataset.read_direct`."""
        import h5py

        with h5py.File(self._path, "r") as file:
            datasets: Any = file
            for name, buffer in self._buffers.items():
                datasets[name].read_direct(buffer)
