"""A consumer outside the cluster: it needs Redis, the shards' TCP servers and `store/`, and no engine.

Rules
- Redis says what there is and where; the bytes come over TCP, and their content hashes are checked.
- With `build`, a thread takes each newest version into the copy of the model that does not answer (`serving`).
  Whatever goes wrong there is logged once per version, and the version before goes on answering.
- A consumer that is slower than the updates finds only the newest: nothing queues.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import numpy as np

from ...store.arrays import dtype_of
from ...store.errors import (
    GraphError,
    InvalidNameError,
    ModelLostError,
    ModelNotFoundError,
    RepositoryNotFoundError,
    ShardUnavailableError,
    TensorMismatchError,
    TensorNotFoundError,
    TensorVineError,
)
from ...store.graphs.graph import ModelGraph
from ...store.refs import Model, ModelRef, check_name, split_ref
from ...store.segments.segment import SegmentId
from ...store.versions.manifest import ModelInfo, sizes_of
from ...store.waiting import Backoff, Deadline
from ..engine.opened import Opened
from ..memory.buffers import Buffers
from ..rpc.redis_connection import RedisConnection
from ..rpc.redis_keys import Address
from ..transport.frames import Received
from ..transport.targets import NewMemory
from ..transport.tcp import TcpClient, check_content
from ..updates.serving import Inference, Serving
from .listener import Listener
from .reader import Newest, Places, RedisReader

log = logging.getLogger(__name__)

RETRY_S = (0.05, 2.0)
"""Shortest and longest pause between two tries to load a version."""
FOLLOW_S = 10.0
"""How long the thread waits for news at a time."""
LOST_TRIES = 3
"""How often a version that Redis has and the shards have not is looked for again."""
_UNFIT = (GraphError, TensorMismatchError, TensorNotFoundError)


class EdgeConsumer:
    """A consumer for processes outside the cluster. It receives the versions of one model, without Ray or Dask.

    Redis announces new versions. The consumer reads their tensors from the shards over TCP and checks the tensors
    against content hashes. With `build`, a background thread loads the newest version into a model whenever a new
    version is announced, and `infer` runs the model. If a version does not fit the model, `infer` continues to use the
    previous version.

    Args:
        url: URL of the Redis server that the repository was started with.
        name: Name of the model.
        build: Function that creates the model: a Keras model, a torch module, or a callable object with the method
            `assign(tensors)`. The function is called twice, because one copy of the model serves while the other is
            updated. None means that the consumer has no model and only loads tensors.
        repository: Name of the repository.
        timeout: Seconds for each load of a version.

    Raises:
        ValueError: if `url` is not the URL of a Redis server.
        StorageError: if the Redis server does not answer when the consumer is created. If the server fails later, the
            consumer reconnects.
        CodecUnavailableError: if the package `redis` is not installed.

    >>> with EdgeConsumer("redis://localhost:6379", "ptychonn", build) as consumer:       # doctest: +SKIP
    ...     consumer.infer(batch).ref
    ModelRef('ptychonn@3')
    """

    def __init__(
        self,
        url: str,
        name: str,
        build: Callable[[], object] | None = None,
        *,
        repository: str = "default",
        timeout: float = 30.0,
    ) -> None:
        self.name = check_name(name)
        self._opened = Opened(f"EdgeConsumer of {name!r}")
        self._timeout = timeout
        self._redis = RedisConnection(url, f"EdgeConsumer of {name!r}")
        self._target = NewMemory(Buffers())
        self._clients: dict[Address, TcpClient] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._told: str | None = None
        """Start of the repository from which `wait_newer` gave a version last."""
        try:
            self._redis.run([("PING",)])
            self._serving = Serving(build, name) if build is not None else None
        except BaseException:
            self._redis.close()
            raise
        self._reader = RedisReader(self._redis, check_name(repository))
        self._listener = Listener(self._reader, name)
        self._thread = threading.Thread(target=self._follow, name="tensorvine-edge", daemon=True)
        if self._serving is not None:
            self._thread.start()

    # ---- what there is --------------------------------------------------------------------------------

    def wait_newer(self, after: int = 0, timeout: float = 30.0) -> ModelRef | None:
        """Wait for a version of the model that is newer than version number `after`.

        Redis notifies the consumer of new versions. If the repository was restarted since this method last returned a
        version, all versions of the restarted repository count as newer.

        Args:
            after: Version number. 0 accepts any version.
            timeout: Seconds to wait.

        Returns:
            The newest version, or None if no newer version was committed within `timeout`.
        """
        self._opened.check()
        newest = self._listener.wait(
            lambda found: found.version > (after if self._told in (None, found.start) else 0), timeout
        )
        if newest is None:
            return None
        self._told = newest.start
        return ModelRef(self.name, newest.version)

    def load(self, model: Model | None = None, timeout: float | None = None) -> dict[str, np.ndarray]:
        """Load the tensors of a version over TCP.

        Args:
            model: The version. None means the newest version of this consumer's model.
            timeout: Seconds to wait. None means the consumer's timeout.

        Returns:
            A mapping of tensor names to read-only arrays.

        Raises:
            ModelNotFoundError: if the version does not exist or was retired.
            RepositoryNotFoundError: if Redis contains no data of the consumer's repository.
            StorageError: if Redis does not answer.
            ShardUnavailableError, OperationTimeoutError: if a shard does not answer in time.
            ModelLostError: if bytes of the version were lost when a shard died.
            CorruptDataError: if the received bytes differ from the saved bytes.
            ClosedError: if the consumer was closed, or this process is a forked child of the process that created the
                consumer.
        """
        self._opened.check()
        name, version = self._asked(model)
        deadline = Deadline.after(timeout if timeout is not None else self._timeout)
        pauses = Backoff(*RETRY_S, closing=self._closing)
        tries = LOST_TRIES
        failure: TensorVineError
        ref = ModelRef(name, version or 1)
        while True:
            try:
                ref = ModelRef(name, version if version is not None else self._newest_of(name))
                return self._fetch(ref, deadline)[0]
            except RepositoryNotFoundError as exc:  # Redis may have lost its data: the shards will post it again
                if not self._reader.is_known:
                    raise
                failure = exc
            except ShardUnavailableError as exc:  # it may be starting again, and will then be elsewhere
                failure = exc
            except (ModelLostError, ModelNotFoundError) as exc:  # retired just now, maybe, and Redis may not know yet
                if not tries or (version is not None and isinstance(exc, ModelNotFoundError)):
                    self._reader.ask()
                    raise
                failure, tries = exc, tries - 1
            if not pauses.wait(deadline):
                self._opened.check()
                raise failure

    def info(self, model: Model | None = None) -> ModelInfo:
        """Return the parent, quality, metadata, time of the save, sizes and codec of a version.

        The call reads Redis and does not contact a shard.

        Args:
            model: The version. None means the newest version of this consumer's model.

        Raises:
            ModelNotFoundError, RepositoryNotFoundError, StorageError, ClosedError: As in `load`.
            CorruptDataError: if Redis contains invalid data for the version.
        """
        self._opened.check()
        name, version = self._asked(model)
        tries = LOST_TRIES if version is None else 0
        while True:
            ref = ModelRef(name, version if version is not None else self._newest_of(name))
            try:
                return ModelInfo.of(self._reader.posted(ref)[0].header)
            except ModelNotFoundError:  # the newest was retired just now
                if not tries:
                    raise
                tries -= 1

    def _asked(self, model: Model | None) -> tuple[str, int | None]:
        name, which = split_ref(model if model is not None else self.name)
        if isinstance(which, str):
            raise InvalidNameError(f"{name}@{which}: expected a version or a name; an EdgeConsumer has no aliases")
        return name, which

    # ---- answering ------------------------------------------------------------------------------------

    @property
    def ref(self) -> ModelRef | None:
        """The version that `infer` uses. None before the first version is loaded, or without `build`."""
        return self._serving.ref if self._serving is not None else None

    @property
    def refused(self) -> dict[ModelRef, str]:
        """The last 64 versions that the model could not load, each mapped to the reason."""
        return self._serving.refused if self._serving is not None else {}

    def infer(
        self, batch: object, timeout: float = 30.0, *, at_least: int | None = None, exactly: int | None = None
    ) -> Inference:
        """Compute the outputs for a batch with the newest loaded version.

        Args:
            batch: Input of the model.
            timeout: Seconds to wait for the first version. The method does not wait for later versions.
            at_least: Number of the oldest version that may compute the outputs. None means any version.
            exactly: Number of the only version that may compute the outputs. None means any version.

        Returns:
            The outputs, the version that computed the outputs, and the duration of the computation.

        Raises:
            ValueError: if the consumer has no `build`, or `at_least` or `exactly` is invalid.
            VersionNotServedError: if another version is in use than `at_least` or `exactly` allows. Retry later.
            OperationTimeoutError: if no version is loaded in time.
            ClosedError: if the consumer was closed, or this process is a forked child of the process that created the
                consumer.
        """
        return self._answering().infer(batch, timeout, at_least=at_least, exactly=exactly)

    def wait_for(self, version: int, timeout: float = 30.0) -> ModelRef:
        """Wait until `infer` uses version number `version` or a newer version.

        Args:
            version: Number of the version.
            timeout: Seconds to wait.

        Returns:
            The version that `infer` now uses.

        Raises:
            ValueError: if the consumer has no `build`.
            OperationTimeoutError: if `infer` does not use this version or a newer version in time.
        """
        return self._answering().wait_for(version, timeout)

    # ---- start and end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the connections and stop the threads.

        A second call, or a call in a forked child process, does nothing.
        """
        if not self._opened.close():
            return
        self._closing.set()
        self._listener.close()
        if self._serving is not None:
            self._thread.join(2 * self._timeout)
            self._serving.close()
        with self._lock:
            clients, self._clients = self._clients, {}
        for client in clients.values():
            client.close()
        self._redis.close()

    def __enter__(self) -> EdgeConsumer:
        self._opened.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- within ---------------------------------------------------------------------------------------

    def _answering(self) -> Serving:
        """Return what answers; errors as in `infer`."""
        self._opened.check()
        if self._serving is None:
            raise ValueError(f"EdgeConsumer of {self.name!r}: expected build=, for a model that answers; found none")
        return self._serving

    def _follow(self) -> None:
        """Take each newest version, as long as the consumer is open."""
        serving = self._serving
        if serving is None:
            return
        last: Newest | None = None
        failed: ModelRef | None = None
        pauses = Backoff(*RETRY_S, closing=self._closing)
        while not self._closing.is_set():
            newest = self._listener.wait(lambda found, last=last: found.is_news(last), FOLLOW_S)
            if newest is None:
                continue
            ref = ModelRef(self.name, newest.version)
            try:
                serving.take(ref, *self._fetch(ref, Deadline.after(self._timeout)))
                last = newest
                pauses.reset()
            except _UNFIT as exc:
                last = newest
                serving.refuse(ref, str(exc))
                log.warning("%s is refused, %s continues to answer: %s", ref, serving.ref, exc)
            except TensorVineError as exc:
                if ref != failed:
                    log.warning("update to %s: %s; retrying", ref, exc)
                failed = ref
                pauses.wait()
            except Exception as exc:  # a user's model may raise anything
                last = newest
                serving.refuse(ref, repr(exc))
                log.exception("%s is refused, %s continues to answer", ref, serving.ref)

    def _newest_of(self, name: str) -> int:
        version = self._reader.newest(name).version
        if version == 0:
            raise ModelNotFoundError(
                f"{self._redis.where}: expected a model named {name!r}; found no live version of it"
            )
        return version

    def _fetch(self, ref: ModelRef, deadline: Deadline) -> tuple[dict[str, np.ndarray], ModelGraph]:
        """Bring a version's tensors and its architecture."""
        posted, places = self._reader.posted(ref)
        graph = self._reader.graph(posted)
        self._drop_clients(set(places.addresses.values()))
        received = self._received(ref, sizes_of(posted.entries.values()), places, deadline)
        rows = posted.entries.items()
        check_content(((n, row.segment, row.slot, row.nbytes) for n, row in rows), received, f"TCP for {ref}")
        arrays: dict[str, np.ndarray] = {}
        for name, row in rows:
            part: Any = received[row.segment]
            arrays[name] = np.ndarray(row.shape, dtype_of(row.dtype), part.block, part.offsets[row.slot])
        return arrays, graph

    def _received(
        self, ref: ModelRef, wanted: Mapping[SegmentId, dict[int, int]], places: Places, deadline: Deadline
    ) -> dict[SegmentId, Received]:
        """Read segments from the shards that have them: those that were posted with the version, else others."""
        received: dict[SegmentId, Received] = {}
        if not places.addresses:
            raise ShardUnavailableError(f"load of {ref}: expected shards in Redis; found none")
        lacking: dict[SegmentId, dict[int, int]] = dict(wanted)
        lost: ModelLostError | None = None
        for turn in range(len(places.addresses)):
            by_shard: dict[int, dict[SegmentId, dict[int, int]]] = {}
            for segment, slots in lacking.items():
                by_shard.setdefault(places.holders(segment)[turn], {})[segment] = slots
            lacking = {}
            for shard, part in by_shard.items():
                client, left = self._client(places.addresses[shard]), deadline.left()
                try:
                    received |= client.read(part, left, f"load of {ref}", digests=True)
                except ModelLostError as exc:
                    lacking |= part
                    lost = exc
        if lacking and lost is not None:
            raise lost
        return received

    def _client(self, address: Address) -> TcpClient:
        with self._lock:
            if address not in self._clients:
                self._clients[address] = TcpClient((address.host, address.port), address.token, target=self._target)
            return self._clients[address]

    def _drop_clients(self, present: set[Address]) -> None:
        """Forget shards that have started again elsewhere."""
        with self._lock:
            gone = [self._clients.pop(address) for address in self._clients.keys() - present]
        for client in gone:
            client.close()
