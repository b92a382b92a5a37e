"""The start on a long history: from nothing running to the first load that is answered.

Rules
- The history is one model whose every version is new in all of its tensors, which are tiny: what a start must know of
  tensors counts, not their bytes. It is saved, written behind, and the repository stopped; one shard. The files have
  just been written, so they are in the page cache.
- A start includes Ray's own, and ends with one tensor of the newest version. Beside it, a start on an empty path.
- The floor reads the bytes of the same files. The peer is safetensors, which has a file per version: all are opened and
  asked for the names in them, and one tensor is read. It keeps no index of versions, graphs or who shares what.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .callers import timed
from .disk import TIMEOUT_S, settle, start
from .measure import GIB, MIB, Action, Effort, Goal, Report, Row, Sample, Tensors, alternate, progress

if TYPE_CHECKING:
    from tensorvine.actors import Repository
    from tensorvine.clusters import LocalCluster

    Running = tuple[LocalCluster, Repository]

MODEL = "model"
ITEMS = 4
STORE_BYTES = 512 * MIB
GOAL_S, GOAL_TENSORS = 15.0, 1_000_000
"""The goal is meant for so many."""
LONG, EMPTY, PEER, FLOOR = "history", "an empty path", "safetensors", "reading the files' bytes"


@dataclass(frozen=True)
class Size:
    """How long a history is."""

    versions: int
    tensors: int
    """Of each version."""

    @property
    def all(self) -> int:
        """Tensors of all versions."""
        return self.versions * self.tensors

    def version(self, number: int) -> Tensors:
        """Return the tensors of a version; they are views of one array."""
        values = np.random.default_rng(number).random((self.tensors, ITEMS), np.float32)
        return {f"layer.{place}/kernel": row for place, row in enumerate(values)}


SIZES = {
    Effort.QUICK: (Size(3, 100),),
    Effort.NORMAL: (Size(50, 2_000), Size(50, 20_000)),
    Effort.FULL: (Size(50, 2_000), Size(50, 20_000)),
}
ROUNDS = {Effort.QUICK: 1, Effort.NORMAL: 3, Effort.FULL: 7}


def run(effort: Effort) -> Report:
    """Measure each size."""
    report = Report("start")
    for size in SIZES[effort]:
        with tempfile.TemporaryDirectory(prefix="start-") as folder:
            measure(report, size, Path(folder), ROUNDS[effort])
    return report


def measure(report: Report, size: Size, folder: Path, rounds: int) -> None:
    """Write a history into a folder, and time starts on it."""
    path, empty, files = folder / "history", folder / "empty", folder / "safetensors"
    progress(f"start: writing {size.versions} versions of {size.tensors} tensors")
    write(path, size)
    write_files(files, size)
    settle()
    progress("start: starting on them")
    whole: list[float] = []
    found = alternate(
        {
            LONG: Action(lambda: _first_load(begin(path)), partial(_check, size, whole)),
            EMPTY: Action(partial(begin, empty), _end),
            PEER: Action(partial(_open_all, files, size)),
            FLOOR: Action(lambda: sum(len(file.read_bytes()) for file in _files(path))),
        },
        rounds=rounds,
        warmup=0,
    )
    _add(report, size, found, sum(file.stat().st_size for file in _files(path)), whole)


def write(path: Path, size: Size) -> None:
    """Save a history, wait until it is on disk, and stop the repository."""
    from tensorvine.clusters import LocalCluster

    with LocalCluster(object_store_bytes=GIB), start(path, STORE_BYTES) as repo:
        for number in range(size.versions):
            repo.save(MODEL, size.version(number), inherit=None, timeout=TIMEOUT_S)
        repo.flush(TIMEOUT_S)


def write_files(folder: Path, size: Size) -> None:
    """Write each version with safetensors."""
    from safetensors.numpy import save_file

    folder.mkdir()
    for number in range(size.versions):
        save_file(size.version(number), folder / f"{number:06d}.safetensors")


def begin(path: Path) -> Running:
    """Start Ray and a repository."""
    from tensorvine.clusters import LocalCluster

    return LocalCluster(object_store_bytes=GIB), start(path, STORE_BYTES)


def _first_load(running: Running) -> Running:
    running[1].load(MODEL, tensors=["layer.0/kernel"], timeout=TIMEOUT_S)
    return running


def _check(size: Size, whole: list[float], running: Running) -> None:
    """See that all is there, time a load of a whole version, and stop what runs."""
    repo = running[1]
    took, loaded = timed(lambda: repo.load(f"{MODEL}@1", timeout=TIMEOUT_S))
    whole.append(took)
    if len(loaded) != size.tensors or len(repo.models()) != size.versions:
        raise RuntimeError(
            f"start: expected {size.versions} versions, the first of {size.tensors} tensors; "
            f"found {len(repo.models())}, and {len(loaded)}"
        )
    _end(running)


def _end(running: Running) -> None:
    cluster, repo = running
    with cluster:
        repo.close()


def _open_all(folder: Path, size: Size) -> None:
    """Open the files of all versions, and read one tensor."""
    from safetensors import safe_open

    opened = [safe_open(file, framework="numpy") for file in sorted(folder.iterdir())]
    names = sum(len(file.keys()) for file in opened)
    opened[-1].get_tensor("layer.0/kernel")
    if names != size.all:
        raise RuntimeError(f"start: safetensors: expected {size.all} names; found {names}")


def _files(path: Path) -> list[Path]:
    return [file for file in sorted(path.rglob("*")) if file.is_file()]


def _add(report: Report, size: Size, found: dict[str, Sample], size_bytes: int, whole: list[float]) -> None:
    ours, empty, peer, floor = (found[name] for name in (LONG, EMPTY, PEER, FLOOR))
    case = f"{size.versions} x {size.tensors} tensors"
    goals = (Goal("seconds to the first load", ours.median, at_most=GOAL_S),) if size.all == GOAL_TENSORS else ()
    facts = {"empty_s": empty.median, "history_s": ours.median - empty.median, "tensors": size.all}
    report.add(
        Row(f"{case}: start to the first load", ours, size_bytes, PEER, peer, FLOOR, floor.median, goals, facts),
        headline=bool(goals),
    )
    report.add(Row(f"{case}: start on {EMPTY}", empty, 0))
    report.add(Row(f"{case}: then version 1 as a whole", Sample(tuple(whole)), 4 * ITEMS * size.tensors))
