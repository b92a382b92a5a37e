"""The benchmark of forks: what is trained, how ways are measured, what is handed over, and all of it, small."""

from __future__ import annotations

import doctest
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tensorvine.actors.training.training import RankContext

from benchmarks import fork, fork_networks, fork_report, fork_runs
from benchmarks.fork_networks import Net, Shapes, densenet121, nt3, resnet50, shaped
from benchmarks.fork_ranks import OPTION, HandOver, Load, Rank, Step, Tell, Watch, noted
from benchmarks.fork_report import FILE, OBJECTS, Case, ForkReport
from benchmarks.fork_runs import Measures, expect_alike, measured
from benchmarks.measure import Effort


def small() -> Shapes:
    return {
        "a/kernel": (600, 300),
        "a/moving_mean": (300,),
        "b/kernel": (300, 200),
        "b/bias": (200,),
    }


SMALL = shaped("small", small, 3)


def context(rank: int = 0, size: int = 1) -> RankContext:
    return RankContext("run", rank, size, None, {})


def build(net: Net = SMALL, rank: int = 0) -> Any:
    return net.build(context(rank))


# ---- what is trained ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "tensors", "parameters"), [(resnet50, 320, 25_636_712), (densenet121, 606, 8_062_504)]
)
def test_shapes_are_those_of_keras(shapes: Callable[[], Shapes], tensors: int, parameters: int) -> None:
    made = shapes()
    assert (len(made), sum(int(np.prod(shape)) for shape in made.values())) == (tensors, parameters)


def test_a_step_changes_every_tensor_and_tells_of_each_in_backward_order() -> None:
    training = build()
    told: list[str] = []

    class Hooks(Watch):
        def step_begins(self, step: int) -> bool:
            return True

        def updated(self, name: str, array: Any, stable: bool = False) -> None:
            told.append(name)

    training.hook(Hooks(None))
    before = {spec.name: training.tensor(spec.name).copy() for spec in training.specs()}
    training.step()
    assert all((training.tensor(name) != value).any() for name, value in before.items())
    assert told == [spec.name for spec in training.specs()]
    assert told[:3] == ["a/moving_mean", "momentum/b/bias", "b/bias"]


def test_the_loss_depends_on_every_tensor_that_clones_must_have() -> None:
    wanted = [build() for _ in range(2)]
    losses = [[training.step() for _ in range(3)] for training in wanted]
    assert losses[0] == losses[1]
    names = [spec.name for spec in wanted[0].specs()]
    for name in names:
        other = build()
        other.step()
        other.memory(name).reshape(-1)[0] += 1.0
        assert [other.step(), other.step()] != losses[0][1:], name
    assert build(rank=1).step() == losses[0][0], "the first step is that of one state"


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
def test_nt3_trains() -> None:
    training = nt3("tiny", 4, 120, 2, batch=2).build(context())
    names = [spec.name for spec in training.specs()]
    assert np.isfinite([training.step() for _ in range(2)]).all()
    assert len([name for name in names if "momentum" in name]) == 10


# ---- measures -------------------------------------------------------------------------------------------


def train(seconds: list[float], start: float = 0.0, updated: int = 5) -> list[Step]:
    """Steps from 1 on; `updated` is that of which a fork was told, 0.25 s before its end; it took 0.5 s more CPU."""
    steps: list[Step] = []
    for number, took in enumerate(seconds, start=1):
        end = start + took
        told = end - 0.25 if number == updated else 0.0
        forked = number in (updated, updated + 1)
        cpu = 0.75 if number == updated else 0.25
        steps.append(Step(number, start, told, end, end, 0.125 if forked else 0.0, cpu, 0.0))
        start = end
    return steps


def test_overhead_is_the_mean_slowdown_of_two_steps_of_the_worst_rank() -> None:
    even = train([9.0, 1, 1, 1, 2, 3, 1, 1])
    worse = train([9.0, 1, 1, 1, 4, 2, 1, 1])
    assert measured([even], 5, 0.0, 0.0).overhead_s == 1.5
    found = measured([even, worse], 5, ready=20.0, standby_from=12.0)
    assert (found.overhead_s, found.step_s, found.noise_s) == (2.0, 1.0, 0.0), "the first step does not count"
    assert found.standby_s == 8.0
    assert found.readiness_s == 20.0 - 16.0, "from when the last rank ended the step"
    assert found.backward_s == 16.0 - (14.0 - 0.25), "from when the first rank told of a tensor"
    assert found.hooks_s == 0.25
    assert found.cpu_s == 0.25, "half of what one of the two steps took more"


def test_noise_is_what_ordinary_steps_differ_by() -> None:
    found = measured([train([9.0, 1, 2, 9, 9, 1, 2, 1], updated=4)], 4, 0.0, 0.0)
    assert found.noise_s == pytest.approx(np.mean([abs(1.5 - 4 / 3)] * 3))


def test_a_clone_with_another_loss_is_caught() -> None:
    expect_alike([1.0, 2.0], [1.0, 2.0], 7)
    with pytest.raises(RuntimeError, match=r"clone 1: expected loss 2\.0 in step 7; found 3\.0"):
        expect_alike([1.0, 3.0], [1.0, 2.0], 7)


# ---- handing over ---------------------------------------------------------------------------------------


class Box:
    """Messages within this process."""

    def __init__(self) -> None:
        self.messages: dict[str, Any] = {}

    def leave(self, key: str, message: Any) -> None:
        self.messages[key] = message

    def read(self, key: str) -> Any:
        return self.messages[key]


@pytest.fixture
def pair() -> tuple[Rank, Rank, Box]:
    box: Any = Box()
    ranks = [Rank(build(), run, 0, box) for run in ("run", "clones")]
    for rank in ranks:
        rank.hook(Watch(None))
    return ranks[0], ranks[1], box


def test_a_clone_that_loads_a_file_goes_on_as_the_original(pair: tuple[Rank, Rank, Box], tmp_path: Path) -> None:
    rank, clone, box = pair
    key = str(tmp_path / "state.h5")
    rank.configure({OPTION: HandOver("file", 3, key)})
    losses = [rank.step() for _ in range(2)]
    assert not Path(key).exists(), "only after the step that was said"
    losses += [rank.step() for _ in range(2)]
    clone.configure({OPTION: Load("file", key)})
    assert clone.step() == 0.0, "it loads in place of a step"
    assert (clone.steps_done, clone.step()) == (3, losses[3])
    for each, name in ((rank, "rank"), (clone, "clone")):
        each.configure({OPTION: Tell(name)})
    told, loaded = box.read(noted("rank", 0)), box.read(noted("clone", 0))
    assert [step.number for step in told.steps] == [1, 2, 3, 4]
    assert told.steps[2].ended < told.written <= told.steps[2].left <= told.steps[3].began, "the step waits for it"
    assert loaded.ready > told.written
    rank.configure({OPTION: Tell("again")})
    assert box.read(noted("again", 0)).steps == (), "what was told is forgotten"


def test_a_clone_tells_when_it_stands_by_and_notes_when_it_is_whole(pair: tuple[Rank, Rank, Box]) -> None:
    _, clone, box = pair
    names = [spec.name for spec in clone.specs()]
    for name in names[:-1]:
        clone.memory(name)
    assert not box.messages
    clone.memory(names[-1])
    assert list(box.messages) == ["standing/clones/0"]
    clone.filled(names[0])
    clone.configure({OPTION: Tell("ready")})
    assert box.read(noted("ready", 0)).ready > 0


# ---- report ---------------------------------------------------------------------------------------------


def case() -> Case:
    ours = Measures(0.01, 0.6, 0.02, 0.9, 0.03, 0.5, 0.001)
    file = Measures(0.3, 0.4, 1.0, 0.9, 0.03)
    ways = {"ours, shared": [ours, replace(ours, overhead_s=-0.01), ours], FILE: [file], OBJECTS: [file]}
    return Case("net", 2, 1 << 20, 10, 0.001, 0.002, ways)


def test_a_row_holds_ours_against_the_file() -> None:
    row = case().row("ours, shared")
    assert (row.ratio, row.limit_s) == (50.0, 0.001)
    assert [round(goal.value, 6) for goal in row.goals] == [30.0, 50.0, 1.2]
    assert all(goal.reached for goal in row.goals)


def test_the_report_has_all_ways() -> None:
    report = ForkReport("fork", [case().row("ours, shared")], cases=[case()], notes=["a note"])
    out = io.StringIO()
    report.print(Console(file=out, width=200))
    text = out.getvalue()
    assert "10 ms [-10-10]" in text, "overhead may be negative"
    assert "a note" in text
    found = json.loads(json.dumps(report.as_dict()))
    assert found["cases"][0]["ways"]["ours, shared"]["overhead_min_s"] == -0.01
    assert (found["ours_s"], found["peer_s"]) == (0.02, 1.0)


@pytest.mark.parametrize("module", [fork, fork_networks, fork_report, fork_runs])
def test_docstring_examples(module: Any) -> None:
    assert doctest.testmod(module).failed == 0


# ---- all of it ------------------------------------------------------------------------------------------


def test_a_training_of_two_ranks_is_cloned_by_all_ways(cluster: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fork.PLANS, Effort.QUICK, fork.Plan([(SMALL, (2,))], 1, ("shared",)))
    report = fork.run(Effort.QUICK)
    assert isinstance(report, ForkReport)
    (found,) = report.cases
    assert set(found.ways) == {"ours, shared", FILE, OBJECTS}
    assert (found.ranks, found.tensors) == (2, 7)
    assert found.first is not None, "and it is not among those that count"
    (shared,), (file,), (objects,) = (found.ways[way] for way in ("ours, shared", FILE, OBJECTS))
    assert shared.backward_s > 0
    assert shared.standby_s == pytest.approx(shared.readiness_s + shared.backward_s)
    assert file.standby_s > 0, "a clone begins to read when the file is complete"
    assert objects.standby_s == objects.readiness_s, "both from the end of the step"
    assert file.backward_s == objects.backward_s == 0, "nobody was told of an update"
    json.dumps(report.as_dict())
