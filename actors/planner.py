"""The planner actor: which shards there are, by name only what each ever held, and the plans of all trainings.

Rules
- The census outlives a shard: it is how a shard that starts again can name what it lost, and never uses a version
  number twice. A commit counts only after it was noted here.
- A planner that starts again asks the shards for their census; trainings tell it of themselves again.
- When to update and by which way is `streams`' part.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ..planner.scaling import ScalePolicy
from ..planner.topology import Topology
from ..store.archive import LOCK_NAME, Archive
from ..store.errors import StorageError, TensorVineError
from ..store.refs import ModelRef
from .autoscale import AutoScale
from .engine import Engine, group
from .line import LineAddress
from .line_server import LineDoor
from .messages import Census, ShardPlan, Standing, actor_name
from .resizing import STRAYS, Resizing, ScaleReport
from .streams import Advice, Delivered, Observed, Streams

log = logging.getLogger(__name__)

CHANGES = 8
"""Changes of the number of shards that may wait for one another."""
RECOVER_S = 10.0
"""How long a planner that starts again waits for all shards: one that starts again as well waits for the planner, and
tells what it found later."""
CLAIM_S = 3.0
"""How long a repository that starts waits for another one to leave its path."""


class Planner:
    """The planner of one repository, as an actor."""

    def __init__(
        self, engine: Engine, topology: Topology, plan: ShardPlan | None = None, scaling: ScalePolicy | None = None
    ) -> None:
        self._engine = engine
        self._topology = topology
        self._lock = threading.Lock()
        self._door = LineDoor(self, "planner")
        self._census: dict[int, Census] = {shard: {} for shard in topology.shards}
        self._streams = Streams()
        self._planning = ThreadPoolExecutor(1, thread_name_prefix="tensorvine-plan")
        self._planning.submit(importlib.import_module, "scipy.optimize")  # half a second that no training waits for
        self._changing = ThreadPoolExecutor(CHANGES, thread_name_prefix="tensorvine-scale")
        self._finished: set[int] = set()
        """Shards that have handed over all that they had to in the change that is under way."""
        self._resizing = Resizing(engine, plan, lambda: self._topology, self._decide, self._note_finished)
        self._claim: int | None = None
        """Keeps other repositories off the path for as long as this process lives."""
        if engine.restarted():
            self._recover()
        if scaling is not None:
            AutoScale(engine, scaling, lambda: self._topology, self._resizing.scale)

    @group("ctl", line=False)
    async def line(self, node: str) -> LineAddress | None:
        """Give where shards of this machine may call by line."""
        return self._door.address() if node == self._engine.this_node() else None

    @group("ctl")
    async def topology(self) -> Topology:
        """Give the shape of the repository."""
        return self._topology

    @group("ctl")
    async def claim(self) -> None:
        """Take the path for this repository, and sweep what a crash left half-written there.

        Raises:
            StorageError: another repository runs on it.
        """
        deadline = time.monotonic() + CLAIM_S
        while True:
            try:
                return self._take_path(sweep=True)
            except StorageError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.1)  # the one that was stopped just now may not have ended yet

    @group("ctl")
    async def note(self, shard: int, news: Mapping[ModelRef, tuple[ModelRef | None, bool]]) -> None:
        """Take what a shard committed or retired."""
        with self._lock:
            census = self._census.setdefault(shard, {})
            for ref, (parent, live) in news.items():
                known = census.get(ref)
                census[ref] = (known[0] if known else parent, live)
            if self._topology.former:  # what one shard has taken, the others have no more
                for other in self._census.keys() - {shard}:
                    for ref in news:
                        self._census[other].pop(ref, None)

    @group("ctl")
    async def standing(self, shard: int) -> Standing:
        """Tell a shard that starts again how things stand; what lived there counts as lost from now on."""
        with self._lock:
            return Standing(self._topology, tuple(self._finished), dict(self._census.get(shard, {})))

    @group("watch")
    async def scale(self, shards: int, timeout: float) -> ScaleReport:
        """Change the number of shards; see `resizing`."""
        return await asyncio.get_running_loop().run_in_executor(self._changing, self._resizing.scale, shards, timeout)

    @group("ctl")
    async def observed(self, name: str, told: Observed) -> Advice:
        """Take what a training observed; give the newest plan for it."""
        return await self._aside(self._streams.observed, name, told)

    @group("ctl")
    async def delivered(self, name: str, told: Delivered) -> str:
        """Take what a consumer measured; give the way that its node should use next."""
        return await self._aside(self._streams.delivered, name, told)

    @group("ctl")
    async def streams(self) -> dict[str, Advice]:
        """Give what is known of each model that is published: its curve, costs and schedule."""
        return await self._aside(self._streams.advice)

    async def _aside(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Plan in a thread of its own, one thing at a time, so that no commit waits for it."""
        return await asyncio.get_running_loop().run_in_executor(self._planning, work, *arguments)

    def _decide(self, topology: Topology) -> None:
        with self._lock:
            self._topology = topology

    def _note_finished(self, shard: int | None) -> None:
        with self._lock:
            if shard is None:
                self._finished.clear()
            else:
                self._finished.add(shard)

    def _take_path(self, sweep: bool) -> None:
        if self._topology.path is not None and self._claim is None:
            archive = Archive(self._topology.path, len(self._topology.shards))
            self._claim = archive.directory.claim(LOCK_NAME)
            if sweep:
                archive.sweep()

    def _recover(self) -> None:
        try:
            self._take_path(sweep=False)  # shards may be writing
        except TensorVineError as exc:
            log.error("planner started again: %s", exc)
        deadline = time.monotonic() + RECOVER_S
        self._topology = self._newest(deadline)
        for shard in self._topology.alive:
            try:
                actor = self._engine.find(actor_name(self._topology.repository, shard))
                future = self._engine.call(actor, "census")
                self._census[shard] = self._engine.result(future, deadline - time.monotonic(), f"shard {shard}")
            except (LookupError, TensorVineError) as exc:
                log.warning("planner started again: shard %d told no census: %s", shard, exc)
        if self._topology.version:
            self._changing.submit(self._resume)

    def _newest(self, deadline: float) -> Topology:
        """Ask all shards that there may be for their topology, and give the newest."""
        newest, shard, missing = self._topology, 0, 0
        while shard <= max(newest.alive) or missing < STRAYS:
            try:
                actor = self._engine.find(actor_name(newest.repository, shard))
                future = self._engine.call(actor, "topology")
                told: Topology = self._engine.result(future, deadline - time.monotonic(), f"shard {shard}")
                missing = 0
                if shard in told.former or not told.former:  # else it was about to join, and nobody else may know
                    newest = max(newest, told, key=lambda known: known.version)
            except LookupError:
                missing += 1
            except TensorVineError as exc:
                log.warning("planner started again: shard %d told no topology: %s", shard, exc)
            shard += 1
        return replace(newest, path=self._topology.path)

    def _resume(self) -> None:
        try:
            self._resizing.resume()
        except Exception:
            log.exception("planner started again: a change of the shards is not brought to its end")
