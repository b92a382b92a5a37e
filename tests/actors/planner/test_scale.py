"""Shards join and drain while models are read and saved; nothing is lost, and only what must moves."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any, NoReturn

import numpy as np
import pytest
import ray
from tensorvine.actors.client.repository import Repository
from tensorvine.actors.client.save.pending import PendingSave
from tensorvine.actors.client.save.upload import Upload
from tensorvine.clusters import LocalCluster
from tensorvine.store.errors import ModelNotFoundError, MovedError
from tensorvine.store.graphs.graph import Layer, ModelGraph
from tensorvine.store.refs import ModelRef

from tests.support.waiting import await_shards, eventually

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
_serial = count(1)


@pytest.fixture
def repo(cluster: LocalCluster) -> Iterator[Repository]:
    """A repository of two shards."""
    with Repository.start(f"scale-{next(_serial)}", shards=2, preallocate_bytes=0, store_bytes=32 << 20) as started:
        yield started


def graph_of(units: int) -> ModelGraph:
    return ModelGraph([Layer("in", {"class": "In"}), Layer("d", {"class": "Dense", "units": units}, ["in"], ["d/w"])])


def tensors_of(number: int) -> dict[str, np.ndarray]:
    return {"d/w": np.full(16, number, np.int64)}


def fill(repo: Repository, models: int) -> list[ModelRef]:
    return [repo.save(f"m{i}", tensors_of(i), graph=graph_of(i), quality=i / models).ref for i in range(models)]


def check_all(repo: Repository, refs: list[ModelRef]) -> None:
    """Every question gets the answer that one shard would give."""
    assert repo.models() == sorted(refs)
    for number, ref in enumerate(refs):
        assert np.array_equal(repo.load(ref)["d/w"], np.full(16, number)), ref
        assert repo.graph(ref).fingerprint == graph_of(number).fingerprint
        assert repo.lineage(ref) == [ref]
        assert repo.find([{"class": "Dense", "units": number}]) == [ref]
        with repo.longest_prefix(graph_of(number)) as match:
            assert (match.ref, set(match.layers)) == (ref, {"in", "d"})


def nothing_is_left(repo: Repository) -> None:
    """All is freed once everything was retired and released."""

    def left() -> tuple[int, ...]:
        stats = repo.stats()
        held = (sum(s.tensors for s in stats.shards), sum(s.bytes_allocated for s in stats.shards))
        return stats.models, stats.catalog.pins, *held

    eventually(lambda: not any(left()), "nothing is left")


def test_two_shards_become_four_and_all_is_found(repo: Repository) -> None:
    refs = fill(repo, 200)
    report = repo.scale(4)
    assert (report.shards_before, report.shards_after, report.tensor_bytes_moved) == (2, 4, 0)
    assert repo.shards == (0, 1, 2, 3)
    assert repo.stats().models == 200
    assert repo.stats().catalog.pins == 0
    check_all(repo, refs)
    with Repository.connect(repo.name) as other:
        check_all(other, refs)


def test_a_client_that_was_not_told_finds_what_moved(repo: Repository) -> None:
    refs = fill(repo, 40)
    with Repository.connect(repo.name) as other:
        repo.scale(3)
        assert other._session.shards == (0, 1)
        assert np.array_equal(other.load(refs[7])["d/w"], np.full(16, 7))
        check_all(other, refs)
        child = other.save("child", tensors_of(99), graph=graph_of(99), parent=refs[3]).ref
        assert repo.lineage(child) == [child, refs[3]]
        assert repo.descendants(refs[3]) == [child]
        for ref in refs:
            other.retire(ref)
        assert repo.models() == [child]
        with pytest.raises(ModelNotFoundError, match="retired"):
            repo.load(refs[0])
        assert other.save("m0", tensors_of(1)).ref == ModelRef("m0", 2)
        repo.retire("m0")
        repo.retire(child)
        nothing_is_left(repo)


class Traffic:
    """Reads, saves, queries and retires from threads of their own, until it is stopped."""

    def __init__(self, name: str, refs: list[ModelRef]) -> None:
        self._name, self._refs = name, refs
        self._stop = threading.Event()
        self.failures: list[str] = []
        self.slowest: dict[str, float] = {}
        self.done: dict[str, int] = {}
        self.saved: dict[ModelRef, int] = {}
        self._threads = [
            threading.Thread(target=self._run, args=(work,)) for work in (self._read, self._save, self._ask)
        ]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def wait_for(self, more: int) -> None:
        """Return when each kind was done so often more."""
        goal = {kind: self.done.get(kind, 0) + more for kind in ("_read", "_save", "_ask")}
        deadline = time.monotonic() + 60
        while any(self.done.get(kind, 0) < least for kind, least in goal.items()):
            assert time.monotonic() < deadline, (self.done, self.failures)
            threading.Event().wait(0.02)

    def _run(self, work: Callable[[Repository, int], None]) -> None:
        kind, number = work.__name__, 0
        with Repository.connect(self._name) as repo:
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    work(repo, number)
                except Exception as exc:  # noqa: BLE001 - the test names it
                    self.failures.append(f"{kind} {number}: {exc!r}")
                number += 1
                self.slowest[kind] = max(self.slowest.get(kind, 0.0), time.monotonic() - began)
                self.done[kind] = number

    def _read(self, repo: Repository, number: int) -> None:
        place = number * 7 % len(self._refs)
        assert np.array_equal(repo.load(self._refs[place])["d/w"], np.full(16, place))

    def _save(self, repo: Repository, number: int) -> None:
        name, value = f"t{number % 50}", 1000 + number
        parent = self._refs[number % len(self._refs)] if number % 2 else None
        ref = repo.save(name, tensors_of(value), graph=graph_of(number % 20 + 500), parent=parent).ref
        self.saved[ref] = value
        if number >= 50:
            old = ModelRef(name, ref.version - 1)
            repo.retire(old)
            del self.saved[old]

    def _ask(self, repo: Repository, number: int) -> None:
        place = number * 3 % len(self._refs)
        with repo.longest_prefix(graph_of(place)) as match:
            assert match.ref == self._refs[place]
        assert set(self._refs) <= set(repo.models("m"))


def check_traffic(repo: Repository, traffic: Traffic, refs: list[ModelRef]) -> None:
    assert traffic.failures == []
    assert repo.models() == sorted([*refs, *traffic.saved])
    for ref, value in traffic.saved.items():
        assert np.array_equal(repo.load(ref)["d/w"], np.full(16, value)), ref
    for place, ref in enumerate(refs):
        assert np.array_equal(repo.load(ref)["d/w"], np.full(16, place)), ref
    for ref in [*refs, *traffic.saved]:
        repo.retire(ref)
    nothing_is_left(repo)


def test_reads_saves_and_queries_go_on_while_shards_join(repo: Repository) -> None:
    refs = fill(repo, 200)
    with Traffic(repo.name, refs) as traffic:
        traffic.wait_for(5)
        began = time.monotonic()
        report = repo.scale(4)
        took = time.monotonic() - began
        traffic.wait_for(5)
    assert report.shards_after == 4
    assert traffic.slowest["_read"] < max(1.0, took), "no read waits for the change"
    check_traffic(repo, traffic, refs)


@pytest.fixture
def four(cluster: LocalCluster) -> Iterator[Repository]:
    """A repository of four shards."""
    with Repository.start(f"scale-{next(_serial)}", shards=4, preallocate_bytes=0, store_bytes=32 << 20) as started:
        await_shards(started)  # else nothing is saved to the last one
        yield started


def test_a_shard_drains_with_its_tensors(four: Repository) -> None:
    refs = fill(four, 100)
    big = np.arange(1 << 18)
    large = [four.save(f"big{i}", {"w": big + i}).ref for i in range(8)]
    with four.longest_prefix(graph_of(5)) as match:
        report = four.scale(3)
        assert match.ref == refs[5]
        four.retire(refs[5])
        four.save("other", tensors_of(5), graph=graph_of(5), parent=match.ref, inherit=match.layers)
        assert np.array_equal(four.load("other")["d/w"], np.full(16, 5))
    four.retire("other")
    assert report.shards_after == len(four.shards) == 3
    assert report.tensor_bytes_moved > 0
    assert all(np.array_equal(four.load(ref)["w"], big + i) for i, ref in enumerate(large))
    kept = [ref for ref in refs if ref != refs[5]]
    assert four.models() == sorted([*kept, *large])
    assert four.verify() == []
    with Repository.connect(four.name) as other:
        assert np.array_equal(other.load(large[3])["w"], big + 3)
    for ref in [*kept, *large]:
        four.retire(ref)
    nothing_is_left(four)


def test_reads_saves_and_queries_go_on_while_shards_join_and_drain(repo: Repository) -> None:
    refs = fill(repo, 100)
    with Traffic(repo.name, refs) as traffic:
        traffic.wait_for(3)
        repo.scale(3)
        traffic.wait_for(3)
        repo.scale(2)
        traffic.wait_for(5)
        repo.scale(1)
        traffic.wait_for(5)
    assert len(repo.shards) == 1
    check_traffic(repo, traffic, refs)


def test_the_last_shard_does_not_drain(repo: Repository) -> None:
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="expected at least 1"):
            repo.scale(wrong)
    assert repo.scale(2).tensor_bytes_moved == 0
    assert repo.shards == (0, 1)


def test_who_waits_for_a_version_is_told_of_it_when_the_shard_where_it_waits_has_left(four: Repository) -> None:
    found: list[ModelRef | None] = []
    with Repository.connect(four.name) as other:
        waiter = threading.Thread(target=lambda: found.append(other.wait_newer("n", timeout=60.0)))
        waiter.start()
        four.scale(1)
        saved = four.save("n", {"w": np.zeros(1)}).ref
        waiter.join(60)
    assert found == [saved]


def test_saves_that_do_not_wait_all_arrive(four: Repository) -> None:
    whole = np.arange(1 << 17)
    pending: list[PendingSave] = []
    number = 0
    with ThreadPoolExecutor(1) as pool:
        for count in (3, 2, 1):
            change = pool.submit(four.scale, count)
            while not change.done() or number % 5:
                number += 1
                pending.append(four.save_async(f"a{number % 7}", {"w": whole + number}))
                pending[-1].staged(60)
                if len(pending) > 7:
                    four.retire(pending.pop(0).committed(60).ref)
            assert change.result().shards_after == count
            four._session.refresh()
        refs = [save.committed(60).ref for save in pending]
    assert four.models() == sorted(refs)
    assert [int(four.load(ref)["w"][0]) for ref in refs] == list(range(number - len(refs) + 1, number + 1))
    assert four.verify() == []
    assert [stats.bytes_staged <= 2 * whole.nbytes for stats in four.stats().shards] == [True]


def test_a_save_whose_shard_drains_while_it_is_copied_is_staged_anew(
    four: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = np.arange(1 << 17)
    four.save_async("m", {"w": whole}).committed(60)
    eventually(lambda: four._saves.saver.reserved._waiting is not None, "memory that waits for the next save")

    def drained(upload: Upload, arrays: object) -> NoReturn:
        raise MovedError(f"shard {upload.shard} has left the repository", 1)

    monkeypatch.setattr(Upload, "copies", drained)
    saved = four.save_async("m", {"w": whole + 1}).committed(60)
    assert (four.load(saved.ref)["w"] == whole + 1).all()


def test_a_save_whose_shard_drains_between_staging_and_commit_is_committed(
    four: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard stays until that; or, where it has left, the save is staged anew."""
    tensors, changes = {"w": np.arange(1 << 17)}, list[Any]()
    write = Upload.write
    with ThreadPoolExecutor(1) as pool:

        def written(upload: Upload, *arguments: Any) -> None:
            write(upload, *arguments)
            if not changes:
                changes.append(pool.submit(four.scale, 1))
                eventually(lambda: _drains(four), "a shard drains")

        monkeypatch.setattr(Upload, "write", written)
        saved = [four.save(f"m{number}", tensors).ref for number in range(8)]
        assert changes[0].result(100).shards_after == 1
    assert all(np.array_equal(four.load(ref)["w"], tensors["w"]) for ref in saved)
    for ref in saved:
        four.retire(ref)
    nothing_is_left(four)


def _drains(repo: Repository) -> bool:
    repo._session.refresh()
    return bool(repo._session.topology.leaving) or len(repo._session.shards) < 4


def test_a_pin_outlives_the_shard_that_has_the_tensors(four: Repository) -> None:
    refs = fill(four, 20)
    with Repository.connect(four.name) as other:
        matches = [other.longest_prefix(graph_of(number)) for number in range(20)]
        four.scale(1)
        for ref in refs:
            four.retire(ref)
        assert four.models() == []
        assert four.stats().catalog.pins == 20
        for number, match in enumerate(matches):
            assert match is not None
            assert np.array_equal(other.load(match.ref)["d/w"], np.full(16, number))
            match.release()
    nothing_is_left(four)
