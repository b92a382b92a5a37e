"""Time from nothing running to the first load, on a history of 1,000,000 tensors, compared with safetensors.

Rules
- The history is one model whose every version is new in all of its tensors, which are tiny: the number of tensors
  counts, not their bytes. It is saved, written in the background, and the repository stopped; one shard. The files are
  in the page cache.
- A start includes Ray's own, and ends with one tensor of the newest version. It is compared with a start on an empty
  path.
- The floor reads the bytes of the same files. The peer is safetensors, which has a file per version: all are opened and
  asked for their names, and one tensor is read. It has no index of versions, graphs or shared tensors.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from .core.measure import GIB, MIB, Tensors, alternate, expect, progress, sample, timed
from .core.report import Goal, Report
from .persist import TIMEOUT_S, start

MODEL, ITEMS = "model", 4
STORE_BYTES = 512 * MIB
GOAL_S, GOAL_TENSORS = 15.0, 1_000_000
"""The goal is for this number of tensors."""
HISTORY, EMPTY, PEER, FLOOR = "history", "an empty path", "safetensors", "reading the files' bytes"


def run(report: Report) -> None:
    """Measure each size: versions, and tensors of each."""
    sizes = report.pick(quick=((2, 50),), normal=((50, 2_000), (50, 20_000)))
    for versions, tensors in sizes:
        with tempfile.TemporaryDirectory(prefix="start-") as folder:
            _measure(report, versions, tensors, Path(folder), report.pick(quick=1, normal=3))


def _version(number: int, tensors: int) -> Tensors:
    values = np.random.default_rng(number).random((tensors, ITEMS), np.float32)
    return {f"layer.{place}/kernel": row for place, row in enumerate(values)}


def _measure(report: Report, versions: int, tensors: int, folder: Path, rounds: int) -> None:
    """Write a history into a folder, and time starts on it."""
    path, empty, files = folder / "history", folder / "empty", folder / "safetensors"
    progress(f"start: writing {versions} versions of {tensors} tensors")
    _write(path, files, versions, tensors)
    os.sync()
    progress("start: starting on them")
    whole: list[float] = []

    def first_load() -> Any:
        running = _begin(path)
        running[1].load(MODEL, tensors=["layer.0/kernel"], timeout=TIMEOUT_S)
        return running

    def check(running: Any) -> None:
        """Check the history, time a load of a whole version, and stop."""
        repo = running[1]
        took, loaded = timed(lambda: repo.load(f"{MODEL}@1", timeout=TIMEOUT_S))
        whole.append(took)
        found = len(repo.models()), len(loaded)
        _end(running)
        expect(found == (versions, tensors), "start", f"{versions} versions of {tensors} tensors")

    def open_all() -> None:
        from safetensors import safe_open

        opened = [safe_open(file, framework="numpy") for file in sorted(files.iterdir())]
        names = sum(len(file.keys()) for file in opened)
        opened[-1].get_tensor("layer.0/kernel")
        expect(names == versions * tensors, "start", f"{versions * tensors} names in files")

    found = alternate(
        {
            HISTORY: (first_load, check),
            EMPTY: (lambda: _begin(empty), _end),
            PEER: open_all,
            FLOOR: lambda: sum(len(file.read_bytes()) for file in _files(path)),
        },
        rounds=rounds,
        warmup=0,
    )
    case, ours, nothing = f"{versions} x {tensors} tensors", found[HISTORY], found[EMPTY]
    reached = versions * tensors == GOAL_TENSORS
    report.add(
        f"{case}: start to the first load",
        ours,
        sum(file.stat().st_size for file in _files(path)),
        peer=(PEER, found[PEER]),
        floor=(FLOOR, found[FLOOR]),
        goals=[Goal("seconds to the first load", ours.median, at_most=GOAL_S)] if reached else [],
        headline=reached,
        history_s=ours.median - nothing.median,
        tensors=versions * tensors,
    )
    report.add(f"{case}: start on {EMPTY}", nothing)
    report.add(f"{case}: then version 1 as a whole", sample(whole), 4 * ITEMS * tensors)


def _files(path: Path) -> list[Path]:
    return [file for file in sorted(path.rglob("*")) if file.is_file()]


def _write(path: Path, files: Path, versions: int, tensors: int) -> None:
    """Save a history, wait until it is on disk, and stop the repository; write each version with safetensors."""
    from safetensors.numpy import save_file
    from tensorvine.clusters import LocalCluster

    files.mkdir()
    with LocalCluster(object_store_bytes=GIB), start(path, STORE_BYTES) as repo:
        for number in range(versions):
            repo.save(MODEL, _version(number, tensors), inherit=None, timeout=TIMEOUT_S)
            save_file(_version(number, tensors), files / f"{number:06d}.safetensors")
        repo.flush(TIMEOUT_S)


def _begin(path: Path) -> Any:
    """Start Ray and a repository."""
    from tensorvine.clusters import LocalCluster

    return LocalCluster(object_store_bytes=GIB), start(path, STORE_BYTES)


def _end(running: Any) -> None:
    cluster, repo = running
    with cluster:
        repo.close()
