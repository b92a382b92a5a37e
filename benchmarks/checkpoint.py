"""Checkpoints of a training that goes on, compared with `torch.save`, Keras, Check-Q and Check-QZP.

A network that was trained before is trained on, and each party writes its weights and its optimizer's state.

S. Lee et al., *Check-QZP: A lightweight checkpoint mechanism for deep learning frameworks* (2024), section 3 and
Algorithm 1: Q quantises each tensor to 8 bits between its minimum and maximum, Z compresses with gzip, P leaves the
work to a child process. Where the paper leaves it open, the choice is the faster one: gzip's level 6 instead of 9, a
copy in shared memory that is kept, a child that needs NumPy only.

Rules
- The stall is the time for which the training waits in a checkpoint, including the wait for the one before. The total
  ends when all is synced: one file of the peers, and TensorVine's manifest, too.
- P copies the tensors first and only then starts its child, by spawn; none is dropped and none overtakes another.
- A run is a few checkpoints with a while of training after each. All parties have a run in turn.
- The same on a busy disk: fio, random reads and writes of 4 KiB in one file of the same file system (the paper: 64 jobs
  on 20 hardware threads, 1 GiB). Without fio it is left out, with a note.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import pickle
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from .core.measure import (
    GIB,
    MIB,
    ONE_COPY,
    Tensors,
    alternate,
    buffers_like,
    copying,
    in_turn,
    sample,
    timed,
    total_bytes,
    wait_until,
)
from .core.peers import KerasWeights
from .core.report import Effort, Goal, Report

BASELINE, QUANTISED = "torch.save", "ours, Quantize(8) | Zstd"
STALL_GOAL = 90.0
"""Percent of the baseline's stall that TensorVine should save."""
STEPS_FIRST = 3
"""Steps before anything is measured: they fill the optimizer's state and the caches."""
GZIP_LEVEL, BLOCK_BYTES, JOBS_PER_CORE = 6, 4096, 64 / 20
TIMEOUT_S, LONGEST_S = 300.0, 3600


@dataclass(frozen=True)
class Plan:
    """How much is run."""

    models: tuple[Any, ...]
    rounds: int
    checkpoints: int
    """Of one run."""
    interval_s: float
    """Training after each checkpoint, at least one step."""
    jobs: int
    load_bytes: int


def run(report: Report) -> None:
    """Measure all parties, on an idle and on a busy disk."""
    from .core.trainings import resumed  # the spawned child needs NumPy only

    jobs = round(JOBS_PER_CORE * (os.cpu_count() or 1))
    plan = report.pick(
        quick=Plan(("ptychonn",), 1, 1, 0.05, 1, MIB), normal=Plan(("resnet", "ptychonn"), 2, 2, 0.7, jobs, 512 * MIB)
    )
    for model in plan.models:
        training = resumed(model, quick=report.effort is not Effort.NORMAL)
        for _ in range(STEPS_FIRST):
            training.step()
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as name, _parties(Path(name)) as parties:
            loop = _Loop(training, parties, plan)
            _add(report, f"{model}, idle", loop, loop.measure())
            if shutil.which("fio") and shutil.which("setpriv"):
                with _busy_disk(Path(name), plan) as load:
                    figures = loop.measure()
                _add(report, f"{model}, load", loop, figures)
                report.notes.append(
                    f"{model}, load: {plan.jobs} jobs, {plan.load_bytes // MIB} MiB; {load[0]:,.0f} operations a second"
                )
            else:
                report.notes.append(f"{model}: the busy disk is left out: it needs fio and setpriv")


class _Party:
    """One way to write checkpoints: `checkpoint` for each, `finish` after the last of a run."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self._folder = name, folder
        self._found: list[tuple[float, float, int]] = []

    def checkpoint(self, step: int, state: Tensors) -> None:
        """Begin a checkpoint; returns when the caller may change the tensors."""
        path = self._folder / f"{self.name}-{step}"
        took, nbytes = timed(lambda: self._write(path, state))
        self._found.append((took, took, nbytes))
        path.unlink()

    def finish(self) -> list[tuple[float, float, int]]:
        """Wait until all checkpoints are on disk; return stall and total in seconds and the bytes of each."""
        found, self._found = self._found, []
        return found

    def close(self) -> None:
        """End threads and processes."""

    def _write(self, path: Path, state: Tensors) -> int:
        raise NotImplementedError


class _TorchSave(_Party):
    def _write(self, path: Path, state: Tensors) -> int:
        import torch

        with path.open("wb") as file:
            torch.save({name: torch.from_numpy(value) for name, value in state.items()}, file)
            return _synced(file)


class _KerasSave(_Party):
    """A Keras training has its tensors in variables already, so that copying them for the first time does not count."""

    _peer: KerasWeights | None = None

    def checkpoint(self, step: int, state: Tensors) -> None:
        """Make the model if there is none, then save it."""
        if self._peer is None:
            self._peer = KerasWeights()
            self._peer.hold(state)
        super().checkpoint(step, state)

    def _write(self, path: Path, state: Tensors) -> int:
        del state
        assert self._peer is not None  # noqa: S101  `checkpoint` made it
        self._peer.save(path)
        with path.open("rb+") as file:
            return _synced(file)


class _CheckQ(_Party):
    """The training waits until the quantised tensors are synced."""

    def _write(self, path: Path, state: Tensors) -> int:
        return write(path, state, compress=False)


@dataclass
class _Child:
    process: Any
    answer: Any
    start: float
    stall_s: float
    path: Path


class _CheckQZP(_Party):
    """The training waits for a copy, and a child process does the rest (section 3.2)."""

    _memory: SharedMemory | None = None
    _child: _Child | None = None

    def checkpoint(self, step: int, state: Tensors) -> None:
        """Wait for the checkpoint before, copy the tensors, start the child."""
        start = time.perf_counter()
        self._join()
        if self._memory is None:
            self._places, end = [], 0
            for name, value in state.items():
                self._places.append((name, value.shape, value.dtype.str, end))
                end += -(-value.nbytes // 64) * 64
            self._memory = SharedMemory(create=True, size=max(end, 1))
        for name, view in _views(self._memory, self._places).items():
            np.copyto(view, state[name])
        spawn, path = multiprocessing.get_context("spawn"), self._folder / f"{self.name}-{step}"
        theirs, ours = spawn.Pipe(duplex=False)
        arguments = ours, self._memory.name, self._places, path
        process = spawn.Process(target=_write_shared, args=arguments, daemon=True)
        process.start()
        ours.close()
        self._child = _Child(process, theirs, start, time.perf_counter() - start, path)

    def finish(self) -> list[tuple[float, float, int]]:
        """Wait for the child, then return the times."""
        self._join()
        return super().finish()

    def close(self) -> None:
        """End the child and free the shared memory."""
        try:
            self._join()
        finally:
            if self._memory is not None:
                self._memory.close()
                self._memory.unlink()

    def _join(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        with child.answer:
            try:
                if not child.answer.poll(TIMEOUT_S):
                    raise TimeoutError(f"{self.name}: expected {child.path} within {TIMEOUT_S:g} s; it is not written")
                ended, nbytes = child.answer.recv()
            finally:
                child.process.join(1.0)
                if child.process.is_alive():
                    child.process.kill()
                    child.process.join()
        self._found.append((child.stall_s, ended - child.start, nbytes))
        child.path.unlink()


class _Ours(_Party):
    """A repository on a path, which writes in the background; the next checkpoint does not wait for the disk."""

    def __init__(self, name: str, folder: Path, repo: Any, inherit: Any = "auto") -> None:
        super().__init__(name, folder)
        self._repo, self._inherit, self._model = repo, inherit, re.sub(r"\W+", "-", name)
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="committed")
        self._pending: list[tuple[float, float, Future[Any]]] = []
        self._newest: Any = None

    def checkpoint(self, step: int, state: Tensors) -> None:
        """Begin a save and wait until it is staged."""
        del step
        if not self._pending:
            self._before = self._bytes()
        start = time.perf_counter()
        pending = self._repo.save_async(self._model, state, inherit=self._inherit, timeout=TIMEOUT_S)
        pending.staged(TIMEOUT_S)
        stall_s = time.perf_counter() - start
        self._pending.append((start, stall_s, self._waiter.submit(self._on_disk, pending)))

    def finish(self) -> list[tuple[float, float, int]]:
        """Wait for the disk, and retire all versions but the newest."""
        runs, self._pending = self._pending, []
        ended = [(start, stall_s, *future.result(TIMEOUT_S)) for start, stall_s, future in runs]
        nbytes = (self._bytes() - self._before) // max(1, len(ended))
        for _, _, saved, _ in ended:
            if self._newest is not None:
                self._repo.retire(self._newest.ref)
            self._newest = saved
        wait_until(self._only_live_ones, "the memory of older checkpoints to be free")
        return [(stall_s, end - start, nbytes) for start, stall_s, _, end in ended]

    def close(self) -> None:
        """End the thread that waits for the disk."""
        self._waiter.shutdown()

    def _on_disk(self, pending: Any) -> tuple[Any, float]:
        saved = pending.committed(TIMEOUT_S)
        self._repo.flush(TIMEOUT_S)
        return saved, time.perf_counter()

    def _only_live_ones(self) -> bool:
        stats = self._repo.stats()
        newest = self._newest
        return newest is None or stats.bytes_memory <= stats.models * self._repo.info(newest.ref).bytes_total

    def _bytes(self) -> int:
        total = 0
        for path in self._folder.rglob("*"):
            try:
                total += path.stat().st_size if path.is_file() else 0
            except FileNotFoundError:
                continue  # a temporary file that has its final name by now
        return total


@contextmanager
def _parties(folder: Path) -> Iterator[list[_Party]]:
    """Start the repositories and make all parties; end everything."""
    from tensorvine.actors import Repository
    from tensorvine.clusters.local import LocalCluster
    from tensorvine.store import Quantize, Shuffle, Zstd

    codecs: dict[str, Any] = {"ours": None, "ours, Shuffle | Zstd": Shuffle() | Zstd(), QUANTISED: Quantize(8) | Zstd()}
    files = {BASELINE: _TorchSave, "keras save_weights": _KerasSave, "Check-Q": _CheckQ, "Check-QZP": _CheckQZP}
    with ExitStack() as stack:
        made: list[_Party] = [party(name, folder) for name, party in files.items()]
        stack.enter_context(LocalCluster(object_store_bytes=2 * GIB))
        for place, (name, codec) in enumerate(codecs.items()):
            path = folder / f"repository-{place}"
            repo = stack.enter_context(Repository.start(path.name, path=path, codec=codec, store_bytes=GIB))
            made.append(_Ours(name, path, repo))
            if codec is None:
                made.append(_Ours(f"{name}, inherit=None", path, repo, inherit=None))
        for party in made:
            stack.callback(party.close)
        yield made


@dataclass
class _Figures:
    found: list[tuple[float, float, int]] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    """Of each run: its time over its steps, stalls included."""


class _Loop:
    """A training, and the parties that write its checkpoints."""

    def __init__(self, training: Any, parties: Sequence[_Party], plan: Plan) -> None:
        self._training, self._parties, self._plan, self._serial = training, parties, plan, count()
        for party in parties:
            party.checkpoint(next(self._serial), self.state())
            party.finish()

    def state(self) -> Tensors:
        """Return the tensors of a checkpoint: views of the training's state."""
        return self._training.weights() | self._training.optimizer_state()

    def measure(self) -> dict[str, _Figures]:
        """Let all parties have a run, in turn; one run has no checkpoint."""
        turns: list[_Party | None] = [None, *self._parties]
        figures = {"no checkpoint" if party is None else party.name: _Figures() for party in turns}
        for turn in range(self._plan.rounds):
            for party in in_turn(turns, turn):
                found = figures["no checkpoint" if party is None else party.name]
                start, steps = time.perf_counter(), 0
                for _ in range(self._plan.checkpoints):
                    if party is not None:
                        party.checkpoint(next(self._serial), self.state())
                    going_on = time.perf_counter()
                    while time.perf_counter() < going_on + self._plan.interval_s:
                        self._training.step()
                        steps += 1
                found.step_s.append((time.perf_counter() - start) / steps)
                if party is not None:
                    found.found += party.finish()
        return figures


def _add(report: Report, case: str, loop: _Loop, figures: Mapping[str, _Figures]) -> None:
    """Add the table of all parties, and TensorVine's rows next to the baseline."""
    state = loop.state()
    size = total_bytes(state)
    floor = alternate({ONE_COPY: copying(state, buffers_like(state))}, rounds=3)[ONE_COPY]
    report.tables.setdefault("medians of each party", []).extend(
        {
            "case": case,
            "party": name,
            "stall_s": median(each[0] for each in made.found) if made.found else None,
            "total_s": median(each[1] for each in made.found) if made.found else None,
            "MiB": median(each[2] for each in made.found) / MIB if made.found else None,
            "a step, with stalls_s": median(made.step_s),
        }
        for name, made in figures.items()
    )
    stalls = {name: sample([each[0] for each in made.found]) for name, made in figures.items()}
    totals = {name: sample([each[1] for each in made.found]) for name, made in figures.items()}
    for name in figures:
        if not name.startswith("ours"):
            continue
        saved = 100 * (1 - stalls[name].median / stalls[BASELINE].median)
        report.add(
            f"{case}: stall, {name}",
            stalls[name],
            size,
            peer=(BASELINE, stalls[BASELINE]),
            floor=(ONE_COPY, floor),
            goals=[Goal("percent of the stall saved", saved, at_least=STALL_GOAL)],
            headline=report.headline is None and name == QUANTISED,
        )
        report.add(f"{case}: on disk, {name}", totals[name], size, peer=(BASELINE, totals[BASELINE]))


# ---- Check-QZP --------------------------------------------------------------------------------------------


def write(path: Path, state: Tensors, *, compress: bool) -> int:
    """Quantise a state, write it to a file and sync it (Algorithm 1, lines 4 to 6); return the file's size."""
    data = pickle.dumps({name: quantised(value) for name, value in state.items()}, protocol=5)
    with path.open("wb") as file:
        file.write(gzip.compress(data, GZIP_LEVEL) if compress else data)
        return _synced(file)


def quantised(value: Any) -> Any:
    """Quantise a float tensor to 8 bits (equations 1 and 2); return other tensors as they are.

    Returns:
        (codes uint8 of the same shape, minimum, scale): a value is minimum + code * scale.

    >>> codes, low, scale = quantised(np.array([0, 0.25, 1], np.float32))
    >>> codes.tolist(), low, round(1 / scale)
    ([0, 64, 255], 0.0, 255)
    """
    if not np.issubdtype(value.dtype, np.floating) or not value.size:
        return value
    low, high = float(value.min()), float(value.max())
    scale = (high - low) / 255
    if not np.float32(scale):  # a tensor that is nearly constant: every code is 0
        scale = 1.0
    return np.round((value - np.float32(low)) / np.float32(scale)).astype(np.uint8), low, scale


def _views(memory: SharedMemory, places: list[Any]) -> Tensors:
    return {name: np.ndarray(shape, dtype, memory.buf, offset) for name, shape, dtype, offset in places}


def _write_shared(answer: Any, memory_name: str, places: list[Any], path: Path) -> None:
    """Run in the child: write the tensors in shared memory, then answer."""
    memory = SharedMemory(memory_name)
    nbytes = write(path, _views(memory, places), compress=True)
    answer.send((time.perf_counter(), nbytes))
    answer.close()


def _synced(file: Any) -> int:
    file.flush()
    os.fsync(file.fileno())
    return os.fstat(file.fileno()).st_size


# ---- the busy disk ----------------------------------------------------------------------------------------


@contextmanager
def _busy_disk(folder: Path, plan: Plan) -> Iterator[list[float]]:
    """Run fio while the block runs; the list then has its operations per second. The kernel ends fio with us.

    Raises:
        OSError: if fio ends before the block does.
    """
    path = folder / "load"
    with path.open("wb") as file:
        for _ in range(0, plan.load_bytes, MIB):
            file.write(os.urandom(MIB))
        _synced(file)
    options = {
        "name": "load",
        "filename": path,
        "size": plan.load_bytes,
        "rw": "randrw",
        "bs": BLOCK_BYTES,
        "ioengine": "libaio",
        "direct": 0,
        "numjobs": plan.jobs,
        "thread": 1,  # of one process: one signal ends them all
        "time_based": 1,
        "runtime": LONGEST_S,
        "group_reporting": 1,
        "output-format": "json",
        "aux-path": folder,
    }
    command = ["setpriv", "--pdeathsig", "KILL", "fio", *(f"--{key}={value}" for key, value in options.items())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder)  # noqa: S603
    found: list[float] = []
    try:
        io = psutil.Process(process.pid).io_counters
        wait_until(lambda: process.poll() is not None or io().write_bytes > 0, "fio to write")
        yield found
        if process.poll() is not None:
            raise OSError(f"fio: expected it to run until now; it ended with {process.returncode}")
    finally:
        process.terminate()  # it then reports
        try:
            text = process.communicate(timeout=30)[0].decode()
        finally:
            process.kill()
            process.wait()
            path.unlink()
    jobs = json.loads(text[text.index("{") :])["jobs"][0]
    found.append(jobs["read"]["iops"] + jobs["write"]["iops"])
