"""The search of `examples/nas`: its space, its file, a search that is resumed, and nodes that come and go."""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorvine.store import ModelRef

from benchmarks.core.models import draw
from examples.nas.search import Evaluation, Plan, Results, evolution_of, read
from examples.nas.space import AttnModel, AttnSpace, Cell
from tests.support.elastic_search import CANDIDATES, NODES, POPULATION
from tests.support.example_runs import PYTHON, ROOT
from tests.support.marked import MARK, marked, outlive

RUN = ROOT / "examples/nas/run.py"
LIMIT_S = 300.0


def candidates(count: int) -> list[tuple[int, ...]]:
    rng = random.Random(3)  # noqa: S311  for candidates
    return [draw(AttnSpace(), rng) for _ in range(count)]


def test_a_candidate_is_what_its_decisions_say() -> None:
    space = AttnSpace(1, [10, 20])
    chosen = (2, 1, 0, 0, 1, 8, 0, 0, 1)  # a layer of 10, the identity, a layer of 20
    assert list(space.chain(chosen)) == [
        [Cell((10, "swish"), (0,)), Cell(None, (1,)), Cell((20, "relu"), (2,))],
    ]
    model = AttnModel(space, chosen, 5, 3)
    shapes = [tuple(tensor.shape) for name, tensor in model.named_parameters() if name.endswith("weight")]
    assert shapes == [(10, 5), (10, 5), (20, 10), (20, 10), (3, 20)]
    assert model(torch.zeros(4, 5)).shape == (4, 3)


@pytest.mark.parametrize("candidate", candidates(10), ids=str)
def test_deephyper_draws_the_candidates_of_the_space(candidate: tuple[int, ...]) -> None:
    space = AttnSpace()
    config = {f"d{place:02d}": number for place, number in enumerate(candidate)}
    assert space.candidate(config) == candidate
    assert config.keys() == set(space.problem().hyperparameter_names)


def test_weights_and_quality_follow_from_the_number() -> None:
    plan = Plan("wine")
    config = {f"d{place:02d}": number for place, number in enumerate(candidates(1)[0])}

    def evaluated(first: int, number: int) -> float:
        evaluation = Evaluation(plan, first)
        job: Any = type("Job", (dict,), {"id": f"0.{number}"})(config)
        return evaluation.train(evaluation.build(job))

    assert evaluated(0, 7) == evaluated(5, 2)
    assert 0 <= evaluated(0, 7) <= 1


def results(path: Path, plan: Plan, count: int) -> list[Any]:
    """Write the results of candidates, of which every third fails; gives the lines."""
    _, lines = read(path, plan)
    writer = Results(path, lines, None, lambda _: None)
    for number, candidate in enumerate(candidates(count)):
        objective = "F_ValueError" if number % 3 == 2 else 0.5 + number / 100
        config = {f"d{place:02d}": option for place, option in enumerate(candidate)}
        writer.on_done(SimpleNamespace(objective=objective, args=config, metadata={"ref": f"nas/{number}@1"}))
    return lines


def test_a_stopped_search_continues_with_its_population(tmp_path: Path) -> None:
    path, plan = tmp_path / "nas" / "results.jsonl", Plan("wine", population=4, sample=2, name="mine")
    lines = results(path, plan, 9)
    with path.open("a") as file:
        file.write('{"number": 9, "qua')  # the process was killed here
    again, found = read(path, Plan("wine", population=4, sample=2))
    assert (again, found) == (plan, lines)
    evolution = evolution_of(again, found, tmp_path)
    kept = [line for line in lines if line["quality"] is not None][-4:]
    assert list(evolution._population) == [(line["config"], line["quality"]) for line in kept]
    child = AttnSpace().candidate(evolution.ask(1)[0])
    parents = [AttnSpace().candidate(line["config"]) for line in kept]
    assert min(sum(a != b for a, b in zip(child, parent, strict=True)) for parent in parents) == 1
    with pytest.raises(ValueError, match="expected the plan with which the search began"):
        read(path, Plan("digits"))


def search(out: Path, *options: str) -> subprocess.Popen[str]:
    """Start a search in a repository on disk."""
    command = [*PYTHON, "torch", str(RUN), "--quick", "--mode", "repository", "--data", "wine", "--candidates", "18"]
    return subprocess.Popen(
        [*command, "--out", str(out), *options],
        cwd=ROOT,
        env={**os.environ, MARK: str(out), "RAY_ADDRESS": "local", "COLUMNS": "120"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.own_cluster
@pytest.mark.timeout(900)
@pytest.mark.parametrize("runner", ["deephyper", "tune"])
def test_a_search_that_is_killed_is_resumed(runner: str, tmp_path: Path) -> None:
    path = tmp_path / "repository" / "results.jsonl"
    try:
        process, deadline = search(tmp_path, "--runner", runner), time.monotonic() + LIMIT_S
        while not path.exists() or path.read_text().count("\n") < 11:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
        refused, _ = search(tmp_path).communicate(timeout=LIMIT_S)
        assert "use --resume to continue it" in " ".join(re.findall(r"[^\s│]+", refused))
        resumed = search(tmp_path, "--runner", runner, "--resume")
        output, _ = resumed.communicate(timeout=LIMIT_S)
        assert resumed.returncode == 0, output
        lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
        assert [line["number"] for line in lines] == list(range(18))
        assert all(line["quality"] is not None for line in lines)
        refs = {ModelRef.parse(line["ref"]) for line in lines}
        assert len(refs) == 18
        assert {ModelRef.parse(line["ancestor"]) for line in lines if line["ancestor"]} < refs
    finally:
        for process in marked(str(tmp_path)):
            process.kill()


@pytest.mark.own_cluster
@pytest.mark.timeout(600)
def test_nodes_join_are_killed_and_replaced_while_the_search_continues(tmp_path: Path) -> None:
    mark = str(tmp_path)
    # An embedded Ray, such as that of the tests before, leaves its mode to all that this process starts.
    mode = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.elastic_search", str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", **mode},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=580,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout.splitlines()[-1])
        assert (said["before"], said["most"], said["killed"]) == (0, NODES, NODES)
        assert said["candidates"] == CANDIDATES
        assert said["failed"] == NODES
        assert (said["models"], said["problems"]) == (POPULATION, [])
        assert outlive(mark) == []
    finally:
        for process in marked(mark):
            process.kill()
