"""Consumers outside the cluster: a real Redis, real TCP servers, and all that can go away."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np
import pytest
from tensorvine.actors.edge.consumer import EdgeConsumer
from tensorvine.actors.edge.listener import COMPARE_S
from tensorvine.actors.rpc.redis_keys import Keys
from tensorvine.store import Layer, ModelGraph, ModelRef
from tensorvine.store.errors import (
    CorruptDataError,
    ModelLostError,
    ModelNotFoundError,
    OperationTimeoutError,
    RepositoryNotFoundError,
    ShardUnavailableError,
    StorageError,
)

from tests.support.edge_site import Asking, Site, Tagged, tagged
from tests.support.forked import in_child, outcomes
from tests.support.redis_server import RedisServer
from tests.support.waiting import PATIENCE_S, eventually

STRANGE = "-.A/b..c//_/" + "z" * 150


@pytest.fixture
def site(server: RedisServer) -> Iterator[Site]:
    made = Site(server)
    yield made
    made.close()


@pytest.fixture
def edge(server: RedisServer, site: Site) -> Iterator[EdgeConsumer]:
    with EdgeConsumer(server.url, "m", Tagged, repository="repo", timeout=5.0) as consumer:
        yield consumer


class TestWithoutAnEngine:
    @pytest.mark.parametrize(
        "line",
        [
            "import tensorvine.actors.edge.consumer",
            "from tensorvine.actors import EdgeConsumer",
            "import tensorvine.actors",
        ],
    )
    def test_an_edge_consumer_is_imported_without_ray_and_without_redis(self, line: str) -> None:
        script = f"{line}; import sys; print(sorted({{'ray', 'redis', 'keras', 'torch'}} & sys.modules.keys()))"
        said = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=True, text=True)
        assert said.stdout.strip() == "[]"

    def test_names_of_the_package_come_when_they_are_asked_for(self) -> None:
        import tensorvine.actors as actors

        assert actors.EdgeConsumer is EdgeConsumer
        assert set(actors.__all__) <= set(dir(actors))
        with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
            actors.Nothing  # noqa: B018


class TestEnds:
    def test_a_closed_consumer_and_a_forked_child_refuse_calls(self, server: RedisServer, site: Site) -> None:
        site.save("m", tagged(1))
        consumer = EdgeConsumer(server.url, "m", Tagged, repository="repo", timeout=5.0)
        calls = {
            "load": consumer.load,
            "info": consumer.info,
            "wait_newer": consumer.wait_newer,
            "wait_for": lambda: consumer.wait_for(1),
            "infer": lambda: consumer.infer(0),
            "with": consumer.__enter__,
        }
        arrays = consumer.load()
        refused = dict.fromkeys(calls, "ClosedError")
        assert in_child(lambda: [outcomes(calls), consumer.close()]) == [refused, None]
        assert int(consumer.load()["c"]) == 1
        consumer.close()
        assert outcomes(calls) == refused
        assert int(arrays["c"]) == 1


class TestLoading:
    def test_what_arrives_is_what_was_saved(self, server: RedisServer, site: Site) -> None:
        tensors = {
            "f": np.arange(1000, dtype=np.float64).reshape(10, 100),
            "half": np.arange(7, dtype=ml_dtypes.bfloat16),
            "none": np.zeros((0, 3), np.int8),
            "one": np.array(True),
            "large": np.random.default_rng(0).integers(0, 255, 3 << 20, np.uint8),
        }
        graph = ModelGraph([Layer("in", {"class": "Input"})])
        with EdgeConsumer(server.url, "m", repository="repo") as consumer:
            ref = site.save("m", tensors, graph)
            assert consumer.wait_newer(0, PATIENCE_S) == ref
            found = consumer.load(ref)
            assert consumer.info().metadata == {"epoch": 2}
            assert consumer.info(ref).quality == 0.25
        assert list(found) == list(tensors)
        for name, array in tensors.items():
            assert found[name].dtype == array.dtype
            assert found[name].shape == array.shape
            assert np.array_equal(found[name], array)
            assert not found[name].flags.writeable

    def test_the_newest_is_loaded_where_none_is_named_and_any_live_one_by_name(
        self, server: RedisServer, site: Site
    ) -> None:
        first, second = site.save("m", tagged(1)), site.save("m", tagged(2))
        other = site.save("other", tagged(9))
        with EdgeConsumer(server.url, "m", repository="repo") as consumer:
            assert consumer.wait_newer(1, PATIENCE_S) == second
            assert consumer.wait_newer(0, PATIENCE_S) == second
            assert consumer.wait_newer(2, 0.05) is None
            eventually(lambda: consumer.info("other").ref == other, "the other model")
            loaded = [consumer.load(), consumer.load(first), consumer.load("m@1"), consumer.load("other")]
            assert [int(tensors["c"]) for tensors in loaded] == [2, 1, 1, 9]
            site.retire(second)
            eventually(lambda: consumer.info().ref == first, "the version before")
            assert int(consumer.load()["c"]) == 1
            with pytest.raises(ModelNotFoundError, match="m@2"):
                consumer.load(second)
            with pytest.raises(ModelNotFoundError, match="'nobody'"):
                consumer.load("nobody")

    @pytest.mark.parametrize("partly", [False, True], ids=["all-keys", "some-keys"])
    def test_what_redis_loses_while_all_stay_connected_is_loaded_again_without_a_save(
        self, server: RedisServer, site: Site, partly: bool
    ) -> None:
        first = site.save("m", tagged(1))
        with (
            EdgeConsumer(server.url, "m", repository="repo", timeout=PATIENCE_S) as consumer,
            server.client() as client,
        ):
            assert consumer.wait_newer(0, PATIENCE_S) == first
            assert int(consumer.load()["c"]) == 1
            if partly:
                keys = Keys("repo").of("s1")
                client.delete(keys.newest, keys.model("m"))
            else:
                client.flushall()
                assert int(consumer.load()["c"]) == 1

            def loaded(consumer: EdgeConsumer) -> bool:
                with contextlib.suppress(ModelNotFoundError, RepositoryNotFoundError):
                    return int(consumer.load()["c"]) == 1
                return False

            eventually(lambda: loaded(consumer), "the model can be loaded again")
            with EdgeConsumer(server.url, "m", repository="repo") as new:
                eventually(lambda: loaded(new), "a new consumer loads it")

    def test_a_repository_that_never_started_is_named(self, server: RedisServer) -> None:
        with EdgeConsumer(server.url, "m", repository="later") as consumer:
            with pytest.raises(RepositoryNotFoundError, match="'later'"):
                consumer.load()
            assert consumer.wait_newer(0, 0.05) is None

    def test_bytes_that_are_not_what_was_saved_are_refused(self, server: RedisServer, site: Site) -> None:
        site.save("m", tagged(1))
        site.held[(0, 1)][0][0] ^= 1
        with EdgeConsumer(server.url, "m", repository="repo") as consumer:
            assert consumer.wait_newer(0, PATIENCE_S) is not None
            with pytest.raises(CorruptDataError, match=r"tensor 'a' by TCP for m@1: expected content"):
                consumer.load()

    def test_a_version_whose_bytes_are_lost_is_answered_so(self, server: RedisServer, site: Site) -> None:
        site.save("m", tagged(1))
        site.held.clear()
        with EdgeConsumer(server.url, "m", repository="repo") as consumer:
            assert consumer.wait_newer(0, PATIENCE_S) is not None
            with pytest.raises(ModelLostError, match="are gone"):
                consumer.load()

    def test_a_shard_that_stays_away_is_named_when_the_time_is_over(self, server: RedisServer, site: Site) -> None:
        site.save("m", tagged(1))
        with EdgeConsumer(server.url, "m", repository="repo") as consumer:
            assert consumer.wait_newer(0, PATIENCE_S) is not None
            site.wire.close()
            with pytest.raises(ShardUnavailableError, match="load of m@1"):
                consumer.load(timeout=0.5)

    def test_a_shard_that_comes_back_elsewhere_is_found(self, server: RedisServer, site: Site) -> None:
        site.save("m", tagged(1))
        with EdgeConsumer(server.url, "m", repository="repo") as consumer:
            assert consumer.wait_newer(0, PATIENCE_S) is not None
            assert int(consumer.load()["c"]) == 1
            site.wire.close()
            again = threading.Timer(0.3, site.listen)
            again.start()
            assert int(consumer.load(timeout=PATIENCE_S)["c"]) == 1
            again.join()
            assert [client.address for client in consumer._clients.values()] == [site.wire.address]


class TestBadInput:
    def test_a_server_that_does_not_answer_is_named(self, server: RedisServer) -> None:
        server.kill()
        with pytest.raises(StorageError, match=f"Redis at {server.where}"):
            EdgeConsumer(server.url, "m")

    def test_a_wrong_url_is_refused(self) -> None:
        with pytest.raises(ValueError, match="EdgeConsumer of 'm': redis: expected a URL"):
            EdgeConsumer("somewhere", "m")

    def test_what_is_no_model_is_refused(self, server: RedisServer) -> None:
        with pytest.raises(TypeError, match="expected a Keras model"):
            EdgeConsumer(server.url, "m", dict)

    def test_a_consumer_without_a_model_does_not_answer(self, server: RedisServer) -> None:
        with EdgeConsumer(server.url, "m") as consumer:
            assert consumer.ref is None
            with pytest.raises(ValueError, match="expected build="):
                consumer.infer(None)

    def test_before_the_first_version_there_is_no_answer(self, edge: EdgeConsumer) -> None:
        with pytest.raises(OperationTimeoutError, match="first version of 'm'"):
            edge.infer(None, timeout=0.05)

    def test_closing_ends_the_waits(self, server: RedisServer, site: Site) -> None:
        consumer = EdgeConsumer(server.url, "m", Tagged, repository="repo")
        answers: list[object] = []
        waiting = threading.Thread(target=lambda: answers.append(consumer.wait_newer(0, PATIENCE_S)))
        waiting.start()
        begun = time.monotonic()
        consumer.close()
        consumer.close()
        waiting.join(PATIENCE_S)
        assert answers == [None]
        assert time.monotonic() - begun < PATIENCE_S / 3


class TestFollowing:
    def test_each_answer_is_from_one_version_while_versions_come(self, site: Site, edge: EdgeConsumer) -> None:
        site.save("m", tagged(1))
        with Asking(edge) as asking:
            for version in range(2, 30):
                site.save("m", tagged(version))
                if version % 3 == 0:
                    edge.wait_for(version, PATIENCE_S)
                if version in (3, 6):
                    asking.more()
            assert edge.wait_for(29, PATIENCE_S) == ModelRef("m", 29)
            asking.more()
        assert asking.wrong == []
        assert asking.versions == sorted(asking.versions)
        assert {3, 6, 29} <= set(asking.versions)

    def test_two_consumers_both_follow(self, server: RedisServer, site: Site, edge: EdgeConsumer) -> None:
        with EdgeConsumer(server.url, "m", Tagged, repository="repo") as other:
            for version in (1, 2):
                site.save("m", tagged(version))
                assert edge.wait_for(version, PATIENCE_S) == other.wait_for(version, PATIENCE_S)
        assert edge.infer(None).outputs == {2}

    def test_a_message_wakes_who_waits_long_before_the_numbers_are_compared(
        self, site: Site, edge: EdgeConsumer
    ) -> None:
        begun = time.monotonic()
        for version in range(1, 31):
            ref = site.save("m", tagged(version))
            assert edge.wait_newer(version - 1, PATIENCE_S) == ref
        assert time.monotonic() - begun < 30 * COMPARE_S / 4

    def test_a_version_that_does_not_fit_is_refused_by_name_and_the_one_before_answers(
        self, site: Site, edge: EdgeConsumer, caplog: pytest.LogCaptureFixture
    ) -> None:
        site.save("m", tagged(1))
        edge.wait_for(1, PATIENCE_S)
        site.save("m", {"x": np.zeros(3, np.float32)})
        eventually(lambda: ModelRef("m", 2) in edge.refused, "the refusal")
        assert "expected {'a'" in edge.refused[ModelRef("m", 2)]
        assert edge.infer(None).ref == ModelRef("m", 1)
        site.save("m", tagged(3))
        edge.wait_for(3, PATIENCE_S)
        assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["m@2 is refused"]

    def test_a_model_that_raises_what_it_likes_does_not_end_the_following(
        self, server: RedisServer, site: Site, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Moody(Tagged):
            def assign(self, tensors: Mapping[str, np.ndarray]) -> None:
                if int(tensors["c"]) == 2:
                    raise ZeroDivisionError("not this one")
                super().assign(tensors)

        with EdgeConsumer(server.url, "m", Moody, repository="repo") as consumer:
            for version in (1, 2):
                site.save("m", tagged(version))
                eventually(lambda: consumer.ref is not None, "the first")
            eventually(lambda: "not this one" in consumer.refused.get(ModelRef("m", 2), ""), "the refusal")
            site.save("m", tagged(3))
            consumer.wait_for(3, PATIENCE_S)

    @pytest.mark.parametrize("wipe", [False, True], ids=["with its data", "without its data"])
    def test_redis_gone_and_back_with_versions_saved_meanwhile(
        self, server: RedisServer, site: Site, edge: EdgeConsumer, wipe: bool
    ) -> None:
        site.save("m", tagged(1))
        edge.wait_for(1, PATIENCE_S)
        with Asking(edge) as asking:
            server.kill(wipe)
            site.save("m", tagged(2))
            site.save("m", tagged(3))
            asking.more()
            with pytest.raises(StorageError, match="Redis at"):
                edge.load()
            server.start()
            assert edge.wait_newer(1, PATIENCE_S) == ModelRef("m", 3)
            edge.wait_for(3, PATIENCE_S)
            asking.more()
        assert asking.wrong == []
        assert asking.versions == [1, 3]

    def test_shards_gone_and_back_elsewhere(self, site: Site, edge: EdgeConsumer) -> None:
        site.save("m", tagged(1))
        edge.wait_for(1, PATIENCE_S)
        with Asking(edge) as asking:
            site.wire.close()
            site.save("m", tagged(2))
            assert edge.wait_newer(1, PATIENCE_S) == ModelRef("m", 2)
            asking.more()
            site.listen()
            edge.wait_for(2, PATIENCE_S)
            asking.more()
        assert asking.wrong == []

    def test_a_subscription_that_was_cut_misses_nothing(
        self, server: RedisServer, site: Site, edge: EdgeConsumer
    ) -> None:
        for version in range(1, 10):
            with server.client() as client:
                client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            site.save("m", tagged(version))
            edge.wait_for(version, PATIENCE_S)

    def test_a_message_that_was_lost_is_healed_by_the_number(
        self, server: RedisServer, site: Site, edge: EdgeConsumer
    ) -> None:
        site.save("m", tagged(1))
        edge.wait_for(1, PATIENCE_S)
        with server.client() as client:
            text = client.hget("tensorvine:repo:s1:model:m", 1).replace('"m@1"', '"m@2"')
            client.hset("tensorvine:repo:s1:model:m", 2, text)
            client.hset("tensorvine:repo:s1:newest", "m", 2)  # and nobody publishes it
        edge.wait_for(2, PATIENCE_S)

    def test_a_retired_version_goes_on_answering_until_a_newer_one_comes(self, site: Site, edge: EdgeConsumer) -> None:
        first = site.save("m", tagged(1))
        edge.wait_for(1, PATIENCE_S)
        site.retire(first)
        site.held.clear()
        assert edge.infer(None).outputs == {1}
        site.save("m", tagged(2))
        edge.wait_for(2, PATIENCE_S)

    def test_a_version_that_is_lost_is_passed_over_for_the_next(self, site: Site, edge: EdgeConsumer) -> None:
        site.save("m", tagged(1))
        edge.wait_for(1, PATIENCE_S)
        site.save("m", tagged(2))
        site.held.pop((0, 2), None)
        site.save("m", tagged(3))
        edge.wait_for(3, PATIENCE_S)

    def test_a_repository_that_starts_anew_is_followed_from_its_first_version(
        self, server: RedisServer, site: Site, edge: EdgeConsumer
    ) -> None:
        for version in (1, 2, 3):
            site.save("m", tagged(version))
        edge.wait_for(3, PATIENCE_S)
        assert edge.wait_newer(0, PATIENCE_S) == ModelRef("m", 3)
        anew = Site(server, "s2")
        try:
            anew.save("m", tagged(1))
            assert edge.wait_newer(3, PATIENCE_S) == ModelRef("m", 1)
            eventually(lambda: edge.ref == ModelRef("m", 1), "the new start's version")
            assert edge.wait_newer(1, 0.05) is None
        finally:
            anew.close()

    def test_a_name_of_unusual_characters(self, server: RedisServer, site: Site) -> None:
        with EdgeConsumer(server.url, STRANGE, Tagged, repository="repo") as consumer:
            ref = site.save(STRANGE, tagged(1))
            assert consumer.wait_newer(0, PATIENCE_S) == ref
            assert consumer.wait_for(1, PATIENCE_S) == ref
