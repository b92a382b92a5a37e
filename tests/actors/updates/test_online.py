"""Producers and consumers as actors: what is published arrives whole, and nothing that dies stops the answers."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from tensorvine.actors import Consumer, Producer, Publisher, Repository, Waves, load_weights, save_weights
from tensorvine.actors.planner.calls import PlannerCalls
from tensorvine.actors.rpc.calls import Request
from tensorvine.actors.rpc.channel import Channel
from tensorvine.actors.rpc.messages import planner_name
from tensorvine.actors.updates.follower import Follower
from tensorvine.planner import PlanRequest
from tensorvine.store.errors import (
    InvalidNameError,
    OperationTimeoutError,
    OptionError,
    ShardUnavailableError,
    StoreFullError,
    VersionNotServedError,
)
from tensorvine.store.refs import ModelRef

from tests.support.actors import pid_of as pid_of_actor
from tests.support.actors import restart_planner
from tests.support.asking import ask
from tests.support.waiting import PROMPT_S, eventually

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors cannot import a test's module

SHAPE = (50_000,)


@pytest.fixture(scope="module")
def repo(cluster: object) -> Iterator[Repository]:
    options: dict[str, Any] = {"shards": 1, "store_bytes": 256 << 20, "preallocate_bytes": 0}
    with Repository.start(f"online-{uuid.uuid4().hex[:6]}", **options) as repository:
        yield repository


@pytest.fixture
def own(cluster: object) -> Iterator[Repository]:
    """A repository that a test may break."""
    with Repository.start(f"broken-{uuid.uuid4().hex[:6]}", shards=1, preallocate_bytes=0) as repository:
        yield repository


@pytest.fixture
def name() -> str:
    return f"m-{uuid.uuid4().hex[:6]}"


def tensors(value: float) -> dict[str, np.ndarray]:
    return {f"t{i}": np.full(SHAPE, value, np.float32) for i in range(6)}


class Tagged:
    """Answers with all values that its tensors hold: one, if its version is whole."""

    def assign(self, given: dict[str, np.ndarray]) -> None:
        self.tensors = given

    def __call__(self, batch: Any) -> list[float]:
        return sorted({float(edge) for array in self.tensors.values() for edge in (array.min(), array.max())})


class Marked(Tagged):
    """Leaves a file while it takes a version, and notes how many others do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def assign(self, given: dict[str, np.ndarray]) -> None:
        mine = self.folder / f"{uuid.uuid4().hex}.now"
        mine.touch()
        (self.folder / f"{uuid.uuid4().hex}.{len(list(self.folder.glob('*.now')))}").touch()
        threading.Event().wait(0.05)
        mine.unlink()
        super().assign(given)


class Slow(Tagged):
    """Takes its time to take a version."""

    def assign(self, given: dict[str, np.ndarray]) -> None:
        threading.Event().wait(0.3)
        super().assign(given)


def counting(iterations: int) -> Callable[[Publisher], int]:
    """A training whose tensors all hold the iteration, changed in place as optimizers do."""

    def train(publisher: Publisher) -> int:
        model = tensors(0)
        for _ in range(iterations):
            for array in model.values():
                array += 1
            publisher.step(1.0 / (publisher.iteration + 1), model)
        return publisher.iteration

    return train


def pid_of(consumer: Consumer) -> int:
    """Ask an actor's process for its number."""
    return pid_of_actor(consumer._engine, consumer._actor_name)


class TestProducer:
    def test_it_publishes_at_its_schedule_and_gives_what_the_training_gave(self, repo, name):
        with Producer.start(repo, name, counting(40), schedule=10) as producer:
            assert producer.result(60) == 40
            report = producer.report()
        assert report.failed == 0
        published = {update.iteration: update.ref for update in report.updates}
        assert published.keys() <= {10, 20, 30, 40, *range(11, 41)}  # one under way puts the next one off
        assert 10 in published
        newest = max(published)
        loaded = repo.load(published[newest])
        assert {float(v) for array in loaded.values() for v in (array.min(), array.max())} == {float(newest)}
        assert repo.info(published[newest]).metadata == {"iteration": newest, "loss": 1.0 / newest}
        assert [iteration for iteration, _ in report.losses] == list(range(1, 41))

    def test_synchronous_updates_are_there_when_the_step_ends(self, repo, name):
        def train(publisher: Publisher) -> list[int]:
            there: list[int] = []
            with Repository.connect(publisher._repo.name) as other:
                for i in range(1, 5):
                    publisher.step(1.0, tensors(i))
                    there.append(other.wait_newer(publisher.name, 0, 5.0).version)
            return there

        with Producer.start(repo, name, train, schedule=1, synchronous=True) as producer:
            assert producer.result(60) == [1, 2, 3, 4]

    def test_only_the_newest_versions_stay_where_there_is_no_disk(self, repo, name):
        with Producer.start(repo, name, counting(10), schedule=1, synchronous=True, keep=2) as producer:
            producer.result(60)
        assert len(repo.models(name)) == 2
        assert ModelRef(name, 10) in repo.models(name)
        assert len(repo.lineage(f"{name}@10")) == 10

    def test_an_error_of_the_training_is_raised_where_its_result_is_asked_for(self, repo, name):
        def train(publisher: Publisher) -> None:
            raise ZeroDivisionError("the training's own")

        with (
            Producer.start(repo, name, train) as producer,
            pytest.raises(ZeroDivisionError, match="the training's own"),
        ):
            producer.result(60)

    def test_a_training_that_goes_on_is_a_timeout_and_can_be_ended(self, repo, name):
        def train(publisher: Publisher) -> None:
            threading.Event().wait(600)

        with Producer.start(repo, name, train) as producer:
            with pytest.raises(OptionError, match="timeout: expected"):
                producer.result("5")  # type: ignore[arg-type]
            with pytest.raises(OperationTimeoutError, match="it continues"):
                producer.result(0.1)

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"schedule": "sometimes"}, ValueError, "schedule: expected None"),
            ({"schedule": 0}, ValueError, "schedule: expected None"),
            ({"transport": "pigeon"}, ValueError, "transport: expected one of auto"),
            ({"train": 3}, ValueError, "train: expected a function"),
            ({"name": "/no"}, InvalidNameError, "/no"),
        ],
    )
    def test_a_wrong_argument_is_refused_before_anything_starts(self, repo, arguments, error, message):
        given = {"name": "m", "train": counting(1), **arguments}
        with pytest.raises(error, match=message):
            Producer.start(repo, given.pop("name"), given.pop("train"), **given)

    def test_an_update_that_fails_is_counted_and_the_training_goes_on(self, repo, name):
        def train(publisher: Publisher) -> int:
            for i in range(1, 5):
                publisher.step(1.0, {"t": np.zeros(1 << 30, np.uint8)} if i == 2 else tensors(i))
            return publisher.iteration

        with Producer.start(repo, name, train, schedule=1, synchronous=True) as producer:
            assert producer.result(100) == 4
            report = producer.report()
        assert report.failed == 1
        assert [update.iteration for update in report.updates] == [1, 3, 4]

    def test_an_update_that_was_asked_for_says_why_it_failed(self, repo, name):
        with Publisher(repo, name, 10) as publisher, pytest.raises(StoreFullError):
            publisher.publish({"t": np.zeros(1 << 30, np.uint8)}).committed(30)

    @pytest.mark.parametrize("loss", [float("nan"), float("inf"), np.float32(0.5)])
    def test_a_training_that_diverges_is_published(self, repo, name, loss):
        with Publisher(repo, name, 1) as publisher:
            assert publisher.step(loss, tensors(1))
            info = repo.info(publisher.publish(tensors(2), loss).committed(30).ref)
        assert publisher.report().failed == 0
        assert info.metadata == {"iteration": 1, "loss": float(loss) if np.isfinite(loss) else None}
        assert repr(info.quality) == repr(-float(loss))

    def test_iterations_that_do_not_increase_are_refused(self, repo, name):
        with Publisher(repo, name, 10) as publisher:
            publisher.step(1.0, tensors(1), 5)
            with pytest.raises(ValueError, match="after 5; found 5"):
                publisher.step(1.0, tensors(1), 5)

    @pytest.mark.parametrize("when", ["before", "sent"])
    @pytest.mark.parametrize("phase", ["begin", "commit"])
    def test_one_that_dies_during_a_publish_leaves_whole_versions_and_nothing_else(
        self, own, name, phase, when, tmp_path
    ):
        started = tmp_path / "started"

        def train(publisher: Publisher) -> None:
            publisher._repo._saves.saver.reserved.renew = lambda _: None  # so that the next save begins
            publisher.publish(tensors(1)).committed(30)
            eventually(started.exists, "who started the producer to have heard of it")
            send = Channel.send

            def deadly(self: Channel, request: Request[Any]) -> Any:
                if request.remote.name == phase and when == "before":
                    os.kill(os.getpid(), signal.SIGKILL)
                answer = send(self, request)
                if request.remote.name == phase:
                    os.kill(os.getpid(), signal.SIGKILL)
                return answer

            Channel.send = deadly
            publisher.publish(tensors(2)).committed(30)

        with Consumer.start(own, name, Tagged) as consumer, Producer.start(own, name, train) as producer:
            started.touch()
            with pytest.raises(ShardUnavailableError):
                producer.result(60)
            assert consumer.infer(None).outputs in ([1.0], [2.0])
            (shard,) = own.stats().shards
            eventually(
                lambda: own.stats().shards[0].bytes_staged == 0,
                f"nothing of the update left in {shard}",
                timeout=PROMPT_S,
            )
            saved = own.save(name, tensors(3)).ref
            assert consumer.wait_for(saved.version) == saved
            assert consumer.infer(None).outputs == [3.0]


@pytest.mark.both_engines
class TestConsumer:
    def test_every_answer_is_of_one_version_while_a_training_publishes(self, repo, name):
        with Consumer.start(repo, name, Tagged) as consumer:
            with Producer.start(repo, name, counting(150), schedule=3) as producer:
                answers = [consumer.infer(None)]
                while True:
                    answers.append(consumer.infer(None))
                    try:
                        producer.result(0.0)
                    except OperationTimeoutError:
                        continue
                    break
                last = producer.report().updates[-1].ref
            assert consumer.wait_for(last.version) == last
            status = consumer.status()
        assert all(len(answer.outputs) == 1 for answer in answers)
        versions = [answer.ref.version for answer in answers]
        assert versions == sorted(versions)
        assert status.ref == last
        assert status.answered == len(answers)
        assert len(status.deliveries) + status.skipped == last.version
        assert {delivery.transport for delivery in status.deliveries} == {"shared"}
        assert not status.refused

    def test_one_that_joins_later_has_the_newest_version_at_once(self, repo, name):
        for value in (1.0, 2.0, 3.0):
            repo.save(name, tensors(value))
        with Consumer.start(repo, name, Tagged) as consumer:
            answer = consumer.infer(None)
        assert (answer.outputs, answer.ref) == ([3.0], ModelRef(name, 3))

    def test_without_a_version_there_is_no_answer_and_the_message_says_so(self, repo, name):
        with Consumer.start(repo, name, Tagged) as consumer:
            with pytest.raises(OperationTimeoutError, match=f"first version of '{name}'"):
                consumer.infer(None, timeout=0.05)
            with pytest.raises(OperationTimeoutError, match=f"{name}@1"):
                consumer.wait_for(1, timeout=0.05)
            for call in (
                lambda: consumer.infer(None, None),
                lambda: consumer.wait_for(1, "5"),
                lambda: consumer.status(None),
            ):
                with pytest.raises(OptionError, match="timeout: expected"):
                    call()

    def test_it_answers_only_with_a_version_that_the_request_allows(self, repo, name):
        repo.save(name, tensors(1))
        with Consumer.start(repo, name, Tagged) as consumer:
            assert consumer.infer(None, at_least=1).ref == consumer.infer(None, exactly=1).ref == ModelRef(name, 1)
            with pytest.raises(VersionNotServedError, match=f"{name}@2 or newer in use; found {name}@1") as caught:
                consumer.infer(None, at_least=2)
            assert caught.value.served == f"{name}@1"
            repo.save(name, tensors(2))
            consumer.wait_for(2)
            assert consumer.infer(None, at_least=2).outputs == [2.0]
            with pytest.raises(VersionNotServedError):
                consumer.infer(None, exactly=1)

    def test_a_paused_one_answers_with_its_version_and_takes_the_newest_when_it_resumes(self, repo, name):
        repo.save(name, tensors(1))
        with Consumer.start(repo, name, Tagged) as paused, Consumer.start(repo, name, Tagged) as other:
            paused.wait_for(1)
            paused.pause()
            for value in (2.0, 3.0):
                repo.save(name, tensors(value))
            other.wait_for(3)
            assert paused.status().paused
            assert paused.infer(None).outputs == [1.0]
            paused.resume()
            assert paused.wait_for(3).version == 3
            assert not paused.status().paused

    def test_waves_limit_how_many_update_at_once(self, repo, name, tmp_path):
        one = Waves(1)
        consumers = [Consumer.start(repo, name, lambda: Marked(tmp_path), rollout=one) for _ in range(3)]
        try:
            for value in range(1, 4):
                repo.save(name, tensors(value))
                for consumer in consumers:
                    assert consumer.wait_for(value, timeout=PROMPT_S).version == value
        finally:
            for consumer in consumers:
                consumer.close()
        counts = {int(path.suffix[1:]) for path in tmp_path.iterdir()}
        assert counts == {1}

    def test_one_that_dies_in_its_turn_holds_up_no_other_for_ever(self, repo, name, tmp_path):
        class Stuck(Tagged):
            def assign(self, given: dict[str, np.ndarray]) -> None:
                if not (tmp_path / "died").exists():
                    (tmp_path / "died").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                super().assign(given)

        with Consumer.start(repo, name, Stuck, rollout=Waves(1)):
            repo.save(name, tensors(1))
            eventually((tmp_path / "died").exists, "it dies in its turn")
            with Consumer.start(repo, name, Tagged, rollout=Waves(1)) as other:
                assert other.wait_for(1, timeout=120).version == 1

    def test_a_slow_one_skips_to_the_newest(self, repo, name):
        with Consumer.start(repo, name, Slow) as slow, Consumer.start(repo, name, Tagged) as fast:
            repo.save(name, tensors(0))
            slow.wait_for(1, timeout=30)  # one that joins later counts from the version that it finds
            refs = [repo.save(name, tensors(value)).ref for value in range(1, 13)]
            assert fast.wait_for(13) == slow.wait_for(13, timeout=60) == refs[-1]
            status = slow.status()
        assert status.skipped > 0
        assert len(status.deliveries) + status.skipped == 13

    def test_some_join_and_some_leave_and_all_who_are_there_follow(self, repo, name):
        repo.save(name, tensors(1))
        with Consumer.start(repo, name, Tagged) as stays:
            with Consumer.start(repo, name, Tagged) as leaves:
                assert leaves.wait_for(1).version == 1
            with Consumer.start(repo, name, Tagged) as joins:
                ref = repo.save(name, tensors(2)).ref
                assert joins.wait_for(2) == stays.wait_for(2) == ref

    @pytest.mark.parametrize("transport", ["shared", "socket", "object_store"])
    def test_each_way_brings_the_same(self, repo, name, transport):
        repo.save(name, tensors(4))
        with Consumer.start(repo, name, Tagged, transport=transport) as consumer:
            assert consumer.infer(None).outputs == [4.0]
            (delivery,) = consumer.status().deliveries
        assert delivery.transport == transport
        assert delivery.nbytes == sum(array.nbytes for array in tensors(0).values())

    def test_files_bring_what_was_on_the_path_before_anybody_heard_of_it(self, cluster, name, tmp_path):
        def train(publisher: Publisher) -> list[int]:
            files: list[int] = []
            for i in range(1, 4):
                publisher.publish(tensors(i)).committed(30)
                files.append(len([path for path in tmp_path.rglob("*") if path.is_file()]))
            return files

        kept = f"files-{uuid.uuid4().hex[:6]}"
        with (
            Repository.start(kept, shards=1, preallocate_bytes=0, path=tmp_path) as repo,
            Consumer.start(repo, name, Tagged, transport="files") as consumer,
            Producer.start(repo, name, train, transport="files") as producer,
        ):
            first, second, third = producer.result(60)
            assert first < second < third  # each version's own had been written
            assert consumer.wait_for(3) == ModelRef(name, 3)
            assert consumer.infer(None).outputs == [3.0]
            assert {delivery.transport for delivery in consumer.status().deliveries} == {"files"}
            assert len(repo.models(name)) == 3

    def test_another_architecture_is_refused_by_name_and_the_old_version_goes_on_answering(self, repo, name):
        nn = pytest.importorskip("torch").nn

        def build() -> Any:
            return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

        repo.save_model(name, build())
        with Consumer.start(repo, name, build) as consumer:
            batch = np.ones((3, 4), np.float32)
            before = consumer.infer(batch).outputs
            repo.save_model(name, nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 2)))
            eventually(lambda: bool(consumer.status().refused), "the second version is refused")
            ((ref, why),) = consumer.status().refused.items()
            assert ref == ModelRef(name, 2)
            assert "architecture" in why
            answer = consumer.infer(batch)
            assert answer.ref == ModelRef(name, 1)
            np.testing.assert_array_equal(answer.outputs, before)
            repo.save_model(name, build())
            assert consumer.wait_for(3).version == 3

    def test_one_that_dies_is_started_again_and_has_the_newest_version(self, repo, name):
        repo.save(name, tensors(1))
        with Consumer.start(repo, name, Tagged) as consumer:
            assert consumer.infer(None).outputs == [1.0]
            psutil.Process(pid_of(consumer)).kill()
            ref = repo.save(name, tensors(2)).ref

            def answers() -> bool:
                try:
                    return consumer.infer(None).ref == ref
                except ShardUnavailableError:
                    return False

            eventually(answers, "it answers with the newest version")

    def test_one_that_dies_during_a_fetch_leaves_no_pin_and_the_others_follow(self, own, name):
        class Deadly(Tagged):
            def assign(self, given: dict[str, np.ndarray]) -> None:
                if given["t0"][0] == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                super().assign(given)

        own.save(name, tensors(1))
        with Consumer.start(own, name, Deadly) as deadly, Consumer.start(own, name, Tagged) as other:
            assert deadly.wait_for(1) == other.wait_for(1)
            own.save(name, tensors(2))
            assert other.wait_for(2).version == 2
            own.save(name, tensors(3))

            def follows() -> bool:
                try:
                    return deadly.wait_for(3, 5.0).version == 3
                except (ShardUnavailableError, OperationTimeoutError):
                    return False

            eventually(follows, "the one that died follows again")
        for ref in own.models(name):
            own.retire(ref)
        eventually(lambda: own.stats().catalog.pins == 0, "no pin is left", timeout=PROMPT_S)

    def test_answers_go_on_while_the_shard_is_gone_and_updates_after_it(self, own, name):
        own.save(name, tensors(1))
        with Consumer.start(own, name, Tagged) as consumer:
            assert consumer.infer(None).outputs == [1.0]
            psutil.Process(own._session.connection(0).hello.pid).kill()
            assert consumer.infer(None).outputs == [1.0]

            def saved() -> bool:
                try:
                    own.save(name, tensors(2))
                except (ShardUnavailableError, OperationTimeoutError):
                    return False
                return True

            eventually(saved, "the shard is there again")
            assert consumer.wait_for(2, 60).version >= 2
            assert consumer.infer(None).outputs == [2.0]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [({"transport": "pigeon"}, "transport: expected one of auto"), ({"build": 3}, "build: expected a function")],
    )
    def test_a_wrong_argument_is_refused_before_anything_starts(self, repo, arguments, message):
        given = {"build": Tagged, **arguments}
        with pytest.raises(ValueError, match=message):
            Consumer.start(repo, "m", given.pop("build"), **given)

    @pytest.mark.ray
    def test_actors_on_ray_log_no_warnings_of_rays(self, repo, name):
        if type(repo.engine).__name__ != "RayEngine":
            pytest.skip("Ray's warnings")
        repo.save(name, tensors(1))
        with Consumer.start(repo, name, Tagged) as consumer:
            consumer.infer(None)
            pids = [pid_of(consumer), repo._session.connection(0).hello.pid]
        logs = Path(ray._private.worker._global_node.get_logs_dir_path())
        said = [path.read_text() for pid in pids for path in logs.glob(f"worker-*-{pid}.err")]
        assert len(said) == len(pids)
        for text in said:
            assert "DeprecationWarning" not in text
            assert "blocking ray.get" not in text

    @pytest.mark.ray
    def test_a_line_in_an_actor_s_log_has_time_level_and_fields(self, repo, name):
        if type(repo.engine).__name__ != "RayEngine":
            pytest.skip("Ray's files")

        class Refuses(Tagged):
            def assign(self, given: dict[str, np.ndarray]) -> None:
                raise ValueError("not \x1b[2J this")

        repo.save(name, tensors(1))
        with Consumer.start(repo, name, Refuses) as consumer:
            eventually(lambda: consumer.status().refused, "it is refused")
            pid = pid_of(consumer)
        folder = Path(ray._private.worker._global_node.get_logs_dir_path())
        text = "".join(path.read_text() for path in folder.glob(f"worker-*-{pid}.err"))
        head = rf"^\d{{4}}-\d\d-\d\dT[\d:.]+Z ERROR repository={repo.name} actor=\S+ tensorvine\.actors\.\S+: "
        (line,) = re.findall(rf"{head}{name}@1 is refused.*$", text, re.MULTILINE)
        assert line.endswith(r"not \x1b[2J this")

    def test_a_build_that_makes_no_model_is_an_error_of_the_start(self, repo, name):
        with pytest.raises(TypeError) as caught:
            Consumer.start(repo, name, dict)
        assert str(caught.value) == (
            "build: expected a Keras model, a torch module, or an object with assign(tensors) and a call; found dict"
        )

    def test_a_consumer_whose_only_version_was_refused_says_why(self, repo, name):
        class Refuses(Tagged):
            def assign(self, given: dict[str, np.ndarray]) -> None:
                raise KeyError("no room for t0")

        repo.save(name, tensors(1))
        with Consumer.start(repo, name, Refuses) as consumer:
            eventually(lambda: consumer.status().refused, "the version is refused")
            with pytest.raises(OperationTimeoutError, match=f"{name}@1 was refused: 'no room for t0'"):
                consumer.infer(None, timeout=0.1)
            with pytest.raises(OperationTimeoutError, match=f"{name}@1 was refused: 'no room for t0'"):
                consumer.wait_for(1, timeout=0.1)


@pytest.mark.both_engines
class TestPlanner:
    def test_a_planned_training_publishes_first_after_the_warm_up_and_then_as_planned(self, own, name, tmp_path):
        seen = tmp_path / "seen"

        def train(publisher: Publisher) -> None:
            """Train until it was planned and told; a busy machine takes its time."""
            publisher.expect(stop=60_000)
            model, pause = tensors(0), threading.Event()
            for i in range(1, 60_001):
                pause.wait(0.002)
                publisher.step(2 * float(np.exp(-i / 12_000)) + 0.1, model)
                model["t0"] += 1
                if seen.exists():
                    return

        request = PlanRequest("optimal", warmup=40)
        with Consumer.start(own, name, Tagged), Producer.start(own, name, train, schedule=request) as producer:

            def planned() -> bool:
                report = producer.report()
                return len(report.updates) > 1 and report.costs is not None and report.costs.delivery_s > 0

            eventually(planned, "it publishes as planned, and was told what a delivery takes")
            seen.touch()
            producer.result(100)
            report = producer.report()
        first, *later = [update.iteration for update in report.updates]
        assert first == 40
        assert later
        assert report.curve.mse < 1e-3
        assert report.costs.iteration_s > 0.002
        assert report.costs.delivery_s > 0
        assert report.schedule is not None

    def test_advice_that_died_with_its_planner_is_asked_for_anew(self, own, name, monkeypatch):
        client = Repository.connect(own.name)
        planner, sent = client._session.planner, []
        send = planner.send

        def died(timeout: float) -> Any:
            raise ShardUnavailableError("planner: died")

        def sends(request: Request[Any]) -> Any:
            answer = send(request)
            if request.remote is PlannerCalls.delivered:
                sent.append(answer)
                if len(sent) == 1:
                    monkeypatch.setattr(answer, "result", died)
            return answer

        monkeypatch.setattr(planner, "send", sends)
        follower = Follower(client, name, Tagged)
        try:
            for version in range(1, 5):
                own.save(name, tensors(version), inherit=None)
                follower.wait_for(version, 30.0)
            eventually(lambda: len(sent) > 1, "the planner is told again")
        finally:
            follower.close()

    def test_one_that_starts_again_is_told_all_and_plans_anew(self, own, name, tmp_path):
        seen = tmp_path / "seen"

        def train(publisher: Publisher) -> None:
            """Train until all that is waited for below was seen; a busy machine takes its time."""
            publisher.expect(stop=60_000)
            pause = threading.Event()
            for i in range(1, 60_001):
                pause.wait(0.002)
                publisher.step(2 * float(np.exp(-i / 12_000)) + 0.1, {"t": np.float32([i])})
                if seen.exists():
                    return

        with Producer.start(own, name, train, schedule=PlanRequest(warmup=40)) as producer:
            eventually(lambda: len(producer.report().updates) > 2, "it publishes as planned")
            engine = own.engine
            restart_planner(own)
            before = len(producer.report().updates)

            def told() -> bool:
                try:
                    known = ask(engine, engine.find(planner_name(own.name)), "streams", timeout=5.0, who="planner")
                except (LookupError, ShardUnavailableError, OperationTimeoutError):
                    return False
                return name in known and known[name].schedule is not None

            eventually(told, "the planner knows the stream again")
            eventually(lambda: len(producer.report().updates) > before, "updates go on")
            seen.touch()
            producer.result(100)


class TestWeights:
    def test_a_mapping_comes_back_and_each_save_is_a_version(self, repo, name):
        assert save_weights(repo, name, tensors(1)).ref == ModelRef(name, 1)
        assert save_weights(repo, name, tensors(2)).ref == ModelRef(name, 2)
        assert {float(array[0]) for array in load_weights(repo, name).values()} == {2.0}

    def test_a_list_comes_back_in_its_order(self, repo, name):
        given = [np.full(3, i, np.float32) for i in range(12)]
        save_weights(repo, name, given)
        found = list(load_weights(repo, name).values())
        assert [array[0] for array in found] == list(range(12))
