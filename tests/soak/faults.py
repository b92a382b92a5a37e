"""The operator of a round: kills and stops processes, changes the number of shards, troubles the disk.

Rules
- It carries out the plan's faults one after another; each waits for the clients' progress, and then for the repository
  to be whole again, so that what may be lost follows from what died at one time.
- What it did stands in its journal: `died` names what was killed `at` the earliest and `until` the latest; `stopped`
  what is stopped. A kill that it did not come to tell of was followed by the end of the round itself.
- With replicas it waits until copies are complete before it kills, and says so where they were not (`safe`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

from tensorvine.actors import Repository
from tensorvine.store.errors import StoreFullError, TensorVineError

from tests.soak import ground
from tests.soak.disk import ERRORS, Disk
from tests.soak.journal import Journal
from tests.soak.modes import Fault, Mode

BUSY = 20
"""Busy processes per processor while the machine is too busy."""
BUSY_S = 5.0
"""How many times longer than other troubles that lasts."""
COPIES_S = 60.0
"""How long copies may take to be complete."""
MOST_SHARDS = 4
CHANGE_S = 4.0
"""About how long a change of the shards takes: somebody dies within this time."""


class Operator:
    """See the top.

    Args:
        repo: a client of the repository, for `scale` and questions.
        mode: the round's.
        ray: what the round stands on.
        disk: of the repository's path.
        journal: what was done.
        clients: gives the clients that are at work: number -> process.
    """

    def __init__(
        self,
        repo: Repository,
        mode: Mode,
        ray: ground.Ground,
        disk: Disk | None,
        journal: Journal,
        clients: Callable[[], dict[int, subprocess.Popen[bytes]]],
    ) -> None:
        self._repo = repo
        self._mode = mode
        self._ray = ray
        self._disk = disk
        self._journal = journal
        self._clients = clients
        self._stopped: set[int] = set()
        self._lives: dict[str, int] = {}
        self._killed: set[int] = set()

    def carry_out(self, fault: Fault) -> None:
        """Do one thing to the repository, and wait until it is whole again."""
        self._journal.say("fault", kind=fault.kind, seconds=fault.seconds)
        action, _, what = fault.kind.partition(" ")
        if action == "scale":
            self._scale(self._count(fault.draw))
        elif fault.kind.endswith(" in scale"):
            self._kill_in_scale(what.removesuffix(" in scale"), fault.draw)
        elif fault.kind == "kill node":
            safe = self._copies_complete()
            self._killed.update(self._lives.values())  # some of them
            began = time.monotonic()
            self._ray.replace_node(fault.draw)
            self._died(["node"], began, safe)
        elif fault.kind.endswith(" in trouble"):
            actor = what.removesuffix(" in trouble")
            self._trouble("failing disk", fault.seconds, lambda: self._kill(actor, fault.draw))
        elif fault.kind == "busy machine":
            self._crowd(fault.seconds)
        elif fault.kind == "kill shard when busy":
            self._crowd(fault.seconds, lambda: self._kill("shard", fault.draw))
        elif fault.kind in ERRORS:
            self._trouble(fault.kind, fault.seconds)
        elif action == "kill":
            self._kill(what, fault.draw)
        else:
            self._stop(what, fault)
        self.look()

    def heal(self) -> None:
        """End all trouble that lasts."""
        if self._disk is not None:
            self._disk.heal()
        for pid in self._stopped:
            ground.send(pid, signal.SIGCONT)
        self._stopped.clear()

    def look(self) -> dict[str, int]:
        """Return the processes of catalog, planner and shards; says in the journal what came to an end by itself.

        Raises:
            TimeoutError: one of them is not there again.
        """
        names = [f"{self._repo.name}/{actor}" for actor in ("catalog", "planner")]
        names += [f"{self._repo.name}/shard-{n}" for n in self._shards()]
        found = {name: ground.pid_of(name) for name in names}
        for name, pid in found.items():
            before = self._lives.get(name, pid)
            if pid != before and before not in self._killed:
                self._journal.say("crashed", what=name, pid=before)
        self._lives = found
        return found

    def _shards(self) -> tuple[int, ...]:
        self._repo._session.refresh()
        return self._repo.shards

    def _targets(self, what: str, draw: int) -> dict[str, int]:
        """Choose processes: name -> number of the process."""
        lives = self.look()
        shards = [name for name in lives if "/shard-" in name]
        clients = list(self._clients().items())
        chosen: dict[str, int] = {}
        for part in what.split("+"):
            if part in ("catalog", "planner"):
                name = f"{self._repo.name}/{part}"
                chosen[name] = lives[name]
            elif part.startswith("shard"):
                for i in range(min(2 if part == "shards" else 1, len(shards))):
                    name = shards[(draw + i) % len(shards)]
                    chosen[name] = lives[name]
            else:
                for i in range(min(2 if part == "clients" else 1, len(clients))):
                    number, process = clients[(draw + i) % len(clients)]
                    chosen[f"client {number}"] = process.pid
        return chosen

    def _kill(self, what: str, draw: int) -> None:
        safe = self._copies_complete() if "shard" in what else True
        self.kill(self._targets(what, draw), safe)

    def kill(self, targets: dict[str, int], safe: bool = False) -> None:
        """Kill processes at once: name -> number of the process."""
        began = time.monotonic()
        sent = [pid for pid in targets.values() if ground.send(pid, signal.SIGKILL)]
        self._killed.update(targets.values())
        for pid in sent:
            with contextlib.suppress(ChildProcessError):  # the repository's processes are Ray's children
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        self._died(list(targets), began, safe)

    def _died(self, what: list[str], began: float, safe: bool) -> None:
        self._journal.say("died", what=what, at=began, until=time.monotonic(), safe=safe)

    def _stop(self, what: str, fault: Fault) -> None:
        targets = self._targets(what, fault.draw)
        self._journal.say("stopped", what=list(targets), seconds=fault.seconds)
        for pid in targets.values():
            self._stopped.add(pid)
            ground.send(pid, signal.SIGSTOP)
        time.sleep(fault.seconds)  # the length of the trouble, and no wait for anything
        for pid in targets.values():
            ground.send(pid, signal.SIGCONT)
            self._stopped.discard(pid)

    def _trouble(self, kind: str, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        if self._disk is None:
            return
        self._disk.trouble(kind)
        try:
            meanwhile()
            time.sleep(seconds)
        finally:
            self._disk.heal()

    def _crowd(self, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Have other processes take nearly all of the machine; each in a session: the kernel shares among those."""
        spin = ["timeout", f"{BUSY_S * seconds}", "sh", "-c", "while :; do :; done"]
        crowd = [subprocess.Popen(spin, start_new_session=True) for _ in range(BUSY * (os.cpu_count() or 1))]
        try:
            meanwhile()
        finally:
            for process in crowd:
                process.wait(BUSY_S * seconds + ground.PATIENCE_S)

    def _count(self, draw: int) -> int:
        least = max(self._mode.replicas, 1)
        return least + draw % (MOST_SHARDS - least + 1)

    def _kill_in_scale(self, what: str, draw: int) -> None:
        """Kill in the middle of a change of the shards, which is asked for again until it is there."""
        safe = self._copies_complete() if "shard" in what else True
        targets, count = self._targets(what, draw), self._count(draw >> 4)
        if count == len(self._shards()):
            count += -1 if count == MOST_SHARDS else 1
        change = threading.Thread(target=self._scale, args=(count,))
        change.start()
        time.sleep((draw >> 8) % 1000 / 1000 * CHANGE_S)  # the moment of the death, and no wait for anything
        self.kill(targets, safe)
        change.join()
        deadline = time.monotonic() + ground.PATIENCE_S
        while (refused := self._scale(count)) is not None:
            if time.monotonic() > deadline:
                if not isinstance(refused, StoreFullError):  # fewer shards may be too small for what there is
                    text = f"no {count} shards within {ground.PATIENCE_S} s: {type(refused).__name__}: {refused}"
                    self._journal.say("foreign", kind="scale", text=text)
                return
            threading.Event().wait(0.5)

    def _scale(self, count: int) -> Exception | None:
        """Change the number of shards; returns why it is not as was asked for."""
        self._journal.say("scaling", shards=count)
        try:
            self._repo.scale(count, timeout=90.0)
        except TensorVineError as exc:
            self._journal.say("refused", kind="scale", error=type(exc).__name__, text=str(exc)[:400])
            return exc
        except Exception as exc:  # noqa: BLE001  told as a finding
            self._journal.say("foreign", kind="scale", text=f"{type(exc).__name__}: {exc}")
            return exc
        self._journal.say("done", kind="scale", seconds=0.0)
        return None

    def _copies_complete(self) -> bool:
        """Wait for the replicas; without replicas there is nothing to wait for."""
        if self._mode.replicas == 1:
            return True
        return _comes(lambda: not self._repo.stats().catalog.replicas_missing, COPIES_S)


def _comes(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for what the repository says; tells whether it came within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(TensorVineError):
            if condition():
                return True
        threading.Event().wait(0.1)
    return False


def counts(entries: list[dict[str, Any]]) -> dict[str, int]:
    """Count faults by kind."""
    found: dict[str, int] = {}
    for entry in entries:
        if entry["event"] == "fault":
            found[entry["kind"]] = found.get(entry["kind"], 0) + 1
    return found
