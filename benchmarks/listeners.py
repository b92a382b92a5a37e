"""Those who wait for versions, in processes of their own: told by the shard, told by Redis, or asking again and again.

Rules
- A listener notes, by the machine's clock, when it first knew of each version; one that came late for a version, and
  heard of a newer one, notes that for both.
- Who asks again and again does so at fixed times; an answer that takes longer than the period moves the next question.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Literal

import psutil

Kind = Literal["long poll", "Redis", "polling"]
WAIT_S = 2.0
"""How long one wait lasts; then the listener looks whether it is to end."""
START_TIMEOUT_S = 120.0


class _Listening:
    """The listener's process."""

    def __init__(self, kind: Kind, repository: str, name: str, period_s: float, url: str | None) -> None:
        self._kind = kind
        self._name = name
        self._period_s = period_s
        self._source = _source(kind, repository, name, url)
        self._heard: dict[int, float] = {}
        self._newest = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="listen", daemon=True)
        self._thread.start()

    def heard(self) -> dict[int, float]:
        """Return when each version was first known, in seconds since the epoch."""
        return dict(self._heard)

    def cpu_s(self) -> float:
        """Return the processor time that this process took."""
        times = psutil.Process().cpu_times()
        return times.user + times.system

    def end(self) -> None:
        """End the thread and disconnect."""
        self._ending.set()
        self._thread.join(2 * WAIT_S)
        self._source.close()

    def _listen(self) -> None:
        if self._kind == "polling":
            self._ask()
            return
        wait = self._source.wait_newer
        while not self._ending.is_set():
            newest = wait(self._newest, WAIT_S) if self._kind == "Redis" else wait(self._name, self._newest, WAIT_S)
            if newest is not None:
                self._note(newest.version)

    def _ask(self) -> None:
        due = time.monotonic()
        while not self._ending.wait(max(due - time.monotonic(), 0.0)):
            self._note(self._source.info(self._name).ref.version)
            due = max(due + self._period_s, time.monotonic())

    def _note(self, newest: int) -> None:
        now = time.time()
        self._heard.update(dict.fromkeys(range(self._newest + 1, newest + 1), now))
        self._newest = max(self._newest, newest)


class Listener:
    """A listener, as whoever starts it sees it.

    Args:
        kind: how it hears of versions; "polling" needs that there is one already.
        repository: name of the repository.
        name: of the model.
        period_s: of one that asks again and again.
        url: of the Redis server.
    """

    def __init__(
        self, kind: Kind, repository: str, name: str, *, period_s: float = 0.0, url: str | None = None
    ) -> None:
        import ray

        actor: Any = ray.remote(_Listening).options(num_cpus=0, max_concurrency=2)
        self._actor = actor.remote(kind, repository, name, period_s, url)
        self._call("heard", START_TIMEOUT_S)

    def heard(self) -> dict[int, float]:
        """Return when it first knew of each version, in seconds since the epoch."""
        return self._call("heard")

    def cpu_s(self) -> float:
        """Return the processor time that its process took so far."""
        return self._call("cpu_s")

    def close(self) -> None:
        """End it."""
        import ray

        self._call("end")
        ray.kill(self._actor)

    def _call(self, method: str, timeout: float = 30.0) -> Any:
        import ray

        return ray.get(getattr(self._actor, method).remote(), timeout=timeout)


def _source(kind: Kind, repository: str, name: str, url: str | None) -> Any:
    """Connect to what tells, or is asked for, versions."""
    from tensorvine.actors import EdgeConsumer, Repository

    if kind == "Redis":
        return EdgeConsumer(str(url), name, repository=repository)
    return Repository.connect(repository)
