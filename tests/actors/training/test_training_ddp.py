"""Ranks that are not ours, of PyTorch DDP and Ray Train, take orders at a mailbox and are forked like the others."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from tensorvine.actors.collective.connect import connect
from tensorvine.actors.collective.rendezvous import ActorRendezvous
from tensorvine.actors.engine.engine import Engine
from tensorvine.actors.engine.ray.engine import RayEngine
from tensorvine.actors.training.fork.order import ForkOrder
from tensorvine.actors.training.fork.receiver import ForkReceiver
from tensorvine.actors.training.forks import fork
from tensorvine.actors.training.mailbox import MailboxServer, RankMailbox, find_trainers, mailbox_name
from tensorvine.actors.training.report import RankReport
from tensorvine.actors.training.torch.rank import ForkableRank
from tensorvine.actors.training.training import RankContext
from tensorvine.clusters import LocalCluster
from tensorvine.store.errors import ForkError, OperationTimeoutError, ShardUnavailableError

from tests.support import torch_trainings
from tests.support.asking import ask, begin
from tests.support.torch_trainings import MODELS, batches, loss, make

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
ray.cloudpickle.register_pickle_by_value(torch_trainings)

pytestmark = pytest.mark.workers_import("torch", "torch._dynamo")
TIMEOUT_S = 60.0


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def down(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)


class TestMailbox:
    """Calls go in at one side, and are fetched and answered at the other."""

    def test_calls_wait_for_who_fetches_them_and_get_their_own_answers(self) -> None:
        async def scene() -> list[Any]:
            mailbox = RankMailbox("run", 0)
            asked = [asyncio.create_task(mailbox._ask("double", value)) for value in (1, 2)]
            calls: list[Any] = []
            while len(calls) < 2:
                calls += await mailbox.next(5.0)
            for number, method, (value,) in reversed(calls):
                assert method == "double"
                await mailbox.answer(number, 2 * value, None)
            return await asyncio.gather(*asked)

        assert asyncio.run(scene()) == [2, 4]

    def test_who_fetches_waits_for_calls_and_is_woken(self) -> None:
        async def scene() -> list[Any]:
            mailbox = RankMailbox("run", 0)
            fetched = asyncio.create_task(mailbox.next(5.0))
            await asyncio.sleep(0)
            asked = asyncio.create_task(mailbox.describe())
            ((number, method, arguments),) = await fetched
            await mailbox.answer(number, "fine", None)
            return [method, arguments, await asked, await mailbox.next(0.0)]

        assert asyncio.run(scene()) == ["describe", (), "fine", []]

    def test_a_call_that_nobody_answers_is_an_error_that_names_the_rank_and_is_not_carried_out_later(self) -> None:
        async def scene() -> tuple[str, list[Any]]:
            mailbox = RankMailbox("run", 3)
            with pytest.raises(OperationTimeoutError) as caught:
                await mailbox._ask("describe", timeout=0.01)
            await mailbox.answer(1, "late", None)
            return str(caught.value), await mailbox.next(0.0)

        message, left = asyncio.run(scene())
        assert message == "rank 3 of 'run': describe: expected an answer within 0.0 s; its process sent no answer"
        assert left == []

    def test_a_mailbox_has_one_owner(self) -> None:
        async def scene() -> list[bool]:
            mailbox = RankMailbox("run", 0)
            return [await mailbox.claim(owner) for owner in ("first", "second", "first")]

        assert asyncio.run(scene()) == [True, False, True]

    def test_it_tells_when_all_is_answered(self) -> None:
        async def scene() -> list[Any]:
            mailbox = RankMailbox("run", 0)
            before = await mailbox.answered(0.0)
            asked = asyncio.create_task(mailbox._ask("double", 1))
            ((number, _, _),) = await mailbox.next(5.0)
            meanwhile = await mailbox.answered(0.0)
            waiting = asyncio.create_task(mailbox.answered(5.0))
            await asyncio.sleep(0)
            await mailbox.answer(number, 2, None)
            return [before, meanwhile, await asked, await waiting]

        assert asyncio.run(scene()) == [True, False, 2, True]


class Target:
    """What a mailbox's calls are carried out by."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.go = threading.Event()

    def describe(self) -> RankReport:
        return RankReport(
            run="run",
            rank=0,
            size=self.size,
            steps_done=5,
            training=False,
            step_s=0.0,
            losses=5,
            specs=(),
            forward_order=(),
            backend=None,
            node="",
            pid=os.getpid(),
        )

    def arm(self, order: Any, step: int) -> None:
        raise ForkError(f"step {step} is past")

    def agree(self, fork_id: str) -> None:
        raise ForkError(f"fork {fork_id} is not known")

    def cancel(self, fork_id: str, reason: str) -> None:
        raise KeyError(fork_id)

    def fork_state(self, fork_id: str, timeout: float) -> str:
        return f"{fork_id} ended" if self.go.wait(timeout) else f"{fork_id} goes on"


@pytest.fixture
def engine(cluster: LocalCluster) -> Engine:
    return RayEngine()


class TestMailboxServer:
    """A process carries out what comes to its mailbox."""

    @pytest.fixture
    def run(self) -> str:
        return f"mailbox-{uuid.uuid4().hex[:8]}"

    @pytest.fixture
    def ask_rank(self, engine: Engine) -> Any:
        return partial(ask, engine, timeout=TIMEOUT_S, who="the rank")

    def test_a_rank_answers_whoever_has_its_handle_while_another_call_waits(
        self, engine: Engine, run: str, ask_rank: Any
    ) -> None:
        target = Target()
        with MailboxServer(engine, run, 0, target):
            (handle,) = find_trainers(run, timeout=TIMEOUT_S)
            waiting = begin(engine, handle, "fork_state", "f", 30.0, who="the rank")
            assert ask_rank(handle, "describe").steps_done == 5
            assert ask_rank(handle, "fork_state", "g", 0.0) == "g goes on"
            assert ask_rank(handle, "recipe", []) is None
            with pytest.raises(ForkError, match=r"^step 7 is past$"):
                ask_rank(handle, "arm", None, 7)
            with pytest.raises(ForkError, match=r"^fork f is not known$"):
                ask_rank(handle, "agree", "f")
            with pytest.raises(ForkError, match=r"mailbox of rank 0 of .*: cancel: KeyError: 'f'"):
                ask_rank(handle, "cancel", "f", "reason")
            target.go.set()
            assert waiting.result(TIMEOUT_S) == "f ended"

            with pytest.raises(ForkError, match="another process uses them"):
                MailboxServer(engine, run, 0, target)
        with pytest.raises(ShardUnavailableError):
            ask_rank(handle, "describe")
        with pytest.raises(OperationTimeoutError, match=f"rank 0 of '{run}'"):
            find_trainers(run, timeout=0.0)

    def test_a_rank_that_leaves_answers_what_it_was_asked(self, engine: Engine, run: str) -> None:
        target = Target()
        box = MailboxServer(engine, run, 0, target)
        (handle,) = find_trainers(run, timeout=TIMEOUT_S)
        waiting = begin(engine, handle, "fork_state", "f", 30.0, who="the rank")
        assert ask(engine, handle, "describe", timeout=TIMEOUT_S, who="the rank").steps_done == 5
        with ThreadPoolExecutor(1) as pool:
            closing = pool.submit(box.close)
            target.go.set()
            assert waiting.result(TIMEOUT_S) == "f ended"
            closing.result(TIMEOUT_S)

    def test_a_rank_that_does_not_come_is_named(self, engine: Engine, run: str) -> None:
        with (
            MailboxServer(engine, run, 0, Target(size=2)),
            pytest.raises(OperationTimeoutError, match=f"rank 1 of '{run}'"),
        ):
            find_trainers(run, timeout=10.0)

    def test_a_mailbox_that_is_gone_is_logged_and_no_more(
        self, engine: Engine, run: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING), MailboxServer(engine, run, 0, Target()) as box:
            engine.kill(mailbox_name(run, 0))
            box._thread.join(TIMEOUT_S)
            assert not box._thread.is_alive()
        assert "can no longer be forked" in caplog.text


class DdpRank:
    """A rank of a loop that anybody might have written: PyTorch DDP over Gloo."""

    def __init__(self, run: str, rank: int, size: int, store: str) -> None:
        torch.set_num_threads(1)
        meeting = torch.distributed.FileStore(store, size)
        torch.distributed.init_process_group(
            "gloo", store=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S)
        )
        torch.manual_seed(7 + rank)
        self.rank, self.size = rank, size
        self.model = torch.nn.parallel.DistributedDataParallel(MODELS["Convolutional"]())
        self.optimizer = sgd(self.model.parameters())
        self.scheduler = down(self.optimizer)
        self.forkable = ForkableRank(run, rank, size, self.model, self.optimizer, scheduler=self.scheduler)

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            with self.forkable.step() as step:
                self.optimizer.zero_grad()
                found = loss(self.model, batches(step, self.rank, self.size))
                found.backward()
                self.optimizer.step()
                self.scheduler.step()
            losses.append(found.item())
        return losses

    def close(self) -> None:
        self.forkable.close()
        torch.distributed.destroy_process_group()


class CloneRank:
    """A rank of ours, which takes over a state and goes on."""

    def __init__(self, rank: int, size: int) -> None:
        torch.set_num_threads(1)
        self.joins = partial(connect, rendezvous=ActorRendezvous(RayEngine()))
        self.rank, self.size = rank, size

    def adopt(self, order: ForkOrder) -> int:
        """Receive a state, and give the steps done."""
        group = self.joins(f"clones-{order.id}", self.rank, self.size, backend="gloo", timeout=TIMEOUT_S)
        context = RankContext("clones", self.rank, self.size, group)
        self.training = make("Convolutional", sgd, down, context=context, seed=99)
        self.group = group
        ForkReceiver(order, self.rank, self.training, self.joins).whole(TIMEOUT_S)
        return self.training.steps_done

    def train(self, steps: int) -> list[float]:
        return [self.training.step() for _ in range(steps)]

    def close(self) -> None:
        self.training.close()
        self.group.close()


class Ranks:
    """A run's ranks, as its handles are used by who forks."""

    def __init__(self, engine: Engine, run: str) -> None:
        self.engine, self.handles = engine, find_trainers(run, timeout=TIMEOUT_S)
        self.run = run

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        answers = [begin(self.engine, handle, method, *arguments) for handle in self.handles]
        return [answer.result(TIMEOUT_S) for answer in answers]

    def order(self, clones: int) -> ForkOrder:
        first, *_ = reports = self.ask("describe")
        assert [(report.run, report.rank) for report in reports] == [(self.run, rank) for rank in range(first.size)]
        fork_id, size = uuid.uuid4().hex[:8], first.size
        return ForkOrder(
            id=fork_id,
            run=self.run,
            sources=size,
            groups=(clones,),
            specs=first.specs,
            forward=first.forward_order,
            transport="gloo",
            timeout=TIMEOUT_S,
        )

    def steps_done(self) -> int:
        (done,) = {report.steps_done for report in self.ask("describe")}
        return done

    def ended(self, order: ForkOrder) -> list[str | None]:
        states = self.ask("fork_state", order.id, TIMEOUT_S)
        assert all(state.ended for state in states)
        return [state.error for state in states]


def answers(futures: list[Any]) -> list[Any]:
    return ray.get(futures, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def ddp(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[Any]]]:
    """Two ranks, in actors' processes."""
    run, store = f"ddp-{uuid.uuid4().hex[:8]}", str(tmp_path_factory.mktemp("ddp") / "store")
    started = ray.remote(num_cpus=0)(DdpRank)
    actors = [started.remote(run, rank, 2, store) for rank in range(2)]
    yield run, actors
    answers([actor.close.remote() for actor in actors])


@pytest.fixture(scope="module")
def clones(cluster: LocalCluster) -> list[Any]:
    """Two ranks of ours, in actors' processes."""
    started = ray.remote(num_cpus=0)(CloneRank)
    return [started.remote(rank, 2) for rank in range(2)]


class TestDdp:
    """Ranks of a DDP training are found by name, and forked from outside."""

    def test_clones_go_on_as_the_ranks_do(self, ddp: tuple[str, list[Any]], clones: list[Any], engine: Engine) -> None:
        run, actors = ddp
        ranks = Ranks(engine, run)
        order, done = ranks.order(2), ranks.steps_done()
        ranks.ask("arm", order, done + 3)
        ranks.ask("agree", order.id)
        training = [actor.train.remote(9) for actor in actors]
        assert answers([clone.adopt.remote(order) for clone in clones]) == [done + 3] * 2
        assert ranks.ended(order) == [None, None]
        losses = answers(training)
        assert answers([clone.train.remote(6) for clone in clones]) == [own[3:] for own in losses]
        assert ranks.steps_done() == done + 9
        assert all(report.step_s > 0 and not report.training for report in ranks.ask("describe"))
        answers([clone.close.remote() for clone in clones])

    def test_ranks_that_stand_still_are_captured_where_they_stand(
        self, ddp: tuple[str, list[Any]], clones: list[Any], engine: Engine
    ) -> None:
        run, actors = ddp
        ranks = Ranks(engine, run)
        order = ranks.order(2)
        answers([actor.train.remote(1) for actor in actors])
        done = ranks.steps_done()
        with pytest.raises(ForkError, match=f"not begun; found {done - 1}, but"):
            ranks.ask("arm", order, done - 1)
        ranks.ask("arm", order, done)
        ranks.ask("agree", order.id)
        assert answers([clone.adopt.remote(order) for clone in clones]) == [done] * 2
        assert ranks.ended(order) == [None, None]
        expected = answers([actor.train.remote(4) for actor in actors])
        assert answers([clone.train.remote(4) for clone in clones]) == expected
        answers([clone.close.remote() for clone in clones])

    def test_a_fork_can_be_given_up(self, ddp: tuple[str, list[Any]], engine: Engine) -> None:
        run, actors = ddp
        ranks = Ranks(engine, run)
        order = ranks.order(2)
        ranks.ask("arm", order, ranks.steps_done() + 1)
        assert {report.fork for report in ranks.ask("describe")} == {order.id}
        with pytest.raises(ForkError, match="expected no other fork"):
            ranks.ask("arm", ranks.order(2), ranks.steps_done() + 2)
        ranks.ask("cancel", order.id, "no need")
        losses = answers([actor.train.remote(2) for actor in actors])
        assert [len(own) for own in losses] == [2, 2]
        assert all(error and "no need" in error for error in ranks.ended(order))

    def test_who_has_their_handles_forks_them_with_a_build_of_its_own(
        self, ddp: tuple[str, list[Any]], engine: Engine
    ) -> None:
        def build(context: RankContext) -> Any:
            torch.set_num_threads(1)
            return make("Convolutional", sgd, down, context=context, seed=99)

        run, actors = ddp
        handles = find_trainers(run, timeout=TIMEOUT_S)
        with pytest.raises(ForkError, match="build: expected a function"):
            fork(handles, at_step=None)
        with fork(handles, at_step=None, build=build, steps=4, transport="gloo") as forked:
            expected = answers([actor.train.remote(4) for actor in actors])
            assert forked.results(TIMEOUT_S) == expected


class TestForkableRank:
    """What a loop that is not ours is enclosed in."""

    def test_it_is_refused_what_cannot_be(self) -> None:
        model = MODELS["Plain"]()
        with pytest.raises(ValueError, match="expected a rank below 2"):
            ForkableRank("run", 2, 2, model, sgd(model.parameters()))

    def test_a_step_that_failed_was_none(self, engine: Engine) -> None:
        model = MODELS["Plain"]()
        optimizer = sgd(model.parameters())
        run = f"alone-{uuid.uuid4().hex[:8]}"
        with ForkableRank(run, 0, 1, model, optimizer, steps_done=4, engine=engine) as forkable:
            failing = forkable.step()
            assert failing.__enter__() == 5
            assert forkable.describe().training
            assert not failing.__exit__(ValueError, ValueError("batch"), None)
            assert (forkable.steps_done, forkable.describe().training) == (4, False)
            with forkable.step() as step:
                loss(model, batches(step, 0, 1)).backward()
                optimizer.step()
            assert (forkable.steps_done, step) == (5, 5)
            assert {spec.name for spec in forkable.specs()} == {spec.name for spec in make("Plain", sgd).specs()}

    def test_a_loop_that_ends_with_the_step_that_is_forked(self, engine: Engine) -> None:
        def build(context: RankContext) -> Any:
            torch.set_num_threads(1)
            return make("Convolutional", sgd, context=context, seed=99)

        run, model = f"last-{uuid.uuid4().hex[:8]}", MODELS["Convolutional"]()
        optimizer = sgd(model.parameters())

        def steps(numbers: range, enclose: Callable[[], Any]) -> list[float]:
            losses = []
            for number in numbers:
                with enclose():
                    optimizer.zero_grad()
                    found = loss(model, batches(number, 0, 1))
                    found.backward()
                    optimizer.step()
                losses.append(found.item())
            return losses

        ordered = threading.Event()

        def loop() -> None:
            with ForkableRank(run, 0, 1, model, optimizer, engine=engine) as forkable:
                while forkable.describe().fork is None:
                    assert not ordered.wait(0.01)
                steps(range(1, 5), forkable.step)

        with ThreadPoolExecutor(1) as pool:
            looping = pool.submit(loop)
            try:
                with fork(find_trainers(run), at_step=4, build=build, steps=3, transport="gloo") as forked:
                    looping.result(TIMEOUT_S)
                    assert forked.results(TIMEOUT_S)[0] == steps(range(5, 8), nullcontext)
            finally:
                ordered.set()


def loop_of_ray_train(config: dict[str, Any]) -> None:
    """Train in a Ray Train worker, five steps beyond the one that is forked; stand before it until it was ordered."""
    import ray.train
    import ray.train.torch

    torch.set_num_threads(1)
    context = ray.train.get_context()
    torch.manual_seed(5)
    model = ray.train.torch.prepare_model(MODELS["Convolutional"]())
    optimizer = sgd(model.parameters())
    losses: list[float] = []
    at = config["at"]
    with ForkableRank(config["run"], context.get_world_rank(), context.get_world_size(), model, optimizer) as forkable:
        while forkable.steps_done < at + 5:
            with forkable.step() as step:
                optimizer.zero_grad()
                found = loss(model, batches(step, 0, 1))
                found.backward()
                optimizer.step()
            losses.append(found.item())
            while forkable.steps_done == at - 5 and not Path(config["ordered"]).exists():
                threading.Event().wait(0.01)
        Path(config["losses"]).write_text(json.dumps(losses))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray Train uses what Ray Data has deprecated
def test_a_ray_train_worker_is_forked_while_it_trains(cluster: LocalCluster, engine: Engine, tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="ray[train] is not installed", exc_type=ImportError)
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    run, at = f"train-{uuid.uuid4().hex[:8]}", 20
    config = {"run": run, "at": at, "ordered": str(tmp_path / "ordered"), "losses": str(tmp_path / "losses")}
    trainer = TorchTrainer(
        loop_of_ray_train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=1, use_gpu=False),
        run_config=RunConfig(name=run, storage_path=str(tmp_path)),
        torch_config=TorchConfig(backend="gloo"),
    )
    with ThreadPoolExecutor(1) as pool:
        fitting = pool.submit(trainer.fit)
        ranks = Ranks(engine, run)
        order = ranks.order(1)
        ranks.ask("arm", order, at)
        ranks.ask("agree", order.id)
        (tmp_path / "ordered").touch()
        clone = make("Convolutional", sgd, seed=9)
        while ranks.steps_done() < at + 5:  # the training has come to its end: it stays until its state is sent
            assert not fitting.done()
        ForkReceiver(order, 0, clone, partial(connect, rendezvous=ActorRendezvous(engine))).whole(TIMEOUT_S)
        assert ranks.ended(order) == [None]
        fitting.result(TIMEOUT_S)
    losses = json.loads(Path(config["losses"]).read_text())
    assert clone.steps_done == at == len(losses) - 5
    assert [clone.step() for _ in range(5)] == losses[at:]
