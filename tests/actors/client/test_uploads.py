"""Saves to a shard whose memory this process cannot map: fetched from here, or through the engine's object store."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import ml_dtypes
import numpy as np
import psutil
import pytest
from tensorvine.actors import Repository
from tensorvine.actors.client.requests import Numbered
from tensorvine.actors.client.save import offer as module
from tensorvine.actors.client.save.offer import Offer
from tensorvine.actors.client.save.upload import Upload, _Block
from tensorvine.actors.client.session import Session
from tensorvine.actors.memory.memory import MemoryView
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.actors.transport.frames import Gathered, Row
from tensorvine.actors.transport.tcp_server import TcpServer
from tensorvine.store.errors import OperationTimeoutError, StoreFullError, TensorMismatchError
from tensorvine.store.holders import Request
from tensorvine.store.waiting import NEVER

from tests.support.far import connect_from_afar
from tests.support.waiting import eventually

WAIT_S = 60.0
CAPACITY = 256 << 20
RANDOM = np.random.default_rng(3)
TENSORS = {
    **{f"large{i}": RANDOM.integers(0, 256, (12 << 20) + i, np.uint8) for i in range(10)},
    "empty": np.zeros((0, 3), np.float32),
    "number": np.array(7.5),
    "turned": np.arange(1 << 20, dtype=np.int32).reshape(1024, 1024).T,
    "every third": np.arange(3 << 16, dtype=np.float64)[::3],
    "brain": np.arange(5000).astype(ml_dtypes.bfloat16),
    "last": np.ones(3),
}
"""Of more segments than two connections share, some few bytes, some that are not contiguous."""
SERIALS = count(1000)
WAYS = ["fetched", "nothing listens", "no connection"]


def equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return found.keys() == expected.keys() and all(
        found[n].dtype == a.dtype and found[n].shape == a.shape and np.array_equal(found[n], a)
        for n, a in expected.items()
    )


def no_server(*_: object) -> None:
    raise OSError("no such address")


class Offers:
    """What was offered, and through what blocks went."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: list[tuple[str, int]] = []
        self.put = 0
        self.answering = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        put, offers = Upload._put_blocks, self

        class Watched(TcpServer):
            def __init__(self, answer: Callable[..., Any], host: str) -> None:
                def waiting(*asked: Any) -> Any:
                    offers.answering.set()
                    assert offers.go_on.wait(WAIT_S)
                    return answer(*asked)

                super().__init__(waiting, host)
                offers.addresses.append(self.address)

        def counted(*arguments: Any) -> None:
            self.put += 1
            put(*arguments)

        monkeypatch.setattr(module, "TcpServer", Watched)
        monkeypatch.setattr(Upload, "_put_blocks", counted)

    @property
    def closed(self) -> bool:
        """Whether this process listens at none of the addresses; another one may have come to listen there."""
        listening = {each.laddr for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"}
        return bool(self.addresses) and listening.isdisjoint(self.addresses)


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Offers]:
    watched = Offers(monkeypatch)
    yield watched
    watched.go_on.set()


@pytest.fixture(scope="module")
def repo(cluster: object) -> Iterator[Repository]:
    with Repository.start("uploads", shards=1, store_bytes=CAPACITY, preallocate_bytes=0) as started:
        yield started


@contextlib.contextmanager
def far_from(repo: Repository) -> Iterator[Repository]:
    client = connect_from_afar(repo.name)
    try:
        yield client
    finally:
        client.close()


@pytest.fixture
def far(repo: Repository) -> Iterator[Repository]:
    """A client that takes itself for one on another node."""
    with far_from(repo) as client:
        yield client


@pytest.fixture
def name(repo: Repository) -> Iterator[str]:
    """A model whose versions are retired afterwards; then nothing may be left."""
    name = f"m-{uuid.uuid4().hex[:8]}"
    yield name
    for ref in repo.models(name):
        repo.retire(ref)
    eventually(lambda: left(repo) == (0, 0), "no memory is taken")


def left(repo: Repository) -> tuple[int, int]:
    """Bytes that hold segments, and that are being filled."""
    (shard,) = repo.stats().shards
    return shard.bytes_allocated, shard.bytes_staged


def by(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what is saved take a way."""
    if way == "nothing listens":
        monkeypatch.setattr(module, "TcpServer", no_server)
    if way == "no connection":
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        made = Offer.__init__

        def elsewhere(self: Offer, *arguments: Any) -> None:
            made(self, *arguments)
            self.address = ("127.0.0.1", port, self.address[2])

        monkeypatch.setattr(Offer, "__init__", elsewhere)


@pytest.mark.parametrize("length", [0, 15, 17, 1 << 20])
def test_a_tensor_of_another_length_than_granted_is_not_copied(length: int) -> None:
    """The shard cannot see what is written into memory that is mapped here."""
    memory = np.zeros(1 << 16, np.uint8)
    with ThreadPoolExecutor(1) as helper:
        nobody = cast("Session", None)
        upload = Upload(
            nobody,
            0,
            numbered=Numbered(Request("c", 1)),
            deadline=NEVER,
            what="save of 'm'",
            helper=helper,
            check=lambda: None,
            granted=[128],
            granter=1,
        )
        view = cast("MemoryView", SimpleNamespace(part=lambda part, _: memory[part.offset :][: part.length]))
        with pytest.raises(TensorMismatchError, match=rf"tensors of \[16\] bytes, .* granted; found \[{length}\]"):
            upload._fill_parts([_Block((0, 1), (16,))], [[np.ones(length, np.uint8)]], view)
    assert not memory.any()


@pytest.mark.parametrize("way", WAYS)
class TestEachWay:
    def test_what_was_saved_is_what_is_loaded_and_the_arrays_are_the_callers_again(
        self,
        repo: Repository,
        far: Repository,
        name: str,
        way: str,
        offers: Offers,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        by(way, monkeypatch)
        for number in range(2):
            given = {key: value.copy(order="K") for key, value in TENSORS.items()}
            saved = far.save(name, given, inherit=None)
            for array in given.values():
                array[...] = 0
            assert equal(repo.load(saved.ref), TENSORS)
            assert offers.put == (0 if way == "fetched" else number + 1)
        assert caplog.text.count("cannot fetch tensors from this process") == (way != "fetched")
        assert offers.closed == (way != "nothing listens")
        assert repo.verify(saved.ref) == []

    def test_one_that_does_not_wait_is_staged_before_it_travels(
        self, repo: Repository, far: Repository, name: str, way: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        by(way, monkeypatch)
        pending = []
        for number in range(3):  # the second and the third find the buffer in use
            given = {"a": np.full(3 << 20, number, np.uint8), "b": np.full(9, number)}
            pending.append(far.save_async(name, given, inherit=None))
            pending[-1].staged(WAIT_S)
            given["a"][:] = given["b"][:] = 99
        for number, save in enumerate(pending):
            loaded = repo.load(save.committed(WAIT_S).ref)
            assert (loaded["a"] == number).all()
            assert (loaded["b"] == number).all()
            del loaded

    def test_no_room_is_said_and_what_comes_after_fits(
        self, repo: Repository, far: Repository, name: str, way: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        by(way, monkeypatch)
        first = far.save(name, {"a": np.ones(CAPACITY - (32 << 20), np.uint8)}, inherit=None)
        with pytest.raises(StoreFullError, match=r"save of '.*in shard 0; of its [\d.]+ .B, [\d.]+ .B hold segments"):
            far.save(f"{name}-other", {"a": np.ones(40 << 20, np.uint8)}, timeout=WAIT_S)
        assert left(repo)[1] == 0
        repo.retire(first.ref)
        assert far.save(name, {"a": np.ones(40 << 20, np.uint8)}, inherit=None).bytes_written == 40 << 20

    def test_room_is_waited_for(
        self, repo: Repository, far: Repository, name: str, way: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        by(way, monkeypatch)
        repo._session.connection(0)  # the shard grants to clients that it watches
        other, client = Request(repo._session.client, next(SERIALS)), repo._session.client
        granted = repo._session.call(0, ShardCalls.grant(client, other, [CAPACITY - (8 << 20)], WAIT_S))
        assert len(granted) == 1
        with ThreadPoolExecutor(1) as threads:
            saving = threads.submit(far.save, name, {"a": np.ones(40 << 20, np.uint8)}, timeout=WAIT_S)
            eventually(lambda: repo._session.call(0, ShardCalls.is_short()), "the save waits")
            assert repo.stats().shards[0].waiting_for_memory == 1
            assert not saving.done()
            repo._session.call(0, ShardCalls.abort(other))
            assert saving.result(WAIT_S).bytes_written == 40 << 20


class TestFetched:
    def test_two_saves_at_once(self, repo: Repository, far: Repository, name: str, offers: Offers) -> None:
        given = [{"a": np.full(20 << 20, number, np.uint8), "b": np.full(5 << 20, number)} for number in range(2)]
        offers.go_on.clear()
        with far_from(repo) as other, ThreadPoolExecutor(2) as threads:
            saving = [
                threads.submit(client.save, f"{name}", tensors, inherit=None, timeout=WAIT_S)
                for client, tensors in zip((far, other), given, strict=True)
            ]
            eventually(lambda: len(offers.addresses) == 2, "both offer what they save")
            offers.go_on.set()
            saved = [save.result(WAIT_S).ref for save in saving]
        assert all(equal(repo.load(ref), tensors) for ref, tensors in zip(saved, given, strict=True))
        assert (offers.put, offers.closed) == (0, True)

    def test_few_bytes_beside_many_travel_in_the_message(
        self, repo: Repository, far: Repository, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[Any] = []
        answer = Offer._answer
        monkeypatch.setattr(Offer, "_answer", lambda self, *rest: (asked.append(rest[0]), answer(self, *rest))[1])
        tensors = {"a": np.ones(33 << 20, np.uint8), "b": np.arange(5)}
        saved = far.save(name, tensors)
        assert equal(repo.load(saved.ref), tensors)
        assert [list(slots.values()) for slots in asked] == [[[0]]]

    def test_a_deadline_that_passes_leaves_nothing(
        self, repo: Repository, far: Repository, name: str, offers: Offers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        close, filled = Offer.close, list[int]()

        def at_last(self: Offer) -> None:
            filled.append(left(repo)[1])
            offers.go_on.set()
            close(self)

        monkeypatch.setattr(Offer, "close", at_last)
        offers.go_on.clear()
        with pytest.raises(OperationTimeoutError):
            far.save(name, {"a": np.ones(20 << 20, np.uint8)}, timeout=6.0)
        assert (offers.put, offers.closed, len(filled)) == (0, True, 1)
        assert not repo.models(name)

    def test_a_connection_that_breaks_half_way_leaves_nothing_and_the_save_is_repeated(
        self, repo: Repository, far: Repository, name: str, offers: Offers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """To the shard it is as if the saver had died."""
        tensors = {"a": np.ones(20 << 20, np.uint8)}
        answer, broken = Offer._answer, list[Offer]()

        def half(self: Gathered, row: Row) -> Iterator[memoryview]:
            yield self.slots[0].data[: 10 << 20]

        def breaking(self: Offer, *asked: Any) -> Any:
            if not broken:
                monkeypatch.setattr(Gathered, "pieces", half)
                threading.Thread(target=self._server.close).start()
            else:
                monkeypatch.setattr(Gathered, "pieces", pieces)
            broken.append(self)
            return answer(self, *asked)

        pieces = Gathered.pieces
        monkeypatch.setattr(Offer, "_answer", breaking)
        saved = far.save(name, tensors, timeout=WAIT_S)
        assert (len(broken), offers.put, offers.closed, repo.models(name)) == (2, 0, True, [saved.ref])
        assert equal(repo.load(saved.ref), tensors)
        repo.retire(saved.ref)
        eventually(lambda: left(repo) == (0, 0), "what was granted comes back")

    def test_a_save_is_repeated_when_its_shard_dies_half_way(self, cluster: object, offers: Offers) -> None:
        starting = Repository.start("uploads-death", shards=1, store_bytes=64 << 20, preallocate_bytes=0)
        tensors = {"a": np.ones(20 << 20, np.uint8)}
        with starting as repo, far_from(repo) as far, ThreadPoolExecutor(1) as threads:
            offers.go_on.clear()
            saving = threads.submit(far.save, "m", tensors, timeout=WAIT_S)
            assert offers.answering.wait(WAIT_S)
            os.kill(repo._session.connection(0).hello.pid, signal.SIGKILL)
            offers.go_on.set()
            assert equal(repo.load(saving.result(WAIT_S).ref), tensors)
            assert offers.closed
            assert far.save("m", {"a": np.ones(20 << 20, np.uint8)}, timeout=WAIT_S).ref.version
            assert left(repo)[1] == 0
