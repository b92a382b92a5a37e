"""What befalls a world: crashes, stops, a failing disk, changes of the number of shards; and how it heals.

Rules
- Faults keep within what is promised. The journal has what the catalog decided, so its node is not lost.
"""

from __future__ import annotations

import greenlet
from tensorvine.actors.client.repository import Repository
from tensorvine.store.errors import TensorVineError

from . import disk as disks
from .client import Client
from .cluster import Hosted, told
from .scheduler import START_S
from .setting import Setting

PLACED_S = 120.0
"""By when each node has one shard, after the last trouble."""
SILENT_S = 40.0
"""How long a shard is stopped so that calls of it end by their timeout."""


class Troubles:
    """Does harm to one world."""

    def __init__(self, setting: Setting, clients: list[Client]) -> None:
        self._setting = setting
        self._clients = clients
        self._world = setting.world
        self._kind = setting.kind
        self._oracle = setting.oracle
        self._cluster = setting.cluster

    def _crash(self, hosted: Hosted) -> None:
        self._setting.troubled = True
        if "/shard-" in hosted.ref.name:
            covered = self._kind.replicas > 1 and self._oracle.crashes == 0
            self._oracle.crashed(covered)
        self._cluster.crash(hosted)

    def befall(self, repo: Repository) -> None:
        """Let something happen that the kind of world has."""
        w = self._world
        fault = w.random.choice(self._kind.faults)
        shards = self._setting.shards()
        w.note(f"FAULT {fault}")
        if fault == "crash shard":
            self._crash(w.random.choice(shards))
        elif fault == "crash catalog":
            self._crash(self._setting.catalog())
        elif fault == "catalog and shard":
            pair = [self._setting.catalog(), w.random.choice(shards)]
            w.random.shuffle(pair)
            for hosted in pair:
                self._crash(hosted)
                w.sleep(w.random.choice((0.0, 0.1, 1.0)) * w.random.random())
        elif fault == "crash planner":
            self._crash(self._setting.planner())
        elif fault == "crash both":
            pair = [self._setting.planner(), w.random.choice((shards[0], shards[0], shards[-1]))]
            w.random.shuffle(pair)
            for hosted in pair:
                self._crash(hosted)
                w.sleep(w.random.choice((0.0, 0.0, 0.1)) * w.random.random())
        elif fault == "restart" and self._kind.path:
            for hosted in [*shards, self._setting.planner(), self._setting.catalog()]:
                self._crash(hosted)
        elif fault in ("scale", "scale and crash"):
            self._setting.troubled = True
            if fault == "scale and crash":
                w.at(w.now + w.random.random() * w.random.choice((0.1, 0.5, 2.0, 5.0)), self._crash_one)
            for _ in range(w.random.choice((0, 1, 2))):  # whoever changes the shards is slow
                moment, seconds = w.random.random() * w.random.choice((0.03, 0.2)), w.random.choice((0.1, 0.6))
                w.at(w.now + moment, lambda seconds=seconds: self._stop_planner(seconds))
            self._attempt_scale(repo, w.random.choice((1, 2, 3, 4)))
        elif fault == "stop":
            self._setting.troubled = True
            living = [p for p in w.processes.values() if not p.dead and p is not self._setting.operator]
            w.stop(w.random.choice(living), w.random.choice((0.05, 1.0, 8.0)))
        elif fault == "silent shard":  # for longer than a call waits
            self._setting.troubled = True
            running = [h.process for h in shards if h.process is not None and not h.process.dead]
            if running:
                w.stop(w.random.choice(running), SILENT_S)
        elif fault == "kill client":
            client = w.random.choice(self._clients)
            if not client.process.dead and client.working:
                w.kill(client.process)
                client.gone()
        elif fault == "disk":
            self._setting.troubled = True
            self._disk_trouble(shards)
        else:
            self._setting.troubled = True
            self._befall_nodes(fault)

    def _crash_one(self) -> None:
        """Have a shard die, or the planner, whatever the others do just then."""
        actors = [*self._setting.shards(), self._setting.planner(), self._setting.catalog()]
        living = [hosted for hosted in actors if hosted.process is not None and not hosted.process.dead]
        if living and not self._world.over:
            self._crash(self._world.random.choice(living))

    def _stop_planner(self, seconds: float) -> None:
        process = self._setting.planner().process
        if process is not None and not process.dead and not self._world.over:
            self._world.stop(process, seconds)

    def _attempt_scale(self, repo: Repository, shards: int) -> None:
        try:
            repo.scale(max(shards, self._kind.replicas), timeout=30.0)
        except TensorVineError as exc:
            self._world.note(f"scale: {exc!r}")
        except greenlet.GreenletExit:
            raise
        except Exception as exc:  # noqa: BLE001
            self._oracle.fail("R6", f"scale: {told(exc)}")

    def _befall_nodes(self, fault: str) -> None:
        """Have a node join, be told to leave, or be lost with what runs there; one that has drained goes."""
        cluster, w = self._cluster, self._world
        occupied = {h.node for h in cluster.actors.values() if not h.gone}
        cluster.node_names = [n for n in cluster.node_names if n not in cluster.leaving or n in occupied]
        staying = [name for name in cluster.node_names if name not in cluster.leaving]
        if fault == "node joins":
            cluster.node_names.append(f"late-{w.number()}")
        elif fault == "node leaves" and len(staying) > 1:
            cluster.leaving.add(w.random.choice(staying))
        elif fault == "node lost":
            empty = [name for name in cluster.node_names if name.startswith("late-")]
            if empty and len(staying) > 1:
                self._lose(w.random.choice(empty))
        w.note(f"nodes {cluster.node_names}, leaving {sorted(cluster.leaving)}")

    def _lose(self, node: str) -> None:
        """End a node that no client is on; what ran there starts again elsewhere."""
        cluster = self._cluster
        there = [h for h in cluster.actors.values() if h.node == node and not h.gone]
        left = [name for name in cluster.node_names if name != node and name not in cluster.leaving]
        if not left:
            return
        cluster.node_names.remove(node)
        for hosted in there:
            hosted.node = self._world.random.choice(left)
            self._crash(hosted)

    def await_places(self) -> None:
        """Wait until each node that stays has one shard, and no other has any."""
        cluster, w = self._cluster, self._world
        end = w.now + PLACED_S
        staying = sorted(name for name in cluster.node_names if name not in cluster.leaving)
        while sorted(h.node for h in self._setting.shards()) != staying:
            if w.now > end:
                found = {h.ref.name: h.node for h in self._setting.shards()}
                self._oracle.fail("R8", f"expected one shard on each of {staying}; found {found}")
                return
            w.sleep(0.5)

    def _disk_trouble(self, shards: list[Hosted]) -> None:
        w = self._world
        reads, writes = w.random.choice(((True, False), (False, True), (True, True)))
        until, chance = w.now + w.random.choice((0.5, 3.0, 8.0)), w.random.choice((0.2, 0.5, 0.8))
        only = w.random.choice(("", "manifests/", "manifests/"))
        trouble = self._cluster.trouble = disks.Trouble(until, chance, reads, writes, only)
        w.note(f"disk trouble until {until - START_S:.2f}: {trouble}")
        for hosted in shards:
            if hosted.process is not None:
                hosted.process.facts["trouble"] = trouble
        if reads and w.random.random() < 0.7:
            self._crash(w.random.choice(shards))

    def heal(self) -> None:
        """End all troubles, and wait until all that died has started again."""
        w = self._world
        w.note("HEALED")
        self._cluster.trouble = None
        for process in w.processes.values():
            process.facts.pop("trouble", None)
            w.resume(process)
        self._setting.weather.lost_chance = 0.0
        w.stall_chance = w.copy_chance = 0.0
        w.disk.slowness_s = min(w.disk.slowness_s, 0.1)  # type: ignore[attr-defined]
        end = w.now + 120.0
        while any(h.instance is None for h in self._cluster.actors.values() if not h.gone):
            if w.now > end:
                waiting = [h.ref.name for h in self._cluster.actors.values() if not h.gone and h.instance is None]
                self._oracle.fail("R8", f"{waiting} did not start within 120 s")
                return
            w.sleep(0.5)
