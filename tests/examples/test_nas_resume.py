"""The search of `examples/nas` whose controller is killed goes on as if nothing had been."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tensorvine.actors import Repository

from examples.nas.controller import Controller
from examples.nas.evolution import Evolution
from examples.nas.journal import Journal, Told, read
from examples.nas.plan import Mode, Plan
from examples.nas.results import results_of
from examples.nas.run import QUICK, THREADS, main
from examples.nas.store import Access, Keeper
from examples.nas.worker import Outcome, Task, Worker

RUN = Path(__file__).parents[2] / "examples/nas/run.py"
MARK = "TENSORVINE_TEST_NAS"
CANDIDATES, KILL_AFTER = 16, 12
"""The first 8 are drawn; then they descend from one another, and those that leave the population are retired."""

pytestmark = pytest.mark.timeout(400)


def start(out: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(RUN), "--quick", "--mode", "repository", "--workers", "1", "--data", "wine"]
    return subprocess.Popen(
        [*command, "--candidates", str(CANDIDATES), "--out", str(out), *options],
        env={**os.environ, MARK: str(out), "RAY_ADDRESS": "local", "COLUMNS": "120"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def marked(mark: Path) -> list[psutil.Process]:
    """Return the processes that run with this mark in their environment."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(mark) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


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


@dataclass(frozen=True)
class Opened(Access):
    """Leads a worker of this process to a client, which the test closes."""

    client: Repository | None = None

    def open(self) -> Repository | None:
        return self.client


class Alone:
    """A crew of one worker, which is in this process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._task: Task | None = None

    @property
    def idle(self) -> int:
        return int(self._task is None)

    def give(self, task: Task) -> None:
        self._task = task

    def next(self, timeout: float) -> Outcome:
        assert self._task is not None
        task, self._task = self._task, None
        return self._worker.evaluate(task)


def searched_at_once(repository: Repository, out: Path) -> None:
    """Run the search that nobody kills in this process, which saves its start."""
    plan = Plan(**{**QUICK, "candidates": CANDIDATES, "data": "wine"})
    trainer = plan.trainer()
    with (
        Repository.connect(repository.name) as client,
        Journal(out / Mode.REPOSITORY / "journal.jsonl", plan) as journal,
    ):
        crew: Any = Alone(Worker(trainer, Opened(client=client)))
        evolution = Evolution(trainer.space, plan.population, plan.sample, plan.seed)
        Controller(plan, evolution, Keeper(client, plan.name, plan.population), journal).run(crew)


def test_a_search_whose_controller_is_killed_goes_on_exactly(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    try:
        first = start(parts)
        deadline = time.monotonic() + 120
        while len(told(parts)) < KILL_AFTER:
            assert first.poll() is None, first.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        first.send_signal(signal.SIGKILL)
        first.communicate(timeout=30)
        assert KILL_AFTER <= len(told(parts)) < CANDIDATES
        _, alive = psutil.wait_procs(marked(parts), timeout=60)
        assert not alive
        second = start(parts, "--resume")
        output, _ = second.communicate(timeout=150)
        assert second.returncode == 0, output
        searched_at_once(repository, whole)
        assert facts(parts) == facts(whole)
        assert len(facts(parts)) == CANDIDATES
        results = results_of(*read(parts / "repository" / "journal.jsonl"))
        assert results.failed == 0
        assert any(len(results.lineage(one)) > 1 for one in results.told)
        for name, value in THREADS.items():
            monkeypatch.setenv(name, value)  # as `main` sets them
        with pytest.raises(FileExistsError, match="use --resume to go on with it"):
            main(quick=True, mode=Mode.REPOSITORY, out=parts, candidates=CANDIDATES, data="wine")
    finally:
        for process in marked(parts):
            process.kill()
