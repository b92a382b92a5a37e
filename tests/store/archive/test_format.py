"""The files as docs/reference/format.md describes them, read with PyArrow, DuckDB and Polars and no TensorVine code.

Rules
- What reads (`plain_reader`) uses the document, general libraries and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
import xxhash
from tensorvine.store.archive.archive import Archive
from tensorvine.store.archive.encoding import encode_tensors
from tensorvine.store.archive.manifestfile import Manifest
from tensorvine.store.codecs.blocks import Encoded
from tensorvine.store.codecs.codec import decode, from_spec
from tensorvine.store.codecs.compress import Zstd
from tensorvine.store.errors import CodecError
from tensorvine.store.refs import ModelRef
from tensorvine.store.versions.manifest import Header, TensorEntry

from tests.store.archive.plain_reader import (
    BLOCK,
    STAGES,
    Reader,
    array_of,
    decoded,
    dtype_of,
    header_of,
    padded,
    segment_path,
    unpacked,
)
from tests.support.crash import retired, tensor_of

DOCUMENT = (Path(__file__).parents[3] / "docs/reference/format.md").read_text()
ARRAYS = {
    "dense/kernel": np.arange(12, dtype=np.float32).reshape(3, 4),
    "dense/bias": np.array([1.5, -2], ml_dtypes.bfloat16),
    "step": np.array(7, np.int64),
    "mask": np.array([[True, False, True]]),
    "empty": np.zeros((0, 3), np.float16),
    "naïve/größe": np.full(1000, 3, np.uint8),
}
PACKED = np.zeros(5000, np.float32)


def header(ref: ModelRef, **facts: Any) -> Header:
    said: dict[str, Any] = {
        "parent": None,
        "quality": None,
        "metadata": "{}",
        "created_ns": 1,
        "graph_key": b"",
        "bytes_owned": 1,
        "bytes_total": 2,
        "codec": None,
    }
    return Header(ref=ref, **said | facts)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions, of which the second has one tensor of its own, compressed; and a third that was retired."""
    folder = tmp_path_factory.mktemp("repository")
    archive = Archive(str(folder))
    first, second = ModelRef("nas/a", 1), ModelRef("b", 2)
    tensors = [tensor_of(10 * i, name, array) for i, (name, array) in enumerate(ARRAYS.items())]
    for generation in (0, 1):
        archive.write_segment((0, 0xAB), generation, *encode_tensors(None, tensors))
    entries = {
        tensor.name: TensorEntry(tensor.dtype, tensor.shape, tensor.data.nbytes, None, (0, 0xAB), tensor.slot)
        for tensor in tensors
    }
    facts = {
        "quality": 0.5,
        "metadata": '{"epoch": 3}',
        "created_ns": 1_700_000_000_000_000_000,
        "graph_key": b"\xca\xfe",
    }
    said = header(first, codec="zstd(3)", **facts)
    layers = {"dense/kernel": "dense", "dense/bias": "dense"}
    archive.write_manifest(Manifest(said, ('{"layers": []}', "recipe"), entries, {}), layers)
    archive.write_segment((0, 3), 0, *encode_tensors(Zstd(), [tensor_of(4, "packed", PACKED)]))
    entries = {name: dataclasses.replace(entry, owner=first) for name, entry in entries.items()}
    entries["packed"] = TensorEntry("float32", (5000,), PACKED.nbytes, None, (0, 3), 4)
    said = header(second, parent=first)
    archive.write_manifest(Manifest(said, ("{}", None), entries, {((0, 3), 4): (((0, 0xAB), 0),)}), {})
    archive.write_manifest(retired(ModelRef("b", 1)), {})
    return folder


class TestPyArrow:
    @pytest.mark.parametrize(("name", "version"), [("nas/a", 1), ("b", 2)])
    def test_every_tensor_can_be_read_by_position(self, repository: Path, name: str, version: int) -> None:
        reader = Reader(repository, name, version)
        for tensor, array in ARRAYS.items():
            found = reader.tensor(tensor)
            assert found.dtype == array.dtype
            assert found.shape == array.shape
            assert found.tobytes() == array.tobytes()

    def test_the_data_column_has_the_same_bytes(self, repository: Path) -> None:
        reader = Reader(repository, "nas/a", 1)
        table = pa.ipc.open_file(segment_path(repository, "ab")).read_all()
        for row in table.to_pylist():
            assert len(row["data"]) == padded(row["stored"])
            assert row["data"][: row["stored"]] == reader.stored(row["name"])[1]
            assert row["stored"] == row["nbytes"]
            assert row["digest"] == row["checksum"]
            assert row["error"] == 0
            assert row["base"] is None

    def test_an_encoded_tensor_says_how(self, repository: Path) -> None:
        reader = Reader(repository, "b", 2)
        row, data = reader.stored("packed")
        assert row["codec"] == "zstd(3)"
        assert xxhash.xxh3_128_hexdigest(data) == row["checksum"]
        plain = decoded(data, "zstd(3)", "float32", [5000]).tobytes()
        assert plain == PACKED.tobytes()
        assert xxhash.xxh3_128_hexdigest(plain) == row["digest"]

    def test_the_rows_of_a_segment_have_the_checksum_of_their_json(self, repository: Path) -> None:
        columns = [
            "slot",
            "name",
            "layer",
            "dtype",
            "shape",
            "nbytes",
            "codec",
            "stored",
            "checksum",
            "digest",
            "error",
            "base",
        ]
        for path in (repository / "segments").iterdir():
            rows = pa.ipc.open_file(path).read_all().to_pylist()
            text = json.dumps([[row[column] for column in columns] for row in rows])
            assert xxhash.xxh3_128_hexdigest(text.encode()) == header_of(path)["rows"]

    def test_a_manifest_has_the_checksum_of_its_bytes(self, repository: Path) -> None:
        for path in (repository / "manifests").rglob("*.arrow"):
            checksum = header_of(path)["checksum"]
            content = path.read_bytes()
            assert content.count(checksum.encode()) > 0
            assert xxhash.xxh3_128_hexdigest(content.replace(checksum.encode(), b"0" * 32)) == checksum

    def test_a_manifest_says_what_the_version_is(self, repository: Path) -> None:
        reader = Reader(repository, "nas/a", 1)
        said = dict(reader.header)
        assert reader.architecture() == ['{"layers": []}', "recipe"]
        del said["architecture"], said["checksum"]
        assert said == {
            "format": 1,
            "kind": "manifest",
            "ref": "nas/a@1",
            "state": "live",
            "parent": None,
            "quality": 0.5,
            "metadata": '{"epoch": 3}',
            "created_ns": 1_700_000_000_000_000_000,
            "graph_key": "cafe",
            "bytes_owned": 1,
            "bytes_total": 2,
            "codec": "zstd(3)",
        }
        assert {name: row["layer"] for name, row in reader.rows.items() if row["layer"]} == {
            "dense/kernel": "dense",
            "dense/bias": "dense",
        }
        other = Reader(repository, "b", 2)
        assert other.header["parent"] == "nas/a@1"
        assert {name: row["owner"] for name, row in other.rows.items()} == {
            **dict.fromkeys(ARRAYS, "nas/a@1"),
            "packed": "b@2",
        }
        assert other.rows["packed"]["bases"] == ["ab/0"]
        gone = Reader(repository, "b", 1)
        assert (gone.header["state"], gone.rows) == ("retired", {})

    def test_the_files_are_where_the_document_says(self, repository: Path) -> None:
        files = {str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file()}
        assert files == {
            "repository.json",
            "manifests/nas/a@1.arrow",
            "manifests/b@1.arrow",
            "manifests/b@2.arrow",
            "segments/ab.0.arrow",
            "segments/ab.1.arrow",
            "segments/3.0.arrow",
        }
        assert json.loads((repository / "repository.json").read_text()) == {"format": 1}


class TestOtherTools:
    def test_duckdb_finds_a_tensor_by_sql(self, repository: Path) -> None:
        duckdb = pytest.importorskip("duckdb")
        with duckdb.connect() as connection:
            manifest = pa.ipc.open_file(repository / "manifests/nas/a@1.arrow").read_all()
            segment = pa.ipc.open_file(segment_path(repository, "ab")).read_all()
            connection.register("manifest", manifest)
            connection.register("segment", segment)
            found = connection.execute(
                "SELECT m.name, s.dtype, s.shape, s.stored, s.data FROM manifest m JOIN segment s USING (slot)"
            ).fetchall()
            totals = connection.execute("SELECT layer, sum(nbytes) FROM manifest GROUP BY layer ORDER BY 1").fetchall()
        assert {
            name: array_of(data[:stored], dtype, shape).tobytes() for name, dtype, shape, stored, data in found
        } == {name: array.tobytes() for name, array in ARRAYS.items()}
        assert totals == [("dense", 52), (None, 8 + 3 + 0 + 1000)]

    def test_polars_reads_the_files_themselves(self, repository: Path) -> None:
        polars = pytest.importorskip("polars")
        manifest = polars.read_ipc(repository / "manifests/nas/a@1.arrow")
        segment = polars.read_ipc(segment_path(repository, "ab"))
        joined = manifest.join(segment, on="slot")
        found = {
            row["name"]: array_of(row["data"][: row["stored"]], row["dtype"], row["shape"])
            for row in joined.iter_rows(named=True)
        }
        assert {name: array.tobytes() for name, array in found.items()} == {
            name: array.tobytes() for name, array in ARRAYS.items()
        }
        assert manifest.filter(polars.col("layer") == "dense")["nbytes"].sum() == 52


class TestDocument:
    """The document and the files have the same columns, types and header keys."""

    @pytest.mark.parametrize(
        ("heading", "file"), [("Segments", "segments/ab.1.arrow"), ("Manifests", "manifests/b@2.arrow")]
    )
    def test_every_column_is_described(self, repository: Path, heading: str, file: str) -> None:
        section = re.split("\n##", DOCUMENT.split(f"\n## {heading}\n")[1])[0]
        rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
        described: dict[str, str] = {}
        for names, types in rows:
            columns = re.findall("`([a-z]+)`", names)
            kinds = [kind.strip() for kind in types.replace("&lt;", "<").replace("&gt;", ">").split(",")]
            described |= dict(zip(columns, kinds * len(columns) if len(kinds) == 1 else kinds, strict=True))
        schema = pa.ipc.open_file(repository / file).schema
        assert list(described) == schema.names
        for field in schema:
            kind = str(field.type).replace("element: ", "").replace("item: ", "")
            kind = kind.replace("string", "utf8").replace("double", "float64")
            assert described[field.name] in ("", kind)  # as above, in the other table

    @pytest.mark.parametrize(
        ("heading", "file"), [("Segments", "segments/ab.1.arrow"), ("Manifests", "manifests/b@2.arrow")]
    )
    def test_every_key_of_a_header_is_described(self, repository: Path, heading: str, file: str) -> None:
        section = DOCUMENT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
        (paragraph,) = (line for line in section.splitlines() if line.startswith("Header:"))
        described = set(re.findall("`([a-z_]+)`", paragraph))
        assert set(header_of(repository / file)) - {"format"} <= described
        assert "`format` is 1 in both" in DOCUMENT


# ---- codecs -----------------------------------------------------------------------------------------------

TAILS = ["", "shuffle", "zstd(3)", "gzip(1)", "shuffle|zstd(3)", "zstd(3)|shuffle", "shuffle|shuffle"]
SHAPES = [(), (0, 3), (5,), (3, 1000), (BLOCK + 3,)]
DTYPES = ["bool", "int8", "float16", "bfloat16", "float8_e4m3fn", "int4", "float32", "complex64", "complex128"]


def tensor(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return numbers that compressors shrink."""
    raw = np.random.default_rng(1).integers(0, 2, (*shape, dtype_of(dtype).itemsize), np.uint8)
    return np.ascontiguousarray(raw).view(dtype_of(dtype))[..., 0]


def check(encoded: Encoded, base: np.ndarray | None = None) -> None:
    """Hold this reader's array against the store's, bit by bit."""
    found = decoded(bytes(encoded.data), encoded.codec, encoded.dtype, list(encoded.shape), base)
    expected = decode(encoded, base)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), encoded
    assert found.tobytes() == expected.tobytes(), encoded


class TestByteStages:
    @pytest.mark.parametrize("tail", TAILS)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_every_dtype(self, tail: str, shape: tuple[int, ...]) -> None:
        done: set[str] = set()
        for dtype in DTYPES:
            given = tensor(dtype, shape)
            encoded = from_spec(tail).encode(given)
            check(encoded)
            assert decode(encoded).tobytes() == given.tobytes()
            done.add(encoded.codec)
        assert tail in done or not tail or len(shape) == 0 or shape in ((0, 3), (5,))


class TestDelta:
    """Each way of telling the places; of elements of 1, 2, 4, 8 and 16 bytes."""

    CHANGED: ClassVar = (
        slice(0, 0),
        slice(10, 200, 7),
        slice(3, None, 300),
        [0, -1],
        [n for n in range(3000) if n % 3],
        slice(0, None, 3),
        slice(None),
    )
    """Elements: with gaps of one, two or four bytes; the last ones are stored as a mask, and as a difference of all."""

    @pytest.mark.parametrize("tail", ["", *(f"|{tail}" for tail in TAILS if tail)])
    def test_every_layout(self, tail: str) -> None:
        widths: set[int | str] = set()
        codec = from_spec(f"delta{tail}")
        for dtype in ("uint8", "bfloat16", "float32", "int64", "complex128"):
            old = tensor(dtype, (BLOCK + 5 if dtype == "uint8" else 3001,))
            for places in self.CHANGED:
                new = old.copy()
                new.view(np.uint8).reshape(len(new), -1)[places, -1] ^= 1
                encoded = codec.encode(new, old)
                if encoded.codec.startswith("delta"):
                    check(encoded, old)
                    assert decode(encoded, old).tobytes() == new.tobytes()
                    widths.add(self.layout(encoded))
        assert {0, 1, 2, 4} <= widths
        assert ("all" in widths) == any(name in tail for name in ("zstd", "gzip"))

    @staticmethod
    def layout(encoded: Encoded) -> int | str:
        """Return the bytes of a gap, 0 for a mask, or "all"."""
        _, plain = unpacked(bytes(encoded.data), encoded.codec, encoded.dtype)
        return "all" if len(plain) == dtype_of(encoded.dtype).itemsize * encoded.shape[0] else plain[-1]

    def test_gaps_of_eight_bytes(self) -> None:
        """No test has a tensor that is long enough; so the payload is written here."""
        old = np.arange(20, dtype=np.int16)
        payload = np.array([7, 9], "<u2").tobytes() + np.array([3, 14], "<u8").tobytes()
        payload += (2).to_bytes(8, "little") + b"\x08"
        encoded = Encoded("delta", "int16", (20,), np.frombuffer(payload, np.uint8))
        check(encoded, old)
        assert np.flatnonzero(decode(encoded, old) != old).tolist() == [3, 18]


class TestQuantised:
    @pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8, 16])
    @pytest.mark.parametrize("per", ["tensor", "channel", 64, 1 << 30])
    def test_every_layout(self, bits: int, per: Any) -> None:
        rng = np.random.default_rng(bits)
        even, noisy = rng.random((90, 70)), rng.standard_normal((90, 70)) ** 3
        lows: set[int] = set()
        for tail in ("", "|zstd(3)", "|gzip(1)", "|shuffle|zstd(3)", "|shuffle"):
            for values in (even, noisy, noisy[0], even[0, 0]):
                for dtype in ("float16", "bfloat16", "float32", "float64"):
                    given = np.asarray(values).astype(dtype_of(dtype))
                    encoded = from_spec(f"quantize({bits},{per}){tail}").encode(given)
                    check(encoded)
                    if encoded.codec.startswith("quantize"):
                        found = decoded(bytes(encoded.data), encoded.codec, dtype, list(given.shape))
                        assert np.abs(found.astype("f8") - given.astype("f8")).max() == encoded.error
                        lows.add(unpacked(bytes(encoded.data), encoded.codec, dtype)[1][-1])
        assert bits in lows
        assert bits == 16 or lows & set(range(bits))


def test_every_stage_of_the_page_is_read_here() -> None:
    section = DOCUMENT.split("\n### Codecs\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    described = [name for row in rows for name in re.findall("`([a-z]+)", row)]
    assert described == list(STAGES)
    with pytest.raises(CodecError, match=", ".join(sorted(described))):
        from_spec("unknown")


class TestChains:
    """A version whose tensors are encoded in every way, from the manifest on."""

    def test_deltas_of_deltas_are_read_by_position(self, tmp_path: Path) -> None:
        archive = Archive(str(tmp_path))
        rng = np.random.default_rng(0)
        codec = from_spec("delta|shuffle|zstd(3)")
        arrays = [rng.standard_normal(BLOCK // 16).astype(np.float32)]
        entries: dict[str, TensorEntry] = {}
        bases: dict[Any, tuple[Any, ...]] = {}
        chain: tuple[Any, ...] = ()
        for n in range(4):
            if n:
                arrays.append(arrays[-1].copy())
                arrays[-1][rng.integers(0, len(arrays[-1]), 50)] *= -1
            slots = [tensor_of(0, "pad", np.arange(n, dtype=np.uint8)), tensor_of(n + 7, "w", arrays[n])]
            if n:
                slots[1] = tensor_of(n + 7, "w", arrays[n], (chain[0], arrays[n - 1]))
                bases[(0, n), n + 7] = chain
            archive.write_segment((0, n), 0, *encode_tensors(codec, slots))
            chain = (((0, n), n + 7), *chain)
            entries[f"w{n}"] = TensorEntry("float32", arrays[n].shape, arrays[n].nbytes, None, (0, n), n + 7)
        archive.write_manifest(Manifest(header(ModelRef("a/.//b", 7)), ("{}", None), entries, bases), {})
        reader = Reader(tmp_path, "a/.//b", 7)
        assert [len(row["bases"]) for row in reader.rows.values()] == [0, 1, 2, 3]
        for n, array in enumerate(arrays):
            assert reader.tensor(f"w{n}").tobytes() == array.tobytes()
