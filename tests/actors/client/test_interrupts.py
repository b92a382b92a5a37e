"""Saves whose caller is interrupted, by Ctrl-C or by what else a signal handler raises: what becomes of the bytes."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from tensorvine.actors import Repository
from tensorvine.actors.client.save.pending import PendingSave
from tensorvine.actors.client.save.request import Saved, SaveRequest
from tensorvine.actors.client.save.saver import Saver
from tensorvine.actors.client.session import Session
from tensorvine.actors.memory import copying
from tensorvine.actors.rpc.calls import Request
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.actors.tasks.saving import save_arrays
from tensorvine.store.errors import OperationTimeoutError

from tests.support.interrupts import Interrupt, at_each, is_inside, when_waiting
from tests.support.waiting import PATIENCE_S, eventually

SAVE_THREAD, HELPERS = ("tensorvine-save",), ("tensorvine-copy", "tensorvine-stage")
LENGTH = 12 << 20


@pytest.fixture(scope="module")
def repo(cluster: object) -> Iterator[Repository]:
    with Repository.start("interrupts", shards=1, store_bytes=128 << 20, preallocate_bytes=0) as started:
        yield started


@pytest.fixture
def client(repo: Repository) -> Iterator[Repository]:
    """A client of its own, after which nothing is left in the repository."""
    made = Repository.connect(repo.name)
    yield made
    made.close()
    for ref in repo.models():
        repo.retire(ref)
    eventually(lambda: left(repo) == (0, 0), "all memory comes back")


def left(repo: Repository) -> tuple[int, int]:
    """Bytes that hold segments, and that are being filled."""
    gc.collect()
    (shard,) = repo.stats().shards
    return shard.bytes_allocated, shard.bytes_staged


def interrupted(*_: object) -> None:
    raise Interrupt


def names(client: Repository) -> list[str]:
    return [ref.name for ref in client.models()]


class Held:
    """Copies of some threads of this process, held up as each begins a piece."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, threads: tuple[str, ...]) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        true, held = np.copyto, threading.local()

        def copyto(target: np.ndarray, source: np.ndarray) -> None:
            if threading.current_thread().name.startswith(threads) and not hasattr(held, "once"):
                held.once = True
                self.began.set()
                assert self.go_on.wait(PATIENCE_S)
            elif threading.current_thread().name.startswith(HELPERS[0]) != (threads is HELPERS):
                assert self.began.wait(PATIENCE_S)  # both have their shares
            true(target, source)

        monkeypatch.setattr(copying.np, "copyto", copyto)


@pytest.mark.parametrize("way", ["buffer", "reserved"])
def test_a_copy_that_outlives_its_save_writes_into_no_other_version(
    repo: Repository, client: Repository, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The caller is interrupted while it waits for its helper, which goes on after another save was committed."""
    if way == "reserved":
        client.save_async("m", {"w": np.full(LENGTH, 7, np.uint8)}, inherit=None).committed(PATIENCE_S)
        eventually(lambda: client._saves.saver.reserved._waiting is not None, "memory waits for the next save")
    with monkeypatch.context() as patch:
        held = Held(patch, HELPERS)
        with pytest.raises(Interrupt), when_waiting(wait):
            client.save_async("m", {"w": np.full(LENGTH, 8, np.uint8)}, inherit=None)
    ones = {"w": np.ones(LENGTH, np.uint8)}
    if way == "reserved":
        saved = repo.save("other", ones, inherit=None)
    else:
        saved = client.save_async("other", ones, inherit=None).committed(PATIENCE_S)
    held.go_on.set()
    helper = client._saves.saver._helper if way == "reserved" else client._saves._staging._helper
    assert helper is not None
    helper.submit(len, ()).result(PATIENCE_S)  # what it was at has ended
    assert (repo.load(saved.ref)["w"] == 1).all()
    assert len(repo.models("m")) == (1 if way == "reserved" else 0)


class TestGivenUp:
    """A save whose call ended by an exception."""

    def test_one_that_is_copied_appears_no_more(self, client: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
        arrays = {"a": np.ones(LENGTH, np.uint8), "b": np.ones(LENGTH, np.uint8)}
        with monkeypatch.context() as patch:
            held = Held(patch, HELPERS)
            with pytest.raises(Interrupt), when_waiting(wait):
                client.save("m", arrays, inherit=None)
        arrays["a"][:] = arrays["b"][:] = 2
        held.go_on.set()
        client.save("next", {"w": np.ones(3)})
        assert names(client) == ["next"]

    def test_one_in_the_queue_appears_no_more(self, client: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            held = Held(patch, SAVE_THREAD)
            first = client.save_async("first", {"a": np.ones(LENGTH, np.uint8)})
            assert held.began.wait(PATIENCE_S)
            with pytest.raises(Interrupt), when_waiting(PendingSave.committed):
                client.save("m", {"w": np.ones(3)})
            held.go_on.set()
            first.committed(PATIENCE_S)
        client.save("next", {"w": np.ones(3)})
        assert names(client) == ["first", "next"]

    def test_one_that_is_being_committed_is_waited_for(
        self, client: Repository, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It was queued behind a save that did not wait, so another thread commits it."""
        true, main, began = Saver._handed, threading.main_thread().ident, threading.Event()

        def handed(saver: Saver, request: SaveRequest, *rest: Any) -> Any:
            waits = PendingSave.give_up if request.name == "m" else PendingSave.committed
            if request.name == "m":
                began.set()
            eventually(lambda: is_inside(sys._current_frames()[main or 0], waits), "the caller waits")
            return true(saver, request, *rest)

        monkeypatch.setattr(Saver, "_handed", handed)
        client.save_async("first", {"w": np.ones(3)})
        with pytest.raises(Interrupt), when_waiting(PendingSave.committed, after=began):
            client.save("m", {"w": np.ones(3)})
        assert names(client) == ["first", "m"]

    @pytest.mark.parametrize("when", ["before", "meanwhile", "after"])
    def test_a_commit_that_is_interrupted_stands_when_the_call_ends_or_never_comes(
        self, client: Repository, monkeypatch: pytest.MonkeyPatch, when: str
    ) -> None:
        call = Session.call

        def interrupt(session: Session, shard: int, request: Request[Any], *rest: Any) -> Any:
            if request.remote is ShardCalls.commit:
                if when == "meanwhile":
                    session.send(shard, request)
                elif when == "after":
                    call(session, shard, request, *rest)
                raise Interrupt
            return call(session, shard, request, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(Session, "call", interrupt)
            with pytest.raises(Interrupt):
                client.save("m", {"w": np.ones(3)})
        found = names(client)
        assert found in {"before": ([],), "meanwhile": ([], ["m"]), "after": (["m"],)}[when]
        client.save("next", {"w": np.ones(3)})
        assert names(client) == [*found, "next"]

    def test_save_arrays(self, client: Repository) -> None:
        go_on = threading.Event()

        def late(block: np.ndarray) -> np.ndarray:
            assert go_on.wait(PATIENCE_S)
            return block

        array = da.ones(LENGTH, chunks=LENGTH // 4, dtype=np.uint8).map_blocks(late, meta=np.empty(0, np.uint8))
        threads = dask.config.set(scheduler="threads")
        with threads, pytest.raises(Interrupt), when_waiting(PendingSave.committed, go_on):
            save_arrays(client, "m", {"w": array})
        eventually(lambda: not client._saves._apart, "its thread ends")
        assert client.models() == []

    def test_save_arrays_before_its_thread_has_started(
        self, client: Repository, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(Interrupt):
                save_arrays(client, "m", {"w": da.ones(10)})
        client.close()  # waits for no such thread

    def test_an_exception_at_any_point_leaves_a_client_that_saves(self, client: Repository) -> None:
        for save, least in ((client.save, 20), (client.save_async, 40)):
            versions: set[float] = set()

            def work(save: Callable[..., Any] = save, versions: set[float] = versions) -> None:
                versions.add(value := len(versions))
                save("m", {"w": np.full(20_000, value)}, inherit=None)

            points = sum(1 for _ in at_each(work, "/client/save/"))
            assert points > least
            last = client.save("m", {"w": np.ones(20_000)}, inherit=None).ref
            for ref in client.models("m"):
                assert len(np.unique(client.load(ref)["w"])) == 1
            assert client.models("m")[-1] == last


class TestDeadlines:
    """A save's time begins when it is asked for."""

    def test_it_counts_the_wait_for_earlier_saves(self, client: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            held = Held(patch, SAVE_THREAD)
            first = client.save_async("first", {"a": np.ones(LENGTH, np.uint8)})
            assert held.began.wait(PATIENCE_S)
            with pytest.raises(OperationTimeoutError, match="earlier saves are still running"):
                client.save("m", {"w": np.ones(3)}, timeout=0.1)
            assert not first.done()
            held.go_on.set()
            first.committed(PATIENCE_S)
        client.save("next", {"w": np.ones(3)})
        assert names(client) == ["first", "next"]

    @pytest.mark.parametrize("queued", [False, True])
    def test_a_save_does_not_wait_for_that_of_another_thread(
        self, client: Repository, monkeypatch: pytest.MonkeyPatch, queued: bool
    ) -> None:
        def save_slowly() -> Saved:
            ones = {"a": np.ones(LENGTH, np.uint8)}
            return client.save_async("slow", ones).committed() if queued else client.save("slow", ones)

        with monkeypatch.context() as patch, ThreadPoolExecutor(1, "slow") as threads:
            held = Held(patch, SAVE_THREAD if queued else ("slow",))
            slow = threads.submit(save_slowly)
            assert held.began.wait(PATIENCE_S)
            client.save("m", {"w": np.ones(3)})
            assert not slow.done()
            held.go_on.set()
            slow.result(PATIENCE_S)
        assert names(client) == ["m", "slow"]

    def test_a_timeout_of_a_wait_ends_only_the_wait(self, client: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
        held = Held(monkeypatch, SAVE_THREAD)
        client._saves._staging._most = 0  # it is staged at its turn
        pending = client.save_async("m", {"a": np.ones(LENGTH, np.uint8)})
        for waiting in (pending.staged, pending.committed):
            with pytest.raises(OperationTimeoutError, match=r"within 0\.01 s; it is not"):
                waiting(0.01)
        held.go_on.set()
        assert [pending.committed().ref] == client.models()

    def test_a_save_in_a_task_of_save_arrays_does_not_wait_for_that(self, client: Repository) -> None:
        def inner(block: np.ndarray) -> np.ndarray:
            client.save("inner", {"w": block})
            return block

        def work() -> None:
            with dask.config.set(scheduler="threads"):
                array = da.ones(5, chunks=5).map_blocks(inner, meta=np.empty(0))
                saved.append(save_arrays(client, "outer", {"x": array}))

        saved: list[Any] = []
        threading.Thread(target=work, daemon=True).start()
        eventually(lambda: saved, "both are saved")
        assert names(client) == ["inner", "outer"]
