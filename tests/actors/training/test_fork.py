"""Forks of trainings that run as actors: clones go on bit for bit, and whoever dies, the run goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from tensorvine.actors.client.repository import Repository
from tensorvine.actors.engine import process
from tensorvine.actors.engine.engine import Engine, Lifetime
from tensorvine.actors.engine.groups import group
from tensorvine.actors.training import directing
from tensorvine.actors.training.calls import TrainerCalls
from tensorvine.actors.training.fork import forkable
from tensorvine.actors.training.fork.calls import ForkCalls
from tensorvine.actors.training.fork.forkable import Forkable
from tensorvine.actors.training.fork.order import ForkOrder
from tensorvine.actors.training.forks import fork, fork_many, fork_version
from tensorvine.actors.training.numpy import NumpyTraining, StepContext
from tensorvine.actors.training.start import Trainers, start_trainers
from tensorvine.actors.training.training import RankContext, TensorSpec
from tensorvine.store.errors import ForkError, OptionError, PeerLostError, ShardUnavailableError

from tests.support.actors import pid_of
from tests.support.asking import begin
from tests.support.waiting import eventually

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # pyright: ignore[reportAttributeAccessIssue]

WAIT_S = 60.0
STEPS = 100
"""Of the run that nobody forks."""


def net(context: RankContext) -> NumpyTraining:
    """Some megabytes of which each step changes all; ranks see other batches and draw other noise."""
    width = context.options.get("width", 200)
    state = {"w": np.ones((width, 300)), "momentum": np.zeros((width, 300)), "b": np.zeros(3), "noise": np.zeros(2)}

    def step(now: StepContext) -> float:
        while now.options["waits_for"] and not os.path.exists(now.options["waits_for"]):
            time.sleep(0.01)
        loss = float(np.mean(now["w"] ** 2) + now["momentum"].sum() + now["noise"].sum() + now["b"].sum())
        now.reduce("b", np.full(3, np.sin(now.step + now.rank)))
        now.reduce("w", np.cos(now["w"] * now.step + now.rank))
        with now.changing("noise") as noise:
            noise += now.random.normal(size=2)
        now.update("b", now["b"] - now.options["rate"] * now.mean("b"))
        now.update("momentum", 0.9 * now["momentum"] + now.mean("w"))
        now.update("w", now["w"] - now.options["rate"] * now["momentum"])
        return loss

    class Net(NumpyTraining):
        def memory(self, name: str) -> np.ndarray:
            gate = self.options["stalls_until"]
            while gate and not os.path.exists(gate):
                time.sleep(0.01)
            return super().memory(name)

        def specs(self) -> Sequence[TensorSpec]:
            if context.rank and self.steps_done:
                threading.Event().wait(self.options["hears_late_s"])
            return super().specs()

    random = np.random.default_rng(context.rank)
    options = {"rate": 0.01, "width": width, "stalls_until": "", "waits_for": "", "hears_late_s": 0.0}
    return Net(context, state, step, parameters=["w", "b"], random=random, local=["noise"], options=options)


def living(name: str) -> list[str]:
    """Names of the living actors of a run."""
    engine = process.engine()
    assert engine is not None
    return [actor for actor in engine.actors() if actor.startswith(f"{name}/")]


@pytest.fixture(scope="module")
def repo(cluster: object) -> Iterator[Repository]:
    with Repository.start("forks", shards=1, preallocate_bytes=0) as started:
        yield started


@pytest.fixture(scope="module")
def unforked(cluster: object) -> list[list[float]]:
    """The losses of a run that nobody forks."""
    with start_trainers(net, 2) as trainers:
        return trainers.train(STEPS)


@pytest.fixture
def run(repo: Repository) -> Iterator[Trainers]:
    with start_trainers(net, 2, repository=repo) as trainers:
        yield trainers


@pytest.fixture(scope="module")
def standing(cluster: object) -> Iterator[Trainers]:
    """A run that stands still; whoever trains it leaves it standing."""
    with start_trainers(net, 2) as trainers:
        trainers.train(3)
        yield trainers


def done(trainers: Trainers) -> int:
    """Steps of a run that stands still."""
    (steps,) = {own.steps_done for own in trainers.describe()}
    return steps


class TestClones:
    def test_clones_go_on_bit_for_bit_and_the_run_is_not_disturbed(
        self, run: Trainers, unforked: list[list[float]]
    ) -> None:
        run.train_async(1_000_000)
        with fork(run, at_step=None) as clones:
            report = clones.report
            assert report.step > 0
            assert report.run == run.name
            assert report.nbytes == sum(spec.nbytes for spec in run.describe()[0].specs)
            assert min(report.held_s, report.readiness_s) >= 0
            losses = clones.train(20)
            assert done(clones) == report.step + 20
        eventually(lambda: run.describe()[0].steps_done > report.step + 20, "the run goes on")
        run.stop()
        originals = run.results()
        assert losses == [own[report.step : report.step + 20] for own in originals]
        assert [own[:STEPS] for own in originals] == [own[: len(originals[0])] for own in unforked]

    def test_a_rank_that_hears_late_of_it_is_forked_after_the_same_step(self, run: Trainers) -> None:
        """The other one stands still before that step: it would be past when the late one hears."""
        run.configure({"hears_late_s": 0.5})
        run.train_async(1_000_000)
        with fork(run, at_step=None, options={"hears_late_s": 0.0}) as clones:
            step = clones.report.step
            losses = clones.train(20)
            eventually(lambda: run.describe()[0].steps_done > step + 20, "the run goes on")
        run.stop()
        assert losses == [own[step : step + 20] for own in run.results()]

    def test_a_training_that_ends_before_the_step_was_to_come_is_forked_where_it_ended(
        self, run: Trainers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go = tmp_path / "go"

        def too_far(*_: object) -> int:
            go.touch()
            return 10_000

        monkeypatch.setattr(directing, "steps_ahead", too_far)
        run.configure({"waits_for": str(go)})
        run.train_async(STEPS)
        with fork(run, at_step=None) as clones:
            assert clones.report.step == done(clones) == STEPS
            assert clones.train(3) == run.train(3)

    def test_a_given_step_is_captured_though_the_clones_start_after_it(
        self, run: Trainers, unforked: list[list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go, start = tmp_path / "go", directing.ForkDirector._start

        def after_all_steps(self: Any, *arguments: Any) -> None:
            go.touch()
            eventually(lambda: all(rank.steps_done == STEPS for rank in run.describe()), "the run has come to its end")
            start(self, *arguments)

        monkeypatch.setattr(directing.ForkDirector, "_start", after_all_steps)
        run.configure({"waits_for": str(go)})
        run.train_async(STEPS)
        with fork(run, at_step=STEPS - 30) as clones:
            assert clones.train(20) == [own[STEPS - 30 : STEPS - 10] for own in unforked]
        assert run.results() == unforked

    def test_several_groups_of_other_sizes_from_one_step_and_other_options(
        self, run: Trainers, unforked: list[list[float]]
    ) -> None:
        run.train(10)
        one, three = fork_many(run, [1, 3], at_step=10, options=[{"rate": 0.0}, {}], names=["one", None], steps=4)
        with one, three:
            assert one.name == "one"
            assert one.report == three.report
            losses = [clones.results() for clones in (one, three)]
            assert [[len(own) for own in group] for group in losses] == [[4], [4] * 3]
            assert losses[0][0][0] == losses[1][0][0] == unforked[0][10]
            assert losses[1][1][0] == unforked[1][10]
            assert losses[0][0][1:] != losses[1][0][1:]
            with fork(three, 2, at_step=14) as again:
                assert again.report.run == three.name
                assert [own.steps_done for own in again.describe()] == [14, 14]

    def test_a_train_that_overtakes_the_order_to_adopt_waits_for_it(
        self, run: Trainers, unforked: list[list[float]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ray does not promise to start an asynchronous actor's calls in the order in which they were sent."""

        def the_other_way_round(self: Any, order: ForkOrder, steps: int) -> list[Any]:
            for some in self._groups:
                some.pending = [
                    self._channel(clone, "a clone").send(TrainerCalls.train(steps, order.id)) for clone in some
                ]
            self._all(self._clones, TrainerCalls.describe())
            return [
                self._channel(clone, "a clone").send(ForkCalls.adopt(order, place))
                for place, clone in enumerate(self._clones)
            ]

        monkeypatch.setattr("tensorvine.actors.training.directing.ForkDirector._adopt", the_other_way_round)
        run.train(5)
        with fork(run, at_step=5, steps=4) as clones:
            assert clones.results() == [own[5:9] for own in unforked]

    def test_versions_tell_what_a_clone_comes_from(self, run: Trainers, repo: Repository) -> None:
        run.train(3)
        root = run.save("forked").ref
        run.train(2)
        with fork(run, 1, at_step=5) as clones:
            clones.train(1)
            saved = clones.save("clone")
            assert repo.lineage(saved.ref) == [saved.ref, root]
            assert repo.info(saved.ref).metadata["fork"] == {"fork": clones.report.id, "run": run.name, "step": 5}
            expected = clones.train(3)
        with fork_version(repo, saved.ref, net) as resumed:
            assert resumed.train(3) == expected
            assert repo.info(resumed.save("clone").ref).parent == saved.ref


class Clone(Forkable):
    """What a clone answers, without an actor."""

    def __init__(self) -> None:
        self._where, self._coming = "rank 0 of 'clones'", {}


class TestOvertaking:
    """The order to train from a fork comes before the fork."""

    def test_a_fork_that_does_not_come_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(forkable, "TOLD_S", 0.01)
        expected = r"rank 0 of 'clones': train: expected the order of fork f7 within 0\.01 s; it was not received"
        with pytest.raises(ForkError, match=expected):
            asyncio.run(Clone()._await_adoption("f7"))

    def test_a_fork_that_is_refused_is_not_trained_from(self) -> None:
        async def scene() -> tuple[Any, Any]:
            clone = Clone()
            order = ForkOrder(
                id="f7", run="run", sources=1, groups=(1,), specs=(), forward=(), transport="shared", timeout=1.0
            )
            early = asyncio.create_task(clone._await_adoption("f7"))
            await asyncio.sleep(0)
            with pytest.raises(ForkError, match="expected a training that was started"):
                await clone.adopt(order, 0)
            late = clone._await_adoption("f7")
            return await asyncio.gather(early, late, return_exceptions=True)

        errors = asyncio.run(scene())
        assert [type(error) for error in errors] == [ForkError, ForkError]


@pytest.mark.both_engines
class TestOrders:
    """What cannot be done; each time the run can train on."""

    def test_a_step_that_is_past(self, standing: Trainers) -> None:
        now = done(standing)
        with pytest.raises(ForkError, match=f"expected {now}, the last completed step, or later; found {now - 1}"):
            fork(standing, at_step=now - 1)

    def test_a_step_that_is_not_reached(self, standing: Trainers) -> None:
        step = done(standing) + 9
        with pytest.raises(ForkError, match=f"rank . of '{standing.name}': .*step {step}"):
            fork(standing, 1, at_step=step, name="unreached", timeout=10)
        assert not living("unreached")
        standing.train(1)

    def test_a_fork_requested_twice(self, standing: Trainers) -> None:
        now = done(standing)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(partial(fork, standing, at_step=now + 5))
            eventually(lambda: all(own.fork for own in standing.describe()), "the first fork is ordered")
            with pytest.raises(ForkError, match=r"expected no other fork in progress; found fork .* at rank 0"):
                fork(standing, at_step=now + 6)
            standing.train(10)
            with first.result(WAIT_S) as clones:
                assert clones.report.step == now + 5

    def test_clones_of_another_architecture(self, standing: Trainers) -> None:
        with pytest.raises(
            ForkError, match=r"clone 0 of .*: expected tensor 'momentum' of float64 \[200, 300\]; found"
        ):
            fork(standing, 1, at_step=None, options={"width": 100}, name="other")
        assert not living("other")
        standing.train(1)

    def test_clones_of_ranks_without_a_repository_save_where_they_are_told_to(
        self, standing: Trainers, repo: Repository
    ) -> None:
        with fork(standing, 1, at_step=None, name="saves", repository=repo) as clones:
            saved = clones.save("saved-by-a-clone")
        info = repo.info(saved.ref)
        assert info.metadata["fork"]["step"] == done(standing)

    def test_options_that_the_training_does_not_have(self, standing: Trainers) -> None:
        with pytest.raises(ForkError, match=r"options: expected options that the training has; found \['raet'\]"):
            fork(standing, at_step=None, options={"raet": 50, "rate": 0.1}, name="other")
        with pytest.raises(ForkError, match=r"option 'rate': expected .* such as 0.01; found 'fast'"):
            fork(standing, at_step=None, options={"rate": "fast"}, name="other")
        assert not living("other")
        standing.train(1)

    def test_clones_that_cannot_be_built(self, standing: Trainers) -> None:
        def build(context: RankContext) -> NumpyTraining:
            raise KeyError("no data for a clone")

        with pytest.raises(KeyError, match="no data for a clone"):
            fork(standing, at_step=None, build=build)
        standing.train(1)

    def test_not_all_ranks(self, standing: Trainers) -> None:
        for some in (standing[:1], [standing[0], standing[0]]):
            with pytest.raises(ForkError, match="expected all its 2 ranks, once each"):
                fork(some, at_step=None)

    @pytest.mark.parametrize(
        ("arguments", "match"),
        [
            ({"trainers": []}, "trainers: expected at least one"),
            ({"count": 0}, r"count: expected at least 1 clone per group; found \[0\]"),
            ({"at_step": -1}, "at_step: expected a step from 0, or None; found -1"),
            ({"at_step": "now"}, "at_step: expected a step from 0, or None; found 'now'"),
            ({"at_step": 1.5}, "at_step: expected a step from 0, or None; found 1.5"),
            ({"transport": "mpi"}, "transport: expected one of auto, shared, gloo, nccl; found 'mpi'"),
            ({"steps": -1}, "steps: expected at least 0; found -1"),
        ],
    )
    def test_wrong_arguments_are_refused_before_anybody_is_asked(self, arguments: dict[str, Any], match: str) -> None:
        with pytest.raises(OptionError, match=match):
            fork(**{"trainers": ["a handle"], "at_step": None, **arguments})

    def test_options_and_names_are_one_for_each_group(self) -> None:
        with pytest.raises(ValueError, match="options: expected 2, one per group; found 1"):
            fork_many(["a handle"], [1, 1], at_step=None, options=[{}])
        with pytest.raises(ValueError, match="names: expected 2, one per group; found 1"):
            fork_many(["a handle"], [1, 1], at_step=None, names=["a"])


@pytest.mark.both_engines
class TestDeaths:
    """Who dies x when. The matrix of the parts is in test_forking.py; here they are processes."""

    @staticmethod
    def forking(run: Trainers, pool: ThreadPoolExecutor, gate: Path) -> Any:
        """Begin a fork into two clones, which take no state before `gate` is there."""
        return pool.submit(
            partial(fork, run, 2, at_step=5, options={"stalls_until": str(gate)}, name="gone", timeout=60)
        )

    @pytest.mark.parametrize("phase", ["before the step", "in the transfer"])
    def test_a_clone_dies(
        self, cluster: Engine, run: Trainers, unforked: list[list[float]], tmp_path: Path, phase: str
    ) -> None:
        with ThreadPoolExecutor(1) as pool:
            future = self.forking(run, pool, tmp_path / "gate")
            eventually(lambda: len(living("gone")) == 2, "the clones are started")
            pid = pid_of(cluster, sorted(living("gone"))[1])
            losses = run.train(10) if phase == "in the transfer" else []
            os.kill(pid, signal.SIGKILL)
            (tmp_path / "gate").touch()
            with pytest.raises(ForkError, match=r"clone 1|rank 1 of 'gone'"):
                future.result(WAIT_S)
        eventually(lambda: not living("gone"), "no clone is left")
        losses = losses or run.train(10)
        assert losses == [own[:10] for own in unforked]
        assert run.train(5) == [own[10:15] for own in unforked]
        with fork(run, at_step=15) as clones:
            assert clones.train(3) == [own[15:18] for own in unforked]

    @pytest.mark.parametrize("phase", ["before the step", "in the transfer"])
    def test_a_rank_dies(self, run: Trainers, tmp_path: Path, phase: str) -> None:
        pid = run.describe()[1].pid
        with ThreadPoolExecutor(1) as pool:
            future = self.forking(run, pool, tmp_path / "gate")
            eventually(lambda: len(living("gone")) == 2, "the clones are started")
            if phase == "in the transfer":
                run.train(5)
            os.kill(pid, signal.SIGKILL)
            (tmp_path / "gate").touch()
            with pytest.raises(ForkError, match="rank 1"):
                future.result(WAIT_S)
        eventually(lambda: not living("gone"), "no clone is left")
        with pytest.raises(PeerLostError, match="rank 1"):
            run.train(5)

    def test_a_rank_that_has_just_died_is_named(self, run: Trainers) -> None:
        os.kill(run.describe()[1].pid, signal.SIGKILL)
        for _ in range(3):  # Ray notices after some milliseconds
            with pytest.raises(ForkError, match="rank 1") as caught:
                fork(run, at_step=None, timeout=WAIT_S)
            assert "\n" not in str(caught.value)

    def test_a_clone_dies_after_the_transfer(self, run: Trainers, unforked: list[list[float]]) -> None:
        run.train(5)
        clones = fork(run, at_step=5)
        os.kill(clones.describe()[0].pid, signal.SIGKILL)
        with pytest.raises(PeerLostError, match="rank 0"):
            clones.train(3)
        clones.close()
        assert run.train(5) == [own[5:10] for own in unforked]

    def test_a_rank_dies_after_the_transfer(self, run: Trainers, unforked: list[list[float]]) -> None:
        run.train(5)
        with fork(run, at_step=5) as clones:
            os.kill(run.describe()[0].pid, signal.SIGKILL)
            with suppress(PeerLostError):
                run.train(1)
            assert clones.train(5) == [own[5:10] for own in unforked]

    def test_who_forks_dies_and_its_clones_with_it(self, cluster: Engine, run: Trainers, tmp_path: Path) -> None:
        """Another process forks this run, and is killed: the run goes on, and can be forked again."""

        class Forker:
            @group("data")
            async def fork(self, trainers: list[Any], gate: str) -> None:
                options = {"stalls_until": gate}
                begin = partial(fork, trainers, 2, at_step=5, options=options, name="gone", timeout=20)
                await asyncio.to_thread(begin)

        forker = cluster.spawn(Forker, "forker", {}, lifetime=Lifetime(outlives=False, restarts=False))
        pid = pid_of(cluster, "forker")
        forking = begin(cluster, forker, "fork", list(run), str(tmp_path / "gate"))
        eventually(lambda: len(living("gone")) == 2, "the clones are started")
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not living("gone"), "the clones end with who started them")
        with pytest.raises(ShardUnavailableError):
            forking.result(WAIT_S)
        run.train(10)
        eventually(lambda: not any(own.fork for own in run.describe()), "the fork is given up")
        with fork(run, 1, at_step=10) as clones:
            assert clones.describe()[0].steps_done == 10
