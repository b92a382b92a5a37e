"""The controller: asks for candidates, has them evaluated, keeps the population, and writes the journal.

Rules
- It runs in the driver and waits for whatever worker is done next.
- What a candidate saved is told only when it is safe: first the store settles, then the journal is written. Killed in
  between, the candidate is evaluated once more and what it had saved goes.
- No worker waits for more than that: the journal is synced, and who leaves the population retired, while they work.
- A worker that dies costs its candidate's evaluation, which is done again; after `ATTEMPTS` the candidate has failed.
- With one worker, a search that was stopped and resumed is the same as one that was not; with several, who is done
  first is up to the machine.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from tensorvine.store import ModelRef

from .crew import Crew, Lost
from .evolution import Asked, Evolution
from .journal import Journal, Told
from .plan import Plan
from .store import Keeper
from .worker import Outcome, Task

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""How many workers a candidate may cost before it has failed."""
PATIENCE_S = 600.0
"""How long no worker may say anything: a candidate takes seconds, a new machine of a cluster minutes."""


class Controller:
    """A search, from its journal's end to its own.

    Args:
        plan: of the search.
        evolution: draws the candidates.
        keeper: keeps the population's models.
        journal: what an earlier life of the search wrote is gone on with.
        watch: is called with each candidate that was told.
    """

    def __init__(
        self,
        plan: Plan,
        evolution: Evolution,
        keeper: Keeper,
        journal: Journal,
        watch: Callable[[Told], None] = lambda told: None,
    ) -> None:
        self._plan, self._evolution, self._keeper, self._journal, self._watch = plan, evolution, keeper, journal, watch
        self.told: list[Told] = []
        """What became of each candidate, in order."""
        self._attempts: dict[int, int] = {}
        self._again: deque[Asked] = deque()
        """Asked for and not being evaluated."""
        self._fresh: list[Told] = []
        """Told, and their consequences for the store not yet drawn."""
        self._space = 0
        self._started = False
        self._began = 0.0
        """When the first worker was ready, as if there had been no stop in between."""

    def replay(self) -> int:
        """Go through the journal, and take up what an earlier life of the search left.

        Returns:
            How many candidates it had been told of.

        Raises:
            ValueError: the journal is of another search.
        """
        live: deque[tuple[int, ModelRef]] = deque()
        for event in self._journal.events:
            if isinstance(event, Told):
                gone = self._take(event)
                if event.outcome.ref is not None and event.outcome.quality is not None:
                    live.append((event.outcome.number, ModelRef.parse(event.outcome.ref)))
                if gone is not None and not self._plan.keep:
                    live = deque(pair for pair in live if pair[0] != gone)
            else:
                self._expect(event)
        if self._journal.events:
            self._keeper.restore(ref for _, ref in live)
        self._again.extend(self._evolution.open)
        for told in self.told:
            self._watch(told)
        return len(self.told)

    def run(self, crew: Crew) -> list[Told]:
        """Evaluate all candidates that are left, and give what became of all.

        Raises:
            OperationTimeoutError: no worker says anything.
            RuntimeError: workers do not start.
        """
        while len(self.told) < self._plan.candidates:
            if not self._started and crew.idle:
                self._start()
            while crew.idle and (asked := self._next()) is not None:
                crew.give(self._task(asked))
            self._tidy()
            event = crew.next(PATIENCE_S)
            if isinstance(event, Lost):
                self._lost(event)
            elif event is not None:
                self._tell(event)
        self._tidy()
        self._keeper.sweep()
        return self.told

    def _start(self) -> None:
        self._started = True
        self._began = time.monotonic() - (self.told[-1].at if self.told else 0.0)

    def _next(self) -> Asked | None:
        if self._again:
            return self._again.popleft()
        return self._evolution.ask() if self._evolution.asked < self._plan.candidates else None

    def _task(self, asked: Asked) -> Task:
        self._journal.ask(asked)
        attempt = self._attempts[asked.number] = self._attempts.get(asked.number, 0) + 1
        return Task(asked.number, asked.candidate, self._keeper.name_of(asked.number, attempt))

    def _lost(self, lost: Lost) -> None:
        """Have a candidate evaluated again whose worker died, or give it up."""
        task = lost.task
        log.warning("candidate %d: its worker died: %s", task.number, lost.reason)
        self._keeper.drop(task.name)
        if self._attempts[task.number] < ATTEMPTS:
            self._again.append(next(asked for asked in self._evolution.open if asked.number == task.number))
        else:
            now = time.time()
            self._tell(Outcome(task.number, None, f"it cost {ATTEMPTS} workers: {lost.reason}", began=now, ended=now))

    def _tell(self, outcome: Outcome) -> None:
        if outcome.quality is None:
            log.warning("candidate %d failed: %s", outcome.number, outcome.error)
            self._keeper.drop(self._keeper.name_of(outcome.number, self._attempts[outcome.number]))
        self._keeper.settle()
        told = Told(time.monotonic() - self._began, outcome, self._space)
        self._journal.tell(told)
        self._take(told)
        self._fresh.append(told)

    def _tidy(self) -> None:
        """Draw the consequences of what was told: who leaves the population is retired."""
        if not self._fresh:
            return
        self._journal.sync()
        for told in self._fresh:
            if told.outcome.quality is not None and told.outcome.ref is not None:
                self._keeper.add(ModelRef.parse(told.outcome.ref))
        self._space = self._keeper.space()
        fresh, self._fresh = self._fresh, []
        for told in fresh:
            self._watch(told)

    def _take(self, told: Told) -> int | None:
        """Tell the evolution; gives the number of who leaves the population."""
        self.told.append(told)
        gone = self._evolution.tell(told.outcome.number, told.outcome.quality)
        return None if gone is None else gone.number

    def _expect(self, event: Asked) -> None:
        """Ask as the journal says that it was asked."""
        attempt = self._attempts[event.number] = self._attempts.get(event.number, 0) + 1
        if attempt == 1 and (asked := self._evolution.ask()) != event:
            raise ValueError(f"journal: expected candidate {asked}, by the search's seed; found {event}")
