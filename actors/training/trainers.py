"""The ranks of a training, as their starter holds them.

Rules
- The ranks end with the process that started them, or when `Trainers` is closed.
- Whatever changes how ranks train happens at all of them after the same step. So a train is announced to all of them
  before it begins at any: from then on each counts as training, whether it has begun or not.
"""

from __future__ import annotations

import logging
import queue
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from ...store.errors import OperationTimeoutError, PeerLostError, ShardUnavailableError, TensorVineError
from ...store.refs import Model, split_ref, text_of
from ...store.waiting import NEVER
from ..client.save.request import Saved
from ..engine.engine import Actor, Engine
from ..engine.opened import Opened
from ..rpc.calls import Request
from ..rpc.channel import Answer, Channel
from .calls import TrainerCalls
from .report import RankReport, steps_ahead

log = logging.getLogger(__name__)

ANSWER_S = 30.0
"""How long a rank may take to answer what it can answer at once."""
CLOSE_S = 5.0
GRACE_S = 5.0
"""How long after a rank noticed that a peer is gone the cause may take to come up."""
MARGIN_S = 0.2
"""A change of all ranks is made so much later than it is asked for, at least."""
TRIES = 5
"""How often a step for it is chosen anew when ranks are faster."""

_R = TypeVar("_R")


class Trainers(list[Actor]):
    """The ranks of a training run, as a list of actor handles in order of rank.

    `start_trainers`, `fork` and `fork_version` return a `Trainers` object, and `fork_many` returns one for each group.
    The ranks stop at `close`, at the end of the `with` block, or when the process that started them ends.

    If `fork` or `fork_many` created the ranks, the ranks are called clones, and `report` is the `ForkReport` of that
    fork. If `start_trainers` or `fork_version` created the ranks, `report` is None.

    >>> with start_trainers(build, 2, options={"rate": 0.1}) as trainers:        # doctest: +SKIP
    ...     losses = trainers.train(100)
    ...     trainers.configure({"rate": 0.01})
    ...     losses = trainers.train(100)
    """

    def __init__(
        self, engine: Engine, name: str, actors: Sequence[Actor], actor_names: Sequence[str], owns_cluster: bool = False
    ) -> None:
        super().__init__(actors)
        self.engine = engine
        """The engine that runs the actors."""
        self.name = name
        """Name of the run."""
        self.pending: list[Answer[list[float]]] = []
        """Pending results of the last `train_async`, by rank."""
        self.report: Any = None
        """The `ForkReport` of the fork that created these ranks. None if they are not clones."""
        self._trains = 0
        """Number of `train_async` calls."""
        self._opened = Opened(f"ranks of {name!r}")
        self._actor_names = list(actor_names)
        self._channels: dict[int, Channel] = {}
        self._owns_cluster = owns_cluster

    # ---- training ---------------------------------------------------------------------------------------

    def train(self, steps: int, timeout: float = 3600.0) -> list[list[float]]:
        """Train all ranks for a number of steps, and return the losses of each rank.

        Args:
            steps: Number of steps, at least 1.
            timeout: Seconds to wait until all steps have ended.

        Returns:
            One list per rank, with the loss of each step. The lists are shorter if `stop` was called.

        Raises:
            ValueError: if `steps` is invalid, or the ranks are already training.
            PeerLostError: if a rank died or disconnected. The message names the rank.
            OperationTimeoutError: if the steps do not end within `timeout` seconds, or if a rank waits too long for
                another rank during a step. In the first case, the ranks continue to train. In the second case, the
                limit is the `timeout` that was passed to `start_trainers` or `fork_version`. If `fork` created the
                ranks, the limit is the time that was left of the `timeout` of `fork` when `fork` started the ranks.
            Exception: any error that a training step raises.
        """
        self.train_async(steps)
        return self.results(timeout)

    def train_async(self, steps: int, fork: str | None = None) -> list[Answer[list[float]]]:
        """Start training all ranks for a number of steps, without waiting for the steps. `results` returns the losses.

        After the call, `describe` reports all ranks as training, even before the first step begins.

        Args:
            steps: Number of steps, at least 1.
            fork: Id of the fork that created these ranks, if the fork is still in progress. The ranks then begin with
                the forked state. With None, the ranks begin with their current state.

        Returns:
            One pending result per rank. `results` waits for all of them.
        """
        self._trains += 1
        for rank, answer in enumerate(self._send(TrainerCalls.announce(self._trains))):
            try:
                answer.result(ANSWER_S)
            except TensorVineError as exc:  # the train itself will say so, where it is waited for
                log.info("rank %d of %r could not be notified that a training begins: %s", rank, self.name, exc)
        self.pending = self._send(TrainerCalls.train(steps, fork, self._trains))
        return self.pending

    def results(self, timeout: float = 3600.0) -> list[list[float]]:
        """Wait until the steps started by the last `train_async` have ended, and return the losses of each rank.

        Raises:
            ValueError: if `train_async` was not called before, `steps` was invalid, or the ranks were already training.
            PeerLostError, OperationTimeoutError, Exception: As in `train`.
        """
        if not self.pending:
            raise ValueError(f"results of {self.name!r}: expected a call of train_async before; found none")
        return self._collect(self.pending, "train", timeout)

    def stop(self, timeout: float = 600.0) -> None:
        """Stop training on all ranks after the same step. `train` or `results` then returns the losses so far.

        Args:
            timeout: Seconds to wait until all ranks have stopped training.

        Raises:
            PeerLostError: if a rank died or disconnected. The message names the rank.
            OperationTimeoutError: if the ranks do not stop training in time.
        """
        self._together(TrainerCalls.stop(), timeout)

    def configure(self, options: Mapping[str, object], timeout: float = 600.0) -> None:
        """Change options on all ranks after the same step.

        Args:
            options: New values of the options to change.
            timeout: Seconds to wait until all ranks have changed the options.

        Raises:
            ValueError: if an option is unknown, or a value is invalid.
            PeerLostError: if a rank died or disconnected. The message names the rank.
            OperationTimeoutError: if the ranks do not change the options in time.
        """
        self._together(TrainerCalls.configure(dict(options)), timeout)

    def describe(self, timeout: float = ANSWER_S) -> list[RankReport]:
        """Return the state and progress of each rank, even during training."""
        return self._ask(TrainerCalls.describe(), timeout)

    # ---- repository -------------------------------------------------------------------------------------

    def save(
        self,
        name: str,
        quality: float | None = None,
        metadata: Mapping[str, object] | None = None,
        timeout: float = 600.0,
    ) -> Saved:
        """Save the training state of rank 0 (model, optimizer, counters and random generators) between two steps.

        The parent of the new version is the version that this run saved or restored last. If this run has not saved or
        restored a version yet, the parent is the latest version of `name`, if one exists. However, if `fork` created
        this run, the parent of the first version can be a version of the original run: see the documentation of `fork`.

        Args:
            name: Name of the model.
            quality: As in `Repository.save`.
            metadata: As in `Repository.save`. NaN and infinity are also allowed, and are stored as `{"float": "nan"}`,
                `{"float": "inf"}` and `{"float": "-inf"}`. A mapping in the metadata that already has one of these
                forms is stored with its value in a list, for example as `{"float": ["nan"]}`. The key "training" is
                reserved for `save`.
            timeout: Seconds to wait for the end of the current step and of the save.

        Raises:
            ValueError: if the run was started without a repository, or `metadata` has the key "training".
            TensorVineError: As in `Repository.save`.
        """
        return self._rank(0).call(TrainerCalls.save(name, quality, metadata), timeout)

    def restore_from(self, model: Model, timeout: float = 600.0) -> None:
        """Restore a version created by `save`. All ranks restore the same state, after the same step.

        Args:
            model: The version to restore, saved by this run or by another run.
            timeout: Seconds to wait for the end of the current step and of the restore.

        Raises:
            ValueError: if the run was started without a repository, `Trainers.save` did not create the version, or the
                version contains the state of another kind of training (for example another optimizer).
            TensorMismatchError: if the version's tensors do not match the tensors of the run. The state is not changed.
            TensorVineError: As in `Repository.load`.
        """
        self._together(TrainerCalls.restore_from(text_of(*split_ref(model))), timeout)

    # ---- life -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the ranks, even during a step. A second call, or a call in a forked child process, does nothing."""
        if not self._actor_names or self._opened.inherited:
            return
        try:
            self._ask(TrainerCalls.close(), CLOSE_S)
        except TensorVineError as exc:
            log.info("not all ranks of %r closed on request: %s", self.name, exc)
        self.kill()

    def kill(self) -> None:
        """Kill the processes of the ranks. A call in a forked child process does nothing."""
        if self._opened.inherited:
            return
        names, self._actor_names = self._actor_names, []
        for name in names:
            self.engine.kill(name)
        if self._owns_cluster:
            self._owns_cluster = False
            self.engine.leave()

    def __repr__(self) -> str:
        return f"Trainers({self.name!r}, {len(self)} ranks{'' if self._actor_names else ', closed'})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- within -----------------------------------------------------------------------------------------

    def _rank(self, rank: int) -> Channel:
        if rank not in self._channels:
            self._channels[rank] = Channel(self.engine, f"rank {rank} of {self.name!r}", actor=self[rank])
        return self._channels[rank]

    def _send(self, request: Request[_R]) -> list[Answer[_R]]:
        return [self._rank(rank).send(request) for rank in range(len(self))]

    def _ask(self, request: Request[_R], timeout: float) -> list[_R]:
        return self._collect(self._send(request), request.remote.name, timeout)

    def _collect(self, asked: Sequence[Answer[_R]], what: str, timeout: float) -> list[_R]:
        """Wait for the ranks' answers; the first failure ends it, or the cause of that, where it comes up soon."""
        waits = [partial(answer.result, timeout) for answer in asked]
        answers, failed = first_failure(waits, GRACE_S)
        if not failed:
            return answers
        rank, error = root_cause(failed)
        if isinstance(error, ShardUnavailableError):
            raise PeerLostError(
                f"rank {rank} of {self.name!r}: {what}: expected a running rank; it died: {error}"
            ) from error
        raise error

    def _together(self, request: Request[object], timeout: float) -> None:
        """Have all ranks do something after the same step: prepared at all of them, then decided."""
        method = request.remote.name
        for attempt in range(TRIES):
            reports = self.describe()
            step = None
            if any(report.training for report in reports):
                step = max(report.steps_done for report in reports) + steps_ahead(reports, MARGIN_S * 4**attempt)
            change = uuid.uuid4().hex
            if all(self._ask(TrainerCalls.prepare(change, method, request.arguments, step), ANSWER_S)):
                self._ask(TrainerCalls.decide(change, True), timeout)
                return
            self._ask(TrainerCalls.decide(change, False), ANSWER_S)
            log.info("%s of %r: step %s was too early for a rank", method, self.name, step)
        raise OperationTimeoutError(
            f"{method} of {self.name!r}: expected a step that no rank has begun; {TRIES} steps were too early"
        )


def first_failure(waits: Sequence[Callable[[], _R]], grace: float) -> tuple[list[_R], list[tuple[int, BaseException]]]:
    """Wait for all at once, until all have ended, or one failed; then a little longer, as it may not be the cause.

    Args:
        waits: each ends by itself, with an answer or an error.
        grace: seconds.

    Returns:
        The answers, in order, if all ended well; and (place, error) of what failed, in the order in which they did.

    >>> first_failure([lambda: 1, lambda: 2], 1.0)
    ([1, 2], [])
    """
    ended: queue.SimpleQueue[tuple[int, _R | None, BaseException | None]] = queue.SimpleQueue()

    def carry_out(place: int, wait: Callable[[], _R]) -> None:
        try:
            ended.put((place, wait(), None))
        except BaseException as exc:  # noqa: BLE001  handed to who waits for all
            ended.put((place, None, exc))

    for place, wait in enumerate(waits):
        threading.Thread(target=carry_out, args=(place, wait), name="tensorvine-answers", daemon=True).start()
    answers: list[Any] = [None] * len(waits)
    failed: list[tuple[int, BaseException]] = []
    deadline = NEVER
    for _ in waits:
        try:
            left = deadline.left() if deadline is not NEVER else None
            place, answers_one, error = ended.get(timeout=left)
        except queue.Empty:
            break
        if error is None:
            answers[place] = answers_one
            continue
        failed.append((place, error))
        if not isinstance(error, (PeerLostError, OperationTimeoutError)):
            break
        deadline = deadline.sooner(grace)
    return answers, failed


def root_cause(failed: Sequence[tuple[int, BaseException]]) -> tuple[int, BaseException]:
    """Choose what tells most: what went wrong by itself, before who died, who noticed it, and who only waited.

    >>> root_cause([(0, PeerLostError("rank 1 left")), (1, KeyError("labels"))])
    (1, KeyError('labels'))
    """

    def weight(item: tuple[int, BaseException]) -> int:
        kinds = (OperationTimeoutError, PeerLostError, ShardUnavailableError)
        return next((place for place, kind in enumerate(kinds) if isinstance(item[1], kind)), len(kinds))

    return max(failed, key=weight)
