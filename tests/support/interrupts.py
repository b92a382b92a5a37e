"""Exceptions that arrive from outside, as Ctrl-C does: at a chosen moment, or at each moment in turn.

Rules
- CPython lets a signal handler raise where it looks for signals: after a call, at the start of a function, and at a
  jump back. `at_each` raises at these points only, since code that holds at all others, too, cannot be written.
- A trace function raises at the instruction after that point. Where another handler is in force there than at the point
  itself, as after the last call in a `with`, it does not raise: CPython would have left the `with` by its handler.
- Threads other than the one that calls are not interrupted.
"""

from __future__ import annotations

import contextlib
import dis
import signal
import sys
import threading
from collections.abc import Callable, Generator
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

_LOOKS_FOR_SIGNALS = {dis.opmap[name] for name in ("CALL", "CALL_FUNCTION_EX", "RESUME")}
_JUMP = dis.opmap["JUMP_BACKWARD"]


class Interrupt(BaseException):
    """What the signal handler raises."""


@contextlib.contextmanager
def when_waiting(
    function: Callable[..., object], until: threading.Event | None = None, after: threading.Event | None = None
) -> Generator[None]:
    """Raise `Interrupt` in the main thread, where this is used, once it waits in a function.

    Args:
        function: one of Python.
        until: set after the block has ended.
        after: waited for before.
    """
    main, over, raised = threading.main_thread().ident, threading.Event(), threading.Event()
    assert main is not None
    assert main == threading.get_ident()

    def interrupt() -> None:
        while not over.wait(0.005):
            if after is not None and not after.is_set():
                continue
            if not raised.is_set() and is_inside(sys._current_frames()[main], function):
                signal.pthread_kill(main, signal.SIGUSR1)  # again where it came just before the thread began to wait

    def handle(*_: object) -> None:
        if not raised.is_set():
            raised.set()
            raise Interrupt

    before = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
        if until is not None:
            until.set()


def is_inside(frame: FrameType | None, function: Callable[..., object]) -> bool:
    """Tell whether a function called what runs in this frame, or runs there."""
    inside = False
    while frame is not None and not inside:
        inside = frame.f_code is function.__code__
        frame = frame.f_back
    return inside


def at_each(call: Callable[[], object], where: str = "tensorvine", most: int = 100_000) -> Generator[int]:
    """Carry a call out again and again, interrupted at one point more each time, until it ends without; give which.

    Args:
        call: what is interrupted.
        where: part of the path of the files whose code is interrupted.
        most: how many points it may have.
    """
    for point in range(most):
        if not _interrupted(call, point, where):
            return
        yield point
    raise AssertionError(f"expected at most {most} points")


def _interrupted(call: Callable[[], object], point: int, where: str) -> bool:
    """Carry a call out, interrupted at one point; False: it ended before."""
    left, raised, jumped = point, False, False

    def opcode(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left, raised, jumped
        if raised:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            looked = jumped or _just_looked(frame)
            jumped = frame.f_code.co_code[frame.f_lasti] == _JUMP
            left -= looked
            if left < 0:
                raised = True
                sys.settrace(None)
                raise Interrupt
        return opcode

    def entered(frame: FrameType, event: str, argument: Any) -> Any:
        return opcode(frame, event, argument) if where in frame.f_code.co_filename and not raised else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        call()
    except Interrupt:
        pass
    finally:
        sys.settrace(before)
    return raised


def _just_looked(frame: FrameType) -> bool:
    """Tell whether the instruction before this one is one after which CPython looks for signals."""
    code, at = frame.f_code, frame.f_lasti
    before = at - 2
    while before > 0 and code.co_code[before] == 0:  # inline caches
        before -= 2
    looked = before >= 0 and code.co_code[before] in _LOOKS_FOR_SIGNALS
    return looked and _handler(code, before) == _handler(code, at)


def _handler(code: CodeType, at: int) -> int | None:
    """Return where the handler of an exception at an instruction is."""
    return next((target for start, end, target in _handlers(code) if start <= at < end), None)


@lru_cache(maxsize=4096)
def _handlers(code: CodeType) -> list[tuple[int, int, int]]:
    entries: Any = dis._parse_exception_table(code)  # type: ignore[attr-defined]  # dis shows it, and gives no name to it
    return [(entry.start, entry.end, entry.target) for entry in entries]
