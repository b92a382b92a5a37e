"""What a layer keeps outside of its variables: files of `save_assets`, entries of `save_own_variables`, learned bins.

Rules
- It is stored as tensors of the layer: "<vertex>/assets/<path>" holds a file's bytes, "<vertex>/state/<key>" an entry
  that is none of the model's weights. "#2" follows "assets" or "state" where variables are named so already.
- What Keras' hooks wrote, Keras' hooks read: `load_own_variables`, `load_assets`, then `finalize_state`.
- A layer whose hooks write variables and nothing else, as most of Keras' do, keeps nothing: it is not looked at.
- Nothing is pickled. A path that comes from the store is checked before a file is written.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# (keras's types are partial)

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence, Set
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, SupportsInt, cast

import keras
import numpy as np

from ..arrays import Array, as_numpy, read_only
from ..errors import CorruptDataError, GraphError, TensorMismatchError, TensorVineError

ASSETS = "assets"
STATE = "state"
BINS = "bin_boundaries"
"""What `Discretization.adapt` learns: Keras has it in the config."""

_OF_VARIABLES = frozenset(
    function
    for layer in (
        keras.Layer,
        keras.layers.Dense,
        keras.layers.EinsumDense,
        keras.layers.Embedding,
        keras.layers.Conv2D,
    )
    for function in (layer.save_own_variables, layer.load_own_variables)
)
"""Hooks of Keras that write and read variables, and nothing else."""
_LOOKUPS = (keras.layers.StringLookup, keras.layers.IntegerLookup, keras.layers.TextVectorization)
IDF = "idf_weights"


def keeps(kind: type[object]) -> bool:
    """Tell whether layers of a class may keep something outside of their variables, or derive something from them."""
    return issubclass(kind, keras.Layer) and (
        _saves(kind) or _loads(kind) or hasattr(kind, "save_assets") or hasattr(kind, "finalize_state")
    )


def holds_its_parts(layer: keras.Layer) -> bool:
    """Tell whether a layer keeps for the layers inside it as well."""
    return isinstance(layer, keras.layers.TextVectorization)


class Keeper:
    """One layer that keeps something.

    Args:
        layer: of Keras or one's own.
        vertex: name of the vertex that holds it; its tensors' names begin so.
        inner: its path within the vertex: empty, or with a slash at its end.
    """

    def __init__(self, layer: keras.Layer, vertex: str, inner: str) -> None:
        self.layer = layer
        self.vertex = vertex
        self.inner = inner
        self.folders = {part: f"{vertex}/{inner}{part}" for part in (ASSETS, STATE)}
        """Part -> what its tensors' names begin with, without the slash."""

    @property
    def writes(self) -> bool:
        """Whether its class has hooks that may write more than variables."""
        return _saves(type(self.layer)) or hasattr(self.layer, "save_assets")

    @property
    def sources(self) -> list[keras.Variable]:
        """Weights from which the layer may derive something when it is given its state."""
        kind = type(self.layer)
        return list(self.layer.weights) if _loads(kind) or hasattr(kind, "finalize_state") else []

    def part_of(self, name: str) -> tuple[str, str] | None:
        """Split a tensor's name into the part, and the path or key there; None: it is not of this layer."""
        for part, folder in self.folders.items():
            if name.startswith(folder + "/"):
                return part, name[len(folder) + 1 :]
        return None

    def tensors(self, weights: Set[int]) -> dict[str, Array]:
        """Return what the layer keeps now, by name; `weights` are ids of the model's.

        Raises:
            GraphError: a hook of the layer raised.
            TensorMismatchError: it gave what is no array of numbers.
        """
        try:
            entries = {key: value for key, value in self._entries().items() if id(value) not in weights}
            files = self._files()
        except Exception as exc:
            raise self._failed("save_own_variables and save_assets to return its state", exc) from exc
        named = {f"{self.folders[ASSETS]}/{path}": np.frombuffer(content, np.uint8) for path, content in files.items()}
        for key, value in entries.items():
            name = f"{self.folders[STATE]}/{key}"
            named[name] = np.array(as_numpy(value, f"tensor {name!r}"))  # the layer may change its own
        return {name: read_only(array) for name, array in named.items()}

    def checked(self, tensors: Mapping[str, object]) -> dict[str, Array]:
        """Return what is the layer's of `tensors`, if it can be given back.

        Raises:
            CorruptDataError: a path that leads out of the folder.
            TensorMismatchError: a file that is no row of bytes.
        """
        found: dict[str, Array] = {}
        for name, value in tensors.items():
            part = self.part_of(name)
            if part is None:
                continue
            array = found[name] = as_numpy(value, f"tensor {name!r}")
            if part[0] == ASSETS:
                _check_file(name, part[1], array)
        return found

    def restore(self, tensors: Mapping[str, Array], weights: Set[int]) -> None:
        """Give back to the layer what `tensors` gave, after its variables have their values.

        Raises:
            GraphError: a hook of the layer raised; the layer may have changed.
        """
        parts: dict[str, dict[str, Array]] = {ASSETS: {}, STATE: {}}
        for name, array in tensors.items():
            part, key = self.part_of(name) or (STATE, name)
            parts[part][key] = array
        try:
            self._take_entries(parts[STATE], weights)
            self._take_files(parts[ASSETS])
            finalize: Any = getattr(type(self.layer), "finalize_state", None)
            if finalize is not None and not finalize.__module__.startswith("keras."):  # Keras calls its own, if need be
                finalize(self.layer)
        except Exception as exc:
            raise self._failed("load_own_variables, load_assets and finalize_state to accept its state", exc) from exc

    def _entries(self) -> dict[str, object]:
        if isinstance(self.layer, keras.layers.Discretization):
            learned = self.layer.num_bins is not None and self.layer.bin_boundaries is not None
            return {BINS: np.asarray(self.layer.bin_boundaries, np.float64)} if learned else {}
        entries: dict[str, object] = {}
        if isinstance(self.layer, _LOOKUPS) and not int(_lookup(self.layer).lookup_table.size()):
            return entries
        if _saves(type(self.layer)):
            self.layer.save_own_variables(entries)
        if IDF in entries and isinstance(self.layer, _LOOKUPS):
            weights = cast(Array, entries[IDF])
            entries[IDF] = weights[: self.layer.vocabulary_size()]  # Keras pads, and refuses what it padded
        return entries

    def _files(self) -> dict[str, bytes]:
        save: Any = getattr(self.layer, "save_assets", None)
        if save is None or (isinstance(self.layer, _LOOKUPS) and not int(_lookup(self.layer).lookup_table.size())):
            return {}  # Keras cannot read the file of a vocabulary that has no token yet
        with tempfile.TemporaryDirectory(prefix="tensorvine-assets-") as folder:
            save(folder)
            files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
            if files and isinstance(self.layer, _LOOKUPS):
                _check_lines(files[0], self.layer)
            return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    def _take_entries(self, stored: Mapping[str, Array], weights: Set[int]) -> None:
        if isinstance(self.layer, keras.layers.Discretization):
            if BINS in stored:
                self.layer.bin_boundaries = stored[BINS].tolist()
            return
        if not (_loads(type(self.layer)) or stored):
            return
        if IDF in stored and isinstance(self.layer, _LOOKUPS):
            vars(_lookup(self.layer)).pop(IDF, None)  # it may have another length
        entries = {key: np.array(array) for key, array in stored.items()}  # its own: the stored ones are read-only
        self.layer.load_own_variables(self._variables(entries.keys(), weights) | entries)

    def _variables(self, stored: Set[str], weights: Set[int]) -> dict[str, Array]:
        """Return the entries that the layer's variables are, under the keys by which its hook calls them."""
        probe: dict[str, Any] = {}
        try:
            self.layer.save_own_variables(probe)
        except Exception:
            if not stored:
                raise
            return {}  # it cannot tell before it was filled: then what is stored must do, or its hook raises
        return {key: as_numpy(value, key) for key, value in probe.items() if id(value) in weights}

    def _take_files(self, files: Mapping[str, Array]) -> None:
        load: Any = getattr(self.layer, "load_assets", None)
        if load is None or not files:
            return
        with tempfile.TemporaryDirectory(prefix="tensorvine-assets-") as folder:
            for path, content in files.items():
                target = Path(folder, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.tobytes())
            load(folder)

    def _failed(self, expected: str, exc: Exception) -> TensorVineError:
        if isinstance(exc, TensorVineError):
            return exc
        what = f"layer {self.layer.name!r} ({type(self.layer).__name__})"
        return GraphError(f"{what}: expected {expected}; found {type(exc).__name__}: {exc}")


def without_learned(kind: str, config: Mapping[str, object]) -> Mapping[str, object]:
    """Return a layer's config without what `adapt` learned, which is stored as tensors: it is no architecture."""
    if kind == "Discretization" and config.get("num_bins") is not None:
        return {key: value for key, value in config.items() if key != BINS}
    if kind in {lookup.__name__ for lookup in _LOOKUPS} and config.get("vocabulary") is None:
        return {key: value for key, value in config.items() if key != "vocabulary_size"}
    return config


class _Table(Protocol):
    def size(self) -> SupportsInt: ...


class _Lookup(Protocol):
    """A layer that holds a vocabulary."""

    lookup_table: _Table

    def get_vocabulary(self, *, include_special_tokens: bool) -> Sequence[object]: ...


def _lookup(layer: object) -> _Lookup:
    """Return the layer that holds the vocabulary."""
    return cast("_Lookup", getattr(layer, "_lookup_layer", layer))


def _saves(kind: type[object]) -> bool:
    return cast(Any, kind).save_own_variables not in _OF_VARIABLES or issubclass(kind, keras.layers.Discretization)


def _loads(kind: type[object]) -> bool:
    return cast(Any, kind).load_own_variables not in _OF_VARIABLES


def _check_lines(vocabulary: Path, layer: object) -> None:
    """Refuse a vocabulary with tokens that Keras would not read from its file as they are."""
    lines = vocabulary.read_text().splitlines()
    while lines and not lines[-1]:  # as Keras reads it
        lines.pop()
    tokens = [str(token) for token in _lookup(layer).get_vocabulary(include_special_tokens=True)]
    if lines != tokens:
        raise ValueError(
            f"{len(tokens)} tokens, which Keras would read back as {len(lines)} different ones: a token is empty or "
            "contains a line break"
        )


def _check_file(name: str, path: str, content: Array) -> None:
    parts = path.split("/")
    if not PurePosixPath(path).parts or {"", ".", ".."} & set(parts) or "\0" in path:
        raise CorruptDataError(f"tensor {name!r}: expected a path within the layer's assets; found {path!r}")
    if content.dtype != np.uint8 or content.ndim != 1:
        found = f"{content.dtype.name} of shape {content.shape}"
        raise TensorMismatchError(f"tensor {name!r}: expected a file's bytes in a 1-D uint8 array; found {found}")
