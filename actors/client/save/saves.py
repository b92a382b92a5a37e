"""The saves of one client: checked, staged where the caller does not wait, and carried out.

Rules
- A save whose caller waits is carried out by the caller's thread, so threads save side by side. It is queued where
  saves of this thread are waiting that did not: those of one thread come in their order.
- A save that does not wait is copied before it is queued: into memory of the shard where some is `reserved`,
  else into a buffer of this process (`staging`). Training waits for this one copy and for no message.
- One thread carries queued saves out, in their order. For a few seconds after each, and at first
  after this client came to a repository that ran, it maps the memory that the next is likely to get, in steps of a
  millisecond or two. Then it ends; the next save starts it again. No exception of a save, or of what is done between
  saves, ends it.
- A save whose tensors other processes bring has a thread of its own: they take as long as their tasks, which may save
  by this client themselves.
- `close` waits for as long as the saves that are under way may take by their own timeouts.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from ....store import traces
from ....store.counting import Counts
from ....store.errors import TensorVineError
from ....store.metrics import SAVE, SAVED_BYTES
from ....store.waiting import NEVER, Deadline
from ...engine.opened import Opened
from ...rpc.closing import close_all
from ...shard.segment_memory import INLINE_BYTES
from ..catalog import Catalog
from ..reader import Reader
from ..session import CONTROL_TIMEOUT_S, Session
from .pending import PendingSave
from .request import Saved, SaveRequest
from .saver import Saver
from .staging import Staged, Staging
from .upload import Upload

log = logging.getLogger(__name__)

AHEAD_S = 0.1
"""How long after a client came its shard is greeted, and the pause between looks for memory that it has made ready."""
AHEAD_LOOKS = 30
"""How often the thread so looks after a save."""


Until = Literal["copied", "staged", "committed"]


@dataclass(slots=True)
class _Work:
    """A save on its way."""

    pending: PendingSave
    request: SaveRequest
    again: bool
    """The caller does not wait: another save like this one is likely."""
    upload: Upload | None = None
    """Where its tensors lie in the shard's memory already."""
    buffer: Staged | None = None
    """Where they lie in this process."""
    begun: float = field(default_factory=lambda: time.perf_counter())  # looked up then: the simulation has its own
    """When it was asked for, by `time.perf_counter`."""
    context: object = field(default_factory=traces.current)
    """The span within which it was asked for."""


class Saves:
    """Carries out the saves of one client.

    Args:
        session, catalog, reader: the client's.
        greets: others may have saved before: what a first save will get may be there to be mapped.
    """

    def __init__(self, session: Session, catalog: Catalog, reader: Reader, greets: bool = True) -> None:
        self._session = session
        self.saver = Saver(session, catalog, reader)
        self._staging = Staging()
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._apart: set[threading.Thread] = set()
        """Those of saves whose tensors other processes bring."""
        self._queued = threading.local()
        """`last` is the last save that each thread queued."""
        self._here: set[PendingSave] = set()
        """Those that their callers carry out."""
        self._lock = threading.Lock()
        self._ends = Deadline.after(0.0)
        """When the last of the saves that wait or are carried out has run out of time."""
        self._opened = Opened(f"repository {session.repository!r}")
        self._closing = threading.Event()
        self._greeting: threading.Thread | None = None
        if greets:
            self._greeting = threading.Thread(target=self._greet, name="tensorvine-greet", daemon=True)
            self._greeting.start()

    def submit(self, request: SaveRequest, until: Until) -> PendingSave:
        """Carry a save out, or queue it and wait for it. Where this ends by an exception, the save is given up.

        Args:
            request: what to save.
            until: "copied": the caller may change its tensors as soon as this returns, if memory allows it; else when
                `PendingSave.staged` does. "staged": it may, and waits where memory does not allow it. "committed":
                nothing is copied here, and the version exists.

        Raises:
            ClosedError: this was closed, or this is a forked child of the process that made it.
            TensorVineError: as in `PendingSave.staged` or `committed`.
        """
        self._opened.check()
        pending = PendingSave(request.name, request.deadline, self._session.give_up)
        try:
            last: PendingSave | None = getattr(self._queued, "last", None)
            if until == "committed" and request.bring is None and (last is None or last.done()):
                self._save_here(pending, request)
                return pending
            self._queue_it(_Work(pending, request, again=until != "committed"))
            if until == "staged":
                pending.staged()
            elif until == "committed":
                pending.committed()
        except BaseException:
            pending.give_up()
            raise
        return pending

    def _save_here(self, pending: PendingSave, request: SaveRequest) -> None:
        """Save in the thread of the caller, who waits."""
        work = _Work(pending, request, again=False)
        try:
            with self._lock:
                self._opened.check()
                self._ends = Deadline(max(self._ends.at, request.deadline.at))
                self._here.add(pending)
            pending.run(lambda: self._saved(work, pending.mark_staged), here=True)
            if pending.committed().bytes_written > INLINE_BYTES:  # the next one finds memory that is mapped
                with self._lock:
                    if not self._opened.closed:
                        self._run()
        finally:
            self._here.discard(pending)

    def _queue_it(self, work: _Work) -> None:
        if work.again:
            self._stage(work)
        with self._lock:
            if self._opened.closed and work.buffer is not None:  # meanwhile
                work.buffer.release()
            self._opened.check()
            self._ends = Deadline(max(self._ends.at, work.request.deadline.at))
            if work.request.bring is not None:
                self._run_apart(work)
            else:
                self._queue.put(work)
                self._queued.last = work.pending
                self._run()

    def close(self, deadline: Deadline = NEVER) -> None:
        """Finish what is queued, as far as there is time, and end the threads."""
        with self._lock:
            self._opened.close()
            self._closing.set()
            self._queue.put(None)
            left = deadline.left(self._ends.left() + CONTROL_TIMEOUT_S)  # what a save tidies up comes after it
        close_all("saves", lambda: self._join(left), self.saver.close, self._staging.close)

    def _join(self, timeout: float) -> None:
        deadline = Deadline.after(timeout)
        for pending in list(self._here):
            if not pending.ended(deadline):
                log.error("%r did not end in time", pending)
        for thread in (self._greeting, self._thread, *self._apart):
            if thread is not None and thread.is_alive():  # one that an interrupt kept from starting is not
                thread.join(deadline.left())
                if thread.is_alive():
                    log.error("%s did not end in time; its work is abandoned", thread.name)

    def _run(self) -> None:
        """Have a thread carry saves out. Call it with the lock held."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._carry_out, name="tensorvine-save", daemon=True)
            self._thread.start()

    def _run_apart(self, work: _Work) -> None:
        """Have a thread of its own carry a save out. Call it with the lock held."""

        def carry_out() -> None:
            self._save(work)
            self._apart.discard(thread)

        thread = threading.Thread(target=carry_out, name="tensorvine-save-apart", daemon=True)
        self._apart.add(thread)
        thread.start()

    def _greet(self) -> None:
        """Get to know the shard of this node, and map what a first save is likely to get there."""
        if self._closing.wait(AHEAD_S):  # what the client came for goes first
            return
        try:
            self.saver.greet()
        except TensorVineError as exc:  # a save will say so, if it is so still
            log.info("cannot map memory ahead of a first save: %s", exc)
            return
        with self._lock:
            if not self._opened.closed:
                self._run()

    def _stage(self, work: _Work) -> None:
        """Copy the tensors: into the shard's memory where some is reserved, else into a buffer of this process."""
        placed = self.saver.reserved.take(work.request, work.pending)
        if placed is not None:
            work.request, work.upload = placed
            self._staging.let_go()
        else:
            work.buffer = self._staging.take(work.request.arrays, f"save of {work.request.name!r}")
            if work.buffer is None:
                return
            work.request = replace(work.request, arrays=work.buffer.arrays)
        work.pending.mark_staged()

    def _carry_out(self) -> None:
        while (work := self._next()) is not None:
            self._save(work)
            if work.again:
                self._reserve(work.request)
            del work  # the tensors must not live until the next save

    def _save(self, work: _Work) -> None:
        staged = work.buffer.release if work.buffer is not None else work.pending.mark_staged
        work.pending.run(partial(self._saved, work, staged))
        if work.buffer is not None:
            work.buffer.release()
        del work, staged  # an error keeps this frame, and the tensors may be in locked memory

    def _saved(self, work: _Work, staged: Callable[[], None]) -> Saved:
        """Carry a save out, and count it."""
        counts = self._session.counts
        rereads = not work.again or work.upload is not None
        with traces.span("save", work.context) as traced:
            try:
                saved = self.saver.save(work.request, work.pending, staged, work.upload, rereads=rereads)
            except Exception as exc:
                counts.failed("save", exc)
                raise
            if traced is not None:
                traces.note(version=str(saved.ref), bytes=saved.bytes_written)
        count_save(counts, saved, time.perf_counter() - work.begun)
        return saved

    def _next(self) -> _Work | None:
        """Wait for the next save, and map ahead meanwhile; None: none has come for a while."""
        looks, pause = AHEAD_LOOKS, 0.0
        while looks:
            try:
                return self._queue.get(timeout=pause)
            except queue.Empty:
                more = self._map_ahead()
            looks = 0 if more is None else looks - (not more)
            pause = 0.0 if more else AHEAD_S
        with self._lock:
            try:
                return self._queue.get(timeout=0.0)
            except queue.Empty:
                self._thread = None
                return None

    def _map_ahead(self) -> bool | None:
        """Map some of the memory that the next save will get; False: there is no more now, None: it cannot be done."""
        try:
            return self.saver.map_ahead()
        except TensorVineError as exc:  # the save itself will say so, if it is so still
            log.info("cannot map memory ahead of the next save: %s", exc)
            return False
        except Exception:
            log.exception("cannot map memory ahead of the next save, which takes longer")
            return None

    def _reserve(self, request: SaveRequest) -> None:
        """Have memory wait for the next save like this one; a failure costs that save a copy, and no more."""
        try:
            self.saver.reserved.renew(request)
        except TensorVineError as exc:
            log.info("no memory could be reserved for the next save of %r: %s", request.name, exc)
        except Exception:
            log.exception("no memory could be reserved for the next save of %r", request.name)


def count_save(counts: Counts, saved: Saved, seconds: float) -> None:
    """Count a committed save."""
    counts.observe(SAVE, seconds)
    counts.add(SAVED_BYTES, saved.bytes_written, "written")
    counts.add(SAVED_BYTES, saved.bytes_inherited, "inherited")
