"""File formats that users write models to: h5py, Keras, SavedModel, safetensors, torch; and plain files.

Rules
- A peer first holds the tensors in the form from which its framework saves (variables, modules). This is not part of a
  save, because a training run has them in that form anyway.
- `save` writes to a path and closes it. Only `Plain` syncs; the page cache takes the bytes of the others.
- `load` returns arrays by tensor name. Formats that can read single tensors do so (`partial`); others read everything.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .measure import Tensors


class Peer(ABC):
    """A file format and the library that users write it with."""

    name: str
    partial = True
    _held: Any

    def hold(self, tensors: Tensors) -> None:
        """Take the tensors in the framework's own form."""
        self._held = tensors

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write all tensors to a path that does not exist yet."""

    @abstractmethod
    def load(self, path: Path, names: Sequence[str] | None = None) -> Tensors:
        """Read all tensors, or those named."""

    @staticmethod
    def remove(path: Path) -> None:
        """Delete a file or a folder."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


class H5py(Peer):
    """Bare h5py: one contiguous dataset per tensor."""

    name = "h5py"

    def save(self, path: Path) -> None:
        """Write one dataset per tensor."""
        import h5py

        with h5py.File(path, "w") as file:
            for name, tensor in self._held.items():
                file.create_dataset(name, data=tensor)

    def load(self, path: Path, names: Sequence[str] | None = None) -> Tensors:
        """Read the datasets named; a user who has the model's graph knows the names."""
        import h5py

        with h5py.File(path, "r") as file:
            datasets: Any = file
            return {name: datasets[name][()] for name in (self._held if names is None else names)}


class KerasWeights(Peer):
    """`save_weights` and `load_weights` of a built Keras model."""

    name, partial = "keras .weights.h5", False

    def hold(self, tensors: Tensors) -> None:
        """Put every tensor into a variable of a model with one layer per tensor."""
        self._names, self._model = list(tensors), _keras_model(tensors)

    def save(self, path: Path) -> None:
        """Call `save_weights`."""
        file = path.with_name(f"{path.name}.weights.h5")
        self._model.save_weights(file)
        file.rename(path)

    def load(self, path: Path, names: Sequence[str] | None = None) -> Tensors:
        """Call `load_weights` on the model that is built already, then return its variables."""
        link = path.with_name(f"{path.name}.weights.h5")
        link.hardlink_to(path)
        self._model.load_weights(link)
        link.unlink()
        loaded = dict(zip(self._names, (v.value.numpy() for v in self._model.weights), strict=True))
        return loaded if names is None else {name: loaded[name] for name in names}


class SavedModel(Peer):
    """TensorFlow's SavedModel of a module that has the variables and no functions."""

    name, partial = "SavedModel", False

    def hold(self, tensors: Tensors) -> None:
        """Put every tensor into a `tf.Variable` of one module."""
        import tensorflow as tf

        self._names = list(tensors)
        self._module: Any = tf.Module()
        variable: Any = tf.Variable
        self._module.values = [variable(tensor) for tensor in tensors.values()]

    def save(self, path: Path) -> None:
        """Call `tf.saved_model.save`."""
        import tensorflow as tf

        tf.saved_model.save(self._module, str(path))

    def load(self, path: Path, names: Sequence[str] | None = None) -> Tensors:
        """Call `tf.saved_model.load` and return the new module's variables."""
        import tensorflow as tf

        module: Any = tf.saved_model.load(str(path))
        loaded = dict(zip(self._names, (variable.numpy() for variable in module.values), strict=True))
        return loaded if names is None else {name: loaded[name] for name in names}


class Safetensors(Peer):
    """safetensors with its NumPy interface."""

    name = "safetensors"

    def save(self, path: Path) -> None:
        """Call `save_file`."""
        from safetensors.numpy import save_file

        save_file(self._held, path)

    def load(self, path: Path, names: Sequence[str] | None = None) -> Tensors:
        """Open the file and copy the tensors."""
        from safetensors import safe_open

        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in (self._held if names is None else names)}


class Torch(Peer):
    """`torch.save` and `torch.load` of a state dict on the CPU."""

    name = "torch.save"

    def hold(self, tensors: Tensors) -> None:
        """View the arrays as torch tensors."""
        import torch

        self._held = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}

    def save(self, path: Path) -> None:
        """Call `torch.save`."""
        import torch

        torch.save(self._held, path)

    def load(self, path: Path, names: Sequence[str] | None = None) -> Tensors:
        """Read everything into memory, or map the file and copy the tensors named."""
        import torch

        state = torch.load(path, weights_only=True, mmap=names is not None)
        if names is None:
            return {name: tensor.numpy() for name, tensor in state.items()}
        return {name: state[name].clone().numpy() for name in names}


class Plain(Peer):
    """The tensors' bytes and nothing else, in one file: `write` and `fsync`, `preadv`. It is a floor."""

    name = "plain write + fsync"

    def hold(self, tensors: Tensors) -> None:
        """Keep the arrays and their offsets in the file."""
        self._held = tensors
        ends = np.cumsum([0, *(tensor.nbytes for tensor in tensors.values())]).tolist()
        self._offsets = dict(zip(tensors, ends, strict=False))

    def save(self, path: Path) -> None:
        """Write the file, and sync it and its folder."""
        with open(path, "xb", buffering=0) as file:
            for tensor in self._held.values():
                left = tensor.reshape(-1).view(np.uint8).data
                while left:
                    left = left[os.write(file.fileno(), left) :]
            os.fsync(file.fileno())
        _sync(path.parent)

    def load(self, path: Path, names: Sequence[str] | None = None) -> Tensors:
        """Read by position."""
        found: Tensors = {}
        with open(path, "rb", buffering=0) as file:
            for name in self._held if names is None else names:
                found[name] = np.empty_like(self._held[name])
                left, offset = found[name].reshape(-1).view(np.uint8).data, self._offsets[name]
                while left:
                    count = os.preadv(file.fileno(), [left], offset)
                    if not count:
                        raise EOFError(f"plain file: expected {len(left)} more bytes at {offset}; found its end")
                    left, offset = left[count:], offset + count
        return found


def file_peers() -> list[Peer]:
    """Return one peer of each format."""
    return [H5py(), KerasWeights(), SavedModel(), Safetensors(), Torch()]


def sync(path: Path) -> None:
    """Write a file, or all files of a folder, to the disk, and the folders that name them."""
    for part in (path, *_below(path), path.parent):
        _sync(part)


def drop_from_cache(path: Path) -> None:
    """Drop a folder's files from the page cache, as far as they are synced."""
    for file in _below(path):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _below(path: Path) -> Iterator[Path]:
    return path.rglob("*") if path.is_dir() else iter([path])


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _keras_model(tensors: Tensors) -> Any:
    import keras

    class Holder(keras.layers.Layer):
        """One variable."""

        def __init__(self, tensor: np.ndarray[Any, Any]) -> None:
            super().__init__()
            self.kernel = self.add_weight(shape=tensor.shape, dtype=str(tensor.dtype), initializer="zeros")
            self.kernel.assign(tensor)
            self.built = True

    class Model(keras.Model):
        """All variables, in order."""

        def __init__(self) -> None:
            super().__init__()
            self.holders = [Holder(tensor) for tensor in tensors.values()]
            self.built = True

        def call(self, inputs: Any) -> Any:
            """Return the inputs."""
            return inputs

    return Model()
