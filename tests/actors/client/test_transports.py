"""Ways between a shard and a reader: all give the same arrays, and each fails in its own manner."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tensorvine.actors import Repository
from tensorvine.actors.client.fetch.transports import ObjectStoreTransport, SocketTransport, Transport
from tensorvine.actors.client.reader import Reader
from tensorvine.actors.engine.dask.engine import DaskEngine
from tensorvine.actors.rpc.calls import Request
from tensorvine.actors.rpc.catalog_calls import CatalogCalls
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.actors.transport.frames import Received, Slots
from tensorvine.store import KeepLast, Layer, ModelGraph, Quantize
from tensorvine.store.errors import (
    CorruptDataError,
    ModelLostError,
    ModelNotFoundError,
    OperationTimeoutError,
    ShardUnavailableError,
    StorageError,
    TensorNotFoundError,
)
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.arena import Part
from tensorvine.store.segments.segment import SegmentId

from tests.support.far import connect_from_afar
from tests.support.waiting import await_shards, eventually

TRANSPORTS = ["shared", "socket", "object_store", "gloo", "files"]
CARRYING = ["socket", "object_store"]
TENSORS = {
    "large": np.arange(3 << 20, dtype=np.float32).reshape(3, -1),
    "small": np.arange(7, dtype=np.int16),
    "number": np.float64(3.5) * np.ones(()),
    "empty": np.zeros((0, 4), np.uint8),
    "flags": np.array([True, False, True]),
}
NBYTES = sum(array.nbytes for array in TENSORS.values())
GRAPH = ModelGraph(
    [Layer("in", {"class": "Input"}, [], ["large"]), Layer("out", {"class": "Dense"}, ["in"], sorted(TENSORS)[:-1])]
)


@pytest.fixture(scope="module")
def repo(cluster: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    path = tmp_path_factory.mktemp("ways")
    with Repository.start("ways", shards=2, path=path, store_bytes=64 << 20, preallocate_bytes=0) as started:
        yield started


@pytest.fixture
def name() -> str:
    return f"m-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def far(repo: Repository) -> Iterator[Repository]:
    """A client that takes itself for one on another node."""
    client = connect_from_afar(repo.name)
    yield client
    client.close()


@contextmanager
def reader_of(client: Repository, *transports: Transport) -> Iterator[Reader]:
    with closing(Reader(client._session, client._catalog, transports)) as reader:
        yield reader


def name_at(repo: Repository, shard: int) -> str:
    await_shards(repo)
    return next(n for i in range(1000) if repo._session.near(n := f"at{shard}-{uuid.uuid4().hex[:6]}-{i}") == shard)


def equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return found.keys() == expected.keys() and all(
        found[n].dtype == a.dtype and found[n].shape == a.shape and np.array_equal(found[n], a)
        for n, a in expected.items()
    )


def traffic(repo: Repository) -> tuple[int, int]:
    """Bytes that saves brought, and bytes that were sent, of all shards since they started."""
    shards = repo.stats().shards
    return sum(shard.bytes_saved for shard in shards), sum(shard.bytes_sent for shard in shards)


def is_private(array: np.ndarray) -> bool:
    """Tell whether memory is this process's own: a forked child has it as it is, whatever becomes of it here."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split()
        start, end = (int(address, 16) for address in span.split("-"))
        if start <= array.ctypes.data < end:
            return permissions[3] == "p"
    raise AssertionError("no mapping has it")


class Broken:
    """A transport that never works."""

    checks = False
    exact = True
    automatic = True

    def __init__(self, name: str = "broken") -> None:
        self.name = name
        self.tried = 0

    def brings(self, shard: int, deadline: float) -> bool:
        return True

    def blocks(self, shard: int, places: Slots, digests: bool, deadline: float, what: str) -> dict[SegmentId, Received]:
        self.tried += 1
        raise ShardUnavailableError(f"{what}: the cable is cut")

    def close(self) -> None:
        pass


class Then(SocketTransport):
    """TCP, and something that happens just before the bytes are asked for."""

    def __init__(self, client: Repository, event: Any) -> None:
        super().__init__(client._session)
        self._event = event

    def blocks(self, shard: int, places: Slots, digests: bool, deadline: float, what: str) -> dict[SegmentId, Received]:
        self._event()
        return super().blocks(shard, places, digests, deadline, what)


@pytest.mark.parametrize("transport", TRANSPORTS)
class TestContract:
    """What every transport gives."""

    def saved(self, repo: Repository, name: str, transport: str, **options: Any) -> str:
        repo.save(name, TENSORS, **options)
        if transport == "files":
            repo.flush()
        return name

    def test_all_tensors(self, repo: Repository, name: str, transport: str) -> None:
        self.saved(repo, name, transport)
        loaded = repo._reader.fetch(name, transport=transport, verify=True)
        assert equal(loaded.arrays, TENSORS)
        assert not any(array.flags.writeable for array in loaded.arrays.values())
        assert loaded.transports == {transport: NBYTES}
        assert loaded.digests_checked
        assert str(loaded.ref) == f"{name}@1"

    def test_shards_count_what_travels(self, repo: Repository, name: str, transport: str) -> None:
        began = traffic(repo)
        self.saved(repo, name, transport)
        saved = traffic(repo)
        repo.load(name, transport=transport)
        loaded = traffic(repo)
        assert (saved[0] - began[0], saved[1] - began[1]) == (NBYTES, 0)
        assert loaded[0] == saved[0]
        sent = loaded[1] - saved[1]
        if transport == "object_store":  # whole blocks, with padding
            assert NBYTES <= sent < NBYTES + 1024
        else:
            assert sent == (0 if transport in ("shared", "files") else NBYTES)

    def test_some_tensors_and_some_layers(self, repo: Repository, name: str, transport: str) -> None:
        self.saved(repo, name, transport, graph=GRAPH)
        some = repo.load(name, tensors=["small", "empty"], transport=transport)
        assert equal(some, {n: TENSORS[n] for n in ("small", "empty")})
        assert equal(repo.load(name, layers=["in"], transport=transport), {"large": TENSORS["large"]})
        with pytest.raises(TensorNotFoundError, match="nope"):
            repo.load(name, tensors=["nope"], transport=transport)

    def test_into_buffers(self, repo: Repository, name: str, transport: str) -> None:
        self.saved(repo, name, transport)
        into = {n: np.zeros_like(TENSORS[n]) for n in ("large", "number")}
        repo.load(name, into=into, transport=transport)
        assert equal(into, {n: TENSORS[n] for n in into})

    def test_no_tensors(self, repo: Repository, name: str, transport: str) -> None:
        repo.save(name, {"w": np.zeros(1)})
        assert repo.load(name, tensors=[], transport=transport) == {}

    def test_tensors_of_several_shards(self, repo: Repository, transport: str) -> None:
        parent, child = name_at(repo, 0), name_at(repo, 1)
        self.saved(repo, parent, transport)
        changed = {**TENSORS, "small": TENSORS["small"] + 1, "more": np.ones(100_000)}
        repo.save(child, changed, parent=parent)
        if transport == "files":
            repo.flush()
        loaded = repo._reader.fetch(child, transport=transport, verify=True)
        assert equal(loaded.arrays, changed)
        assert sum(loaded.transports.values()) == sum(array.nbytes for array in changed.values())

    def test_the_latest_version(self, repo: Repository, name: str, transport: str) -> None:
        for version in range(1, 4):
            self.saved(repo, name, transport) if version == 1 else repo.save(name, {"w": np.full(9, version)})
            if transport == "files":
                repo.flush()
            assert repo._reader.fetch(name, transport=transport).ref.version == version
        assert repo.load(name, transport=transport)["w"][0] == 3

    def test_arrays_stay_when_the_model_is_retired(self, repo: Repository, name: str, transport: str) -> None:
        self.saved(repo, name, transport)
        arrays = repo.load(name, transport=transport)
        repo.retire(name)
        repo.save(f"{name}-other", {n: np.zeros_like(a) for n, a in TENSORS.items()})
        assert equal(arrays, TENSORS)
        with pytest.raises(ModelNotFoundError):
            repo.load(f"{name}@1", transport=transport)

    def test_several_threads(self, repo: Repository, name: str, transport: str) -> None:
        self.saved(repo, name, transport)
        wrong: list[object] = []

        def load() -> None:
            for _ in range(5):
                if not equal(repo.load(name, transport=transport), TENSORS):
                    wrong.append(transport)

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong

    def test_no_time_left(self, repo: Repository, name: str, transport: str) -> None:
        self.saved(repo, name, transport)
        with pytest.raises(OperationTimeoutError, match=name):
            repo.load(name, transport=transport, timeout=-1.0)


@pytest.mark.parametrize("transport", ["shared", "socket", "object_store"])
def test_what_is_on_disk_only_is_read_back(cluster: object, tmp_path: Path, name: str, transport: str) -> None:
    with Repository.start(f"cold-{name}", shards=1, path=tmp_path, keep=KeepLast(1), preallocate_bytes=0) as repo:
        repo.save(name, TENSORS)
        repo.save(name, {"w": np.zeros(3)})
        repo.flush()
        deadline = time.monotonic() + 20
        while repo.stats().bytes_memory > 1000:
            assert time.monotonic() < deadline
            threading.Event().wait(0.05)
        loaded = repo._reader.fetch(f"{name}@1", transport=transport, verify=True)
        assert equal(loaded.arrays, TENSORS)


class TestFarReader:
    """A reader that cannot map the shard's memory."""

    def test_automatic_ways_are_tried_measured_and_then_the_fastest_is_taken(
        self, repo: Repository, far: Repository, name: str
    ) -> None:
        selector = far._reader._fetcher._selector
        taken: list[str] = []
        for number in range(5):
            repo.save(name, TENSORS, inherit=None)
            fastest = min(CARRYING, key=lambda transport: selector.predict(transport, NBYTES))
            loaded = far._reader.fetch(name)
            assert equal(loaded.arrays, TENSORS)
            taken += loaded.transports
            assert taken[-1] == fastest
            if number == 0:  # as if it had been slow: then what was never measured is tried
                selector.measured(taken[0], NBYTES, 10.0)
        assert set(taken) == set(CARRYING)
        assert len(taken) == 5

    def test_shared_memory_that_is_not_here_is_no_way(self, repo: Repository, far: Repository, name: str) -> None:
        repo.save(name, TENSORS)
        with pytest.raises(ShardUnavailableError, match=f"load of {name}: expected transport 'shared' to reach shard"):
            far.load(name, transport="shared")

    def test_memory_that_is_not_the_shard_s_is_not_mapped_but_carried(
        self, repo: Repository, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with closing(connect_from_afar(repo.name)) as client:
            for shard in client._session.shards:
                hello = client._session.connection(shard).hello
                client._session.connections.drop(shard)
                client._session.connections.add(replace(hello, memory_file=(0, 0)), near=True)
            client.save(name, TENSORS)
            loaded = client._reader.fetch(name)
        assert equal(loaded.arrays, TENSORS)
        assert set(loaded.transports) <= set(CARRYING)
        assert caplog.text.count("copied by other transports: shared memory: expected descriptor") == 2

    def test_what_is_in_use_here_is_not_carried_again(self, repo: Repository, far: Repository, name: str) -> None:
        repo.save(name, TENSORS)
        first = far._reader.fetch(name)
        changed = {**TENSORS, "small": TENSORS["small"] + 1}
        repo.save(name, changed)
        second = far._reader.fetch(name)
        assert equal(second.arrays, changed)
        assert sum(second.transports.values()) == TENSORS["small"].nbytes
        assert second.arrays["large"].ctypes.data == first.arrays["large"].ctypes.data
        del first, second
        assert sum(far._reader.fetch(name).transports.values()) == NBYTES

    @pytest.mark.parametrize("transport", [*CARRYING, "gloo", "files"])
    def test_what_came_lies_in_memory_that_a_forked_child_keeps(
        self, repo: Repository, far: Repository, name: str, transport: str
    ) -> None:
        repo.save(name, TENSORS)
        repo.flush()
        assert all(is_private(array) for array in far.load(name, transport=transport).values() if array.nbytes)
        part = far.load(name, transport=transport, tensors=["flags", "large", "empty"])
        assert equal(part, {n: TENSORS[n] for n in ("flags", "large", "empty")})
        assert equal(far.load(name, transport=transport, tensors=["empty"]), {"empty": TENSORS["empty"]})

    def test_what_was_not_checked_is_carried_again_to_be_checked(
        self, repo: Repository, far: Repository, name: str
    ) -> None:
        repo.save(name, TENSORS)
        first = far._reader.fetch(name)
        second = far._reader.fetch(name, verify=True)
        third = far._reader.fetch(name, verify=True)
        assert (first.digests_checked, second.digests_checked) == (False, True)
        assert [sum(loaded.transports.values()) for loaded in (first, second, third)] == [NBYTES, NBYTES, 0]

    @pytest.mark.parametrize("transport", [*CARRYING, "gloo"])
    def test_a_corrupted_byte_is_refused(self, repo: Repository, far: Repository, name: str, transport: str) -> None:
        repo.save(name, {"a": np.zeros(50_000), "b": np.ones(50_000)})
        assert far._reader.fetch(name, transport=transport, verify=True)
        ((segment, slots),) = slots_of_model(repo, name).items()
        home = shard_of(repo, name, segment)
        blocks = repo._session.call(home, ShardCalls.blocks({segment: slots}))
        part: Part = blocks[segment].handle
        view = repo._session.connection(home).view
        assert view is not None
        view.part(part)[blocks[segment].offsets[1] + 1234] ^= 1
        if transport != "object_store":
            expected = (
                rf"tensor 'b' by load of {name}: transport '{transport}' from shard {home}: expected content \w+; found"
            )
            with pytest.raises(CorruptDataError, match=expected):
                far._reader.fetch(name, transport=transport, verify=True)
        else:  # what the store was given before the byte flipped is right yet
            assert far._reader.fetch(name, transport=transport, verify=True)
        view.part(part)[blocks[segment].offsets[1] + 1234] ^= 1
        assert equal(far.load(name, transport=transport), {"a": np.zeros(50_000), "b": np.ones(50_000)})

    def test_a_shard_that_listens_elsewhere_now_is_found(self, repo: Repository, far: Repository, name: str) -> None:
        repo.save(name, TENSORS)
        connection = far._session.connection(repo._session.near(name))
        host, _, token = connection.hello.tcp_address or ("", 0, "")
        connection.hello = replace(connection.hello, tcp_address=(host, 1, token))
        assert equal(far.load(name, transport="socket"), TENSORS)
        connection = far._session.connection(repo._session.near(name))
        host, port, token = connection.hello.tcp_address or ("", 0, "")
        connection.hello = replace(connection.hello, tcp_address=(host, port, "another token"))
        assert equal(far.load(name, transport="socket"), TENSORS)

    def test_a_version_that_is_replaced_before_its_bytes_come_is_loaded_anew(
        self, repo: Repository, far: Repository, name: str
    ) -> None:
        repo.save(name, TENSORS)
        events = iter([lambda: (repo.save(name, {"w": np.ones(3)}, inherit=None), free(repo, f"{name}@1"))])
        with reader_of(far, Then(far, lambda: next(events, lambda: None)())) as reader:
            loaded = reader.fetch(name)
        assert (loaded.ref.version, list(loaded.arrays)) == (2, ["w"])

    def test_a_version_that_is_retired_before_its_bytes_come_is_not_found(
        self, repo: Repository, far: Repository, name: str
    ) -> None:
        repo.save(name, TENSORS)
        transport = Then(far, lambda: free(repo, f"{name}@1"))
        with reader_of(far, transport) as reader, pytest.raises(ModelNotFoundError, match=name):
            reader.fetch(f"{name}@1")


class TestFallingBack:
    def test_a_way_that_fails_is_left_for_the_next_with_one_line(
        self, repo: Repository, far: Repository, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        repo.save(name, TENSORS)
        broken = Broken()
        with reader_of(far, broken, SocketTransport(far._session)) as reader:
            for _ in range(5):
                transports = reader.fetch(name).transports
                assert transports == {"socket": NBYTES}
        assert broken.tried == 1
        lines = [r.getMessage() for r in caplog.records if "broken" in r.getMessage()]
        assert len(lines) == 1
        assert f"load of {name}: transport 'broken' to shard" in lines[0]
        assert "the cable is cut" in lines[0]

    def test_where_all_ways_fail_the_last_reason_is_told(self, repo: Repository, far: Repository, name: str) -> None:
        repo.save(name, TENSORS)
        transports = (Broken("one"), Broken("two"))
        with reader_of(far, *transports) as reader, pytest.raises(ShardUnavailableError, match="the cable is cut"):
            reader.fetch(name)
        assert [transport.tried for transport in transports] == [1, 1]

    def test_a_way_that_was_named_is_not_left(self, repo: Repository, far: Repository, name: str) -> None:
        repo.save(name, TENSORS)
        transports = (Broken(), SocketTransport(far._session))
        with reader_of(far, *transports) as reader, pytest.raises(ShardUnavailableError, match="the cable is cut"):
            reader.fetch(name, transport="broken")

    def test_another_way_needs_nothing_but_a_place_in_the_list(
        self, repo: Repository, far: Repository, name: str
    ) -> None:
        repo.save(name, TENSORS)
        mine = Then(far, lambda: None)
        mine.name = "mine"
        with reader_of(far, mine) as reader:
            assert reader.fetch(name, transport="mine").transports == {"mine": NBYTES}

    def test_a_shard_that_dies_before_its_bytes_come_is_lost_by_name(self, cluster: object, name: str) -> None:
        with Repository.start(f"dies-{name}", shards=1, preallocate_bytes=0) as repo:
            repo.save(name, TENSORS)
            far = connect_from_afar(repo.name)
            process = psutil.Process(repo._session.connection(0).hello.pid)

            def die() -> None:
                process.kill()
                psutil.wait_procs([process], timeout=20)

            transports = (Then(far, die), ObjectStoreTransport(far._session))
            with reader_of(far, *transports) as reader, pytest.raises(ModelLostError, match=f"{name}@1 is lost"):
                reader.fetch(name, timeout=60)
            far.close()

    @pytest.mark.both_engines
    def test_a_shard_that_dies_between_its_answer_and_the_bytes_is_asked_again(
        self, cluster: object, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with Repository.start(f"bytes-{name}", shards=1, path=tmp_path, preallocate_bytes=0) as repo:
            repo.save(name, TENSORS, durability="disk")
            far = connect_from_afar(repo.name)
            process = psutil.Process(repo._session.connection(0).hello.pid)
            engine = far._session.engine
            get, asked = engine.get, []

            def after_it_died(handles: Any, timeout: float, who: str) -> Any:
                asked.append(who)
                if len(asked) == 1:
                    process.kill()
                    psutil.wait_procs([process], timeout=20)
                return get(handles, timeout, who)

            monkeypatch.setattr(engine, "get", after_it_died)
            with reader_of(far, ObjectStoreTransport(far._session)) as reader:
                assert equal(reader.fetch(name, timeout=60).arrays, TENSORS)
            assert len(asked) == 2 or not isinstance(engine, DaskEngine)  # Ray's store may have them still
            far.close()

    def test_a_shard_that_dies_before_its_hashes_come_is_asked_for_them_again(
        self, cluster: object, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with Repository.start(f"again-{name}", shards=1, path=tmp_path, preallocate_bytes=0) as repo:
            repo.save(name, TENSORS)
            repo.flush()
            far = connect_from_afar(repo.name)
            process = psutil.Process(repo._session.connection(0).hello.pid)
            send, hashes = far._session.send, []

            def noted(shard: int, request: Request[Any]) -> Any:
                answer = send(shard, request)
                if request.remote is ShardCalls.digests:
                    hashes.append(answer)
                    if len(hashes) == 1:
                        monkeypatch.setattr(answer, "result", cut)
                return answer

            def cut(timeout: float) -> Any:
                process.kill()
                psutil.wait_procs([process], timeout=20)
                raise ShardUnavailableError("shard 0 died")

            with reader_of(far, ObjectStoreTransport(far._session)) as reader:
                monkeypatch.setattr(far._session, "send", noted)
                loaded = reader.fetch(name, timeout=60, verify=True)
            assert equal(loaded.arrays, TENSORS)
            assert loaded.digests_checked
            assert len(hashes) > 1
            far.close()


class TestWrongWays:
    @pytest.mark.parametrize("transport", ["", "Auto", "mpi", None, 3])
    def test_unknown_ways(self, repo: Repository, name: str, transport: object) -> None:
        repo.save(name, TENSORS)
        with pytest.raises(ValueError, match=r"transport: expected one of \['auto', 'shared', 'socket', .*found"):
            repo.load(name, transport=transport)  # type: ignore[arg-type]

    def test_files_of_a_repository_without_a_path(self, repository: Repository, name: str) -> None:
        repository.save(name, TENSORS)
        with pytest.raises(ShardUnavailableError, match="'files'"):
            repository.load(name, transport="files")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `plain` keeps its history."""
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def plain(cluster: object, folder: Path) -> Iterator[Repository]:
    """One of a shard; each test retires what it spoiled."""
    with Repository.start("ways-files", shards=1, path=folder, preallocate_bytes=0) as started:
        yield started


class TestFiles:
    def test_what_is_not_on_disk_yet_is_no_file(self, plain: Repository, folder: Path, name: str) -> None:
        plain.save(name, TENSORS, durability="disk")
        assert equal(plain.load(name, transport="files"), TENSORS)
        for file in (folder / "segments").iterdir():
            file.unlink()
        plain._reader.close()
        with pytest.raises(StorageError, match=r"expected segment \w+ with slots .* on disk"):
            plain.load(name, transport="files")
        plain.retire(name)

    def test_a_byte_that_flipped_on_disk_is_refused(self, plain: Repository, folder: Path, name: str) -> None:
        before = set((folder / "segments").iterdir())
        plain.save(name, {"a": np.arange(50_000)}, durability="disk")
        (file,) = set((folder / "segments").iterdir()) - before
        content = bytearray(file.read_bytes())
        content[content.index(np.arange(1000).tobytes()) + 800] ^= 1
        file.write_bytes(content)
        with pytest.raises(CorruptDataError, match=r"tensor 'a' .*expected bytes of checksum"):
            plain.load(name, transport="files")
        assert plain.load(name)["a"][100] == 100
        plain.retire(name)

    def test_a_lossy_file_does_not_pass_for_the_memory(self, cluster: object, tmp_path: Path, name: str) -> None:
        tensors = {"a": np.random.default_rng(0).normal(size=50_000).astype(np.float32)}
        options: dict[str, Any] = {"shards": 1, "path": tmp_path, "codec": Quantize(8), "preallocate_bytes": 0}
        with Repository.start(f"lossy-{name}", **options) as repo:
            repo.save(name, tensors, durability="disk")
            rough = repo._reader.fetch(name, transport="files", verify=True)
            exact = repo._reader.fetch(name, transport="socket", verify=True)
            again = repo._reader.fetch(name, transport="files")
            assert equal(exact.arrays, tensors)
            assert 0 < np.abs(rough.arrays["a"] - tensors["a"]).max() < 0.1
            assert equal(again.arrays, rough.arrays)

    def test_a_file_that_was_written_anew_is_found(self, plain: Repository, folder: Path, name: str) -> None:
        first = plain.save(name, {n: np.full(30_000, i) for i, n in enumerate("abcd")}, durability="disk").ref
        changed = {n: np.full(30_000, i + 10 * (n != "a")) for i, n in enumerate("abcd")}
        plain.save(name, changed, durability="disk")
        assert plain.load(first, transport="files")["d"][0] == 3
        before = set((folder / "segments").iterdir())
        plain.retire(first)
        eventually(lambda: set((folder / "segments").iterdir()) - before, "its file is written anew")
        plain._reader.close()
        assert equal(plain.load(name, transport="files"), changed)


def shard_of(repo: Repository, name: str, segment: SegmentId) -> int:
    """Return the shard that has a segment of the latest version of a name."""
    return repo._session.ask(CatalogCalls.locate(repo._session.client, name, None, None)).places[segment][0]


def free(repo: Repository, model: str) -> None:
    """Retire a version of which no other one has anything, and wait until its bytes are gone."""
    ref = ModelRef.parse(model)
    places = repo._session.ask(CatalogCalls.locate(repo._session.client, ref.name, ref.version, None)).places
    repo.retire(model)

    def is_gone(segment: SegmentId, shard: int) -> bool:
        with contextlib.suppress(ModelLostError):
            repo._session.call(shard, ShardCalls.blocks({segment: [0]}))
            return False
        return True

    for segment, (shard, _) in places.items():
        eventually(lambda segment=segment, shard=shard: is_gone(segment, shard), "its bytes are gone")


def slots_of_model(repo: Repository, name: str) -> dict[SegmentId, list[int]]:
    ref = repo.info(name).ref
    slots: dict[SegmentId, list[int]] = {}
    for entry in repo._catalog.table(ref, None).values():
        slots.setdefault(entry.segment, []).append(entry.slot)
    return slots
