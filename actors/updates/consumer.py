"""A model that answers, as an actor (Viper's consumer).

Rules
- Answers run in threads of their own, beside the one that takes versions: see `follower`.
- A consumer that dies is started again and takes the newest version. It ends with the process that started it.
- An error of its start, such as one that `build` raises, is raised by each call: an engine would report a dead actor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ...store.errors import without_frames
from ...store.refs import ModelRef, check_name
from ...store.waiting import seconds_of
from ..client.repository import Repository
from ..engine.engine import Lifetime
from ..rpc.calls import answers, remote
from ..rpc.messages import check_transport
from .follower import ConsumerStatus, Follower
from .remote import Remote, RemoteCalls
from .serving import Inference

log = logging.getLogger(__name__)

ANSWERING = 2
"""Threads that answer."""


class ConsumerCalls(RemoteCalls):
    """Calls of a consumer."""

    @remote("data", repeatable=True)
    def infer(self, batch: object, timeout: float) -> Inference:
        """Answer with the newest version."""
        ...

    @remote("watch", repeatable=True)
    def wait_for(self, version: int, timeout: float) -> ModelRef:
        """Wait until a version or a newer one answers."""
        ...

    @remote("ctl", repeatable=True)
    def status(self) -> ConsumerStatus:
        """Tell how it does."""
        ...


class ConsumerActor:
    """The consumer's process."""

    def __init__(self, repository: str, name: str, build: Callable[[], object], transport: str) -> None:
        self._made: Follower | Exception
        try:
            self._made = Follower(Repository.connect(repository), name, build, transport)
        except Exception as exc:
            log.exception("consumer of %r: it could not start", name)
            self._made = without_frames(exc)
        self._pool = ThreadPoolExecutor(ANSWERING, thread_name_prefix="tensorvine-answer")

    @property
    def _follower(self) -> Follower:
        if isinstance(self._made, Exception):
            raise self._made
        return self._made

    @answers(ConsumerCalls.infer)
    async def infer(self, batch: object, timeout: float) -> Inference:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._follower.infer, batch, timeout)

    @answers(ConsumerCalls.wait_for)
    async def wait_for(self, version: int, timeout: float) -> ModelRef:
        return await asyncio.get_running_loop().run_in_executor(None, self._follower.wait_for, version, timeout)

    @answers(ConsumerCalls.status)
    async def status(self) -> ConsumerStatus:
        return self._follower.status()

    @answers(ConsumerCalls.close)
    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._follower.close)
        self._pool.shutdown(wait=False)


class Consumer(Remote):
    """A running consumer, as its starter sees it. Any number may run, on any node, and start and close at any time.

    >>> with Consumer.start(repo, "net", build) as consumer:      # doctest: +SKIP
    ...     answer = consumer.infer(batch)
    ...     answer.outputs, answer.ref
    """

    role = "consumer"

    @classmethod
    def start(
        cls,
        repo: Repository,
        name: str,
        build: Callable[[], object],
        *,
        transport: str = "auto",
        node: str | None = None,
        gpus: float = 0.0,
    ) -> Consumer:
        """Start a consumer in an actor.

        Args:
            repo: the repository whose versions it takes.
            name: the model's name; its first version may be yet to come.
            build: makes a model, twice: Keras, PyTorch, or an object with `assign(tensors)` and a call. It is sent
                to the actor by the engine, see `Producer.start`.
            transport: the way by which bytes come: "auto", "shared", "socket", "object_store", "gloo", "nccl" or
                "files".
            node: id of the node to run on; None: any.
            gpus: GPUs that it takes.

        Raises:
            ValueError, InvalidNameError: an argument is wrong.
            OperationTimeoutError: the actor did not start in time: no node has these resources.
            Exception: whatever `build` raises.
        """
        check_name(name)
        where = f"Consumer.start of {name!r}"
        check_transport(transport, where)
        if not callable(build):
            raise ValueError(f"{where}: build: expected a function that makes a model; found {type(build).__name__}")
        lifetime = Lifetime(outlives=False, gpus=gpus)
        arguments = {"build": build, "transport": transport}
        return cls._spawn(repo, name, ConsumerActor, arguments, node, lifetime, ConsumerCalls.status())

    def infer(self, batch: object, timeout: float = 30.0) -> Inference:
        """Answer with the newest version that has arrived.

        Args:
            batch: what the model takes.
            timeout: seconds, of which the first answer may wait all for the first version.

        Raises:
            OperationTimeoutError: there is no version yet, or no answer in time.
            ShardUnavailableError: the consumer died; it is being started again.
        """
        seconds = seconds_of(timeout)
        return self._call(ConsumerCalls.infer(batch, seconds), seconds + 1.0)

    def wait_for(self, version: int, timeout: float = 30.0) -> ModelRef:
        """Wait until `version` or a newer one answers, and give it.

        Raises:
            OperationTimeoutError: it does not yet.
        """
        seconds = seconds_of(timeout)
        return self._call(ConsumerCalls.wait_for(version, seconds), seconds + 1.0)

    def status(self, timeout: float = 30.0) -> ConsumerStatus:
        """Tell how it does."""
        return self._call(ConsumerCalls.status(), seconds_of(timeout))
