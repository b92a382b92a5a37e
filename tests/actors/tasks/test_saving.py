"""Dask's arrays as tensors of a version: what is saved, and what becomes of it when tasks, workers or shards fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import ml_dtypes
import numpy as np
import pytest
from distributed import Client
from tensorvine.actors import Repository
from tensorvine.actors.client.save import place as place_module
from tensorvine.actors.tasks.arrays import load_arrays
from tensorvine.actors.tasks.saving import save_arrays
from tensorvine.store.errors import (
    InvalidNameError,
    OperationTimeoutError,
    ShardUnavailableError,
    StoreFullError,
    TensorMismatchError,
    TensorNotFoundError,
)
from tensorvine.store.graphs.graph import Layer, ModelGraph

from tests.support.dask_cluster import WAIT_S
from tests.support.waiting import eventually

RNG = np.random.default_rng(0)
STORE_BYTES = 64 << 20
LARGE = RNG.random((700, 900), np.float32)
"""More than what travels inside messages, chunk by chunk."""

ENDLESS = """
import sys, time
import dask.array as da
from tensorvine.actors import Repository
from tensorvine.actors.tasks.saving import save_arrays

def last(block, block_info=None):
    if block_info[0]["chunk-location"] == (1,):
        print("waits", flush=True)
        time.sleep(600)
    return block

name, address = sys.argv[1:]
repository = Repository.connect(name, engine=address)
save_arrays(repository, "m", {"w": da.zeros(200_000, chunks=100_000).map_blocks(last, dtype=float)})
"""


OPTIONS: dict[str, Any] = {"shards": 1, "store_bytes": STORE_BYTES, "preallocate_bytes": 0}


@pytest.fixture(scope="class")
def shared(client: Client) -> Iterator[Repository]:
    """A repository of several tests."""
    with Repository.start("saving", engine=client, **OPTIONS) as made:
        yield made


@pytest.fixture
def repository(shared: Repository) -> Iterator[Repository]:
    """That repository, as empty as it was."""
    yield shared
    for ref in shared.models():
        shared.retire(ref)


@pytest.fixture
def own(client: Client, name: str) -> Iterator[Repository]:
    """A repository of one test, which makes saves fail."""
    with Repository.start(name, engine=client, **OPTIONS) as made:
        yield made


def nothing_staged(repository: Repository) -> bool:
    """Tell whether a save left neither bytes nor pins; a shard that has just been killed has none."""
    try:
        stats = repository.stats()
        return not (stats.catalog.pins or any(s.bytes_staged for s in stats.shards))
    except ShardUnavailableError:
        return False


def once_killed(block: np.ndarray, flag: str) -> np.ndarray:
    """End the worker of the task that comes first."""
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return block
    os.kill(os.getpid(), signal.SIGKILL)
    return block


def waits_for(block: np.ndarray, folder: str) -> np.ndarray:
    """Be a task until somebody says that it may go on."""
    Path(folder, "came").touch()
    end = time.monotonic() + WAIT_S
    while not Path(folder, "on").exists() and time.monotonic() < end:
        time.sleep(0.01)
    return block


class TestSaved:
    """What is saved is what was computed."""

    @pytest.mark.parametrize(
        ("tensor", "chunks"),
        [
            (LARGE, 300),
            (LARGE, (100, -1)),
            (LARGE, -1),
            (LARGE.T, (-1, 30)),
            (np.asfortranarray(LARGE), (256, 512)),
            (RNG.integers(0, 99, (3, 4, 5), np.int16), (2, 3, 2)),
            (np.arange(10).astype(ml_dtypes.bfloat16), 3),
            (np.array(3.0), ()),
            (np.zeros((0, 4), np.int8), -1),
            (np.array([True, False]), 1),
            (np.arange(4, dtype=">i4"), 2),
        ],
        ids=lambda value: f"{value.dtype}{value.shape}" if isinstance(value, np.ndarray) else str(value),
    )
    def test_on_workers(self, repository: Repository, tensor: np.ndarray, chunks: Any) -> None:
        saved = save_arrays(repository, "m", {"w": da.from_array(tensor, chunks)})
        assert (saved.bytes_written, saved.bytes_inherited) == (tensor.nbytes, 0)
        found = repository.load("m")["w"]
        np.testing.assert_array_equal(found, tensor)
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype.newbyteorder("="))
        assert repository.verify() == []
        assert nothing_staged(repository)

    def test_several_tensors_of_which_some_are_dasks(self, repository: Repository) -> None:
        x = da.from_array(LARGE, 400)
        save_arrays(repository, "m", {"x": x, "product": x @ x.T, "plain": LARGE[:5], "none": da.zeros(0)})
        found = repository.load("m")
        np.testing.assert_array_equal(found["x"], LARGE)
        np.testing.assert_allclose(found["product"], LARGE @ LARGE.T, rtol=1e-4)
        np.testing.assert_array_equal(found["plain"], LARGE[:5])
        with pytest.raises(TensorMismatchError, match="expected at least one tensor, own or inherited; found none"):
            save_arrays(repository, "empty", {})

    def test_what_was_loaded_is_changed_and_saved(self, repository: Repository) -> None:
        first = repository.save("m", {"w": LARGE}).ref
        arrays = load_arrays(repository, "m", chunks=200)
        saved = save_arrays(repository, "other", {"w": 2 * arrays["w"]}, parent=first)
        np.testing.assert_array_equal(repository.load("other")["w"], 2 * LARGE)
        assert repository.lineage(saved.ref) == [saved.ref, first]

    @pytest.mark.parametrize("scheduler", ["threads", "sync"])
    def test_in_this_process(self, repository: Repository, scheduler: str) -> None:
        with dask.config.set(scheduler=scheduler):
            save_arrays(repository, "m", {"w": da.from_array(LARGE, 300)})
        np.testing.assert_array_equal(repository.load("m")["w"], LARGE)

    def test_what_arrays_have_in_common_is_computed_once(self, repository: Repository) -> None:
        made: list[int] = []

        def drawn(block: np.ndarray) -> np.ndarray:
            made.append(len(made))
            return block + made[-1]  # other bytes each time

        x = da.zeros(40, chunks=10).map_blocks(drawn, meta=np.empty(0))
        with dask.config.set(scheduler="sync"):
            save_arrays(repository, "m", {"x": x, "twice": 2 * x, "sum": x.sum()})
        found = repository.load("m")
        assert made == [0, 1, 2, 3]
        np.testing.assert_array_equal(found["twice"], 2 * found["x"])
        assert found["sum"] == found["x"].sum() == 60.0

    def test_as_a_save_is_asked_for(self, client: Client, name: str, tmp_path: Path) -> None:
        graph = ModelGraph([Layer("dense", {"class": "Dense"}, tensors=["w"])])
        with Repository.start(name, engine=client, path=tmp_path, **OPTIONS) as repository:
            asked: dict[str, Any] = {"quality": 0.5, "metadata": {"by": "dask"}, "graph": graph}
            saved = save_arrays(repository, "m", {"w": da.from_array(LARGE, 300)}, durability="disk", **asked)
            info = repository.info(saved.ref)
            assert (info.quality, dict(info.metadata)) == (0.5, {"by": "dask"})
            assert repository.graph("m") == graph
        with Repository.start(name, engine=client, path=tmp_path, **OPTIONS) as repository:
            np.testing.assert_array_equal(repository.load("m")["w"], LARGE)

    def test_messages_carry_what_the_shard_cannot_fetch(
        self, repository: Repository, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def unheard(*_: object) -> None:
            raise OSError("no address is free")

        monkeypatch.setattr(place_module, "Offer", unheard)
        monkeypatch.setattr(place_module, "PIECE_BYTES", 100_000)
        with dask.config.set(scheduler="sync"):
            save_arrays(repository, "m", {"w": da.from_array(LARGE, 500)})
        np.testing.assert_array_equal(repository.load("m")["w"], LARGE)
        assert caplog.text.count("they are sent in messages: this process cannot listen: no address is free") == 1


class TestTrouble:
    """A save that fails leaves nothing; one whose task is done twice is what it is."""

    def test_a_task_that_fails(self, own: Repository) -> None:
        x = da.from_array(LARGE, 300)
        with pytest.raises(ZeroDivisionError):
            save_arrays(own, "m", {"w": x.map_blocks(lambda block: block / (1 // 0), meta=x._meta)})
        assert own.models() == []
        eventually(lambda: nothing_staged(own), "nothing is staged")
        assert save_arrays(own, "m", {"w": x}).ref.version == 1

    def test_chunks_of_another_dtype_than_their_array_says(self, own: Repository) -> None:
        x = da.from_array(LARGE, 300).map_blocks(lambda block: block.view(np.int32), meta=np.empty((0, 0), np.float32))
        with pytest.raises(TensorMismatchError, match="expected chunks of float32, as in their array; found int32"):
            save_arrays(own, "m", {"w": x})
        assert own.models() == []

    @pytest.mark.parametrize(
        ("wrong", "found"),
        [
            (lambda block: np.vstack([block, block]), r"\(600, 300\)|\(200, 300\)"),
            (lambda block: block[:-1], r"\(299, 300\)|\(99, 300\)"),
            (lambda block: block[:, :1], r"\(300, 1\)|\(100, 1\)"),
            (lambda block: block.T, r"\(300, 100\)"),
            (lambda block: block[0, 0], r"\(\)"),
        ],
    )
    def test_chunks_of_another_shape_than_their_array_says(self, own: Repository, wrong: Any, found: str) -> None:
        """Most of them leave memory of a retired version unwritten, or overwrite another chunk."""
        own.retire(own.save("before", {"w": LARGE}).ref)
        x = da.from_array(LARGE, 300).map_blocks(wrong, meta=np.empty((0, 0), "f4"))
        says = rf"tensor 'w': expected a chunk of shape .* at .*, as in its array; found ({found})"
        with pytest.raises(TensorMismatchError, match=says):
            save_arrays(own, "m", {"w": x})
        assert own.models() == []
        eventually(lambda: nothing_staged(own), "nothing is staged")

    def test_tasks_that_take_too_long(self, own: Repository, tmp_path: Path) -> None:
        x = da.from_array(LARGE, 300).map_blocks(waits_for, str(tmp_path), meta=np.empty((0, 0), "f4"))
        with pytest.raises(OperationTimeoutError, match=r"save(_arrays)? of 'm'"):  # late by the tasks, or before them
            save_arrays(own, "m", {"w": x}, timeout=1.0)
        (tmp_path / "on").touch()
        eventually(lambda: nothing_staged(own), "nothing is staged")
        assert own.models() == []

    def test_a_worker_that_is_killed(self, own: Repository, tmp_path: Path) -> None:
        x = da.from_array(LARGE, 100).map_blocks(once_killed, str(tmp_path / "flag"), meta=np.empty((0, 0), "f4"))
        save_arrays(own, "m", {"w": x})
        assert (tmp_path / "flag").exists()
        np.testing.assert_array_equal(own.load("m")["w"], LARGE)

    def test_a_shard_that_is_killed(self, own: Repository, tmp_path: Path) -> None:
        x = da.from_array(LARGE, 300).map_blocks(waits_for, str(tmp_path), meta=np.empty((0, 0), "f4"))
        pid = own._session.connection(0).hello.pid
        killing = threading.Thread(target=kill_when, args=(pid, str(tmp_path)))
        killing.start()
        with pytest.raises((ShardUnavailableError, OperationTimeoutError)):
            save_arrays(own, "m", {"w": x})
        killing.join(WAIT_S)
        eventually(lambda: nothing_staged(own), "nothing is staged")
        assert own.models() == []
        save_arrays(own, "m", {"w": da.from_array(LARGE, 300)})
        np.testing.assert_array_equal(own.load("m")["w"], LARGE)

    def test_a_program_that_is_killed(self, own: Repository, client: Client) -> None:
        command = [sys.executable, "-c", ENDLESS, own.name, client.scheduler.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
            try:
                assert program.stdout is not None
                assert program.stdout.readline() == "waits\n"
                assert not nothing_staged(own)
            finally:
                program.kill()
        eventually(lambda: nothing_staged(own), "nothing is staged")
        assert own.models() == []


def kill_when(pid: int, folder: str) -> None:
    """Kill a process when a task has come so far, and let that go on."""
    end = time.monotonic() + WAIT_S
    while not Path(folder, "came").exists() and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    Path(folder, "on").touch()


class TestWrongArguments:
    def test_they_are_refused_before_anything_is_computed(self, repository: Repository) -> None:
        x = da.from_array(LARGE, 300)
        with pytest.raises(TensorMismatchError, match=r"tensor 'w': expected chunks whose lengths are known; .* call"):
            save_arrays(repository, "m", {"w": x[x > 0.5]})
        with pytest.raises(InvalidNameError):
            save_arrays(repository, "a/../b", {"w": x})
        with pytest.raises(TensorMismatchError, match="tensor 'w': "):
            save_arrays(repository, "m", {"w": da.from_array(np.array(["a"]))})
        graph = ModelGraph([Layer("dense", {"class": "Dense"}, tensors=["absent"])])
        with pytest.raises(TensorNotFoundError, match="absent"):
            save_arrays(repository, "m", {"w": x}, graph=graph)
        with pytest.raises(StoreFullError, match="the capacity of shard 0"):
            save_arrays(repository, "m", {"w": da.zeros(STORE_BYTES, chunks=-1)})
        with pytest.raises(TensorMismatchError, match="expected a mapping of names to arrays; found Array"):
            save_arrays(repository, "m", x)
        assert repository.models() == []
        assert nothing_staged(repository)
