"""A population whose exploit is a fork in memory.

Rules
- Each member is a run of its own, with a thread here that tells it to go on: no member waits for another.
- A member that is replaced is closed when its copy is whole. Nobody who is being copied is replaced meanwhile,
  and nobody who is being replaced is copied.
- Who is replaced by whom is decided as Ray Tune does it: whoever ends an interval among the worst quarter, by what the
  members' scores were last, is replaced by one of the best quarter.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from problem import QUANTILE, SEED, Problem, build, explore
from recorded import Exploit, Interval, PopulationRun
from tensorvine.actors import Repository, Saved, Trainers, fork, start_trainers

TIMEOUT_S = 120.0


@dataclass(slots=True, eq=False)
class Member:
    """A place in the population."""

    number: int
    trainers: Trainers
    """Who trains there now."""
    rate: float
    step: int = 0
    accuracy: float | None = None
    """None: it has not ended an interval."""
    copied: bool = False
    """Its state is being taken."""
    replaced: bool = False
    """A copy of another one takes its place."""


class Population:
    """Members that train until all have done so many steps. A context manager: it closes them.

    Args:
        problem: what they train.
        rates: their learning rates at the beginning.
        steps: how many each trains, those of its ancestors included.
        repository: where `save` saves; None: nowhere.
    """

    def __init__(
        self, problem: Problem, rates: Sequence[float], steps: int, repository: Repository | None = None
    ) -> None:
        self._problem, self._rates, self._steps, self._repository = problem, rates, steps, repository
        self._random = random.Random(SEED)  # noqa: S311  for learning rates
        self._lock = threading.Lock()
        self._members: list[Member] = []
        self._intervals: list[Interval] = []
        self._exploits: list[Exploit] = []
        self._held: list[float] = []
        self._begun = 0.0
        self._stopping = False
        self._opened = ExitStack()

    def run(self) -> PopulationRun:
        """Train all members to their end."""
        with ThreadPoolExecutor(len(self._rates)) as pool:
            try:
                members = list(pool.map(self._start, range(len(self._rates)), self._rates))
                self._begun = time.perf_counter()
                list(pool.map(self._live, members))
            except BaseException:
                self._stopping = True
                for member in self._members:
                    member.trainers.kill()  # so that the threads' calls end, and they with them
                raise
        seconds = time.perf_counter() - self._begun
        processes = len(self._rates) + len(self._exploits)
        return PopulationRun(
            "Forks in memory", self._rates, seconds, self._intervals, self._exploits, (), self._held, processes
        )

    def save(self, name: str) -> Saved:
        """Save the member that is the best at the end."""
        best = max(self._members, key=lambda member: member.accuracy or 0.0)
        return best.trainers.save(name, best.accuracy, {"rate": best.rate})

    def close(self) -> None:
        """End all members."""
        self._opened.close()

    def __enter__(self) -> Population:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, number: int, rate: float) -> Member:
        trainers = start_trainers(
            partial(build, self._problem),
            name=f"member-{number}",
            options={"rate": rate},
            repository=self._repository,
            timeout=TIMEOUT_S,
        )
        member = Member(number, self._opened.enter_context(trainers), rate)
        with self._lock:
            self._members.append(member)
        return member

    def _live(self, member: Member) -> None:
        """Train a member, and whoever takes its place, to the end."""
        interval = self._problem.interval
        while member.step < self._steps and not self._stopping:
            steps = interval - member.step % interval
            accuracy = member.trainers.train(steps, TIMEOUT_S)[0][-1]
            with self._lock:
                member.step, member.accuracy = member.step + steps, accuracy
                at = time.perf_counter() - self._begun
                self._intervals.append(Interval(at, member.number, member.step, steps, member.rate, accuracy))
                winner = self._winner(member)
                member.replaced = winner is not None
                options = explore({"rate": winner.rate}, self._random) if winner else {}
            if winner is not None:
                self._exploit(member, winner, options)
                member.replaced = False

    def _winner(self, member: Member) -> Member | None:
        """Choose whom a member that has ended an interval is replaced by; None: by nobody."""
        alive = [other for other in self._members if other.accuracy is not None and other.step < self._steps]
        alive.sort(key=lambda other: other.accuracy)
        count = min(math.ceil(QUANTILE * len(alive)), len(alive) // 2)
        if member.copied or member not in alive[:count]:
            return None
        winner = self._random.choice(alive[-count:])
        if winner.copied or winner.replaced or winner.step + 2 * self._problem.interval > self._steps:
            return None
        winner.copied = True
        return winner

    def _exploit(self, member: Member, winner: Member, options: Mapping[str, Any]) -> None:
        """Replace a member by a copy of the winner, which goes on training."""
        began, source = time.perf_counter(), winner.rate
        try:
            clone = fork(
                winner.trainers,
                at_step=None,
                options=options,
                name=f"member-{member.number}",
                timeout=TIMEOUT_S,
            )
        finally:
            winner.copied = False
        replaced, member.trainers = member.trainers, self._opened.enter_context(clone)
        member.rate, member.step = options["rate"], clone.report.step
        replaced.close()
        away_s, moved_s = time.perf_counter() - began, clone.report.standby_s
        at = began - self._begun
        with self._lock:
            self._held.append(clone.report.held_s)
            self._exploits.append(
                Exploit(at, member.number, winner.number, member.step, source, member.rate, away_s, moved_s)
            )
