"""A client of a simulated repository: what it does, and how what it is given is checked.

Rules
- Every operation ends within its timeout, and what it raises is of the tree; every read checks itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tensorvine.actors.client.repository import Repository
from tensorvine.store.errors import ModelLostError, ModelNotFoundError, StoreFullError, TensorVineError
from tensorvine.store.holders import Request
from tensorvine.store.refs import ModelRef

from .cluster import told
from .interrupts import Counts, Signal
from .kinds import ON_REQUEST, OPERATIONS
from .oracle import Attempt, Held, Table, graph_of, layers_shared
from .scheduler import Process, StuckError
from .setting import NAME, Setting
from .threads import Executor, wait

TIMEOUT_S = 20.0
CONTROL_S = 30.0
"""The timeout of what takes none from its caller."""


class Client:
    """A client that does random things."""

    def __init__(self, setting: Setting, process: Process, number: int) -> None:
        self._setting = setting
        self.process = process
        self.number = number
        self.working = True
        self.held: list[Held] = []
        self.matches: list[Any] = []
        """What prefix queries found and pinned."""
        self._signals = setting.kind.interrupts
        """The chance that a signal comes during an operation."""
        self._counts: Counts = {}
        self.repo: Repository | None = None
        self._random = setting.random
        self._oracle = setting.oracle
        self._world = setting.world

    def gone(self) -> None:
        """Work no more."""
        if self.working:
            self.working = False
            self._setting.at_work -= 1

    def work(self) -> None:
        """Do all operations."""
        try:
            self._attempt("connect", self._connect, 60.0)
            steps = dict(
                zip(
                    (*OPERATIONS, *ON_REQUEST),
                    (
                        self._save,
                        self._load,
                        self._load_version,
                        self._some,
                        self._retire,
                        self._let_go,
                        self._pause,
                        self.check_held,
                        self._flush,
                        self._query,
                        self._load_match,
                        self._release,
                        self._place,
                    ),
                    strict=True,
                )
            )
            weights = [self._setting.kind.weights.get(what, 0) for what in steps]
            for _ in range(self._setting.kind.operations):
                if self.repo is None:
                    break
                self._random.choices(list(steps.values()), weights)[0]()
            self.check_held()
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
        """Do something; what it raises must be of the tree, and it must end in time. A signal may come meanwhile."""
        w = self._world
        began, stopped = w.now, self.process.stopped_until
        w.note(f"> {what}")
        try:
            found = self._signalled(what, action)
            if w.trace is not None:
                w.note(f"< {what}: {_brief(found)}")
            return found
        except TensorVineError as exc:
            w.note(f"< {what}: {type(exc).__name__}: {exc}")
            return exc
        except KeyboardInterrupt:
            w.note(f"< {what}: KeyboardInterrupt")
            return KeyboardInterrupt()  # without the frames, as where it is caught and forgotten
        except Exception as exc:  # noqa: BLE001
            self._oracle.fail("R6", f"{what}: {told(exc)} {getattr(exc, '__notes__', [])[-1:]}")
            return exc
        finally:
            if not w.over and w.now - began > timeout + 45.0 and self.process.stopped_until == stopped:
                self._oracle.fail("R8", f"{what}: {w.now - began:.1f} s, with a timeout of {timeout} s")

    def _signalled(self, what: str, action: Callable[[], Any]) -> Any:
        """Do something, during which a signal comes in some worlds at times."""
        w = self._world
        if not self._signals or self.repo is None or w.current is None or w.random.random() >= self._signals:
            return action()
        signal = Signal(w, w.current, self._counts, what.partition(" ")[0])
        signal.aim()
        with signal.coming():
            return action()

    def reserved(self) -> Request | None:
        """Return the request under which memory waits for the next save."""
        waiting = self.repo._saves.saver.reserved._waiting if self.repo is not None else None
        return waiting.numbered.request if waiting is not None else None

    def _name(self) -> str:
        return f"m{self._random.randrange(self._setting.kind.names)}"

    def _table(self, name: str) -> tuple[Table, Attempt | None]:
        """Derive a table: like the last of this name or another, with some tensors changed; and that one."""
        random, oracle = self._random, self._oracle
        kind = self._setting.kind
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
        while len(table) > 1 and 8 * sum(elements for _, elements in table.values()) > self._setting.kind.capacity // 3:
            table.pop(max(table))
        return table

    # ---- operations -------------------------------------------------------------------------------------

    def _save(self) -> None:
        random, oracle, name = self._random, self._oracle, self._name()
        table, source = self._table(name)
        durable = self._setting.kind.path and random.random() < 0.25
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
        later = random.random() < self._setting.kind.later
        arrays, pending = oracle.arrays(table), None
        if self._setting.kind.graphs:
            options["graph"] = graph_of(table)

        def save() -> Any:
            nonlocal pending
            if not later:
                return self._repo().save(name, arrays, **options)
            pending = self._repo().save_async(name, arrays, **options)
            if self._setting.kind.graphs:
                pending.staged(TIMEOUT_S)
                oracle.scribble(attempt, arrays)
            return pending.committed(TIMEOUT_S + 10.0)

        saved = self._attempt(f"save {attempt.number} {name} {table} parent={parent} durable={durable}", save)
        if pending is None and isinstance(saved, KeyboardInterrupt):
            attempt.existing = self._setting.versions(name)
        while pending is not None and not pending.done():  # only a wait ended, and the arrays are still the save's
            if not isinstance(self._attempt(f"staged {attempt.number}", pending.staged), KeyboardInterrupt):
                break
        oracle.scribble(attempt, arrays)
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
        if gone and not self._setting.troubled and not attempt.retiring:
            self._oracle.fail("R3", f"{what}: {arrays!r}, and nothing has happened")
        self._loaded(what, ref, attempt.name, arrays, tensors is None)

    def _loaded(self, what: str, ref: ModelRef | None, name: str, arrays: Any, whole: bool) -> None:
        if isinstance(arrays, BaseException):
            return
        attempt = self._oracle.read(what, ref, name, arrays, whole)
        if attempt is not None and self._random.random() < self._setting.kind.holding:
            self.held.append(Held(what, arrays, attempt))

    # ---- queries ----------------------------------------------------------------------------------------

    def _query(self) -> None:
        """Ask which model shares the longest prefix with one that was saved, or is like it."""
        random, oracle = self._random, self._oracle
        if not oracle.attempts:
            return
        tables = [dict(random.choice(oracle.attempts).table) for _ in range(random.choice((1, 1, 1, 3)))]
        for table in tables:
            if random.random() < 0.4:
                table[f"t{len(table)}"] = (0, random.choice(self._setting.kind.sizes))
        began, what = self._world.now, f"query {[[n for _, n in table.values()] for table in tables]}"
        graphs = [graph_of(table) for table in tables]
        found = self._attempt(what, lambda: self._repo().longest_prefixes(graphs), CONTROL_S)
        if isinstance(found, BaseException):
            return
        for table, match in zip(tables, found, strict=True):
            self._matched(what, table, match, began)

    def _matched(self, what: str, table: Table, match: Any, began: float) -> None:
        layers = len(match.layers) if match is not None else 0
        attempt = self._oracle.by_ref.get(match.ref) if match is not None else None
        if attempt is not None and layers != layers_shared(table, attempt.table):
            expected = layers_shared(table, attempt.table)
            self._oracle.fail("R1", f"{what}: {match.ref}: {layers} layers match; expected {expected}")
        for other in self._oracle.alive():
            missed = other.committed < began and layers_shared(table, other.table) > layers
            if missed and not self._setting.troubled:
                self._oracle.fail(
                    "R3", f"{what}: {match}: {other.ref} shares {layers_shared(table, other.table)} layers"
                )
        if match is not None:
            self.matches.append(match)

    def _load_match(self) -> None:
        if not self.matches:
            return
        ref = self._random.choice(self.matches).ref
        what = f"load pinned {ref}"
        arrays = self._attempt(what, lambda: self._repo().load(ref, timeout=TIMEOUT_S))
        if isinstance(arrays, ModelLostError | ModelNotFoundError) and not self._setting.troubled:
            self._oracle.fail("R3", f"{what}: {arrays!r}, and nothing has happened")
        self._loaded(what, ref, ref.name, arrays, True)

    def _release(self) -> None:
        """Let a match go: and wait or not, or have it collected."""
        if not self.matches:
            return
        match, way = self.matches.pop(self._random.randrange(len(self.matches))), self._random.randrange(3)
        if way < 2:
            self._attempt(f"release {match.ref}", lambda: match.release(wait=way == 0), CONTROL_S)

    def _place(self) -> None:
        """Save what other threads bring in pieces, as tasks of a cluster do."""
        random, oracle, name = self._random, self._oracle, self._name()
        table, _ = self._table(name)
        attempt, arrays = oracle.begin(name, table, False), oracle.arrays(table)
        like = {tensor: np.broadcast_to(np.zeros((), array.dtype), array.shape) for tensor, array in arrays.items()}
        rows, repo = random.choice((3, 50, 1000)), self._repo()

        def bring(places: Any, deadline: Any) -> None:
            tasks = Executor(2, "task")
            brought = [
                tasks.submit(place.bring, repo._session, (row,), arrays[tensor][row : row + rows], deadline.left())
                for tensor, place in places.items()
                for row in range(0, arrays[tensor].size, rows)
            ]
            tasks.shutdown()
            wait(brought, deadline.left())
            for future in brought:
                future.result(deadline.left_for("place"))

        def save() -> Any:
            options: Any = {"inherit": None, "timeout": TIMEOUT_S, "bring": bring}
            return repo._submit(name, like, graph_of(table), until="committed", **options).committed()

        saved = self._attempt(f"place {attempt.number} {name} {table} in pieces of {rows}", save)
        if isinstance(saved, BaseException):
            attempt.failed = True
            attempt.existing = self._setting.versions(name) if isinstance(saved, KeyboardInterrupt) else None
        else:
            oracle.committed(attempt, saved.ref)

    # ---- the rest ---------------------------------------------------------------------------------------

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

    def check_held(self) -> None:
        """Check that all it holds is what it was."""
        for held in self.held:
            self._oracle.check_held(held)

    def _flush(self) -> None:
        if not self._setting.kind.path:
            return
        since = self._world.now
        result = self._attempt("flush", lambda: self._repo().flush(TIMEOUT_S))
        if not isinstance(result, BaseException):
            self._oracle.flushed(since)

    def _pause(self) -> None:
        self._world.sleep(self._random.choice((0.01, 0.3, 2.0)) * self._random.random())


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        return str({name: f"#{int(array.flat[0]) >> 32}" for name, array in value.items()})
    text = repr(value)
    return text if len(text) < 100 else text[:97] + "..."
