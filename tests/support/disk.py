"""What tests of persistence share: repositories with a path, what lies there, and waiting for it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tensorvine.actors import Repository
from tensorvine.actors.rpc.catalog_calls import CatalogCalls
from tensorvine.actors.rpc.messages import actor_name, catalog_name
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.actors.shard.parts.writes import Writes
from tensorvine.store import Layer, ModelGraph

from tests.support.actors import run_in
from tests.support.waiting import await_shards

MIB = 1 << 20
STORE = 64 * MIB
PATIENCE_S = 60.0
"""How long a busy machine may take for what happens by itself."""

_serial = itertools.count(1)


def start(path: object, shards: int = 1, store_bytes: int = STORE, **options: Any) -> Repository:
    """Start a repository of a name of its own on `path`."""
    return Repository.start(
        f"disk-{next(_serial)}",
        shards=shards,
        path=str(path),
        store_bytes=store_bytes,
        preallocate_bytes=0,
        **options,
    )


def bits(array: np.ndarray, seed: int) -> np.ndarray:
    """Fill an array with noise."""
    array.reshape(-1).view(np.uint8)[:] = np.random.default_rng(seed).integers(0, 256, array.nbytes, np.uint8)
    return array


def noise(nbytes: int, seed: int = 0) -> np.ndarray:
    """Return bytes that nothing compresses."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def weights(elements: int, seed: int = 0) -> np.ndarray:
    """Return floats as a layer has them."""
    return np.random.default_rng(seed).normal(0, 0.05, elements).astype(np.float32)


def same(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> bool:
    """Compare tensors bit for bit."""
    return found.keys() == expected.keys() and all(
        (found[k].dtype, found[k].shape) == (v.dtype, v.shape) and found[k].tobytes() == v.tobytes()
        for k, v in expected.items()
    )


def manifests(path: Path) -> list[str]:
    """List the versions on disk, retired ones included, in the order in which they appeared."""
    files = sorted((path / "manifests").rglob("*.arrow"), key=lambda file: file.stat().st_mtime_ns)
    return [str(file.relative_to(path / "manifests")).removesuffix(".arrow") for file in files]


def segments(path: Path) -> list[Path]:
    """List the segments' files."""
    return sorted((path / "segments").glob("*.arrow"))


def name_at(repo: Repository, shard: int, stem: str = "at") -> str:
    """Return a name of which `repo` puts what it saves into `shard`."""
    await_shards(repo)  # a client passes over those that have not started yet
    return next(n for i in range(1000) if repo._session.near(n := f"{stem}{shard}-{i}") == shard)


def kill_shard(repo: Repository, shard: int) -> None:
    """Kill a shard's process; it starts again by itself."""
    process = psutil.Process(repo._session.connection(shard).hello.pid)
    process.kill()
    psutil.wait_procs([process], timeout=20)


def check(repo: Repository) -> None:
    """Have the catalog and all shards derive their counts anew, and compare."""
    repo._session.catalog.call(CatalogCalls.check(), PATIENCE_S)
    for shard in repo._session.shards:
        repo._session.call(shard, ShardCalls.check())


def in_shard(repo: Repository, shard: int, work: Callable[[Any], Any]) -> Any:
    """Have a shard run a function of its actor: a nested one, which goes there as code and not as a name."""
    return run_in(repo.engine, actor_name(repo.name, shard), work)


def in_catalog(repo: Repository, work: Callable[[Any], Any]) -> Any:
    """Have the catalog run a function of its actor, as `in_shard` does."""
    return run_in(repo.engine, catalog_name(repo.name), work)


def hold_disk(repo: Repository, shard: int | None, gate: Path, step: str = "write_segment", after: int = 0) -> Path:
    """Have a shard, or the catalog (None), wait before a step of its archive until the file `gate` is there.

    The first `after` times are excepted. What this gives is there as soon as somebody waits.
    """
    opened, waits = str(gate), str(gate.with_name(f"{gate.name}.{shard}"))

    def hold(actor: Any) -> None:
        archive = actor._context.archive if shard is None else actor.parts[Writes]._history._archive
        real, calls = getattr(archive, step), itertools.count()

        def held(*arguments: Any) -> Any:
            if next(calls) >= after:
                Path(waits).touch()
                deadline = time.monotonic() + PATIENCE_S
                while not Path(opened).exists():
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{opened}: nobody opened the gate")
                    threading.Event().wait(0.01)
            return real(*arguments)

        setattr(archive, step, held)

    if shard is None:
        in_catalog(repo, hold)
    else:
        in_shard(repo, shard, hold)
    return Path(waits)


def is_refused(repo: Repository, shard: int = 0) -> bool:
    """Tell whether the disk has refused what a shard has to write, and has not taken it since."""

    def refused(actor: Any) -> bool:
        return actor.parts[Writes]._history.persister.error is not None

    return in_shard(repo, shard, refused)


def chain(kinds: Sequence[str]) -> ModelGraph:
    """Return a graph of one tensor per layer: `l0/w`, `l1/w`, ..."""
    layers = [Layer("in", {"class": "Input"})]
    for i, kind in enumerate(kinds):
        layers.append(Layer(f"l{i}", {"class": kind}, [layers[-1].name], [f"l{i}/w"]))
    return ModelGraph(layers)
