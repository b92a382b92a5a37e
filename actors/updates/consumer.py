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
from functools import partial

from ...store.errors import without_frames
from ...store.refs import ModelRef, check_followed
from ...store.waiting import seconds_of
from ..client.repository import Repository
from ..engine.engine import Lifetime
from ..rpc.calls import answers, remote
from ..rpc.messages import check_transport
from .follower import KEPT, ConsumerStatus, Follower
from .remote import Remote, RemoteCalls
from .rollout import Waves
from .serving import Generate, Inference

log = logging.getLogger(__name__)

ANSWERING = 2
"""Threads that answer."""


class ConsumerCalls(RemoteCalls):
    """Calls of a consumer."""

    @remote("data", repeatable=True)
    def infer(self, batch: object, timeout: float, at_least: int | None, exactly: int | None) -> Inference:
        """Return the answer of the version in use, if the request allows it."""
        ...

    @remote("watch", repeatable=True)
    def wait_for(self, version: int, timeout: float) -> ModelRef:
        """Wait until a version, or a newer one, answers."""
        ...

    @remote("ctl", repeatable=True)
    def status(self, deliveries: int) -> ConsumerStatus:
        """Return the consumer's status, with at most so many deliveries."""
        ...

    @remote("ctl", repeatable=True)
    def pause(self, timeout: float) -> None:
        """Load no version until `resume`."""
        ...

    @remote("ctl", repeatable=True)
    def resume(self) -> None:
        """Load versions again."""
        ...


class ConsumerActor:
    """The consumer's process."""

    def __init__(
        self,
        repository: str,
        name: str,
        build: Callable[[], object],
        transport: str,
        generate: Generate | None,
        rollout: Waves | None,
    ) -> None:
        self._made: Follower | Exception
        try:
            self._made = Follower(Repository.connect(repository), name, build, transport, generate, rollout)
        except Exception as exc:
            log.exception("consumer of %r: could not start", name)
            self._made = without_frames(exc)
        self._pool = ThreadPoolExecutor(ANSWERING, thread_name_prefix="tensorvine-answer")

    @property
    def _follower(self) -> Follower:
        if isinstance(self._made, Exception):
            raise self._made
        return self._made

    @answers(ConsumerCalls.infer)
    async def infer(self, batch: object, timeout: float, at_least: int | None, exactly: int | None) -> Inference:
        infer = partial(self._follower.infer, batch, timeout, at_least=at_least, exactly=exactly)
        return await asyncio.get_running_loop().run_in_executor(self._pool, infer)

    @answers(ConsumerCalls.wait_for)
    async def wait_for(self, version: int, timeout: float) -> ModelRef:
        return await asyncio.get_running_loop().run_in_executor(None, self._follower.wait_for, version, timeout)

    @answers(ConsumerCalls.status)
    async def status(self, deliveries: int) -> ConsumerStatus:
        return self._follower.status(deliveries)

    @answers(ConsumerCalls.pause)
    async def pause(self, timeout: float) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._follower.pause, timeout)

    @answers(ConsumerCalls.resume)
    async def resume(self) -> None:
        self._follower.resume()

    @answers(ConsumerCalls.close)
    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._follower.close)
        self._pool.shutdown(wait=False)


class Consumer(Remote):
    """An actor that answers inference requests with the newest version of a model.

    A consumer continues to answer requests while it loads a new version. If versions are published faster than a
    consumer loads them, the consumer skips versions. Consumers can start and stop at any time, on any node. A consumer
    that dies is restarted. A consumer stops at `close`, at the end of the `with` block, or when the process that
    started it ends.

    A consumer refuses a version whose architecture or tensors do not fit the model. The previous version then stays in
    use, and `ConsumerStatus.refused` contains the reason. If a version cannot be fetched, the consumer retries.

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
        generate: Generate | None = None,
        rollout: Waves | None = None,
        node: str | None = None,
        gpus: float = 0.0,
    ) -> Consumer:
        """Start a consumer: an actor that answers inference requests.

        Args:
            repo: The repository that contains the model.
            name: Name of the model, which need not have a version yet. With `name@alias`, such as `"net@prod"`, the
                consumer uses the version that the alias names, see `Repository.alias`.
            build: Function that builds a model: a Keras model, a torch module, or a `Servable`. The function is called
                twice, once for each of the two copies of the model. The engine sends the function to the actor. A
                function that is defined in the main script or inside another function is sent with its code. A function
                at the top level of another module is sent by name: the actor must be able to import this module.
            transport: Transport for fetching versions: "shared" (mapped memory of shards on the consumer's node),
                "socket", "object_store", "gloo" or "nccl" (collective groups), or "files" (the repository's path).
                "auto" means mapped memory if possible, else the fastest transport according to measurements on the
                consumer's node.
            generate: Function `generate(model, batch)` that computes the outputs of a request by several calls of
                `model(inputs)`, such as one call per token. Each call uses the version that the consumer uses by then.
                None means one call: `model(batch)`. The engine sends the function as it sends `build`.
            rollout: `Waves(n)` lets at most `n` consumers of this model load a version at the same time. Pass the same
                value to all of them. None means no limit.
            node: Id of the node to run the actor on. None means any node.
            gpus: Number of GPUs to reserve for the actor. Can be a fraction of one GPU.

        Returns:
            The consumer.

        Raises:
            ValueError: if an argument is invalid.
            InvalidNameError: if the name is malformed.
            OperationTimeoutError: if the actor does not start in time, for example because no node has enough free
                resources.
            Exception: any error that `build` raises.
        """
        check_followed(name)
        where = f"Consumer.start of {name!r}"
        check_transport(transport, where)
        if not callable(build):
            raise ValueError(f"{where}: build: expected a function that makes a model; found {type(build).__name__}")
        if generate is not None and not callable(generate):
            raise ValueError(f"{where}: generate: expected a function; found {type(generate).__name__}")
        lifetime = Lifetime(outlives=False, gpus=gpus)
        arguments = {"build": build, "transport": transport, "generate": generate, "rollout": rollout}
        return cls._spawn(repo, name, ConsumerActor, arguments, node, lifetime, ConsumerCalls.status(0))

    def infer(
        self, batch: object, timeout: float = 30.0, *, at_least: int | None = None, exactly: int | None = None
    ) -> Inference:
        """Compute the model's outputs for a batch, with the newest version that the consumer has loaded.

        Args:
            batch: Input of the model, passed to the model as one argument. For a torch module: an array, a tensor, a
                nested list of numbers, or a dict or tuple of these. The input is moved to the module's device.
            timeout: Seconds to wait for the outputs, including the wait for the first version if none is loaded yet.
            at_least: Number of the oldest version that may compute the outputs. None means any version. To wait for a
                version, call `wait_for` first.
            exactly: Number of the only version that may compute the outputs. None means any version.

        Returns:
            The outputs and the version that computed the outputs.

        Raises:
            VersionNotServedError: if the consumer uses another version than `at_least` or `exactly` allows. Retry
                later, or at another consumer.
            ValueError: if both are given, or one is not a positive integer.
            OperationTimeoutError: if no version is loaded or no outputs are received in time. If versions were refused,
                the message contains the reason for the last refusal.
            ShardUnavailableError: if the consumer died. The consumer is restarted automatically.
            Exception: any error that the model raises.
        """
        seconds = seconds_of(timeout)
        return self._call(ConsumerCalls.infer(batch, seconds, at_least, exactly), seconds + 1.0)

    def wait_for(self, version: int, timeout: float = 30.0) -> ModelRef:
        """Wait until the consumer uses version number `version` or a newer version for its answers.

        Args:
            version: Number of the version.
            timeout: Seconds to wait.

        Returns:
            The version that the consumer uses for its answers.

        Raises:
            OperationTimeoutError: if the consumer does not use `version` or a newer version in time.
        """
        seconds = seconds_of(timeout)
        return self._call(ConsumerCalls.wait_for(version, seconds), seconds + 1.0)

    def pause(self, timeout: float = 30.0) -> None:
        """Stop loading versions. The consumer continues to answer with the version that it uses now.

        After this method returns, `infer` uses the same version until `resume`. A consumer that dies and is restarted
        is not paused.

        Args:
            timeout: Seconds to wait for an update in progress.

        Raises:
            OperationTimeoutError: if the update in progress does not end in time. The consumer loads no later version.
        """
        seconds = seconds_of(timeout)
        self._call(ConsumerCalls.pause(seconds), seconds + 1.0)

    def resume(self, timeout: float = 30.0) -> None:
        """Load versions again, after `pause`. The next version is the newest one."""
        self._call(ConsumerCalls.resume(), seconds_of(timeout))

    def status(self, timeout: float = 30.0) -> ConsumerStatus:
        """Return the status of the consumer, such as the version in use, the last deliveries and refused versions."""
        return self._call(ConsumerCalls.status(KEPT), seconds_of(timeout))
