"""One world from one seed: what the repository is like, what its clients do, what befalls it, and how it is judged.

Rules
- Everything is drawn from the seed: first the kind of world (`Kind`), then each step as it comes.
- Faults keep within what is promised: without a path one shard is never killed, for somebody must know what was.
- After the last operation the world heals, settles, and is checked by a client that was not there before.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import greenlet
from tensorvine.actors.messages import planner_name
from tensorvine.actors.repository import Repository
from tensorvine.store.errors import (
    ModelLostError,
    ModelNotFoundError,
    StoreFullError,
    TensorVineError,
)
from tensorvine.store.refs import ModelRef
from tensorvine.store.retention import KeepLast

from . import disk as disks
from .cluster import Cluster, Hosted, Weather, _told
from .oracle import Attempt, Held, Oracle, Table
from .scheduler import START_S, Process, StuckError, Thread, World

NAME = "sim"
SIZES = (4, 40, 200, 400)
"""Elements of 8 bytes: inline, and one to several parts of memory."""
TIMEOUT_S = 20.0
OPERATIONS = ("save", "load", "load version", "some", "retire", "let go", "pause", "check", "flush")
THEMES = ("any", "any", "any", "pressure", "drain", "disk", "mirror", "starter", "clients", "compact")
LENGTHS = (0.15, 0.15, 0.15, 0.15, 0.3, 1.0)
"""Parts of a kind's operations: short worlds find as many kinds of errors in the same time, and as few lines of trace
to read."""
STEPS = (30, 300, 1500)
"""Steps at most until the next fault."""
SETTLE_S, CALM_S, CLOSED_S = 20.0, 2.0, 9.0
"""How long a world settles after troubles, without any, and when its clients are gone."""
TOLD_S = 10.0
"""How long without a crash it takes until all know what one of them knew."""
LOOKED_S = 30.0
"""How long shards may take to find files that nobody needs: a few looks of theirs, and one slow manifest."""


@dataclass
class Kind:
    """The kind of a world."""

    theme: str
    shards: int
    nodes: int
    clients: int
    path: bool
    replicas: int
    keep: int | None
    capacity: int
    operations: int
    faults: tuple[str, ...]
    fault_count: int
    names: int
    slowness_s: float

    weights: dict[str, int]
    """How often a client does what."""
    stalls: tuple[float, tuple[float, ...]]
    """The chance that a thread is delayed at a scheduling point, and how long in seconds."""
    copying: float | None = None
    """The chance that a thread is delayed before it copies bytes, if it is not by that of all other points."""
    sizes: tuple[int, ...] = SIZES
    tensors: tuple[int, ...] = (1, 2, 4)
    """How many a new model has."""
    holding: float = 0.4
    """The chance that a client keeps what it loaded."""
    delays: tuple[float, ...] = (0.05, 0.5, 3.0)
    """Seconds at most until the next fault."""
    mutation: float = 0.4
    """The chance that a tensor is another one in the next version."""
    cross: float = 0.2
    """The chance that a model may derive from one of another name."""

    @classmethod
    def drawn(cls, random: Any, wanted: str | None = None) -> Kind:
        """Draw one, of a wanted theme or any: a third of them of all sorts, the others with more of what is rare."""
        theme = random.choice(THEMES)
        theme = wanted if wanted is not None else theme
        kind = cls._any(random)
        kind.theme = theme
        if theme == "pressure":
            kind.path, kind.capacity, kind.operations = True, random.choice((16 << 10, 24 << 10)), 40
            kind.replicas, kind.shards, kind.clients = 1, random.choice((1, 1, 2)), random.choice((2, 3))
            kind.slowness_s = random.choice((0.0, 0.01, 0.1))
            kind.faults, kind.fault_count = (), 0
            kind.weights |= {"retire": 4, "load version": 3, "some": 2, "save": 5, "let go": 2, "load": 1}
            kind.weights |= {"flush": 0, "pause": 0, "check": 0}
            kind.stalls = (random.choice((0.02, 0.05)), random.choice(((0.001, 0.05), (0.001, 0.2))))
            kind.sizes, kind.tensors, kind.holding = (40, 200), (3, 4, 5), 0.1
        elif theme == "compact":
            kind.path, kind.capacity, kind.operations, kind.replicas = True, 16 << 10, 40, 1
            kind.shards, kind.clients, kind.names, kind.slowness_s = 1, 3, 3, random.choice((0.0, 0.01))
            kind.faults, kind.fault_count, kind.keep = (), 0, None
            kind.weights = dict.fromkeys(OPERATIONS, 0) | {"save": 6, "retire": 4, "load version": 4, "let go": 1}
            kind.stalls, kind.copying = (0.02, random.choice(((0.02, 0.2), (0.2, 0.5)))), 0.5
            kind.sizes, kind.tensors, kind.holding = (40, 200), (3, 4, 5), 0.05
        elif theme == "drain":
            kind.shards, kind.clients, kind.operations, kind.names = random.choice((2, 3)), 3, 40, 6
            kind.faults, kind.fault_count, kind.capacity = ("scale",), 4, 256 << 10
            kind.weights |= {"load": 4, "load version": 4, "some": 2, "save": 3, "retire": 0, "flush": 0}
            kind.stalls = (random.choice((0.02, 0.05)), (0.001, 0.05, 0.3))
            kind.sizes, kind.cross, kind.slowness_s = (40, 200), 0.6, 0.0
        elif theme == "disk":
            kind.path, kind.faults, kind.fault_count, kind.operations = True, ("disk",), random.choice((1, 2)), 16
            kind.weights |= {"flush": 3, "save": 5, "pause": 3, "retire": 1}
            kind.delays, kind.slowness_s = (1.0, 3.0), random.choice((0.0, 0.01))
        elif theme == "mirror":
            kind.path, kind.nodes, kind.shards, kind.replicas = random.random() < 0.7, 2, random.choice((2, 3)), 2
            kind.faults, kind.fault_count, kind.slowness_s = ("crash shard",), 1, random.choice((0.1, 1.0, 3.0))
            kind.weights |= {"save": 6, "retire": 1, "pause": 3}
            kind.operations, kind.names, kind.cross, kind.sizes, kind.delays = 16, 3, 0.5, (40, 200), (1.0, 3.0, 6.0)
        elif theme == "starter":
            kind.path, kind.faults, kind.fault_count = random.random() < 0.7, ("scale", "crash both", "crash both"), 3
            kind.shards = max(kind.shards, 2)
        elif theme == "clients":
            kind.faults, kind.fault_count, kind.capacity = (
                ("kill client", "kill client", "stop"),
                3,
                random.choice((16 << 10, 24 << 10)),
            )
            kind.clients, kind.operations, kind.sizes, kind.tensors = 4, 20, (40, 200), (3, 4, 5)
            kind.weights |= {"let go": 0, "save": 5, "retire": 2}
        kind.operations = max(3, round(kind.operations * random.choice(LENGTHS)))
        return kind

    @classmethod
    def _any(cls, random: Any) -> Kind:
        path = random.random() < 0.6
        nodes = random.choice((1, 1, 2))
        shards = random.choice((1, 2, 2, 3))
        replicas = 2 if nodes == 2 and shards > 1 and random.random() < 0.5 else 1
        possible = ["crash shard", "crash planner", "crash both", "scale", "stop", "kill client", "restart"]
        if path:
            possible += ["disk", "disk"]
        chosen = tuple(random.sample(possible, random.choice((0, 1, 1, 2, 3))))
        weights = {what: random.choice((1, 1, 3)) for what in OPERATIONS}
        stalls = random.choice((0.002, 0.01, 0.05)), random.choice(((0.0005,), (0.0005, 0.01), (0.001, 0.05, 1.0)))
        return cls(
            "any",
            shards,
            nodes,
            random.choice((1, 2, 2, 3)),
            path,
            replicas,
            random.choice((None, None, 1)),
            random.choice((16 << 10, 24 << 10, 48 << 10, 256 << 10)),
            random.choice((6, 10, 16)),
            chosen,
            random.choice((1, 1, 2, 3)) if chosen else 0,
            random.choice((1, 2, 3)),
            random.choice((0.0, 0.01, 0.3)),
            weights,
            stalls,
        )


class Scenario:
    """A repository in a world, its clients and its troubles."""

    def __init__(self, seed: int, traced: bool = False, theme: str | None = None) -> None:
        w = self.world = World(seed)
        if traced:
            w.trace = []
        self.random = w.random
        kind = self.kind = Kind.drawn(w.random, theme)
        w.stall_chance, w.stalls_s = kind.stalls
        w.copy_chance = kind.copying if kind.copying is not None else min(0.5, 5 * w.stall_chance)
        w.switch_chance = w.random.choice((0.1, 0.3, 0.6))
        self.weather = Weather(
            w.random.choice((0.0002, 0.002)), w.random.choice((0.0, 0.05)), w.random.choice((0.05, 0.5))
        )
        self.cluster = w.cluster = Cluster(w, [f"node-{i}" for i in range(kind.nodes)], self.weather)  # type: ignore[attr-defined]
        w.disk = disks.Disk(w, kind.slowness_s)  # type: ignore[attr-defined]
        w.thread_died = self._thread_died  # type: ignore[method-assign]
        self.oracle = Oracle(w)
        self.clients: list[Client] = []
        self.at_work = 0
        self.knowing: set[Process | None] = set()
        self.crashed = 0.0
        self.troubled = False
        """Something was done to the world that may make operations fail."""
        self.operator = Process(w, "operator", "node-0")
        w.note(f"seed {seed}: {kind}, {self.weather}")

    # ---- the whole --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run to the end."""
        w = self.world
        w.spawn(self.operator, "main", self._operate)
        try:
            w.run()
        except StuckError as exc:
            self.oracle.fail("R8", f"{exc}")
        for error in w.errors:
            self.oracle.fail("R6", f"a thread ended: {error}")
        for error in self.cluster.foreign:
            self.oracle.fail("R6", error)

    def _thread_died(self, thread: Thread, error: Exception) -> None:
        self.world.errors.append(f"{thread.name} of {thread.process.name}: {_told(error)}")

    def _operate(self) -> None:
        w, kind = self.world, self.kind
        try:
            repo = self._start()
            w.note("STARTED")
            for number in range(kind.clients):
                self._client(number)
            for _ in range(kind.fault_count):
                if w.random.random() < 0.5:
                    w.sleep(w.random.random() * w.random.choice(kind.delays))
                else:  # in the middle of what takes no time
                    w.await_step(w.random.randrange(w.random.choice(STEPS)), max(kind.delays))
                if self.at_work:
                    self._befall(repo)
            while self.at_work:
                w.sleep(0.5)
            self._heal()
            w.sleep(SETTLE_S if self.troubled else CALM_S)
            self._judge()
        except Exception as exc:  # noqa: BLE001
            self.oracle.fail("R8", f"the operator: {_told(exc)}")
        finally:
            if not w.over:
                w.finish()

    def _start(self) -> Repository:
        kind = self.kind
        return Repository.start(
            NAME,
            shards=kind.shards,
            path=disks.URI if kind.path else None,
            replicas=kind.replicas,
            store_bytes=kind.capacity,
            preallocate_bytes=0,
            keep=KeepLast(kind.keep) if kind.keep is not None and kind.path else None,
        )

    def _client(self, number: int) -> None:
        process = Process(self.world, f"client-{number}", f"node-{number % self.kind.nodes}")
        client = Client(self, process, number)
        self.clients.append(client)
        self.at_work += 1
        self.world.spawn(process, "main", client.work)

    # ---- what befalls it --------------------------------------------------------------------------------

    def _shards(self) -> list[Hosted]:
        return [h for h in self.cluster.actors.values() if not h.gone and "/shard-" in h.ref.name]

    def _planner(self) -> Hosted:
        return next(h for h in self.cluster.actors.values() if h.ref.name == planner_name(NAME))

    def _may_crash(self, hosted: Hosted) -> bool:
        if self.kind.path or "/shard-" not in hosted.ref.name:
            return True
        return any(h is not hosted and h.lives == 1 and h.instance is not None for h in self._shards())

    def _crash(self, hosted: Hosted) -> None:
        if not self._may_crash(hosted):
            return
        self.troubled = True
        if "/shard-" in hosted.ref.name:
            covered = self.kind.replicas > 1 and self.oracle.crashes == 0 and "scale" not in self.kind.faults
            self.oracle.crashed(covered)
        self._remembering(hosted)
        self.cluster.crash(hosted)

    def _remembering(self, dying: Hosted) -> None:
        """Follow which processes know what was saved: one that was not told by others before they died may not.

        When the last one dies, what is on no disk is known to nobody.
        """
        w = self.world
        living = {h.process for h in self.cluster.actors.values() if h.process is not None and not h.process.dead}
        if w.now - self.crashed >= TOLD_S:
            self.knowing = living
        self.crashed = w.now
        self.knowing = (self.knowing & living) - {dying.process}
        if not self.knowing:
            self.oracle.forgotten()

    def _befall(self, repo: Repository) -> None:
        w = self.world
        fault = w.random.choice(self.kind.faults)
        shards = self._shards()
        w.note(f"FAULT {fault}")
        if fault == "crash shard":
            self._crash(w.random.choice(shards))
        elif fault == "crash planner":
            self._crash(self._planner())
        elif fault == "crash both":
            pair = [self._planner(), w.random.choice((shards[0], shards[0], shards[-1]))]
            w.random.shuffle(pair)
            for hosted in pair:
                self._crash(hosted)
                w.sleep(w.random.choice((0.0, 0.0, 0.1)) * w.random.random())
        elif fault == "restart" and self.kind.path:
            for hosted in [*shards, self._planner()]:
                self._crash(hosted)
        elif fault == "scale":
            self.troubled = True
            for _ in range(w.random.choice((0, 1, 2))):  # whoever changes the shards is slow
                moment, seconds = w.random.random() * w.random.choice((0.03, 0.2)), w.random.choice((0.1, 0.6))
                w.at(w.now + moment, lambda seconds=seconds: self._stop_planner(seconds))
            self._attempt_scale(repo, w.random.choice((1, 2, 3, 4)))
        elif fault == "stop":
            self.troubled = True
            living = [p for p in w.processes.values() if not p.dead and p is not self.operator]
            w.stop(w.random.choice(living), w.random.choice((0.05, 1.0, 8.0)))
        elif fault == "kill client":
            client = w.random.choice(self.clients)
            if not client.process.dead and client.working:
                w.kill(client.process)
                client.gone()
        elif fault == "disk":
            self.troubled = True
            self._disk_trouble(shards)

    def _stop_planner(self, seconds: float) -> None:
        process = self._planner().process
        if process is not None and not process.dead and not self.world.over:
            self.world.stop(process, seconds)

    def _attempt_scale(self, repo: Repository, shards: int) -> None:
        try:
            repo.scale(max(shards, self.kind.replicas), timeout=30.0)
        except TensorVineError as exc:
            self.world.note(f"scale: {exc!r}")
        except greenlet.GreenletExit:
            raise
        except Exception as exc:  # noqa: BLE001
            self.oracle.fail("R6", f"scale: {_told(exc)}")

    def _disk_trouble(self, shards: list[Hosted]) -> None:
        w = self.world
        reads, writes = w.random.choice(((True, False), (False, True), (True, True)))
        until, chance = w.now + w.random.choice((0.5, 3.0, 8.0)), w.random.choice((0.2, 0.5, 0.8))
        only = w.random.choice(("", "manifests/", "manifests/"))
        trouble = self.cluster.trouble = disks.Trouble(until, chance, reads, writes, only)
        w.note(f"disk trouble until {until - START_S:.2f}: {trouble}")
        for hosted in shards:
            if hosted.process is not None:
                hosted.process.facts["trouble"] = trouble
        if reads and w.random.random() < 0.7:
            self._crash(w.random.choice(shards))

    def _heal(self) -> None:
        w = self.world
        w.note("HEALED")
        self.cluster.trouble = None
        for process in w.processes.values():
            process.facts.pop("trouble", None)
        self.weather.lost_chance = 0.0
        w.stall_chance = w.copy_chance = 0.0
        w.disk.slowness_s = min(w.disk.slowness_s, 0.1)  # type: ignore[attr-defined]
        end = w.now + 120.0
        while any(h.instance is None for h in self.cluster.actors.values() if not h.gone):
            if w.now > end:
                waiting = [h.ref.name for h in self.cluster.actors.values() if not h.gone and h.instance is None]
                self.oracle.fail("R8", f"{waiting} did not start within 120 s")
                return
            w.sleep(0.5)

    # ---- the end ----------------------------------------------------------------------------------------

    def _judge(self) -> None:
        """Check what is left, as a client that was not there before."""
        w = self.world
        process = Process(w, "judge", "node-0")
        done: list[bool] = []

        def judge() -> None:
            try:
                Judge(self).judge()
            except Exception as exc:  # noqa: BLE001
                self.oracle.fail("R8", f"the judge: {_told(exc)}")
            finally:
                done.append(True)

        w.spawn(process, "main", judge)
        while not done:
            w.sleep(0.5)


class Client:
    """A client that does random things."""

    def __init__(self, scenario: Scenario, process: Process, number: int) -> None:
        self.scenario = scenario
        self.process = process
        self.number = number
        self.working = True
        self.held: list[Held] = []
        self.pins: list[Any] = []
        self.repo: Repository | None = None
        self._random = scenario.random
        self._oracle = scenario.oracle
        self._world = scenario.world

    def gone(self) -> None:
        """Work no more."""
        if self.working:
            self.working = False
            self.scenario.at_work -= 1

    def work(self) -> None:
        """Do all operations."""
        try:
            self._attempt("connect", self._connect, 60.0)
            steps = dict(
                zip(
                    OPERATIONS,
                    (
                        self._save,
                        self._load,
                        self._load_version,
                        self._some,
                        self._retire,
                        self._let_go,
                        self._pause,
                        self._check_held,
                        self._flush,
                    ),
                    strict=True,
                )
            )
            weights = [self.scenario.kind.weights[what] for what in steps]
            for _ in range(self.scenario.kind.operations):
                if self.repo is None:
                    break
                self._random.choices(list(steps.values()), weights)[0]()
            self._check_held()
        finally:
            if not self._world.over:
                self.gone()

    def _connect(self) -> None:
        self.repo = Repository.connect(NAME)

    def _repo(self) -> Repository:
        if self.repo is None:
            raise StuckError("expected to be connected")
        return self.repo

    def _attempt(self, what: str, action: Callable[[], Any], timeout: float = TIMEOUT_S) -> Any:
        """Do something; what it raises must be of the tree, and it must end in time."""
        w = self._world
        began, stopped = w.now, self.process.stopped_until
        w.note(f"> {what}")
        try:
            found = action()
            if w.trace is not None:
                w.note(f"< {what}: {_brief(found)}")
            return found
        except TensorVineError as exc:
            w.note(f"< {what}: {type(exc).__name__}: {exc}")
            return exc
        except Exception as exc:  # noqa: BLE001
            self._oracle.fail("R6", f"{what}: {_told(exc)} {getattr(exc, '__notes__', [])[-1:]}")
            return exc
        finally:
            if not w.over and w.now - began > timeout + 45.0 and self.process.stopped_until == stopped:
                self._oracle.fail("R8", f"{what}: {w.now - began:.1f} s, with a timeout of {timeout} s")

    def _name(self) -> str:
        return f"m{self._random.randrange(self.scenario.kind.names)}"

    def _table(self, name: str) -> tuple[Table, Attempt | None]:
        """Derive a table: like the last of this name or another, with some tensors changed; and that one."""
        random, oracle = self._random, self._oracle
        kind = self.scenario.kind
        known = [a for a in oracle.attempts if a.name == name or random.random() < kind.cross]
        if not known or random.random() < 0.15:
            fresh = {f"t{i}": oracle.fresh(random.choice(kind.sizes)) for i in range(random.choice(kind.tensors))}
            return self._fitting(fresh), None
        table = dict(known[-1].table)
        for tensor in list(table):
            if random.random() < kind.mutation:
                table[tensor] = oracle.fresh(random.choice(kind.sizes) if random.random() < 0.2 else table[tensor][1])
        if random.random() < 0.15:
            table[f"t{len(table)}"] = oracle.fresh(random.choice(kind.sizes))
        elif len(table) > 1 and random.random() < 0.1:
            del table[f"t{len(table) - 1}"]
        return self._fitting(table), known[-1]

    def _fitting(self, table: Table) -> Table:
        """Leave out tensors until the memory can have the version and some others at one time."""
        while len(table) > 1 and 8 * sum(elements for _, elements in table.values()) > self.scenario.kind.capacity // 3:
            table.pop(max(table))
        return table

    # ---- operations -------------------------------------------------------------------------------------

    def _save(self) -> None:
        random, oracle, name = self._random, self._oracle, self._name()
        table, source = self._table(name)
        durable = self.scenario.kind.path and random.random() < 0.25
        parent: str | None = None
        living = oracle.alive()
        if source is not None and source in living and (source.name != name or random.random() < 0.2):
            parent = str(source.ref)
        elif living and random.random() < 0.1:
            parent = str(random.choice(living).ref)
        attempt = oracle.begin(name, table, durable)
        options: dict[str, Any] = {
            "parent": parent,
            "durability": "disk" if durable else "memory",
            "timeout": TIMEOUT_S,
        }
        later = random.random() < 0.25

        def save() -> Any:
            if later:
                pending = self._repo().save_async(name, oracle.arrays(table), **options)
                return pending.committed(TIMEOUT_S + 10.0)
            return self._repo().save(name, oracle.arrays(table), **options)

        saved = self._attempt(f"save {attempt.number} {name} {table} parent={parent} durable={durable}", save)
        if isinstance(saved, BaseException):
            attempt.failed = True
            if isinstance(saved, StoreFullError):
                self._full(attempt)
        else:
            oracle.committed(attempt, saved.ref)

    def _full(self, attempt: Attempt) -> None:
        """A refused save is no news: the memory is small."""

    def _load(self) -> None:
        name = self._name()
        arrays = self._attempt(f"load {name}", lambda: self._repo().load(name, timeout=TIMEOUT_S))
        self._loaded(f"load of {name!r}", None, name, arrays, True)

    def _load_version(self) -> None:
        living = self._oracle.alive()
        if living:
            attempt = self._random.choice(living)
            self._load_of(attempt, None)

    def _some(self) -> None:
        living = self._oracle.alive()
        if living:
            attempt = self._random.choice(living)
            names = sorted(attempt.table)
            self._load_of(attempt, self._random.sample(names, self._random.randint(1, len(names))))

    def _load_of(self, attempt: Attempt, tensors: list[str] | None) -> None:
        ref = attempt.ref
        what = f"load {ref} {tensors or ''}"
        arrays = self._attempt(what, lambda: self._repo().load(str(ref), tensors=tensors, timeout=TIMEOUT_S))
        gone = isinstance(arrays, ModelLostError | ModelNotFoundError)
        if gone and not self.scenario.troubled and not attempt.retiring:
            self._oracle.fail("R3", f"{what}: {arrays!r}, and nothing has happened")
        self._loaded(what, ref, attempt.name, arrays, tensors is None)

    def _loaded(self, what: str, ref: ModelRef | None, name: str, arrays: Any, whole: bool) -> None:
        if isinstance(arrays, BaseException):
            return
        attempt = self._oracle.read(what, ref, name, arrays, whole)
        if attempt is not None and self._random.random() < self.scenario.kind.holding:
            self.held.append(Held(what, arrays, attempt))

    def _retire(self) -> None:
        living = self._oracle.alive()
        if not living:
            return
        shared = [a for a in living if any(a.table.items() & b.table.items() for b in living if b is not a)]
        attempt = self._random.choice(shared if shared and self._random.random() < 0.6 else living)
        attempt.retiring = True
        result = self._attempt(f"retire {attempt.ref}", lambda: self._repo().retire(str(attempt.ref)))
        attempt.retired = not isinstance(result, BaseException)

    def _let_go(self) -> None:
        if self.held:
            held = self.held.pop(self._random.randrange(len(self.held)))
            self._oracle.check_held(held)

    def _check_held(self) -> None:
        for held in self.held:
            self._oracle.check_held(held)

    def _flush(self) -> None:
        if not self.scenario.kind.path:
            return
        since = self._world.now
        result = self._attempt("flush", lambda: self._repo().flush(TIMEOUT_S))
        if not isinstance(result, BaseException):
            self._oracle.flushed(since)

    def _pause(self) -> None:
        self._world.sleep(self._random.choice((0.01, 0.3, 2.0)) * self._random.random())


class Judge(Client):
    """Checks a world at its end."""

    def __init__(self, scenario: Scenario) -> None:
        process = scenario.world.process
        if process is None:
            raise StuckError("expected to run in a process")
        super().__init__(scenario, process, -1)

    def judge(self) -> None:
        """Check everything; then retire everything, and check that nothing is left."""
        self._attempt("connect", self._connect)
        if self.repo is None:
            self._oracle.fail("R8", "nobody can connect")
            return
        for client in self.scenario.clients:
            if not client.process.dead:
                client._check_held()
                client.held.clear()
        gc.collect()
        self._readable()
        self._listed()
        self._numbers()
        if not self._oracle.broken:
            self._emptied()

    def _readable(self) -> None:
        for attempt in self._oracle.alive():
            what = f"at the end: load {attempt.ref}"
            arrays = self._attempt(what, lambda attempt=attempt: self._repo().load(str(attempt.ref), timeout=TIMEOUT_S))
            if not isinstance(arrays, BaseException):
                self._oracle.read(what, attempt.ref, attempt.name, arrays, True)
            elif isinstance(arrays, ModelNotFoundError) and not attempt.forgotten:
                self._oracle.fail("R3", f"{what}: it was never saved or is retired, it says: {arrays}")
            elif isinstance(arrays, ModelLostError) and not attempt.lossy:
                self._oracle.fail("R3", f"{what} (safe: {attempt.safe}): {arrays}")
            elif not isinstance(arrays, ModelLostError | ModelNotFoundError | StoreFullError):
                self._oracle.fail("R8", f"{what}: all is calm: {arrays!r}")
            del arrays
        for name in sorted({a.name for a in self._oracle.alive()}):
            what = f"at the end: load {name!r}"
            arrays = self._attempt(what, lambda name=name: self._repo().load(name, timeout=TIMEOUT_S))
            if not isinstance(arrays, BaseException):
                self._oracle.read(what, None, name, arrays, True)

    def _listed(self) -> None:
        listed = self._attempt("models", lambda: self._repo().models())
        if isinstance(listed, BaseException):
            self._oracle.fail("R8", f"at the end: models: {listed!r}")
            return
        twice = sorted({ref for ref in listed if listed.count(ref) > 1})
        if twice:
            self._oracle.fail("R5", f"listed twice: {twice}")
        for attempt in self._oracle.attempts:
            if attempt.retired and attempt.ref in listed:
                self._oracle.fail("R3", f"{attempt.ref} was retired and is listed")
        for hosted in self.scenario._shards():
            result = self._attempt(
                f"check {hosted.ref.name}",
                lambda hosted=hosted: self._repo().engine.result(
                    self._repo().engine.call(hosted.ref, "check"), 10.0, hosted.ref.name
                ),
            )
            if isinstance(result, BaseException):
                self._oracle.fail("R7", f"check of {hosted.ref.name}: {result!r}")

    def _numbers(self) -> None:
        """Save each name once more: its number must be new."""
        for name in sorted({a.name for a in self._oracle.attempts if a.ref is not None}):
            highest = max(a.ref.version for a in self._oracle.attempts if a.name == name and a.ref is not None)
            attempt = self._oracle.begin(name, {"t0": self._oracle.fresh(4)}, False)
            saved = self._attempt(
                f"save {name} again",
                lambda name=name, attempt=attempt: self._repo().save(
                    name, self._oracle.arrays(attempt.table), inherit=None, timeout=TIMEOUT_S
                ),
            )
            if isinstance(saved, BaseException):
                if not isinstance(saved, StoreFullError):
                    self._oracle.fail("R8", f"at the end: save of {name!r}: {saved!r}")
                continue
            self._oracle.committed(attempt, saved.ref)
            if saved.ref.version <= highest:
                self._oracle.fail("R4", f"{saved.ref} comes after {name}@{highest}")

    def _emptied(self) -> None:
        w = self._world
        for client in self.scenario.clients:
            if client.repo is not None and not client.process.dead:
                w.spawn(client.process, "close", client.repo.close)
        gc.collect()
        for ref in self._attempt("models", lambda: self._repo().models()):
            result = self._attempt(f"retire {ref}", lambda ref=ref: self._repo().retire(str(ref)))
            if isinstance(result, BaseException):
                self._oracle.fail("R8", f"at the end: retire of {ref}: {result!r}")
        w.sleep(CLOSED_S)
        stats = self._attempt("stats", lambda: self._repo().stats())
        if isinstance(stats, BaseException):
            self._oracle.fail("R8", f"at the end: stats: {stats!r}")
            return
        for shard in stats.shards:
            left = {
                what: getattr(shard, what)
                for what in (
                    "models",
                    "tensors",
                    "bytes_memory",
                    "bytes_allocated",
                    "bytes_staged",
                    "bytes_disk",
                    "pins",
                )
                if getattr(shard, what)
            }
            if left:
                self._oracle.fail("R7", f"shard {shard.shard}: left at the end: {left}; {self._owners(shard.shard)}")
        end = w.now + LOOKED_S
        while (files := self._segment_files()) and w.now < end:
            w.sleep(1.0)
        if files:
            self._oracle.fail("R7", f"files without owner: {files[:3]} and so on, {len(files)}")

    def _owners(self, shard: int) -> str:
        hosted = next(h for h in self.scenario._shards() if h.ref.name.endswith(f"-{shard}"))
        arena = getattr(getattr(hosted.instance, "_holdings", None), "_arena", None)
        return f"memory is owned by {sorted(arena.owners())}" if arena is not None else ""

    def _segment_files(self) -> list[str]:
        """Name the files of segments that there are."""
        return sorted(name for name in self._world.disk.files if name.startswith("segments/"))  # type: ignore[attr-defined]


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        return str({name: f"#{int(array.flat[0]) >> 32}" for name, array in value.items()})
    text = repr(value)
    return text if len(text) < 100 else text[:97] + "..."
