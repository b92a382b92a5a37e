"""Consumers outside the cluster: a real Redis, real TCP servers, and all that can go away."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import psutil
import pytest
from tensorvine.actors import Repository
from tensorvine.actors.edge.consumer import EdgeConsumer
from tensorvine.actors.edge.listener import COMPARE_S
from tensorvine.actors.rpc.messages import ShardConfig
from tensorvine.actors.rpc.redis_connection import enter_start, posted_shards, present_start
from tensorvine.actors.shard.serving.redis_index import RedisIndex
from tensorvine.actors.transport.frames import Served
from tensorvine.actors.transport.tcp_server import TcpServer
from tensorvine.store import Layer, ModelGraph, ModelRef
from tensorvine.store.errors import (
    CorruptDataError,
    ModelLostError,
    ModelNotFoundError,
    OperationTimeoutError,
    RepositoryNotFoundError,
    ShardUnavailableError,
    StorageError,
    TensorMismatchError,
)
from tensorvine.store.segments.segment import SegmentId, layout
from tensorvine.store.versions.manifest import Header, TensorEntry, digest_of, encode_body

from tests.support.redis_server import RedisServer

PATIENCE_S = 30.0
NO_GRAPH = ModelGraph(())
SHAPES = {"a": (300, 7), "b": (5,), "c": ()}
STRANGE = "-.A/b..c//_/" + "z" * 150


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "redis").mkdir()
    with RedisServer(tmp_path / "redis") as running:
        yield running


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"expected within {PATIENCE_S} s: {what}")
        threading.Event().wait(0.01)


def tagged(tag: int) -> dict[str, np.ndarray]:
    """A version of which every element says which one it is."""
    return {name: np.full(shape, tag, np.float32) for name, shape in SHAPES.items()}


class Tagged:
    """Answers with all the tags that its tensors have."""

    def __init__(self) -> None:
        self.tensors: dict[str, np.ndarray] = {}

    def assign(self, tensors: Mapping[str, np.ndarray]) -> None:
        if {name: array.shape for name, array in tensors.items()} != SHAPES:
            raise TensorMismatchError(f"expected {SHAPES}; found {sorted(tensors)}")
        for name in SHAPES:  # one after the other, with a chance for whoever answers in between
            self.tensors[name] = tensors[name]
            threading.Event().wait(0.001)

    def __call__(self, batch: Any) -> set[int]:
        return {int(value) for array in self.tensors.values() for value in np.unique(array)}


class Site:
    """A repository of one shard as it looks from outside: what it posts in Redis, and its TCP server."""

    def __init__(self, server: RedisServer, start: str = "s1") -> None:
        enter_start(server.url, "repo", start)
        config = ShardConfig(
            repository="repo", index=0, shards=(0,), capacity=0, preallocate_bytes=0, session_s=60.0, start=start
        )
        self._graphs: dict[bytes, ModelGraph] = {}
        self.board = RedisIndex(server.url, config, lambda key: self._graphs[key].to_json())
        self.held: dict[SegmentId, tuple[np.ndarray, dict[int, tuple[int, int]], list[str]]] = {}
        self._versions: dict[str, int] = {}
        self._serial = itertools.count(1)
        self.listen()

    def listen(self) -> None:
        """Serve, at a place that was never used before."""
        self.wire = TcpServer(self._answer, "127.0.0.1")
        self.board.shard_at(*self.wire.address, self.wire.token)

    def save(self, name: str, tensors: Mapping[str, np.ndarray], graph: ModelGraph = NO_GRAPH) -> ModelRef:
        segment = (0, next(self._serial))
        arrays = [np.ascontiguousarray(array).reshape(array.shape) for array in tensors.values()]
        offsets, length = layout([array.nbytes for array in arrays])
        block = np.zeros(length, np.uint8)
        slots: dict[int, tuple[int, int]] = {}
        for slot, (offset, array) in enumerate(zip(offsets, arrays, strict=True)):
            block[offset : offset + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
            slots[slot] = (offset, array.nbytes)
        digests = [digest_of(block[offset : offset + nbytes]) for offset, nbytes in slots.values()]
        self.held[segment] = (block, slots, digests)
        entries = {
            tensor: TensorEntry(str(array.dtype), array.shape, array.nbytes, None, segment, slot)
            for slot, (tensor, array) in enumerate(tensors.items())
        }
        self._graphs[graph.fingerprint] = graph
        ref = ModelRef(name, self._versions.get(name, 0) + 1)
        self._versions[name] = ref.version
        header = Header(
            ref=ref,
            parent=None,
            quality=0.25,
            metadata='{"epoch": 2}',
            created_ns=time.time_ns(),
            graph_key=graph.fingerprint,
            bytes_owned=length,
            bytes_total=length,
        )
        self.board.announce([(header, encode_body(entries))])
        return ref

    def close(self) -> None:
        self.wire.close()
        self.board.close()

    def _answer(self, wanted: Any, timeout: float, digests: bool) -> Any:
        gone = [segment for segment in wanted if segment not in self.held]
        if gone:
            raise ModelLostError(f"segments {gone} are gone")
        served: dict[SegmentId, Served] = {}
        for segment, numbers in wanted.items():
            block, slots, _ = self.held[segment]
            served[segment] = Served(block, {slot: slots[slot] for slot in numbers})
        return served, lambda: {
            segment: [self.held[segment][2][slot] for slot in wanted[segment]] for segment in wanted
        }


@pytest.fixture
def site(server: RedisServer) -> Iterator[Site]:
    made = Site(server)
    yield made
    made.close()


@pytest.fixture
def edge(server: RedisServer, site: Site) -> Iterator[EdgeConsumer]:
    with EdgeConsumer(server.url, "m", Tagged, repository="repo", timeout=5.0) as consumer:
        yield consumer


class Asking:
    """Asks a consumer all the time, and keeps what it answered."""

    def __init__(self, consumer: EdgeConsumer) -> None:
        self._consumer = consumer
        self._closing = threading.Event()
        self.answers = 0
        self.versions: list[int] = []
        self.wrong: list[object] = []
        self._thread = threading.Thread(target=self._ask)

    def more(self) -> None:
        """Wait for answers that began after this was called."""
        before = self.answers
        eventually(lambda: self.answers > before + 2, "more answers")

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(PATIENCE_S)

    def _ask(self) -> None:
        while not self._closing.is_set():
            try:
                answer = self._consumer.infer(None)
            except Exception as exc:  # noqa: BLE001  the test shows it
                self.wrong.append(exc)
                return
            if answer.outputs != {answer.ref.version}:
                self.wrong.append(answer)
            if not self.versions or self.versions[-1] != answer.ref.version:
                self.versions.append(answer.ref.version)
            self.answers += 1


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
            site.board.retired(second)
            eventually(lambda: consumer.info().ref == first, "the version before")
            assert int(consumer.load()["c"]) == 1
            with pytest.raises(ModelNotFoundError, match="m@2"):
                consumer.load(second)
            with pytest.raises(ModelNotFoundError, match="'nobody'"):
                consumer.load("nobody")

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
            with pytest.raises(CorruptDataError, match=r"tensor 'a' by TCP for m@1 .*expected content"):
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
        site.board.retired(first)
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


@pytest.fixture
def repo(cluster: object, server: RedisServer) -> Iterator[Repository]:
    with start(server) as repository:
        yield repository


def start(server: RedisServer, **options: Any) -> Repository:
    name = options.pop("name", f"edge/{uuid.uuid4().hex[:6]}")
    return Repository.start(name, shards=2, preallocate_bytes=0, redis=server.url, **options)


def name_at(repo: Repository, shard: int) -> str:
    """Return a name whose home is `shard`."""
    return next(n for i in range(1000) if repo._session.home(n := f"at{shard}-{i}") == shard)


def kill_shard(repo: Repository, shard: int) -> None:
    process = psutil.Process(repo._session.connection(shard).hello.pid)
    process.kill()
    psutil.wait_procs([process], timeout=PATIENCE_S)


@pytest.mark.both_engines
class TestRepository:
    @pytest.mark.parametrize("shard", [0, 1])
    def test_saves_arrive_and_inherited_tensors_with_them(
        self, server: RedisServer, repo: Repository, shard: int
    ) -> None:
        name = name_at(repo, shard)
        tensors = {**tagged(1), "d": np.ones((4 << 20) + 3, np.uint8)}
        with EdgeConsumer(server.url, name, repository=repo.name) as consumer:
            repo.save(name, tensors, quality=0.5, metadata={"step": 7})
            assert consumer.wait_newer(0, PATIENCE_S) == ModelRef(name, 1)
            repo.save(name, {**tensors, "b": tagged(2)["b"]})
            assert consumer.wait_newer(1, PATIENCE_S) == ModelRef(name, 2)
            found = consumer.load()
            assert consumer.info(f"{name}@1") == repo.info(f"{name}@1")
            repo.retire(f"{name}@1")
            eventually(lambda: consumer.info().ref == ModelRef(name, 2), "the second")
            again = consumer.load()
        for loaded in (found, again):
            assert loaded.keys() == tensors.keys()
            assert all(np.array_equal(loaded[n], array) for n, array in {**tensors, "b": tagged(2)["b"]}.items())

    def test_one_of_the_same_name_that_another_cluster_runs_is_not_replaced(
        self, cluster: object, server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tensorvine.actors.client.launch.OTHERS_END_S", 0.0)
        other = Site(server)
        try:
            eventually(lambda: len(posted_shards(server.url, "repo")) == 1, "where the other's shard is")
            with pytest.raises(StorageError, match="no repository named 'repo' but this one; another runs"):
                start(server, name="repo")
            assert present_start(server.url, "repo") == "s1"
        finally:
            other.close()
        with start(server, name="repo"):
            assert present_start(server.url, "repo") != "s1"

    def test_a_shard_that_is_killed_stands_elsewhere_and_its_next_version_arrives(
        self, server: RedisServer, repo: Repository
    ) -> None:
        name = name_at(repo, 1)
        with EdgeConsumer(server.url, name, Tagged, repository=repo.name) as consumer:
            repo.save(name, tagged(1))
            consumer.wait_for(1, PATIENCE_S)
            with Asking(consumer) as asking:
                kill_shard(repo, 1)
                asking.more()
                ref = saved_again(repo, name)
                consumer.wait_for(ref.version, PATIENCE_S)
                asking.more()
            assert asking.wrong == []

    def test_a_repository_that_grows_and_shrinks_is_followed(self, server: RedisServer, repo: Repository) -> None:
        names = [name_at(repo, shard) for shard in (0, 1)]
        with (
            EdgeConsumer(server.url, names[0], repository=repo.name) as one,
            EdgeConsumer(server.url, names[1], Tagged, repository=repo.name) as two,
        ):
            for name in names:
                repo.save(name, tagged(1))
            two.wait_for(1, PATIENCE_S)
            with Asking(two) as asking:
                for version, shards in ((2, 3), (3, 1), (4, 2)):
                    repo.scale(shards)
                    for name, consumer in zip(names, (one, two), strict=True):
                        assert int(consumer.load(f"{name}@{version - 1}", PATIENCE_S)["c"]) == version - 1
                        assert repo.save(name, tagged(version)).ref.version == version
                        assert consumer.wait_newer(version - 1, PATIENCE_S) == ModelRef(name, version)
                        assert int(consumer.load(timeout=PATIENCE_S)["c"]) == version
                    two.wait_for(version, PATIENCE_S)
                    asking.more()
            assert asking.wrong == []

    def test_a_repository_with_a_path_posts_again_what_its_disk_has(
        self, server: RedisServer, cluster: object, tmp_path: Path
    ) -> None:
        name = f"edge/{uuid.uuid4().hex[:6]}"
        with start(server, name=name, path=str(tmp_path / "path")) as repo:
            model = name_at(repo, 0)
            with EdgeConsumer(server.url, model, repository=name) as consumer:
                repo.save(model, tagged(1), durability="disk")
                assert consumer.wait_newer(0, PATIENCE_S) == ModelRef(model, 1)
                kill_shard(repo, 0)
                assert int(consumer.load(timeout=PATIENCE_S)["c"]) == 1
        with (
            start(server, name=name, path=str(tmp_path / "path")) as repo,
            EdgeConsumer(server.url, model, repository=name) as consumer,
        ):
            assert consumer.wait_newer(0, PATIENCE_S) == ModelRef(model, 1)
            assert int(consumer.load()["c"]) == 1
            repo.save(model, tagged(2))
            assert consumer.wait_newer(1, PATIENCE_S) == ModelRef(model, 2)

    def test_a_repository_in_memory_that_starts_anew_is_followed(self, server: RedisServer, cluster: object) -> None:
        name = f"edge/{uuid.uuid4().hex[:6]}"
        with start(server, name=name) as repo:
            repo.save("m", tagged(1))
            repo.save("m", tagged(2))
            consumer = EdgeConsumer(server.url, "m", Tagged, repository=name)
            consumer.wait_for(2, PATIENCE_S)
        with consumer, start(server, name=name) as repo:
            assert consumer.infer(None).ref == ModelRef("m", 2)
            repo.save("m", tagged(1))
            eventually(lambda: consumer.ref == ModelRef("m", 1), "the new repository's first version")

    def test_no_save_waits_for_redis(self, server: RedisServer, repo: Repository) -> None:
        server.kill()
        begun = time.monotonic()
        for version in range(1, 6):
            repo.save("m", tagged(version))
        assert time.monotonic() - begun < PATIENCE_S / 3
        assert repo.wait_newer("m", 4) == ModelRef("m", 5)
        server.start()
        with EdgeConsumer(server.url, "m", repository=repo.name) as consumer:
            assert consumer.wait_newer(0, PATIENCE_S) == ModelRef("m", 5)
            assert int(consumer.load()["c"]) == 5


def saved_again(repo: Repository, name: str) -> ModelRef:
    """Save a version whose tag is its number, once the shard is back."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return repo.save(name, tagged(2), inherit=None).ref
        except ShardUnavailableError:
            if time.monotonic() > deadline:
                raise
        threading.Event().wait(0.05)
