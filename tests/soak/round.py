"""One round of a soak, in a process of its own: four clients, an operator, and the questions at the end.

    python -m tests.soak.round FOLDER SECONDS [FAULTS]

Rules
- The plan lies in `FOLDER/round.pickle`; what came of it is in `FOLDER/outcome.json`.
- SECONDS are those of operations and faults; a count of FAULTS, where it is given, ends them sooner.
- The questions at the end come in this order: do the clients have more than at first, is every promise kept, does the
  repository become empty when all is retired, and, with a path, does it come back when all of it is killed at once,
  and when it is closed and started again.
- What a wait expected and did not get is a finding, never an error of the round. Where the repository itself does not
  come back, the round ends there: what journals say is judged all the same.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

from tensorvine.actors import Repository
from tensorvine.actors.client import launch
from tensorvine.actors.rpc.catalog_calls import CatalogCalls
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.store import ModelRef
from tensorvine.store.errors import StorageError, TensorVineError

from tests.soak import ground, traces
from tests.soak.content import WHO, Card
from tests.soak.disk import Disk
from tests.soak.faults import Operator, counts
from tests.soak.ground import Ground, send
from tests.soak.journal import Entry, Journal, read
from tests.soak.modes import CLIENTS, Round
from tests.soak.promises import Finding, Ledger, Seen
from tests.support.warm import warm_workers

ROOT = Path(__file__).resolve().parents[2]
NAME = "soak"
WARM_S = 300.0
REST_S = 300.0
CLOSE_S = 120.0
EMPTY_S = 120.0
"""How long it may take until nothing is left: longer than a session lasts."""
FILES_S = 120.0
"""How long files that nobody needs may lie about while the catalog looks again and again."""
FLUSH_S = 120.0
LEAST_S = 15.0
"""Without progress, the next fault comes after so many seconds."""
Processes = dict[int, subprocess.Popen[bytes]]


class StandstillError(Exception):
    """The repository does not come back, or a client does not come to an end: nothing more can be asked."""


class Clients:
    """The processes of clients: four, each with another life when it was killed.

    Args:
        folder: the round's.
        environment: of the clients.
        nodes: ids of those that they join by turns.
    """

    def __init__(self, folder: Path, environment: dict[str, str], nodes: list[str]) -> None:
        self._folder = folder
        self._environment = environment
        self._nodes = nodes
        self._lives: Counter[int] = Counter()
        self._errors = open(folder / "clients.err", "ab")  # noqa: SIM115  closed by `close`
        self.running: Processes = {}

    def start(self, client: int) -> None:
        """Start a client's next life."""
        arguments = [sys.executable, "-m", "tests.soak.client", str(self._folder), NAME, str(client)]
        self.running[client] = subprocess.Popen(
            [*arguments, str(self._lives[client])],
            cwd=ROOT,
            env={**self._environment, "TENSORVINE_SOAK_NODE": self._nodes[client % len(self._nodes)]},
            stdout=self._errors,
            stderr=self._errors,
            start_new_session=True,
        )
        self._lives[client] += 1

    def living(self) -> Processes:
        """Return those that run."""
        return {client: process for client, process in self.running.items() if process.poll() is None}

    def replace(self) -> None:
        """Start another life of each that was killed."""
        for client, process in list(self.running.items()):
            if process.poll() == -signal.SIGKILL:
                self.start(client)

    def who(self, client: int) -> str:
        """Name a client's present life, as its journal does."""
        return f"client {client}.{self._lives[client] - 1}"

    def close(self) -> None:
        """Kill what still runs, forked children included."""
        for process in self.running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGCONT)
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._errors.close()


class Play:
    """Plays one round.

    Args:
        plan: the round.
        folder: for everything that it makes.
        seconds: of operations and faults.
        faults: after so many it ends; None: as many as there is time for.
    """

    def __init__(self, plan: Round, folder: Path, seconds: float, faults: int | None) -> None:
        self._plan = plan
        self._folder = folder
        self._path = folder / "path"
        self._seconds = seconds
        self._faults = faults
        self._journal = Journal(folder / "operator.jsonl", "operator")
        self.findings: list[Finding] = []
        self._stack = ExitStack()

    def run(self) -> None:
        """Play it."""
        mode = self._plan.mode
        with self._stack:
            disk = Disk(self._path, self._folder) if mode.path else None
            os.environ.update(disk.environment if disk is not None else {})
            if mode.session_s is not None:
                launch.SESSION_S = mode.session_s
            ray = Ground(mode.raylets)
            self._stack.callback(ray.close)
            repo = self._start()
            nodes = ray.nodes()[: 1 if "kill node" in mode.faults else None]  # a client goes with its node
            clients = Clients(self._folder, {**os.environ, "RAY_ADDRESS": ray.address}, nodes)
            self._stack.callback(clients.close)
            operator = Operator(repo, mode, ray, disk, self._journal, lambda: self._warm(clients))
            self._stack.callback(operator.heal)
            before = {name: self._of_shard(pid) for name, pid in operator.look().items()}
            for client in range(CLIENTS):
                clients.start(client)
            try:
                self._await("all clients are warm", WARM_S, lambda: len(self._who("warm")) >= CLIENTS, clients)
                self._trouble(operator, clients)
                self._end_work(operator, clients)
                self._check_promises(repo)
                self._check_clients(clients)
                self._empty(repo, operator, before)
                if mode.path:
                    repo = self._bring_back(repo, operator)
                repo.close()
            except StandstillError:
                self.findings += self._ledger().judge({})  # `close` would wait for the disk for minutes

    def _start(self) -> Repository:
        mode = self._plan.mode
        path = self._path if mode.path else None
        return Repository.start(
            NAME,
            shards=mode.shards,
            path=path,
            replicas=mode.replicas,
            store_bytes=mode.store_bytes,
            preallocate_bytes=0,
        )

    # ---- the clients' work ------------------------------------------------------------------------------

    def _trouble(self, operator: Operator, clients: Clients) -> None:
        """Carry out faults while clients work."""
        deadline, done = time.monotonic() + self._seconds, self._progress()
        for fault in islice(self._plan.faults(), self._faults):
            latest = time.monotonic() + LEAST_S
            while self._progress() < done + fault.after and time.monotonic() < min(latest, deadline):
                time.sleep(0.05)
            if time.monotonic() >= deadline:
                return
            self._whole(f"after {fault.kind}", lambda fault=fault: operator.carry_out(fault))
            clients.replace()
            done = self._progress()

    def _end_work(self, operator: Operator, clients: Clients) -> None:
        operator.heal()
        clients.replace()
        (self._folder / "stop").touch()
        wanted = {clients.who(client) for client in clients.running}
        self._await("all clients rest", REST_S, lambda: wanted <= self._who("rested"), clients)
        self._whole("after the last fault", operator.look)

    def _whole(self, when: str, action: Callable[[], object]) -> None:
        """Do what ends when all of the repository's processes are there.

        Raises:
            StandstillError: they are not.
        """
        try:
            action()
        except TimeoutError as exc:
            self._find("what dies starts again", f"{when}: all processes are there", str(exc))
            raise StandstillError from exc

    def _check_clients(self, clients: Clients) -> None:
        """Compare what clients that lived through the round have with what they had at first; let them leave."""
        entries = read(self._journals())
        warm = {entry["who"]: entry for entry in entries if entry["event"] == "warm"}
        for entry in entries:
            if entry["event"] == "rested" and entry["who"].endswith(".0"):
                first = warm[entry["who"]]
                mapped = first["descriptors"]["memory"] // 4  # shards of its node; others may have come there since
                extra = max(entry["shards"] - mapped, 0)
                self._compare(entry["who"], "descriptors", entry["descriptors"], first["descriptors"], 1 + 4 * extra)
                self._compare(entry["who"], "threads", entry["threads"], first["threads"], 2)
        files = {file for pid in self._pids() for file in traces.memory_of(pid)}
        self._await(
            "no lock on the shards' memory",
            CLOSE_S,
            lambda: not traces.locks_on(files),
            found=lambda: traces.lockers(files),
        )
        (self._folder / "leave").touch()
        for client, process in clients.living().items():
            try:
                code = process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                expected = f"{clients.who(client)} ends within {CLOSE_S} s"
                self._find("a client closes", expected, self._stacks(clients, client))
                continue
            if code:
                self._find("a client closes", f"{clients.who(client)} ends with 0", f"{code}; {self._errors()}")

    def _compare(self, who: str, what: str, now: dict[str, int], before: dict[str, int], slack: int) -> None:
        for kind, (was, there) in traces.more(now, before, slack).items():
            self._find("all is given back", f"{who}: {was} {what} of kind {kind!r}", f"{there}")

    # ---- promises ---------------------------------------------------------------------------------------

    def _check_promises(self, repo: Repository) -> None:
        """Load what was promised, and judge the journals."""
        mode = self._plan.mode
        if mode.path:
            try:
                try:
                    repo.flush(FLUSH_S)
                except StorageError as exc:  # once it names versions a part of which died before it was written
                    if not any(fault.startswith(("kill shard", "kill node")) for fault in mode.faults):
                        raise
                    self._journal.say("given up", text=str(exc))
                    repo.flush(FLUSH_S)
            except TensorVineError as exc:
                self._find("a disk that is well takes what waits", f"flush within {FLUSH_S} s", repr(exc))
            else:
                self._journal.say("flushed", began=time.monotonic())
        ledger = self._ledger()
        with Repository.connect(NAME) as fresh:
            seen = {ref: _seen(fresh, ref) for ref in ledger.promises}
            for ref in fresh.models():
                found = _seen(fresh, ref) if ref not in seen else None
                if found is not None and found.outcome not in ("read", "ModelLostError"):
                    self._find("what is listed can be read", f"{ref}", f"{found.outcome}: {found.text}")
        self.findings += ledger.judge(seen)
        self._journal.say("judged")

    def _ledger(self) -> Ledger:
        mode = self._plan.mode
        return Ledger(read(self._journals()), mode.path, mode.replicas)

    # ---- what is left -----------------------------------------------------------------------------------

    def _empty(self, repo: Repository, operator: Operator, before: dict[str, dict[str, int]]) -> None:
        """Retire everything, and look at what is left."""
        for ref in repo.models():
            self._journal.say("retiring", ref=str(ref))
            try:
                repo.retire(ref)
            except TensorVineError as exc:
                self._find("what lives can be retired", f"{ref}", repr(exc))
            else:
                self._journal.say("retired", ref=str(ref))
        self._await("nothing is left in the repository", EMPTY_S, lambda: not _left(repo), found=lambda: _left(repo))
        session = repo._session
        checks: dict[str, Callable[[], object]] = {"catalog": lambda: session.ask(CatalogCalls.check())}
        checks |= {
            f"shard {shard}": lambda shard=shard: session.call(shard, ShardCalls.check()) for shard in repo.shards
        }
        for who, check in checks.items():
            try:
                check()
            except Exception as exc:  # noqa: BLE001  told as a finding
                self._find("counts are right", f"{who}: derived anew, they are the same", repr(exc))
        if self._plan.mode.path:
            self._await("no file of a segment is left", FILES_S, self._no_files, found=self._files)
        usual = max(before.values(), key=lambda found: sum(found.values()))
        for name, pid in operator.look().items():
            self._compare(name, "descriptors", self._of_shard(pid), usual, 2)

    def _no_files(self) -> bool:
        """Have the catalog look for files that nobody needs; tell whether none is left."""
        if self._files():
            ground.look_for_orphans(f"{NAME}/catalog")
        return not self._files()

    def _files(self) -> list[str]:
        found = {*(self._path / "segments").rglob("*"), *self._path.rglob("*.tmp")}
        return sorted(str(file.relative_to(self._path)) for file in found if file.is_file())

    def _of_shard(self, pid: int) -> dict[str, int]:
        return traces.descriptors(pid, self._path) | {
            "socket": 0
        }  # those are their callers', other shards and Ray's processes included

    # ---- coming back ------------------------------------------------------------------------------------

    def _bring_back(self, repo: Repository, operator: Operator) -> Repository:
        """Kill all processes of the repository at once; later start the repository again, and give its new client."""
        ledger = self._ledger()
        highest: Counter[str] = Counter()
        for ref in ledger.promises:
            highest[ref.name] = max(highest[ref.name], ref.version)
        kept = {ref: card for n in range(6) for ref, card in [self._keep(repo, n, f"m/{n % 4}")]}
        gone = next(iter(kept))
        del kept[gone]
        repo.retire(gone)
        repo.flush(FLUSH_S)
        operator.kill(operator.look())
        self._whole("all its processes were killed at once", operator.look)
        self._check_back("all its processes were killed at once", repo, kept, gone, highest)
        repo.close()
        repo = self._start()
        self._check_back("the repository was started again", repo, kept, gone, highest)
        return repo

    def _keep(self, repo: Repository, n: int, name: str) -> tuple[ModelRef, Card]:
        card = Card(f"{self._plan.number}.operator.{n}", name, {"a": 8 * n + 2, "b": 8 * n + 3})
        durable = "disk" if n % 2 else "memory"
        return repo.save(name, card.arrays(card.numbers), durability=durable).ref, card

    def _check_back(
        self, when: str, repo: Repository, kept: dict[ModelRef, Card], gone: ModelRef, highest: Counter[str]
    ) -> None:
        for ref, card in kept.items():
            found = _seen(repo, ref)
            if found.outcome != "read" or found.save != card.save:
                self._find("what is on disk comes back", f"{when}: {ref} of save {card.save}", str(found))
        found = _seen(repo, gone)
        if found.outcome != "ModelNotFoundError":
            self._find("what was retired is gone", f"{when}: {gone}", str(found))
        for ref in kept:
            highest[ref.name] = max(highest[ref.name], ref.version)
        for name in sorted(highest):
            try:
                ref = repo.save(name, {"x": Card("again", name, {}).tensor()}).ref
            except TensorVineError as exc:
                self._find("saves go on", f"{when}: save of {name!r}", repr(exc))
                continue
            if ref.version <= highest[name]:
                self._find("a version is never used twice", f"{when}: {name} above {highest[name]}", str(ref))
            highest[name] = ref.version

    # ---- within -----------------------------------------------------------------------------------------

    def _journals(self) -> list[Path]:
        return sorted(self._folder.glob("*.jsonl"))

    def _who(self, event: str) -> set[str]:
        """Name those who told of an event."""
        return {entry["who"] for entry in read(self._journals()) if entry["event"] == event}

    def _pids(self) -> list[int]:
        return [
            int(entry)
            for entry in os.listdir("/proc")
            if entry.isdecimal() and traces.memory_of(int(entry)) and send(int(entry), 0)
        ]

    def _progress(self) -> int:
        """Count the operations that clients ended so far, well or not."""
        journals = [path.read_bytes() for path in self._journals()]
        return sum(text.count(b'{"event": "%s"' % event) for text in journals for event in (b"done", b"refused"))

    def _warm(self, clients: Clients) -> Processes:
        """Return the clients that are at work: others are not worth a fault."""
        warm = self._who("warm")
        return {client: process for client, process in clients.living().items() if clients.who(client) in warm}

    def _await(
        self,
        what: str,
        patience: float,
        condition: Callable[[], bool],
        clients: Clients | None = None,
        found: Callable[[], object] = lambda: "it is not so",
    ) -> None:
        """Wait; what does not come is a finding.

        Raises:
            StandstillError: it is clients that do not come to where they should.
        """
        deadline = time.monotonic() + patience
        while not condition():
            if time.monotonic() > deadline:
                told = "" if clients is None else "; ".join(self._stacks(clients, client) for client in clients.running)
                self._find("what is waited for comes", f"within {patience} s: {what}", f"{found()} {told}")
                if clients is not None:
                    raise StandstillError
                return
            if clients is not None and (dead := self._dead(clients)):
                self._find("what is waited for comes", what, f"{dead}; {self._errors()}")
                raise StandstillError
            time.sleep(0.05)

    def _dead(self, clients: Clients) -> str:
        """Name clients that ended and were not killed by the operator."""
        codes = {client: process.poll() for client, process in clients.running.items()}
        return ", ".join(
            f"{clients.who(client)} ended with {code}"
            for client, code in codes.items()
            if code not in (None, 0, -signal.SIGKILL)
        )

    def _stacks(self, clients: Clients, client: int) -> str:
        """Say where a client stands that does not come to an end."""
        process = clients.running[client]
        if process.poll() is not None:
            return f"{clients.who(client)} ended with {process.returncode}"
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)  # it writes its stacks meanwhile
        stacks = self._folder / f"{clients.who(client).replace(' ', '-')}.stacks"
        return f"{clients.who(client)}: {stacks.read_text()[-1500:]}"

    def _errors(self) -> str:
        return (self._folder / "clients.err").read_text(errors="replace")[-1500:]

    def _find(self, rule: str, expected: str, found: str) -> None:
        self.findings.append(Finding(rule, expected, found))


def _seen(repo: Repository, ref: ModelRef) -> Seen:
    """Load a version, and check it."""
    try:
        found = repo.load(ref)
        card = Card.of(found[WHO])
    except TensorVineError as exc:
        return Seen(type(exc).__name__, text=str(exc)[:400])
    except Exception as exc:  # noqa: BLE001  told as a finding
        return Seen("foreign", text=f"{type(exc).__name__}: {exc}"[:400])
    problems = card.wrong(found)
    return Seen("wrong", text="; ".join(problems)[:400]) if problems else Seen("read", card.save)


def _left(repo: Repository) -> str:
    """Say what shards and the catalog still have; empty when that is nothing."""
    try:
        stats = repo.stats()
    except TensorVineError as exc:
        return repr(exc)
    kinds = ("tensors", "bytes_allocated", "bytes_staged", "bytes_replicated")
    left = {
        f"shard {shard.shard}: {kind}": n for shard in stats.shards for kind in kinds if (n := getattr(shard, kind))
    }
    left |= {f"catalog: {kind}": n for kind in ("models", "pins") if (n := getattr(stats.catalog, kind))}
    return str(left) if left else ""


def tally(entries: Iterable[Entry]) -> dict[str, dict[str, int]]:
    """Count operations done, refusals by error, and faults."""
    entries = list(entries)
    done = Counter(entry["kind"] for entry in entries if entry["event"] == "done")
    refused = Counter(entry["error"] for entry in entries if entry["event"] == "refused")
    return {"operations": dict(done), "refused": dict(refused), "faults": counts(entries)}


def main() -> None:
    """See the top."""

    def interrupted(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupted)
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    faults = int(sys.argv[3]) if len(sys.argv) > 3 else None
    plan: Round = pickle.loads((folder / "round.pickle").read_bytes())  # noqa: S301  our own
    play, began = Play(plan, folder, seconds, faults), time.monotonic()
    outcome: dict[str, Any] = {"error": ""}
    try:
        with warm_workers():
            play.run()
    except Exception:  # noqa: BLE001  it goes to the report
        outcome["error"] = traceback.format_exc()[-4000:]
    outcome |= tally(read(sorted(folder.glob("*.jsonl"))))
    outcome |= {"findings": [asdict(finding) for finding in play.findings], "seconds": time.monotonic() - began}
    (folder / "outcome.part").write_text(json.dumps(outcome))
    shutil.move(folder / "outcome.part", folder / "outcome.json")


if __name__ == "__main__":
    main()
