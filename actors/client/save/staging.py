"""A client's own copy of what `save_async` is given, so that training waits for one memory copy and for no message.

Rules
- One buffer per client (Check-QZP's snapshot, section 3.2), used again and again: its pages are made once. It goes when
  memory of the shard has been reserved for such saves.
- A save that comes while the buffer is in use, until the one before is in the shard's memory, does without, and is
  staged when its turn comes. So does one that is larger than a quarter of this machine's memory: the log says so once.
- A save that waits anyway (`save`) copies straight into the shard's memory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import psutil

from ....store.segments.segment import layout
from .request import once
from .upload import copy_into

log = logging.getLogger(__name__)

LARGEST_SHARE = 0.25
"""Of the machine's memory."""


@dataclass(slots=True)
class Staged:
    """Copies in the buffer of a client."""

    arrays: dict[str, np.ndarray]
    _buffer: threading.Semaphore
    _released: bool = False

    def release(self) -> None:
        """Let the next save have the buffer; a second call is no change."""
        if not self._released:
            self._released = True
            self._buffer.release()


class Staging:
    """The staging buffer of one client."""

    def __init__(self) -> None:
        self._block = np.empty(0, np.uint8)
        self._free = threading.Semaphore(1)
        self._helper: ThreadPoolExecutor | None = None
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
                log.warning("%s: %d bytes are too many to copy: they are staged in the shard", what, length)
            return None
        if not self._free.acquire(blocking=False):
            return None
        staged = Staged({}, self._free)
        try:
            if self._block.nbytes < length:
                self._block = np.empty(length, np.uint8)
            if self._helper is None:
                self._helper = ThreadPoolExecutor(1, thread_name_prefix="tensorvine-stage")
            copy_into(self._block, list(copied.values()), self._helper)
        except BaseException:
            staged.release()
            raise
        for offset, (name, array) in zip(offsets, copied.items(), strict=True):
            part = self._block[offset : offset + array.nbytes]
            staged.arrays[name] = part.view(array.dtype).reshape(array.shape)
        staged.arrays = {name: staged.arrays[of] for name, of in first.items()}
        return staged

    def let_go(self) -> None:
        """Give the buffer's memory back, unless it is in use: saves are staged elsewhere now."""
        if self._block.nbytes and self._free.acquire(blocking=False):
            self._block = np.empty(0, np.uint8)
            self._free.release()

    def close(self) -> None:
        """End the helper thread."""
        if self._helper is not None:
            self._helper.shutdown()
