"""Files of other tools that claim to be large: none takes more memory than its bytes allow, and each is refused."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pytest
import xxhash
import zstandard
from tensorvine.store.archive.interchange import read
from tensorvine.store.bounds.allowance import allowed
from tensorvine.store.errors import CorruptDataError, TensorMismatchError

from tests.support.memory import check_refused, peak_of

EMPTY = xxhash.xxh3_128_hexdigest(b"")


def table_of(count: int, **columns: object) -> pa.Table:
    """Make an Arrow file's rows of empty tensors."""
    rows = {
        "name": [f"w{number}" for number in range(count)],
        "dtype": ["uint8"] * count,
        "shape": [[0]] * count,
        "nbytes": [0] * count,
        "checksum": [EMPTY] * count,
        "data": [b""] * count,
    }
    return pa.table(rows | columns)


def write_arrow(path: Path, table: pa.Table, compression: str | None = None) -> int:
    with pa.ipc.new_file(str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    return path.stat().st_size


class TestArrow:
    @pytest.mark.parametrize("compression", ["zstd", "lz4"])
    def test_compressed_columns_are_not_decompressed_beyond_what_the_file_allows(
        self, tmp_path: Path, compression: str
    ) -> None:
        data = pa.array([bytes(150 << 20)], pa.large_binary())
        size = write_arrow(tmp_path / "m.arrow", table_of(1, data=data), compression)
        assert size < 1 << 20
        check_refused(lambda: read(tmp_path / "m.arrow"), size, r"m\.arrow: expected at most .* without compression")

    def test_a_compressed_batch_of_an_old_version_is_not_decompressed_beyond_what_the_file_allows(
        self, tmp_path: Path
    ) -> None:
        """Before Arrow 1.0, the metadata of a message said that its buffers are compressed."""
        packed = (1 << 30).to_bytes(8, "little") + zstandard.ZstdCompressor().compress(bytes(1 << 30))
        padding = 8 + -len(packed) % 8
        packed += struct.pack("<II", 0x184D2A50, padding - 8) + bytes(padding - 8)  # a frame that is skipped
        table = table_of(len(packed) // 8, nbytes=pa.array(np.frombuffer(packed, np.int64)))
        options = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V4)
        with pa.ipc.new_file(str(tmp_path / "m.arrow"), table.schema, options=options) as writer:
            writer.write_batch(table.to_batches()[0], custom_metadata={"ARROW:experimental_compression": "zstd"})
        size = (tmp_path / "m.arrow").stat().st_size
        assert size < 1 << 20
        check_refused(lambda: read(tmp_path / "m.arrow"), size, r"m\.arrow: expected at most .* without compression")

    def test_batches_that_share_bytes_are_refused(self, tmp_path: Path) -> None:
        path, small = tmp_path / "m.arrow", table_of(1).to_batches()[0]
        with pa.ipc.new_file(str(path), small.schema) as writer:
            writer.write_table(table_of(1, name=["x" * 100_000]))
            for _ in range(100):
                writer.write_batch(small)
        content = bytearray(path.read_bytes())
        first = 16 + int.from_bytes(content[12:16], "little")  # behind the schema
        block = content.rindex(first.to_bytes(8, "little"))  # in the footer, which has 24 bytes for each batch
        content[block : block + 24 * 101] = content[block : block + 24] * 101
        path.write_bytes(content)
        check_refused(
            lambda: read(path), len(content), r"m\.arrow: expected a whole Arrow file; found batches that share"
        )

    def test_a_column_that_was_added_is_not_read(self, tmp_path: Path) -> None:
        size = write_arrow(tmp_path / "m.arrow", table_of(3, more=pa.array([bytes(1 << 20)] * 3)))
        content = bytearray((tmp_path / "m.arrow").read_bytes())
        assert size > 3 << 20
        (tmp_path / "m.arrow").write_bytes(content)
        assert list(read(tmp_path / "m.arrow")[0]) == ["w0", "w1", "w2"]

    @pytest.mark.parametrize("form", ["view", "dictionary"])
    def test_texts_that_rows_share_are_not_copied_for_each(self, tmp_path: Path, form: str) -> None:
        count = 3000
        text = pa.array(["x" * (1 << 20)])
        shared = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), text)
        if form == "view":
            one = text.cast(pa.string_view())
            views = pa.py_buffer(one.buffers()[1].to_pybytes() * count)
            shared = pa.Array.from_buffers(pa.string_view(), count, [None, views, one.buffers()[2]])
        size = write_arrow(tmp_path / "m.arrow", table_of(count, dtype=shared))
        assert size < 3 << 20
        check_refused(lambda: read(tmp_path / "m.arrow"), size, r"m\.arrow: expected rows that share no bytes")

    def test_dictionaries_and_views_of_texts_are_read(self, tmp_path: Path) -> None:
        table = table_of(
            2, dtype=pa.array(["uint8"] * 2).dictionary_encode(), name=pa.array(["a", "b"], pa.string_view())
        )
        write_arrow(tmp_path / "m.arrow", table, "zstd")
        assert list(read(tmp_path / "m.arrow")[0]) == ["a", "b"]

    @pytest.mark.parametrize(
        "column", [pa.nulls(2), pa.array([b"a", b"b"]), pa.array([["a"], ["b"]]), pa.array([1, 2]).dictionary_encode()]
    )
    def test_names_of_another_kind_are_refused(self, tmp_path: Path, column: pa.Array) -> None:
        write_arrow(tmp_path / "m.arrow", table_of(2, name=column))
        with pytest.raises(CorruptDataError, match=r"m\.arrow: column 'name': expected string; found"):
            read(tmp_path / "m.arrow")

    def test_batches_without_number_are_refused(self, tmp_path: Path) -> None:
        batch = table_of(0).to_batches() or [pa.record_batch([[]] * 6, schema=table_of(0).schema)]
        with pa.ipc.new_file(str(tmp_path / "m.arrow"), batch[0].schema) as writer:
            for _ in range((1 << 14) + 1):
                writer.write_batch(batch[0])
        size = (tmp_path / "m.arrow").stat().st_size
        check_refused(
            lambda: read(tmp_path / "m.arrow"), size, r"m\.arrow: expected at most 16384 batches; found 16385"
        )


class TestHdf5:
    def size(self, path: Path, match: str) -> None:
        check_refused(lambda: read(path), path.stat().st_size, match)

    def test_what_is_compressed_is_added_up(self, tmp_path: Path) -> None:
        path = tmp_path / "m.weights.h5"
        with h5py.File(path, "w") as file:
            for number in range(6):
                file.create_dataset(
                    f"w{number}", data=np.zeros(20 << 20, np.uint8), chunks=(1 << 20,), compression="gzip"
                )
        self.size(
            path, r"m\.weights\.h5: tensor 'w\d': expected at most \d+ bytes in a file of this size; found 20971520"
        )

    def test_a_chunk_larger_than_its_dataset_takes_no_memory(self, tmp_path: Path) -> None:
        """13 kB became 4.1 GB."""
        path = tmp_path / "m.weights.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("w", (8,), "u1", chunks=(1 << 31,), maxshape=(None,), compression="gzip")
            file["w"].id.write_direct_chunk((0,), zlib.compress(bytes(1 << 20)))
        assert path.stat().st_size < 13_000
        assert peak_of(lambda: read(path)) <= allowed(path.stat().st_size)

    def test_a_chunk_that_holds_more_than_a_chunk_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "m.weights.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("w", (1024,), "u1", chunks=(1024,), compression="gzip")
            file["w"].id.write_direct_chunk((0,), zlib.compress(bytes(300 << 20), 9))
        assert path.stat().st_size < 400_000
        self.size(path, r"m\.weights\.h5: expected a whole HDF5 file; .*filter returned failure")

    @pytest.mark.parametrize("filters", [{"compression": "lzf"}, {"shuffle": True, "fletcher32": True}, {}])
    def test_what_other_tools_write_is_read(self, tmp_path: Path, filters: dict[str, object]) -> None:
        array = np.arange(100_000.0).reshape(100, 1000)
        with h5py.File(tmp_path / "m.weights.h5", "w") as file:
            file.create_dataset("a/w", data=array, chunks=(7, 300), **filters)
        assert np.array_equal(read(tmp_path / "m.weights.h5")[0]["a/w"], array)

    def test_what_compresses_well_is_read_as_long_as_it_is_small(self, tmp_path: Path) -> None:
        array = np.random.default_rng(0).integers(0, 3, (1000, 3000)).astype(np.float64)
        with h5py.File(tmp_path / "m.weights.h5", "w") as file:
            file.create_dataset("w", data=array, compression="gzip", shuffle=True, fletcher32=True, chunks=(500, 3000))
        assert np.array_equal(read(tmp_path / "m.weights.h5")[0]["w"], array)

    @pytest.mark.parametrize(
        "link", [h5py.SoftLink("/loop"), h5py.SoftLink("/w"), h5py.ExternalLink("secret.h5", "/w")]
    )
    def test_links_by_name_are_refused(self, tmp_path: Path, link: object) -> None:
        with h5py.File(tmp_path / "m.weights.h5", "w") as file:
            file["w"] = np.zeros(3)
            file["loop"] = link
        with pytest.raises(CorruptDataError, match=r"m\.weights\.h5: 'loop': expected .* in this file; found a link"):
            read(tmp_path / "m.weights.h5")

    def test_a_group_that_holds_itself_is_read_once(self, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "m.weights.h5", "w") as file:
            file["a/w"] = np.zeros(3)
            file["a/again"] = file["a"]
            file["a/root"] = file["/"]
        assert list(read(tmp_path / "m.weights.h5")[0]) == ["a/w"]

    @pytest.mark.parametrize("dtype", [h5py.string_dtype(), h5py.vlen_dtype(np.uint8), [("a", "f4")], h5py.ref_dtype])
    def test_what_is_no_tensor_is_not_read(self, tmp_path: Path, dtype: object) -> None:
        with h5py.File(tmp_path / "m.weights.h5", "w") as file:
            file.create_dataset("w", (3,), dtype)
        with pytest.raises(TensorMismatchError, match=r"m\.weights\.h5: tensor 'w': expected an array"):
            read(tmp_path / "m.weights.h5")


class TestSafetensors:
    def refuse(self, path: Path, header: bytes, match: str, length: int | None = None) -> None:
        path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header)
        check_refused(lambda: read(path), path.stat().st_size, match)

    @pytest.mark.parametrize(
        "header",
        [b"{", b"[]", b"3", b"\xff", b'{"a": 3}', b'{"a":' * 50_000, b'{"__metadata__": {"a": 3}}', b'{"a": null}'],
    )
    def test_a_header_that_is_none_is_refused(self, tmp_path: Path, header: bytes) -> None:
        self.refuse(tmp_path / "m.safetensors", header, r"m\.safetensors: expected")

    @pytest.mark.parametrize("length", [0, 3, 1 << 20, 1 << 62, (1 << 64) - 1])
    def test_a_header_of_another_length_is_refused(self, tmp_path: Path, length: int) -> None:
        self.refuse(tmp_path / "m.safetensors", b'{"a":{}}', r"m\.safetensors: expected", length)

    @pytest.mark.parametrize("shape", [[1 << 62, 1 << 62], [-1], [1] * 70, [0] * 65, [0, 1 << 62, 1 << 62]], ids=str)
    def test_a_shape_that_cannot_be_is_refused(self, tmp_path: Path, shape: list[int]) -> None:
        header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
        self.refuse(tmp_path / "m.safetensors", header, r"m\.safetensors: ")

    def test_a_header_of_many_small_things_is_refused(self, tmp_path: Path) -> None:
        header = b'{"a":[' + b"{}," * 2_000_000 + b"0]}"
        self.refuse(tmp_path / "m.safetensors", header, r"m\.safetensors: expected JSON that takes at most")
