"""The disk: the floor, what it takes to measure it, and DCP and Orbax beside the peers that write one file.

Rules
- Something is on disk when its bytes and its folder are synced; whoever does not sync by itself is followed by `sync`.
- `settle` comes before whatever is timed: else one pays for what another left to be written.
- Nothing of the page cache is dropped but what `drop_from_cache` is given; what has not been synced stays in it.
- DCP and Orbax write folders; both sync their files by themselves.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tensorvine.store import ModelRef
from tensorvine.store.segments.segment import split

from .measure import Tensors, wait_until
from .peers import H5py, Peer, Safetensors, Torch

if TYPE_CHECKING:
    from tensorvine.actors import Repository
    from tensorvine.store import Codec

TIMEOUT_S = 600.0
"""For saves, loads and waits: a busy disk may take its time."""
_serial = count(1)


class Plain(Peer):
    """The floor: the tensors' bytes and nothing else, written with `write` and `fsync`, read with `preadv`.

    Args:
        split_as_ours: as many files as a repository would write; else one.

    >>> import tempfile
    >>> plain = Plain()
    >>> plain.hold({"a": np.arange(3.0), "b": np.zeros((2, 0)), "c": np.ones(2)})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     plain.save(Path(folder, "model"))
    ...     plain.load(Path(folder, "model"), ["c"])
    {'c': array([1., 1.])}
    """

    partial = True

    def __init__(self, *, split_as_ours: bool = False) -> None:
        self.name = "as many plain files" if split_as_ours else "plain write + fsync"
        self._split = split_as_ours

    def hold(self, tensors: Tensors) -> None:
        """Keep the arrays, and decide what goes into which file."""
        names = list(tensors)
        sizes = [tensors[name].nbytes for name in names]
        runs = split(sizes) if self._split else [range(len(names))]
        self._tensors = tensors
        self._files = [[names[place] for place in run] for run in runs]
        self._places: dict[str, tuple[int, int]] = {}
        for number, run in enumerate(runs):
            offset = 0
            for place in run:
                self._places[names[place]] = number, offset
                offset += sizes[place]

    @property
    def files(self) -> int:
        """How many files it writes."""
        return len(self._files)

    def save(self, path: Path) -> None:
        """Write each file, sync it, and sync the folder."""
        path.mkdir()
        for number, names in enumerate(self._files):
            with open(path / str(number), "xb", buffering=0) as file:
                for name in names:
                    _write_all(file.fileno(), self._tensors[name])
                os.fsync(file.fileno())
        for folder in (path, path.parent):
            _sync(folder)

    def load(self, path: Path, names: Sequence[str] | None = None) -> Tensors:
        """Read by position."""
        found: Tensors = {}
        for name in self._tensors if names is None else names:
            number, offset = self._places[name]
            found[name] = np.empty_like(self._tensors[name])
            descriptor = os.open(path / str(number), os.O_RDONLY)
            try:
                _read_all(descriptor, found[name], offset)
            finally:
                os.close(descriptor)
        return found


class Dcp(Peer):
    """torch.distributed.checkpoint of a state dict in one process, without a process group."""

    name = "DCP"
    partial = True

    def hold(self, tensors: Tensors) -> None:
        """View the arrays as torch tensors."""
        import torch

        self._state = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}

    def save(self, path: Path) -> None:
        """Call `save`."""
        from torch.distributed.checkpoint.state_dict_saver import save

        with _without_the_warning_of_one_process():
            save(self._state, checkpoint_id=path, no_dist=True)

    def load(self, path: Path, names: Sequence[str] | None = None) -> Tensors:
        """Call `load` with a state dict that has the tensors asked for."""
        import torch
        from torch.distributed.checkpoint.state_dict_loader import load

        state = {name: torch.empty_like(self._state[name]) for name in (self._state if names is None else names)}
        with _without_the_warning_of_one_process():
            load(state, checkpoint_id=path, no_dist=True)
        return {name: tensor.numpy() for name, tensor in state.items()}


class Orbax(Peer):
    """Orbax's PyTree checkpointer, synchronous, with its defaults (OCDBT); the tree is a flat mapping."""

    name = "Orbax"
    partial = True

    def hold(self, tensors: Tensors) -> None:
        """Keep the arrays as they are: Orbax takes NumPy's."""
        import orbax.checkpoint as orbax

        self._tensors = tensors
        self._orbax: Any = orbax
        self._checkpointer: Any = orbax.PyTreeCheckpointer()

    def save(self, path: Path) -> None:
        """Call `save`."""
        self._checkpointer.save(path, args=self._orbax.args.PyTreeSave(self._tensors))

    def load(self, path: Path, names: Sequence[str] | None = None) -> Tensors:
        """Call `restore`, of a part of the tree where names are given."""
        kind = self._orbax.RestoreArgs(restore_type=np.ndarray)
        wanted = list(self._tensors if names is None else names)
        args = self._orbax.args.PyTreeRestore(
            item=dict.fromkeys(wanted, 0), restore_args=dict.fromkeys(wanted, kind), partial_restore=names is not None
        )
        return dict(self._checkpointer.restore(path, args=args))


def disk_peers() -> tuple[list[Peer], list[str]]:
    """Return one of each peer that writes tensors as they are and reads single ones, and lines about them."""
    peers: list[Peer] = [H5py(), Safetensors(), Torch(), Dcp()]
    try:
        return [*peers, Orbax()], [f"Orbax: orbax-checkpoint {version('orbax-checkpoint')}, jax {version('jax')}"]
    except PackageNotFoundError as exc:
        return peers, [f"Orbax is missing: {exc}"]


def start(path: Path, store_bytes: int, *, touched: int = 0, shards: int = 1, codec: Codec | None = None) -> Repository:
    """Start a repository on a path, under a name that was not used before.

    Args:
        path: the repository's.
        store_bytes: capacity of each shard.
        touched: bytes of it to take from the system now. Fresh pages cost more than writing a file does.
        shards: how many.
        codec: how tensors are stored.
    """
    from tensorvine.actors import Repository

    name = f"disk-{next(_serial)}"
    return Repository.start(
        name, path=path, shards=shards, store_bytes=store_bytes, preallocate_bytes=touched, codec=codec
    )


def sync(path: Path) -> None:
    """Bring a file, or all files of a folder, to the disk, and the folders that name them."""
    for part in (path, *_below(path), path.parent):
        _sync(part)


def settle() -> None:
    """Have everything written that anybody on this machine left in the page cache."""
    os.sync()


def drop_from_cache(path: Path) -> None:
    """Drop a folder's files from the page cache (`posix_fadvise`, `DONTNEED`), as far as they are synced."""
    for file in _below(path):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def erase(repo: Repository, path: Path, ref: ModelRef) -> None:
    """Retire the only model of a repository, and wait until its memory is free and its files are gone."""
    repo.retire(ref)
    wait_until(lambda: repo.stats().bytes_memory == 0, f"no bytes in memory after {ref}", timeout=TIMEOUT_S)
    wait_until(lambda: not any((path / "segments").iterdir()), f"no segments after {ref}", timeout=TIMEOUT_S)


def _below(path: Path) -> Iterator[Path]:
    return path.rglob("*") if path.is_dir() else iter([path])


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, tensor: np.ndarray[Any, Any]) -> None:
    left = tensor.reshape(-1).view(np.uint8).data
    while left:
        left = left[os.write(descriptor, left) :]


def _read_all(descriptor: int, tensor: np.ndarray[Any, Any], offset: int) -> None:
    left = tensor.reshape(-1).view(np.uint8).data
    while left:
        count = os.preadv(descriptor, [left], offset)
        if not count:
            raise EOFError(f"plain file: expected {len(left)} more bytes at {offset}; found its end")
        left, offset = left[count:], offset + count


def _without_the_warning_of_one_process() -> warnings.catch_warnings[Any]:
    """Keep DCP from warning that it runs in one process, which is what `no_dist` asks for."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
