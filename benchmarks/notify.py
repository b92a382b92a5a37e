"""Time until a waiting consumer has a version's number, by push, by Redis and by polling at 1 ms and 1 s.

TF Serving and Triton poll their repository every second or less often; Viper notifies its consumer (< 1 ms).

Rules
- Time begins when the shard's version page (`actors.memory.memory`) shows a new version; this process looks there every
  few microseconds. It ends when the listener, in a process of its own, has the version's number.
- Each version is a tensor of four bytes, saved while no other save runs. Pauses between them are random, so that no
  period of a listener fits them.
- Listeners take turns, a new one and a new name each time; the first versions do not count.
- A listener that receives only a newer version notes its time for the skipped versions, too. A slow answer moves the
  next question of a polling listener.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from .core.clusters import repository
from .core.fleet import Fleet, round_trip_floor
from .core.measure import GIB, ROUND_TRIP, in_turn, progress, quiet, sample, wait_until
from .core.redis import RedisServer
from .core.report import Goal, Report

LIMIT_MS = 1.0
WARMUP, LOOK_S, TIMEOUT_S = 5, 20e-6, 30.0
WAIT_S = 2.0
"""How long one wait of a listener lasts; then it checks whether it should end."""


@dataclass(frozen=True)
class Way:
    """A way to receive versions: `period_s` of a polling listener, and the mean pause between two versions."""

    name: str
    period_s: float = 0.0
    pause_s: float = 0.005


LONG_POLL, REDIS = Way("long poll"), Way("Redis")
EACH_MS, EACH_S = Way("asking each 1 ms", 0.001), Way("asking each 1 s", 1.0, 0.75)
WAYS = (LONG_POLL, REDIS, EACH_MS, EACH_S)


@dataclass
class _Found:
    visible_s: list[float] = field(default_factory=list)
    cpu_share: list[float] = field(default_factory=list)
    """Of one core, in each turn."""


def run(report: Report) -> None:
    """Measure all ways in turn."""
    rounds, fast, slow = report.pick(quick=(1, 3, 1), normal=(4, 100, 12))
    found = {way.name: _Found() for way in WAYS}
    with RedisServer() as server, repository(GIB // 8, shards=1, redis=f"unix://{server.socket}") as repo:
        for turn in range(rounds):
            for way in in_turn(WAYS, turn):
                progress(f"round {turn + 1} of {rounds}: {way.name}")
                _turn(repo, way, turn, slow if way is EACH_S else fast, found[way.name], server.socket)
        quiet()
        floor = round_trip_floor()
    samples = {name: sample(each.visible_s) for name, each in found.items()}
    for ours in (LONG_POLL, REDIS):
        for theirs in (EACH_MS, EACH_S):
            mine = samples[ours.name]
            report.add(
                ours.name,
                mine,
                4,
                peer=(theirs.name, samples[theirs.name]),
                floor=(ROUND_TRIP, floor),
                goals=[Goal("median in milliseconds", 1e3 * mine.median, at_most=LIMIT_MS)],
                headline=(ours, theirs) == (LONG_POLL, EACH_S),
            )
    report.tables["from the version page to the listener"] = [
        {
            "way": name,
            "median_s": samples[name].median,
            "p99_s": float(np.percentile(each.visible_s, 99)),
            "of a core": sample(each.cpu_share).median,
            "versions": len(each.visible_s),
        }
        for name, each in found.items()
    ]


def _turn(repo: Any, way: Way, turn: int, count: int, found: _Found, server: str) -> None:
    """Save versions under a new name and see when a new listener had them."""
    name, warmup = f"net/{turn}/{way.name.replace(' ', '-')}", 1 if way is EACH_S else WARMUP
    rng = random.Random(name)  # noqa: S311  when to save is no secret
    repo.save(name, {"weight": np.zeros(1, np.float32)}, inherit=None)
    quiet()
    with Fleet(Listener, [(way, repo.name, name, f"unix://{server}")], threads=2) as listener:

        def heard() -> dict[int, float]:
            return listener.all("heard")[0]

        wait_until(lambda: 1 in heard(), f"{way.name}: the first version at the listener")
        saves: dict[int, float] = {}
        begun, cpu_s = time.perf_counter(), listener.all("cpu_s")[0]
        for number in range(warmup + count):
            time.sleep(rng.uniform(0.0, 2 * way.pause_s))
            version, visible = _saved(repo, name, number)
            if number >= warmup:
                saves[version] = visible
        wait_until(lambda: max(saves) in heard(), f"{way.name}: {name}@{max(saves)} at the listener")
        found.cpu_share.append((listener.all("cpu_s")[0] - cpu_s) / (time.perf_counter() - begun))
        times = heard()
    found.visible_s += [times[version] - visible for version, visible in saves.items()]


def _saved(repo: Any, name: str, number: int) -> tuple[int, float]:
    """Save a version; return its number, and when the version page showed it, in seconds since the epoch."""
    shown = repo._session.counter_of
    before, begun = shown(name), time.time()
    pending = repo.save_async(name, {"weight": np.array([number], np.float32)}, inherit=None)
    while shown(name) == before:
        if time.time() > begun + TIMEOUT_S:
            raise TimeoutError(f"save of {name!r}: expected it on the version page within {TIMEOUT_S} s")
        time.sleep(LOOK_S)
    visible = time.time()
    return pending.committed(TIMEOUT_S).ref.version, visible


class Listener:
    """A process that waits for versions of a name."""

    def __init__(self, way: Way, repository: str, name: str, url: str) -> None:
        from tensorvine.actors import EdgeConsumer, Repository

        self._way, self._name = way, name
        self._source: Any = (
            EdgeConsumer(url, name, repository=repository) if way == REDIS else Repository.connect(repository)
        )
        self._heard: dict[int, float] = {}
        self._newest = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._poll if way.period_s else self._wait, daemon=True)
        self._thread.start()

    def heard(self) -> dict[int, float]:
        """Return when it first had each version, in seconds since the epoch."""
        return dict(self._heard)

    def cpu_s(self) -> float:
        """Return the processor time of this process."""
        times = psutil.Process().cpu_times()
        return times.user + times.system

    def close(self) -> None:
        """End the thread and disconnect."""
        self._ending.set()
        self._thread.join(2 * WAIT_S)
        self._source.close()

    def _wait(self) -> None:
        named = () if self._way == REDIS else (self._name,)
        while not self._ending.is_set():
            newest = self._source.wait_newer(*named, self._newest, WAIT_S)
            if newest is not None:
                self._note(newest.version)

    def _poll(self) -> None:
        due = time.monotonic()
        while not self._ending.wait(max(due - time.monotonic(), 0.0)):
            self._note(self._source.info(self._name).ref.version)
            due = max(due + self._way.period_s, time.monotonic())

    def _note(self, newest: int) -> None:
        self._heard.update(dict.fromkeys(range(self._newest + 1, newest + 1), time.time()))
        self._newest = max(self._newest, newest)
