"""What publishing costs a training, under the planned schedule.

Rules
- NT3 at CPU size, in PyTorch on one thread of this process. It trains with a publisher and without, in turn, each time
  from the same state, so that it takes the same steps.
- A consumer in its own process answers 20 times a second all the time, and takes what is published.
- A training's time is that of its iterations, stalls and the publisher's threads included; what comes after the last
  iteration is not.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from .learners import FEATURES, Learner, learner
from .measure import Goal, Row, Sample
from .quiet import quiet

if TYPE_CHECKING:
    from tensorvine.actors import Consumer, PublishReport, Repository

LIMIT_PERCENT = 2.0
"""By which publishing may slow the training."""
PERIOD_S = 0.05
"""Between two answers of the consumer."""
NAME = "pace"


def pace(repo: Repository, iterations: int, pairs: int) -> Row:
    """Train with and without publishing, in turn; gives the row of both.

    Args:
        repo: where versions go.
        iterations: of one training.
        pairs: of trainings that count; one more comes first.
    """
    import torch
    from tensorvine.actors import Consumer

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run = learner("nt3")
        repo.save_model(NAME, run.model)
        with Consumer.start(repo, NAME, _net) as consumer, _asked(consumer):
            return _row(_pairs(repo, run, iterations, pairs))
    finally:
        torch.set_num_threads(threads)


def _net() -> Any:
    return learner("nt3").model


@contextmanager
def _asked(consumer: Consumer) -> Iterator[None]:
    """Ask a consumer all the while."""
    ending = threading.Event()
    batch = np.zeros((1, 1, FEATURES), np.float32)

    def ask() -> None:
        while not ending.wait(PERIOD_S):
            consumer.infer(batch)

    thread = threading.Thread(target=ask, name="ask", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def _pairs(repo: Repository, run: Learner, iterations: int, pairs: int) -> list[tuple[float, float, PublishReport]]:
    """Return (seconds with, seconds without, what was published) of each pair."""
    start = run.state()
    found: list[tuple[float, float, Any]] = []
    for turn in range(1 + pairs):
        took: dict[bool, tuple[float, Any]] = {}
        for publishing in (turn % 2 == 0, turn % 2 == 1):
            run.restore(start)
            gc.collect()
            quiet()
            took[publishing] = _train(run, repo if publishing else None, iterations)
        found.append((took[True][0], took[False][0], took[True][1]))
    return found[1:]


def _train(run: Learner, repo: Repository | None, iterations: int) -> tuple[float, PublishReport | None]:
    """Train, with a publisher where there is a repository."""
    from tensorvine.actors import Publisher
    from tensorvine.planner import PlanRequest

    if repo is None:
        start = time.perf_counter()
        for iteration in range(iterations):
            run.step(iteration)
        return time.perf_counter() - start, None
    with Publisher(repo, NAME, PlanRequest(stop=iterations)) as publisher:
        start = time.perf_counter()
        for iteration in range(iterations):
            publisher.step(run.step(iteration), run.model)
        took = time.perf_counter() - start
        publisher.finish()
        return took, publisher.report()


def _row(pairs: list[tuple[float, float, PublishReport]]) -> Row:
    ours, without = (Sample(tuple(pair[place] for pair in pairs)) for place in (0, 1))
    slower = 100 * (median(mine / alone for mine, alone, _ in pairs) - 1)
    stalled = [100 * sum(each.stall_s for each in report.updates) / alone for _, alone, report in pairs]
    stalls = [each.stall_s for _, _, report in pairs for each in report.updates]
    facts = {
        "slower_percent": slower,
        "stalled_percent": median(stalled),
        "stall_s": median(stalls),
        "updates": median(len(report.updates) for _, _, report in pairs),
        "failed": sum(report.failed for _, _, report in pairs),
        "iterations": len(pairs[0][2].losses),
    }
    goal = Goal("percent by which publishing slows the training", slower, at_most=LIMIT_PERCENT)
    size = pairs[0][2].updates[0].bytes_written
    return Row("a training that publishes", ours, size, "one that does not", without, goals=(goal,), facts=facts)
