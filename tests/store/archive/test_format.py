"""The files as docs/format.md describes them, read with PyArrow, DuckDB and Polars and no TensorVine code.

Rules
- What reads (`Reader` and the functions beside it) uses the document, general libraries and nothing else.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
import xxhash
import zstandard
from tensorvine.store.archive.archive import Archive
from tensorvine.store.archive.encoding import encode_tensors
from tensorvine.store.archive.manifestfile import Manifest
from tensorvine.store.codecs.compress import Zstd
from tensorvine.store.codecs.quantize import Quantize
from tensorvine.store.refs import ModelRef
from tensorvine.store.versions.manifest import Header, TensorEntry

from tests.support.crash import retired, tensor_of

DOCUMENT = (Path(__file__).parents[3] / "docs/format.md").read_text()
ARRAYS = {
    "dense/kernel": np.arange(12, dtype=np.float32).reshape(3, 4),
    "dense/bias": np.array([1.5, -2], ml_dtypes.bfloat16),
    "step": np.array(7, np.int64),
    "mask": np.array([[True, False, True]]),
    "empty": np.zeros((0, 3), np.float16),
    "naïve/größe": np.full(1000, 3, np.uint8),
}
PACKED = np.zeros(5000, np.float32)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions, of which the second has one tensor of its own, compressed; and a third that was retired."""
    folder = tmp_path_factory.mktemp("repository")
    archive = Archive(str(folder), shards=1)
    first, second = ModelRef("nas/a", 1), ModelRef("b", 2)
    tensors = [tensor_of(10 * i, name, array) for i, (name, array) in enumerate(ARRAYS.items())]
    for generation in (0, 1):
        archive.write_segment((0, 0xAB), generation, *encode_tensors(None, tensors))
    entries = {
        tensor.name: TensorEntry(tensor.dtype, tensor.shape, tensor.data.nbytes, None, (0, 0xAB), tensor.slot)
        for tensor in tensors
    }
    header = Header(
        ref=first,
        parent=None,
        quality=0.5,
        metadata='{"epoch": 3}',
        created_ns=1_700_000_000_000_000_000,
        graph_key=b"\xca\xfe",
        bytes_owned=1,
        bytes_total=2,
        codec="zstd(3)",
    )
    layers = {"dense/kernel": "dense", "dense/bias": "dense"}
    archive.write_manifest(Manifest(header, ('{"layers": []}', "recipe"), entries, {}), layers)
    archive.write_segment((0, 3), 0, *encode_tensors(Zstd(), [tensor_of(4, "packed", PACKED)]))
    entries = {name: dataclasses.replace(entry, owner=first) for name, entry in entries.items()}
    entries["packed"] = TensorEntry("float32", (5000,), PACKED.nbytes, None, (0, 3), 4)
    header = Header(
        ref=second,
        parent=first,
        quality=None,
        metadata="{}",
        created_ns=1,
        graph_key=b"",
        bytes_owned=1,
        bytes_total=2,
        codec=None,
    )
    archive.write_manifest(Manifest(header, ("{}", None), entries, {((0, 3), 4): (((0, 0xAB), 0),)}), {})
    archive.write_manifest(retired(ModelRef("b", 1)), {})
    return folder


# ---- what the document says -------------------------------------------------------------------------------


def header_of(path: Path) -> dict[str, Any]:
    return json.loads(pa.ipc.open_file(path).schema.metadata[b"tensorvine"])


def segment_path(folder: Path, serial: str) -> Path:
    generations = [int(path.name.split(".")[1]) for path in (folder / "segments").glob(f"{serial}.*.arrow")]
    return folder / "segments" / f"{serial}.{max(generations)}.arrow"


def padded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def array_of(data: bytes, dtype: str, shape: list[int]) -> np.ndarray:
    return np.frombuffer(data, getattr(ml_dtypes, dtype, dtype)).reshape(shape)


class Reader:
    """Reads tensors of a version by position."""

    def __init__(self, folder: Path, name: str, version: int) -> None:
        self.folder = folder
        path = folder / "manifests" / f"{name}@{version}.arrow"
        self.header = header_of(path)
        self.rows = {row["name"]: row for row in pa.ipc.open_file(path).read_all().to_pylist()}

    def stored(self, name: str) -> tuple[dict[str, Any], bytes]:
        wanted = self.rows[name]
        path = segment_path(self.folder, wanted["segment"])
        at = int(header_of(path)["data_at"])
        assert at % 64 == 0
        rows = pa.ipc.open_file(path).read_all().drop_columns(["data"]).to_pylist()
        for row in rows:
            if row["slot"] == wanted["slot"]:
                return row, path.read_bytes()[at : at + row["stored"]]
            at += padded(row["stored"])
        raise KeyError(name)

    def tensor(self, name: str) -> np.ndarray:
        row, data = self.stored(name)
        assert xxhash.xxh3_128_hexdigest(data) == row["checksum"]
        assert row["codec"] == ""
        return array_of(data, row["dtype"], row["shape"])


# ---- tests ------------------------------------------------------------------------------------------------


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
        zstandard = pytest.importorskip("zstandard")
        row, data = Reader(repository, "b", 2).stored("packed")
        assert row["codec"] == "zstd(3)"
        assert xxhash.xxh3_128_hexdigest(data) == row["checksum"]
        plain = zstandard.ZstdDecompressor().decompressobj().decompress(data)
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
        header = dict(reader.header)
        architecture = json.loads(zlib.decompress(base64.b64decode(header.pop("architecture"))))
        assert architecture == ['{"layers": []}', "recipe"]
        del header["checksum"]
        assert header == {
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


class TestQuantised:
    """Payloads of `quantize`, decoded with NumPy and zstandard as the table of codecs says."""

    @pytest.mark.parametrize("bits", [2, 3, 4, 5, 7, 8, 16])
    @pytest.mark.parametrize("tail", [None, Zstd(3)])
    @pytest.mark.parametrize("kind", ["even", "noisy"])
    def test_codes_minima_and_scales_are_where_the_document_says(self, bits: int, tail: Any, kind: str) -> None:
        rng = np.random.default_rng(bits)
        values = (rng.random(20_000) if kind == "even" else rng.standard_normal(20_000)).astype(np.float32)
        codec = Quantize(bits) | tail if tail is not None else Quantize(bits)
        encoded = codec.encode(values)
        first, *rest = encoded.codec.split("|")
        assert first == f"quantize({bits},tensor)"
        payload = bytes(encoded.data)
        if rest:
            assert rest == ["zstd(3)"]
            payload = zstandard.ZstdDecompressor().decompressobj().decompress(payload)
        found = self.decoded(payload, bits, len(values))
        np.testing.assert_allclose(found, codec.decode(encoded), rtol=1e-6, atol=1e-6)
        assert np.abs(found - values).max() <= encoded.error + 1e-6

    @staticmethod
    def decoded(payload: bytes, bits: int, count: int) -> np.ndarray:
        low, numbers = payload[-1], np.frombuffer(payload[-9:-1], "<f4")
        codes, place = np.zeros(count, np.int64), 0
        if low < bits:
            codes += np.frombuffer(payload[:count], np.uint8).astype(np.int64) << low
            place = count
        if low == 16:
            codes += np.frombuffer(payload[place : place + 2 * count], "<u2")
        elif low:
            packed = np.frombuffer(payload[place : place + -(-count * low // 8)], np.uint8)
            single = np.unpackbits(packed, bitorder="little", count=count * low).reshape(count, low)
            codes += single.astype(np.int64) @ (1 << np.arange(low))
        return numbers[0] + codes * numbers[1].astype(np.float64)
