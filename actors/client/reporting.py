"""A client's reports of its counts to the planner: sent with each renewal of the session, and when it is closed.

Rules
- A report holds the counts since the last one. Until it is answered, it is sent again under its number, and further
  counts wait: the planner counts each report once.
- No wait: an answer is looked at when the next report is due. What fails is no error of the client.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ...store.counting import Counted, Counts
from ...store.errors import OperationTimeoutError, TensorVineError
from ..planner.calls import PlannerCalls
from ..rpc.channel import Answer, Channel

log = logging.getLogger(__name__)


class Reporting:
    """The reports of one client. All calls come from one thread at a time.

    Args:
        planner: takes them.
        client: the client's id.
        counts: the client's.
    """

    def __init__(self, planner: Channel, client: str, counts: Counts) -> None:
        self._planner = planner
        self._client = client
        self._counts = counts
        self._serial = 0
        self._unanswered: Counted = {}
        """The report of this number; empty if it was answered."""
        self._answer: Answer[None] | None = None

    def send(self, last: bool = False) -> Answer[None] | None:
        """Send a report, unless there is nothing to report or the one before is on its way.

        Args:
            last: the client is being closed.
        """
        if not self._heard():
            if not last:
                return None
            self._unanswered = {}  # it will arrive before this one, by the same connection
        gauges = None if last else self._counts.gauges()
        if not self._unanswered:
            self._unanswered = self._counts.take()
            if not self._unanswered and not (gauges or self._serial):
                return None
            self._serial += 1
        self._answer = self._sent(self._unanswered, gauges)
        return self._answer

    def _heard(self) -> bool:
        """Look at the answer to the last report; return False while it is on its way."""
        if self._answer is None:
            return True
        try:
            self._answer.result(0.0)
            self._unanswered = {}
        except OperationTimeoutError:
            return False
        except TensorVineError as exc:
            log.debug("client %s: the planner did not take its counts, sending them again: %s", self._client, exc)
        self._answer = None
        return True

    def _sent(self, counted: Counted, gauges: Mapping[str, float] | None) -> Answer[None] | None:
        try:
            return self._planner.send(PlannerCalls.counted(self._client, self._serial, counted, gauges))
        except TensorVineError as exc:
            log.debug("client %s: its counts could not be sent, sending them again: %s", self._client, exc)
            return None
