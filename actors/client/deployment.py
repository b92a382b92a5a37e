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
    """A repository's planner and shards, and one client that is connected to them.

    Args:
        engine: what runs them.
        name: the repository's.
        launched: what this client started of them; None: nothing.
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
        """Start a repository on the cluster that runs, or on one embedded in this process where there is none.

        Joins the repository when one of that name already runs; `close` then only disconnects.

        Args:
            name: names the repository's actors: `NAME/shard-0`, `NAME/planner` in the namespace `tensorvine`. None: it
                is `"default"`, and must not be another user's, who is joined only when asked for by name.
            shards: how many; None: one on each node, now and later: a node that joins gets one, and what a node has
                that is told to leave is handed over first.
            path: directory, or URI of `pyarrow.fs` (`s3:`, `gs:`, `hdfs:`), where the history is kept; every node must
                reach it. What is there is brought back. None: nothing outlives the shards.
            codec: how tensors are stored there, such as `Shuffle() | Zstd()`; None: as they are. With a lossy one, such
                as `Quantize(8) | Zstd()`, a version answers exactly while it is in memory, and within the codec's
                error once it was read back.
            replicas: nodes that must have a version's bytes before it is committed with durability "memory"; at most
                one per node and per shard. With 2, the loss of a node, or of any shard's process, loses no committed
                version. Where fewer nodes are left later, copies share a node; `stats` tells what is missing.
            store_bytes: capacity of each shard in bytes, or as text such as `"200MB"` or `"4GiB"`, as the next one and
                `lag_bytes` may be. It is reserved on the shard's node. None: half of the memory that nobody has
                reserved there, shared among the shards that start on it. Memory is taken from the system as it is used.
            preallocate_bytes: memory that each shard takes from the system at the start; None: 256 MiB, or its
                capacity where that is less. 0: none (DStore-OnDemand).
            metadata_bytes: how many bytes of metadata, as JSON, a version may have. Metadata takes memory beyond
                `store_bytes`.
            keep: which versions of a name stay in memory once they are on disk, such as `KeepLast(3) | KeepBest(1)`;
                None: all, until room is needed. Others answer from disk.
            lag_bytes: bytes that may wait in each shard to be written before savers wait; None: half of `store_bytes`.
            redis: URL of a Redis server, such as `redis://host:6379/0` or `unix:///PATH`, where new versions are told
                to consumers outside the cluster (`edge.EdgeConsumer`); what an earlier repository of this name left
                there goes. No save waits for it, and when it goes away later the log says so. None: there are no such
                consumers.
            scaling: when shards join and drain by themselves, as bytes, requests and nodes change; None: as `shards`
                says.
            nodes: what a node must have to hold a shard: resources with their least amounts, labels with their values,
                such as `{"tensorvine": 1}` or `{"ray.io/market-type": "on-demand"}`; None: every node may.
            engine: what runs its actors: `"ray"`; `"dask"`, which is the current client, the scheduler of
                DASK_SCHEDULER_ADDRESS, or a `LocalCluster` that is started; a `distributed.Client`, or its scheduler's
                address. None: the one that runs in this process already; Ray, where none does.

        Raises:
            EngineUnavailableError: the engine's package is not installed.
            RepositoryNotFoundError: the cluster refuses this process, or no scheduler is at that address.
            ForeignRepositoryError: no name is given, and the one that runs is another user's.
            OptionError: `engine` is none, or None where both Ray and Dask run in this process;
                `shards` or `replicas` is not positive, there are fewer nodes or shards than `replicas`, no
                node has what `nodes` asks for, one of these, `path` or `redis` differs from the running repository's,
                an option that only means something with `path` is given without, or `redis` is no such URL.
            StoreFullError: a node has less memory that nobody has reserved than a shard is to fill.
            StorageError: `path` cannot be used, another repository runs on it, or Redis does not answer, or has a
                repository of that name that another cluster runs.
            CorruptDataError: `path` holds a repository of a newer format.
            CodecUnavailableError: `codec` or `redis` needs a package that is not installed.
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
        """Connect to a running repository, from any process of the cluster.

        Args:
            name: its name; None: `"default"`, as of `start`.
            engine: what runs it, as of `start`; no cluster is started.

        Raises:
            RepositoryNotFoundError: no cluster of that engine runs, or no repository of that name on it.
            EngineUnavailableError, OptionError: as of `start`.
            ForeignRepositoryError: no name is given, and it is another user's.
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
        """Finish pending saves and disconnect; stops what `start` started. A second call is no error.

        A client that started a repository with a path waits here until all of it is on disk, and logs what it waits for
        after 5 s. All is closed whatever a part of it raises; the first error is raised at the end. Does nothing in a
        forked child of the process that made this client.

        Args:
            timeout: seconds for pending saves and for the disk together. None: pending saves have as long as their own
                timeouts say, the disk 600 s.

        Raises:
            StorageError: the disk has refused to write for a minute; names the versions that are not on disk.
            OperationTimeoutError: it took longer to write them; names them, too.
            OptionError: the timeout is no number.
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
        """Close, and let the repository run on although `start` started it; `connect` finds it, `stop` ends it.

        On a cluster that is embedded in this process it ends with the process all the same.
        """
        if self._launched is not None:
            self._launched.leave()
        self.close()

    def stop(self, timeout: float | None = None) -> None:
        """Close, and stop the repository, also if another process started it. Its path is waited for as by `close`.

        `timeout` and errors are those of `close`. Other clients' calls raise `ShardUnavailableError` from then on.
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
            f"repository {self.name!r}: expected its name in what is sent to another process; found a client, whose "
            f"connections belong to this process: connect in the task: Repository.connect({self.name!r})"
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
        """What runs the repository's actors."""
        return self._session.engine

    @property
    def started_here(self) -> bool:
        """Whether `start` started it; False: it ran already."""
        return self._launched is not None and bool(self._launched.names)

    @property
    def has_path(self) -> bool:
        """Whether a history is kept on disk."""
        return self._session.path is not None

    @property
    def shards(self) -> tuple[int, ...]:
        """Numbers of the shards that there are; one that drains is among them until others have all that it had.

        Where the planner does not answer, as far as this client knows.
        """
        self._session.refresh(self._session.topology.version)
        return self._session.topology.alive

    def scale(self, shards: int | None, timeout: float = 120.0) -> ScaleReport:
        """Change the number of shards while reads and writes go on; nothing is lost.

        Only what must moves: a shard that joins gets its share of the names, without any bytes of tensors. One that
        drains hands its names and its tensors to the others. New shards go to the nodes that have the fewest; those
        drain first whose node leaves.

        Args:
            shards: how many there are to be from now on; as many as now is no change. None: one on each node, now and
                later.
            timeout: seconds to wait. A change that cannot begin by then is undone; one that is decided goes on.

        Raises:
            OptionError: no number of at least one is asked for, or fewer than the repository has replicas; the timeout
                is no number.
            OperationTimeoutError: it took longer than `timeout` seconds.
            StoreFullError: the shards that would stay have no room; nothing has changed.
            ShardUnavailableError: a shard could not be started; nothing has changed.
        """
        if shards is not None:
            check_count("scale: shards", shards)
        seconds = seconds_of(timeout)
        self._session.opened.check()
        report = self._session.planner.call(PlannerCalls.scale(shards, seconds), seconds + GRACE_S)
        self._session.refresh()
        return report

    def stats_by_shard(self, timeout: float = 2.0) -> dict[int, ShardStats | TensorVineError]:
        """Ask each shard what it holds, whatever becomes of the others: for who watches a repository.

        Args:
            timeout: seconds that all of them together may take to answer.

        Returns:
            Shard -> what it holds, or why it did not say so. `stats` sums up, and waits until all have answered.
        """
        return self._session.poll(ShardCalls.stats(), seconds_of(timeout))

    def flush(self, timeout: float = 60.0) -> None:
        """Wait until all that is committed now is on disk, too; after 5 s, log what is waited for.

        Raises:
            OptionError: the timeout is no number.
            StorageError: the repository has no path, or the disk has refused to write for a minute, or until the
                timeout; names the versions that are not on disk.
            OperationTimeoutError: it took longer than `timeout` seconds; names the versions, too.
            ShardUnavailableError: a shard died meanwhile, or just before: what was only in its memory is lost.
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
                "flush: expected all shards to live until all was on disk; died and started again meanwhile: "
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
                log.error("repository %r is closed before all of it is on disk: %s", self.name, exc)

    def _log_unwritten(self) -> None:
        if (unwritten := self._unwritten()) and not self._session.opened.closed:
            log.warning("repository %r: still waiting for its path: %s", self.name, "; ".join(unwritten))

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
