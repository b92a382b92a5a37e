"""`python -m tests.branches FOLDER...`: which part of the source was taken by the processes whose branches are there.

A row of each folder and one of all. The processes were measured by `hook`, whose folder was in their PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import coverage
from coverage.data import CoverageData
from rich.console import Console
from rich.table import Table

from tests.branches.hook.sitecustomize import ROOMS, ROOT

Arcs = dict[str, set[int]]
"""Of each file: from which line to which, packed as coverage.py's tracer does."""


def main(folders: list[Path]) -> None:
    """Print a row of each folder, and one of all."""
    found = {folder.name: taken(folder) for folder in folders}
    if len(found) > 1:
        found["all"] = union(found.values())
    table = Table("tests", *(f"{what} taken" for what in ("lines", "branches", "both")))
    for name, arcs in found.items():
        table.add_row(name, *figures(arcs))
    Console().print(table)


def figures(arcs: Arcs) -> tuple[str, str, str]:
    """Return how many lines and branches were taken, and the part of both."""
    totals = reported(arcs)["totals"]
    lines = f"{totals['covered_lines']} of {totals['num_statements']}"
    branches = f"{totals['covered_branches']} of {totals['num_branches']}"
    return lines, branches, f"{totals['percent_covered']:.2f}%"


def union(several: Iterable[Arcs]) -> Arcs:
    """Return what is in any of these."""
    of_all: Arcs = defaultdict(set)
    for found in several:
        for name, arcs in found.items():
            of_all[name] |= arcs
    return of_all


def taken(folder: Path) -> Arcs:
    """Return what all processes took; a last line that was cut off by a kill is left out."""
    arcs: Arcs = defaultdict(set)
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                for name, packed in json.loads(line).items():
                    arcs[name].update(packed)
    return arcs


def reported(arcs: Arcs) -> dict[str, dict[str, float]]:
    """Return coverage.py's report of these."""
    with tempfile.TemporaryDirectory() as folder:
        data = CoverageData(str(Path(folder, "data")))
        data.add_arcs({name: [unpacked(pair) for pair in pairs] for name, pairs in arcs.items()})
        data.touch_files([str(path) for room in ROOMS for path in Path(ROOT, room).rglob("*.py")])
        data.write()
        report = coverage.Coverage(data_file=data.data_filename(), branch=True, config_file=False)
        report.load()
        outfile = Path(folder, "report.json")
        report.json_report(outfile=str(outfile))
        return json.loads(outfile.read_text())


def unpacked(pair: int) -> tuple[int, int]:
    """Return a pair of lines: 28 bits each, then their signs."""
    first, second = pair & 0xFFFFFFF, pair >> 28 & 0xFFFFFFF
    return (-first if pair >> 56 & 1 else first), (-second if pair >> 57 & 1 else second)


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
