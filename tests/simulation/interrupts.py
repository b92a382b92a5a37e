"""Signals whose handler raises KeyboardInterrupt in a client's thread, at the points where CPython 3.11 runs handlers.

Rules
- The product's own bytecode can be interrupted where a function or generator begins or resumes, where a loop jumps
  back, and after a call, unless that was a plain call of a Python function: CPython checks for signals there, and
  nowhere else. So an assignment can be lost whose right side has done its work.
- A wait of the standard library ends by the signal: for a lock, a condition, a future, a queue, a time. Its bytecode
  counts as one step: the gaps within it are not simulated. Copying ends first.
- One signal comes for one call: at a step, at a step that follows work in the simulated world (another thread or
  process can have seen it), in one of the waits, or at a moment of the virtual clock.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import tensorvine.actors

from .scheduler import Thread, World

PRODUCT = str(Path(tensorvine.actors.__file__).parents[1])
SIMULATION = str(Path(__file__).parent)
MOMENTS_S = (0.0005, 0.005, 0.05, 0.5)
"""A signal at a moment comes within one of these times."""
USUAL = (300, 20, 3)
"""What a call is taken to have of each of `Counts` before one of its kind was counted."""
_Sites = tuple[frozenset[int], frozenset[int]]
"""Offsets in the bytecode before which a signal is handled; those of them that follow a call."""
_sites: dict[int, tuple[CodeType, _Sites]] = {}
Counts = dict[str, tuple[int, int, int]]
"""Kind of call -> its steps, those of them after work in the simulated world, and its waits, when it was called
last."""


class Signal:
    """A signal for one thread's next call.

    Args:
        w: the world.
        thread: gets the signal.
        counts: what calls of this kind took, updated by this one.
        kind: the kind of call.
    """

    def __init__(self, w: World, thread: Thread, counts: Counts, kind: str) -> None:
        self._world = w
        self._thread = thread
        self._counts = counts
        self._kind = kind
        self.struck = False
        self._pending = False
        self._interruptible = False
        self._woken = False
        self._steps = self._effects = self._waits = 0
        self._worked = False
        """Simulated code ran since the last step."""
        self._returned = 0
        """Id of the frame that a Python function has just returned to."""
        self._at = [0, 0, 0]
        """The step, the step after work, or the wait that the signal comes at; 0: not there."""

    def aim(self) -> None:
        """Draw when the signal comes."""
        random = self._world.random
        mode = random.randrange(4)
        if mode < 3:
            count = self._counts.get(self._kind, USUAL)[mode]
            self._at[mode] = 1 + random.randrange(count + count // 8 + 1)
        else:
            self._arrive_soon()

    @contextmanager
    def coming(self) -> Generator[None]:
        """Have the signal strike meanwhile, or not at all."""
        self._thread.interrupt = self
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)
            self._thread.interrupt = None
            if not self.struck:
                self._counts[self._kind] = self._steps, self._effects, self._waits

    # ---- what the scheduler says ----------------------------------------------------------------------

    def leaves(self) -> None:
        sys.settrace(None)

    def returns(self) -> None:
        if not self.struck:
            sys.settrace(self._trace)

    def waits(self) -> None:
        self._step()
        self._interruptible = True
        self._waits += 1
        if self._waits == self._at[2]:
            self._arrive_soon()

    def waited(self) -> None:
        self._interruptible = False
        if self._woken:
            self._woken = False
            self._strike()

    def _arrive_soon(self) -> None:
        w = self._world
        w.at(w.now + w.random.choice(MOMENTS_S) * w.random.random(), self.arrive)

    def arrive(self) -> None:
        """Have the signal arrive: it strikes at the next step, or ends the wait that the thread is in."""
        if self._thread.interrupt is not self or self.struck:
            return
        self._pending = True
        if self._interruptible and self._thread.parked:
            self._woken = True
            self._world.wake(self._thread)

    # ---- what the interpreter says --------------------------------------------------------------------

    def _trace(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        """Follow the functions of the product."""
        if self.struck or self._world.current is not self._thread:
            return None
        file = frame.f_code.co_filename
        if file.startswith(SIMULATION):
            self._worked = True
            return None
        if not file.startswith(PRODUCT) or "/.venv/" in file:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        sites, calls = _sites_of(frame.f_code)
        plain = frame.f_code.co_name != "__init__"  # the caller of this one has called the class

        def step(frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
            if event == "opcode":
                returned, self._returned = self._returned, 0
                if frame.f_lasti in sites and not (returned == id(frame) and frame.f_lasti in calls):
                    self._step()
            elif event == "return" and plain and frame.f_back is not None:
                self._returned = id(frame.f_back)
            return None if self.struck else step

        return step

    def _step(self) -> None:
        if self.struck:
            return
        self._steps += 1
        due = self._steps == self._at[0]
        if self._worked:
            self._worked = False
            self._effects += 1
            due = due or self._effects == self._at[1]
        if due or self._pending:
            self._strike()

    def _strike(self) -> None:
        self.struck = True
        if self._world.trace is not None:
            self._world.note(f"SIGNAL at step {self._steps} of {self._kind}, {self._effects} after work: {_place()}")
        raise KeyboardInterrupt


def _sites_of(code: CodeType) -> _Sites:
    """Return where CPython handles signals in some bytecode, as offsets of what comes next, where that is within the
    same `try` and `with`."""
    known = _sites.get(id(code))
    if known is not None:
        return known[1]
    spans = [(e.start, e.end, e.target) for e in dis._parse_exception_table(code)]  # type: ignore[attr-defined]

    def handler(offset: int) -> int:
        return next((target for start, end, target in spans if start <= offset < end), -1)

    sites: set[int] = set()
    calls: set[int] = set()
    for this, following in pairwise(dis.get_instructions(code)):
        after = following.offset
        if this.opname == "JUMP_BACKWARD":
            after = int(this.argval)
        elif this.opname in ("CALL", "CALL_FUNCTION_EX"):
            calls.add(after)
        elif this.opname != "RESUME" or (this.arg or 0) & 3 > 1:
            continue
        if handler(this.offset) == handler(after):
            sites.add(after)
    found = frozenset(sites), frozenset(calls)
    _sites[id(code)] = code, found
    return found


def _place() -> str:
    """Return where the thread is in the product's code."""
    frame: FrameType | None = sys._getframe(1)
    places: list[str] = []
    while frame is not None and len(places) < 4:
        name = frame.f_code.co_filename
        if name.startswith(PRODUCT) and not name.startswith(SIMULATION):
            places.append(f"{name.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(places)
