"""The baseline's store: each candidate's whole model in an HDF5 file, found through the catalogue in Redis.

Rules
- It answers to the calls of a repository that a candidate makes, so that candidates are treated alike in all modes:
  prefix query with a reference, load of what matches, release; `FileCandidate` saves.
- A file is written whole, whatever was inherited; it is read in part. It goes with the last reference to it.
- An architecture is stored once: a model of one that is registered already only adds a reference (EvoStore, 5.2).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from tensorvine.actors import Saved
from tensorvine.actors.search.candidate import Candidate
from tensorvine.store import ModelGraph, ModelRef
from tensorvine.store.errors import ModelNotFoundError

from .catalogue import Catalogue, Found

if TYPE_CHECKING:
    from tensorvine.actors import Repository
    from tensorvine.actors.client.match import PrefixMatch
    from tensorvine.actors.search.parts import ModelParts


class FileMatch:
    """What a query found: as `PrefixMatch`, of a file."""

    def __init__(self, store: FileStore, query: ModelGraph, found: Found) -> None:
        self.key, self.ref = found.key, ModelRef(found.name, 1)
        self.layers = query.common_prefix(found.graph)
        """Layer of the query -> matching layer of the ancestor."""
        self.tensors = {
            mine: theirs
            for layer, source in self.layers.items()
            for mine, theirs in zip(query.by_name[layer].tensors, found.graph.by_name[source].tensors, strict=True)
        }
        """Tensor of the query -> matching tensor of the ancestor."""
        self._store, self._graph, self._released = store, found.graph, False

    def release(self, wait: bool = True) -> None:
        """Let the file go; a second call is no error."""
        if not self._released:
            self._released = True
            self._store.let_go(self.key)

    def _ancestor(self) -> ModelGraph:
        return self._graph


class FileStore:
    """A client of the store.

    Args:
        url: of the Redis server with the catalogue.
        folder: of the files; every worker reaches it.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self._catalogue = Catalogue(url)
        self._folder = folder
        self._matches: dict[ModelRef, FileMatch] = {}

    def close(self) -> None:
        """Disconnect; the files stay."""
        self._catalogue.close()

    def longest_prefix(self, graph: ModelGraph) -> FileMatch | None:
        """Find the ancestor; its file stays until the match is released."""
        found = self._catalogue.query(graph)
        if found is None:
            return None
        match = FileMatch(self, graph, found)
        self._matches = {match.ref: match}
        return match

    def load(self, ref: ModelRef, *, layers: Sequence[str]) -> dict[str, np.ndarray]:
        """Read the tensors of some layers of the ancestor that was found last."""
        import h5py

        match = self._matches[ref]
        graph = match._ancestor()
        names = [name for layer in layers for name in graph.by_name[layer].tensors]
        with h5py.File(self._path(match.key)) as file:
            return {name: file[name][()] for name in names}

    def save(self, name: str, graph: ModelGraph, tensors: Mapping[str, np.ndarray], quality: float) -> Saved:
        """Write the whole model, where its architecture is new, and let queries find it."""
        key, written = graph.fingerprint.hex(), 0
        if self._catalogue.register(key, name):
            written = self._write(self._path(key), tensors)
            self._catalogue.publish(key, name, graph, quality)
        return Saved(ModelRef(name, 1), written, 0)

    def retire(self, ref: ModelRef) -> None:
        """Drop a model.

        Raises:
            ModelNotFoundError: there is none of that name.
        """
        key = self._catalogue.withdraw(ref.name)
        if key is None:
            raise ModelNotFoundError(f"retire: expected a model named {ref.name!r} in the catalogue; found none")
        self.let_go(key)

    def let_go(self, key: str) -> None:
        """Drop a reference to an architecture; the last one deletes its file."""
        if self._catalogue.release(key):
            self._path(key).unlink(missing_ok=True)
            self._catalogue.forget(key)

    def models(self, prefix: str) -> list[ModelRef]:
        """List the models whose names begin with `prefix`."""
        return [ModelRef(name, 1) for name in self._catalogue.models(prefix)]

    def bytes_stored(self) -> int:
        """Sum up the sizes of the files."""
        with os.scandir(self._folder) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.name.endswith(".h5"))

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.h5"

    def _write(self, path: Path, tensors: Mapping[str, np.ndarray]) -> int:
        import h5py

        part = path.with_suffix(f".{os.getpid()}.part")
        with h5py.File(part, "w") as file:
            for name, tensor in tensors.items():
                file.create_dataset(name, data=tensor)
        written = part.stat().st_size
        part.replace(path)
        return written


class FileCandidate(Candidate):
    """A candidate whose ancestors and whose own weights are in files; all else is as with a repository."""

    def __init__(self, store: FileStore, name: str, model: Any) -> None:
        self._files = store
        super().__init__(cast("Repository", store), name, model)

    def save(self, quality: float, metadata: Mapping[str, Any] | None = None, timeout: float = 60.0) -> Saved | None:
        """Save the model; the files have no place for metadata, and the catalogue has its own timeouts."""
        parts = self._parts
        if parts is None:
            return None
        with self._timed():
            return self._files.save(self.name, parts.graph, parts.tensors(), quality)

    def _query(self, _: Repository, parts: ModelParts) -> PrefixMatch | None:
        return cast("PrefixMatch | None", self._files.longest_prefix(parts.graph))

    def _announce(self, *_: object) -> None:
        """Do nothing: a file needs no preparation."""
