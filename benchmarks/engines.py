"""Dask as the engine beside Ray: saves, loads, queries, updates, calls, a shard that is killed, and the start.

Rules
- Each engine has a process of its own, with a cluster of its own (`engines_part`). The two take turns of about a
  second, in each turn the other one first; who has no turn has nothing to do. Starts are measured with nothing
  beside them.
- Ours is the repository on Dask, the peer the same one on Ray. Times of all turns are taken together.
- Floors are measured in the same processes, in turn with what stands beside them.
- Two hosts are two nodes of one machine, which call each other by TCP: two raylets, or two workers of Dask that have
  agents of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, cast

from .engines_part import (
    BYTE,
    BYTES,
    CALL,
    COPY,
    DASK,
    FIRST_LOAD,
    IMPORT,
    IN_FLIGHT,
    INFO,
    KILLED,
    LOAD,
    QUERY,
    RAY,
    SAVE,
    SMALL_SAVE,
    START,
    UPDATE,
    Amount,
    Part,
    Times,
)
from .measure import MIB, Effort, Goal, Report, Row, Sample, progress

PART_TIMEOUT_S = 900.0
END_S = 60.0
FLOORS: dict[Part, dict[str, str]] = {
    Part.WITHIN: {
        SAVE: COPY, LOAD: COPY, FIRST_LOAD: BYTE, SMALL_SAVE: BYTE, INFO: BYTE, QUERY: BYTE, UPDATE: COPY,
        CALL: BYTE, IN_FLIGHT: BYTES, KILLED: IMPORT,
    },
    Part.BETWEEN: {CALL: BYTE, INFO: BYTE, SMALL_SAVE: BYTE},
    Part.START: {START: IMPORT},
}  # fmt: skip
"""Part -> what is measured -> its floor."""
OF_A_MODEL = (SAVE, LOAD, FIRST_LOAD, UPDATE)
BOUNDS = {Part.WITHIN: 1.1, Part.BETWEEN: 1.5, Part.START: 1.0}
"""Of Ray's time."""
THROUGHPUT, BACK_S = 0.5, 5.0
"""Of Ray's throughput; seconds."""


PROGRAM = (sys.executable, "-m", "benchmarks.engines_part")


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    rounds: Mapping[Part, int]
    """How often each engine's cluster is started anew."""
    amount: Amount


PLANS = {
    Effort.QUICK: Plan(dict.fromkeys(Part, 1), Amount(8 * MIB, graphs=300, warmup=1, turns=3, calls=20, kills=1)),
    Effort.NORMAL: Plan(
        {Part.WITHIN: 2, Part.BETWEEN: 1, Part.START: 5},
        Amount(64 * MIB, graphs=3_000, warmup=3, turns=15, calls=30, kills=3),
    ),
    Effort.FULL: Plan(
        {Part.WITHIN: 5, Part.BETWEEN: 4, Part.START: 15},
        Amount(256 * MIB, graphs=10_000, warmup=3, turns=20, calls=30, kills=3),
    ),
}


def run(effort: Effort) -> Report:
    """Measure both engines in turn.

    Raises:
        RuntimeError: one of the processes failed; says what it printed.
    """
    plan, report = PLANS[effort], Report("engines")
    for part in Part:
        found: dict[str, list[Times]] = {DASK: [], RAY: []}
        for number in range(plan.rounds[part]):
            progress(f"{part.value}, round {number + 1} of {plan.rounds[part]}")
            order = (DASK, RAY) if number % 2 else (RAY, DASK)
            if part is Part.START:
                for engine in order:
                    found[engine] += together((engine,), part, plan.amount)[engine]
                continue
            for engine, times in together(order, part, plan.amount).items():
                found[engine] += times
        for row in rows(part, found[DASK], found[RAY], plan.amount.model_bytes):
            report.add(row, headline=part is Part.WITHIN and row.case.endswith(SAVE))
    return report


def together(engines: Sequence[str], part: Part, amount: Amount) -> dict[str, list[Times]]:
    """Have engines take turns until they have measured all; gives the times of each one's turns."""
    found: dict[str, list[Times]] = {engine: [] for engine in engines}
    with ExitStack() as stack:
        halves = [stack.enter_context(closing(Half(engine, part, amount))) for engine in engines]
        going = True
        while going:
            for half in halves:
                times = half.turn()
                going = times is not None
                found[half.engine] += [times] if times is not None else []
            halves.reverse()
    return found


class Half:
    """The process of one engine.

    Args:
        engine: which.
        part: what it measures.
        amount: how much.
    """

    def __init__(self, engine: str, part: Part, amount: Amount) -> None:
        self.engine = engine
        self._part = part
        environment = {**os.environ, "RAY_ADDRESS": "local"}  # no cluster of others
        environment.pop("DASK_SCHEDULER_ADDRESS", None)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `close` closes it
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [*PROGRAM, engine, part.value, json.dumps(asdict(amount))],
            cwd=Path(__file__).parents[1],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._asked, self._told = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        self._late = threading.Timer(PART_TIMEOUT_S, self._process.kill)
        self._late.daemon = True
        self._late.start()

    def turn(self) -> Times | None:
        """Have it measure once; None: it has measured all.

        Raises:
            RuntimeError: it has ended; says what it printed.
        """
        line = ""
        with suppress(BrokenPipeError):
            self._asked.write("\n")
            self._asked.flush()
            line = self._told.readline()
        if not line:
            status = self._process.wait(END_S)
            self._log.seek(0)
            raise RuntimeError(
                f"benchmark engines, {self._part.value}, {self.engine}: expected figures; found exit status {status}\n"
                f"{self._log.read()[-5000:]}"
            )
        return json.loads(line)

    def close(self) -> None:
        """End it, with its cluster."""
        try:
            with suppress(BrokenPipeError):  # it has ended
                self._asked.close()
            self._process.wait(END_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._late.cancel()
            self._told.close()
            self._log.close()


def rows(part: Part, dask: Sequence[Times], ray: Sequence[Times], model_bytes: int) -> list[Row]:
    """Return the rows of one part.

    Args:
        part: which.
        dask: times of each turn.
        ray: the same.
        model_bytes: of a model.
    """
    made: list[Row] = []
    for case, floor in FLOORS[part].items():
        ours, theirs, least = pooled(dask, case), pooled(ray, case), pooled([*dask, *ray], floor)
        size = model_bytes if case in OF_A_MODEL else 0
        goals = _goals(part, case, ours, theirs)
        made.append(Row(f"{part.value}: {case}", ours, size, "on Ray", theirs, floor, least.median, goals))
    return made


def pooled(turns: Sequence[Times], case: str) -> Sample:
    """Take the times of all turns together."""
    return Sample(tuple(took for times in turns for took in times.get(case, ())))


def _goals(part: Part, case: str, ours: Sample, theirs: Sample) -> tuple[Goal, ...]:
    share = ours.median / theirs.median
    if case == IN_FLIGHT:
        return (Goal("of Ray's throughput", 1 / share, at_least=THROUGHPUT),)
    if case == KILLED:
        return tuple(
            Goal(f"seconds until it serves, {name}", sample.median, at_most=BACK_S)
            for name, sample in (("on Dask", ours), ("on Ray", theirs))
        )
    return (Goal("of Ray's time", share, at_most=BOUNDS[part]),)
