"""Who hands a trained model over to one that answers: files as users write them, and the floors.

Rules
- A party's time begins when the training hands over, and ends when the other model would answer with the new version.
- Files are read the moment they are written: that their reader must hear of them costs them nothing here. Nothing of
  them is synced.
"""

from __future__ import annotations

import socket
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .measure import Tensors, buffers_like, total_bytes
from .networks import Training


@dataclass(frozen=True)
class Parts:
    """One update, part by part."""

    total_s: float
    """From the training's hand-over until the consumer's model had the version."""
    stall_s: float = 0.0
    """For which training waited."""
    commit_s: float = 0.0
    """From the end of that until the training's process knew that the version exists."""
    exists_s: float = 0.0
    """From the hand-over until the shard made it exist (`ModelInfo.created`)."""
    notify_s: float = 0.0
    """From then until the consumer was told."""
    fetch_s: float = 0.0
    """Until its bytes were there."""
    swap_s: float = 0.0
    """Until the consumer's model had taken them."""


class Party(ABC):
    """Somebody who brings the training's tensors to another model."""

    name: str
    """As the tables call it."""
    every: int = 1
    """Takes part in each so-many-th turn: who takes long has fewer."""

    @abstractmethod
    def update(self) -> Parts:
        """Bring the tensors as they are now."""

    @abstractmethod
    def check(self) -> None:
        """Raise `RuntimeError` where what the last update brought is not what the training has."""


# ---- files ----------------------------------------------------------------------------------------------


class KerasFile(Party):
    """`save_weights` to `.weights.h5`, `load_weights` into the consumer's model: the paper's baseline."""

    name = "Keras HDF5"

    def __init__(self, training: Training, folder: Path, every: int) -> None:
        self.every = every
        self._training = training
        self._path = folder / "keras.weights.h5"
        self._consumer: Any = training.network.build()

    def update(self) -> Parts:
        """Write and read."""
        start = time.perf_counter()
        self._training.model.save_weights(self._path)
        saved = time.perf_counter()
        self._consumer.load_weights(self._path)
        end = time.perf_counter()
        self._path.unlink()
        return Parts(end - start, stall_s=saved - start, fetch_s=end - saved)

    def check(self) -> None:
        """Compare all variables."""
        weights = zip(self._consumer.weights, self._training.model.weights, strict=True)
        expect(all(np.array_equal(mine.numpy(), theirs.numpy()) for mine, theirs in weights), self.name)


class H5File(Party):
    """Bare h5py: one contiguous dataset per tensor."""

    name = "h5py"

    def __init__(self, training: Training, folder: Path, every: int) -> None:
        self.every = every
        self._training = training
        self._path = folder / "plain.h5"

    def update(self) -> Parts:
        """Write and read."""
        return self._brought()[0]

    def check(self) -> None:
        """Compare all arrays."""
        expect(_equal(self._brought()[1], self._training.arrays), self.name)

    def _brought(self) -> tuple[Parts, Tensors]:
        import h5py

        start = time.perf_counter()
        with h5py.File(self._path, "w") as file:
            for name, array in self._training.arrays.items():
                file.create_dataset(name, data=array)
        saved = time.perf_counter()
        with h5py.File(self._path, "r") as file:
            datasets: Any = file
            read = {name: datasets[name][()] for name in self._training.arrays}
        end = time.perf_counter()
        self._path.unlink()
        return Parts(end - start, stall_s=saved - start, fetch_s=end - saved), read


# ---- floors ---------------------------------------------------------------------------------------------


class Copy(Party):
    """One memory copy by one thread into warm arrays."""

    name = "one warm memory copy"

    def __init__(self, training: Training, buffers: Tensors) -> None:
        self._training = training
        self._buffers = buffers

    def update(self) -> Parts:
        """Copy every tensor."""
        start = time.perf_counter()
        for name, array in self._training.arrays.items():
            np.copyto(self._buffers[name], array)
        return Parts(time.perf_counter() - start)

    def check(self) -> None:
        """Compare all arrays."""
        expect(_equal(self._buffers, self._training.arrays), self.name)


class Loopback(Party):
    """The bytes through a TCP connection of this machine, into warm arrays; a thread sends them."""

    name = "a raw loopback socket"

    def __init__(self, training: Training, buffers: Tensors) -> None:
        self._training = training
        self._buffers = buffers
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._sender = socket.create_connection(server.getsockname())
            self._receiver, _ = server.accept()

    def update(self) -> Parts:
        """Send and receive every tensor."""
        start = time.perf_counter()
        sender = threading.Thread(target=self._send)
        sender.start()
        for buffer in self._buffers.values():
            left = buffer.reshape(-1).view(np.uint8).data
            while left:
                count = self._receiver.recv_into(left)
                if not count:
                    raise EOFError(f"loopback socket: expected {len(left)} more bytes; found its end")
                left = left[count:]
        sender.join()
        return Parts(time.perf_counter() - start)

    def check(self) -> None:
        """Compare what came."""
        expect(_equal(self._buffers, self._training.arrays), self.name)

    def close(self) -> None:
        """End the connection."""
        self._sender.close()
        self._receiver.close()

    def _send(self) -> None:
        for array in self._training.arrays.values():
            self._sender.sendall(array.reshape(-1).view(np.uint8).data)


# ---- what they share ------------------------------------------------------------------------------------


def warm_buffers(training: Training) -> Tensors:
    """Make the arrays that the floors fill."""
    return buffers_like(training.arrays)


def _equal(found: Tensors, wanted: Tensors) -> bool:
    return total_bytes(found) == total_bytes(wanted) and all(
        np.array_equal(found[name], array) for name, array in wanted.items()
    )


def expect(true: bool, name: str) -> None:
    """Raise `RuntimeError` unless a check came out true."""
    if not true:
        raise RuntimeError(f"{name}: expected the training's tensors at the consumer; found others")
