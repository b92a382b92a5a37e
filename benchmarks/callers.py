"""Callers in processes of their own, and the round trip of an actor that does nothing.

Of the benchmarks, only this file, `raylets`, `listeners`, `crowd`, `savers` and `traffic` name Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tensorvine.store import ModelGraph

from .measure import Sample

Span = tuple[float, float]


class RoundTrip:
    """An actor that does nothing: its round trip is the floor of any remote answer."""

    def __init__(self) -> None:
        import ray

        self._actor: Any = ray.remote(_Nothing).options(num_cpus=0).remote()

    def __call__(self) -> None:
        """Call it and wait for the answer."""
        import ray

        ray.get(self._actor.nothing.remote(), timeout=60)

    def measure(self, rounds: int = 300, warmup: int = 50) -> Sample:
        """Time the call."""
        times = [timed(self)[0] for _ in range(warmup + rounds)]
        return Sample(tuple(times[warmup:]))

    def close(self) -> None:
        """Stop the actor."""
        import ray

        ray.kill(self._actor)


class QueryCallers:
    """Actors that each connect to the repository and query it.

    Args:
        name: of the repository.
        count: number of callers.
    """

    def __init__(self, name: str, count: int) -> None:
        import ray

        actor = ray.remote(_Caller).options(num_cpus=0)
        self._actors: list[Any] = [actor.remote(name) for _ in range(count)]

    def run(self, graphs: Sequence[ModelGraph], batch: int) -> float:
        """Let each caller issue an equal share of the queries, `batch` in one call.

        Returns:
            seconds from the first query to the last answer; connecting is not part of it.
        """
        import ray

        texts = [graph.to_json() for graph in graphs]
        count = len(self._actors)
        ray.get(
            [a.prepare.remote(texts[place::count]) for place, a in enumerate(self._actors)],
            timeout=300,
        )
        spans: list[Span] = ray.get([a.query.remote(batch) for a in self._actors], timeout=600)
        return max(end for _, end in spans) - min(start for start, _ in spans)

    def close(self) -> None:
        """Stop the callers."""
        import ray

        for actor in self._actors:
            ray.kill(actor)


class _Nothing:
    def nothing(self) -> None:
        pass


class _Caller:
    def __init__(self, name: str) -> None:
        from tensorvine.actors import Repository

        self._repo = Repository.connect(name)
        self._graphs: list[ModelGraph] = []

    def prepare(self, texts: Sequence[str]) -> None:
        self._graphs = [ModelGraph.from_json(text) for text in texts]
        query_in_batches(self._repo, self._graphs[:1], 1)

    def query(self, batch: int) -> Span:
        start = time.monotonic()
        matches = query_in_batches(self._repo, self._graphs, batch)
        end = time.monotonic()
        for match in matches:
            if match is not None:
                match.release()
        return start, end


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call a module's function in a process of the cluster that ends with the call."""
    import ray

    task: Any = ray.remote(num_cpus=0, max_calls=1)(function)
    return ray.get(task.remote(*args), timeout=600)


def query_in_batches(repo: Any, graphs: Sequence[ModelGraph], batch: int) -> list[Any]:
    """Query one at a time (`batch` 1) or in batches; the matches stay pinned."""
    if batch == 1:
        return [repo.longest_prefix(graph) for graph in graphs]
    found: list[Any] = []
    for start in range(0, len(graphs), batch):
        found += repo.longest_prefixes(graphs[start : start + batch])
    return found


def release_all(matches: Sequence[Any]) -> None:
    """Give back the pins of the matches."""
    for match in matches:
        if match is not None:
            match.release()


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Run a call; give its seconds and its result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result
