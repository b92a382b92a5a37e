"""Safetensors and Arrow files: other tools read what was written and are read, and what cannot be so is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import xxhash
from tensorvine.store.archive.interchange import read, write
from tensorvine.store.arrays import as_bytes, dtype_of
from tensorvine.store.errors import CorruptDataError, TensorMismatchError

from tests.support.interchange import EXTENDED, PLAIN, TENSORS, assert_same


def rewrite_arrow(path: Path, **columns: object) -> None:
    """Replace columns of an Arrow file, as another tool would; None leaves one out."""
    table = pa.ipc.open_file(pa.BufferReader(path.read_bytes())).read_all()
    for name, column in columns.items():
        at = table.schema.get_field_index(name)
        table = table.remove_column(at) if column is None else table.set_column(at, name, pa.array(column))
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)


ROW = b'{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
"""Of a header of safetensors."""


class TestSafetensorsOfOthers:
    def test_torch_loads_what_was_written(self, tmp_path: Path) -> None:
        tensors = {name: np.arange(6).reshape(2, 3).astype(dtype_of(name)) for name in (*PLAIN, *EXTENDED)}
        tensors |= {"empty": np.zeros((0, 2)), "scalar": np.array(7, np.int16)}
        write(tmp_path / "m.safetensors", tensors, facts={"ref": "m@1"})
        found = safetensors.torch.load_file(tmp_path / "m.safetensors")
        assert found.keys() == tensors.keys()
        for name, tensor in found.items():
            raw = tensor.contiguous().flatten().view(torch.uint8).numpy() if tensor.numel() else np.zeros(0, np.uint8)
            assert raw.tolist() == as_bytes(tensors[name]).tolist(), name
            assert tuple(tensor.shape) == tensors[name].shape
        with safetensors.safe_open(tmp_path / "m.safetensors", "np") as file:
            assert file.metadata() == {"ref": "m@1"}

    def test_what_torch_saved_is_read(self, tmp_path: Path) -> None:
        tensors = {"bf": torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "f8": torch.ones(3).to(torch.float8_e5m2)}
        safetensors.torch.save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
        found, said = read(tmp_path / "m.safetensors")
        assert {name: array.dtype.name for name, array in found.items()} == {"bf": "bfloat16", "f8": "float8_e5m2"}
        assert found["bf"].tolist() == [1.5, -2.0]
        assert found["f8"].tolist() == [1, 1, 1]
        assert said == {"format": "pt"}

    def test_what_numpy_saved_is_read(self, tmp_path: Path) -> None:
        tensors = {"a": np.arange(4.0), "b": np.array([True, False]), "c": np.zeros((0, 2), np.int8)}
        safetensors.numpy.save_file(tensors, tmp_path / "m.safetensors")
        found, said = read(tmp_path / "m.safetensors")
        assert_same(found, tensors)
        assert said == {}

    def test_each_tensor_starts_at_a_multiple_of_its_element(self, tmp_path: Path) -> None:
        write(tmp_path / "m.safetensors", TENSORS)
        content = (tmp_path / "m.safetensors").read_bytes()
        length = int.from_bytes(content[:8], "little")
        rows = json.loads(content[8 : 8 + length])
        assert length % 8 == 0
        assert all(row["data_offsets"][0] % TENSORS[name].itemsize == 0 for name, row in rows.items())

    @pytest.mark.parametrize(
        "header",
        [
            b'{"w":%b,"w":%b}' % (ROW, ROW),
            b'{"w":%b,"w":%b}' % (ROW, ROW.replace(b"F32", b"I32")),
            b'{"__metadata__":{"a":"1","a":"2"},"w":%b}' % ROW,
            b'{"__metadata__":{"a":"1"},"__metadata__":{},"w":%b}' % ROW,
            b'{"w":%b}' % ROW.replace(b"[2]", b"[-2]"),
            b'{"w":%b}' % ROW.replace(b"[2]", b"[%d]" % (1 << 70)),
            b'{"w":%b}' % ROW.replace(b"[2]", b"[2.0]"),
            b'{"w":%b}' % ROW.replace(b"[0,8]", b"[-1,7]"),
            b'{"w":%b}' % ROW.replace(b"[0,8]", b"[0,%d]" % (1 << 70)),
            b'{"w":%b}' % ROW.replace(b"[0,8]", b'["0","8"]'),
            b'{"w":%b}' % ROW.replace(b'"F32"', b"3"),
            b'{"__metadata__":[1],"w":%b}' % ROW,
            b'{"__metadata__":{"a":{"b":"c"}},"w":%b}' % ROW,
        ],
    )
    def test_a_header_that_says_what_cannot_be_is_refused(self, tmp_path: Path, header: bytes) -> None:
        """Some of these the package `safetensors` takes, and picks one of two meanings."""
        (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        with pytest.raises(CorruptDataError, match=r"m\.safetensors: "):
            read(tmp_path / "m.safetensors")

    @pytest.mark.parametrize("axes", [64, 65, 100])
    def test_a_tensor_of_more_axes_than_numpy_has_is_named(self, tmp_path: Path, axes: int) -> None:
        header = b'{"w":%b}' % ROW.replace(b"[2]", b"[%b2]" % (b"1," * (axes - 1)))
        content = len(header).to_bytes(8, "little") + header + bytes(8)
        assert len(safetensors.deserialize(content)[0][1]["shape"]) == axes
        (tmp_path / "m.safetensors").write_bytes(content)
        if axes == 64:
            assert read(tmp_path / "m.safetensors")[0]["w"].ndim == axes
        else:
            with pytest.raises(CorruptDataError, match=rf"m\.safetensors: tensor 'w': .* 64 axes.* found {axes}"):
                read(tmp_path / "m.safetensors")

    def test_a_header_longer_than_the_format_allows_is_not_written(self, tmp_path: Path) -> None:
        with pytest.raises(TensorMismatchError, match=r"m\.safetensors: expected .* at most 100000000 bytes"):
            write(tmp_path / "m.safetensors", {}, facts={"long": "x" * 100_000_000})
        assert not list(tmp_path.iterdir())

    def test_a_dtype_that_numpy_cannot_hold_is_named(self, tmp_path: Path) -> None:
        header = json.dumps({"w": {"dtype": "F4", "shape": [2, 2], "data_offsets": [0, 2]}}).encode()
        (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
        with pytest.raises(TensorMismatchError, match=r"m\.safetensors: tensor 'w': .* F4"):
            read(tmp_path / "m.safetensors")


class TestArrowOfOthers:
    def test_plain_pyarrow_finds_one_row_per_tensor(self, tmp_path: Path) -> None:
        write(tmp_path / "m.arrow", TENSORS, layers={"kernel": "dense"}, facts={"ref": "m@1"})
        with pa.memory_map(str(tmp_path / "m.arrow")) as source:
            reader = pa.ipc.open_file(source)
            assert reader.num_record_batches == 1
            assert reader.schema.metadata == {b"ref": b"m@1"}
            row = reader.get_batch(0).to_pylist()[1]
        raw = TENSORS["kernel"].tobytes()
        assert row == {
            "name": "kernel",
            "layer": "dense",
            "dtype": "float32",
            "shape": [2, 3],
            "nbytes": 24,
            "checksum": xxhash.xxh3_128_hexdigest(raw),
            "data": raw,
        }

    def test_duckdb_queries_it(self, tmp_path: Path) -> None:
        duckdb = pytest.importorskip("duckdb")
        write(tmp_path / "m.arrow", TENSORS, layers={"kernel": "dense"})
        table = pa.ipc.open_file(pa.BufferReader((tmp_path / "m.arrow").read_bytes())).read_all()
        with duckdb.connect() as connection:
            connection.register("tensors", table)
            found = connection.execute(
                "SELECT name, layer, shape[1], octet_length(data) = nbytes FROM tensors ORDER BY name"
            ).fetchall()
        assert found == [("kernel", "dense", 2, True), ("odd", None, 3, True), ("scale", None, None, True)]

    @pytest.mark.parametrize("compression", ["uncompressed", "zstd", "lz4"])
    def test_polars_reads_it_and_what_polars_writes_is_read(self, tmp_path: Path, compression: str) -> None:
        polars = pytest.importorskip("polars")
        write(tmp_path / "m.feather", TENSORS)
        frame = polars.read_ipc(tmp_path / "m.feather")
        assert frame["name"].to_list() == list(TENSORS)
        polars.concat([frame[:1], frame[1:]], rechunk=False).write_ipc(tmp_path / "p.arrow", compression=compression)
        assert_same(read(tmp_path / "p.arrow")[0], TENSORS)

    def test_a_fact_may_have_the_key_by_which_a_repository_knows_its_files(self, tmp_path: Path) -> None:
        write(tmp_path / "m.arrow", TENSORS, facts={"tensorvine": "0.1"})
        assert read(tmp_path / "m.arrow")[1] == {"tensorvine": "0.1"}

    def test_a_file_of_a_repository_is_refused_as_what_it_is(self, tmp_path: Path) -> None:
        write(tmp_path / "m.arrow", TENSORS)
        rewrite_arrow(tmp_path / "m.arrow", layer=None)
        table = pa.ipc.open_file(pa.BufferReader((tmp_path / "m.arrow").read_bytes())).read_all()
        table = table.append_column("codec", pa.array(["", "", ""])).replace_schema_metadata({"tensorvine": "{}"})
        with pa.ipc.new_file(str(tmp_path / "m.arrow"), table.schema) as writer:
            writer.write_table(table)
        with pytest.raises(CorruptDataError, match=r"m\.arrow: .* found a segment file of a TensorVine repository"):
            read(tmp_path / "m.arrow")

    def test_two_columns_of_one_name_are_refused(self, tmp_path: Path) -> None:
        write(tmp_path / "m.arrow", TENSORS)
        table = pa.ipc.open_file(pa.BufferReader((tmp_path / "m.arrow").read_bytes())).read_all()
        table = table.append_column("dtype", table["dtype"])
        with pa.ipc.new_file(str(tmp_path / "m.arrow"), table.schema) as writer:
            writer.write_table(table)
        with pytest.raises(CorruptDataError, match=r"m\.arrow: .* 'Field \"dtype\" exists 2 times"):
            read(tmp_path / "m.arrow")

    @pytest.mark.parametrize(
        ("columns", "found"),
        [
            ({"checksum": None}, r"none named \['checksum'\]"),
            ({"checksum": ["0", "0", "0"]}, "tensor 'odd': expected bytes of checksum 0"),
            ({"checksum": [None, None, None]}, "column 'checksum': expected string; found null"),
            ({"name": ["a", "a", "b"]}, "tensor 'a': expected a name that no other row has"),
            ({"name": ["a", "b", None]}, "tensor None: expected a name"),
            ({"dtype": ["uint8", "object", "bfloat16"]}, "tensor 'kernel': .* 'object'"),
            ({"dtype": ["uint8", None, "bfloat16"]}, "tensor 'kernel': .* None"),
            ({"shape": [[3], [2, 2], []]}, "tensor 'kernel': .* expected 16 bytes; found 24"),
            ({"shape": [[3], [-2, -3], []]}, "tensor 'kernel'"),
            ({"shape": [[3], None, []]}, "tensor 'kernel'"),
            ({"nbytes": [3, 25, 2]}, "tensor 'kernel': expected 25 bytes; found 24"),
            ({"nbytes": ["three", "24", "2"]}, "expected a whole Arrow file of tensors"),
            ({"data": [b"\0\1\2", None, b"\0\0"]}, "tensor 'kernel': expected 24 bytes; found 0"),
        ],
    )
    def test_rows_that_do_not_agree_with_themselves_are_refused(
        self, tmp_path: Path, columns: dict[str, object], found: str
    ) -> None:
        write(tmp_path / "m.arrow", TENSORS)
        rewrite_arrow(tmp_path / "m.arrow", **columns)
        with pytest.raises(CorruptDataError, match=rf"m\.arrow: .*{found}"):
            read(tmp_path / "m.arrow")
