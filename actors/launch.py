"""Starting and stopping a repository's actors."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from dataclasses import dataclass, field

from ..store.archive import Archive
from ..store.directory import without_credentials
from ..store.errors import OperationTimeoutError
from ..store.retention import Retention
from . import embedded
from .engine import Engine, Node
from .engine_ray import RayEngine
from .messages import Disk, ShardConfig, actor_name, planner_name
from .planner import Planner, Topology
from .shard import Shard

log = logging.getLogger(__name__)

PREALLOCATE_MOST = 256 << 20
START_TIMEOUT_S = 120.0
SESSION_S = 60.0
"""How long a client's session lasts without a sign of life."""


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """How a repository is to keep its history."""

    uri: str
    codec: str | None
    keep: Retention | None
    lag_bytes: int | None
    """Bytes that may wait in each shard to be written; None: half of its memory."""


@dataclass(slots=True)
class Launched:
    """What `launch` started, and how to stop it."""

    engine: Engine
    names: list[str] = field(default_factory=list[str])
    """Actors that were started here, in the order in which to stop them."""
    owns_cluster: bool = False
    """The embedded Ray was started here."""

    def stop(self) -> None:
        """Stop what was started; a second call does nothing."""
        names, self.names = self.names, []
        for name in names:
            self.engine.kill(name)
        if self.owns_cluster:
            self.owns_cluster = False
            embedded.stop()


def default_engine() -> Engine:
    """Give the engine of the running Ray.

    Raises:
        RepositoryNotFoundError: no Ray runs.
    """
    embedded.attach()
    return RayEngine()


def launch(
    repository: str,
    shards: int | None,
    store_bytes: int | None,
    preallocate_bytes: int | None,
    disk: DiskOptions | None = None,
) -> tuple[Engine, Launched]:
    """Start planner and shards, spread over the nodes, or join those that run.

    Raises:
        ValueError: `shards` is not positive, or it or the path differs from the running repository's.
        StorageError, CorruptDataError: the path cannot be used.
    """
    if shards is not None and shards < 1:
        raise ValueError(f"shards: expected at least 1; found {shards}")
    owns_cluster = embedded.attach_or_start()
    engine = RayEngine()
    launched = Launched(engine, owns_cluster=owns_cluster)
    try:
        nodes = engine.nodes()
        count = shards if shards is not None else len(nodes)
        uri = disk.uri if disk is not None else None
        topology = Topology(repository, tuple(range(count)), uuid.uuid4().hex, uri)
        if uri is not None:
            Archive(uri, count)  # what is wrong with it is said here, and not in an actor that cannot start
        planner = engine.spawn(Planner, planner_name(repository), {"engine": engine, "topology": topology})
        running: Topology = engine.result(engine.call(planner, "topology"), START_TIMEOUT_S, "planner")
        if running.started_by == topology.started_by:
            launched.names.append(planner_name(repository))
            if uri is not None:
                engine.result(engine.call(planner, "claim"), START_TIMEOUT_S, "planner")
            _start_shards(launched, running, nodes, store_bytes, preallocate_bytes, disk)
        elif shards is not None and shards != len(running.shards):
            raise ValueError(
                f"repository {repository!r} runs already with {len(running.shards)} shards; found shards={shards}"
            )
        elif uri is not None and running.path != uri:
            known = without_credentials(running.path) if running.path is not None else None
            raise ValueError(
                f"repository {repository!r} runs already with path={known!r}; found path={without_credentials(uri)!r}"
            )
        else:
            log.info("joined the running repository %r", repository)
        _await_shards(engine, running)
    except BaseException:
        launched.stop()
        raise
    return engine, launched


def _start_shards(
    launched: Launched,
    topology: Topology,
    nodes: list[Node],
    store: int | None,
    preallocate: int | None,
    options: DiskOptions | None,
) -> None:
    for index in topology.shards:
        node = nodes[index % len(nodes)]
        neighbours = sum(nodes[other % len(nodes)] is node for other in topology.shards)
        room = store if store is not None else node.store_bytes // neighbours
        touched = preallocate if preallocate is not None else min(room, PREALLOCATE_MOST)
        disk = None
        if options is not None:
            behind = options.lag_bytes if options.lag_bytes is not None else room // 2
            disk = Disk(options.uri, options.codec, behind, options.keep)
        config = ShardConfig(topology.repository, index, topology.shards, room, touched, SESSION_S, disk)
        name = actor_name(topology.repository, index)
        launched.engine.spawn(Shard, name, {"engine": launched.engine, "config": config}, node.id)
        launched.names.insert(0, name)


def _await_shards(engine: Engine, topology: Topology) -> None:
    """Wait until all shards answer; whoever joins may be here before the starter has named them all."""
    deadline = time.monotonic() + START_TIMEOUT_S
    for index in topology.shards:
        name = actor_name(topology.repository, index)
        while True:
            left = deadline - time.monotonic()
            try:
                engine.result(engine.call(engine.find(name), "stats"), left, name)
                break
            except LookupError as exc:
                if left <= 0:
                    raise OperationTimeoutError(f"{name}: expected it to be started; it was not") from exc
                threading.Event().wait(0.05)
