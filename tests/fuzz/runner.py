"""Runs targets in children, and watches these: a crash or a hang is a finding, and the rest of the inputs goes on.

Rules
- A child is a fork of this process, which has imported what most readers need and has no threads.
- An input hangs when it has used `busy_s` of the processor, or when nothing has gone on for `still_s`: so a busy
  machine makes no finding. Its traceback is in the finding.
- A target that was given up `CRASHES` times is left.
- The same finding, by what it says first and last, is kept once, and counted.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.fuzz import child
from tests.fuzz.target import Target

CRASHES = 10
MEMORY = "/dev/shm"  # noqa: S108
READY = 10
"""How much longer a reader may take to be made ready, which may import a framework, than an input."""
LOOK_S = 0.2
"""How often a child is looked at that says nothing."""


@dataclass(frozen=True)
class Limits:
    """What an input may take."""

    busy_s: float = 10.0
    """Seconds of the processor."""
    still_s: float = 60.0
    """Seconds in which a child neither goes on nor uses the processor for `busy_s`."""
    times: int = 10
    """Bytes of memory for each byte of the input,"""
    more_bytes: int = 64 << 20
    """and so many more."""


@dataclass(frozen=True)
class Finding:
    """An input that a reader does not take as it should."""

    target: str
    seed: int
    number: int
    kind: str
    """crash, hang, memory, foreign (an error) or refused (although valid)."""
    what: str
    content: bytes

    @property
    def same(self) -> tuple[str, str, str]:
        """Equal for findings that are probably one."""
        lines = [line for line in self.what.splitlines() if line.lstrip().startswith("File ")] or [self.kind]
        return self.target, self.kind, lines[-1]

    def __str__(self) -> str:
        place = f"{self.target}: {self.kind}, seed {self.seed}, number {self.number}"
        return f"{place}, {len(self.content)} bytes: {self.what}"


@dataclass
class Outcome:
    """What came of a target."""

    target: str
    read: int = 0
    """Inputs that were read,"""
    refused: int = 0
    """and that were refused as they should be."""
    spent: float = 0.0
    """Seconds of the processor."""
    findings: list[Finding] = field(default_factory=list)
    """Each once."""
    times: int = 0
    """How often something was found."""

    def add(self, finding: Finding) -> None:
        """Count a finding, and keep it if it is a new one."""
        self.times += 1
        if finding.same not in {known.same for known in self.findings}:
            self.findings.append(finding)

    def __str__(self) -> str:
        count = self.read + self.refused
        rate = count / self.spent if self.spent else 0.0
        found = f"; {self.times} times something was found, {len(self.findings)} different" if self.times else ""
        return f"{self.target}: {count} inputs, {self.read} of them read, in {self.spent:.1f} s: {rate:.0f}/s{found}"


class EndedError(Exception):
    """This process was asked to end."""


_asked: list[int] = []
"""The signals that ask."""


@contextmanager
def scratch(within: str | None = None) -> Iterator[Path]:
    """Give a folder, in memory unless it is said where, and remove it.

    SIGTERM and Ctrl-C end what runs in it by `EndedError`, but not where they come: Python drops what a handler raises
    while it forks.
    """
    before = {number: signal.signal(number, _ask) for number in (signal.SIGTERM, signal.SIGINT)}
    within = within or (MEMORY if os.path.isdir(MEMORY) else None)
    folder = Path(tempfile.mkdtemp(prefix="tv-fuzz-", dir=within))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)


def _ask(number: int, _: object) -> None:
    _asked.append(number)


def _check() -> None:
    if _asked:
        raise EndedError(signal.Signals(_asked[0]).name)


def run(
    targets: Sequence[Target],
    seed: int,
    numbers: range,
    folder: Path,
    limits: Limits = Limits(),
    goes_on: Callable[[], bool] = lambda: True,
) -> list[Outcome]:
    """Give targets their inputs, one after another in one child as long as it lives.

    Args:
        targets: the readers.
        seed: draws the inputs.
        numbers: which of them.
        folder: for files of the readers.
        limits: what an input may take.
        goes_on: asked whenever a child is started.

    Raises:
        EndedError: a signal asked for it.
    """
    outcomes = [Outcome(target.name) for target in targets]
    for target in targets:
        target.compiled()
    left = [numbers for _ in targets]
    first, ends = 0, 0
    while first < len(targets) and goes_on():
        _check()
        place = child.Place()
        with _Watched(targets[first:], left[first:], seed, limits, place, folder) as watched:
            for facts in watched.told():
                index = first + facts["target"]
                if "kind" in facts:
                    found = (facts[key] for key in ("number", "kind", "what", "content"))
                    outcomes[index].add(Finding(targets[index].name, seed, *found))
                else:
                    outcomes[index].read += facts["read"]
                    outcomes[index].refused += facts["refused"]
                    outcomes[index].spent += facts["spent"]
            why = watched.why
        if why is None:
            break
        index, number = place.get()
        ends = ends + 1 if index == 0 else 1
        first += index
        outcomes[first].add(Finding(targets[first].name, seed, number, *why, place.content))
        left[first] = range(number + 1, numbers.stop)
        if number < 0 or ends >= CRASHES or not left[first]:
            first, ends = first + 1, 0
    return outcomes


class _Watched:
    """A child, from its start to its end."""

    def __init__(
        self,
        targets: Sequence[Target],
        numbers: Sequence[range],
        seed: int,
        limits: Limits,
        place: child.Place,
        folder: Path,
    ) -> None:
        self.why: tuple[str, str] | None = None
        """(kind, what) of the finding that ended it early."""
        self._limits, self._place = limits, place
        self._errors = open(folder / "errors", "w+b")  # noqa: SIM115  closed by `__exit__`
        read, write = os.pipe()
        sys.stdout.flush()
        self._pid = os.fork()
        if not self._pid:
            try:
                os.close(read)
                os.dup2(self._errors.fileno(), 2)
                child.run(targets, numbers, seed, (limits.times, limits.more_bytes), place, write, folder)
            except BaseException:  # noqa: BLE001  the parent must not go on twice
                sys.excepthook(*sys.exc_info())
            os._exit(1)
        os.close(write)
        self._pipe = open(read, "rb", buffering=0)  # noqa: SIM115  closed by `__exit__`

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._pipe.close()
        self._errors.close()

    def told(self) -> Iterator[dict]:
        """Give what it tells, until it ends or is ended."""
        rest = b""
        process = psutil.Process(self._pid)
        at, since, busy = self._place.get(), time.monotonic(), 0.0
        hangs, poll = False, select.poll()
        poll.register(self._pipe, select.POLLIN)
        while True:
            ready = poll.poll(1000 * LOOK_S)
            _check()
            if ready:
                data = self._pipe.read(1 << 16)
                *lines, rest = (rest + data).split(b"\n")
                yield from map(child.facts_of, lines)
                if not data:
                    break
            now, spent = self._place.get(), _spent(process)
            if now != at:
                at, since, busy = now, time.monotonic(), spent
            still, times = time.monotonic() - since, READY if now[1] < 0 else 1
            if not hangs and (spent - busy > times * self._limits.busy_s or still > times * self._limits.still_s):
                hangs, since = True, time.monotonic()
                os.kill(self._pid, signal.SIGABRT)  # it writes its traceback
            elif hangs and still > self._limits.still_s:
                os.kill(self._pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self._pid = 0
        if code or hangs:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace")[-4000:]
            self.why = ("hang", said) if hangs else ("crash", f"{child.ended(code)}: {said}")


def _spent(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system
