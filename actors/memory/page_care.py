"""Looks after the pages of one shard's memory: makes them ahead of need, and gives back those that nobody needs.

Rules
- M10. Which, `store.segments.page_plan` says. Pages are made ahead while no save is under way, in memory that is
  free or not: to make pages changes nothing in them. Pages go only while the arena has them owned by `PAGES`; then
  that is counted for the clients. The shard's lock is held for neither.
- What goes is unmapped in all processes, which holds up who copies: each piece waits for saves that are under way, but
  not for long ones.
- A grant that does not fit waits for the few pages that are just going (`settle`): nothing is refused for their sake.
- What was shown to clients as ahead goes a look later at the earliest: they may be about to map it.
- Pages are made ahead as long as more than `SPARE_SHARE` of the memory would be left, the machine's or that of the
  control group which limits the shard.
- A system that takes no pages back is said once in the log, and asked no more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from ...store.errors import StoreFullError
from ...store.holders import Owner, Request
from ...store.segments.arena import PAGES, Arena
from ...store.segments.page_plan import PagePlan, Span, pieces
from ..engine.room import available
from .memory import STEP_BYTES, SharedMemory
from .pages import CHUNK_BYTES

log = logging.getLogger(__name__)

LOOK_S = 1.0
SPARE_SHARE = 0.1
WAY_LOOKS, WAY_S = 10, 0.005
"""How often a piece that may go looks for saves under way, and the seconds between."""


class PageCare:
    """Looks after the pages of one shard's memory.

    Args:
        memory: the shard's.
        arena: whose parts are whose.
        lock: guards the arena and this.
        kept: bytes at the low end that stay.
        whose: "shard 3", for the log.
    """

    def __init__(self, memory: SharedMemory, arena: Arena, lock: threading.RLock, kept: int, whose: str) -> None:
        self.soon: Callable[[], None] = lambda: None
        """Has somebody `look`; set by who does that all the time."""
        self._memory = memory
        self._arena = arena
        self._lock = lock
        self._whose = whose
        self._plan = PagePlan(memory.size, CHUNK_BYTES, kept)
        self._going: tuple[Span, threading.Event] | None = None
        """What just goes, and what says that it went."""
        self._shown: list[Span] = []
        self._filled = 0
        """Bytes that saves have filled since somebody was told to look."""
        self._refused = self._short = False

    # ---- called with the lock held --------------------------------------------------------------------

    def granted(self, parts: Sequence[tuple[int, int]]) -> None:
        """Note (offset, bytes) of what somebody was granted."""
        now = time.monotonic()
        for offset, nbytes in parts:
            self._plan.used(offset, nbytes, now)

    def asked(self, owner: Owner, sizes: Sequence[int]) -> None:
        """Note what somebody asked for."""
        if isinstance(owner, Request) and sizes:
            self._plan.saved(sizes, time.monotonic())

    def came(self) -> None:
        """Note that a client came, which may save."""
        if self._plan.expect(time.monotonic()):  # a look holds up what the client asks next
            self.soon()

    def filled(self, nbytes: int) -> None:
        """Note that a save has filled so many bytes: the next one takes others, for which pages may have to be made."""
        self._filled += nbytes
        if self._filled >= CHUNK_BYTES:
            self._filled = 0
            self.soon()

    def settle(self) -> None:
        """Wait for what just goes, a matter of milliseconds, and have it be free."""
        if self._going is not None:
            span, gone = self._going
            gone.wait()
            self._returned(span)

    # ---- in a thread of its own -----------------------------------------------------------------------

    def look(self) -> None:
        """Make pages ahead, and give some back: whatever there is to do now."""
        shown = self._shown
        self._make_ahead()
        if not self._refused:
            self._give_back(shown)

    def _make_ahead(self) -> None:
        while True:
            with self._lock:
                ahead = self._plan.ahead(self._arena.free_spans, time.monotonic())
                busy = self._arena.saving
            missing = self._show(ahead)
            if missing is None or busy or not self._may_make(sum(end - start for start, end in ahead)):
                return
            try:
                self._memory.make(*missing)
            except StoreFullError as exc:
                self._tell_short(str(exc))
                return

    def _show(self, ahead: Sequence[Span]) -> Span | None:
        """Show clients what is made of the memory that is ahead; give the first piece of what is not."""
        shown: list[Span] = []
        missing: Span | None = None
        for span in ahead:
            for start, end in pieces(span, STEP_BYTES)[::-1]:
                if self._memory.unmade(start, end):
                    missing = missing or (start, end)
                elif shown and shown[-1][1] == start:
                    shown[-1] = (shown[-1][0], end)
                else:
                    shown.append((start, end))
        if shown != self._shown:
            self._memory.show_ahead(shown)
            self._shown = shown
        return missing

    def _may_make(self, nbytes: int) -> bool:
        room = available()
        enough = room.nbytes - nbytes > SPARE_SHARE * room.total
        if not enough:
            self._tell_short(f"{room.nbytes} bytes are left of {room.total}, according to {room.limited_by}")
        return enough

    def _tell_short(self, reason: str) -> None:
        if not self._short:
            self._short = True
            log.info("%s: memory is short, so none is prepared in advance: %s", self._whose, reason)

    def _give_back(self, shown: Sequence[Span]) -> None:
        with self._lock:
            idle = self._idle(shown)
        for span in idle:
            for start, end in self._memory.data_in(*span)[::-1]:
                whole = (start // CHUNK_BYTES * CHUNK_BYTES, -(-end // CHUNK_BYTES) * CHUNK_BYTES)
                for piece in pieces(whole, STEP_BYTES):
                    self._give_way()
                    if not self._gave_back(piece, shown):
                        return

    def _give_way(self) -> None:
        """Let saves that are under way end, if they soon do."""
        for _ in range(WAY_LOOKS):
            with self._lock:
                if not self._arena.saving:
                    return
            time.sleep(WAY_S)

    def _idle(self, shown: Sequence[Span]) -> list[Span]:
        """Return what may go now, but for what clients may just map."""
        idle = self._plan.idle(self._arena.free_spans, time.monotonic())
        for first, last in shown:
            idle = [
                (start, end)
                for whole in idle
                for start, end in ((max(whole[0], last), whole[1]), (whole[0], min(whole[1], first)))
                if start < end
            ]
        return idle

    def _gave_back(self, piece: Span, shown: Sequence[Span]) -> bool:
        """Give a piece back, if it still may go; False: the system takes none."""
        start, end = piece
        gone = threading.Event()
        with self._lock:
            if not any(first <= start and end <= last for first, last in self._idle(shown)):
                return True
            if not self._arena.claim(start, end - start, PAGES):
                return True
            self._going = piece, gone
        try:
            self._memory.punch(start, end)
        except OSError as exc:
            self._refused = True
            log.warning("%s: the system refuses to take free pages back, so they are kept: %s", self._whose, exc)
        finally:
            gone.set()
            with self._lock:
                self._returned(piece)
        return not self._refused

    def _returned(self, piece: Span) -> None:
        if self._going is not None and self._going[0] == piece:
            self._going = None
            self._arena.free(piece[0])
