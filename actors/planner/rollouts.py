"""Which consumers of a model may load a new version now: a counting semaphore with leases.

A turn that is not renewed for `LEASE_S` ends, because its consumer has died. A planner that starts again learns the
turns from their renewals. Until then more consumers than allowed may update.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LEASE_S = 15.0
"""Seconds without a renewal after which a turn ends."""


class Rollouts:
    """The turns of all models. All calls come from one thread at a time.

    Args:
        clock: returns seconds; monotonic.

    >>> rollouts = Rollouts()
    >>> rollouts.turn("net", "a", 1), rollouts.turn("net", "b", 1)
    (True, False)
    >>> rollouts.ended("net", "a")
    >>> rollouts.turn("net", "b", 1)
    True
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turns: dict[str, dict[str, float]] = {}
        """Model -> consumer -> end of its lease."""

    def turn(self, name: str, consumer: str, most: int) -> bool:
        """Begin or renew a consumer's turn. False: as many as `most` others have one."""
        now = self._clock()
        turns = {each: ends for each, ends in self._turns.get(name, {}).items() if ends > now}
        allowed = consumer in turns or len(turns) < most
        if allowed:
            turns[consumer] = now + LEASE_S
        self._turns[name] = turns
        return allowed

    def ended(self, name: str, consumer: str) -> None:
        """End a consumer's turn."""
        turns = self._turns.get(name, {})
        turns.pop(consumer, None)
        if not turns:
            self._turns.pop(name, None)
