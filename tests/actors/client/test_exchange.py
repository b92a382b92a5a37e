"""`export` and `import_` of a running repository: what other tools read and write comes through whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tensorvine.actors import Repository
from tensorvine.store import Quantize
from tensorvine.store.errors import CorruptDataError, GraphError, StorageError

from tests.support.disk import chain, same, start, weights

pytestmark = pytest.mark.timeout(240)

GRAPH = chain(["Dense", "Conv"])
TENSORS = {
    "l0/w": weights(40_000, 1).reshape(200, 200),
    "l1/w": np.array(2.5, np.float64),
    "half": weights(30).astype(ml_dtypes.bfloat16),
    "none": np.zeros((0, 3), np.int16),
}


@pytest.fixture(scope="module")
def repo(cluster: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    with start(tmp_path_factory.mktemp("exchange"), codec=Quantize(8)) as started:
        started.save("m", TENSORS, graph=GRAPH, quality=0.5, metadata={"epoch": 3}, durability="disk")
        yield started


class TestRoundTrips:
    @pytest.mark.parametrize("suffix", [".safetensors", ".arrow"])
    def test_with_all_that_is_known_of_it(self, repo: Repository, tmp_path: Path, suffix: str) -> None:
        file = tmp_path / f"m{suffix}"
        repo.export("m", file)
        ref = repo.import_(file, f"copy{suffix}", durability="disk").ref
        assert same(repo.load(ref), TENSORS)
        assert repo.graph(ref) == GRAPH
        assert (repo.info(ref).quality, repo.info(ref).metadata) == (0.5, {"epoch": 3})
        again = repo.import_(file, f"copy{suffix}", quality=0.75, metadata={}).ref
        assert (repo.info(again).quality, repo.info(again).metadata) == (0.75, {})
        assert repo.owners(again)["l0/w"] == ref

    def test_safetensors_of_other_tools(self, repo: Repository, tmp_path: Path) -> None:
        numpy = pytest.importorskip("safetensors.numpy")
        given = {"a": weights(100, 3), "b": np.arange(7)}
        numpy.save_file(given, tmp_path / "theirs.safetensors")
        assert same(repo.load(repo.import_(tmp_path / "theirs.safetensors", "theirs").ref), given)
        repo.export("theirs", tmp_path / "ours.safetensors")
        assert same(numpy.load_file(tmp_path / "ours.safetensors"), given)

    @pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # TensorFlow's
    def test_keras_weights(self, repo: Repository, tmp_path: Path) -> None:
        keras = pytest.importorskip("keras")
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="d"), keras.layers.Dense(2)])
        repo.save_model("keras", model)
        file = tmp_path / "k.weights.h5"
        repo.export("keras", file)
        other = keras.models.clone_model(model)
        other.load_weights(file)
        for mine, theirs in zip(model.weights, other.weights, strict=True):
            assert np.array_equal(mine.numpy(), theirs.numpy())
        loaded = repo.load(repo.import_(file, "weights").ref)
        found = sorted((a.shape, a.tobytes()) for a in loaded.values())
        assert found == sorted((tuple(w.shape), w.numpy().tobytes()) for w in model.weights)


class TestBadFiles:
    @pytest.mark.parametrize("suffix", [".safetensors", ".arrow", ".weights.h5"])
    def test_missing_empty_and_damaged(self, repo: Repository, tmp_path: Path, suffix: str) -> None:
        file = tmp_path / f"bad{suffix}"
        with pytest.raises(StorageError, match=f"{file}.*No such file"):
            repo.import_(file, "bad")
        for content in (b"", b"x" * 1000):
            file.write_bytes(content)
            with pytest.raises(CorruptDataError, match=f"{file}"):
                repo.import_(file, "bad")
        if suffix != ".weights.h5":
            repo.export("m", file)
            file.write_bytes(file.read_bytes()[:-3000])
            with pytest.raises(CorruptDataError, match=f"{file}"):
                repo.import_(file, "bad")
        assert [ref for ref in repo.models() if ref.name == "bad"] == []

    def test_a_suffix_that_nothing_has(self, repo: Repository, tmp_path: Path) -> None:
        for name in ("m.pickle", "m", "m.h5"):
            with pytest.raises(StorageError, match=r"\.safetensors"):
                repo.export("m", tmp_path / name)
            with pytest.raises(StorageError, match=r"\.safetensors"):
                repo.import_(tmp_path / name, "bad")

    def test_a_folder_that_is_missing_and_a_version_that_is_no_keras_model(
        self, repo: Repository, tmp_path: Path
    ) -> None:
        with pytest.raises(StorageError, match="expected a folder"):
            repo.export("m", tmp_path / "missing" / "m.arrow")
        with pytest.raises(GraphError, match="Keras"):
            repo.export("m", tmp_path / "m.weights.h5")
        assert not list(tmp_path.iterdir())
