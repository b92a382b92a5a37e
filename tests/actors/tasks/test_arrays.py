"""Stored tensors as Dask's arrays, on Dask's workers and in threads."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import dask
import ml_dtypes
import numpy as np
import pytest
from distributed import Client
from tensorvine.actors import Repository
from tensorvine.actors.engine import process
from tensorvine.actors.tasks.arrays import load_arrays
from tensorvine.actors.tasks.connection import connected, disconnect, start_of
from tensorvine.store.errors import (
    ModelNotFoundError,
    OptionError,
    RepositoryNotFoundError,
    ShardUnavailableError,
    TensorMismatchError,
    TensorNotFoundError,
)

STORE_BYTES = 64 << 20
TENSORS: dict[str, np.ndarray] = {
    "w": np.random.default_rng(0).random((300, 40), np.float32),
    "fortran": np.asfortranarray(np.arange(60.0).reshape(3, 4, 5)),
    "scalar": np.array(3.0),
    "empty": np.zeros((0, 4), np.int8),
    "bf16": np.arange(10).astype(ml_dtypes.bfloat16),
}


def started(client: Client, name: str) -> Repository:
    return Repository.start(name, shards=1, store_bytes=STORE_BYTES, preallocate_bytes=0, engine=client)


@pytest.fixture(scope="module")
def saved(client: Client) -> Iterator[Repository]:
    """A repository that has a model, and gets no other."""
    with started(client, "saved") as made:
        made.save("m", TENSORS)
        yield made


def who_reads(block: np.ndarray) -> np.ndarray:
    """Tell of a chunk, in its task, whether it may be written, and the bytes that it has of its own."""
    return np.array([[block.flags.writeable, block.flags.owndata]])


@pytest.mark.usefixtures("client")
class TestWorkers:
    """What is computed on workers of Dask, which are other processes."""

    @pytest.mark.parametrize("name", TENSORS)
    def test_a_tensor_is_what_was_saved(self, saved: Repository, name: str) -> None:
        made = load_arrays(saved, "m")[name]
        assert (made.shape, made.dtype) == (TENSORS[name].shape, TENSORS[name].dtype)
        found = made.compute()
        assert found.dtype == TENSORS[name].dtype
        np.testing.assert_array_equal(found, TENSORS[name])

    @pytest.mark.parametrize(
        "chunks", [21, -1, (100, 15), ((100, 200), (40,)), "1kB", {0: 50, 1: -1}, {"w": (30, -1)}, {"scalar": 1}]
    )
    def test_however_it_is_cut(self, saved: Repository, chunks: Any) -> None:
        made = load_arrays(saved, "m@1", tensors=["w"], chunks=chunks)["w"]
        np.testing.assert_array_equal(made.compute(), TENSORS["w"])
        np.testing.assert_array_equal(made.max(axis=0).compute(), TENSORS["w"].max(axis=0))
        np.testing.assert_array_equal(made[5:290:7, ::-3][::2].compute(), TENSORS["w"][5:290:7, ::-3][::2])

    @pytest.mark.parametrize(
        ("chunks", "found"),
        [({0: 50, 1: -1}, (6, 1)), ({"w": (30, -1)}, (10, 1)), ({"w": 30}, (10, 2)), (None, (1, 1))],
    )
    def test_as_it_was_said(self, saved: Repository, chunks: Any, found: tuple[int, int]) -> None:
        assert load_arrays(saved, "m", tensors=["w"], chunks=chunks)["w"].numblocks == found

    def test_by_itself_along_the_first_axis(self, saved: Repository) -> None:
        with dask.config.set({"array.chunk-size": "10kB"}):
            made = load_arrays(saved, "m")
        assert made["w"].numblocks[0] > 1
        assert made["w"].numblocks[1] == 1
        assert made["scalar"].numblocks == ()

    def test_a_chunk_is_a_view_where_the_shard_is_near(self, saved: Repository) -> None:
        made = load_arrays(saved, "m", tensors=["w"], chunks=(100, -1))["w"]
        told = made.map_blocks(who_reads, chunks=((1, 1, 1), (2,)), dtype=bool, meta=np.zeros((0, 0), bool)).compute()
        np.testing.assert_array_equal(told, [[False, False]] * 3)

    def test_equal_arrays_are_computed_once(self, saved: Repository) -> None:
        one, other = (load_arrays(saved, model, tensors=["w"])["w"] for model in ("m", "m@1"))
        assert one.name == other.name
        assert one.name != load_arrays(saved, "m", tensors=["w"], chunks=5)["w"].name

    def test_a_name_is_the_version_that_was_the_latest_then(self, client: Client, name: str) -> None:
        with started(client, name) as repository:
            repository.save("m", {"w": np.zeros(3)})
            made = load_arrays(repository, "m")["w"]
            repository.save("m", {"w": np.ones(3)})
            assert made.sum().compute() == 0.0
            assert load_arrays(repository, "m")["w"].sum().compute() == 3.0

    def test_what_was_retired_before_is_the_tasks_error(self, client: Client, name: str) -> None:
        with started(client, name) as repository:
            repository.save("m", {"w": np.zeros(3)})
            made = load_arrays(repository, "m")["w"]
            repository.retire("m")
            with pytest.raises(ModelNotFoundError, match=r"m@1 was retired"):
                made.compute()

    def test_workers_follow_a_repository_that_was_started_again(self, client: Client) -> None:
        with started(client, "again") as repository:
            repository.save("m", {"w": np.zeros(3)})
            before = load_arrays(repository, "m")["w"]
            assert before.sum().compute() == 0.0
        with started(client, "again") as repository:
            repository.save("m", {"w": np.ones(3)})
            assert load_arrays(repository, "m")["w"].sum().compute() == 3.0
            with pytest.raises((RepositoryNotFoundError, ShardUnavailableError)):  # where one has met it, or has not
                before.compute()
            assert load_arrays(repository, "m")["w"].max().compute() == 1.0


class TestThreads:
    """What is computed in this process is read by the repository's own client."""

    @pytest.mark.parametrize("scheduler", ["threads", "sync"])
    def test_each_tensor_is_what_was_saved(self, saved: Repository, scheduler: str) -> None:
        made = load_arrays(saved, "m", chunks={"w": (11, 13)})
        for name, tensor in TENSORS.items():
            np.testing.assert_array_equal(made[name].compute(scheduler=scheduler), tensor)


class TestWrongArguments:
    def test_they_are_refused_where_they_are_given(self, saved: Repository) -> None:
        with pytest.raises(ModelNotFoundError):
            load_arrays(saved, "none")
        with pytest.raises(TensorNotFoundError, match=r"expected names of its 5 tensors; found \['x'\]"):
            load_arrays(saved, "m", tensors=["x"])
        with pytest.raises(TensorNotFoundError, match=r"expected names of its 5 tensors; found \['other'\]"):
            load_arrays(saved, "m", chunks={"other": 1})
        with pytest.raises(TensorNotFoundError, match="expected a sequence of names; found 'w'"):
            load_arrays(saved, "m", tensors="w")
        with pytest.raises(TensorMismatchError, match=r"chunks of 'w': expected .* for \(300, 40\); found \(1, 2, 3\)"):
            load_arrays(saved, "m", tensors=["w"], chunks=(1, 2, 3))
        with pytest.raises(OptionError):
            load_arrays(saved, "m", timeout=float("nan"))


class TestConnected:
    """The connection of a process."""

    def test_another_start_is_refused_and_not_kept(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        with started(client, "starts") as repository:
            monkeypatch.setattr(process, "_engines", [repository.engine])
            assert connected("starts") is connected("starts", start_of(repository))
            with pytest.raises(
                RepositoryNotFoundError, match="repository 'starts': expected the start of it that was used"
            ):
                connected("starts", "another")
            assert connected("starts", start_of(repository)).models() == []
            disconnect("starts")

    def test_a_stored_tensor_takes_no_connection_along(self, saved: Repository) -> None:
        (layer,) = load_arrays(saved, "m", tensors=["scalar"])["scalar"].dask.layers.values()
        assert len(pickle.dumps(dict(layer))) < 5000
