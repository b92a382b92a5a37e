"""A model that answers and follows a name: it takes each new version while it goes on answering.

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
from dataclasses import dataclass
from statistics import median

from ...store.errors import ModelNotFoundError, OperationTimeoutError, TensorVineError
from ...store.refs import ModelRef
from ...store.waiting import Backoff
from ..client.fetch.transports import AUTO, SHARED
from ..client.repository import Repository
from ..planner.calls import PlannerCalls
from ..planner.streams import Delivered
from ..rpc.channel import Answer
from .serving import Inference, Serving

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
    """One version that was taken."""

    ref: ModelRef
    told_at: float
    """When this consumer heard of it, in seconds since the epoch by its machine's clock."""
    fetch_s: float
    """Until its bytes were here."""
    swap_s: float
    """From then until it answered: checks, filling the model, the swap."""
    way: str
    nbytes: int

    @property
    def swapped_at(self) -> float:
        """When it began to answer."""
        return self.told_at + self.fetch_s + self.swap_s


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
    """How a consumer does."""

    ref: ModelRef | None
    """The version that answers; None before the first."""
    deliveries: tuple[Delivery, ...]
    """The last 1024."""
    answered: int
    """Answers given."""
    skipped: int
    """Versions that a newer one overtook."""
    refused: dict[ModelRef, str]
    """Versions that were not taken, and why."""


class Follower:
    """Follows one name of a repository.

    Args:
        repo: the repository; it is closed with this.
        name: the model's name.
        build: makes a model, see `Serving`.
        transport: the way by which bytes come; "auto": the planner's choice.
    """

    def __init__(self, repo: Repository, name: str, build: Callable[[], object], transport: str = "auto") -> None:
        self._repo = repo
        self._name = name
        self._transport = transport
        self._way = transport
        self._serving = Serving(build, name)
        self._lock = threading.Lock()
        self._deliveries: deque[Delivery] = deque(maxlen=KEPT)
        self._answers_s: deque[float] = deque(maxlen=64)
        self._answered = 0
        self._skipped = 0
        self._refused: dict[ModelRef, str] = {}
        self._advice: Answer[str] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="tensorvine-update", daemon=True)
        self._thread.start()

    def infer(self, batch: object, timeout: float = 30.0) -> Inference:
        """Answer with the newest version that arrived; errors as in `Serving.infer`."""
        answer = self._serving.infer(batch, timeout)
        with self._lock:
            self._answered += 1
            self._answers_s.append(answer.seconds)
        return answer

    def wait_for(self, version: int, timeout: float) -> ModelRef:
        """Wait until a version or a newer one answers; errors as in `Serving.wait_for`."""
        return self._serving.wait_for(version, timeout)

    def status(self) -> ConsumerStatus:
        """Tell how it does."""
        with self._lock:
            deliveries, refused = tuple(self._deliveries), dict(self._refused)
            return ConsumerStatus(self._serving.ref, deliveries, self._answered, self._skipped, refused)

    def close(self) -> None:
        """Stop following and answering."""
        self._closing.set()
        self._repo.close()
        self._serving.close()

    def _follow(self) -> None:
        """Take versions until it is closed."""
        after, failed, pauses = 0, False, Backoff(*RETRY_S, closing=self._closing)
        while not self._closing.is_set():
            try:
                newest = self._repo.wait_newer(self._name, after, POLL_S)
                if newest is not None:
                    self._take(newest, after)
                    after = newest.version
                failed = False
                pauses.reset()
            except ModelNotFoundError as exc:
                log.info("%s: it was retired before it was taken: %s", self._name, exc)
            except Exception as exc:  # noqa: BLE001  logged; whatever it is, later versions may be had
                if not failed and not self._closing.is_set():
                    log.warning("%s: no update can be had, answering goes on: %s", self._name, exc)
                failed = True
                pauses.wait()

    def _take(self, ref: ModelRef, after: int) -> None:
        """Bring a version and let it answer, or refuse it."""
        told_at, begun = time.time(), time.perf_counter()
        reader = self._repo._reader
        way, self._way = self._way, self._transport  # a way that fails is not asked for again
        loaded = reader.fetch(ref, transport=way, verify=True, timeout=FETCH_TIMEOUT_S)
        self._way = way
        fetched = time.perf_counter()
        try:
            graph = self._repo._catalog.graph_of(ref)
            self._serving.take(ref, loaded.arrays, graph)
        except (KeyError, ValueError) as exc:
            self._refuse(ref, exc)
            return
        except OperationTimeoutError:
            raise  # tried again
        except Exception as exc:
            log.exception("%s: the model failed to take it", ref)
            self._refuse(ref, exc)
            return
        ended = time.perf_counter()
        far = {name: nbytes for name, nbytes in loaded.transports.items() if name != SHARED}
        way = max(far, key=far.__getitem__) if far else SHARED
        nbytes = sum(far.values()) if far else loaded.transports.get(SHARED, 0)
        delivery = Delivery(ref, told_at, fetched - begun, ended - fetched, way, nbytes)
        with self._lock:
            self._deliveries.append(delivery)
            self._skipped += ref.version - after - 1 if after else 0
        self._report(delivery, reader.far_transports if far else (SHARED,))

    def _refuse(self, ref: ModelRef, exc: Exception) -> None:
        log.error("%s is refused, %s goes on answering: %s", ref, self._serving.ref, exc)
        with self._lock:
            self._refused[ref] = str(exc)

    def _report(self, delivery: Delivery, ways: tuple[str, ...]) -> None:
        """Tell the planner what the update took; by the next one it has answered which way is best."""
        with self._lock:
            inference_s = median(self._answers_s) if self._answers_s else None
        seconds = delivery.fetch_s + delivery.swap_s
        told = Delivered(
            ref=str(delivery.ref),
            seconds=seconds,
            fetch_s=delivery.fetch_s,
            nbytes=delivery.nbytes,
            way=delivery.way,
            ways=ways,
            inference_s=inference_s,
            node=self._repo.engine.this_node(),
        )
        planner = self._repo._session.planner
        try:
            if self._advice is not None and self._transport == AUTO:
                advised = self._advice.result(0.0)
                self._way = AUTO if advised == SHARED else advised
            self._advice = planner.send(PlannerCalls.delivered(self._name, told))
        except OperationTimeoutError as exc:  # of the advice: it is asked for again
            log.info("%s: the planner was not told of %s: %s", self._name, delivery.ref, exc)
        except TensorVineError as exc:
            self._advice = None  # it died with the planner, and would fail each time
            log.info("%s: the planner was not told of %s: %s", self._name, delivery.ref, exc)
