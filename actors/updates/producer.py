"""A training as an actor: it publishes while it trains (Viper's producer).

Rules
- The training runs in a thread of its own, so that the actor answers while it trains.
- A producer ends with the process that started it, and is not started again when it dies: what of its training can be
  taken up again, only the training knows. An update under way when it dies is dropped by the shard; versions stay.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

from ...store.errors import OperationTimeoutError, without_frames
from ...store.refs import check_name
from ...store.waiting import seconds_of
from ..client.repository import Repository
from ..engine.engine import Lifetime
from ..rpc.calls import answers, remote
from ..rpc.messages import check_transport
from .publisher import Publisher, PublishReport
from .remote import Remote, RemoteCalls
from .trigger import ScheduleLike, trigger_of

log = logging.getLogger(__name__)

ANSWER_S = 5.0
"""How much longer than the training the answer may take."""

Train = Callable[[Publisher], object]
"""A training: it calls `publisher.step` after each iteration, or hands `publisher.callback()` to `model.fit`."""


class ProducerCalls(RemoteCalls):
    """Calls of a producer."""

    @remote("watch", repeatable=True)
    def result(self, timeout: float) -> tuple[bool, object]:
        """Return (whether it ended, what it gave); raises what it raised."""
        ...

    @remote("ctl", repeatable=True)
    def report(self) -> PublishReport:
        """Return a report of the updates so far."""
        ...


class ProducerActor:
    """The training's process."""

    def __init__(self, repository: str, name: str, train: Train, options: dict[str, Any]) -> None:
        self._ended = threading.Event()
        self._result: object = None
        self._error: BaseException | None = None
        self._name = name
        self._made: Publisher | Exception
        try:
            self._repo = Repository.connect(repository)
            self._made = Publisher(self._repo, name, **options)
        except Exception as exc:
            log.exception("producer of %r: could not start", name)
            self._made = without_frames(exc)
            return
        self._thread = threading.Thread(target=self._train, args=(train,), name="tensorvine-train", daemon=True)
        self._thread.start()

    @property
    def _publisher(self) -> Publisher:
        if isinstance(self._made, Exception):
            raise self._made
        return self._made

    def _train(self, train: Train) -> None:
        try:
            self._result = train(self._publisher)
            self._publisher.finish()
        except BaseException as exc:  # handed to the caller that asks for the result
            log.exception("producer of %r: the training failed", self._name)
            self._error = exc
        finally:
            self._ended.set()

    @answers(ProducerCalls.result)
    async def result(self, timeout: float) -> tuple[bool, object]:
        ended = await asyncio.get_running_loop().run_in_executor(None, self._ended.wait, timeout)
        if self._error is not None:
            raise self._error
        return ended, self._result

    @answers(ProducerCalls.report)
    async def report(self) -> PublishReport:
        return await asyncio.get_running_loop().run_in_executor(None, self._publisher.report)

    @answers(ProducerCalls.close)
    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    def _close(self) -> None:
        self._publisher.close()
        self._repo.close()


class Producer(Remote):
    """An actor that trains a model and publishes versions of the model.

    A producer stops at `close`, at the end of the `with` block, or when the process that started it ends. A producer
    that dies is not restarted.

    >>> with Producer.start(repo, "net", train) as producer:      # doctest: +SKIP
    ...     producer.result(timeout=3600)
    """

    role = "producer"

    @classmethod
    def start(
        cls,
        repo: Repository,
        name: str,
        train: Train,
        *,
        schedule: ScheduleLike = None,
        transport: str = "auto",
        synchronous: bool = False,
        keep: int | None = None,
        node: str | None = None,
        gpus: float = 0.0,
    ) -> Producer:
        """Start a producer: an actor that runs a training function.

        Args:
            repo: The repository to publish to.
            name: Name of the model.
            train: Function `(publisher) -> result` that trains the model. The function must call `Publisher.step` after
                each iteration, or pass `Publisher.callback()` to `model.fit`. The engine sends the function to the
                actor. If the actor cannot import the function's module, define the function in the main script or
                inside another function.
            schedule, transport, synchronous, keep: As in `Publisher`.
            node: Id of the node to run the actor on. None means any node.
            gpus: Number of GPUs to reserve for the actor. Can be a fraction of one GPU.

        Returns:
            The producer.

        Raises:
            ValueError: if an argument is invalid.
            InvalidNameError: if the name is malformed.
            OperationTimeoutError: if the actor does not start in time, for example because no node has enough free
                resources.
        """
        check_name(name)
        where = f"Producer.start of {name!r}"
        trigger_of(schedule, where)
        check_transport(transport, where)
        if not callable(train):
            raise ValueError(f"{where}: train: expected a function of a publisher; found {type(train).__name__}")
        options = {"schedule": schedule, "transport": transport, "synchronous": synchronous, "keep": keep}
        lifetime = Lifetime(outlives=False, restarts=False, gpus=gpus)
        arguments = {"train": train, "options": options}
        return cls._spawn(repo, name, ProducerActor, arguments, node, lifetime, ProducerCalls.report())

    def result(self, timeout: float) -> Any:
        """Wait until the training function and the last update have ended, and return the function's result.

        Args:
            timeout: Seconds to wait.

        Returns:
            The return value of `train`.

        Raises:
            OperationTimeoutError: if the training function and the last update do not end within `timeout` seconds. The
                producer continues.
            ShardUnavailableError: if the actor died.
            Exception: any error that `train` raises. The actor's log contains the traceback.
        """
        seconds = seconds_of(timeout)
        ended, result = self._call(ProducerCalls.result(seconds), seconds + ANSWER_S)
        if not ended:
            raise OperationTimeoutError(
                f"producer of {self.name!r}: expected it to end within {timeout} s; it continues"
            )
        return result

    def report(self, timeout: float = 30.0) -> PublishReport:
        """Return a report on the updates made so far."""
        return self._call(ProducerCalls.report(), seconds_of(timeout))
