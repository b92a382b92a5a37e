"""Check-QZP's ways to write a checkpoint, as sections 3.1 and 3.2 and Algorithm 1 of the paper describe them.

S. Lee et al., *Check-QZP: A lightweight checkpoint mechanism for deep learning frameworks* (2024). In letters:
Q quantises each tensor to 8 bits between its minimum and maximum, Z compresses with gzip, P leaves the work to
a child process. The baseline is what the paper compares with: `torch.save`, or Keras' `save_weights`.

Rules
- A file counts as written when it is synced, for everybody; the paper does not say, and without it "on disk"
  would mean the page cache for some and the disk for others.
- P copies the tensors first and only then starts its child, by spawn, one for each checkpoint; a checkpoint
  waits for the one before it, so that none is dropped and none overtakes another.
- Where the paper leaves it open, the choice is the faster one: gzip's own level 6 rather than Python's 9, the
  copy goes to shared memory that is kept between checkpoints, and the child needs NumPy only. So all but the
  baseline write pickled arrays; `torch.save` writes the same bytes.
"""

from __future__ import annotations

import gzip
import multiprocessing
import os
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .measure import Tensors
from .peers import KerasWeights

BITS = 8
GZIP_LEVEL = 6
TIMEOUT_S = 300.0

State = Mapping[str, NDArray[Any]]
Place = tuple[str, tuple[int, ...], str, int]
"""Where a tensor lies in shared memory: name, shape, dtype, first byte."""


@dataclass(frozen=True)
class Stages:
    """What became of one checkpoint after its tensors were safe; all times in seconds."""

    quantise_s: float
    compress_s: float
    write_s: float
    """Serialising, writing and syncing."""
    nbytes: int
    """Size of the file."""
    ended: float
    """When it was on disk, on the monotonic clock that all processes of a machine share."""


@dataclass(frozen=True)
class Timing:
    """What one checkpoint took, in seconds."""

    stall_s: float
    """From the call until the training could go on."""
    total_s: float
    """From the call until all was on disk."""
    snapshot_s: float
    """Copying the tensors; 0 where the training waits for the disk instead."""
    quantise_s: float | None
    """None where nobody outside can tell the stages apart."""
    compress_s: float | None
    write_s: float | None
    nbytes: int
    """Bytes on disk."""


class Variant(ABC):
    """One way to write checkpoints. The training calls `checkpoint`; `finish` is after the last of a run."""

    name: str
    """As the tables call it."""

    @abstractmethod
    def checkpoint(self, step: int, state: State) -> None:
        """Begin a checkpoint; returns when the caller may change the tensors.

        Args:
            step: where the training is; no two checkpoints have the same.
            state: tensors by name, float32 or integers, any shape, on the CPU.
        """

    @abstractmethod
    def finish(self) -> list[Timing]:
        """Wait until all checkpoints are on disk, remove them, and give their timings, oldest first."""

    def close(self) -> None:  # noqa: B027  most have nothing to end
        """End whatever was started."""


class Synchronous(Variant):
    """The training waits until the file is synced. This class writes what Q, Z and QZ write.

    Args:
        folder: where files go.
        quantise: Q, 8 bits.
        compress: Z, gzip.
    """

    def __init__(self, folder: Path, *, quantise: bool = False, compress: bool = False) -> None:
        self.name = "Check-" + "Q" * quantise + "Z" * compress
        self._folder = folder
        self._quantise = quantise
        self._compress = compress
        self._timings: list[Timing] = []
        self._paths: list[Path] = []

    def checkpoint(self, step: int, state: State) -> None:
        """Write everything before returning."""
        start = time.perf_counter()
        path = self._folder / f"{self.name}-{step}"
        stages = self._write(path, state)
        took = time.perf_counter() - start
        self._timings.append(
            Timing(took, took, 0.0, stages.quantise_s, stages.compress_s, stages.write_s, stages.nbytes)
        )
        self._paths.append(path)

    def finish(self) -> list[Timing]:
        """Return the timings: nothing is under way."""
        _remove(self._paths)
        timings, self._timings = self._timings, []
        return timings

    def _write(self, path: Path, state: State) -> Stages:
        return write(path, state, quantise=self._quantise, compress=self._compress)


class TorchSave(Synchronous):
    """The paper's baseline: `torch.save` of the state, synced."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.name = "torch.save"

    def _write(self, path: Path, state: State) -> Stages:
        import torch

        start = time.perf_counter()
        with path.open("wb") as file:
            torch.save({name: torch.from_numpy(value) for name, value in state.items()}, file)
            _sync(file)
        return _unstaged(path, start)


class KerasSave(Synchronous):
    """Keras' `save_weights` of a model that holds the first state it is given, synced.

    A Keras training has its tensors in variables already, so the first call's copying into them is not timed.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.name = "keras save_weights"
        self._peer: KerasWeights | None = None

    def checkpoint(self, step: int, state: State) -> None:
        """Make the model where there is none, then save it."""
        if self._peer is None:
            self._peer = KerasWeights()
            self._peer.hold(dict(state))
        super().checkpoint(step, state)

    def _write(self, path: Path, state: State) -> Stages:
        if self._peer is None:
            raise RuntimeError("KerasSave: expected a model; found none, as checkpoint was not called")
        start = time.perf_counter()
        self._peer.save(path)
        with path.open("rb+") as file:
            _sync(file)
        return _unstaged(path, start)


@dataclass(frozen=True)
class _UnderWay:
    """A checkpoint that a child writes."""

    child: SpawnProcess
    answer: Any
    """The connection that `Stages` come through."""
    start: float
    snapshot_s: float
    stall_s: float
    path: Path


class Parallel(Variant):
    """P: the training waits for a copy, and a child process does the rest (section 3.2).

    Args:
        folder: where files go.
        quantise: Q, 8 bits.
        compress: Z, gzip.
    """

    def __init__(self, folder: Path, *, quantise: bool = False, compress: bool = False) -> None:
        self.name = "Check-" + "Q" * quantise + "Z" * compress + "P"
        self._folder = folder
        self._options = {"quantise": quantise, "compress": compress}
        self._spawn = multiprocessing.get_context("spawn")
        self._memory: SharedMemory | None = None
        self._places: list[Place] = []
        self._under_way: _UnderWay | None = None
        self._timings: list[Timing] = []
        self._paths: list[Path] = []

    def checkpoint(self, step: int, state: State) -> None:
        """Wait for the checkpoint before, copy the tensors, start the child."""
        start = time.perf_counter()
        self._join()
        copying = time.perf_counter()
        memory = self._snapshot(state)
        copied = time.perf_counter()
        path = self._folder / f"{self.name}-{step}"
        theirs, ours = self._spawn.Pipe(duplex=False)
        child = self._spawn.Process(
            target=_write_shared, args=(ours, memory.name, self._places, path, self._options), daemon=True
        )
        child.start()
        ours.close()
        self._under_way = _UnderWay(child, theirs, start, copied - copying, time.perf_counter() - start, path)

    def finish(self) -> list[Timing]:
        """Wait for the child, then give the timings."""
        self._join()
        _remove(self._paths)
        timings, self._timings = self._timings, []
        return timings

    def close(self) -> None:
        """End the child and free the shared memory."""
        try:
            self._join()
        finally:
            if self._memory is not None:
                self._memory.close()
                self._memory.unlink()
                self._memory = None

    def _snapshot(self, state: State) -> SharedMemory:
        if self._memory is None:
            self._places, size = _lay_out(state)
            self._memory = SharedMemory(create=True, size=max(size, 1))
        for name, view in _views(self._memory, self._places).items():
            np.copyto(view, state[name])
        return self._memory

    def _join(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        with under_way.answer:
            try:
                if not under_way.answer.poll(TIMEOUT_S):
                    raise TimeoutError(
                        f"{self.name}: expected {under_way.path} within {TIMEOUT_S:g} s; it is not written"
                    )
                stages: Stages = under_way.answer.recv()
            except EOFError as exc:
                raise OSError(f"{self.name}: expected {under_way.path}; its child ended without writing it") from exc
            finally:
                under_way.child.join(1.0)
                if under_way.child.is_alive():
                    under_way.child.kill()
                    under_way.child.join()
        self._timings.append(
            Timing(
                *(under_way.stall_s, stages.ended - under_way.start, under_way.snapshot_s),
                *(stages.quantise_s, stages.compress_s, stages.write_s, stages.nbytes),
            )
        )
        self._paths.append(under_way.path)


def variants(folder: Path, *, keras: bool) -> list[Variant]:
    """Return the paper's variants, the baseline first; `keras` adds Keras' own, which brings TensorFlow."""
    return [
        TorchSave(folder),
        *([KerasSave(folder)] if keras else []),
        Synchronous(folder, quantise=True),
        Synchronous(folder, compress=True),
        Parallel(folder),
        Synchronous(folder, quantise=True, compress=True),
        Parallel(folder, quantise=True, compress=True),
    ]


def write(path: Path, state: State, *, quantise: bool, compress: bool) -> Stages:
    """Write a state to a file and sync it (Algorithm 1, lines 4 to 6)."""
    quantise_s = compress_s = 0.0
    content: Any = dict(state)
    if quantise:
        content, quantise_s = _timed(lambda: {name: quantised(value) for name, value in state.items()})
    start = time.perf_counter()
    data = pickle.dumps(content, protocol=5)
    serialise_s = time.perf_counter() - start
    if compress:
        data, compress_s = _timed(lambda: gzip.compress(data, GZIP_LEVEL))
    start = time.perf_counter()
    with path.open("wb") as file:
        file.write(data)
        _sync(file)
    ended = time.perf_counter()
    return Stages(quantise_s, compress_s, serialise_s + ended - start, len(data), ended)


def quantised(value: NDArray[Any], bounds: tuple[float, float] | None = None) -> Any:
    """Quantise a float tensor to 8 bits: equations 1 and 2; others are given back as they are.

    Args:
        value: any shape and dtype.
        bounds: smallest and largest value to be told apart; None: the tensor's own.

    Returns:
        (codes uint8 of the same shape, minimum, scale): a value is minimum + code * scale.

    >>> codes, low, scale = quantised(np.array([0, 0.25, 1], np.float32))
    >>> codes.tolist(), low, round(1 / scale)
    ([0, 64, 255], 0.0, 255)
    """
    if not np.issubdtype(value.dtype, np.floating) or not value.size:
        return value
    low, high = bounds or (float(value.min()), float(value.max()))
    scale = (high - low) / (2**BITS - 1)
    if not np.float32(scale):  # of a tensor that is constant, or as good as, every code is 0
        scale = 1.0
    return np.round((value - np.float32(low)) / np.float32(scale)).astype(np.uint8), low, scale


def bytes_with_one_scale(state: State) -> int:
    """Return the size of a QZ checkpoint with one minimum and maximum for the whole model.

    Algorithm 1 can be read so: its first loop goes over all parameters before the scale is set. A few large
    values then leave the same code to most others, which gzip makes vanish; so does the model's accuracy.
    """
    floats = [value for value in state.values() if np.issubdtype(value.dtype, np.floating) and value.size]
    bounds = min(float(value.min()) for value in floats), max(float(value.max()) for value in floats)
    content = {name: quantised(value, bounds) for name, value in state.items()}
    return len(gzip.compress(pickle.dumps(content, protocol=5), GZIP_LEVEL))


def _timed(make: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    made = make()
    return made, time.perf_counter() - start


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _unstaged(path: Path, start: float) -> Stages:
    ended = time.perf_counter()
    return Stages(0.0, 0.0, ended - start, path.stat().st_size, ended)


def _remove(paths: list[Path]) -> None:
    while paths:
        paths.pop().unlink()


def _lay_out(state: State) -> tuple[list[Place], int]:
    places: list[Place] = []
    end = 0
    for name, value in state.items():
        places.append((name, value.shape, value.dtype.str, end))
        end += -(-value.nbytes // 64) * 64
    return places, end


def _views(memory: SharedMemory, places: list[Place]) -> Tensors:
    return {name: np.ndarray(shape, dtype, memory.buf, offset) for name, shape, dtype, offset in places}


def _write_shared(
    answer: Connection, memory_name: str, places: list[Place], path: Path, options: dict[str, bool]
) -> None:
    """Be the child: write what lies in shared memory, then say how it went."""
    memory = SharedMemory(memory_name)
    stages = write(path, _views(memory, places), **options)
    answer.send(stages)
    answer.close()
