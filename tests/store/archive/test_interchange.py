"""Tensors travel to other tools and back bit for bit, and a file that is damaged or cannot be written is named."""

from __future__ import annotations

import resource
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorvine.store.archive.interchange import format_of, read, write, write_keras
from tensorvine.store.arrays import Array, dtype_of
from tensorvine.store.errors import (
    CodecUnavailableError,
    CorruptDataError,
    GraphError,
    StorageError,
    TensorMismatchError,
)

from tests.support.interchange import EXTENDED, PLAIN, TENSORS, assert_same, write_any

# Of Keras's own saving, with TensorFlow and NumPy from 2.4 on.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

ONLY_ARROW = ("complex128", "int4", "float4_e2m1fn", "float8_e3m4")
FILES = ("m.safetensors", "m.arrow", "m.weights.h5")


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


@contextmanager
def full_disk(nbytes: int) -> Iterator[None]:
    """No file of this process can grow beyond `nbytes`: the kernel refuses the write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_torch_module_is_not_written_as_keras_weights(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(GraphError, match=r"m\.weights\.h5: expected a Keras model; found Linear: write \.safetensors"):
        write_keras(tmp_path / "m.weights.h5", torch.nn.Linear(3, 2))
    assert not list(tmp_path.iterdir())


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


def test_a_package_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, package = "m.weights.h5", "h5py"
    write_any(tmp_path / name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CodecUnavailableError, match=f"{name}: expected the package '{package}'"):
        read(tmp_path / name)
