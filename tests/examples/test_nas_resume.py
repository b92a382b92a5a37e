"""The search of `examples/nas` whose controller is killed goes on as if nothing had been."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from examples.nas.journal import Told, read
from examples.nas.results import results_of
from tests.support.example_runs import PYTHON, ROOT
from tests.support.marked import MARK, marked

RUN = ROOT / "examples/nas/run.py"
CANDIDATES, KILL_AFTER = 18, 10
"""The first 8 are drawn; then they descend from one another, and those that leave the population are retired."""
LIMIT_S = 200.0

pytestmark = [pytest.mark.own_cluster, pytest.mark.timeout(900)]


def start(out: Path, *options: str) -> subprocess.Popen[str]:
    command = [*PYTHON, "torch", str(RUN), "--quick", "--mode", "repository", "--workers", "1", "--data", "wine"]
    return subprocess.Popen(
        [*command, "--candidates", str(CANDIDATES), "--out", str(out), *options],
        cwd=ROOT,
        env={**os.environ, MARK: str(out), "RAY_ADDRESS": "local", "COLUMNS": "120"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def told(out: Path) -> list[Told]:
    journal = out / "repository" / "journal.jsonl"
    if not journal.exists() or journal.stat().st_size == 0:
        return []
    return [event for event in read(journal)[1] if isinstance(event, Told)]


def facts(out: Path) -> list[tuple[object, ...]]:
    """Return what must be the same: the candidates in order, what they reached, and whom they inherited from."""
    return [
        (
            one.outcome.number,
            one.outcome.quality,
            one.outcome.taken,
            re.sub(
                r"-\d+@", "@", one.outcome.ancestor or ""
            ),  # the candidate that was evaluated twice has another name
            one.outcome.bytes_written,
        )
        for one in told(out)
    ]


def test_a_search_whose_controller_is_killed_goes_on_exactly(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    try:
        first = start(parts)
        deadline = time.monotonic() + LIMIT_S
        while len(told(parts)) < KILL_AFTER:
            assert first.poll() is None, first.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        first.send_signal(signal.SIGKILL)
        first.communicate(timeout=30)
        assert KILL_AFTER <= len(told(parts)) < CANDIDATES
        undisturbed = start(whole)
        # Ray's agents try for 60 s to tell a head that has died with them before they end
        _, alive = psutil.wait_procs(marked(str(parts)), timeout=120)
        assert not alive
        for process in (undisturbed, start(parts, "--resume")):
            output, _ = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, output
        assert facts(parts) == facts(whole)
        assert len(facts(parts)) == CANDIDATES
        results = results_of(*read(parts / "repository" / "journal.jsonl"))
        assert results.failed == 0
        assert any(len(results.lineage(one)) > 1 for one in results.told)
        refused = start(parts)
        output, _ = refused.communicate(timeout=60)
        assert refused.returncode == 1
        assert "use --resume to go on with it" in output
    finally:
        for out in (whole, parts):
            for process in marked(str(out)):
                process.kill()
