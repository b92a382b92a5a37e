"""Many consumers of one name, asked all the time where they run, and a model whose answers show what it is made of.

Rules
- A consumer here is a `Follower`, which is what a `Consumer` actor holds; several share a process. It is asked by a
  thread of that process, so that no message is part of an answer.
- All elements of all tensors of a version are its number. An answer multiplies a batch with every tensor, so it reads
  each byte; an answer of two versions would show both numbers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .measure import Tensors

START_TIMEOUT_S = 180.0
ANSWER_TIMEOUT_S = 60.0
BATCH = 4


@dataclass(frozen=True)
class Asked:
    """What the consumers of a crowd answered while they were asked."""

    at: NDArray[np.float64]
    """When each answer was there, in seconds since the epoch, sorted."""
    mixed: int
    """Answers that were not of the one version that they were said to be."""

    def rate(self, spans: Sequence[tuple[float, float]]) -> float:
        """Return the answers per second within some spans of time.

        >>> Asked(np.array([0.5, 1.5, 1.6, 9.0]), 0).rate([(1.0, 2.0), (8.0, 11.0)])
        0.75
        """
        edges = np.searchsorted(self.at, np.array(spans))
        return float((edges[:, 1] - edges[:, 0]).sum() / sum(end - start for start, end in spans))


class Tagged:
    """A model all of whose numbers are the version's.

    >>> model = Tagged()
    >>> model.assign(tagged({"a": np.empty((4, 2), np.float32)}, 7))
    >>> model(None)
    (7.0, 7.0)
    """

    def __init__(self) -> None:
        self._tensors: Mapping[str, NDArray[Any]] = {}

    def assign(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Take a version."""
        self._tensors = tensors

    def __call__(self, batch: object) -> tuple[float, float]:
        """Return the least and the greatest number of which the model is made."""
        del batch
        least, most = np.inf, -np.inf
        for tensor in self._tensors.values():
            rows = len(tensor)
            answer = np.full((BATCH, rows), 1 / rows, np.float32) @ tensor
            least, most = min(least, float(answer.min())), max(most, float(answer.max()))
        return least, most


def tagged(tensors: Tensors, version: int) -> Tensors:
    """Make all elements a version's number. Tensors have as many rows as a power of two, so that means are exact."""
    for tensor in tensors.values():
        tensor.fill(version)
    return tensors


class _Crowd:
    """The process of some consumers."""

    def __init__(self, repository: str, name: str, count: int) -> None:
        from tensorvine.actors import Repository
        from tensorvine.actors.updates.follower import Follower

        self._followers = [Follower(Repository.connect(repository), name, Tagged) for _ in range(count)]
        self._threads: list[threading.Thread] = []
        self._asking = threading.Event()
        self._at: list[float] = []
        self._mixed = 0
        self._errors: list[Exception] = []

    def wait_for(self, version: int) -> None:
        """Wait until all answer with a version."""
        for follower in self._followers:
            follower.wait_for(version, ANSWER_TIMEOUT_S)

    def own_bytes(self) -> int:
        """Return the memory that this process has to itself."""
        import psutil

        return int(psutil.Process().memory_full_info().uss)

    def begin(self, period_s: float) -> None:
        """Ask each consumer once in a period, or all the time where that is 0."""
        self._asking.set()
        self._threads = [threading.Thread(target=self._ask, args=(each, period_s)) for each in self._followers]
        for thread in self._threads:
            thread.start()

    def end(self) -> tuple[list[float], int]:
        """Stop asking; give when answers were there, and how many were of more than one version."""
        self._asking.clear()
        for thread in self._threads:
            thread.join(ANSWER_TIMEOUT_S)
        if self._errors:
            raise self._errors[0]
        at, mixed = self._at, self._mixed
        self._at, self._mixed = [], 0
        return at, mixed

    def swapped(self) -> list[list[tuple[int, float]]]:
        """Return (version, when it began to answer) of each consumer's deliveries."""
        found = [follower.status().deliveries for follower in self._followers]
        return [[(each.ref.version, each.swapped_at) for each in deliveries] for deliveries in found]

    def close(self) -> None:
        """Disconnect."""
        for follower in self._followers:
            follower.close()

    def _ask(self, follower: Any, period_s: float) -> None:
        due = time.monotonic()
        try:
            while self._asking.is_set():
                answer = follower.infer(None)
                self._at.append(time.time())
                self._mixed += answer.outputs != (answer.ref.version, answer.ref.version)
                due = max(due + period_s, time.monotonic() - period_s)
                if period_s:
                    time.sleep(max(due - time.monotonic(), 0.0))
        except Exception as exc:  # noqa: BLE001  raised again by `end`
            self._errors.append(exc)


class Crowd:
    """Some consumers of one name.

    Args:
        repository: its name.
        name: the model's.
        count: how many consumers.
        processes: among how many they are shared out.
    """

    def __init__(self, repository: str, name: str, count: int, processes: int) -> None:
        import ray

        self.count = count
        shares = [count // processes + (place < count % processes) for place in range(processes)]
        actor: Any = ray.remote(_Crowd).options(num_cpus=0)
        self._actors = [actor.remote(repository, name, share) for share in shares]

    def wait_for(self, version: int) -> None:
        """Wait until all answer with a version."""
        self._all("wait_for", version, timeout=START_TIMEOUT_S)

    def own_bytes(self) -> int:
        """Return the memory that the largest of their processes has to itself."""
        return max(self._all("own_bytes"))

    def begin(self, period_s: float = 0.0) -> None:
        """Ask each consumer once in a period, or all the time where that is 0."""
        self._all("begin", period_s)

    def end(self) -> Asked:
        """Stop asking."""
        found = self._all("end", timeout=ANSWER_TIMEOUT_S)
        return Asked(np.sort(np.concatenate([np.array(at) for at, _ in found])), sum(mixed for _, mixed in found))

    def answered_from(self, versions: Sequence[int]) -> list[float]:
        """Return when the last consumer began to answer with each version, or with a newer one in its place."""
        each = [delivered for part in self._all("swapped") for delivered in part]
        return [max(min(at for found, at in one if found >= version) for one in each) for version in versions]

    def close(self) -> None:
        """End all."""
        import ray

        self._all("close")
        for actor in self._actors:
            ray.kill(actor)

    def _all(self, method: str, *arguments: Any, timeout: float = 60.0) -> list[Any]:
        import ray

        return ray.get([getattr(actor, method).remote(*arguments) for actor in self._actors], timeout=timeout)
