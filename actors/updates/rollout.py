"""How many consumers of a model update at once."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from ...store.errors import ClosedError, TensorVineError
from ...store.waiting import Backoff
from ..planner.calls import PlannerCalls
from ..planner.rollouts import LEASE_S
from ..rpc.channel import Channel

log = logging.getLogger(__name__)

ASK_S = (0.05, 1.0)
"""Shortest and longest pause between two requests for a turn."""
RENEW_S = LEASE_S / 3
CALL_S = 5.0
"""Timeout of a call to the planner."""


@dataclass(frozen=True, slots=True)
class Waves:
    """Limits how many consumers of a model load a new version at the same time.

    The other consumers continue to answer with the previous version until it is their turn. The turn of a consumer that
    dies ends after 15 seconds. While the planner restarts, no turn begins.

    Args:
        most: Largest number of consumers that load a version at the same time.

    Raises:
        ValueError: if `most` is not a positive integer.

    >>> Waves(2)
    Waves(most=2)
    """

    most: int

    def __post_init__(self) -> None:
        if type(self.most) is not int or self.most < 1:
            raise ValueError(f"Waves: most: expected a number of consumers, 1 or more; found {self.most!r}")


class Turns:
    """The turns of one consumer.

    Args:
        planner: channel to the planner, which counts turns.
        name: the model's name.
        waves: the limit.
        closing: set when the consumer is closed.
    """

    def __init__(self, planner: Channel, name: str, waves: Waves, closing: threading.Event) -> None:
        self._planner = planner
        self._name = name
        self._consumer = uuid.uuid4().hex
        self._most = waves.most
        self._closing = closing

    @contextmanager
    def turn(self) -> Generator[None]:
        """Wait for a turn, and keep it until the block ends.

        Raises:
            ClosedError: the consumer was closed first.
        """
        pauses = Backoff(*ASK_S, closing=self._closing)
        while not self._ask():
            if not pauses.wait():
                raise ClosedError(f"consumer of {self._name!r}: closed while it waited for its turn to update")
        ended = threading.Event()
        renewing = threading.Thread(target=self._renew, args=(ended,), name="tensorvine-turn", daemon=True)
        renewing.start()
        try:
            yield
        finally:
            ended.set()
            renewing.join()
            self._end()

    def _renew(self, ended: threading.Event) -> None:
        while not ended.wait(RENEW_S):
            self._ask()

    def _ask(self) -> bool:
        try:
            return self._planner.call(PlannerCalls.turn(self._name, self._consumer, self._most), CALL_S)
        except TensorVineError as exc:
            log.info("%s: the planner did not answer a request for a turn to update: %s", self._name, exc)
            return False

    def _end(self) -> None:
        try:
            self._planner.call(PlannerCalls.turn_ended(self._name, self._consumer), CALL_S)
        except TensorVineError as exc:  # its lease ends
            log.info("%s: the planner did not receive the end of a turn to update: %s", self._name, exc)
