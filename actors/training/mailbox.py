"""A mailbox at which ranks take orders that are no actors of ours: of PyTorch DDP, of Ray Train, of any loop.

Rules
- A rank that can be forked answers calls of its handle. A foreign rank lives in a process that others cannot call; so
  it starts an actor, its mailbox, which has a rank's methods, and asks it for calls by a long poll, from a thread.
- A mailbox ends with the process that started it: callers learn that the rank died as they do with ranks of ours.
- A rank that leaves answers what it was asked before its mailbox ends.
- The mailbox's actor is found by the run's name and the rank. Two runs of one name are refused.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Sequence
from enum import Enum, auto
from types import TracebackType
from typing import Self, cast

from ...store.errors import ForkError, OperationTimeoutError, TensorVineError
from ...store.waiting import Backoff, Deadline
from ..engine.choice import EngineChoice, engine_for
from ..engine.engine import Actor, Engine, Lifetime
from ..engine.opened import Opened
from ..engine.warned import Failures
from ..rpc.calls import answers, remote
from ..rpc.channel import Channel
from ..rpc.notifier import Notifier
from .calls import RankCalls
from .fork.fork_hooks import ForkState
from .fork.order import ForkOrder
from .report import RankReport

log = logging.getLogger(__name__)

POLL_S = 20.0
"""How long a poll waits for calls."""
ANSWER_S = 25.0
"""How long a rank may take for what it can answer at once."""
CLOSE_S = 2.0
RETRY_S = 1.0
FIND_S = 0.1
"""How often those who look for a mailbox look."""

Call = tuple[int, str, tuple[object, ...]]
"""Its number, the method, its arguments."""


def mailbox_name(run: str, rank: int) -> str:
    """Name the actor of a rank's mailbox.

    >>> mailbox_name("resnet", 1)
    'resnet/mailbox-1'
    """
    return f"{run}/mailbox-{rank}"


class MailboxCalls:
    """What a rank asks of its mailbox; others ask `RankCalls` of it."""

    @remote("ctl", repeatable=True)
    def claim(self, owner: str) -> bool:
        """Take the mailbox, if nobody has it, and tell whether it is the caller's."""
        ...

    @remote("watch")
    def next(self, timeout: float) -> list[Call]:
        """Wait for calls and return them, each once; none came if the list is empty."""
        ...

    @remote("ctl", repeatable=True)
    def answer(self, number: int, value: object, error: BaseException | None) -> None:
        """Answer a call; an answer that nobody waits for any more is dropped."""
        ...

    @remote("watch", repeatable=True)
    def answered(self, timeout: float) -> bool:
        """Wait until no call is open, and tell whether that came.

        It is carried out in the loop of the callers' questions, so that their answers leave before this one.
        """
        ...


class _Change(Enum):
    """What a mailbox tells those who wait for it, besides the numbers of calls that were answered."""

    CALLS = auto()
    ANSWERED = auto()


class RankMailbox:
    """A rank's mailbox: calls go in at the one side, and are fetched and answered at the other."""

    def __init__(self, run: str, rank: int) -> None:
        self._who = f"rank {rank} of {run!r}"
        self._lock = threading.RLock()
        self._notifier = Notifier[_Change | int](self._lock)
        self._owner: str | None = None
        self._number = 0
        self._calls: list[Call] = []
        self._open: set[int] = set()
        """Calls whose answer is waited for."""
        self._answers: dict[int, tuple[object, BaseException | None]] = {}

    # ---- the rank's side ------------------------------------------------------------------------------

    @answers(MailboxCalls.claim)
    async def claim(self, owner: str) -> bool:
        with self._lock:
            self._owner = self._owner or owner
            return self._owner == owner

    @answers(MailboxCalls.next)
    async def next(self, timeout: float) -> list[Call]:
        def look() -> list[Call] | None:
            calls, self._calls = self._calls, []
            return calls or None

        return await self._notifier.until(_Change.CALLS, look, Deadline.after(timeout)) or []

    @answers(MailboxCalls.answer)
    async def answer(self, number: int, value: object, error: BaseException | None) -> None:
        with self._lock:
            if number in self._open:
                self._answers[number] = (value, error)
                self._notifier.tell(number)

    @answers(MailboxCalls.answered)
    async def answered(self, timeout: float) -> bool:
        return bool(
            await self._notifier.until(_Change.ANSWERED, lambda: not self._open or None, Deadline.after(timeout))
        )

    # ---- the callers' side ----------------------------------------------------------------------------

    async def _ask(self, method: str, *arguments: object, timeout: float = ANSWER_S) -> object:
        """Have the rank carry out a method, and give its answer; raises what that raises.

        Raises:
            OperationTimeoutError: the rank's process does not answer.
        """
        with self._lock:
            self._number += 1
            number = self._number
            self._open.add(number)
            self._calls.append((number, method, arguments))
            self._notifier.tell(_Change.CALLS)
        try:
            answer = await self._notifier.until(number, lambda: self._answers.get(number), Deadline.after(timeout))
            if answer is None:
                raise OperationTimeoutError(
                    f"{self._who}: {method}: expected an answer within {timeout:.1f} s; its process sent no answer"
                )
        finally:
            with self._lock:
                self._open.discard(number)
                self._answers.pop(number, None)
                self._calls = [call for call in self._calls if call[0] != number]
                if not self._open:
                    self._notifier.tell(_Change.ANSWERED)
        value, error = answer
        if error is not None:
            raise error
        return value

    @answers(RankCalls.describe, group="watch")
    async def describe(self) -> RankReport:
        return cast(RankReport, await self._ask("describe"))

    @answers(RankCalls.arm, group="watch")
    async def arm(self, order: ForkOrder, step: int) -> None:
        await self._ask("arm", order, step)

    @answers(RankCalls.agree, group="watch")
    async def agree(self, fork: str) -> None:
        await self._ask("agree", fork)

    @answers(RankCalls.cancel, group="watch")
    async def cancel(self, fork: str, reason: str) -> None:
        await self._ask("cancel", fork, reason)

    @answers(RankCalls.fork_state, group="watch")
    async def fork_state(self, fork: str, timeout: float) -> ForkState:
        return cast(ForkState, await self._ask("fork_state", fork, timeout, timeout=timeout + ANSWER_S))

    @answers(RankCalls.recipe)
    async def recipe(self, options: Sequence[str]) -> None:
        """Return None: what another rank like this one is made of is not known."""


class MailboxServer:
    """The rank's side of a mailbox: carries out the calls that come. The caller that opens it closes it.

    Args:
        engine: what runs the mailbox.
        run: the run's name.
        rank: this rank.
        target: has the methods that are called, from any thread, several at once.

    Raises:
        ForkError: a rank of this run and number has a mailbox already.
        OperationTimeoutError, ShardUnavailableError: the mailbox did not start.
    """

    def __init__(self, engine: Engine, run: str, rank: int, target: object, timeout: float = 60.0) -> None:
        self._engine, self._target = engine, target
        self._who = f"mailbox of rank {rank} of {run!r}"
        self._name = mailbox_name(run, rank)
        self.opened = Opened(self._who)
        self._closed = threading.Event()
        lifetime = Lifetime(outlives=False, restarts=False)
        actor = engine.spawn(RankMailbox, self._name, {"run": run, "rank": rank}, lifetime=lifetime)
        self._mailbox = Channel(engine, self._who, actor=actor)
        if not self._mailbox.call(MailboxCalls.claim(uuid.uuid4().hex), timeout):
            raise ForkError(f"{self._who}: expected a free run name and rank; another process uses them")
        self._thread = threading.Thread(target=self._serve, name="tensorvine-mailbox", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the mailbox. Does nothing if it was closed, or in a forked child."""
        if self.opened.close():
            try:
                for _ in range(2):  # when the second answer is there, all that came before has left the process
                    self._mailbox.call(MailboxCalls.answered(CLOSE_S), 2 * CLOSE_S)
            except TensorVineError as exc:
                log.info("%s: the last calls were not answered: %s", self._who, exc)
            self._closed.set()
            self._engine.kill(self._name)
            self._thread.join(CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        """Fetch calls and have each carried out in a thread of its own: some wait for long."""
        failures, pauses = Failures(log, f"{self._who}: fetching calls"), Backoff(RETRY_S, RETRY_S, self._closed)
        while not self._closed.is_set():
            try:
                for call in self._mailbox.call(MailboxCalls.next(POLL_S), 2 * POLL_S):
                    threading.Thread(target=self._carry_out, args=call, name="tensorvine-call", daemon=True).start()
                failures.over()
            except OperationTimeoutError as exc:
                log.info("%s: %s", self._who, exc)
            except TensorVineError as exc:
                if not self._closed.is_set():
                    log.warning("%s has stopped; the rank continues, but can no longer be forked: %s", self._who, exc)
                return
            except Exception as exc:  # noqa: BLE001  logged
                failures.note(exc)
                pauses.wait()

    def _carry_out(self, number: int, method: str, arguments: tuple[object, ...]) -> None:
        value: object = None
        error: BaseException | None = None
        try:
            carry_out: Callable[..., object] = getattr(self._target, method)
            value = carry_out(*arguments)
        except TensorVineError as exc:
            error = exc
        except Exception as exc:  # noqa: BLE001  told to the caller
            error = ForkError(f"{self._who}: {method}: {type(exc).__name__}: {exc}")
        try:
            self._mailbox.call(MailboxCalls.answer(number, value, error), ANSWER_S)
        except TensorVineError as exc:
            log.info("%s: the answer to %r could not be delivered: %s", self._who, method, exc)


def find_trainers(run: str, *, timeout: float = 30.0, engine: EngineChoice = None) -> list[Actor]:
    """Return the handles of all ranks of a run that uses `ForkableRank` or `ForkCallback`.

    Args:
        run: Name of the run.
        timeout: Seconds to wait until all ranks have registered.
        engine: Engine of the cluster, as in `Repository.connect`. Defaults to the engine running in this process.

    Returns:
        Actor handles, in order of rank. Pass the list to `fork`.

    Raises:
        OperationTimeoutError: if a rank does not register in time. The message names the first missing rank.
        RepositoryNotFoundError: if no cluster of the engine is running.

    >>> clones = fork(find_trainers("resnet"), at_step=None, build=build)        # doctest: +SKIP
    """
    runs = engine_for(engine)
    deadline = Deadline.after(timeout)
    first = _found(runs, run, 0, deadline)
    rank_0 = Channel(runs, f"rank 0 of {run!r}", actor=first)
    report = rank_0.call(RankCalls.describe(), deadline.left())
    return [first, *(_found(runs, run, rank, deadline) for rank in range(1, report.size))]


def _found(engine: Engine, run: str, rank: int, deadline: Deadline) -> Actor:
    pauses = Backoff(FIND_S, FIND_S)
    while True:
        try:
            return engine.find(mailbox_name(run, rank))
        except LookupError as exc:
            if not pauses.wait(deadline):
                raise OperationTimeoutError(
                    f"rank {rank} of {run!r}: expected it to register in time; it has not"
                ) from exc
