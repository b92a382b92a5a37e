"""Trainings as actors: several ranks train as one, answer meanwhile, and trouble is named."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from tensorvine.actors.client.repository import Repository
from tensorvine.actors.engine.choice import engine_for
from tensorvine.actors.training.numpy import NumpyTraining, StepContext
from tensorvine.actors.training.start import Trainers, start_trainers
from tensorvine.actors.training.training import RankContext
from tensorvine.actors.training.versions import with_numbers
from tensorvine.store.errors import (
    InvalidNameError,
    OperationTimeoutError,
    PeerLostError,
    TensorMismatchError,
)

from tests.support.asking import ask
from tests.support.waiting import eventually

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # pyright: ignore[reportAttributeAccessIssue]

WAIT_S = 60.0
BATCH = 8


def regression(context: RankContext) -> NumpyTraining:
    """Fits a plane with momentum; each rank takes its share of a batch that depends on the step alone."""
    width = context.options.get("width", 6)
    plane = np.arange(1.0, width + 1)
    state = {"w": np.zeros(width), "w/momentum": np.zeros(width), "b": np.zeros(1), "large": np.ones(300_000)}

    def step(now: StepContext) -> float:
        fails_at, fails_rank = now.options["fails"]
        if now.step == fails_at and now.rank == fails_rank:
            raise KeyError("labels")
        rng = np.random.default_rng(now.step)
        inputs = rng.normal(size=(BATCH, width))[now.rank :: now.size]
        error = inputs @ now["w"] + now["b"] - inputs @ plane - 3.0
        now.reduce("large", np.full(300_000, float(now.rank)))
        now.reduce("b", error.mean(keepdims=True))
        now.reduce("w", inputs.T @ error / len(error))
        now.update("large", now["large"] + now.mean("large"))
        now.update("b", now["b"] - now.options["rate"] * now.mean("b"))
        now.update("w/momentum", 0.5 * now["w/momentum"] + now.mean("w"))
        now.update("w", now["w"] - now.options["rate"] * now["w/momentum"])
        return float(error @ error / len(error)) + now.options["noise"] * float(now.random.normal())

    return NumpyTraining(
        context,
        state,
        step,
        parameters=["w", "b", "large"],
        random=np.random.default_rng(5),
        options={"rate": 0.05, "noise": 0.0, "fails": (0, 0), "width": width},
    )


def telling_rate(context: RankContext) -> NumpyTraining:
    """Its loss is its option "rate", and its ranks keep in step."""

    def step(now: StepContext) -> float:
        now.reduce("w", np.ones(2))
        now.update("w", now["w"] + now.mean("w"))
        return now.options["rate"]

    return NumpyTraining(context, {"w": np.zeros(2)}, step, parameters=["w"], options={"rate": 1.0})


def telling_slowly(context: RankContext) -> NumpyTraining:
    """Its steps leave the processor to others, for nobody looks at what it trains."""

    def step(now: StepContext) -> float:
        time.sleep(0.05)
        now.reduce("w", np.ones(2))
        return 0.0

    return NumpyTraining(context, {"w": np.zeros(2)}, step, parameters=["w"])


def telling_bundle(context: RankContext) -> NumpyTraining:
    """Its loss is the number of the bundle that it is placed in."""
    taken = ray._private.worker.global_worker.core_worker.resource_ids()  # pyright: ignore  the only place that tells
    (bundle,) = [int(name.split("_")[2]) for name in taken if name.startswith("CPU_group_") and name.count("_") == 3]
    return NumpyTraining(context, {"w": np.zeros(2)}, lambda now: float(bundle))


def failing(context: RankContext) -> NumpyTraining:
    if context.rank == 1:
        raise LookupError("no data for rank 1")
    return regression(context)


def actors_of(name: str) -> list[str]:
    found = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    return [actor for actor in found if actor.startswith(f"{name}/")]


@pytest.fixture(scope="module")
def repo(cluster) -> Iterator[Repository]:
    with Repository.start("trainers", shards=1, preallocate_bytes=0) as started:
        yield started


@pytest.fixture(scope="module")
def pair(repo: Repository) -> Iterator[Trainers]:
    """Two ranks that fit a plane, which no test may harm."""
    with start_trainers(regression, 2, name="pair", options={"noise": 0.1}, repository=repo) as started:
        yield started


@pytest.fixture(scope="module")
def alone(repo: Repository) -> Iterator[Trainers]:
    """One rank that fits a plane."""
    with start_trainers(regression, name="alone", repository=repo.name) as started:
        yield started


@pytest.fixture(scope="module")
def telling(cluster) -> Iterator[Trainers]:
    """Two ranks that tell their rate."""
    with start_trainers(telling_rate, 2) as started:
        yield started


# ---- several ranks as one --------------------------------------------------------------------------------------


def test_two_ranks_train_as_one_on_the_whole_batch_and_the_same_bits_each_time(cluster):
    found = []
    for count in (1, 2, 2):
        with start_trainers(regression, count) as trainers:
            assert len(trainers) == count
            first, second = trainers.train(12, WAIT_S), trainers.train(8, WAIT_S)
            found.append([a + b for a, b in zip(first, second, strict=True)])
    whole, one, other = found
    assert [len(losses) for losses in whole + one] == [20, 20, 20]
    np.testing.assert_allclose(np.mean(one, axis=0), whole[0], rtol=1e-9)
    assert whole[0][-1] < whole[0][0] / 2
    assert one == other


def test_ranks_tell_what_they_are_while_they_train(pair):
    before = pair.describe()
    pair.train_async(100_000)
    eventually(lambda: min(report.steps_done for report in pair.describe()) >= before[0].steps_done + 3, "some steps")
    reports = pair.describe()
    with pytest.raises(ValueError, match=r"rank \d of 'pair': train: expected no training in progress"):
        ask(pair.engine, pair[1], "train", 1, timeout=WAIT_S, who="rank 1")
    pair.stop(WAIT_S)
    losses = pair.results(WAIT_S)
    assert [(report.run, report.rank, report.size) for report in reports] == [("pair", 0, 2), ("pair", 1, 2)]
    assert all(report.training and report.step_s > 0 and report.backend == "shared" for report in reports)
    assert len({report.pid for report in reports} | {os.getpid()}) == 3
    assert [spec.name for spec in reports[0].specs] == ["large", "b", "w/momentum", "w"]
    assert reports[0].forward_order == ("w", "w/momentum", "b", "large")
    assert reports[0].node == pair.engine.this_node()
    after = pair.describe()
    assert len(losses[0]) == len(losses[1]) < 100_000
    for early, late in zip(before, after, strict=True):
        assert not late.training
        assert late.steps_done - early.steps_done == late.losses - early.losses == len(losses[0])


def test_options_change_at_all_ranks_after_the_same_step(telling):
    telling.train_async(1_000_000)
    for rate in (2.0, 3.0, 4.0):
        telling.configure({"rate": rate}, WAIT_S)
    telling.stop(WAIT_S)
    one, other = telling.results(WAIT_S)
    assert one == other
    assert one == sorted(one)
    assert {2.0, 3.0, 4.0} <= set(one)
    telling.configure({"rate": 5.0}, WAIT_S)
    assert telling.train(2, WAIT_S) == [[5.0, 5.0], [5.0, 5.0]]
    with pytest.raises(ValueError, match=r"options: expected some of \['rate'\]; found \['speed'\]"):
        telling.configure({"speed": 1.0}, WAIT_S)
    recipe = ask(telling.engine, telling[0], "recipe", [], timeout=WAIT_S, who="rank 0")
    assert recipe.options == {"rate": 5.0}
    telling.stop(WAIT_S)
    assert telling.train(1, WAIT_S) == [[5.0], [5.0]]


# ---- repository ------------------------------------------------------------------------------------------------


def test_a_saved_state_goes_on_bit_for_bit_and_tells_its_parent(pair, repo):
    pair.train(3, WAIT_S)
    saved = pair.save("plane", quality=0.5, metadata={"note": "early"})
    original = pair.train(20, WAIT_S)
    pair.restore_from(saved.ref, WAIT_S)
    assert pair.train(20, WAIT_S) == original
    child = pair.save("plane")
    info = repo.info(child.ref)
    assert repo.info(saved.ref).metadata["note"] == "early"
    assert info.parent == saved.ref
    assert info.metadata["training"]["steps_done"] == pair.describe()[0].steps_done
    assert pair.describe()[0].saved == child.ref


def test_a_version_of_one_run_is_gone_on_with_by_another_of_other_size(pair, alone, repo):
    pair.train(2, WAIT_S)
    saved = pair.save("plane")
    alone.restore_from(str(saved.ref), WAIT_S)
    assert alone.describe()[0].steps_done == pair.describe()[0].steps_done
    child = alone.save("plane/alone")
    assert repo.info(child.ref).parent == saved.ref
    loaded, mine = repo.load(saved.ref), repo.load(child.ref)
    assert all(np.array_equal(loaded[name], mine[name]) for name in ("w", "w/momentum", "b", "large"))


def test_a_save_in_a_train_is_the_state_between_two_steps(alone, repo):
    alone.train_async(1_000_000)
    saved = alone.save("beside")
    alone.stop(WAIT_S)
    losses = alone.results(WAIT_S)[0]
    end = alone.describe()[0].steps_done
    at = repo.info(saved.ref).metadata["training"]["steps_done"]
    alone.restore_from(saved.ref, WAIT_S)
    again = min(end - at, 5)
    assert again >= 0
    start = len(losses) - (end - at)
    assert alone.train(again + 1, WAIT_S)[0][:again] == losses[start : start + again]


def test_an_option_that_json_has_no_number_for_is_kept(alone, repo):
    alone.configure({"noise": float("inf")}, WAIT_S)
    saved = alone.save("infinite")
    assert repo.info(saved.ref).metadata["training"]["options"]["noise"] == {"float": "inf"}
    alone.configure({"noise": 0.0}, WAIT_S)
    alone.restore_from(saved.ref, WAIT_S)
    assert alone.describe()[0].saved == saved.ref


def test_metadata_of_a_training_that_diverges_is_kept(alone, repo):
    given = {"loss": float("nan"), "best": {"float": "inf"}, "deep": [{"float": ["nan"]}, {"float": 1, "a": -math.inf}]}
    found = repo.info(alone.save("diverged", metadata=given).ref).metadata
    json.dumps(dict(found), allow_nan=False)
    assert repr({key: with_numbers(found[key]) for key in given}) == repr(given)
    for wrong in ({math.inf: 1}, {"deep": {math.nan: 1}}):
        with pytest.raises(TensorMismatchError, match=r"metadata\[.*\]: expected a JSON value"):
            alone.save("diverged", metadata=wrong)


def test_a_version_that_does_not_fit_is_refused_and_changes_nothing(alone, repo):
    plain = repo.save("plain", {"w": np.zeros(6)}).ref
    other = repo.save("other", {"w": np.zeros(7), "b": np.zeros(1)}, metadata={"training": {}}).ref
    before = repo.load(alone.save("kept").ref)["w"].copy()
    with pytest.raises(ValueError, match=f"rank 0 of 'alone': .*{plain} has no state of a training"):
        alone.restore_from(plain, WAIT_S)
    with pytest.raises(TensorMismatchError, match=rf"{other}: tensor 'large': expected \('float64', .*; found none"):
        alone.restore_from(other, WAIT_S)
    with pytest.raises(ValueError, match="expected rank 0 and metadata without 'training'"):
        alone.save("kept", metadata={"training": 1})
    assert np.array_equal(repo.load(alone.save("kept").ref)["w"], before)


def test_a_run_without_a_repository_says_so(telling):
    with pytest.raises(ValueError, match="start_trainers: repository: expected a repository; found None"):
        telling.save("x")
    with pytest.raises(ValueError, match="start_trainers: repository: expected a repository; found None"):
        telling.restore_from("x@1", WAIT_S)


# ---- trouble ---------------------------------------------------------------------------------------------------


def test_a_step_that_fails_at_one_rank_is_raised_and_the_actors_live_on(cluster):
    with start_trainers(regression, 2, name="failing", options={"fails": (4, 1)}) as trainers:
        with pytest.raises(KeyError, match="labels"):
            trainers.train(10, WAIT_S)
        eventually(lambda: not any(report.training for report in trainers.describe()), "both to have noticed")
        assert [report.steps_done for report in trainers.describe()] == [3, 3]
        with pytest.raises(PeerLostError, match=r"rank \d of 'failing': train: expected connected ranks"):
            trainers.train(1, WAIT_S)


def test_a_single_rank_trains_on_after_a_step_that_failed(cluster):
    with start_trainers(regression, options={"fails": (2, 0)}) as trainers:
        with pytest.raises(KeyError, match="labels"):
            trainers.train(10, WAIT_S)
        trainers.configure({"fails": (0, 0)}, WAIT_S)
        assert len(trainers.train(3, WAIT_S)[0]) == 3
        assert trainers.describe()[0].steps_done == 4


def test_a_rank_that_dies_is_named_by_the_other_and_to_the_starter(cluster):
    with start_trainers(regression, 2, name="mortal") as trainers:
        answers = trainers.train_async(1_000_000)
        eventually(lambda: trainers.describe()[0].steps_done >= 2, "some steps")
        os.kill(trainers.describe()[1].pid, signal.SIGKILL)
        with pytest.raises(PeerLostError, match="rank 1 of 'mortal': train: expected a running rank; it died"):
            trainers.results(WAIT_S)
        with pytest.raises(PeerLostError, match="rank 1"):
            answers[0].result(WAIT_S)
        with pytest.raises(PeerLostError, match="rank 1 of 'mortal': describe"):
            trainers.describe()


def test_a_build_that_fails_is_raised_and_no_actor_stays(cluster):
    with pytest.raises(LookupError, match="no data for rank 1"):
        start_trainers(failing, 2, name="stillborn")
    eventually(lambda: not actors_of("stillborn"), "no actor to stay")


def test_what_no_node_has_is_an_error_in_time_and_no_actor_stays(cluster):
    with pytest.raises(OperationTimeoutError, match="rank 0 of 'greedy': start"):
        start_trainers(regression, name="greedy", cpus=1000.0, timeout=1.0)
    eventually(lambda: not actors_of("greedy"), "no actor to stay")


def test_ranks_end_with_who_started_them(cluster):
    @ray.remote(num_cpus=0)
    class Starter:
        def start(self) -> list[int]:
            self.trainers = start_trainers(telling_slowly, 2, name="orphans")
            self.trainers.train_async(1_000_000)
            return [report.pid for report in self.trainers.describe()]

    starter: Any = Starter.remote()
    pids = ray.get(starter.start.remote(), timeout=WAIT_S)
    assert all(map(psutil.pid_exists, pids))
    ray.kill(starter)
    eventually(lambda: not actors_of("orphans") and not any(map(psutil.pid_exists, pids)), "the ranks to end")


# ---- where they run --------------------------------------------------------------------------------------------


def test_ranks_are_placed_in_the_bundles_of_a_placement_group(cluster):
    group = placement_group([{"CPU": 0.5}] * 3)
    try:
        assert group.wait(WAIT_S)
        with start_trainers(telling_bundle, 2, placement_group=group, cpus=0.5) as trainers:
            assert trainers.train(1, WAIT_S) == [[0.0], [1.0]]
    finally:
        remove_placement_group(group)


def test_ranks_are_placed_on_the_nodes_that_are_named(cluster):
    here = engine_for().this_node()
    with start_trainers(telling_rate, nodes=[here]) as trainers:
        assert trainers.describe()[0].node == here
    with pytest.raises(ValueError, match=rf"nodes: expected some of \['{here}'\]; found \['elsewhere'\]"):
        start_trainers(telling_rate, nodes=["elsewhere"])


def test_closing_ends_the_actors_and_may_be_done_twice(cluster):
    trainers = start_trainers(telling_rate, 2, name="closed")
    pids = [report.pid for report in trainers.describe()]
    trainers.train_async(1_000_000)
    eventually(lambda: all(report.training for report in trainers.describe()), "both to train")
    trainers.close()
    trainers.close()
    with suppress(PeerLostError):
        assert len(trainers.results(WAIT_S)) == 2, "who waits for the train is not left waiting"
    eventually(lambda: not actors_of("closed") and not any(map(psutil.pid_exists, pids)), "the ranks to end")


# ---- arguments -------------------------------------------------------------------------------------------------


class FewBundles:
    bundle_count = 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"build": None}, "build: expected a function"),
        ({"count": 0}, "count: expected at least 1 rank; found 0"),
        ({"count": True}, "count: expected at least 1 rank; found True"),
        ({"count": 1.5}, "count: expected at least 1 rank; found 1.5"),
        ({"options": [1]}, "options: expected a mapping; found list"),
        ({"backend": "mpi"}, "backend: expected one of auto, shared, gloo, nccl; found 'mpi'"),
        ({"repository": 3}, "repository: expected a Repository or its name; found int"),
        ({"nodes": []}, "nodes: expected at least one node id"),
        ({"nodes": ["a"], "placement_group": FewBundles()}, "nodes: expected nodes or placement_group; found both"),
        (
            {"count": 2, "placement_group": FewBundles()},
            "placement_group: expected one with at least 2 bundles; found 1",
        ),
        ({"placement_group": "pg"}, "placement_group: expected one with at least 1 bundles"),
        ({"cpus": -1.0}, "cpus: expected at least 0"),
        ({"gpus": -0.5}, "gpus: expected at least 0"),
        ({"timeout": 0.0}, "timeout: expected seconds above 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused_before_anything_is_started(arguments, match):
    with pytest.raises(ValueError, match=f"start_trainers: {match}"):
        start_trainers(**{"build": regression, **arguments})


def test_a_name_that_no_actor_may_have_is_refused():
    with pytest.raises(InvalidNameError, match=r"no '\.\.' part"):
        start_trainers(regression, name="../up")
