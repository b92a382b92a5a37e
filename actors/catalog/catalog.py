"""The catalog actor: all metadata of one repository.

Rules (docs/design/catalog.md)
- The state decides (`store.catalog.state`), the parts act. `context.decide` is the only way to a decision.
- The constructor takes a term, finds what was decided before, and begins a stream; calls wait until then.
- Groups run in threads of their own: `ctl` for short answers, `data` for the path, `watch` for long polls.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from ...store.archive.archive import LOCK_NAME, Archive
from ...store.archive.directory import Directory
from ...store.archive.opening import open_directory
from ...store.catalog.journal import FOLDER, Stream
from ...store.catalog.state import CatalogState, Effects
from ...store.errors import ShardUnavailableError, StorageError
from ...store.refs import ModelRef
from ...store.waiting import Backoff, Deadline
from ..engine.engine import Engine
from ..engine.room import outlast_workers
from ..memory.counters import CounterPage
from ..rpc.calls import composed
from ..rpc.catalog_messages import CatalogConfig
from ..rpc.lease import Lease
from ..rpc.notifier import Notifier
from ..rpc.registry import Registry
from ..rpc.shard_channels import ShardChannels
from .care import Care
from .context import CatalogContext
from .copies import JournalCopies
from .durable import DurableSaves, ManifestWriter
from .finding import Found, Manifests, in_directory, in_shards, replayed, until_read
from .journal import Journal, delete_earlier, open_private, private_folder
from .lines import Lines
from .parts.clients import Clients
from .parts.deploy import Deploy
from .parts.shards import Shards
from .parts.versions import Versions
from .placement import Placement
from .redis_index import Live, RedisIndex
from .retaining import Retaining

log = logging.getLogger(__name__)

_R = TypeVar("_R")

CLAIM_S = 3.0
"""How long a repository that starts waits for another one to leave its path."""


@composed([Clients, Versions, Shards, Deploy])
class Catalog:
    """The catalog of one repository, as an actor.

    Args:
        engine: runs the actors.
        config: how the repository was started.

    Raises:
        StorageError, CorruptDataError: the path cannot be used, or another repository uses it.
    """

    def __init__(self, engine: Engine, config: CatalogConfig) -> None:
        outlast_workers()
        again = engine.restarted()
        topology, start = config.topology, config.topology.started_by
        registry = Registry(engine, topology.repository, start)
        if not again:
            registry.clear()
        page = CounterPage(secrets.randbits(62))
        lease = Lease(registry, "catalog", engine.this_node(), page.lease, above=0 if again else _last_term(config))
        again = again or bool(lease.before)
        topology = _from_head(registry.topology) or topology
        channels = ShardChannels(engine, topology.repository)
        archive = _opened(config, lease, again)
        disk = config.disk
        state = CatalogState(
            start, config.session_s, config.capacity, disk.codec if disk is not None else None, archive is not None
        )
        private = private_folder(topology.repository, start, engine.this_node())
        shards = topology.shards if again else ()
        is_whole = _find(state, lease, archive, private, channels, shards)
        manifests = Manifests(archive, state) if archive is not None else None
        if not state.same_start:
            state.forget_shards(topology.shards)
        if manifests is not None:
            until_read(lambda: manifests.read(topology.shards), waits=again)
        _set_floor(state, registry, is_whole)
        state.effects = Effects()
        lock = threading.RLock()
        state.term = lease.number
        directory = archive.directory if archive is not None else None
        journal = Journal(state, lock, lease.number, lease.token, directory, lambda: open_private(private), lease.say)
        journal.begin()
        _from_head(lambda: registry.decide(topology))
        _from_head(lambda: lease.say(journal.where))
        _from_head(lambda: _forget_earlier(lease, journal, directory, private))
        context = self._context = CatalogContext(
            engine=engine,
            config=config,
            registry=registry,
            lease=lease,
            topology=topology,
            state=state,
            lock=lock,
            journal=journal,
            page=page,
            notifier=Notifier(lock),
            archive=archive,
        )
        lines = Lines(channels, context.term, lock, lambda shard: deploy.acknowledged(shard))
        durable = DurableSaves()
        redis_index = _open_redis(context) if config.redis is not None else None
        posted = redis_index.shard_at if redis_index is not None else _not_posted
        placement = Placement(context, lines, durable, posted, calm=not again)
        writer = ManifestWriter(context, archive, lines, placement.settle) if archive is not None else None
        retaining = Retaining(context, lines, disk.keep if disk is not None else None)
        copies = JournalCopies(context, lines, channels)
        versions = Versions(context, placement, writer)
        clients = Clients(context, lines, placement=placement, writer=writer)
        deploy = Deploy(context, lines, placement)
        shards_part = Shards(
            context,
            lines,
            placement=placement,
            copies=copies,
            durable=durable,
            writer=writer,
            retaining=retaining,
            versions=versions,
        )
        parts = (clients, versions, shards_part, deploy)
        self.parts: Mapping[type, object] = {type(part): part for part in parts}
        Care(context, placement=placement, clients=clients, deploy=deploy, manifests=manifests)
        log.info(
            "catalog of %r: term %d, %d versions, %d segments",
            topology.repository,
            lease.number,
            state.models_count,
            len(state.references),
        )


def _from_head(ask: Callable[[], _R]) -> _R:
    """Ask the head of the cluster, again until it answers."""
    pauses = Backoff(0.2, 2.0)
    while True:
        try:
            return ask()
        except ShardUnavailableError as exc:
            log.warning("catalog: waiting for the head of the cluster: %s", exc)
        pauses.wait()


def _not_posted(shard: int, address: tuple[str, int, str] | None) -> None:
    """No-op where the repository has no Redis."""


def _open_redis(context: CatalogContext) -> RedisIndex | None:
    """Post what lives in Redis from now on."""
    url, state, topology = context.config.redis, context.state, context.topology
    if url is None:
        return None

    def live(ref: ModelRef) -> Live | None:
        with context.lock:
            entry = state.live(ref)
            if entry is None:
                return None
            known = ((segment, state.references.get(segment)) for segment in state.holds_of(entry))
            places = {segment: one.keeper for segment, one in known if one is not None and one.keeper >= 0}
            return entry.header, state.body_of(entry), places

    def refs() -> list[ModelRef]:
        with context.lock:
            return state.models()

    def graph_of(key: bytes) -> str:
        with context.lock:
            return state.graphs.architecture(key)[0]

    index = RedisIndex(url, topology.repository, topology.started_by, live=live, refs=refs, graph_of=graph_of)
    context.followers.append(lambda effects: index.changed([*effects.published, *effects.ended]))
    return index


def _opened(config: CatalogConfig, lease: Lease, again: bool) -> Archive | None:
    """Open the path and lock it; a catalog that starts again waits for a path that is not there just now."""
    if config.disk is None:
        return None
    uri = config.disk.uri
    deadline, pauses = Deadline.after(CLAIM_S), Backoff(0.1, 2.0)
    while True:
        try:
            archive = Archive(uri, create=False, guard=lease.check)
            _claim(archive, again)
            return archive
        except StorageError as exc:
            if not again and deadline.passed:
                raise
            log.error("catalog: waiting for its path: %s", exc)
        pauses.wait()


def _claim(archive: Archive, again: bool) -> None:
    """Keep other repositories off the path for as long as this process lives.

    Raises:
        StorageError: another one runs on it. A catalog that starts again may find its former process there.
    """
    try:
        archive.directory.claim(LOCK_NAME)
    except StorageError as exc:
        if not again:
            raise
        log.warning("catalog: %s", exc)
    if not again:
        archive.sweep()


def _last_term(config: CatalogConfig) -> int:
    """Return the highest term of streams that earlier starts left on the path: this start's terms are above it."""
    if config.disk is None:
        return 0
    names = open_directory(config.disk.uri, create=False).list(FOLDER)
    return max((stream.term for stream in map(Stream.parse, names) if stream is not None), default=0)


def _find(
    state: CatalogState,
    lease: Lease,
    archive: Archive | None,
    private: str,
    channels: ShardChannels,
    shards: tuple[int, ...],
) -> bool:
    """Replay the greatest stream that can be reached. Return whether it has all earlier decisions."""
    found: list[Found | None] = []

    def look() -> None:
        found[:] = [in_directory(archive.directory)] if archive is not None else []

    again = bool(shards)
    until_read(look, waits=again)
    if again:
        found.append(in_directory(open_private(private)))
    best = max(filter(None, found), key=lambda one: (one.stream, len(one.content)), default=None)
    if again and not _is_newest(best, lease):
        best = in_shards(channels, shards, best)
    if best is not None:
        replayed(state, best)
    return _is_newest(best, lease) if again else best is None or best.is_current


def _set_floor(state: CatalogState, registry: Registry, is_whole: bool) -> None:
    """Set the floor of version numbers; raise it if decisions may be missing."""
    if is_whole:
        state.floor = max(state.floor, _from_head(registry.floor))
        return
    state.floor = _from_head(lambda: registry.raise_floor(max(state.floor, state.highest)))
    log.error("catalog: the last decisions cannot be read, so version numbers start above %d", state.floor)


def _is_newest(best: Found | None, lease: Lease) -> bool:
    """Tell whether a stream has all that was decided: it is the last term's own file, or a later term's begin."""
    terms = {term: where for term, where in lease.before.items() if where}
    if not terms:
        return True
    last = max(terms)
    return best is not None and (best.stream.term > last or (best.stream.term == last and best.where == terms[last]))


def _forget_earlier(lease: Lease, journal: Journal, path: Directory | None, private: str) -> None:
    """Delete streams and entries of earlier terms: the new stream has all that they say."""
    lease.forget_earlier()
    try:
        delete_earlier([*([path] if path is not None else []), open_private(private)], journal.stream)
    except StorageError as exc:
        log.warning("catalog: streams of earlier terms could not be deleted: %s", exc)
