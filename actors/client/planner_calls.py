"""A client's calls to the planner of its repository: by the planner's line, or by the engine.

Rules
- The line is asked for beside the first call. One that ends, as the planner's process does, is asked for again later.
- What the planner is told may be told again: whoever calls decides what a failure means.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from ...store.errors import OperationTimeoutError, ShardUnavailableError, TensorVineError
from ..engine.engine import Actor, Engine, Future
from ..rpc.line import AGAIN_S, Line, LineAddress, LineAnswer
from ..rpc.messages import planner_name

log = logging.getLogger(__name__)


class PlannerCalls:
    """The planner, as one client calls it. It may be used by several threads.

    Args:
        engine: what runs the planner.
        repository: the planner's.
        node: the client's.

    Raises:
        LookupError: no such planner runs.
    """

    def __init__(self, engine: Engine, repository: str, node: str) -> None:
        self._engine = engine
        self._name = planner_name(repository)
        self._node = node
        self._lock = threading.Lock()
        self._actor: Actor | None = engine.find(self._name)
        self._line: Line | None = None
        self._asked: Future | None = engine.call(self._actor, "line", node)
        self._again = 0.0

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Call and wait; errors as in `result`."""
        return self.result(self.send(method, *arguments), timeout)

    def send(self, method: str, *arguments: Any) -> Future:
        """Call without waiting.

        Raises:
            ShardUnavailableError: there is no planner any more.
        """
        line = self._open_line()
        if line is not None and line.carries(method):
            answer = line.send(method, arguments)
            if answer is not None:
                return answer
        return self._engine.call(self._found(), method, *arguments)

    def result(self, future: Future, timeout: float) -> Any:
        """Wait for an answer.

        Raises:
            OperationTimeoutError: it did not come within `timeout` seconds.
            ShardUnavailableError: the planner died or is restarting.
        """
        try:
            if isinstance(future, LineAnswer):
                return future.result(timeout, self._name)
            return self._engine.result(future, timeout, self._name)
        except ShardUnavailableError:
            self._forget()
            raise

    def close(self) -> None:
        """End the line."""
        with self._lock:
            line, self._line, self._again = self._line, None, float("inf")
            self._asked = None
        if line is not None:
            line.close()

    def _found(self) -> Actor:
        with self._lock:
            if self._actor is None:
                try:
                    self._actor = self._engine.find(self._name)
                except LookupError as exc:
                    raise ShardUnavailableError(f"{self._name}: expected a planner; it was stopped") from exc
            return self._actor

    def _forget(self) -> None:
        """Let go of what is known of a planner that did not answer."""
        with self._lock:
            line, self._line, self._actor = self._line, None, None
            self._again = max(self._again, time.monotonic() + AGAIN_S)
        if line is not None:
            line.close()

    def _open_line(self) -> Line | None:
        """Return the line; ask for it, or take the answer, where there is none yet. Does not wait."""
        with self._lock:
            if self._line is not None:
                return self._line
            if self._asked is None and time.monotonic() >= self._again and self._actor is not None:
                self._again = time.monotonic() + AGAIN_S
                self._asked = self._engine.call(self._actor, "line", self._node)
            elif self._asked is not None:
                self._take_answer(self._asked)
            return self._line

    def _take_answer(self, asked: Future) -> None:
        try:
            address: LineAddress | None = self._engine.result(asked, 0.0, self._name)
        except OperationTimeoutError:
            return
        except TensorVineError as exc:
            log.info("%s: no line to it, calls go by the engine: %s", self._name, exc)
            self._asked, self._again = None, time.monotonic() + AGAIN_S
            return
        self._asked = None
        if address is None:
            self._again = float("inf")
        else:
            self._line = Line(address)
