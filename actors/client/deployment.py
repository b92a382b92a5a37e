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
    ClosedError,
    ForeignRepositoryError,
    OperationTimeoutError,
    OptionError,
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
from ..rpc.catalog_calls import CatalogCalls
from ..rpc.catalog_messages import CatalogStats
from ..rpc.closing import close_all
from ..rpc.messages import METADATA_BYTES
from ..shard.calls import ShardCalls
from .launch import Launched, check_count, disk_options, launch, running
from .progress import Measure, bar
from .session import CONTROL_TIMEOUT_S, LOOK_S, Session

log = logging.getLogger(__name__)

DEFAULT_NAME = "default"
"""Of a repository that is started or connected to without a name."""
GRACE_S = 5.0
"""How much longer than the planner a client waits for it: it knows what is late."""
FLUSH_TIMEOUT_S = 600.0
"""How long `close` waits for the disk, where it is not told."""
PROGRESS_S = 1.0
"""How long the shards may take to answer for a progress bar."""
QUIET_S = 5.0
"""How long a flush waits before it logs what for."""

Closes = tuple[Callable[[], None], ...]


class Deployment:
    """Base class of `Repository`, with the methods that start, scale and stop a repository.

    Args:
        engine: The engine that runs the repository's actors.
        name: Name of the repository.
        launched: Actors that this client started. None means that the client was created by `connect`.
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
        """Start a repository, or join the running repository of the same name.

        If a cluster is already running, the repository uses this cluster. Otherwise the call starts a cluster in this
        process. If the call joins a running repository, `close` disconnects and does not stop the repository. The
        operating-system user who starts a repository owns the repository.

        Args:
            name: Name of the repository. Its actors are named `NAME/catalog`, `NAME/planner`, `NAME/shard-0`, ... in
                the namespace `tensorvine`. None means `"default"`. The name is required to join another user's
                repository.
            shards: Number of shards. None means one shard per node, also after nodes join or leave.
            path: Directory or URI (`s3:`, `gs:`, `abfs:`, `hdfs:`, or `fsspec+SCHEME:`) where versions are stored on
                disk. Versions that are already stored there are restored. Every node must have access to this path.
                Percent-encode secrets in a URI: `@` as `%40`, `/` as `%2F`. None stores versions in memory only.
            codec: Codec for the tensors on disk, such as `Shuffle() | Zstd()`. A lossy codec, such as
                `Quantize(8) | Zstd()`, changes only tensors that are read from disk: they differ from the saved tensors
                by at most the codec's error. None means no codec.
            replicas: Number of nodes that must hold a version before the version is committed with
                `durability="memory"`. The value must not exceed the number of nodes or the number of shards. With 2, no
                committed version is lost when one node or one shard process fails. If fewer than `replicas`
                nodes remain, several copies of a version share a node, and `CatalogStats.replicas_missing` is above 0.
            store_bytes: Capacity of each shard in bytes, or as text such as `"200MB"` or `"4GiB"`. The capacity is
                reserved on the shard's node, but beyond `preallocate_bytes` the shard allocates memory only on demand.
                None means half of the node's unreserved memory, shared among the shards that start on the node.
            preallocate_bytes: Memory that each shard allocates at the start, in bytes or as text. None means 256 MiB
                or the capacity, whichever is smaller. 0 disables preallocation (DStore-OnDemand in the DStore paper).
            metadata_bytes: Maximum size of one version's metadata as JSON, in bytes or as text. A save with larger
                metadata raises `OptionError`. Metadata uses memory in addition to `store_bytes`.
            keep: Policy that selects the versions that stay in memory after they are on disk, such as
                `KeepLast(3) | KeepBest(1)`. Other versions are read from disk. None keeps all versions in memory until
                the memory is needed.
            lag_bytes: Maximum size of each shard's queue of disk writes, in bytes or as text. Saves wait while the
                queue is full. None means half of the shard's capacity.
            redis: URL of a Redis server (`redis://`, `rediss://` or `unix:///PATH`) that announces new versions to
                consumers outside the cluster (`EdgeConsumer`). Data of earlier repositories of this name is deleted
                from the server. Saves do not wait for the server. If the server fails after the start, a warning is
                logged.
            scaling: Policy that adds and drains shards according to the stored bytes, the request rate and the number
                of nodes. None means that only `shards` and the method `scale` determine the number of shards.
            nodes: Mapping with the requirements that a node must meet to hold a shard. The name of a resource is mapped
                to the minimum amount, such as `{"tensorvine": 1}`. The name of a label is mapped to the required value,
                such as `{"ray.io/market-type": "on-demand"}`. None allows every node.
            engine: `"ray"`, `"dask"` (Dask's current client, else the scheduler at DASK_SCHEDULER_ADDRESS, else a new
                `LocalCluster`), a `distributed.Client`, or the address of a Dask scheduler. None means the engine that
                is already running in this process, or Ray if no engine is running.

        Raises:
            EngineUnavailableError: if the engine's package is not installed.
            RepositoryNotFoundError: if this process cannot connect to the running cluster, or no Dask scheduler answers
                at the given address.
            ForeignRepositoryError: if `name` is None and another user owns the running repository.
            OptionError: if an option is invalid or does not fit the cluster; if `codec`, `keep` or `lag_bytes` is given
                without `path`; if `engine` is None and both Ray and Dask run in this process; or if `shards`, `path`,
                `replicas`, `nodes` or `redis` is given and differs from the value in the running repository.
            StoreFullError: if a node has too little unreserved memory for a shard.
            StorageError: if `path` cannot be used or belongs to another running repository, or if Redis does not answer
                or is in use by a repository of the same name in another cluster.
            CorruptDataError: if the repository in `path` was written in a newer format.
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
        """Connect to a running repository from any process of the cluster.

        Call this method in each process that uses the repository, because a client cannot be sent to another process.
        The method does not start a cluster.

        Args:
            name: Name of the repository. None means `"default"`. The name is required to connect to another user's
                repository.
            engine: Engine that runs the repository, as in `start`.

        Raises:
            RepositoryNotFoundError: if this process cannot connect to a running cluster, or if the repository does not
                run on the cluster.
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
        """Finish pending saves and disconnect. If this client started the repository, also stop the repository.

        If this client started the repository with a path, the call waits until all committed versions are on disk
        before it stops the repository. After 5 s, the call logs the versions that are not on disk yet. If `start` also
        started the cluster, `close` stops the cluster. If the process ends without `close`, the repository ends only if
        its cluster was started in this process.

        If a step of `close` fails, the remaining steps still run, and the first error is raised at the end. A second
        call, or a call in a forked child process, does nothing. After `close`, calls of this client to the repository
        raise `ClosedError`.

        Args:
            timeout: Total number of seconds to wait for pending saves and for writes to disk. In addition, each save
                has its own timeout, and the wait for writes to disk is at most 600 s. With None, only these two limits
                apply.

        Raises:
            StorageError: if versions cannot be written to disk, as in `flush`. The message names the versions.
            OperationTimeoutError: if committed versions are not on disk in time. The message names these versions.
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
        """Disconnect without stopping the repository, even if this client started the repository.

        Other processes can still connect to the repository and stop it. However, if this process started the cluster,
        the repository ends when this process ends.
        """
        if self._launched is not None:
            self._launched.leave()
        self.close()

    def stop(self, timeout: float | None = None) -> None:
        """Stop the repository and disconnect, even if another process started the repository.

        Like `close`, this method finishes the pending saves of this client and waits until all committed versions are
        on disk. Afterwards, calls of other clients raise `ShardUnavailableError` or `RepositoryNotFoundError`.

        Args:
            timeout: Total number of seconds to wait for pending saves and for writes to disk. For None, see `close`.

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
        """Whether this client started the repository. False means that the repository was already running."""
        return self._launched is not None and bool(self._launched.names)

    @property
    def has_path(self) -> bool:
        """Whether the repository stores its versions on disk (`path` was passed to `start`)."""
        return self._session.path is not None

    @property
    def shards(self) -> tuple[int, ...]:
        """Numbers of the current shards, as reported by the catalog (the actor that keeps all metadata).

        A number is never used twice. A draining shard is included until all its data is on other shards. If the catalog
        does not answer, the last numbers that this client received are returned.
        """
        self._session.refresh(LOOK_S)
        return self._session.shards

    def scale(self, shards: int | None, timeout: float = 120.0) -> ScaleReport:
        """Change the number of shards while loads and saves continue. No data is lost.

        New shards receive tensors of the other shards later, in the background, if that balances the use of memory. A
        draining shard copies its tensors to the other shards. Shards drain one at a time. Shards on nodes that are
        leaving the cluster drain first. New shards start on the nodes with the fewest shards.

        Args:
            shards: The new number of shards. None means one shard per node, also after nodes join or leave.
            timeout: Seconds to wait. The change consists of steps: each step adds one or more shards or drains one
                shard. At the timeout, the current step is undone if it is still starting shards or copying tensors.
                Otherwise, it is completed in the background. No further step begins.

        Returns:
            A report of the numbers of shards, of the tensor bytes that moved, and of the duration.

        Raises:
            OptionError: if `shards` is less than 1 or less than the repository's `replicas`, if `shards` is None in a
                repository with `scaling`, or if `timeout` is not a number.
            OperationTimeoutError: if the change takes longer than `timeout`.
            StoreFullError: if the remaining shards or the node of a new shard lack memory. The failed step is undone.
            ShardUnavailableError: if a shard could not be started. The failed step is undone.
        """
        if shards is not None:
            check_count("scale: shards", shards)
        seconds = seconds_of(timeout)
        self._session.opened.check()
        with bar(f"scale of {self.name}", "bytes", measure=self._drained()):
            report = self._session.planner.call(PlannerCalls.scale(shards, seconds), seconds + GRACE_S)
        self._session.refresh()
        return report

    def catalog_stats(self, timeout: float = 2.0) -> CatalogStats:
        """Return the statistics of the catalog, for monitoring. Unlike `stats`, this method asks no shard.

        Args:
            timeout: Seconds to wait.
        """
        return self._session.ask(CatalogCalls.stats(), seconds_of(timeout))

    def stats_by_shard(self, timeout: float = 2.0) -> dict[int, ShardStats | TensorVineError]:
        """Return the statistics of each shard, for monitoring.

        Unlike `stats`, this method does not fail when some shards do not answer.

        Args:
            timeout: Seconds to wait for all shards together.

        Returns:
            A mapping of shard numbers to statistics. The number of a shard that does not answer in time is mapped to
            an error that states the reason.
        """
        return self._session.poll(ShardCalls.stats(), seconds_of(timeout))

    def flush(self, timeout: float = 60.0) -> None:
        """Wait until all versions that were committed before the call are on disk.

        After 5 s, the call logs the versions that are not on disk yet.

        Args:
            timeout: Seconds to wait.

        Raises:
            OptionError: if the timeout is not a number.
            StorageError: if the repository has no path; if writes to disk have failed for a minute, or were failing at
                the timeout; or if a version cannot be written because some of its data is lost. The message names the
                versions that are not on disk.
            OperationTimeoutError: if the wait takes longer than `timeout`. The message names the versions that are not
                on disk.
        """
        seconds = seconds_of(timeout)
        waiting = threading.Timer(QUIET_S, self._log_unwritten)
        waiting.daemon = True
        waiting.start()
        try:
            with bar(f"flush of {self.name}", "bytes", measure=self._written()):
                self._session.ask(CatalogCalls.flush(seconds), seconds + CONTROL_TIMEOUT_S)
        finally:
            waiting.cancel()

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

    def _written(self) -> Measure:
        """Return a function that measures the bytes of the write queues that were written since this call."""
        most = 0

        def measure() -> tuple[float, float]:
            nonlocal most
            left = sum(one.bytes_unwritten for one in self._answered())
            most = max(most, left)
            return most - left, most

        return measure

    def _drained(self) -> Measure:
        """Return a function that measures the bytes that have left the draining shards."""
        most: dict[int, int] = {}

        def measure() -> tuple[float, float | None]:
            self._session.refresh()
            left = {one.shard: one.bytes_memory for one in self._answered()}
            for shard in self._session.topology.leaving:
                most[shard] = max(most.get(shard, 0), left.get(shard, 0))
            total = sum(most.values())
            return total - sum(min(left.get(shard, 0), most[shard]) for shard in most), total or None

        return measure

    def _answered(self) -> list[ShardStats]:
        return [one for one in self.stats_by_shard(PROGRESS_S).values() if not isinstance(one, TensorVineError)]

    def _log_unwritten(self) -> None:
        """Say what is not written yet: a flush that may not wait names it."""
        try:
            self._session.ask(CatalogCalls.flush(0.0), GRACE_S)
        except ClosedError:
            return
        except TensorVineError as exc:
            log.warning("repository %r: still waiting for writes to its path: %s", self.name, exc)

    def _stop_launched(self) -> None:
        if self._launched is not None:
            self._launched.stop()
