"""A client's own copy of what `save_async` is given, so that training waits for one memory copy and for no message.

Rules
- One buffer per client (Check-QZP's snapshot, section 3.2), used again and again: its pages are made once. It goes when
  memory of the shard has been reserved for such saves.
- A save that comes while the buffer is in use, until the one before is in the shard's memory, does without, and is
  staged when its turn comes. So does one that is larger than a quarter of this machine's memory: the log says so once.
- After a copy that an exception ended, the buffer is in use until no array refers to it: the helper may still write.
- A save that waits anyway (`save`) copies straight into the shard's memory.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import psutil

from ....store.errors import without_frames
from ....store.segments.segment import layout
from ...memory.workers import Workers
from .request import once
from .upload import copy_into

log = logging.getLogger(__name__)

LARGEST_SHARE = 0.25
"""Of the machine's memory."""


@dataclass(slots=True)
class Staged:
    """Copies in the buffer of a client."""

    arrays: dict[str, np.ndarray]
    release: Callable[[], None]
    """Gives the next save the buffer; a second call changes nothing."""


class Staging:
    """The staging buffer of one client."""

    def __init__(self) -> None:
        self._block = np.empty(0, np.uint8)
        self._lent: Callable[[], object] = _nothing
        """Returns the array that a save has on the block, for as long as it needs that; then None."""
        self._lock = threading.Lock()
        self._helper: Workers | None = None
        self._most = int(psutil.virtual_memory().total * LARGEST_SHARE)
        self._told = False

    def take(self, arrays: Mapping[str, np.ndarray], what: str) -> Staged | None:
        """Copy arrays into the buffer; None where it is in use, or they are too large for it.

        Args:
            arrays: name -> array.
            what: names the save in the log.
        """
        first = once(arrays)
        copied = {name: arrays[name] for name, of in first.items() if name == of}
        offsets, length = layout([array.nbytes for array in copied.values()])
        if length > self._most:
            if not self._told:
                self._told = True
                log.warning(
                    "%s: %d bytes are too many to copy in this process; they are staged in the shard", what, length
                )
            return None
        with self._lock:
            if self._lent() is not None:
                return None
            if self._block.nbytes < length:
                self._block = np.empty(length, np.uint8)
            block = np.frombuffer(self._block.data, np.uint8)  # the base of its views, those of the helper included
            lent = self._lent = weakref.ref(block)
            if self._helper is None:
                self._helper = Workers(1, thread_name_prefix="tensorvine-stage")
        try:
            copy_into(block, list(copied.values()), self._helper)
            made: dict[str, np.ndarray] = {}
            for offset, (name, array) in zip(offsets, copied.items(), strict=True):
                made[name] = block[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
        except BaseException as exc:
            del block
            without_frames(exc)
            raise
        return Staged({name: made[of] for name, of in first.items()}, lambda: self._release(lent))

    def _release(self, lent: Callable[[], object]) -> None:
        with self._lock:
            if self._lent is lent:
                self._lent = _nothing

    def let_go(self) -> None:
        """Free the buffer's memory, unless it is in use: saves are staged elsewhere now."""
        with self._lock:
            if self._block.nbytes and self._lent() is None:
                self._block = np.empty(0, np.uint8)

    def close(self) -> None:
        """End the helper thread."""
        if self._helper is not None:
            self._helper.shutdown()


def _nothing() -> None:
    return None
