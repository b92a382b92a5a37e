"""A model that answers and follows a name or an alias: it takes each new version while it goes on answering.

Rules
- One thread waits for versions and takes the newest; what came between is skipped. No answer waits for an update.
- A version that cannot be had or does not fit is logged, counted by name, and left; the one before goes on answering.
- The way by which bytes come is the planner's choice, from what all consumers of a node measured, unless it was given.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median

from ...store import traces
from ...store.errors import ModelNotFoundError, OperationTimeoutError, TensorVineError
from ...store.metrics import ANSWER, CONSUMERS, FETCH, LAG, PUSH, REFUSED, STALENESS, SUPERSEDED, SWAP
from ...store.refs import ModelRef, split_ref
from ...store.waiting import Backoff
from ..client.fetch.transports import AUTO, SHARED
from ..client.repository import Repository
from ..engine.opened import Opened
from ..planner.calls import PlannerCalls
from ..planner.streams import Delivered
from ..rpc.channel import Answer
from .rollout import Turns, Waves
from .serving import Generate, Inference, Serving

log = logging.getLogger(__name__)

POLL_S = 30.0
"""How long one long poll lasts."""
RETRY_S = (0.1, 5.0)
"""Shortest and longest pause between two tries to learn of a version."""
FETCH_TIMEOUT_S = 120.0
KEPT = 1024
"""Deliveries that are remembered."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One version that a consumer has fetched and loaded, with the delivery times."""

    ref: ModelRef
    """The version that was fetched."""
    notified_at: float
    """Unix time in seconds when the consumer was notified of the version, by the clock of the consumer's machine."""
    fetch_s: float
    """Seconds from the notification until the bytes were received or mapped."""
    swap_s: float
    """Seconds from the end of the fetch until the consumer began to use the version for its answers.

    A consumer has two copies of the model. In this period, the consumer checks that the version fits the model, loads
    the tensors into the inactive copy, and activates this copy.
    """
    transport: str
    """Transport that delivered most of the received bytes. "shared" if all bytes were mapped from shared memory."""
    nbytes: int
    """Number of received bytes, without mapped bytes. If `transport` is "shared", the number of mapped bytes."""

    @property
    def swapped_at(self) -> float:
        """Unix time in seconds when the consumer began to use the version, by the clock of the consumer's machine."""
        return self.notified_at + self.fetch_s + self.swap_s


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
    """The status of a consumer, returned by `Consumer.status`."""

    ref: ModelRef | None
    """The version that the consumer uses for its answers. None until the consumer has loaded a version."""
    deliveries: tuple[Delivery, ...]
    """The last 1,024 deliveries."""
    answered: int
    """Number of requests that the consumer answered."""
    skipped: int
    """Number of versions that were not fetched because a newer version existed."""
    refused: dict[ModelRef, str]
    """Mapping of the last 64 refused versions to the reason for each refusal.

    A version is refused if it does not fit the model, or cannot be loaded into the model because of another error.
    """
    paused: bool
    """Whether the consumer loads no versions, because of `Consumer.pause`."""


class Follower:
    """Follows one name of a repository.

    Args:
        repo: the repository; it is closed with this.
        name: the model's name, or `name@alias`.
        build: makes a model, see `Serving`.
        transport: the way by which bytes come; "auto": the planner's choice.
        generate: see `Serving`.
        rollout: limits how many consumers of the name update at once.
    """

    def __init__(
        self,
        repo: Repository,
        name: str,
        build: Callable[[], object],
        transport: str = "auto",
        generate: Generate | None = None,
        rollout: Waves | None = None,
    ) -> None:
        self._opened = Opened(f"consumer of {name!r}")
        self._repo = repo
        self._name = name
        self._model, which = split_ref(name)
        self._follows_alias = which is not None
        self._transport = transport
        self._way = transport
        self._serving = Serving(build, name, generate)
        self._lock = threading.Lock()
        self._deliveries: deque[Delivery] = deque(maxlen=KEPT)
        self._answers_s: deque[float] = deque(maxlen=64)
        self._answered = 0
        self._skipped = 0
        self._advice: Answer[str] | None = None
        self._announced: tuple[ModelRef, float] | None = None
        """The newest version that was announced and is not in use, and since when one is, by `time.monotonic`."""
        self._counts = repo._session.counts
        for gauge, value in ((CONSUMERS, lambda: 1.0), (LAG, self._lag), (STALENESS, self._staleness_s)):
            self._counts.show(gauge, value)
        repo._session.keep_alive()
        self._closing = threading.Event()
        self._resumed = threading.Event()
        self._resumed.set()
        self._swapping = threading.Lock()
        """Held while a version is written to the model."""
        self._turns = Turns(repo._session.planner, name, rollout, self._closing) if rollout is not None else None
        self._thread = threading.Thread(target=self._follow, name="tensorvine-update", daemon=True)
        self._thread.start()

    def infer(
        self, batch: object, timeout: float = 30.0, *, at_least: int | None = None, exactly: int | None = None
    ) -> Inference:
        """Answer with the newest version that arrived; errors as in `Serving.infer`, and ClosedError after `close`."""
        self._opened.check()
        answer = self._serving.infer(batch, timeout, at_least=at_least, exactly=exactly)
        self._counts.observe(ANSWER, answer.seconds)
        with self._lock:
            self._answered += 1
            self._answers_s.append(answer.seconds)
        return answer

    def wait_for(self, version: int, timeout: float) -> ModelRef:
        """Wait until a version or a newer one answers; errors as in `Serving.wait_for` and `infer`."""
        self._opened.check()
        return self._serving.wait_for(version, timeout)

    def status(self, deliveries: int = KEPT) -> ConsumerStatus:
        """Return the consumer's status, with at most so many deliveries."""
        with self._lock:
            latest = tuple(self._deliveries)[max(len(self._deliveries) - deliveries, 0) :]
            refused, paused = self._serving.refused, not self._resumed.is_set()
            return ConsumerStatus(self._serving.ref, latest, self._answered, self._skipped, refused, paused)

    def pause(self, timeout: float) -> None:
        """Load no version until `resume`. Returns when an update that is being written to the model has ended.

        Raises:
            OperationTimeoutError: it has not ended in time. No later version is loaded.
        """
        self._opened.check()
        self._resumed.clear()
        if not self._swapping.acquire(timeout=timeout):
            raise OperationTimeoutError(f"pause of {self._name!r}: expected the update to end within {timeout} s")
        self._swapping.release()

    def resume(self) -> None:
        """Load versions again."""
        self._opened.check()
        self._resumed.set()

    def close(self) -> None:
        """Stop following and answering. Does nothing if it was closed, or in a forked child."""
        if not self._opened.close():
            return
        self._closing.set()
        self._resumed.set()
        self._repo.close()
        self._serving.close()

    def _follow(self) -> None:
        """Take versions until it is closed."""
        after, failed, pauses = 0, False, Backoff(*RETRY_S, closing=self._closing)
        while not self._closing.is_set():
            if not self._resumed.wait(POLL_S):
                continue
            try:
                newest = self._repo.wait_newer(self._name, after, POLL_S)
                if newest is not None:
                    self._announced = (newest, self._announced[1] if self._announced else time.monotonic())
                    after = newest.version if self._update(newest, after) else after
                failed = False
                pauses.reset()
            except ModelNotFoundError as exc:
                log.info("%s: a version was retired before it was fetched: %s", self._name, exc)
            except Exception as exc:  # noqa: BLE001  logged; whatever it is, later versions may be had
                self._counts.failed("update", exc)
                if not failed and not self._closing.is_set():
                    log.warning(
                        "%s: the update failed, retrying; the previous version continues to answer: %s", self._name, exc
                    )
                failed = True
                pauses.wait()

    def _update(self, ref: ModelRef, after: int) -> bool:
        """Load a version when it is this consumer's turn. False: the consumer was paused first."""
        with self._turns.turn() if self._turns is not None else nullcontext():
            return self._take(ref, after)

    def _take(self, ref: ModelRef, after: int) -> bool:
        """Bring a version and let it answer, or refuse it. False: the consumer was paused first."""
        notified_at, begun = time.time(), time.perf_counter()
        reader = self._repo._reader
        way, self._way = self._way, self._transport  # a way that fails is not asked for again
        loaded = reader.fetch(ref, transport=way, verify=True, timeout=FETCH_TIMEOUT_S)
        self._way = way
        fetched = time.perf_counter()
        try:
            graph = self._repo._catalog.graph_of(ref)
            with self._swapping, traces.span("swap") as traced:
                if not self._resumed.is_set():
                    return False
                if traced is not None:
                    traces.note(version=str(ref))
                self._serving.take(ref, loaded.arrays, graph)
        except (KeyError, ValueError) as exc:
            self._refuse(ref, exc)
            return True
        except OperationTimeoutError:
            raise  # tried again
        except Exception as exc:
            log.exception("%s: the model could not be updated", ref)
            self._refuse(ref, exc)
            return True
        ended = time.perf_counter()
        far = {name: nbytes for name, nbytes in loaded.transports.items() if name != SHARED}
        way = max(far, key=far.__getitem__) if far else SHARED
        nbytes = sum(far.values()) if far else loaded.transports.get(SHARED, 0)
        delivery = Delivery(ref, notified_at, fetched - begun, ended - fetched, way, nbytes)
        skipped = max(ref.version - after - 1, 0) if after and not self._follows_alias else 0
        with self._lock:
            self._deliveries.append(delivery)
            self._skipped += skipped
        self._announced = None
        if after and not self._follows_alias:  # else it was there before the consumer, or before the alias moved
            self._counts.observe(PUSH, notified_at - loaded.created_ns / 1e9)
        self._counts.observe(FETCH, delivery.fetch_s)
        self._counts.observe(SWAP, delivery.swap_s)
        self._counts.add(SUPERSEDED, skipped)
        self._report(delivery, reader.far_transports if far else (SHARED,))
        return True

    def _lag(self) -> float:
        """Return by how many versions the one in use is behind the newest announced one."""
        announced, used = self._announced, self._serving.ref
        if announced is None:
            return 0.0
        return float(max(announced[0].version - (used.version if used is not None else 0), 0))

    def _staleness_s(self) -> float:
        announced = self._announced
        return time.monotonic() - announced[1] if announced is not None else 0.0

    def _refuse(self, ref: ModelRef, exc: Exception) -> None:
        self._counts.add(REFUSED)
        log.error(
            "%s is refused, %s continues to answer; publish a version that fits the model of build=: %s",
            ref,
            self._serving.ref,
            exc,
        )
        self._serving.refuse(ref, str(exc) or repr(exc))

    def _report(self, delivery: Delivery, ways: tuple[str, ...]) -> None:
        """Report the duration of the update to the planner; its answer names the best transport."""
        with self._lock:
            inference_s = median(self._answers_s) if self._answers_s else None
        seconds = delivery.fetch_s + delivery.swap_s
        told = Delivered(
            ref=str(delivery.ref),
            seconds=seconds,
            fetch_s=delivery.fetch_s,
            nbytes=delivery.nbytes,
            way=delivery.transport,
            ways=ways,
            inference_s=inference_s,
            node=self._repo.engine.this_node(),
        )
        planner = self._repo._session.planner
        try:
            if self._advice is not None and self._transport == AUTO:
                advised = self._advice.result(0.0)
                self._way = AUTO if advised == SHARED else advised
            self._advice = planner.send(PlannerCalls.delivered(self._model, told))
        except OperationTimeoutError as exc:  # of the advice: it is asked for again
            log.info("%s: the planner could not be notified of %s: %s", self._name, delivery.ref, exc)
        except TensorVineError as exc:
            self._advice = None  # it died with the planner, and would fail each time
            log.info("%s: the planner could not be notified of %s: %s", self._name, delivery.ref, exc)
