"""Memory above, disk below: what leaves memory answers from disk through the same `load`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tensorvine.actors import Repository
from tensorvine.store import Delta, KeepBest, KeepBytes, KeepLast, Quantize, Retention, Shuffle, Zstd
from tensorvine.store.errors import StoreFullError, TensorVineError

from tests.support.disk import MIB, bits, check, noise, same, segments, start, weights
from tests.support.waiting import eventually

pytestmark = [pytest.mark.timeout(240), pytest.mark.workers_import("quantising")]

PART = MIB // 4
"""Of a small memory: it has 24 of them."""


@pytest.fixture(params=[1, 2], ids=["one-shard", "two-shards"])
def shards(request: pytest.FixtureRequest) -> int:
    return request.param


class TestRetention:
    @pytest.mark.parametrize(
        ("keep", "kept"),
        [(KeepLast(1), [5]), (KeepLast(1) | KeepBest(1), [2, 5]), (KeepBytes(2 * MIB), [4, 5])],
        ids=["last", "last-or-best", "bytes"],
    )
    def test_old_versions_leave_the_memory_and_answer_from_disk(
        self, cluster: object, tmp_path: Path, keep: Retention, kept: list[int]
    ) -> None:
        given = {n: {"t": noise(MIB, n)} for n in range(1, 6)}
        with start(tmp_path, keep=keep) as repo:
            for n, tensors in given.items():
                repo.save("m", tensors, quality=1 / (n * n - 4 * n + 5))
            repo.flush()
            eventually(lambda: repo.stats().bytes_memory == len(kept) * MIB, f"only {kept} in memory")
            for n in kept:
                assert same(repo.load(f"m@{n}"), given[n])
            assert repo.stats().bytes_memory == len(kept) * MIB
            for n, tensors in given.items():
                assert same(repo.load(f"m@{n}"), tensors)
            assert repo.verify() == []

    def test_what_a_kept_version_inherits_stays(self, cluster: object, tmp_path: Path, shards: int) -> None:
        with start(tmp_path, shards=shards, keep=KeepLast(1)) as repo:
            first = {"a": noise(MIB, 1), "b": noise(MIB, 2)}
            repo.save("m", first)
            repo.save("m", {**first, "b": noise(MIB, 3)})
            repo.flush()
            eventually(lambda: repo.stats().bytes_memory <= 3 * MIB, "settled")
            memory = repo.stats().bytes_memory
            assert same(repo.load("m"), {**first, "b": noise(MIB, 3)})
            assert repo.stats().bytes_memory == memory
            assert same(repo.load("m@1"), first)

    def test_a_version_that_is_not_on_disk_yet_stays(self, cluster: object, tmp_path: Path) -> None:
        with start(tmp_path, keep=KeepLast(1)) as repo:
            (tmp_path / "segments").rmdir() if (tmp_path / "segments").exists() else None
            (tmp_path / "segments").write_text("in the way")
            given = [{"t": noise(MIB, n)} for n in range(3)]
            for tensors in given:
                repo.save("m", tensors)
            assert repo.stats().bytes_memory == 3 * MIB
            assert all(same(repo.load(f"m@{n + 1}"), tensors) for n, tensors in enumerate(given))
            (tmp_path / "segments").unlink()
            repo.flush()
            eventually(lambda: repo.stats().bytes_memory == MIB, "the older two gone from memory")


class TestPressure:
    def test_a_history_of_ten_times_the_memory(self, cluster: object, tmp_path: Path, shards: int) -> None:
        store = 24 * PART
        given = {n: {"a": noise(5 * PART, n), "b": weights(PART // 4, n)} for n in range(40 * shards)}
        with start(tmp_path, shards=shards, store_bytes=store) as repo:
            names = [f"m{n % 5}" for n in given]
            refs = [repo.save(names[n], tensors).ref for n, tensors in given.items()]
            assert repo.stats().bytes_memory <= store * shards
            order = np.random.default_rng(0).permutation(len(refs))[:20]
            for n in order:
                assert same(repo.load(refs[n]), given[int(n)])
            for stats in repo.stats().shards:
                assert stats.bytes_allocated <= store
            repo.flush()
            check(repo)

    def test_held_arrays_stay_intact_when_their_segment_leaves(self, cluster: object, tmp_path: Path) -> None:
        with start(tmp_path, store_bytes=24 * PART) as repo:
            held = []
            for n in range(3):
                repo.save("m", {"t": noise(5 * PART, n)}, durability="disk")
                held.append(repo.load(f"m@{n + 1}")["t"])
            for n in range(3, 12):
                repo.save("m", {"t": noise(5 * PART, n)}, durability="disk")
            assert all(np.array_equal(array, noise(5 * PART, n)) for n, array in enumerate(held))
            assert all(np.array_equal(repo.load(f"m@{n + 1}")["t"], noise(5 * PART, n)) for n in range(4))
            assert all(np.array_equal(array, noise(5 * PART, n)) for n, array in enumerate(held))

    def test_readers_wait_for_each_other_where_not_all_fit_at_once(self, cluster: object, tmp_path: Path) -> None:
        with start(tmp_path, store_bytes=24 * PART) as repo:
            for n in range(5):
                repo.save("m", {"t": noise(10 * PART, n)}, durability="disk")
            outcomes: list[object] = []

            def read(n: int) -> None:
                try:
                    outcomes.append(np.array_equal(repo.load(f"m@{n % 5 + 1}")["t"], noise(10 * PART, n % 5)))
                except TensorVineError as exc:
                    outcomes.append(exc)

            threads = [threading.Thread(target=read, args=(n,)) for n in range(10)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(100)
            assert outcomes == [True] * 10

    def test_a_load_that_cannot_fit_says_so(self, cluster: object, tmp_path: Path) -> None:
        with start(tmp_path, store_bytes=24 * PART) as repo:
            tensors: dict[str, np.ndarray] = {}
            for n in range(5):
                tensors[f"t{n}"] = noise(8 * PART, n)
                repo.save("m", tensors, durability="disk")
            with pytest.raises(StoreFullError, match="store_bytes"):
                repo.load("m", timeout=30)
            repo.load("m", tensors=["t1", "t2"])
            with pytest.raises(StoreFullError, match="store_bytes"):
                repo.load("m", timeout=30)
            assert same(repo.load("m", tensors=["t3"]), {"t3": tensors["t3"]})
            assert same(repo.load("m", tensors=["t0", "t4"]), {k: tensors[k] for k in ("t0", "t4")})


class TestCompaction:
    def test_a_file_that_is_mostly_dead_is_written_anew(self, cluster: object, tmp_path: Path, shards: int) -> None:
        first = {"a": weights(MIB // 8, 1), "b": noise(2 * MIB, 2), "c": np.arange(9)}
        second = {**first, "b": noise(100, 3)}
        with start(tmp_path, shards=shards, codec=Shuffle() | Zstd()) as repo:
            base = repo.save("m", first, durability="disk").ref
            child = repo.save("m", second, durability="disk").ref
            repo.retire(base)
            eventually(lambda: repo.stats().bytes_disk < MIB, "the file is smaller")
            eventually(lambda: sum(f.stat().st_size for f in segments(tmp_path)) < MIB, "the old file is gone")
            assert same(repo.load(child), second)
            assert repo.verify() == []
        with start(tmp_path, shards=3 - shards) as repo:
            assert same(repo.load(child), second)
            assert repo.verify() == []
            repo.retire(child)
            eventually(lambda: segments(tmp_path) == [], "nothing left")


@pytest.fixture(scope="class")
def cold(cluster: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Repository, dict]]:
    """A repository that was started on a path with one large version."""
    path = tmp_path_factory.mktemp("cold")
    tensors = {f"t{n}": noise(3 * MIB, n) for n in range(6)} | {"small": np.arange(5)}
    with start(path) as repo:
        repo.save("m", tensors, durability="disk")
        assert len(segments(path)) == 1
    with start(path) as repo:
        yield repo, tensors


class TestPartialReads:
    def test_one_tensor_of_a_cold_version_brings_only_that(self, cold: tuple[Repository, dict]) -> None:
        repo, tensors = cold
        assert repo.stats().bytes_memory == 0
        assert np.array_equal(repo.load("m", tensors=["t3"])["t3"], tensors["t3"])
        assert repo.stats().bytes_memory == 3 * MIB
        assert np.array_equal(repo.load("m", tensors=["t3"])["t3"], tensors["t3"])
        assert repo.stats().bytes_memory == 3 * MIB

    def test_several_readers_at_once(self, cold: tuple[Repository, dict]) -> None:
        repo, tensors = cold
        other = Repository.connect(repo.name)
        wrong: list[str] = []

        def read(client: Repository, names: list[str] | None) -> None:
            wanted = {k: tensors[k] for k in names} if names else tensors
            if not same(client.load("m", tensors=names), wanted):
                wrong.append(f"{names}")

        picks = [["t0", "small"], None, ["t5"], ["t1", "t2"], ["t4"], None]
        threads = [threading.Thread(target=read, args=(c, p)) for p in picks for c in (repo, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        other.close()
        assert wrong == []
        assert repo.stats().bytes_memory == sum(t.nbytes for t in tensors.values())


STRANGE = {
    "bool": np.arange(1000) % 3 == 0,
    "int64": np.arange(-500, 500),
    "uint8": noise(70_000, 1),
    "scalar": np.array(2.5, np.float32),
    "empty": np.zeros((3, 0, 2), np.float32),
    "constant": np.full(5000, 0.1, np.float32),
    "nan": np.array([0.0, np.nan, 1.0] * 100, np.float32),
    "inf": np.array([0.0, -np.inf, np.inf, 1.0] * 100, np.float32),
    "all_nan": np.full(300, np.nan, np.float64),
    "tiny": np.array([1e-45, 0, -1e-45] * 30, np.float32),
    "huge": np.array([3e38, -3e38, 1] * 30, np.float32),
    "complex": np.exp(1j * np.arange(300)).astype(np.complex64),
    "negative_zero": np.array([-0.0, 0.0, 1.0], np.float32),
    "bfloat16": weights(3000).astype(ml_dtypes.bfloat16).reshape(30, 100),
    "float8": weights(3000).astype(ml_dtypes.float8_e4m3fn),
    "bits16": bits(np.empty(3000, np.float16), 4),
}
EXACT = {"bool", "int64", "uint8", "empty", "constant", "all_nan", "complex"}


class TestStrangeTensors:
    @pytest.mark.parametrize(
        "codec",
        [None, Delta() | Shuffle() | Zstd(), Quantize(8) | Zstd(), Quantize(3, "channel")],
        ids=str,
    )
    def test_they_come_back_from_disk(self, cluster: object, tmp_path: Path, codec: object) -> None:
        with start(tmp_path, codec=codec) as repo:
            for n in range(2):
                changed = {k: v if k in EXACT else -v for k, v in STRANGE.items()} if n else STRANGE
                repo.save("m", changed, inherit=None, durability="disk")
        with start(tmp_path, codec=codec) as repo:
            assert repo.verify() == []
            for ref, expected in (("m@1", STRANGE), ("m@2", changed)):
                loaded = repo.load(ref)
                exact = expected.keys() if codec is None or codec.lossless else EXACT
                assert same({k: loaded[k] for k in exact}, {k: expected[k] for k in exact})
                for name, array in expected.items():
                    assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)
                    if name not in exact:
                        wide, found = array.astype(np.float64), loaded[name].astype(np.float64)
                        finite = np.isfinite(wide)
                        assert np.array_equal(found[~finite], wide[~finite], equal_nan=True)
                        span = np.ptp(wide[finite])
                        assert np.abs(found[finite] - wide[finite]).max() <= span / 7 / 2 * 1.01
            assert repo.verify() == []
