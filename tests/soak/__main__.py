"""A soak: rounds of real processes under faults, until a duration is over.

    python -m tests.soak DURATION [--seed N] [--round N]

Rules
- Rounds follow from the seed (`modes`); `--round` plays one of them only, such as one that a finding names.
- Each round is a process with a Ray of its own below a folder of its own. What it leaves is killed, by its mark, and
  removed, after Ctrl-C too. The journals of a round with findings are kept, and named.
- The exit status is 1 when there is a finding.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from tests.soak import disk, ground, report
from tests.soak.modes import Round, round_of, seconds_of

ROOT = Path(__file__).resolve().parents[2]
ROUND_S = 30.0
"""Seconds of operations and faults in a round, where there is time for more than one."""
OVERHEAD_S = 25.0
"""About how long a round takes to begin and to end."""
LEAST_S = 8.0
LIMIT_S = 1500.0
"""How much longer than planned a round may take on a busy machine."""


def play(plan: Round, seconds: float, faults: int | None = None) -> report.Outcome:
    """Play one round in a process of its own, and clean up after it.

    Args:
        plan: the round.
        seconds: of operations and faults.
        faults: after so many it ends; None: as many as there is time for.
    """
    folder, mark = Path(tempfile.mkdtemp(prefix="tv-soak-")), uuid.uuid4().hex
    outcome = None
    try:
        (folder / "round.pickle").write_bytes(pickle.dumps(plan))
        environment = {
            **os.environ,
            ground.MARK: mark,
            "RAY_ADDRESS": "local",
            "RAY_TMPDIR": str(folder),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        command = [sys.executable, "-m", "tests.soak.round", str(folder), str(seconds)]
        command += [str(faults)] if faults is not None else []
        with open(folder / "round.err", "w+") as errors:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=errors, stderr=errors, start_new_session=True
            )
            try:
                process.wait(seconds + LIMIT_S)
            except subprocess.TimeoutExpired:
                pass
            except KeyboardInterrupt:
                process.send_signal(signal.SIGTERM)  # it ends its Ray by itself, if it has the time
                _wait(process)
                raise
            outcome = _outcome(plan, folder, process)
    finally:
        ground.end_all(mark)
        keep = outcome is not None and outcome.wrong
        for entry in folder.iterdir():
            if not keep or entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink()
        if keep:
            sys.stdout.write(f"journals of this round: {folder}\n")
        else:
            folder.rmdir()
    return outcome


def _outcome(plan: Round, folder: Path, process: subprocess.Popen[bytes]) -> report.Outcome:
    written = folder / "outcome.json"
    if written.exists():
        return report.Outcome.of(plan.where, json.loads(written.read_text()))
    said = (folder / "round.err").read_text(errors="replace")[-3000:]
    ended = f"it ended with {process.poll()}" if process.poll() is not None else "it goes on and on"
    return report.Outcome(plan.where, 0.0, {}, {}, {}, (), f"{ended}: {said}")


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(30.0)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


def main() -> int:
    """See the top."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description="Real processes under faults, round by round.")
    parser.add_argument("duration", type=seconds_of, help="such as 90s, 10m or 1h")
    parser.add_argument("--seed", type=int, default=None, help="draws everything; default: of the clock")
    parser.add_argument("--round", type=int, default=None, help="play this round only")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else int(time.time())
    reason = disk.why_not()
    if reason is not None:
        sys.stdout.write(f"left out: {', '.join(disk.ERRORS)}: {reason}\n")
    outcomes: list[report.Outcome] = []
    deadline, number = time.monotonic() + given.duration, given.round or 0
    try:
        while (left := deadline - time.monotonic() - OVERHEAD_S) > LEAST_S or not outcomes:
            whole = left < ROUND_S * 1.5 or given.round is not None
            plan = round_of(seed, number, reason is None)
            outcomes.append(play(plan, max(left if whole else ROUND_S, LEAST_S)))
            sys.stdout.write(report.line(outcomes[-1]) + "\n")
            sys.stdout.flush()
            if given.round is not None:
                break
            number += 1
    except KeyboardInterrupt:
        sys.stdout.write("interrupted; all that was started is ended\n")
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    sys.stdout.write(report.table(outcomes) + "\n")
    for outcome in wrong:
        sys.stdout.write(report.findings(outcome) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
