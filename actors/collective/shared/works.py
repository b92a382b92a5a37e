"""Operations under way in a group on one machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ....store.errors import TensorVineError
from ..buffers import Bytes
from ..member import again

NO_BYTES: Bytes = np.empty(0, np.uint8)


class SharedWork:
    """An operation; a `Work`.

    Args:
        what: it, in words, with the group's name.
        peers: ranks that it waits for.
        seconds: how long it may take, from now.
        late: is told that this time, or a shorter one, is over, and ends the operation soon.
        memory: what is sent or received; kept until the end.
    """

    def __init__(
        self,
        what: str,
        peers: Sequence[int],
        seconds: float,
        late: Callable[[SharedWork], None],
        memory: Bytes = NO_BYTES,
    ) -> None:
        self.what = what
        self.peers = peers
        self.memory: Any = memory
        self.deadline = time.monotonic() + seconds
        self._late = late
        self._error: TensorVineError | None = None
        self._ended = threading.Event()

    def end(self, error: TensorVineError | None = None) -> None:
        """Take note that it has ended, well or not; only the first call counts."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end; see `Work`."""
        if not self._ended.is_set():
            seconds = self.deadline - time.monotonic() if timeout is None else timeout
            if not self._ended.wait(max(seconds, 0.0)):
                self._late(self)
                self._ended.wait()
        if self._error is not None:
            raise again(self._error)

    def done(self) -> bool:
        """Tell whether it has ended, well or not."""
        if not self._ended.is_set() and time.monotonic() > self.deadline:
            self._late(self)
        return self._ended.is_set()

    @property
    def ended(self) -> bool:
        """Whether it has ended; unlike `done`, this does not look at the time."""
        return self._ended.is_set()
