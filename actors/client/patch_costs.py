"""The choice between patches and whole tensors, by the times that both have taken.

Rules
- A time is from the question to tensors that are checked: encoding, link and decoding together. So a patch that others
  have asked for before, a slow link and a slow processor are all in it.
- Times are kept per model: one model's updates change 1% of the elements, another's all.
- Patches that were slower are tried again now and then, because updates may have become smaller.
"""

from __future__ import annotations

import threading

from ...planner.schedules.transfer import TransferSelector

PATCH, WHOLE = "patch", "whole"
AGAIN = 32
"""Patches are tried after this number of choices of whole tensors in a row."""


class PatchCosts:
    """The times of one model's loads.

    >>> costs = PatchCosts()
    >>> costs.prefers_patches(1000)
    True
    >>> costs.measured(PATCH, 1_000_000, 0.9)
    >>> costs.measured(WHOLE, 1_000_000, 0.1)
    >>> [costs.prefers_patches(1_000_000) for _ in range(AGAIN)].index(True) == AGAIN - 1
    True
    """

    def __init__(self) -> None:
        self._selector = TransferSelector()
        self._wholes = 0
        self._lock = threading.Lock()

    def prefers_patches(self, nbytes: int) -> bool:
        """Choose how tensors of this size are to come."""
        with self._lock:
            chosen = self._selector.choose([PATCH, WHOLE], nbytes) == PATCH
            self._wholes = 0 if chosen else self._wholes + 1
            if self._wholes >= AGAIN:
                chosen, self._wholes = True, 0
        return chosen

    def measured(self, what: str, nbytes: int, seconds: float) -> None:
        """Record the time of a load. No bytes mean that it failed."""
        with self._lock:
            if nbytes:
                self._selector.measured(what, nbytes, seconds)
            else:
                self._selector.failed(what)
