"""Four repositories on hosts, what was saved in them, and what must hold of that whatever links are cut.

Rules
- A save that succeeded is there, with its content, under the number that it got; the newest is what a name means. One
  that failed is there whole, or not at all.
- A load gives what was saved, and no older version than the newest that was there when it began.
- Nothing is lost, but for what a host that was given up alone had: that is lost by name (`ModelLostError`).
- What fails, fails with an error of the tree; a client on a host that was given up may end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from tests.hosts.cluster import WAIT_S, FailedError, Hosts
from tests.hosts.gates import Gate
from tests.hosts.network import Link
from tests.hosts.node import STORE_BYTES

NAMES = tuple(f"m{number}" for number in range(12))
TIMEOUT_S = 90.0
"""Of an operation, which may wait for a shard that starts again on another host."""
SAVE = ("catalog.begin.before", "catalog.begin.after", "shard.commit.before", "shard.keep_copies.before")
SAVE = (*SAVE, "catalog.commit.before", "catalog.commit.after", "shard.commit.after")
LOAD = ("catalog.locate.before", "catalog.locate.after")
FORK = ("describe.before", "arm.before", "arm.after", "agree.before", "agree.after", "start.before", "adopt.before")
FORK = tuple(f"trainer.{step}" for step in FORK)
"""Steps of a fork; the last two at the clones, the others at the training's ranks."""
HEALED_S = 1.5
"""Between two cuts. So TCP finds out that a link carries again: Ray takes the host of one that flaps for gone."""


def kinds(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the options of each repository: with and without a path, with and without replicas."""
    size = {"shards": 3, "store_bytes": STORE_BYTES}
    on_path = {kind: f"{folder}/{kind}" for kind in ("path", "both")}
    return {
        "memory": size,
        "path": size | {"path": on_path["path"]},
        "replicas": size | {"replicas": 2},
        "both": size | {"path": on_path["both"], "replicas": 2},
    }


def forks_at(step: str, run: str, clones: str) -> str:
    """Name the run whose ranks come to a step of a fork."""
    return clones if step in FORK[-2:] else run


@dataclass
class Record:
    """What was saved in one repository."""

    saved: dict[str, dict[int, int]] = field(default_factory=dict[str, dict[int, int]])
    """Name -> version -> seed, of what must be there or may be lost by name."""
    doubtful: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    """Name -> seeds of saves that failed."""
    may_be_lost: set[str] = field(default_factory=set[str])
    """Versions that only a host had that was given up."""

    def newest(self, name: str) -> int:
        """Return the newest version of a name; 0: there is none."""
        return max(self.saved.get(name) or {0: 0})

    def may_lose_all(self) -> None:
        """Take note that whatever is there now may have been lost."""
        self.may_be_lost |= {f"{name}@{version}" for name, versions in self.saved.items() for version in versions}


@dataclass
class Saving:
    """A save under way."""

    repository: str
    name: str
    seed: int
    answer: Future[int]


@dataclass
class Loading:
    """A load under way."""

    repository: str
    name: str
    since: int
    """The newest version when it began."""
    answer: Future[int]


_Operation = TypeVar("_Operation", Saving, Loading, Future[Any])


class Ground:
    """The repositories of a cluster of hosts, and their record.

    Args:
        hosts: of the cluster.
        prefix: of the repositories' names.
    """

    def __init__(self, hosts: Hosts, prefix: str = "") -> None:
        self.hosts = hosts
        self.records: dict[str, Record] = {}
        self.reached: set[str] = set()
        """Steps at which a call was stopped."""
        self.expected: set[str] = set()
        """Steps at which the tests that ran wanted to stop one."""
        self._armed: list[Gate] = []
        self._stopped: list[Gate] = []
        """Those of them at which an operation has come."""
        self._healed = 0.0
        """When links were healed last, of `time.monotonic`."""
        self._seeds = count(1)
        self._turn = count()
        started = {
            prefix + kind: hosts.client(1).begin("start", repository=prefix + kind, options=options)
            for kind, options in kinds(hosts.folder / f"{prefix}path").items()
        }
        for repository, answer in started.items():
            answer.result(WAIT_S)
            self.records[repository] = Record()
        for name in NAMES:
            self.settle([self.save(repository, name, self.host()) for repository in self.records], certain=True)

    def host(self) -> int:
        """Return the next host, in turn."""
        hosts = self.hosts.network.hosts
        return hosts[next(self._turn) % len(hosts)]

    # ---- operations -----------------------------------------------------------------------------------

    def save(self, repository: str, name: str, host: int, durability: str = "memory") -> Saving:
        """Begin a save on a host."""
        seed = next(self._seeds)
        asked: dict[str, Any] = {"repository": repository, "name": name, "seed": seed, "durability": durability}
        return Saving(repository, name, seed, self.hosts.client(host).begin("save", timeout=TIMEOUT_S, **asked))

    def load(self, repository: str, name: str, host: int) -> Loading:
        """Begin a load of a name's newest version on a host."""
        newest = self.records[repository].newest(name)
        answer = self.hosts.client(host).begin("load", repository=repository, model=name, timeout=TIMEOUT_S)
        return Loading(repository, name, newest, answer)

    def settle(self, operations: Iterable[Saving | Loading], certain: bool) -> list[str]:
        """Wait for operations, and hold them against what is promised; give the errors of those that failed.

        Args:
            operations: that were begun.
            certain: none may fail.
        """
        failed: list[str] = []
        for one in sorted(operations, key=lambda one: isinstance(one, Loading)):  # loads may give what was saved beside
            try:
                found = one.answer.result(TIMEOUT_S + WAIT_S)
            except FailedError as exc:
                if certain or not (exc.ours or exc.kind == "ended"):
                    raise AssertionError(f"{one}: {exc}") from exc
                failed.append(str(exc))
                if isinstance(one, Saving):
                    self.records[one.repository].doubtful.setdefault(one.name, set()).add(one.seed)
                continue
            self._note(one, found) if isinstance(one, Saving) else self._check(one, found)
        return failed

    def _note(self, saving: Saving, version: int) -> None:
        versions = self.records[saving.repository].saved.setdefault(saving.name, {})
        assert version not in versions, f"{saving} got number {version}, which {versions[version]} has"
        versions[version] = saving.seed

    def _check(self, loading: Loading, seed: int) -> None:
        record = self.records[loading.repository]
        versions = record.saved.get(loading.name, {})
        fresh = {seed for version, seed in versions.items() if version >= loading.since}
        assert seed in fresh | record.doubtful.get(loading.name, set()), f"{loading} gave {seed}: stale, or never saved"

    # ---- cuts -----------------------------------------------------------------------------------------

    def begin_until(self, step: str, begin: Callable[[str], _Operation]) -> list[_Operation]:
        """Begin an operation in each repository, and wait until it stops at a step (`gates`), if it comes there."""
        gates = self.arm(step)
        operations = [begin(repository) for repository in self.records]
        self.await_stops(gates, operations)
        return operations

    def arm(self, step: str) -> list[Gate]:
        """Have the next call that comes to a step stop there, in each repository."""
        armed = [self.hosts.gate(repository, step) for repository in self.records]
        self._armed += armed
        return armed

    def await_stops(self, gates: Iterable[Gate], operations: Iterable[Saving | Loading | Future[Any]]) -> bool:
        """Wait until each operation has come to its gate, or ended; tell whether all have come there."""
        all_came = True
        for gate, operation in zip(gates, operations, strict=True):
            answer = operation if isinstance(operation, Future) else operation.answer
            if gate.wait(lambda asked=answer: not asked.done(), TIMEOUT_S):
                self.reached.add(gate.step)
                self._stopped.append(gate)
            else:
                all_came = False
                gate.open()  # no other operation is to stop there
        return all_came

    def cut_for(self, links: Iterable[Link], seconds: float) -> None:
        """Cut links, have what is stopped go on, and heal them after some seconds."""
        while (left := self._healed + HEALED_S - time.monotonic()) > 0:
            threading.Event().wait(left)
        with self.hosts.cut(*links):
            self.go_on()
            threading.Event().wait(seconds)
        self._healed = time.monotonic()

    def go_on(self) -> None:
        """Have all that is stopped go on."""
        for gate in self._stopped:
            gate.open()
        self._stopped.clear()

    def close(self) -> None:
        """Have nothing stop any more."""
        self._stopped, self._armed = self._armed, []
        self.go_on()

    # ---- afterwards -----------------------------------------------------------------------------------

    def judge(self, hosts: Iterable[int], names: Iterable[str] = NAMES, whole: bool = False) -> None:
        """Hold what hosts find against the record.

        Args:
            hosts: whose clients are asked.
            names: whose newest versions are loaded.
            whole: all versions are, and files and memory are verified.
        """
        asked = list(hosts)
        for repository, record in self.records.items():
            listed = {host: self.hosts.client(host).begin("models", repository=repository) for host in asked}
            found = {host: answer.result(WAIT_S) for host, answer in listed.items()}
            assert len({tuple(models) for models in found.values()}) == 1, f"{repository}: {found}"
            self._resolve(repository, record, found[asked[0]], asked[0])
            wanted = [f"{n}@{v}" for n in names for v in record.saved.get(n, {}) if whole or v == record.newest(n)]
            for host in asked:
                self._load_all(repository, record, wanted, host)
            if whole:
                problems: list[str] = self.hosts.client(asked[0]).do("checked", repository=repository)
                found_lost = {
                    one for one in problems if one.endswith("they are lost") and one.split(":")[0] in record.may_be_lost
                }
                assert found_lost.issuperset(problems), f"{repository}: {problems}"

    def _resolve(self, repository: str, record: Record, models: list[str], host: int) -> None:
        """See what of the doubtful is there, and that nothing else is missing or too much."""
        known = {f"{name}@{version}" for name, versions in record.saved.items() for version in versions}
        missing = known - set(models) - record.may_be_lost
        assert not missing, f"{repository}: lost {sorted(missing)}"
        for model in set(models) - known:
            name, _, version = model.partition("@")
            seed = self.hosts.client(host).do("load", repository=repository, model=model, timeout=TIMEOUT_S)
            doubtful = record.doubtful.get(name, set())
            assert seed in doubtful, f"{repository}: {model} has seed {seed}, which nobody saved so; {doubtful}"
            doubtful.remove(seed)
            record.saved.setdefault(name, {})[int(version)] = seed
        for model in record.may_be_lost - set(models):
            name, _, version = model.partition("@")
            record.saved[name].pop(int(version), None)
        record.may_be_lost &= set(models)

    def _load_all(self, repository: str, record: Record, models: Iterable[str], host: int) -> None:
        client = self.hosts.client(host)
        begun = {m: client.begin("load", repository=repository, model=m, timeout=TIMEOUT_S) for m in models}
        for model, answer in begun.items():
            name, _, version = model.partition("@")
            try:
                found = answer.result(TIMEOUT_S + WAIT_S)
            except FailedError as exc:
                if exc.kind == "ModelLostError" and model in record.may_be_lost:
                    continue
                raise AssertionError(f"{repository}: {model} on host {host}: {exc}") from exc
            expected = record.saved[name][int(version)]
            assert found == expected, f"{repository}: {model} on host {host}: expected {expected}; found {found}"

    def retire_all(self) -> None:
        """Retire all versions."""
        for repository, record in self.records.items():
            client = self.hosts.client(1)
            for model in client.do("models", repository=repository):
                client.do("retire", repository=repository, model=model)
            record.saved.clear()
            record.doubtful.clear()
            record.may_be_lost.clear()

    def left(self, timeout: float = WAIT_S) -> Mapping[str, list[str]]:
        """Wait until the shards hold nothing, where there are no models; give what they hold still."""
        deadline = time.monotonic() + timeout
        while True:
            found = {r: self.hosts.client(1).do("left", repository=r) for r in self.records}
            left = {repository: held for repository, held in found.items() if held}
            if not left or time.monotonic() > deadline:
                return left
            threading.Event().wait(0.2)
