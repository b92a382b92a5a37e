"""Memory of a shard that waits for the next save of a client.

Rules
- After a save that did not wait, memory for the next one like it is reserved: so that can be staged without a message,
  where it will stay (Viper's producer keeps its cache, section 4.4; DStore's preallocated buffer). When others wait for
  memory, it is given back at the next renewal of the session.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from ....store.errors import MovedError, TensorVineError, without_frames
from ....store.segments.arena import Part
from ...shard.calls import ShardCalls
from ..requests import Numbered
from ..session import Session
from .pending import PendingSave
from .request import SaveRequest, to_write
from .upload import Upload, announce

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Reserved:
    """Memory of a shard that waits for a save."""

    numbered: Numbered
    shard: int
    incarnation: int
    """Process id of the shard."""
    lengths: list[int]
    """Of the blocks."""
    offsets: list[int]


class ReservedMemory:
    """The memory that waits for the next save of one client.

    Args:
        session: the client's.
        helper: copies beside the caller.
    """

    def __init__(self, session: Session, helper: ThreadPoolExecutor) -> None:
        self._session = session
        self._helper = helper
        self._waiting: _Reserved | None = None
        self._lock = threading.Lock()
        session.at_renewal = self.spare

    def take(self, request: SaveRequest, pending: PendingSave) -> tuple[SaveRequest, Upload] | None:
        """Copy a save's tensors into the memory that waits for them; None where none does.

        May be called while another save is under way. Gives the request on the copies, and what `Saver.save` takes.
        The memory is `pending`'s from here on: where an exception ends this, giving `pending` up gives it back.
        """
        arrays, deadline = to_write(request), request.deadline
        with self._lock:
            reserved = self._waiting
            if reserved is None or reserved.lengths != announce(arrays):
                return None
            pending.numbered = reserved.numbered
            self._waiting = None
        if not self._session.is_staying(reserved.shard):
            self._give_back(reserved)
            return None
        try:
            if self._session.connection(reserved.shard, deadline).hello.pid != reserved.incarnation:
                return None  # it went with that incarnation of the shard
        except MovedError:
            return None
        what = f"save of {request.name!r}"
        upload = Upload(
            self._session,
            reserved.shard,
            numbered=reserved.numbered,
            deadline=deadline,
            what=what,
            helper=self._helper,
            check=pending.check,
            granted=list(reserved.offsets),
            granter=reserved.incarnation,
        )
        try:
            upload.write(arrays)
            copies = upload.copies(arrays)
        except MovedError:  # it has drained meanwhile
            self._give_back(reserved)
            return None
        except BaseException as exc:
            without_frames(exc)
            raise
        return replace(request, arrays={**request.arrays, **copies}), upload

    def renew(self, request: SaveRequest) -> None:
        """Have memory wait for another save like this one, its pages made.

        Raises:
            TensorVineError: it cannot be asked for.
        """
        lengths = announce(to_write(request))
        with self._lock:
            if self._waiting is not None and self._waiting.lengths == lengths:
                return
            old, self._waiting = self._waiting, None
        if old is not None:
            self._give_back(old)
        near = self._session.near(request.name)
        connection = self._session.connection(near)
        if not lengths or connection.view is None:
            return
        numbered = self._session.number()
        incarnation = connection.hello.pid
        try:
            asked = ShardCalls.reserve(self._session.client, numbered.request, lengths)
            offsets = self._session.call(near, asked)
            if not offsets:
                self._session.requests.end(numbered)
                log.info(
                    "no room to reserve memory for the next save of %r; it is staged in this process", request.name
                )
                return
            for offset, length in zip(offsets, lengths, strict=True):
                connection.view.part(Part(offset, length))
        except BaseException:  # the shard may have reserved it, or do so later
            self._session.give_up(numbered)
            raise
        with self._lock:
            self._waiting = _Reserved(numbered, near, incarnation, lengths, offsets)

    def spare(self) -> None:
        """Give the memory that waits for a save back, if others wait for it."""
        with self._lock:
            reserved = self._waiting
        if reserved is None:
            return
        try:
            if not self._session.call(reserved.shard, ShardCalls.is_short()):
                return
        except TensorVineError as exc:  # it went with its shard, or another renewal will tell
            log.info("shard %d: cannot ask whether it is short of memory: %s", reserved.shard, exc)
            return
        with self._lock:
            if self._waiting is not reserved:
                return
            self._waiting = None
        log.info("memory reserved for the next save is released: shard %d is short of memory", reserved.shard)
        self._give_back(reserved)

    def _give_back(self, reserved: _Reserved) -> None:
        self._session.give_up(reserved.numbered)
