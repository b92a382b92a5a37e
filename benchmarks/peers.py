"""What users write models to files with: h5py, Keras, SavedModel, safetensors, torch.

Rules
- A peer first takes hold of the tensors in the form that its framework saves from (variables, modules); this
  is not part of a save, as a training run has them in that form anyway.
- `save` writes to the path and closes; nothing is synced, so that the page cache takes the bytes.
- `load` gives arrays by tensor name. Where a format can read single tensors it does (`partial`); the others
  read everything.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .measure import Tensors


class Peer(ABC):
    """A file format and the library that users write it with."""

    name: str
    """As the tables call it."""
    partial: bool
    """Whether it can read some tensors without the others."""

    @abstractmethod
    def hold(self, tensors: Tensors) -> None:
        """Take the tensors in the framework's own form."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write all that is held to a path that does not exist yet."""

    @abstractmethod
    def load(self, path: Path, names: Sequence[str] | None = None) -> Tensors:
        """Read all tensors, or those named."""

    @staticmethod
    def remove(path: Path) -> None:
        """Delete what `save` wrote, a file or a folder."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


class H5py(Peer):
    """Bare h5py: one contiguous dataset per tensor."""

    name = "h5py"
    partial = True

    def hold(self, tensors: Tensors) -> None:
        """Keep the arrays as they are."""
        self._tensors = tensors

    def save(self, path: Path) -> None:
        """Write one dataset per tensor."""
        import h5py

        with h5py.File(path, "w") as file:
            for name, tensor in self._tensors.items():
                file.create_dataset(name, data=tensor)

    def load(self, path: Path, names: Sequence[str] | None = None) -> Tensors:
        """Read the datasets named; the names are known to a user who has the model's graph."""
        import h5py

        with h5py.File(path, "r") as file:
            datasets: Any = file
            return {name: datasets[name][()] for name in (self._tensors if names is None else names)}


class KerasWeights(Peer):
    """A built Keras model with `save_weights` and `load_weights` to `.weights.h5`."""

    name = "keras .weights.h5"
    partial = False

    def hold(self, tensors: Tensors) -> None:
        """Put every tensor into a variable of a model with one layer per tensor."""
        self._names = list(tensors)
        self._model = _keras_model(tensors)

    def save(self, path: Path) -> None:
        """Call `model.save_weights`."""
        self._model.save_weights(_with_suffix(path, ".weights.h5"))
        _with_suffix(path, ".weights.h5").rename(path)

    def load(self, path: Path, names: Sequence[str] | None = None) -> Tensors:
        """Call `model.load_weights` on the model that is built already, then hand out its variables."""
        link = _with_suffix(path, ".weights.h5")
        if not link.exists():
            link.hardlink_to(path)
        self._model.load_weights(link)
        link.unlink()
        loaded = dict(zip(self._names, (v.value.numpy() for v in self._model.weights), strict=True))
        return loaded if names is None else {name: loaded[name] for name in names}


class SavedModel(Peer):
    """TensorFlow's SavedModel of a module that holds the variables and no functions."""

    name = "SavedModel"
    partial = False

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
        """Call `tf.saved_model.load` and hand out the new module's variables."""
        import tensorflow as tf

        module: Any = tf.saved_model.load(str(path))
        loaded = dict(zip(self._names, (variable.numpy() for variable in module.values), strict=True))
        return loaded if names is None else {name: loaded[name] for name in names}


class Safetensors(Peer):
    """safetensors with its NumPy interface."""

    name = "safetensors"
    partial = True

    def hold(self, tensors: Tensors) -> None:
        """Keep the arrays as they are."""
        self._tensors = tensors

    def save(self, path: Path) -> None:
        """Call `save_file`."""
        from safetensors.numpy import save_file

        save_file(self._tensors, path)

    def load(self, path: Path, names: Sequence[str] | None = None) -> Tensors:
        """Open the file and copy out the tensors asked for."""
        from safetensors import safe_open

        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in (self._tensors if names is None else names)}


class Torch(Peer):
    """`torch.save` and `torch.load` of a state dict on the CPU."""

    name = "torch.save"
    partial = True

    def hold(self, tensors: Tensors) -> None:
        """View the arrays as torch tensors."""
        import torch

        self._state = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}

    def save(self, path: Path) -> None:
        """Call `torch.save`."""
        import torch

        torch.save(self._state, path)

    def load(self, path: Path, names: Sequence[str] | None = None) -> Tensors:
        """Read everything into memory, or map the file and copy out the tensors named."""
        import torch

        state = torch.load(path, weights_only=True, mmap=names is not None)
        if names is None:
            return {name: tensor.numpy() for name, tensor in state.items()}
        return {name: state[name].clone().numpy() for name in names}


def file_peers(*, large: bool = False) -> list[Peer]:
    """Return one of each.

    Args:
        large: leave out those that hold a second copy of the tensors, for models that do not fit in
            memory as often as that.
    """
    peers: list[Peer] = [H5py(), Safetensors(), Torch()]
    return peers if large else [*peers[:1], KerasWeights(), SavedModel(), *peers[1:]]


def _with_suffix(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


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
            """Give the inputs back: the model is there for its variables."""
            return inputs

    return Model()
