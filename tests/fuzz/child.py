"""The process in which readers are given their inputs; `runner` watches it.

Rules
- What it is about to read stands in memory that it shares with the runner: if it dies or hangs, that was the input.
- Memory is what the process maps, touched or not, at its most (VmPeak, which a fork begins anew). Glibc and Arrow are
  to map what they need and no more, as `ENVIRONMENT` says.
- An error of the tree that comes of memory that was refused is a finding as well: on another machine it would be there.
- What a thread raises, or is logged with a traceback, counts like what the reader raises.
- It dies with the runner.
"""

from __future__ import annotations

import base64
import ctypes
import faulthandler
import gc
import json
import logging
import mmap
import os
import re
import resource
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tensorvine.store.errors import TensorVineError

from tests.fuzz.target import Inputs, Read, Target

ENVIRONMENT = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "KERAS_BACKEND": "tensorflow",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
"""What must be set before Python starts."""
BEYOND_BYTES = 2 << 30
"""The kernel refuses memory beyond this, for the machine's sake."""
_PEAK, _SIZE = re.compile(rb"VmPeak:\s+(\d+) kB"), re.compile(rb"VmSize:\s+(\d+) kB")
INPUT_BYTES = 1 << 20
"""A longer input is cut."""
_HEAD = struct.Struct("<qqq")
_PARENT_DEATH = 1
"""PR_SET_PDEATHSIG."""


class Place:
    """Which input a child reads now, in memory that it shares with the runner."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, _HEAD.size + INPUT_BYTES)
        self.set(0, -1, b"")

    def set(self, target: int, number: int, content: bytes) -> None:
        """Say: the number of the target, that of the input (-1: of none), and what it is."""
        _HEAD.pack_into(self._shared, 0, target, number, len(content))
        self._shared[_HEAD.size : _HEAD.size + len(content)] = content

    def get(self) -> tuple[int, int]:
        """(number of the target, number of the input)."""
        return _HEAD.unpack_from(self._shared)[:2]

    @property
    def content(self) -> bytes:
        """The input."""
        return self._shared[_HEAD.size : _HEAD.size + _HEAD.unpack_from(self._shared)[2]]


def run(
    targets: Sequence[Target],
    numbers: Sequence[range],
    seed: int,
    allowed: tuple[int, int],
    place: Place,
    tell: int,
    folder: Path,
) -> NoReturn:
    """Read inputs of targets one after another, tell what was found, and exit.

    Args:
        targets: the readers.
        numbers: of each target's inputs.
        seed: of them all.
        allowed: memory that an input may take: times its length, and so many bytes more.
        place: where to say what is read.
        tell: a descriptor that takes a line of JSON for each finding and each target's end.
        folder: for files.
    """
    ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGKILL)
    faulthandler.enable()
    troubles = _Troubles()
    with open(tell, "w", buffering=1) as told:
        for index, (target, some) in enumerate(zip(targets, numbers, strict=True)):
            place.set(index, -1, b"")
            began, inputs = time.process_time(), Inputs(target, folder)
            read, refused = 0, 0
            with target.reading(folder) as reader:
                gauge = _Gauge(reader, inputs, None if target.trusted else allowed, troubles)
                for number in some:
                    content = inputs.of(seed, number)[:INPUT_BYTES]
                    place.set(index, number, content)
                    error, found = gauge.read(content, number < len(inputs.valid))
                    read, refused = read + (error is None), refused + (error is not None)
                    for kind, what in found:
                        whole = base64.b64encode(content).decode()
                        facts = {"target": index, "number": number, "kind": kind, "what": what, "content": whole}
                        told.write(json.dumps(facts) + "\n")
            spent = time.process_time() - began
            told.write(json.dumps({"target": index, "read": read, "refused": refused, "spent": spent}) + "\n")
    os._exit(0)


class _Gauge:
    """Has inputs read, and says what was wrong with that."""

    def __init__(self, reader: Read, inputs: Inputs, allowed: tuple[int, int] | None, troubles: _Troubles) -> None:
        self._reader = reader
        self._allowed = allowed
        self._troubles = troubles
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        for content in inputs.valid:  # what is imported and kept at first use is so before anything is measured
            self.read(content, False)
        gc.collect()
        resource.setrlimit(resource.RLIMIT_AS, (self._memory()[0] + BEYOND_BYTES, -1))

    def read(self, content: bytes, valid: bool) -> tuple[BaseException | None, list[tuple[str, str]]]:
        """Return what the reader raised, and (kind, what) of each finding."""
        found: list[tuple[str, str]] = []
        raised: BaseException | None = None
        most, size = self._memory()
        try:
            self._reader(content)
        except BaseException as exc:  # noqa: BLE001  whatever a reader raises is what is looked for
            raised = exc
        taken = self._taken(most, size, len(content), raised)
        if taken is not None:
            found.append(("memory", f"{taken} for an input of {len(content)} bytes{_text(raised)}"))
        elif raised is not None and not isinstance(raised, TensorVineError):
            found.append(("foreign", _text(raised)))
        elif raised is not None and valid:
            found.append(("refused", f"a valid input{_text(raised)}"))
        found += [("foreign", trouble) for trouble in self._troubles.taken()]
        if raised is not None:
            traceback.clear_frames(raised.__traceback__)
        return raised, found

    def _taken(self, most: int, size: int, nbytes: int, raised: BaseException | None) -> str | None:
        """Say how much memory an input took, if that was too much."""
        if self._allowed is None:
            return None
        after, _ = self._memory()
        if after > most and after - size > self._allowed[0] * nbytes + self._allowed[1]:
            return f"{after - size >> 20} MiB"
        return "refused by the system," if any(isinstance(exc, MemoryError) for exc in _led_to(raised)) else None

    def _memory(self) -> tuple[int, int]:
        """Bytes that this process has mapped: at its most, and now."""
        text = os.pread(self._status, 1024, 0)
        most, now = _PEAK.search(text), _SIZE.search(text)
        if most is None or now is None:
            raise RuntimeError("/proc/self/status: expected VmPeak and VmSize; found none")
        return int(most[1]) << 10, int(now[1]) << 10


class _Troubles(logging.Handler):
    """Keeps what threads, callbacks and finalizers raised."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[str] = []
        logging.getLogger().addHandler(self)
        threading.excepthook = lambda given: self._keep(given.exc_value)
        sys.unraisablehook = lambda given: self._keep(given.exc_value)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the error of a record that shows one."""
        if record.exc_info:
            self._keep(record.exc_info[1])

    def taken(self) -> list[str]:
        """Return what came since the last time."""
        kept, self._kept = self._kept, []
        return kept

    def _keep(self, exc: BaseException | None) -> None:
        if exc is not None and not isinstance(exc, TensorVineError):
            self._kept.append(f"not raised by the reader{_text(exc)}")


def _led_to(exc: BaseException | None) -> Iterator[BaseException]:
    while exc is not None:
        yield exc
        exc = exc.__cause__ or exc.__context__


def _text(exc: BaseException | None) -> str:
    if exc is None:
        return ""
    return ": " + "".join(traceback.format_exception(exc, limit=-8, chain=False)).strip()[-3000:]


def ended(code: int) -> str:
    """Say how a child ended.

    >>> ended(-11)
    'killed by SIGSEGV'
    """
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"it exited with {code}"


def facts_of(line: bytes) -> dict[str, Any]:
    """Read a line that a child told."""
    facts = json.loads(line)
    return {**facts, "content": base64.b64decode(facts["content"])} if "content" in facts else facts
