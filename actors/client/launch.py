"""Starting and stopping a repository's actors."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from ...planner.membership import JOIN_MOST, NodeRule, check_rule
from ...planner.owner import Owner, check_own
from ...planner.scaling import ScalePolicy
from ...planner.topology import Topology
from ...store.archive.archive import Archive
from ...store.codecs.codec import Codec
from ...store.errors import (
    EngineStoppedError,
    OperationTimeoutError,
    OptionError,
    RepositoryNotFoundError,
    ShardUnavailableError,
    StorageError,
    TensorVineError,
)
from ...store.sizes import check_bytes
from ...store.uris import is_uri, without_credentials
from ...store.versions.retention import Retention
from ...store.waiting import Backoff, Deadline
from ..catalog.catalog import Catalog
from ..engine.choice import EngineChoice, start_engine
from ..engine.engine import Engine, Node
from ..planner.calls import PlannerCalls
from ..planner.following import able_nodes
from ..planner.planner import Planner
from ..planner.reservations import Reservations
from ..rpc import redis_connection
from ..rpc.catalog_calls import CatalogCalls
from ..rpc.catalog_messages import CatalogConfig
from ..rpc.channel import Answer, Channel
from ..rpc.messages import METADATA_BYTES, Disk, ShardPlan, actor_name, catalog_name, planner_name
from ..rpc.registry import Registry
from ..rpc.shard_channels import ShardChannels
from ..shard.calls import ShardCalls
from ..shard.shard import Shard
from ..transport.tcp import TcpClient, UnreachableError
from .progress import each

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0
END_S = 1.0
"""For the shards of a repository that is stopped to answer nobody any more."""
SESSION_S = 60.0
"""How long a client's session lasts without a sign of life."""
GREET_S = 2.0
"""For a shard of another repository to answer, which may be on a host that is gone."""
OTHERS_END_S = 10.0
"""By when shards of a repository that was stopped have ended; so long they are asked."""


@dataclass(slots=True)
class Launched:
    """What `launch` started, and how to stop it."""

    engine: Engine
    repository: str
    started_by: str = ""
    """The start's id, as of `Topology`."""
    names: list[str] = field(default_factory=list[str])
    """Actors that were started here, in the order in which to stop them."""
    owns_cluster: bool = False
    """The cluster was started here."""

    def leave(self) -> None:
        """Let what was started run on; `stop` then does nothing."""
        self.names, self.owns_cluster = [], False

    def stop(self) -> None:
        """Stop what was started; a second call does nothing."""
        names, self.names = self.names, []
        running = self._running(names)
        self._end_all(running)
        for name in running:
            self.engine.kill(name)
        if running:
            self._release()
        if self.owns_cluster:
            self.owns_cluster = False
            self.engine.leave()

    def _end_all(self, running: Sequence[str]) -> None:
        """Have the actors answer nobody from now on: a client that knows one is answered until its process ends."""
        deadline, asked = Deadline.after(END_S), list[Answer[None]]()
        catalog, planner = catalog_name(self.repository), planner_name(self.repository)
        for name in running:
            if name != planner:
                request = CatalogCalls.end() if name == catalog else ShardCalls.end()
                with suppress(TensorVineError):  # it has ended before
                    asked.append(Channel(self.engine, name).send(request))
        for answer in asked:
            with suppress(TensorVineError):
                answer.result(deadline.left())

    def _release(self) -> None:
        try:
            Reservations(self.engine, self.repository, self.started_by).release_all()
        except EngineStoppedError:
            log.debug("repository %r: its reservations ended with its cluster", self.repository)
        except TensorVineError as exc:
            log.warning("repository %r: its memory stays reserved until this program ends: %s", self.repository, exc)

    def _running(self, names: list[str]) -> list[str]:
        """Name what is to be stopped, shards that joined since the start first.

        Nothing, where the repository was stopped before and another one has its name by now.
        """
        if catalog_name(self.repository) not in names:
            return names
        self._rest()
        try:
            topology, others = self._topology()
        except TensorVineError as exc:
            log.warning(
                "repository %r: no answer from the catalog; stopping the shards of the start only: %s",
                self.repository,
                exc,
            )
            return names
        if topology.started_by != self.started_by:
            log.warning(
                "repository %r: it was already stopped; another repository of this name keeps running", self.repository
            )
            return []
        shards = dict.fromkeys([*topology.shards, *others])
        joined = [name for shard in shards if (name := actor_name(self.repository, shard)) not in names]
        return [*joined, *names]

    def _rest(self) -> None:
        """Have no shard join or drain any more, unless the planner does not answer."""
        planner = Channel(self.engine, planner_name(self.repository))
        try:
            planner.call(PlannerCalls.rest(self.started_by, STOP_TIMEOUT_S), 2 * STOP_TIMEOUT_S)
        except TensorVineError as exc:
            log.warning("repository %r: no answer from the planner: %s", self.repository, exc)

    def _topology(self) -> tuple[Topology, Sequence[int]]:
        """Return the topology, and numbers that other shards may have: there are none, unless the catalog is away."""
        try:
            catalog = Channel(self.engine, catalog_name(self.repository))
            return catalog.call(CatalogCalls.topology(), STOP_TIMEOUT_S), ()
        except TensorVineError as exc:
            recorded = Registry(self.engine, self.repository, self.started_by).topology()
            if recorded is None:
                raise
            log.warning(
                "repository %r: no answer from the catalog; stopping every shard that may exist: %s",
                self.repository,
                exc,
            )
            return recorded, range(recorded.next, recorded.next + JOIN_MOST)


def launch(
    repository: str,
    shards: int | None,
    *,
    asked: bool = True,
    store_bytes: int | str | None,
    preallocate_bytes: int | str | None,
    metadata_bytes: int | str = METADATA_BYTES,
    disk: Disk | None = None,
    redis: str | None = None,
    replicas: int = 1,
    scaling: ScalePolicy | None = None,
    nodes: NodeRule | None = None,
    choice: EngineChoice = None,
) -> tuple[Engine, Launched]:
    """Start catalog, planner and shards, the latter spread over the nodes, or join those that run.

    Args:
        repository: its name.
        shards: how many; None: one per node, now and later.
        asked: the repository was asked for by name, so it may be another user's.
        store_bytes, preallocate_bytes, metadata_bytes, disk, redis, replicas, scaling, nodes: as of `Repository.start`.
        choice: the engine.

    Raises:
        ForeignRepositoryError: it runs already, is another user's, and was not asked for by name.
        OptionError: `shards` or `replicas` is not positive, `scaling` allows fewer shards than replicas, there are
            fewer nodes or shards than that, `nodes` is no rule or selects none, or one of these, the path or Redis
            differs from the running repository's.
        StorageError, CorruptDataError: the path, or Redis, cannot be used.
        CodecUnavailableError: the package `redis` is not installed.
    """
    _check_numbers(shards, replicas, scaling)
    rule = check_rule(nodes) if nodes is not None else {}
    capacity = check_bytes("store_bytes", store_bytes, 1) if store_bytes is not None else None
    touched = check_bytes("preallocate_bytes", preallocate_bytes) if preallocate_bytes is not None else None
    metadata = check_bytes("metadata_bytes", metadata_bytes, 2)  # the text of no metadata is {}
    if redis is not None:
        redis_connection.present_start(redis, repository)  # it must answer
    engine, owns_cluster = start_engine(choice)
    launched = Launched(engine, repository, owns_cluster=owns_cluster)
    try:
        living = engine.nodes()
        able = _able(living, rule)
        wanted = _wanted(repository, shards, len(able), disk, replicas, rule)
        launched.started_by = wanted.started_by
        plan = ShardPlan(capacity, touched, SESSION_S, disk, redis, metadata)
        catalog, found = _start_catalog(engine, wanted, plan, living[0].id)
        if found.started_by == wanted.started_by:
            launched.names.append(catalog_name(repository))
            if redis is not None:
                _check_alone(redis, repository)
                redis_connection.enter_start(redis, repository, found.started_by)
            arguments = {"engine": engine, "topology": found, "plan": plan, "scaling": scaling, "count": shards}
            planner = engine.spawn(Planner, planner_name(repository), arguments, living[0].id)
            launched.names.append(planner_name(repository))
            _start_shards(launched, found, able, plan, Channel(engine, planner_name(repository), actor=planner))
        else:
            if not asked:
                check_own(repository, found.owner, Owner.here())
            count = Registry(engine, repository, found.started_by).wanted()
            _check_joined(found, wanted, shards if shards != count else None, nodes)
            log.info("joined the running repository %r", repository)
        _await_shards(engine, found, catalog)
        if redis is not None and redis_connection.present_start(redis, repository) != found.started_by:
            raise OptionError(
                f"repository {repository!r} is already running, and does not use the Redis server of redis="
            )
    except BaseException:
        launched.stop()
        raise
    return engine, launched


def running(engine: Engine, topology: Topology) -> Launched:
    """Return what a running repository consists of, to stop it although another process started it."""
    repository = topology.repository
    shards = [actor_name(repository, shard) for shard in topology.shards]
    names = [*shards, catalog_name(repository), planner_name(repository)]
    return Launched(engine, repository, topology.started_by, names)


def _check_numbers(shards: int | None, replicas: int, scaling: ScalePolicy | None) -> None:
    """Refuse numbers that fit no cluster."""
    if shards is not None:
        check_count("shards", shards)
    check_count("replicas", replicas)
    if scaling is not None and scaling.least < replicas:
        raise OptionError(f"scaling: expected least >= replicas={replicas}; found {scaling}")


def check_count(what: str, number: object) -> None:
    """Refuse what is no number of things of which there is at least one.

    Raises:
        OptionError: names it.

    >>> check_count("shards", "2")
    Traceback (most recent call last):
    tensorvine.store.errors.OptionError: shards: expected an integer; found '2'
    """
    if type(number) is not int:
        raise OptionError(f"{what}: expected an integer; found {number!r:.100}")
    if number < 1:
        raise OptionError(f"{what}: expected at least 1; found {number}")


def _able(living: list[Node], rule: NodeRule) -> list[Node]:
    """Return the nodes that may hold shards."""
    able = able_nodes(living, rule)
    if not able:
        raise OptionError(
            f"nodes: expected a living node that has {dict(rule)} and is not leaving; found none among {len(living)}"
        )
    return able


def _wanted(
    repository: str, shards: int | None, nodes: int, disk: Disk | None, replicas: int, rule: NodeRule
) -> Topology:
    """Say what is to be started on so many nodes, if nothing of the kind runs."""
    count = shards if shards is not None else nodes
    if replicas > min(nodes, count):
        raise OptionError(
            f"replicas: expected at most one per node and per shard; found replicas={replicas} with {nodes} living "
            f"nodes and {count} shards"
        )
    uri = disk.uri if disk is not None else None
    if uri is not None:
        Archive(uri)  # what is wrong with it is said here, and not in an actor that cannot start
    return Topology(repository, tuple(range(count)), uuid.uuid4().hex, uri, replicas, owner=Owner.here(), nodes=rule)


def _start_catalog(engine: Engine, wanted: Topology, plan: ShardPlan, node: str) -> tuple[Channel, Topology]:
    """Start the catalog of a repository, or find the one that runs; gives the topology that it goes by, too."""
    config = CatalogConfig(
        topology=wanted,
        session_s=plan.session_s,
        disk=plan.disk,
        redis=plan.redis,
        metadata_bytes=plan.metadata_bytes,
    )
    name = catalog_name(wanted.repository)
    actor = engine.spawn(Catalog, name, {"engine": engine, "config": config}, node)
    catalog, deadline, pauses = Channel(engine, name, actor=actor), Deadline.after(START_TIMEOUT_S), Backoff(0.05, 0.5)
    while True:
        try:
            return catalog, catalog.call(CatalogCalls.topology(), deadline.left())
        except EngineStoppedError:
            raise
        except ShardUnavailableError:  # it has no lease yet, or not just now
            if not pauses.wait(deadline):
                raise


def _check_alone(redis: str, repository: str) -> None:
    """Refuse a Redis where a repository of this name runs: of another cluster, as this one has none.

    Raises:
        StorageError: one of its shards answers, and goes on to: one that was stopped just now may take a moment.
    """
    deadline = Deadline.after(OTHERS_END_S)
    for address in redis_connection.posted_shards(redis, repository):
        client, pauses = TcpClient((address.host, address.port), address.token), Backoff(0.05, 0.5)
        while True:
            try:
                client.greet(GREET_S)
            except UnreachableError:
                if deadline.passed:  # hosts that are gone, one after another
                    return
                break
            if deadline.passed:
                where = redis_connection.where_is(redis, "Repository.start")
                raise StorageError(
                    f"Redis at {where}: expected no other running repository named {repository!r}; found one with a "
                    f"shard at {address.host}:{address.port}: stop it, or use another name or another database"
                )
            pauses.wait()


def _check_joined(found: Topology, wanted: Topology, shards: int | None, nodes: NodeRule | None) -> None:
    """Refuse to join a repository that is not as it was wanted; None and replicas=1 want nothing special."""
    known = f"repository {found.repository!r} is already running with"
    if shards is not None and shards != len(found.shards):
        raise OptionError(f"{known} {len(found.shards)} shards; found shards={shards}")
    if wanted.path is not None and found.path != wanted.path:
        path = without_credentials(found.path) if found.path is not None else None
        raise OptionError(f"{known} path={path!r}; found path={without_credentials(wanted.path)!r}")
    if wanted.replicas not in (1, found.replicas):
        raise OptionError(f"{known} replicas={found.replicas}; found replicas={wanted.replicas}")
    if nodes is not None and dict(found.nodes) != dict(wanted.nodes):
        raise OptionError(f"{known} nodes={dict(found.nodes)}; found nodes={dict(wanted.nodes)}")


def _start_shards(launched: Launched, topology: Topology, nodes: list[Node], plan: ShardPlan, planner: Channel) -> None:
    """Start the shards, spread over the nodes."""
    places = {index: nodes[index % len(nodes)].id for index in topology.shards}
    rooms = planner.call(PlannerCalls.reserve(places), START_TIMEOUT_S)
    if plan.store_bytes is None:
        log.info("repository %r: capacity of its shards in bytes: %s", topology.repository, rooms)
    for index, node in places.items():
        config = plan.config(topology, index, rooms[index])
        name = actor_name(topology.repository, index)
        launched.engine.spawn(Shard, name, {"engine": launched.engine, "config": config}, node)
        launched.names.insert(0, name)


def _await_shards(engine: Engine, topology: Topology, catalog: Channel) -> None:
    """Wait until all shards answer; whoever joins may be here before the starter has named them all.

    One that has left meanwhile is not waited for.
    """
    deadline, pauses = Deadline.after(START_TIMEOUT_S), Backoff(0.05, 0.05)
    shards = ShardChannels(engine, topology.repository, missing=RepositoryNotFoundError)
    started = each(topology.shards, f"start of {topology.repository}", "shards", len(topology.shards))
    for index in started:
        while True:
            try:
                shards[index].call(ShardCalls.stats(), deadline.left())
                break
            except RepositoryNotFoundError as exc:
                if index not in catalog.call(CatalogCalls.topology(), START_TIMEOUT_S).shards:
                    break
                if not pauses.wait(deadline):
                    name = actor_name(topology.repository, index)
                    raise OperationTimeoutError(f"{name}: expected it to start in time; it did not") from exc


def disk_options(
    path: str | os.PathLike[str] | None, codec: Codec | None, keep: Retention | None, lag_bytes: int | str | None
) -> Disk | None:
    """Check what `Repository.start` was told of the disk; errors as there."""
    where = "Repository.start"
    if path is None:
        for option, given in (("codec", codec), ("keep", keep), ("lag_bytes", lag_bytes)):
            if given is not None:
                raise OptionError(f"{where}: {option}: expected path= with it; found {given!r} without path=")
        return None
    if codec is not None:
        if not isinstance(codec, Codec):
            raise OptionError(f"{where}: codec: expected a codec such as Shuffle() | Zstd(); found {codec!r}")
        codec.encode(np.zeros(4096, np.int8))  # what it needs must be installed
    if keep is not None and not isinstance(keep, Retention):
        raise OptionError(f"{where}: keep: expected a policy such as KeepLast(3); found {keep!r}")
    lag = check_bytes(f"{where}: lag_bytes", lag_bytes) if lag_bytes is not None else None
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        raise OptionError(f"{where}: path: expected a directory or a URI of a file system; found {path!r}")
    uri = text if is_uri(text) else os.path.abspath(os.path.expanduser(text))
    return Disk(uri, codec.spec if codec is not None else None, lag, keep)
