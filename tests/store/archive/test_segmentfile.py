"""Segment files: what is written is read, what is damaged is found, and one tensor's read touches one tensor."""

from __future__ import annotations

import errno
import io
import os
import tempfile
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorvine.store.archive import local
from tensorvine.store.archive.archive import Archive
from tensorvine.store.archive.encoding import Tensor, block_of, encode_tensors
from tensorvine.store.archive.opening import open_directory
from tensorvine.store.archive.segmentfile import (
    METADATA_KEY,
    Row,
    SegmentFile,
    pack,
    segment_of,
    segment_text,
    slot_of,
    slot_text,
    write_segment,
)
from tensorvine.store.arrays import Array, as_bytes, dtype_of
from tensorvine.store.codecs.codec import Codec, decode
from tensorvine.store.codecs.compress import Gzip, Zstd
from tensorvine.store.codecs.delta import Delta
from tensorvine.store.codecs.quantize import Quantize
from tensorvine.store.codecs.shuffle import Shuffle
from tensorvine.store.errors import CorruptDataError, StorageError
from tensorvine.store.segments.segment import layout

from tests.support.crash import tensor_of
from tests.support.page_cache import cached, evict
from tests.support.s3 import S3Server

MIB = 1 << 20
SEGMENT = (0, 255)
NAME = "segments/ff.0.arrow"
DTYPES = ("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "int8", "int64", "uint16", "bool", "complex64")
CODECS: tuple[Codec | None, ...] = (None, Zstd(), Gzip(), Shuffle() | Zstd(), Quantize(8), Quantize(4) | Zstd())

_serial = count()
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Draw an array of up to a few KiB; its content is random, constant or zero."""
    dtype = dtype_of(draw(st.sampled_from(DTYPES)))
    shape = draw(st.lists(st.integers(0, 9), max_size=3)) + draw(st.sampled_from([[], [], [300]]))
    generator = np.random.default_rng(draw(st.integers(0, 9)))
    values = generator.integers(0, 2 if dtype.kind == "b" else 100, shape) * draw(st.sampled_from([0, 1]))
    return np.asarray(values).astype(dtype)


@st.composite
def tensor_lists(draw: st.DrawFn, max_size: int = 5) -> list[Tensor]:
    slots = draw(st.lists(st.integers(0, (1 << 19) - 1), unique=True, max_size=max_size))
    return [tensor_of(slot, draw(texts), draw(arrays())) for slot in slots]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as started:
        yield started


def written(uri: str, tensors: Sequence[Tensor], codec: Codec | None = None) -> tuple[int, list[Row]]:
    rows, parts = encode_tensors(codec, tensors)
    return write_segment(open_directory(uri), NAME, SEGMENT, rows, block_of(parts)), rows


def opened(uri: str) -> SegmentFile:
    return SegmentFile(open_directory(uri), NAME)


class TestRoundTrip:
    @given(tensors=tensor_lists(), codec=st.sampled_from(CODECS))
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def test_every_row_comes_back_and_decodes(self, folder: Path, tensors: list[Tensor], codec: Codec | None) -> None:
        nbytes, rows = written(str(folder), tensors, codec)
        file = opened(str(folder))
        assert file.nbytes == nbytes
        assert file.segment == (0, 255)
        assert list(file.rows.values()) == rows
        for tensor in tensors:
            row, encoded = file.rows[tensor.slot], file.encoded(tensor.slot)
            array = decode(encoded)
            assert (row.name, row.layer, row.dtype, row.shape) == (tensor.name, "layer", tensor.dtype, tensor.shape)
            assert row.nbytes == tensor.data.nbytes == array.nbytes
            if "quantize" not in row.codec:
                assert as_bytes(array).tobytes() == tensor.data.tobytes()
                assert row.error == 0
            else:
                original = tensor.data.view(array.dtype).reshape(array.shape)
                worst = np.abs(array.astype(np.float64) - original.astype(np.float64)).max()
                assert worst <= row.error * (1 + 1e-6)
        file.close()

    @given(names=st.lists(texts, max_size=30), sizes=st.lists(st.integers(0, 300), min_size=30, max_size=30))
    @settings(max_examples=60, deadline=None)
    def test_data_begins_at_a_multiple_of_64_where_the_header_says(
        self, folder: Path, names: list[str], sizes: list[int]
    ) -> None:
        tensors = [tensor_of(i, name, np.full(sizes[i], i + 1, np.uint8)) for i, name in enumerate(names)]
        written(str(folder), tensors)
        content = (folder / NAME).read_bytes()
        data = pa.ipc.open_file(folder / NAME).get_batch(0).column("data")
        file = opened(str(folder))
        at = file._at
        assert at % 64 == 0
        for i, offset in enumerate(layout([tensor.data.nbytes for tensor in tensors])[0]):
            assert content[at + offset : at + offset + sizes[i]] == bytes([i + 1]) * sizes[i]
            assert data[i].as_py()[: sizes[i]] == bytes([i + 1]) * sizes[i]
            assert len(data[i].as_py()) % 64 == 0
            assert content[at + offset + sizes[i] : at + offset + len(data[i].as_py())].strip(b"\0") == b""

    @pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 9, 63, 64, 65, 1000])
    def test_any_number_of_rows_is_aligned(self, folder: Path, rows: int) -> None:
        written(str(folder), [tensor_of(i, "n" * (i % 70), np.zeros(i % 3, np.uint8)) for i in range(rows)])
        file = opened(str(folder))
        assert file._at % 64 == 0
        assert len(file.rows) == rows
        assert file._at + layout([row.stored for row in file.rows.values()])[1] <= file.nbytes

    def test_a_base_is_named(self, folder: Path) -> None:
        base = np.zeros(1000, np.float32)
        array = base.copy()
        array[7] = 1
        written(str(folder), [tensor_of(3, "a", array, (((0, 17), 12), base))], Delta())
        row = opened(str(folder)).rows[3]
        assert row.codec.startswith("delta")
        assert row.base == ((0, 17), 12)

    @given(st.integers(0, 1 << 200), st.integers(0, (1 << 19) - 1))
    def test_places_are_read_as_they_are_written(self, serial: int, slot: int) -> None:
        segment = (0, serial)
        assert segment_of(segment_text(segment)) == segment
        assert slot_of(slot_text((segment, slot))) == (segment, slot)

    @pytest.mark.parametrize("text", ["", "/", "x/1", "1/", "1/x", "1/-1", "1", "1/²", "/1", "1/1/1"])
    def test_what_is_no_place_is_refused(self, text: str) -> None:
        with pytest.raises(CorruptDataError, match="expected a"):
            slot_of(text)


class TestBlocks:
    def test_tensors_that_lie_as_the_file_has_them_are_not_copied(self) -> None:
        sizes = [100, 0, 64, 1, 0]
        offsets, length = layout(sizes)
        memory = np.arange(length + 256, dtype=np.uint8)
        views = [memory[128 + o : 128 + o + s] for o, s in zip(offsets, sizes, strict=True)]
        _, parts = encode_tensors(None, [tensor_of(i, "t", view) for i, view in enumerate(views)])
        block = block_of(parts)
        assert np.shares_memory(block, memory)
        assert block.ctypes.data == memory.ctypes.data + 128
        assert block.nbytes == length

    @given(
        st.lists(st.integers(0, 200), max_size=6),
        st.permutations(range(6)),
        st.integers(0, 3),
        st.sampled_from([0, 64]),
    )
    def test_a_block_has_every_tensor_at_its_place(
        self, sizes: list[int], order: list[int], cut: int, gap: int
    ) -> None:
        chosen = [i for i in order if i < len(sizes)] if cut == 0 else list(range(len(sizes)))
        offsets, length = layout([size + gap for size in sizes])
        memory = np.random.default_rng(0).integers(0, 256, max(length - 64 * (cut == 1), 0) + 64, np.uint8)
        views = [memory[offsets[i] : offsets[i] + sizes[i]] for i in chosen]
        _, parts = encode_tensors(None, [tensor_of(i, "t", view) for i, view in enumerate(views)])
        wanted, total = layout([view.nbytes for view in views])
        for block in (block_of(parts), pack(parts)):
            assert block.nbytes == total
            for offset, view in zip(wanted, views, strict=True):
                assert np.array_equal(block[offset : offset + view.nbytes], view)

    def test_the_padding_of_a_copied_block_is_zeros(self) -> None:
        _, parts = encode_tensors(None, [tensor_of(i, "t", np.full(i, 255, np.uint8)) for i in (1, 0, 63, 65)])
        assert pack(parts).sum() == 255 * (1 + 63 + 65)


class TestDamage:
    @pytest.fixture
    def tensors(self) -> list[Tensor]:
        return [tensor_of(3, "a/é", np.arange(20, dtype=np.int16)), tensor_of(0, "b", np.array(1.5))]

    def test_no_flipped_bit_gives_other_rows_or_bytes(self, folder: Path, tensors: list[Tensor]) -> None:
        found: list[str] = []
        harmless = 0
        archive = Archive(str(folder / "flipped"))
        rows, parts = encode_tensors(None, tensors)
        stored = archive.write_segment(SEGMENT, 0, rows, parts)
        path = folder / "flipped" / stored.name
        content = path.read_bytes()
        with open(path, "r+b", buffering=0) as file:
            for position, byte in enumerate(content):
                for bit in range(8):
                    os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), position)
                    try:
                        read = archive.open_segment(stored)
                        assert read.segment == SEGMENT
                        assert list(read.rows.values()) == rows
                        for tensor in tensors:
                            assert read.encoded(tensor.slot).data.tobytes() == tensor.data.tobytes()
                        harmless += 1
                    except CorruptDataError as exc:
                        found.append(str(exc))
                os.pwrite(file.fileno(), bytes([byte]), position)
        assert path.read_bytes() == content
        assert all(str(path) in message for message in found)
        assert len(found) > harmless

    def test_a_file_cut_anywhere_is_refused_by_name(self, folder: Path, tensors: list[Tensor]) -> None:
        written(str(folder), tensors)
        content = (folder / NAME).read_bytes()
        for length in range(len(content)):
            (folder / NAME).write_bytes(content[:length])
            with pytest.raises(CorruptDataError, match=f"{NAME}: expected"):
                opened(str(folder))

    @given(data=st.data())
    @settings(max_examples=200, deadline=None)
    def test_hostile_files_are_refused_or_read_as_they_were(self, folder: Path, data: st.DataObject) -> None:
        tensors = [tensor_of(3, "a/é", np.arange(20, dtype=np.int16)), tensor_of(0, "b", np.array(1.5))]
        _, rows = written(str(folder), tensors)
        content = bytearray((folder / NAME).read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            start = data.draw(st.integers(0, len(content)) | st.integers(len(content) - 1200, len(content)))
            patch = data.draw(
                st.sampled_from([b"\xff" * 4, b"\xff" * 8, b"\x7f" * 4, bytes(8), b"\xff\xff\xff\x7f", b"\0\0\0\x80"])
                | st.binary(min_size=1, max_size=16)
            )
            content[start : start + len(patch)] = patch
        (folder / NAME).write_bytes(content)
        message = NAME
        try:
            file = opened(str(folder))
            if file.segment == SEGMENT:
                assert list(file.rows.values()) == rows
                for tensor in tensors:
                    assert file.encoded(tensor.slot).data.tobytes() == tensor.data.tobytes()
        except CorruptDataError as exc:
            message = str(exc)
        assert NAME in message

    def test_damaged_bytes_name_the_tensor_and_spare_the_others(self, folder: Path) -> None:
        arrays = [np.full(1000, i, np.uint8) for i in range(3)]
        written(str(folder), [tensor_of(i, f"t{i}", array) for i, array in enumerate(arrays)])
        file = opened(str(folder))
        with open(folder / NAME, "r+b") as raw:
            raw.seek(file._at + 1024 + 500)
            raw.write(b"\7")
        with pytest.raises(CorruptDataError, match=rf"{NAME}: tensor 't1' \(slot 1\): expected bytes of checksum"):
            file.encoded(1)
        for i in (0, 2):
            assert np.array_equal(decode(file.encoded(i)), arrays[i])
        with pytest.raises(CorruptDataError, match=rf"{NAME}: expected slot 3; found slots \[0, 1, 2\]"):
            file.encoded(3)
        file.close()
        with pytest.raises(StorageError, match=f"{NAME}: expected"):
            file.encoded(0)

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            (b'"format": 1', b'"format": 2', "expected format 1; found 2"),
            (b'"kind": "segment"', b'"kind": "manifes"', "expected a segment of a TensorVine repository"),
            (b'"segment": "ff"', b'"segment": "xy"', "expected the header and columns of a segment file"),
            (b'"rows": "', b'"rowS": "', "expected rows with checksum None"),
            (b'"data_at": "0', b'"data_at": "9', "expected 9"),
            (b'"data_at": "0', b'"data_at": "-', "expected rows with checksum"),
            (b'{"format"', b'["format"', "expected JSON"),
        ],
    )
    def test_a_header_that_says_something_else_is_refused(
        self, folder: Path, tensors: list[Tensor], old: bytes, new: bytes, message: str
    ) -> None:
        written(str(folder), tensors)
        content = (folder / NAME).read_bytes()
        assert old in content
        (folder / NAME).write_bytes(content.replace(old, new))
        with pytest.raises(CorruptDataError, match=f"{NAME}: {message}"):
            opened(str(folder))

    @pytest.mark.parametrize("header", [None, b"{}", b"", b"[" * 100_000, b"\xff", b'{"format": 1, "kind": "segment"}'])
    @pytest.mark.parametrize("batches", [0, 1])
    def test_another_arrow_file_is_refused(self, folder: Path, header: bytes | None, batches: int) -> None:
        schema = pa.schema([("x", pa.int64())] * 13, metadata=None if header is None else {METADATA_KEY: header})
        (folder / NAME).parent.mkdir(exist_ok=True)
        with pa.ipc.new_file(folder / NAME, schema) as writer:
            for _ in range(batches):
                writer.write_batch(pa.record_batch([pa.array([1])] * 13, schema=schema))
        with pytest.raises(CorruptDataError, match=f"{NAME}: expected"):
            opened(str(folder))

    @pytest.mark.parametrize("content", [b"", b"ARROW1", b"\x89PNG", b"ARROW1\0\0" * 100, bytes(5000)])
    def test_what_is_no_arrow_file_is_refused(self, folder: Path, content: bytes) -> None:
        (folder / NAME).parent.mkdir(exist_ok=True)
        (folder / NAME).write_bytes(content)
        with pytest.raises(CorruptDataError, match=f"{NAME}: expected a whole Arrow file"):
            opened(str(folder))

    def test_a_missing_file_is_named(self, folder: Path) -> None:
        with pytest.raises(StorageError, match=r"none.arrow: expected to open it; No such file"):
            SegmentFile(open_directory(str(folder)), "none.arrow")

    def test_a_disk_that_fails_is_no_damaged_file(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        written(str(folder), [tensor_of(0, "large", np.zeros(1 << 18, np.uint8))])

        def fail(file: io.FileIO, nbytes: int = -1) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(local, "FileIO", type("Failing", (io.FileIO,), {"read": fail}))
        with pytest.raises(StorageError, match=f"{NAME}: .*Input/output error"):
            opened(str(folder))


class TestPartialReads:
    COUNT = 32

    def test_reading_one_tensor_reads_its_pages_from_the_disk_and_few_around_it(self, tmp_path: Path) -> None:
        written(str(tmp_path), self.tensors())
        evict(tmp_path / NAME)
        if cached(tmp_path / NAME):
            pytest.skip("this file system keeps its files in memory")
        file = opened(str(tmp_path))
        assert file.encoded(7).data[0] == 7
        assert MIB <= cached(tmp_path / NAME) < 3 * MIB  # the kernel reads ahead
        file.close()

    def test_reading_one_tensor_transfers_its_range_only(self, server: S3Server) -> None:
        uri = server.uri(f"partial-{next(_serial)}")
        written(uri, self.tensors())
        before = server.sent
        file = opened(uri)
        assert server.sent - before < MIB // 4
        before = server.sent
        assert file.encoded(7).data[0] == 7
        assert server.sent - before == MIB
        file.close()

    def tensors(self) -> list[Tensor]:
        return [tensor_of(i, f"t{i}", np.full(MIB, i, np.uint8)) for i in range(self.COUNT)]


class TestOverS3:
    def test_damage_is_found_there_too(self, server: S3Server) -> None:
        uri = server.uri(f"damage-{next(_serial)}")
        tensors = [tensor_of(i, "t", np.full(100 * i, i, np.uint8)) for i in range(4)]
        written(uri, tensors, Zstd())
        directory = open_directory(uri)
        content = directory.read(NAME).to_pybytes()
        for length in range(0, len(content), 611):
            directory.write(NAME, lambda sink, length=length: sink.write(content[:length]))
            with pytest.raises(CorruptDataError, match=f"{NAME}: expected"):
                opened(uri)
        found: list[str] = []
        for position in range(0, len(content), 167):
            damaged = bytearray(content)
            damaged[position] ^= 1
            directory.write(NAME, lambda sink, damaged=damaged: sink.write(damaged))
            try:
                file = opened(uri)
                for tensor in tensors:
                    assert as_bytes(decode(file.encoded(tensor.slot))).tobytes() == tensor.data.tobytes()
            except CorruptDataError as exc:
                found.append(str(exc))
        assert found
        assert all(NAME in message for message in found)
