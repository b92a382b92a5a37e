"""Readers and savers that go on until they are told to stop, each a process with its own client."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from tensorvine.store import ModelRef

from .measure import wait_until

START_S = 60.0
REQUEST_S = 60.0
SAVED_BYTES = 4096
_runs = count()
"""What is saved in one is new in the next: the same bytes under the same name would be shared."""


@dataclass(frozen=True)
class Served:
    """Requests that ended, of all processes of one kind together."""

    began_s: tuple[float, ...]
    """When each began, by the machine's monotonic clock."""
    took_s: tuple[float, ...]
    failed: tuple[str, ...]
    """What those that failed said."""

    def between(self, begin_s: float, end_s: float) -> Served:
        """Return the requests that were under way at any time of a span."""
        pairs = [(b, t) for b, t in zip(self.began_s, self.took_s, strict=True) if b < end_s and b + t > begin_s]
        return Served(tuple(b for b, _ in pairs), tuple(t for _, t in pairs), self.failed)

    @property
    def longest_s(self) -> float:
        """The longest of them."""
        return max(self.took_s, default=0.0)


class Traffic:
    """Processes that load models at random, and others that save new ones.

    Args:
        name: of the repository.
        refs: models to read.
        readers: processes that read.
        savers: processes that save.
    """

    def __init__(self, name: str, refs: Sequence[ModelRef], readers: int, savers: int) -> None:
        import ray

        actor = ray.remote(_Process).options(num_cpus=0, max_concurrency=2)
        run = next(_runs)
        self._readers: list[Any] = [actor.remote(name, list(refs), (run, place)) for place in range(readers)]
        self._savers: list[Any] = [actor.remote(name, [], (run, place)) for place in range(savers)]
        ray.get([each.begin.remote() for each in (*self._readers, *self._savers)], timeout=START_S)

    def wait_for(self, requests: int) -> None:
        """Wait until each process has served so many requests.

        Raises:
            ray.exceptions.RayTaskError: one did not within START_S seconds.
        """
        import ray

        everyone = (*self._readers, *self._savers)
        ray.get([each.wait_for.remote(requests) for each in everyone], timeout=START_S + REQUEST_S)

    def stop(self) -> tuple[Served, Served]:
        """End them, and give what was read and what was saved."""
        import ray

        reads, saves = (
            _together(ray.get([each.end.remote() for each in group], timeout=START_S + REQUEST_S))
            for group in (self._readers, self._savers)
        )
        for each in (*self._readers, *self._savers):
            ray.kill(each)
        return reads, saves


class _Process:
    """One process: reads `refs`, or saves if there are none."""

    def __init__(self, name: str, refs: list[ModelRef], place: tuple[int, int]) -> None:
        from tensorvine.actors import Repository

        self._repo = Repository.connect(name)
        self._refs = refs
        self._place = place
        self._rng = np.random.default_rng(place)
        self._served: tuple[list[float], list[float], list[str]] = ([], [], [])
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def begin(self) -> None:
        self._thread.start()
        self.wait_for(1)

    def wait_for(self, requests: int) -> None:
        wait_until(lambda: len(self._served[1]) >= requests, f"{requests} requests")

    def end(self) -> tuple[list[float], list[float], list[str]]:
        self._ended.set()
        self._thread.join(REQUEST_S)
        self._repo.close()
        return self._served

    def _go_on(self) -> None:
        began, took, failed = self._served
        count = 0
        while not self._ended.is_set():
            start = time.monotonic()
            try:
                self._request(count)
            except Exception as exc:  # noqa: BLE001  told in the result
                failed.append(f"{type(exc).__name__}: {exc}")
            began.append(start)
            took.append(time.monotonic() - start)
            count += 1

    def _request(self, count: int) -> None:
        if self._refs:
            self._repo.load(self._refs[self._rng.integers(len(self._refs))], timeout=REQUEST_S)
        else:
            tensors = {"w": self._rng.integers(0, 255, SAVED_BYTES, dtype=np.uint8)}
            self._repo.save("traffic/{}-{}-{}".format(*self._place, count), tensors, timeout=REQUEST_S)


def _together(parts: Sequence[tuple[list[float], list[float], list[str]]]) -> Served:
    began, took, failed = (tuple(value for part in parts for value in part[kind]) for kind in range(3))
    return Served(began, took, failed)
