"""`python -m tests.fuzz [DURATION] [--seed N] [--count M] [--target X ...]`: damaged inputs for every reader.

Rules
- A seed, a target and a number make an input. A finding names them, and the input itself is kept as a file.
- With a duration, seeds follow one another until the time is over. The exit status is 1 when something was found.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.child import ENVIRONMENT
from tests.fuzz.runner import EndedError, Outcome, run, scratch
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS
from tests.soak.modes import seconds_of

COUNT = 2000


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """See the top."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Damaged inputs for every reader.")
    parser.add_argument("duration", nargs="?", type=seconds_of, help="seed after seed, such as for 10m or 8h")
    parser.add_argument("--target", choices=[target.name for target in TARGETS], nargs="+", help="only these")
    parser.add_argument("--seed", type=int, help="draws the inputs; default: of the clock")
    parser.add_argument("--count", type=int, default=COUNT, help="inputs of each target")
    parser.add_argument("--number", type=int, help="only this input")
    parser.add_argument("--folder", help="for files; default: in memory, and inputs that found something in TMPDIR")
    given = parser.parse_args()
    targets = [target for target in TARGETS if not given.target or target.name in given.target]
    numbers = range(given.count) if given.number is None else range(given.number, given.number + 1)
    seed = given.seed if given.seed is not None else int(time.time())
    until = time.monotonic() + (given.duration or 0.0)
    found = False
    with scratch(given.folder) as folder:
        try:
            while True:
                say(f"seed {seed}")
                goes_on = (lambda: time.monotonic() < until) if given.duration else (lambda: True)
                for together in _together(targets):
                    for outcome in run(together, seed, numbers, folder, goes_on=goes_on):
                        _show(outcome, Path(given.folder or tempfile.gettempdir()))
                        found = found or bool(outcome.findings)
                if time.monotonic() >= until:
                    break
                seed += 1
        except EndedError as exc:
            say(f"ended by {exc}")
            return 1
    return 1 if found else 0


def _together(targets: Sequence[Target]) -> list[list[Target]]:
    """Say which share a process: those that import a framework."""
    heavy = [target for target in targets if target.heavy]
    return [*([target] for target in targets if not target.heavy), *([heavy] if heavy else [])]


def _show(outcome: Outcome, folder: Path) -> None:
    if outcome.read + outcome.refused or outcome.findings:
        say(str(outcome))
    for finding in outcome.findings:
        path = folder / f"tv-fuzz-{finding.target}-{finding.seed}-{finding.number}-{finding.kind}"
        path.write_bytes(finding.content)
        say(f"  {finding}\n  its input: {path}")


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.environ.update(ENVIRONMENT)
        os.execv(sys.executable, [sys.executable, "-m", "tests.fuzz", *sys.argv[1:]])  # noqa: S606  itself
    sys.exit(main())
