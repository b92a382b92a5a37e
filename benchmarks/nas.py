"""A search of 1000 candidates without transfer, with HDF5 files and Redis, and with the repository (EvoStore, 5.6).

Rules
- It runs `examples/nas`, each search as a process with a cluster of its own, one after the other, and reads the
  journals that the example writes.
- All searches have the same space, data, seed and number of workers. Repository and files are not synced to disk.
- A training has one epoch: each digit is seen nine times, moved by up to a pixel each way, so that an epoch takes about
  a second.
- The target qualities are fixed here. If the search without transfer never reaches one, the ratio is a lower bound: its
  whole time counts. The order in which workers end differs from run to run, and with it the candidates.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from .core.measure import progress, sample
from .core.report import ROOT, Effort, Goal, Report

TARGETS = (0.96, 0.97, 0.98, 0.985, 0.99)
"""Mean accuracies over the classes."""
NONE, HDF5, REPOSITORY, KEPT = "no transfer", "HDF5 + Redis", "repository", "repository, nothing retired"
OPTIONS = {
    NONE: ("--mode", "none"),
    HDF5: ("--mode", "hdf5"),
    REPOSITORY: ("--mode", "repository", "--memory"),
    KEPT: ("--mode", "repository", "--memory", "--keep"),
}
TIMEOUT_S = 3600.0
Search = list[dict[str, Any]]
"""Candidates in the order in which they ended: `at`, `space_bytes`, and the journal's facts of each."""


def run(report: Report) -> None:
    """Run all searches, one after the other."""
    size = report.pick(quick=(3, "wine", 1), normal=(1000, "digits-shifted", 2))
    found: dict[str, Search] = {}
    with tempfile.TemporaryDirectory(prefix="nas-") as folder:
        for mode in OPTIONS:
            progress(f"nas: {mode}: {size[0]} candidates")
            found[mode] = searched(mode, size, report.effort, Path(folder, mode))
    add(report, found)


def searched(mode: str, size: tuple[int, str, int], effort: Effort, out: Path) -> Search:
    """Run one search in a process of its own and read its journal.

    Args:
        mode: Of `OPTIONS`.
        size: Number of candidates, data, workers.
        effort: With less than `NORMAL`, networks are small.
        out: Folder of the journal.

    Raises:
        RuntimeError: if the search fails. The message contains its output.
    """
    candidates, data, workers = size
    quick = () if effort is Effort.NORMAL else ("--quick",)
    options = ("--out", out, "--candidates", candidates, "--data", data, "--seed", 0, "--workers", workers)
    done = subprocess.run(  # noqa: S603 - no input
        [sys.executable, *map(str, (ROOT / "examples/nas/run.py", *OPTIONS[mode], *quick, *options))],
        env={**os.environ, "RAY_ADDRESS": "local"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"nas: {mode}: expected exit status 0; found {done.returncode}:\n{done.stdout}")
    (journal,) = out.glob("*/journal.jsonl")
    events = map(json.loads, journal.read_text().splitlines())
    return [{**event["tell"], **event} for event in events if "tell" in event]


def add(report: Report, found: Mapping[str, Search]) -> None:
    """Add the rows: end to end, each target quality, space."""
    ours, none, files = found[REPOSITORY], found[NONE], found[HDF5]
    ends = {mode: search[-1]["at"] for mode, search in found.items()}
    share = sum(one["stored_s"] for one in ours) / sum(one["ended"] - one["began"] for one in ours)
    goals = [
        Goal("share of the workers' time in the repository", share, at_most=0.015),
        Goal("end to end, of the time without transfer", ends[REPOSITORY] / ends[NONE], at_most=0.75),
    ]
    for peer in (NONE, HDF5):
        report.add(
            f"end to end, beside {peer}",
            sample(ends[REPOSITORY]),
            _sum(ours),
            peer=(peer, sample(ends[peer])),
            goals=goals if peer == NONE else [],
            headline=peer == NONE,
            share=share,
            stored_ms_a_candidate=1e3 * mean(one["stored_s"] for one in ours),
            best=max(one["quality"] or 0.0 for one in ours),
            peer_best=max(one["quality"] or 0.0 for one in found[peer]),
            candidates=len(ours),
        )
    for target in TARGETS:
        at, theirs = _reached(ours, target), _reached(none, target)
        if at is not None:
            what = "times sooner" if theirs is not None else f"times sooner, at least ({NONE} never got there)"
            least = ends[NONE] if theirs is None else theirs
            report.add(
                f"time to {target:.1%}",
                sample(at),
                peer=(NONE, sample(least)),
                goals=[Goal(what, least / at, at_least=2.5)],
                hdf5_s=_reached(files, target),
            )
    for mode in (REPOSITORY, KEPT):
        search = found[mode]
        most = max(one["space_bytes"] for one in search)
        goals = [Goal("times less than HDF5 without retirement", _sum(files) / max(most, 1), at_least=5)]
        if mode == REPOSITORY:
            half = max(one["space_bytes"] for one in search[: len(search) // 2])
            goals.append(Goal("most in all, of the most in the first half", most / max(half, 1), at_most=1.25))
        report.add(
            f"space, {mode}",
            sample(mean(one["stored_s"] for one in search)),
            most,
            peer=(HDF5, sample(mean(one["stored_s"] for one in files))),
            goals=goals,
            written_bytes=_sum(search),
            hdf5_written_bytes=_sum(files),
        )


def _sum(search: Sequence[Mapping[str, Any]]) -> int:
    return sum(one["bytes_written"] for one in search)


def _reached(search: Sequence[Mapping[str, Any]], target: float) -> float | None:
    """Return when a quality was first reached, in seconds."""
    return next((one["at"] for one in search if (one["quality"] or 0.0) >= target), None)
