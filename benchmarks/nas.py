"""Architecture search with and without inheriting: 1000 candidates on digits, in three modes (EvoStore, section 5.6).

No transfer; HDF5 files with a catalogue in Redis (the paper's baseline); the repository, with and without retirement.

Rules
- What is run is `examples/nas`, each search as a process with a cluster of its own, one after the other; what is
  measured is read from the journals that it writes.
- All searches have the same space, data, seed and number of workers. Repository and files take no sync to disk.
- One training of one epoch is the unit: each digit of the training set is seen nine times, moved by up to a pixel each
  way, so that an epoch takes about a second, as a search's candidates take longer than what is stored of them.
- The qualities that are aimed at are fixed here, not chosen by what was reached. Where the search without transfer
  never gets there, the ratio is a lower bound: its whole time counts.
- The order in which workers end differs from run to run, and with it the candidates: more seeds with --full.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from .measure import Effort, Goal, Report, Row, Sample, progress

EXAMPLE = Path(__file__).parents[1] / "examples/nas/run.py"
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


@dataclass(frozen=True)
class Size:
    """How much is searched."""

    candidates: int
    data: str
    seeds: Sequence[int]
    workers: int = 2
    """That evaluate candidates."""


SIZES = {
    Effort.QUICK: Size(24, "digits", (0,)),
    Effort.NORMAL: Size(1000, "digits-shifted", (0,)),
    Effort.FULL: Size(1000, "digits-shifted", (0, 1, 2)),
}


@dataclass(frozen=True)
class Candidate:
    """What the journal says of one candidate."""

    at: float
    """Seconds since the search began."""
    space_bytes: int
    """What was stored then."""
    quality: float | None
    written: int
    """Bytes that were saved of it."""
    busy_s: float
    stored_s: float
    """Seconds of a worker, and of these, for what is stored."""
    trained_s: float


@dataclass(frozen=True)
class Search:
    """One search that has ended."""

    candidates: Sequence[Candidate]

    @property
    def seconds(self) -> float:
        """End to end."""
        return self.candidates[-1].at

    @property
    def share(self) -> float:
        """Of the workers' time, for what is stored."""
        return sum(one.stored_s for one in self.candidates) / sum(one.busy_s for one in self.candidates)

    @property
    def best(self) -> float:
        """The best quality."""
        return max(one.quality or 0.0 for one in self.candidates)

    @property
    def written(self) -> int:
        """Bytes of all that was saved."""
        return sum(one.written for one in self.candidates)

    @property
    def most(self) -> int:
        """Bytes that were stored at most."""
        return max(one.space_bytes for one in self.candidates)

    def time_to(self, target: float) -> float | None:
        """Return when a quality was first reached, in seconds."""
        return next((one.at for one in self.candidates if (one.quality or 0.0) >= target), None)


def run(effort: Effort) -> Report:
    """Run all searches, one after the other."""
    size = SIZES[effort]
    found: dict[str, list[Search]] = {mode: [] for mode in OPTIONS}
    with tempfile.TemporaryDirectory(prefix="nas-") as folder:
        for seed in size.seeds:
            for mode in OPTIONS:
                progress(f"nas: {mode}, seed {seed}: {size.candidates} candidates")
                found[mode].append(searched(mode, seed, size, effort, Path(folder, f"{seed}-{mode}")))
    return reported(found)


def searched(mode: str, seed: int, size: Size, effort: Effort, out: Path) -> Search:
    """Run one search in a process of its own and read its journal.

    Raises:
        RuntimeError: it did not end well; says what it wrote.
    """
    quick = ("--quick",) if effort is Effort.QUICK else ()
    options = ("--out", out, "--candidates", size.candidates, "--data", size.data, "--seed", seed)
    command = [sys.executable, EXAMPLE, *OPTIONS[mode], *quick, *options, "--workers", size.workers]
    done = subprocess.run(  # noqa: S603 - no input
        list(map(str, command)),
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
    return read(journal.read_text())


def read(journal: str) -> Search:
    """Read the journal of a search."""
    events = [json.loads(line) for line in journal.splitlines()]
    return Search([_candidate(event) for event in events if "tell" in event])


def _candidate(event: Mapping[str, Any]) -> Candidate:
    told = event["tell"]
    return Candidate(
        event["at"],
        event["space_bytes"],
        told["quality"],
        told["bytes_written"],
        told["ended"] - told["began"],
        told["stored_s"],
        told["trained_s"],
    )


def reported(found: Mapping[str, Sequence[Search]]) -> Report:
    """Make the rows: end to end, each quality that is aimed at, overhead, space.

    Args:
        found: mode -> its searches, one per seed.
    """
    report = Report("nas")
    report.add(_end_to_end(found, NONE), headline=True)
    report.add(_end_to_end(found, HDF5))
    for target in TARGETS:
        row = _time_to(target, found)
        if row is not None:
            report.add(row)
    report.add(_space(found, REPOSITORY))
    report.add(_space(found, KEPT))
    return report


def _end_to_end(found: Mapping[str, Sequence[Search]], peer: str) -> Row:
    ours, theirs = (Sample(tuple(one.seconds for one in found[mode])) for mode in (REPOSITORY, peer))
    searches = found[REPOSITORY]
    share = mean(one.share for one in searches)
    goals = [Goal("share of the workers' time in the repository", share, at_most=0.015)] if peer == NONE else []
    if peer == NONE:
        goals.append(Goal("end to end, of the time without transfer", ours.median / theirs.median, at_most=0.75))
    facts = {
        "share": share,
        "peer_share": mean(one.share for one in found[peer]),
        "stored_ms_a_candidate": _a_candidate(searches, "stored_s"),
        "trained_ms_a_candidate": _a_candidate(searches, "trained_s"),
        "peer_stored_ms_a_candidate": _a_candidate(found[peer], "stored_s"),
        "peer_trained_ms_a_candidate": _a_candidate(found[peer], "trained_s"),
        "best": max(one.best for one in searches),
        "peer_best": max(one.best for one in found[peer]),
        "candidates": len(searches[0].candidates),
    }
    return Row(f"end to end, beside {peer}", ours, searches[0].written, peer, theirs, goals=tuple(goals), facts=facts)


def _a_candidate(searches: Sequence[Search], what: str) -> float:
    return 1e3 * mean(getattr(one, what) for search in searches for one in search.candidates)


def _time_to(target: float, found: Mapping[str, Sequence[Search]]) -> Row | None:
    """Compare when a quality is reached; None: the repository's searches do not all get there."""
    ours = [search.time_to(target) for search in found[REPOSITORY]]
    times = [at for at in ours if at is not None]
    if not times or len(times) < len(ours):
        return None
    theirs = [(search.time_to(target), search.seconds) for search in found[NONE]]
    reached = sum(at is not None for at, _ in theirs)
    least = Sample(tuple(end if at is None else at for at, end in theirs))
    sooner = least.median / median(times)
    what = "times sooner" if reached == len(theirs) else f"times sooner, at least ({NONE} never got there)"
    files = [at for search in found[HDF5] if (at := search.time_to(target)) is not None]
    facts: dict[str, float | int | str] = {"peer_reached": reached, "of_seeds": len(theirs)}
    if files:
        facts["hdf5_s"] = median(files)
    goals = (Goal(what, sooner, at_least=2.5),)
    return Row(f"time to {target:.1%}", Sample(tuple(times)), 0, NONE, least, goals=goals, facts=facts)


def _space(found: Mapping[str, Sequence[Search]], mode: str) -> Row:
    """Compare the space; the times are what storing takes of a candidate."""
    searches, files = found[mode], found[HDF5]
    most, written = max(one.most for one in searches), max(one.written for one in searches)
    everything = max(one.written for one in files)
    goals = [Goal("times less than HDF5 without retirement", everything / max(most, 1), at_least=5)]
    if mode == REPOSITORY:
        half = [max(one.space_bytes for one in search.candidates[: len(search.candidates) // 2]) for search in searches]
        goals.append(Goal("most in all, of the most in the first half", most / max(*half, 1), at_most=1.25))
    facts = {
        "most_bytes": most,
        "written_bytes": written,
        "hdf5_most_bytes": max(one.most for one in files),
        "hdf5_written_bytes": everything,
    }
    ours, theirs = (Sample(tuple(_a_candidate([one], "stored_s") / 1e3 for one in each)) for each in (searches, files))
    return Row(f"space, {mode}", ours, most, HDF5, theirs, goals=tuple(goals), facts=facts)
