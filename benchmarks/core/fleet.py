"""Helper processes: actors of the cluster that are called together, and processes with a cluster of their own.

Only this file, `clusters` and benchmarks that compare with Ray itself name Ray.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from .measure import Sample, sample, timed
from .report import ROOT

Span = tuple[float, float]
"""When something began and ended, by the machine's monotonic clock."""
PROGRAM = (sys.executable, "-m", "benchmarks.core.fleet")
"""The command of a `Program`."""
AHEAD_S = 0.05
"""How long before its moment a step is requested."""
START_S, CALL_S, PROGRAM_S = 240.0, 120.0, 900.0
"""Time limits of a start, of a call and of a program, in seconds."""


class Fleet:
    """Actors of the running Ray cluster. Used in `with`, it ends them.

    Args:
        worker: Class of the actors. If it has a method `close`, it is called before the actor ends.
        arguments: Arguments of each worker; one worker per tuple.
        nodes: Ids of nodes; worker N is on node N, counted round.
        threads: How many calls a worker answers at a time.
    """

    def __init__(
        self, worker: type, arguments: Sequence[tuple[Any, ...]], *, nodes: Sequence[str] = (), threads: int = 1
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._closes = hasattr(worker, "close")
        self.actors: list[Any] = []
        for place, given in enumerate(arguments):
            options: dict[str, Any] = {"num_cpus": 0}
            if threads > 1:
                options["max_concurrency"] = threads
            if nodes:
                options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(nodes[place % len(nodes)], soft=False)
            self.actors.append(ray.remote(worker).options(**options).remote(*given))

    def all(self, method: str, *arguments: Any, timeout: float = CALL_S) -> list[Any]:
        """Call a method of all workers with the same arguments; return their results."""
        return self.each(method, [arguments] * len(self.actors), timeout=timeout)

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]], *, timeout: float = CALL_S) -> list[Any]:
        """Call a method of the first workers, each with its own arguments; return their results."""
        import ray

        calls = [getattr(actor, method).remote(*given) for actor, given in zip(self.actors, arguments, strict=False)]
        return ray.get(calls, timeout=timeout)

    def spans(self, what: str, *arguments: Any, timeout: float = CALL_S) -> list[Span]:
        """Call a method of all workers at the same moment; return when each call began and ended."""
        moment = time.monotonic() + AHEAD_S
        calls = [actor.__ray_call__.remote(_at, moment, what, arguments) for actor in self.actors]
        import ray

        return ray.get(calls, timeout=timeout)

    def close(self) -> None:
        """Close and end all workers."""
        import ray

        try:
            if self._closes:
                self.all("close")
        finally:
            for actor in self.actors:
                ray.kill(actor)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def seconds_of(spans: Sequence[Span]) -> float:
    """Return the time from the first beginning to the last end.

    >>> seconds_of([(0.0, 2.0), (1.0, 4.0)])
    4.0
    """
    return max(end for _, end in spans) - min(start for start, _ in spans)


def fairness_of(spans: Sequence[Span]) -> float:
    """Return the slowest worker's rate as a share of the mean rate; 1 if all are equally fast.

    >>> fairness_of([(0.0, 1.0), (0.0, 1.0)]), round(fairness_of([(0.0, 1.0), (0.0, 3.0)]), 2)
    (1.0, 0.5)
    """
    rates = [1 / (end - start) for start, end in spans]
    return min(rates) * len(rates) / sum(rates)


class _Idle:
    def nothing(self) -> None:
        pass


@contextmanager
def round_trip() -> Iterator[Callable[[], Any]]:
    """Start an actor that does nothing; yield a function that calls it: the floor of any remote answer."""
    with Fleet(_Idle, [()]) as fleet:
        for _ in range(50):
            fleet.all("nothing")
        yield lambda: fleet.all("nothing")


def round_trip_floor(rounds: int = 300) -> Sample:
    """Time the round trip of an actor that does nothing."""
    with round_trip() as call:
        return sample([timed(call)[0] for _ in range(rounds)])


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a module's function in a process of the cluster that ends with the call."""
    import ray

    task: Any = ray.remote(num_cpus=0, max_calls=1)(function)
    return ray.get(task.remote(*arguments), timeout=600)


def _at(worker: Any, moment: float, what: str, arguments: tuple[Any, ...]) -> Span:
    time.sleep(max(moment - time.monotonic() - 0.001, 0.0))
    while time.monotonic() < moment:
        pass
    start = time.monotonic()
    getattr(worker, what)(*arguments)
    return start, time.monotonic()


class Program:
    """A process with a cluster of its own that measures on request.

    Args:
        measure: Generator of a module of `benchmarks`; its values are JSON values.
        arguments: JSON values for it.
    """

    def __init__(self, measure: Callable[..., Iterator[Any]], *arguments: Any) -> None:
        self._name = f"{measure.__module__}:{measure.__name__}"
        self._said = f"{self._name}{arguments}"
        environment = {**os.environ, "RAY_ADDRESS": "local"}  # no cluster of others
        environment.pop("DASK_SCHEDULER_ADDRESS", None)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `close` closes it
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [*PROGRAM, self._name, json.dumps(arguments)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._late = threading.Timer(PROGRAM_S, self._process.kill)
        self._late.daemon = True
        self._late.start()

    def ask(self) -> Any:
        """Let it measure once; return the value, or None if it has measured everything.

        Raises:
            RuntimeError: if the process has ended. The message contains its log.
        """
        asked, answers = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        with suppress(BrokenPipeError):
            asked.write("\n")
            asked.flush()
        line = answers.readline()
        if not line:
            status = self._process.wait(CALL_S)
            self._log.seek(0)
            log = self._log.read()[-5000:]
            raise RuntimeError(f"benchmark {self._said}: expected figures; found exit status {status}\n{log}")
        return json.loads(line)

    def close(self) -> None:
        """End the process and its cluster."""
        try:
            with suppress(BrokenPipeError):
                cast(IO[str], self._process.stdin).close()
            self._process.wait(CALL_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._late.cancel()
            cast(IO[str], self._process.stdout).close()
            self._log.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _main(name: str, arguments: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of other code is no answer
    module, _, function = name.partition(":")
    measuring = getattr(importlib.import_module(module), function)(*json.loads(arguments))
    for _ in sys.stdin:
        print(json.dumps(next(measuring, None)), file=answers, flush=True)
    measuring.close()


if __name__ == "__main__":
    _main(*sys.argv[1:])
