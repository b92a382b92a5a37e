"""How soon a waiting consumer knows of a version: pushed by the shard or by Redis, beside asking again and again.

TF Serving and Triton ask their repository at a period, which is a second or more; Viper's consumer is told (< 1 ms).

Rules
- Time begins when the shard shows on its board (`actors.memory.memory`) that there is something new; this process looks
  there every few microseconds. It ends when the listener, in a process of its own, has the version's number.
- Two more figures are told: from when the saver's call returned (`acknowledged`), which may be after the listener knew,
  and from when the save began (`path`).
- Each version is a tensor of four bytes, saved while nobody else saves. Pauses between them are random, so that no
  period of a listener fits them.
- Listeners take turns, a new one and a new name each time; the first versions do not count.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from .callers import RoundTrip
from .listeners import Kind, Listener
from .measure import GIB, ROUND_TRIP, Effort, Goal, Report, Row, Sample, progress, wait_until
from .quiet import quiet
from .redis_queries import RedisServer
from .session import NAME

if TYPE_CHECKING:
    from tensorvine.actors import Repository

LIMIT_MS = 1.0
"""The median that both pushed ways should stay under."""
WARMUP = 5
LOOK_S = 20e-6
"""Between two looks at the board."""
VISIBLE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Way:
    """A way to hear of versions."""

    name: str
    """As the tables call it."""
    kind: Kind
    period_s: float
    """Of one that asks again and again."""
    pause_s: float
    """Between two versions, on average."""


LONG_POLL = Way("long poll", "long poll", 0.0, 0.005)
REDIS = Way("Redis", "Redis", 0.0, 0.005)
EACH_MS = Way("asking each 1 ms", "polling", 0.001, 0.005)
EACH_S = Way("asking each 1 s", "polling", 1.0, 0.75)


@dataclass(frozen=True)
class Plan:
    """How much is run."""

    rounds: int
    fast: int
    """Versions of one turn of a fast way."""
    slow: int
    """Of one turn of asking each second."""


PLANS = {
    Effort.QUICK: Plan(1, 40, 3),
    Effort.NORMAL: Plan(4, 100, 12),
    Effort.FULL: Plan(10, 200, 30),
}


@dataclass
class Times:
    """When listeners of one way knew, in seconds from three moments."""

    visible_s: list[float] = field(default_factory=list)
    """From when the board showed it."""
    acknowledged_s: list[float] = field(default_factory=list)
    """From when the saver knew; less than 0 where the listener knew before."""
    path_s: list[float] = field(default_factory=list)
    """From when the save began."""
    cpu_share: list[float] = field(default_factory=list)
    """What the listener took of one core, in each turn."""

    def as_dict(self) -> dict[str, Any]:
        """Return medians and 99th percentiles as JSON values."""
        facts: dict[str, Any] = {"versions": len(self.visible_s)}
        for part in ("visible_s", "acknowledged_s", "path_s"):
            facts[part] = _percentile(getattr(self, part), 50)
            facts[f"{part.removesuffix('_s')}_p99_s"] = _percentile(getattr(self, part), 99)
        return facts | {"cpu_share": _percentile(self.cpu_share, 50)}


@dataclass
class NotifyReport(Report):
    """Also all ways, from each of the three moments."""

    ways: dict[str, Times] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the report, and the ways under `ways`."""
        return super().as_dict() | {"ways": {name: times.as_dict() for name, times in self.ways.items()}}

    def print(self, console: Console) -> None:
        """Print the ways, then the rows."""
        table = Table(title="when listeners knew, from when the version was visible, acknowledged, begun to be saved")
        table.add_column("way", no_wrap=True)
        for heading in ("visible", "99%", "acknowledged", "99%", "begun", "99%", "of a core", "versions"):
            table.add_column(heading, justify="right", no_wrap=True)
        for name, times in self.ways.items():
            facts = times.as_dict()
            shown = [f"{1e3 * facts[key]:.3g} ms" for key in facts if key.endswith("_s")]
            table.add_row(name, *shown, f"{100 * facts['cpu_share']:.3g}%", str(facts["versions"]))
        console.print(table)
        super().print(console)


def run(effort: Effort) -> Report:
    """Measure all ways in turn."""
    plan = PLANS[effort]
    report = NotifyReport("notify")
    ways = [LONG_POLL, REDIS, EACH_MS, EACH_S]
    found = report.ways = {way.name: Times() for way in ways}
    with RedisServer() as server, _repository(f"unix://{server.socket}") as repo:
        for turn in range(plan.rounds):
            shift = turn % len(ways)
            for way in ways[shift:] + ways[:shift]:
                progress(f"round {turn + 1} of {plan.rounds}: {way.name}")
                _turn(
                    repo, way, plan, found[way.name], f"net/{turn}/{way.kind.replace(' ', '-')}-{way.period_s}", server
                )
        trip = RoundTrip()
        try:
            quiet()
            round_trip_s = trip.measure().median
        finally:
            trip.close()
    for ours in (LONG_POLL, REDIS):
        for theirs in (EACH_MS, EACH_S):
            row = _row(ours, found[ours.name], theirs, found[theirs.name], round_trip_s)
            report.add(row, headline=(ours, theirs) == (LONG_POLL, EACH_S))
    return report


@contextmanager
def _repository(url: str) -> Iterator[Repository]:
    from tensorvine.actors import Repository
    from tensorvine.clusters.local import LocalCluster

    with LocalCluster(object_store_bytes=GIB // 8), Repository.start(NAME, shards=1, redis=url) as repo:
        yield repo


def _turn(repo: Repository, way: Way, plan: Plan, found: Times, name: str, server: RedisServer) -> None:
    """Save versions under a new name and see when a new listener knew of them."""
    count = plan.slow if way is EACH_S else plan.fast
    warmup = WARMUP if way is not EACH_S else 1
    rng = random.Random(name)  # noqa: S311  when to save is no secret
    repo.save(name, _tiny(0), inherit=None)
    quiet()
    listener = Listener(way.kind, repo.name, name, period_s=way.period_s, url=f"unix://{server.socket}")
    try:
        wait_until(lambda: 1 in listener.heard(), f"{way.name}: the first version to be heard of")
        saves: dict[int, _Save] = {}
        begun, cpu_s = time.perf_counter(), listener.cpu_s()
        for number in range(warmup + count):
            time.sleep(rng.uniform(0.0, 2 * way.pause_s))
            version, save = _saved(repo, name, number)
            if number >= warmup:
                saves[version] = save
        last = max(saves)
        wait_until(lambda: last in listener.heard(), f"{way.name}: {name}@{last} to be heard of")
        found.cpu_share.append((listener.cpu_s() - cpu_s) / (time.perf_counter() - begun))
        heard: Mapping[int, float] = listener.heard()
    finally:
        listener.close()
    for version, save in saves.items():
        found.visible_s.append(heard[version] - save.visible)
        found.acknowledged_s.append(heard[version] - save.acknowledged)
        found.path_s.append(heard[version] - save.begun)


@dataclass(frozen=True)
class _Save:
    """Moments of one save, in seconds since the epoch."""

    begun: float
    visible: float
    acknowledged: float


def _saved(repo: Repository, name: str, number: int) -> tuple[int, _Save]:
    """Save a version, and look at the board until it shows that there is one."""
    session: Any = repo._session
    connection = session.connection(session.home(name))
    before = connection.epoch()
    begun = time.time()
    pending = repo.save_async(name, _tiny(number), inherit=None)
    while connection.epoch() == before:
        if time.time() > begun + VISIBLE_TIMEOUT_S:
            raise TimeoutError(f"save of {name!r}: expected it on the board within {VISIBLE_TIMEOUT_S} s")
        time.sleep(LOOK_S)
    visible = time.time()
    ref = pending.committed(VISIBLE_TIMEOUT_S).ref
    return ref.version, _Save(begun, visible, time.time())


def _row(ours: Way, mine: Times, theirs: Way, other: Times, round_trip_s: float) -> Row:
    times = Sample(tuple(mine.visible_s))
    goal = Goal("median in milliseconds", 1e3 * times.median, at_most=LIMIT_MS)
    facts = mine.as_dict() | {f"peer_{key}": value for key, value in other.as_dict().items()}
    theirs_s = Sample(tuple(other.visible_s))
    return Row(ours.name, times, 4, theirs.name, theirs_s, ROUND_TRIP, round_trip_s, (goal,), facts)


def _percentile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def _tiny(number: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"weight": np.array([number], np.float32)}
