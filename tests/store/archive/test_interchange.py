"""Tensors travel to other tools and back bit for bit, and a file that is damaged or cannot be written is named."""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import h5py
import keras
import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorvine.store.archive import hdf5file
from tensorvine.store.archive.interchange import format_of, read, read_keras, write, write_keras
from tensorvine.store.arrays import Array, as_bytes, as_numpy, dtype_of
from tensorvine.store.errors import CodecUnavailableError, CorruptDataError, StorageError, TensorMismatchError

# Of Keras's own saving, with TensorFlow and NumPy from 2.4 on.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

PLAIN = ("bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64")
EXTENDED = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
ONLY_ARROW = ("complex128", "int4", "float4_e2m1fn", "float8_e3m4")
FILES = ("m.safetensors", "m.arrow", "m.weights.h5")
TENSORS: Mapping[str, Array] = {
    "odd": np.arange(3, dtype=np.uint8),
    "kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
    "scale": np.array(1.5, ml_dtypes.bfloat16),
}


@st.composite
def arrays(draw: st.DrawFn, dtypes: tuple[str, ...]) -> Array:
    dtype = dtype_of(draw(st.sampled_from(dtypes)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    nbytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.frombuffer(draw(st.binary(min_size=nbytes, max_size=nbytes)), np.uint8)
    array = (raw % 2 if dtype.name == "bool" else raw).view(dtype).reshape(shape)
    if draw(st.booleans()) and dtype.name in PLAIN:
        array = array.astype(dtype.newbyteorder(">"))
    return array.T if draw(st.booleans()) else array


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.just("層/kernel:0")
facts = st.dictionaries(names, names, max_size=3)


def same(a: Array, b: Array) -> bool:
    """Equal to the bit, whatever the byte order and the strides."""
    native = a.astype(a.dtype.newbyteorder("="))
    return native.dtype == b.dtype and a.shape == b.shape and as_bytes(native).tolist() == as_bytes(b).tolist()


def assert_same(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, array in expected.items() if not same(array, found[name])] == []


def model(units: int = 2) -> keras.Model:
    made = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, dtype="bfloat16"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(units),
        ]
    )
    for variable in made.weights:
        variable.assign(np.random.default_rng(3).normal(size=variable.shape))
    return made


def values(of: keras.Model) -> dict[str, Array]:
    return {f"{n}": as_numpy(variable, "variable") for n, variable in enumerate(of.weights)}


def write_any(path: Path) -> None:
    if format_of(path) == "keras":
        write_keras(path, model())
    else:
        write(path, TENSORS, layers={"kernel": "dense"}, facts={"ref": "m@1"})


@contextmanager
def full_disk(nbytes: int) -> Iterator[None]:
    """No file of this process can grow beyond `nbytes`: the kernel refuses the write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def rewrite_arrow(path: Path, **columns: object) -> None:
    """Replace columns of an Arrow file, as another tool would; None leaves one out."""
    table = pa.ipc.open_file(pa.BufferReader(path.read_bytes())).read_all()
    for name, column in columns.items():
        at = table.schema.get_field_index(name)
        table = table.remove_column(at) if column is None else table.set_column(at, name, pa.array(column))
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)


class TestFormat:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("a.safetensors", "safetensors"),
            ("a.b.weights.h5", "keras"),
            ("a.arrow", "arrow"),
            (Path("a.feather"), "arrow"),
        ],
    )
    def test_the_suffix_says_the_format(self, name: str, expected: str) -> None:
        assert format_of(name) == expected

    @pytest.mark.parametrize("name", ["a", "a.h5", "a.pt", "arrow", "a.arrow.gz", ""])
    def test_another_suffix_is_refused_with_those_that_are_known(self, name: str) -> None:
        with pytest.raises(StorageError, match=r"\.safetensors, \.weights\.h5, \.arrow, \.feather"):
            format_of(name)


class TestRoundTrip:
    @settings(max_examples=60)
    @given(st.dictionaries(names, arrays(PLAIN + EXTENDED), max_size=4), facts)
    def test_safetensors_gives_back_every_bit(self, tensors: dict[str, Array], said: dict[str, str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            write(f"{folder}/m.safetensors", tensors, facts=said)
            found, known = read(f"{folder}/m.safetensors")
        assert_same(found, tensors)
        assert known == said

    @settings(max_examples=60)
    @given(st.dictionaries(names, arrays(PLAIN + EXTENDED + ONLY_ARROW), max_size=4), facts)
    def test_arrow_gives_back_every_bit_and_the_order(self, tensors: dict[str, Array], said: dict[str, str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            write(f"{folder}/m.arrow", tensors, facts=said)
            found, known = read(f"{folder}/m.arrow")
        assert list(found) == list(tensors)
        assert_same(found, tensors)
        assert known == said

    @pytest.mark.parametrize("name", FILES[:2])
    def test_what_was_read_is_aligned_read_only_and_its_own(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / name
        write(path, TENSORS)
        found, _ = read(path)
        write(path, {"other": np.zeros(1000)})
        assert_same(found, TENSORS)
        assert all(array.flags.aligned and not array.flags.writeable for array in found.values())
        assert list(read(path)[0]) == ["other"]
        assert [entry.name for entry in tmp_path.iterdir()] == [name]

    @pytest.mark.parametrize("dtype", ONLY_ARROW)
    def test_safetensors_refuses_a_dtype_that_it_has_no_name_for(self, tmp_path: Path, dtype: str) -> None:
        with pytest.raises(TensorMismatchError, match=rf"m\.safetensors: tensor 'b': .* {dtype}"):
            write(tmp_path / "m.safetensors", {"a": np.zeros(1), "b": np.zeros(2, dtype_of(dtype))})
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("name", FILES[:2])
    def test_what_is_no_array_of_numbers_is_refused_by_name(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(TensorMismatchError, match=f"{name}: tensor 'b'"):
            write(tmp_path / name, {"b": np.array(["text"])})

    @pytest.mark.parametrize("name", FILES[:2])
    def test_text_that_is_no_unicode_is_refused(self, tmp_path: Path, name: str) -> None:
        for tensors, layers, said in (
            ({"a\ud800": np.zeros(1)}, {}, {}),
            ({"a": np.zeros(1)}, {"a": "\ud800"}, {}),
            ({}, {}, {"fact": "\ud800"}),
            ({}, {}, {"fact": 3}),
        ):
            with pytest.raises(TensorMismatchError, match=f"{name}: .* UTF-8"):
                write(tmp_path / name, tensors, layers=layers, facts=said)  # pyright: ignore[reportArgumentType]
        assert not list(tmp_path.iterdir())

    def test_the_name_that_safetensors_keeps_for_facts_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(TensorMismatchError, match="'__metadata__'"):
            write(tmp_path / "m.safetensors", {"__metadata__": np.zeros(1)})

    def test_tensors_alone_make_no_keras_file(self, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match=r"m\.weights\.h5: expected a model"):
            write(tmp_path / "m.weights.h5", TENSORS)


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


CHILD = """
import os
from resource import RLIMIT_CPU, setrlimit

def limits():
    setrlimit(RLIMIT_CPU, (1, 1))
    while True:
        pass

"""


class TestKeras:
    def test_keras_loads_what_was_written(self, tmp_path: Path) -> None:
        written = model()
        write_keras(tmp_path / "m.weights.h5", written)
        other = model()
        other.set_weights([np.zeros(variable.shape) for variable in other.weights])
        other.load_weights(tmp_path / "m.weights.h5")
        assert_same(values(other), values(written))
        assert [entry.name for entry in tmp_path.iterdir()] == ["m.weights.h5"]

    def test_what_keras_saved_is_loaded(self, tmp_path: Path) -> None:
        written = model()
        written.save_weights(tmp_path / "m.weights.h5")
        other = model()
        other.set_weights([np.zeros(variable.shape) for variable in other.weights])
        read_keras(tmp_path / "m.weights.h5", other)
        assert_same(values(other), values(written))

    def test_without_a_model_tensors_are_found_by_their_hdf5_paths(self, tmp_path: Path) -> None:
        written = model()
        write_keras(tmp_path / "m.weights.h5", written)
        found, said = read(tmp_path / "m.weights.h5")
        weights = values(written)
        assert_same(
            found,
            {f"layers/dense/vars/{n}": weights[f"{n}"] for n in range(2)}
            | {f"layers/batch_normalization/vars/{n}": weights[f"{n + 2}"] for n in range(4)}
            | {f"layers/dense_1/vars/{n}": weights[f"{n + 6}"] for n in range(2)},
        )
        assert found["layers/dense/vars/0"].dtype.name == "bfloat16"
        assert all(array.flags.aligned and not array.flags.writeable for array in found.values())
        assert said == {}

    def test_a_file_of_another_model_is_refused_and_changes_nothing(self, tmp_path: Path) -> None:
        write_keras(tmp_path / "m.weights.h5", model(units=5))
        other = model(units=2)
        other.set_weights([np.ones(variable.shape) for variable in other.weights])
        before = values(other)
        with pytest.raises(TensorMismatchError, match=r"m\.weights\.h5: expected the weights of model 'sequential"):
            read_keras(tmp_path / "m.weights.h5", other)
        assert_same(values(other), before)

    def test_a_model_without_weights_cannot_be_written(self, tmp_path: Path) -> None:
        with pytest.raises(TensorMismatchError, match=r"m\.weights\.h5: .* not yet been built"):
            write_keras(tmp_path / "m.weights.h5", keras.Sequential([keras.layers.Dense(2)]))
        assert not list(tmp_path.iterdir())

    def test_the_name_must_be_that_of_a_keras_file(self, tmp_path: Path) -> None:
        for call in (write_keras, read_keras):
            with pytest.raises(StorageError, match=r"m\.arrow: expected a name that ends in \.weights\.h5"):
                call(tmp_path / "m.arrow", model())

    def test_a_missing_file_or_one_that_is_no_hdf5_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match=r"m\.weights\.h5.*No such file"):
            read_keras(tmp_path / "m.weights.h5", model())
        (tmp_path / "m.weights.h5").write_bytes(b"no HDF5" * 100)
        with pytest.raises(CorruptDataError, match=r"m\.weights\.h5: expected a whole HDF5 file"):
            read_keras(tmp_path / "m.weights.h5", model())

    def test_a_dataset_whose_bytes_are_elsewhere_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "secret").write_bytes(b"\0" * 8)
        with h5py.File(tmp_path / "m.weights.h5", "w") as file:
            file.create_dataset("w", (2,), "f4", external=[(str(tmp_path / "secret"), 0, 8)])
        with pytest.raises(CorruptDataError, match=r"m\.weights\.h5: tensor 'w': .* reference to another"):
            read(tmp_path / "m.weights.h5")

    def test_a_dataset_that_claims_more_than_it_can_hold_is_refused(self, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "m.weights.h5", "w") as file:
            file.create_dataset("w", (1 << 40,), "f4", chunks=(1 << 10,))
        with pytest.raises(CorruptDataError, match=rf"tensor 'w': expected at most 67\d+ bytes .*; found {1 << 42}"):
            read(tmp_path / "m.weights.h5")

    def test_keras_is_given_all_that_is_in_a_file(self, tmp_path: Path) -> None:
        """What a layer saves may be more than tensors: here texts, and attributes of a group."""
        with h5py.File(tmp_path / "m.weights.h5", "w") as file:
            file["layers/lookup/vocabulary"] = ["red", "green"]
            file.create_dataset("layers/dense/vars/0", data=np.arange(1000.0), chunks=(7,), compression="gzip")
            file["layers/dense/vars/1"] = h5py.Empty("f4")
            file["layers/lookup"].attrs["said"] = "more"
            file.attrs["version"] = 3
        with (tmp_path / "m.weights.h5").open("rb") as opened:
            copy = hdf5file.copy_of(tmp_path / "m.weights.h5", opened)
        with h5py.File(copy) as found:
            assert list(found["layers/lookup/vocabulary"].asstr()) == ["red", "green"]
            assert (found["layers/lookup"].attrs["said"], found.attrs["version"]) == ("more", 3)
            assert found["layers/dense/vars/0"].chunks is None
            assert np.array_equal(found["layers/dense/vars/0"], np.arange(1000.0))
            assert found["layers/dense/vars/1"].shape is None

    def test_keras_is_given_no_chunk_that_is_damaged(self, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "m.weights.h5", "w") as file:
            file.create_dataset("w", (1024,), "u1", chunks=(1024,), compression="gzip")
            file["w"].id.write_direct_chunk((0,), b"no deflate")
        with (
            (tmp_path / "m.weights.h5").open("rb") as opened,
            pytest.raises(CorruptDataError, match=r"m\.weights\.h5: expected a whole HDF5 file"),
        ):
            hdf5file.copy_of(tmp_path / "m.weights.h5", opened)

    @pytest.mark.parametrize(("ending", "found"), [("os._exit(0)", "0"), ("os.abort()", "-6"), ("limits()", "-9")])
    def test_a_reader_that_comes_to_a_bad_end_costs_its_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, found: str
    ) -> None:
        script = tmp_path / "child.py"
        script.write_text(CHILD + ending)
        monkeypatch.setattr(hdf5file, "_SCRIPT", script)
        write_any(tmp_path / "m.weights.h5")
        with pytest.raises(CorruptDataError, match=rf"m\.weights\.h5: .* HDF5 ended with {found} "):
            read(tmp_path / "m.weights.h5")

    def test_an_empty_and_a_compressed_dataset_are_read(self, tmp_path: Path) -> None:
        tensors = {"a": np.zeros((0, 3), np.float32), "b": np.zeros(1 << 16, ">f8"), "c": np.array(2, np.int8)}
        with h5py.File(tmp_path / "m.weights.h5", "w") as file:
            for name, array in tensors.items():
                file.create_dataset(name, data=array, compression="gzip" if name == "b" else None)
        assert_same(read(tmp_path / "m.weights.h5")[0], tensors)

    @pytest.mark.parametrize("array", [np.ones(3, ml_dtypes.float8_e4m3fn), np.array([b"text"])])
    def test_a_dataset_of_unknown_numbers_is_named(self, tmp_path: Path, array: Array) -> None:
        with h5py.File(tmp_path / "m.weights.h5", "w") as file:
            file["w"] = array
        with pytest.raises(TensorMismatchError, match=r"m\.weights\.h5: tensor 'w'"):
            read(tmp_path / "m.weights.h5")


@pytest.mark.parametrize("name", FILES)
class TestDamage:
    def test_a_missing_file_is_named(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(StorageError, match=f"{name}.*No such file"):
            read(tmp_path / name)

    def test_a_folder_is_no_file(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).mkdir()
        with pytest.raises(StorageError, match=f"{name}.*directory"):
            read(tmp_path / name)

    @pytest.mark.parametrize("content", [b"", b"\0", b"garbage " * 100, b"\xff" * 64])
    def test_garbage_is_refused(self, tmp_path: Path, name: str, content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CorruptDataError, match=name):
            read(tmp_path / name)

    @pytest.mark.parametrize("part", [0.01, 0.3, 0.5, 0.9, 0.999])
    def test_a_truncated_file_is_refused(self, tmp_path: Path, name: str, part: float) -> None:
        path = tmp_path / name
        write_any(path)
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * part)])
        with pytest.raises(CorruptDataError, match=name):
            read(path)


@settings(max_examples=200)
@given(st.sampled_from(FILES[:2]), st.integers(0, 4000), st.binary(min_size=1, max_size=8))
def test_a_damaged_file_is_refused_or_still_holds_tensors(name: str, at: int, damage: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        write_any(path)
        content = bytearray(path.read_bytes())
        start = at % len(content)
        content[start : start + len(damage)] = damage
        path.write_bytes(content)
        with suppress(CorruptDataError, TensorMismatchError):
            assert all(isinstance(array, np.ndarray) for array in read(path)[0].values())


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("bit", range(0, 8, 3))
def test_a_flipped_bit_in_an_arrow_file_names_the_tensor(tmp_path: Path, tensor: str, bit: int) -> None:
    path = tmp_path / "m.arrow"
    write(path, TENSORS)
    content = bytearray(path.read_bytes())
    values_of_all = b"".join(array.tobytes() for array in TENSORS.values())
    before = list(TENSORS).index(tensor)
    content[content.index(values_of_all) + sum(a.nbytes for a in list(TENSORS.values())[:before])] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(CorruptDataError, match=rf"m\.arrow: tensor '{tensor}': expected bytes of checksum"):
        read(path)


@pytest.mark.parametrize("name", FILES)
class TestTrouble:
    @pytest.mark.parametrize("folder", ["missing", "a-file", "/sys/kernel"])
    def test_a_folder_that_cannot_be_written_to_is_an_error_that_names_the_file(
        self, tmp_path: Path, name: str, folder: str
    ) -> None:
        (tmp_path / "a-file").touch()
        with pytest.raises(StorageError, match=f"{folder}/{name}"):
            write_any(tmp_path / folder / name)

    def test_a_path_that_is_a_directory_is_left_alone(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name / "inside").mkdir(parents=True)
        with pytest.raises(StorageError, match=f"{name}.*directory"):
            write_any(tmp_path / name)
        assert sorted(entry.name for entry in tmp_path.rglob("*")) == sorted([name, "inside"])

    @pytest.mark.parametrize("part", [0, 0.5, 0.95])
    def test_a_full_disk_leaves_the_old_file_whole_and_nothing_else(
        self, tmp_path: Path, name: str, part: float
    ) -> None:
        path = tmp_path / name
        write_any(path)
        before = path.read_bytes()
        with pytest.raises(StorageError, match=f"{name}: .*File too large"), full_disk(int(len(before) * part)):
            write_any(path)
        assert path.read_bytes() == before
        assert [entry.name for entry in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(("name", "package"), [("m.safetensors", "safetensors"), ("m.weights.h5", "h5py")])
def test_a_package_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    write_any(tmp_path / name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CodecUnavailableError, match=f"{name}: expected the package '{package}'"):
        read(tmp_path / name)
