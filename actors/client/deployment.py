"""A repository as what runs: started, joined, scaled, flushed to disk, stopped, whatever is in it.

Rules
- Who started it stops it with `close`; who joined it, or connected to it, only disconnects.
- Another user's repository is joined, or connected to, only by its name.
- What waits for the path is written before the repository is stopped.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

from ...planner.membership import NodeRule
from ...planner.owner import Owner, check_own
from ...planner.scaling import ScalePolicy
from ...store.codecs.codec import Codec
from ...store.errors import (
    ForeignRepositoryError,
    OperationTimeoutError,
    OptionError,
    ShardUnavailableError,
    StorageError,
    TensorVineError,
)
from ...store.refs import check_name
from ...store.shard import ShardStats
from ...store.versions.retention import Retention
from ...store.waiting import NEVER, Deadline, seconds_of
from ..engine.choice import EngineChoice, engine_for
from ..engine.engine import Engine
from ..planner.calls import PlannerCalls
from ..planner.resizing import ScaleReport
from ..rpc.closing import close_all
from ..rpc.incarnations import Incarnations
from ..rpc.messages import METADATA_BYTES
from ..shard.calls import ShardCalls
from .launch import Launched, check_count, disk_options, launch, running
from .session import CONTROL_TIMEOUT_S, Session

log = logging.getLogger(__name__)

DEFAULT_NAME = "default"
"""Of a repository that is started or connected to without a name."""
GRACE_S = 5.0
"""How much longer than the planner a client waits for it: it knows what is late."""
FLUSH_TIMEOUT_S = 600.0
"""How long `close` waits for the disk, where it is not told."""
QUIET_S = 5.0
"""How long a flush waits before it logs what for."""

Closes = tuple[Callable[[], None], ...]


class Deployment:
    """The part of a repository's client that starts, scales and stops the repository.

    Args:
        engine: The engine that runs the repository's actors.
        name: Name of the repository.
        launched: The actors that this client started. None means that it only connected.
    """

    def __init__(self, engine: Engine, name: str, launched: Launched | None = None) -> None:
        self.name = name
        self._launched = launched
        self._session = Session(engine, name)
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def start(
        cls,
        name: str | None = None,
        *,
        shards: int | None = None,
        path: str | os.PathLike[str] | None = None,
        codec: Codec | None = None,
        replicas: int = 1,
        store_bytes: int | str | None = None,
        preallocate_bytes: int | str | None = None,
        metadata_bytes: int | str = METADATA_BYTES,
        keep: Retention | None = None,
        lag_bytes: int | str | None = None,
        redis: str | None = None,
        scaling: ScalePolicy | None = None,
        nodes: NodeRule | None = None,
        engine: EngineChoice = None,
    ) -> Self:
        """Start a repository, or join the running repository of that name.

        It runs on the cluster that is already running, or else on a cluster started in this process. A client that
        joined a repository does not stop it: its `close` only disconnects. The operating-system user who starts a
        repository owns it.

        Args:
            name: Name of the repository. Its actors are named `NAME/planner`, `NAME/shard-0`, ... in the namespace
                `tensorvine`. None means `"default"`. To join another user's repository, its name must be given.
            shards: Number of shards. None means one per node, also when nodes join or leave later.
            path: Directory or URI (`s3:`, `gs:`, `abfs:`, `hdfs:`, or `fsspec+SCHEME:`) of the history, which is
                restored at the start. Every node must reach it. Percent-encode secrets in a URI: `@` as `%40`, `/` as
                `%2F`. None means that nothing outlives the shards.
            codec: Codec for tensors on the path, such as `Shuffle() | Zstd()`. With a lossy codec, such as
                `Quantize(8) | Zstd()`, values are exact while a version is in memory and within the codec's error after
                it was read from disk. None stores tensors unchanged.
            replicas: Number of nodes that must hold a version before it is committed with `durability="memory"`, at
                most one per node and per shard. With 2, the loss of one node or one shard's process loses no committed
                version. If too few nodes are left later, copies share a node; `stats` reports missing copies.
            store_bytes: Capacity of each shard in bytes, or as text such as `"200MB"` or `"4GiB"`. It is reserved on
                the shard's node; memory is taken from the system when it is used. None means half of the node's
                unreserved memory, shared among the shards that start there.
            preallocate_bytes: Memory that each shard takes from the system at the start, in bytes or as text. None
                means 256 MiB, or the capacity if that is smaller. 0 means none (DStore-OnDemand).
            metadata_bytes: Limit of one version's metadata as JSON, in bytes or as text. A save with more
                is refused. Metadata uses memory in addition to `store_bytes`.
            keep: Policy that selects the versions that stay in memory once they are on disk, such as
                `KeepLast(3) | KeepBest(1)`. Other versions are read from disk. None keeps all until memory is needed.
            lag_bytes: Limit, per shard, of bytes that wait to be written to the path, in bytes or as text. Saves wait
                when it is reached. None means half of `store_bytes`.
            redis: URL of a Redis server (`redis://`, `rediss://` or `unix:///PATH`) that announces new versions to
                consumers outside the cluster (`EdgeConsumer`). Data of earlier repositories of this name is deleted
                there. Saves do not wait for the server. If it fails later, a warning is logged.
            scaling: Policy that adds and drains shards as bytes, requests and nodes change. None keeps the number that
                `shards` gives.
            nodes: Requirements of a node that holds a shard: minimum amounts of resources and values of labels, such as
                `{"tensorvine": 1}` or `{"ray.io/market-type": "on-demand"}`. None allows every node.
            engine: `"ray"`; `"dask"` (the current client, the scheduler of DASK_SCHEDULER_ADDRESS, or a new
                `LocalCluster`); a `distributed.Client`; or the address of its scheduler. None means the engine that
                already runs in this process, or else Ray.

        Raises:
            EngineUnavailableError: if the engine's package is not installed.
            RepositoryNotFoundError: if the cluster refuses this process, or no scheduler answers at the address.
            ForeignRepositoryError: if `name` is None and another user owns the running repository.
            OptionError: if an option is invalid or does not fit the cluster; if `codec`, `keep` or `lag_bytes` is given
                without `path`; if `engine` is None and both Ray and Dask run in this process; or if `shards`, `path`,
                `replicas`, `nodes` or `redis` differs from that of the running repository.
            StoreFullError: if a node has too little unreserved memory for a shard.
            StorageError: if `path` cannot be used or belongs to another running repository, or if Redis does not answer
                or serves a repository of this name in another cluster.
            CorruptDataError: if `path` holds a repository of a newer format.
            CodecUnavailableError: if `codec` or `redis` needs a package that is not installed.
        """
        known = check_name(name if name is not None else DEFAULT_NAME)
        used, launched = launch(
            known,
            shards,
            asked=name is not None,
            store_bytes=store_bytes,
            preallocate_bytes=preallocate_bytes,
            metadata_bytes=metadata_bytes,
            disk=disk_options(path, codec, keep, lag_bytes),
            redis=redis,
            replicas=replicas,
            scaling=scaling,
            nodes=nodes,
            choice=engine,
        )
        try:
            return cls(used, known, launched)
        except BaseException:
            launched.stop()
            raise

    @classmethod
    def connect(cls, name: str | None = None, *, engine: EngineChoice = None) -> Self:
        """Connect to a running repository, from any process of its cluster.

        Each process connects by itself: a client cannot be sent to another process. No cluster is started.

        Args:
            name: Name of the repository. None means `"default"`. To connect to another user's repository, its name
                must be given.
            engine: Engine that runs the repository, as in `start`.

        Raises:
            RepositoryNotFoundError: if no cluster of that engine runs, or it has no repository of that name.
            EngineUnavailableError: if the engine's package is not installed.
            OptionError: if `engine` is invalid, or is None while both Ray and Dask run in this process.
            ForeignRepositoryError: if `name` is None and another user owns the repository.
        """
        made = cls(engine_for(engine), check_name(name if name is not None else DEFAULT_NAME))
        if name is None:
            try:
                check_own(made.name, made._session.topology.owner, Owner.here())
            except ForeignRepositoryError:
                made.close()
                raise
        return made

    def close(self, timeout: float | None = None) -> None:
        """Finish pending saves and disconnect; also stop the repository if this client started it.

        A client that started a repository with a path waits until all committed versions are on disk. It logs the
        missing versions after 5 s. A cluster that `start` started is stopped too. If the process ends without `close`,
        a repository on a cluster of other processes continues to run.

        Everything is closed even if a step fails; the first error is raised at the end. A second call does nothing, and
        neither does a call in a forked child process. Afterwards every other method raises `ClosedError`.

        Args:
            timeout: Seconds for pending saves and the disk together. None means the saves' own timeouts, and 600 s for
                the disk.

        Raises:
            StorageError: if the disk has refused writes for a minute. The message names the versions that are not on
                disk.
            OperationTimeoutError: if the timeout ends first. The message names the versions that are not on disk.
            OptionError: if the timeout is not a number.
        """
        deadline = NEVER if timeout is None else Deadline.after(timeout)
        if self._session.opened.inherited:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        close_all(f"repository {self.name!r}", *self._closes(deadline))

    def leave(self) -> None:
        """Disconnect, and leave the repository running even if this client started it.

        Other processes can still `connect` to it and `stop` it. A repository on a cluster that is embedded in this
        process ends with the process nevertheless.
        """
        if self._launched is not None:
            self._launched.leave()
        self.close()

    def stop(self, timeout: float | None = None) -> None:
        """Stop the repository, even if another process started it, and disconnect.

        Like `close`, it finishes pending saves and waits until all committed versions are on the path. Calls of other
        clients raise `ShardUnavailableError` or `RepositoryNotFoundError` from then on.

        Args:
            timeout: Seconds for pending saves and the disk together, as in `close`.

        Raises:
            TensorVineError: the errors of `close`.
        """
        self._session.opened.check()
        if self._launched is None or not self._launched.names:
            self._launched = running(self._session.engine, self._session.topology)
        self.close(timeout)

    def __repr__(self) -> str:
        state = "closed" if self._session.opened.closed else f"{len(self._session.shards)} shards"
        return f"{type(self).__name__}({self.name!r}, {state})"

    def __reduce__(self) -> str:
        raise OptionError(
            f"repository {self.name!r}: expected its name; found a client, which cannot be sent to another process: "
            f"connect there with Repository.connect({self.name!r})"
        )

    def __enter__(self) -> Self:
        self._session.opened.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- while it runs --------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine that runs the repository's actors."""
        return self._session.engine

    @property
    def started_here(self) -> bool:
        """Whether this client started the repository. False means that it joined or connected to a running one."""
        return self._launched is not None and bool(self._launched.names)

    @property
    def has_path(self) -> bool:
        """Whether the repository keeps a history on disk."""
        return self._session.path is not None

    @property
    def shards(self) -> tuple[int, ...]:
        """Numbers of the current shards, as the planner reports them.

        A number is never used twice. A draining shard is included until other shards have taken over all its data. If
        the planner does not answer, these are the last numbers known to this client.
        """
        self._session.refresh(self._session.topology.version)
        return self._session.topology.alive

    def scale(self, shards: int | None, timeout: float = 120.0) -> ScaleReport:
        """Change the number of shards while reads and saves continue. Nothing is lost.

        A joining shard takes over its share of the names, but no tensors. A draining shard hands its names and tensors
        to the other shards. Shards drain one after another, first those on nodes that are leaving. New shards start on
        the nodes with the fewest shards.

        Args:
            shards: The new number of shards. None means one per node, also when nodes join or leave later.
            timeout: Seconds to wait. A step that is not decided by then is undone. A decided step is finished in the
                background.

        Returns:
            A report of the names, metadata and tensor bytes that moved, and of the time it took.

        Raises:
            OptionError: if `shards` is less than 1 or than the repository's `replicas`, if it is None in a repository
                with `scaling`, or if `timeout` is not a number.
            OperationTimeoutError: if the change takes longer than `timeout`.
            StoreFullError: if the remaining shards have too little room. The failed step is undone.
            ShardUnavailableError: if a shard could not be started. The failed step is undone.
        """
        if shards is not None:
            check_count("scale: shards", shards)
        seconds = seconds_of(timeout)
        self._session.opened.check()
        report = self._session.planner.call(PlannerCalls.scale(shards, seconds), seconds + GRACE_S)
        self._session.refresh()
        return report

    def stats_by_shard(self, timeout: float = 2.0) -> dict[int, ShardStats | TensorVineError]:
        """Return the statistics of each shard, for monitoring.

        Unlike `stats`, it does not fail when some shards do not answer.

        Args:
            timeout: Seconds for all shards together.

        Returns:
            A mapping of shard numbers to statistics, or to the error that explains why the shard did not answer in
            time.
        """
        return self._session.poll(ShardCalls.stats(), seconds_of(timeout))

    def flush(self, timeout: float = 60.0) -> None:
        """Wait until all versions committed so far are on disk. Missing versions are logged after 5 s.

        Args:
            timeout: Seconds to wait.

        Raises:
            OptionError: if the timeout is not a number.
            StorageError: if the repository has no path, or the disk refuses writes for a minute or until the timeout.
                The message names the versions that are not on disk.
            OperationTimeoutError: if it takes longer than `timeout`. The message names the versions that are not on
                disk.
            ShardUnavailableError: if a shard died during the call or shortly before. Versions that were only in its
                memory are lost.
        """
        seconds = seconds_of(timeout)
        patience = seconds + CONTROL_TIMEOUT_S
        incarnations = Incarnations(self._session.incarnations)
        self._session.broadcast(ShardCalls.tag(), patience, heard=incarnations.heard)
        waiting = threading.Timer(QUIET_S, self._log_unwritten)
        waiting.daemon = True
        waiting.start()
        try:
            self._session.broadcast(ShardCalls.flush(seconds), patience, heard=incarnations.heard)
        except (StorageError, OperationTimeoutError) as exc:
            if self.has_path and (unwritten := self._unwritten()):
                raise type(exc)("; ".join(unwritten)) from exc
            raise
        finally:
            waiting.cancel()
        self._session.broadcast(ShardCalls.tag(), patience, heard=incarnations.heard)
        if incarnations.died:
            raise ShardUnavailableError(
                "flush: expected all shards to run until all versions were on disk; these were restarted meanwhile: "
                f"{sorted(incarnations.died)}"
            )

    # ---- within ---------------------------------------------------------------------------------------

    def _closes(self, deadline: Deadline) -> Closes:
        """Return what `close` calls, in this order; what uses the session ends before it."""
        return partial(self._flush_last, deadline), self._session.close, self._stop_launched

    def _flush_last(self, deadline: Deadline) -> None:
        """Wait for the disk, where this client started the repository."""
        if self._launched is not None and self._launched.names and self.has_path:
            try:
                self.flush(deadline.left(FLUSH_TIMEOUT_S))
            except (StorageError, OperationTimeoutError) as exc:
                raise type(exc)(f"close of repository {self.name!r}: {exc}") from exc
            except TensorVineError as exc:
                log.error("repository %r is closed before all versions are on disk: %s", self.name, exc)

    def _log_unwritten(self) -> None:
        if (unwritten := self._unwritten()) and not self._session.opened.closed:
            log.warning("repository %r: still waiting for writes to its path: %s", self.name, "; ".join(unwritten))

    def _unwritten(self) -> list[str]:
        """Say of each shard what it has not written, or why it does not answer."""
        found: list[str] = []
        for shard in self._session.topology.alive:
            try:
                self._session.call(shard, ShardCalls.flush(0.0), GRACE_S)
            except TensorVineError as exc:
                found.append(str(exc))
        return found

    def _stop_launched(self) -> None:
        if self._launched is not None:
            self._launched.stop()
