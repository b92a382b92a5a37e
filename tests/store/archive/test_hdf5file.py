"""Keras's weights files: Keras reads what was written and is read, and a file that is odd or hostile is named."""

from __future__ import annotations

from pathlib import Path

import h5py
import keras
import ml_dtypes
import numpy as np
import pytest
from tensorvine.store.archive import hdf5file
from tensorvine.store.archive.interchange import read, read_keras, write_keras
from tensorvine.store.arrays import Array, as_numpy
from tensorvine.store.errors import CorruptDataError, StorageError, TensorMismatchError

from tests.support.interchange import assert_same, model, write_any

# Of Keras's own saving, with TensorFlow and NumPy from 2.4 on.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


def values(of: keras.Model) -> dict[str, Array]:
    return {f"{n}": as_numpy(variable, "variable") for n, variable in enumerate(of.weights)}


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
