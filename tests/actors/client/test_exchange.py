"""`export` and `import_` of a running repository: what other tools read and write comes through whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
from tensorvine.actors import Repository
from tensorvine.store import Quantize
from tensorvine.store.archive import interchange
from tensorvine.store.errors import (
    CorruptDataError,
    GraphError,
    RepositoryNotFoundError,
    StorageError,
    TensorMismatchError,
)

from tests.support.disk import chain, same, start, weights
from tests.support.s3 import SECRET, S3Server

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

    def test_what_safetensors_says_of_itself(self, repo: Repository, tmp_path: Path) -> None:
        numpy, library = pytest.importorskip("safetensors.numpy"), pytest.importorskip("safetensors")
        theirs, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"

        def said(file: Path) -> dict[str, str]:
            with library.safe_open(file, "np") as opened:
                return opened.metadata()

        for own in ({"license": "mit", "größe": "é", "": ""}, {"format": "tf", "a": "b"}, {}):
            numpy.save_file({"a": weights(100, 3)}, theirs, metadata=own or None)
            ref = repo.import_(theirs, "said").ref
            assert repo.info(ref).metadata == own
            repo.export(ref, ours)
            found = said(ours)
            assert found | {"format": "pt"} | own == found
            again = repo.import_(ours, "said").ref
            assert repo.info(again).metadata == own
        numpy.save_file(numpy.load_file(ours), ours, metadata=said(ours) | {"added": "later"})
        assert repo.info(repo.import_(ours, "said").ref).metadata == {"added": "later"}

    def test_what_an_arrow_file_says_of_itself(self, repo: Repository, tmp_path: Path) -> None:
        repo.export("m", tmp_path / "m.arrow")
        table = pa.ipc.open_file(pa.BufferReader((tmp_path / "m.arrow").read_bytes())).read_all()
        table = table.replace_schema_metadata({"license": "mit", "pandas": "{}"})
        with pa.ipc.new_file(str(tmp_path / "theirs.arrow"), table.schema) as writer:
            writer.write_table(table)
        ref = repo.import_(tmp_path / "theirs.arrow", "theirs").ref
        assert repo.info(ref).metadata == {"license": "mit"}
        repo.export(ref, tmp_path / "ours.arrow")
        said = pa.ipc.open_file(pa.BufferReader((tmp_path / "ours.arrow").read_bytes())).schema.metadata
        assert (said[b"license"], b"pandas" in said) == (b"mit", False)

    def test_metadata_that_is_no_plain_text_comes_back(self, repo: Repository, tmp_path: Path) -> None:
        metadata = {"epoch": 3, "odd": "\ud800", "tensorvine.graph": "no graph", "text": "é", "format": "pt"}
        repo.save("odd", {"w": np.zeros(1)}, metadata=metadata)
        for suffix in (".safetensors", ".arrow"):
            repo.export("odd", tmp_path / f"m{suffix}")
            assert repo.info(repo.import_(tmp_path / f"m{suffix}", "odd").ref).metadata == metadata

    @pytest.mark.parametrize("suffix", [".safetensors", ".arrow"])
    def test_metadata_with_nan_of_an_older_version_is_kept(self, repo: Repository, tmp_path: Path, suffix: str) -> None:
        old, new = tmp_path / f"old{suffix}", tmp_path / f"new{suffix}"
        interchange.write(old, {"w": np.zeros(1)}, facts={"tensorvine.metadata": '{"loss": NaN, "of": [-Infinity]}'})
        for file in (old, new):
            ref = repo.import_(file, "diverged", durability="disk").ref
            assert repr(dict(repo.info(ref).metadata)) == "{'loss': nan, 'of': [-inf]}"
            repo.export(ref, new)
        with pytest.raises(TensorMismatchError, match=r"metadata\[.*\]: expected a JSON value"):
            repo.import_(old, "diverged", metadata={"loss": math.nan})

    def test_metadata_that_pandas_would_take_for_its_own(self, repo: Repository, tmp_path: Path) -> None:
        repo.save("versions", {"w": np.zeros(1)}, metadata={"pandas": "2.2.1", "torch": "2.3"})
        repo.export("versions", tmp_path / "m.arrow")
        said = pa.ipc.open_file(pa.BufferReader((tmp_path / "m.arrow").read_bytes())).schema.metadata
        assert (said[b"torch"], b"pandas" in said) == (b"2.3", False)
        ref = repo.import_(tmp_path / "m.arrow", "versions").ref
        assert repo.info(ref).metadata == {"pandas": "2.2.1", "torch": "2.3"}

    @pytest.mark.parametrize("suffix", [".safetensors", ".arrow"])
    def test_by_an_object_store(self, repo: Repository, suffix: str) -> None:
        with S3Server() as server:
            uri = server.uri(f"models/m{suffix}")
            repo.export("m", uri)
            ref = repo.import_(uri, "far").ref
            assert same(repo.load(ref), TENSORS)
            assert repo.info(ref).metadata == {"epoch": 3}
            with pytest.raises(GraphError, match=rf"s3://{server.bucket}/m\.weights\.h5: expected a Keras") as raised:
                repo.export("m", server.uri("m.weights.h5"))
            assert SECRET not in str(raised.value)

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

    @pytest.mark.parametrize(
        ("fact", "text"),
        [
            ("quality", '"good"'),
            ("quality", "1" + "0" * 400),
            ("quality", "[1]"),
            ("quality", "{"),
            ("metadata", "[1]"),
            ("metadata", "3"),
            ("metadata", "{"),
            ("graph", "[]"),
            ("graph", '{"layers": 3}'),
        ],
    )
    def test_facts_that_export_does_not_write(self, repo: Repository, tmp_path: Path, fact: str, text: str) -> None:
        numpy = pytest.importorskip("safetensors.numpy")
        file = tmp_path / "bad.safetensors"
        numpy.save_file({"a": np.zeros(1)}, file, metadata={f"tensorvine.{fact}": text})
        with pytest.raises(CorruptDataError, match=f"{file}: expected metadata written by export"):
            repo.import_(file, "bad")

    @pytest.mark.parametrize("path", ["memory://a", "fsspec+memory://a", "mock:///a", "unknown://a", "/a\0b"])
    def test_a_path_that_nobody_else_sees_starts_no_repository(self, cluster: object, path: str) -> None:
        with pytest.raises(StorageError, match="expected"):
            Repository.start("nowhere", path=path)
        with pytest.raises(RepositoryNotFoundError):
            Repository.connect("nowhere")

    def test_what_is_no_path(self, repo: Repository) -> None:
        for path in (None, 3, b"m.arrow", "a\0.arrow", "memory://m.arrow", "unknown://a/m.arrow"):
            with pytest.raises(StorageError, match="expected"):
                repo.export("m", path)  # type: ignore[arg-type]
            with pytest.raises(StorageError, match="expected"):
                repo.import_(path, "bad")  # type: ignore[arg-type]

    def test_a_suffix_that_nothing_has(self, repo: Repository, tmp_path: Path) -> None:
        for name in ("m.pickle", "m", "m.h5"):
            with pytest.raises(StorageError, match=r"\.safetensors"):
                repo.export("m", tmp_path / name)
            with pytest.raises(StorageError, match=r"\.safetensors"):
                repo.import_(tmp_path / name, "bad")

    def test_a_folder_that_is_missing_and_a_version_that_is_no_keras_model(
        self, repo: Repository, tmp_path: Path
    ) -> None:
        with pytest.raises(StorageError, match="expected an existing folder"):
            repo.export("m", tmp_path / "missing" / "m.arrow")
        with pytest.raises(GraphError, match="Keras"):
            repo.export("m", tmp_path / "m.weights.h5")
        assert not list(tmp_path.iterdir())
