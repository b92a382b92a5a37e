"""Compares the results of two runs of the same benchmarks.

Rules
- A case counts as changed if the interval of the ratio of its medians excludes every ratio from 1/1.05 to 1.05. The
  interval covers 95% of the ratios of resampled medians (bootstrap).
- The interval excludes differences between runs, such as the load. To measure those, compare two runs of one commit.
- A case with fewer than five samples in either run cannot be judged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from .report import seconds, table_of

FEWEST = 5
RESAMPLED = 2000
TOLERANCE = 1.05
"""A change up to this factor is noise."""


class Verdict(Enum):
    """The meaning of a difference between two runs."""

    SLOWER = "slower"
    FASTER = "faster"
    NOISE = "noise"
    TOO_FEW = "too few samples"


@dataclass(frozen=True)
class Change:
    """A case in two runs."""

    benchmark: str
    case: str
    before_s: float
    after_s: float
    ratio: float
    """Median after divided by median before."""
    low: float
    """Lower bound of the ratio."""
    high: float
    verdict: Verdict


def changes(before: Path, after: Path) -> list[Change]:
    """Compare all cases that two runs have in common.

    Args:
        before: A result file of `python -m benchmarks`, or a folder of them.
        after: The same of the other run.

    Raises:
        ValueError: if they have no case in common, or if a file is no result file.
    """
    first, second = dict(_cases(before)), dict(_cases(after))
    common = [key for key in first if key in second]
    if not common:
        raise ValueError(f"{before} and {after}: expected results of the same cases; they have none in common")
    return [change(*key, first[key], second[key]) for key in common]


def change(benchmark: str, case: str, before: Sequence[float], after: Sequence[float]) -> Change:
    """Judge one case by its samples, in seconds.

    >>> slow, fast = [2.0, 2.1, 2.0, 1.9, 2.0], [1.0, 1.1, 1.0, 0.9, 1.0]
    >>> change("calls", "commit", fast, slow).verdict, change("calls", "commit", slow, slow).verdict
    (<Verdict.SLOWER: 'slower'>, <Verdict.NOISE: 'noise'>)
    """
    middle = float(np.median(before)), float(np.median(after))
    rng = np.random.default_rng(0)
    medians = [np.median(rng.choice(times, (RESAMPLED, len(times))), axis=1) for times in (before, after)]
    low, high = map(float, np.quantile(medians[1] / medians[0], (0.025, 0.975)))
    if min(len(before), len(after)) < FEWEST:
        verdict = Verdict.TOO_FEW
    elif low > TOLERANCE:
        verdict = Verdict.SLOWER
    elif high < 1 / TOLERANCE:
        verdict = Verdict.FASTER
    else:
        verdict = Verdict.NOISE
    return Change(benchmark, case, *middle, middle[1] / middle[0], low, high, verdict)


def show(console: Console, before: Path, after: Path) -> None:
    """Print the comparison of two runs: where they ran, and each case.

    Raises:
        ValueError: as `changes` does.
    """
    found = changes(before, after)
    for name, path in (("before", before), ("after", after)):
        for about in dict.fromkeys(_about(result) for result in _results(path)):
            console.print(f"{name}: {about}", highlight=False, soft_wrap=True)
    lines = [
        {
            "benchmark": one.benchmark,
            "case": one.case,
            "before": seconds(one.before_s),
            "after": seconds(one.after_s),
            "after/before [95%]": f"{one.ratio:.2f} [{one.low:.2f}-{one.high:.2f}]",
            "verdict": one.verdict.value,
        }
        for one in found
    ]
    console.print(table_of("", lines))


def _results(path: Path) -> Iterator[dict[str, Any]]:
    """Read a result file, or those of a folder."""
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        try:
            result = json.loads(file.read_text())
        except (OSError, ValueError) as exc:
            raise ValueError(f"{file}: expected a result file of `python -m benchmarks`; found {exc}") from exc
        if not isinstance(result, dict) or not {"benchmark", "rows", "machine", "commit"} <= result.keys():
            raise ValueError(f"{file}: expected a result file of `python -m benchmarks`; found other JSON")
        yield result


def _cases(path: Path) -> Iterator[tuple[tuple[str, str], list[float]]]:
    for result in _results(path):
        for row in result["rows"]:
            if not row.get("ours_times_s"):
                found = f"{path}: expected the samples of {row.get('case')!r}; found none"
                raise ValueError(f"{found}: use the file that the run wrote, not the output of --json")
            yield (result["benchmark"], row["case"]), row["ours_times_s"]


def _about(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return f"commit {result['commit']}, {machine['cores']} cores, {machine['cpu']}, load {machine['load']}"
