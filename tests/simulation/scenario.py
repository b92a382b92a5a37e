"""One world from one seed, from its start to its judgement.

Rules
- Everything is drawn from the seed: first the kind of world, then each step as it comes.
- After the last operation the world heals, settles, and is checked by a client that was not there before.
"""

from __future__ import annotations

import contextlib

from tensorvine.actors.client.repository import Repository
from tensorvine.store.errors import TensorVineError
from tensorvine.store.versions.retention import KeepLast

from . import disk as disks
from .client import Client
from .cluster import told
from .judge import Judge
from .scheduler import Process, StuckError
from .setting import NAME, Setting
from .troubles import Troubles

STEPS = (30, 300, 1500)
"""Steps at most until the next fault."""
SETTLE_S, CALM_S = 20.0, 2.0
"""How long a world settles after troubles, and without any."""


class Scenario(Setting):
    """A repository in a world, its clients and its troubles."""

    def __init__(self, seed: int, traced: bool = False, theme: str | None = None) -> None:
        super().__init__(seed, traced, theme)
        self.clients: list[Client] = []
        self._troubles = Troubles(self, self.clients)

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

    def _operate(self) -> None:
        w, kind = self.world, self.kind
        try:
            repo = self._start()
            w.note("STARTED")
            self.weather.lost_chance = kind.lost
            for number in range(kind.clients):
                self._client(number)
            for _ in range(kind.fault_count):
                if w.random.random() < 0.5:
                    w.sleep(w.random.random() * w.random.choice(kind.delays))
                else:  # in the middle of what takes no time
                    w.await_step(w.random.randrange(w.random.choice(STEPS)), max(kind.delays))
                if self.at_work:
                    self._troubles.befall(repo)
            if kind.ends:
                self._end_cluster(repo)
            while self.at_work:
                w.sleep(0.5)
            self._troubles.heal()
            if kind.follows:
                self._troubles.await_places()
            w.sleep(SETTLE_S if self.troubled else CALM_S)
            self._judge()
        except Exception as exc:  # noqa: BLE001
            self.oracle.fail("R8", f"the operator: {told(exc)}")
        finally:
            if not w.over:
                w.finish()

    def _start(self) -> Repository:
        kind = self.kind
        return Repository.start(
            NAME,
            shards=None if kind.follows else kind.shards,
            path=disks.URI if kind.path else None,
            replicas=kind.replicas,
            store_bytes=kind.capacity,
            preallocate_bytes=0,
            keep=KeepLast(kind.keep) if kind.keep is not None and kind.path else None,
        )

    def _end_cluster(self, repo: Repository) -> None:
        """Have all actors and clients die with what the engine keeps, and start a repository on the path anew."""
        self.world.await_step(self.world.random.randrange(self.world.random.choice(STEPS)), max(self.kind.delays))
        self.world.note("THE CLUSTER DIES")
        for client in self.clients:
            if not client.process.dead:
                self.world.kill(client.process)
            client.gone()
        for hosted in list(self.cluster.actors.values()):
            if not hosted.gone:
                self.cluster.end(hosted)
        self.cluster.facts.clear()
        self.oracle.crashed(covered=False)
        with contextlib.suppress(TensorVineError):
            repo.close()
        self.world.note("ANOTHER CLUSTER")
        self._start()

    def _client(self, number: int) -> None:
        process = Process(self.world, f"client-{number}", f"node-{number % self.kind.nodes}")
        client = Client(self, process, number)
        self.clients.append(client)
        self.at_work += 1
        self.world.spawn(process, "main", client.work)

    def _judge(self) -> None:
        """Check what is left, as a client that was not there before."""
        w = self.world
        process = Process(w, "judge", "node-0")
        done: list[bool] = []

        def judge() -> None:
            try:
                Judge(self, self.clients).judge()
            except Exception as exc:  # noqa: BLE001
                self.oracle.fail("R8", f"the judge: {told(exc)}")
            finally:
                done.append(True)

        w.spawn(process, "main", judge)
        while not done:
            w.sleep(0.5)
