"""Starting and stopping a repository's actors."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from ..store.errors import TensorVineError
from . import embedded
from .engine import Engine
from .engine_ray import RayEngine
from .planner import Planner, Topology
from .session import CONTROL_TIMEOUT_S
from .shard import Shard, ShardConfig, actor_name, planner_name

log = logging.getLogger(__name__)

STAGING_SHARE = 4
STAGING_MOST = 1 << 30
PREALLOCATE_MOST = 256 << 20
START_TIMEOUT_S = 120.0


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
    repository: str, shards: int | None, staging_bytes: int | None, preallocate_bytes: int | None
) -> tuple[Engine, Launched]:
    """Start planner and shards, spread over the nodes, or join those that run.

    Raises:
        ValueError: `shards` is not positive, or differs from the running repository's.
    """
    if shards is not None and shards < 1:
        raise ValueError(f"shards: expected at least 1; found {shards}")
    owns_cluster = embedded.attach_or_start()
    engine = RayEngine()
    launched = Launched(engine, owns_cluster=owns_cluster)
    try:
        if _join(engine, repository, shards):
            return engine, launched
        _start(launched, repository, shards, staging_bytes, preallocate_bytes)
    except BaseException:
        launched.stop()
        raise
    return engine, launched


def _join(engine: Engine, repository: str, shards: int | None) -> bool:
    try:
        planner = engine.find(planner_name(repository))
    except LookupError:
        return False
    running: Topology = engine.result(engine.call(planner, "topology"), CONTROL_TIMEOUT_S, "planner")
    if shards is not None and shards != len(running.shards):
        raise ValueError(f"repository {repository!r} runs already with {len(running.shards)} shards; found shards={shards}")
    log.info("joined the running repository %r", repository)
    return True


def _start(
    launched: Launched, repository: str, shards: int | None, staging: int | None, preallocate: int | None
) -> None:
    engine = launched.engine
    nodes = engine.nodes()
    indices = tuple(range(shards if shards is not None else len(nodes)))
    planner = engine.spawn(Planner, planner_name(repository), {"engine": engine, "topology": Topology(repository, indices)})
    launched.names.append(planner_name(repository))
    engine.result(engine.call(planner, "topology"), START_TIMEOUT_S, "planner")
    started = []
    for index in indices:
        node = nodes[index % len(nodes)]
        room = staging if staging is not None else min(node.store_bytes // STAGING_SHARE, STAGING_MOST)
        touched = preallocate if preallocate is not None else min(room, PREALLOCATE_MOST)
        config = ShardConfig(repository, index, indices, room, touched)
        started.append(
            engine.spawn(Shard, actor_name(repository, index), {"engine": engine, "config": config}, node.id)
        )
        launched.names.insert(0, actor_name(repository, index))
    for index, actor in enumerate(started):
        try:
            engine.result(engine.call(actor, "stats"), START_TIMEOUT_S, actor_name(repository, index))
        except TensorVineError as exc:
            raise type(exc)(f"repository {repository!r} did not start: {exc}") from exc
