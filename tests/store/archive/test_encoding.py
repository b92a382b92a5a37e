"""From tensors to a file's rows and back, through chains of bases, and what is said when a chain is broken."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorvine.store.archive.archive import Archive, StoredFile
from tensorvine.store.archive.encoding import DENSE_EVERY, decode_slot, encode_tensors
from tensorvine.store.archive.segmentfile import Row, SegmentFile, Slot
from tensorvine.store.arrays import Array
from tensorvine.store.codecs.blocks import Encoded
from tensorvine.store.codecs.codec import Codec
from tensorvine.store.codecs.compress import Zstd
from tensorvine.store.codecs.delta import Delta
from tensorvine.store.codecs.quantize import Quantize
from tensorvine.store.codecs.shuffle import Shuffle
from tensorvine.store.errors import CodecUnavailableError, CorruptDataError, StorageError
from tensorvine.store.segments.segment import SegmentId

from tests.support.crash import tensor_of

LOSSLESS: tuple[Codec | None, ...] = (None, Zstd(), Delta(), Delta() | Zstd(), Delta() | Shuffle() | Zstd())


def opener(archive: Archive) -> Callable[[SegmentId], SegmentFile]:
    return lambda segment: archive.open_segment(archive.segments()[segment][0])


def chain_of(archive: Archive, codec: Codec | None, arrays: list[Array]) -> list[Row]:
    """Write each array to a segment of its own, against the one before; the first stands alone."""
    written: list[Row] = []
    for serial, array in enumerate(arrays):
        base = (((0, serial - 1), 0), arrays[serial - 1]) if serial else None
        rows, parts = encode_tensors(codec, [tensor_of(0, "w", array, base)])
        archive.write_segment((0, serial), 0, rows, parts)
        written += rows
    return written


def drift(array: Array, steps: int) -> list[Array]:
    """Return versions of an array of which each differs from the one before in an element."""
    versions = [array]
    for step in range(1, steps):
        versions.append(versions[-1].copy())
        versions[-1].reshape(-1)[step % array.size] += 1
    return versions


class TestChains:
    @pytest.mark.parametrize("codec", LOSSLESS, ids=str)
    @pytest.mark.parametrize("dtype", ["float32", "int16", "uint8", "float64"])
    def test_every_version_of_a_chain_comes_back(self, tmp_path: Path, codec: Codec | None, dtype: str) -> None:
        archive = Archive(str(tmp_path))
        versions = drift(np.random.default_rng(0).integers(0, 99, (30, 40)).astype(dtype), DENSE_EVERY)
        rows = chain_of(archive, codec, versions)
        relative = codec is not None and codec.needs_base
        assert [row.base for row in rows] == [None, *[((0, i), 0) if relative else None for i in range(7)]]
        for serial, array in enumerate(versions):
            found = decode_slot(((0, serial), 0), array.nbytes, opener(archive))
            assert found.dtype == array.dtype
            assert np.array_equal(found, array)

    @given(data=st.data(), codec=st.sampled_from(LOSSLESS))
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_any_bytes_survive_a_chain(self, tmp_path: Path, data: st.DataObject, codec: Codec | None) -> None:
        archive = Archive(str(tmp_path))
        size = data.draw(st.integers(0, 40))
        versions = [
            np.frombuffer(data.draw(st.binary(min_size=4 * size, max_size=4 * size)), np.float32) for _ in range(3)
        ]
        chain_of(archive, codec, versions)
        for serial, array in enumerate(versions):
            assert decode_slot(((0, serial), 0), array.nbytes, opener(archive)).tobytes() == array.tobytes()

    def test_a_chain_that_is_too_long_is_refused(self, tmp_path: Path) -> None:
        archive = Archive(str(tmp_path))
        chain_of(archive, Delta(), drift(np.zeros(1000), DENSE_EVERY + 1))
        decode_slot(((0, DENSE_EVERY - 1), 0), 8000, opener(archive))
        with pytest.raises(CorruptDataError, match=r"segments/1.0.arrow: tensor 'w': expected a chain of at most 8"):
            decode_slot(((0, DENSE_EVERY), 0), 8000, opener(archive))

    def test_a_chain_that_ends_in_itself_is_refused(self, tmp_path: Path) -> None:
        archive = Archive(str(tmp_path))
        old, new = drift(np.zeros(1000), 2)
        for serial, other in ((0, 1), (1, 0)):
            rows, parts = encode_tensors(Delta(), [tensor_of(0, "w", new, (((0, other), 0), old))])
            archive.write_segment((0, serial), 0, rows, parts)
        with pytest.raises(CorruptDataError, match="expected a chain of at most 8"):
            decode_slot(((0, 0), 0), 8000, opener(archive))


class TestRows:
    def test_a_row_says_what_was_done(self) -> None:
        array, base = np.zeros(1000, np.float32), np.ones(1000, np.float32)
        against = (((0, 7), 3), base)
        (plain,), _ = encode_tensors(None, [tensor_of(0, "w", array, against)])
        assert (plain.codec, plain.stored, plain.nbytes, plain.base) == ("", 4000, 4000, None)
        assert plain.checksum == plain.digest
        (packed,), _ = encode_tensors(Zstd(), [tensor_of(0, "w", array, against)])
        assert (packed.codec, packed.base, packed.digest) == ("zstd(3)", None, plain.digest)
        assert packed.stored < 4000
        (same,), _ = encode_tensors(Delta(), [tensor_of(0, "w", array, (((0, 7), 3), array))])
        assert (same.base, same.digest) == (((0, 7), 3), plain.digest)
        assert same.codec.startswith("delta")

    def test_a_lossy_row_has_a_worst_error_and_no_digest(self) -> None:
        array = np.linspace(-1, 1, 1000, dtype=np.float32)
        (row,), _ = encode_tensors(Quantize(8), [tensor_of(0, "w", array)])
        assert row.digest == ""
        assert 0 < row.error < 2 / 255

    def test_an_integer_tensor_stays_exact_through_a_lossy_codec(self) -> None:
        (row,), _ = encode_tensors(Quantize(8) | Zstd(), [tensor_of(0, "w", np.arange(1000))])
        assert "quantize" not in row.codec
        assert row.error == 0
        assert row.digest

    @pytest.mark.parametrize("codec", [None, Zstd(), Quantize(8)], ids=str)
    def test_a_digest_that_was_not_known_is_that_of_the_bytes(self, codec: Codec | None) -> None:
        tensor = tensor_of(0, "w", np.linspace(0, 1, 1000))
        rows, _ = encode_tensors(codec, [tensor])
        assert encode_tensors(codec, [replace(tensor, digest=None)])[0] == rows
        assert rows[0].digest == ("" if codec == Quantize(8) else tensor.digest)


class TestBrokenChains:
    @pytest.fixture
    def archive(self, tmp_path: Path) -> Archive:
        archive = Archive(str(tmp_path))
        chain_of(archive, Delta(), drift(np.arange(1000.0), 3))
        return archive

    def rewrite(self, archive: Archive, serial: int, array: Array) -> None:
        rows, parts = encode_tensors(None, [tensor_of(0, "other", array)])
        archive.write_segment((0, serial), 1, rows, parts)

    def test_a_base_with_other_content_is_found_by_the_digest(self, archive: Archive) -> None:
        self.rewrite(archive, 0, np.arange(1000.0) + 1)
        with pytest.raises(CorruptDataError, match=r"segments/1.0.arrow: tensor 'w': expected content .* other"):
            decode_slot(((0, 2), 0), 8000, opener(archive))

    @pytest.mark.parametrize("array", [np.zeros(999), np.zeros(1000, np.float32), np.zeros((10, 100))], ids=str)
    def test_a_base_of_another_kind_is_named(self, archive: Archive, array: Array) -> None:
        self.rewrite(archive, 0, array)
        with pytest.raises(CorruptDataError, match=r"segments/(1.0.arrow: tensor 'w'|0.1.arrow: tensor 'other'): "):
            decode_slot(((0, 1), 0), 8000, opener(archive))

    def test_a_missing_file_is_named(self, archive: Archive) -> None:
        files = archive.segments()
        archive.delete_segments(["segments/0.0.arrow"])
        with pytest.raises(StorageError, match=r"segments/0.0.arrow: expected to open it"):
            decode_slot(((0, 2), 0), 8000, lambda segment: archive.open_segment(files[segment][0]))

    @pytest.mark.parametrize("codec", ["no-codec", "zstd(3)", "delta", "quantize(8)", "zstd(3", "gzip(6)|zstd(99)"])
    @pytest.mark.parametrize("content", [b"", b"\0" * 17, bytes(range(256))])
    def test_bytes_that_no_codec_made_are_named(self, tmp_path: Path, codec: str, content: bytes) -> None:
        archive = Archive(str(tmp_path))
        array = np.zeros(64, np.float32)
        (row,), _ = encode_tensors(None, [tensor_of(0, "w", array)])
        data = np.frombuffer(content, np.uint8)
        (other,), _ = encode_tensors(None, [tensor_of(0, "w", data)])
        forged = replace(row, codec=codec, stored=data.nbytes, checksum=other.checksum)
        archive.write_segment((0, 0), 0, [forged], [Encoded(codec, "float32", (64,), data)])
        with pytest.raises(CorruptDataError, match=r"segments/0.0.arrow: tensor 'w': "):
            decode_slot(((0, 0), 0), 256, opener(archive))

    def test_a_package_that_is_missing_is_named_with_the_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        archive = Archive(str(tmp_path))
        rows, parts = encode_tensors(Zstd(), [tensor_of(0, "w", np.zeros(1000))])
        archive.write_segment((0, 0), 0, rows, parts)
        monkeypatch.setitem(sys.modules, "zstandard", None)
        with pytest.raises(CodecUnavailableError, match=r"segments/0.0.arrow: tensor 'w': .*zstandard"):
            decode_slot(((0, 0), 0), 8000, opener(archive))


def test_places_of_other_segments_are_asked_for_by_their_id(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    old, new = drift(np.zeros(1000), 2)
    files: dict[SegmentId, StoredFile] = {}
    for place, array, base in ((((0, 5), 2), old, None), (((0, 6), 9), new, (((0, 5), 2), old))):
        rows, parts = encode_tensors(Delta(), [tensor_of(place[1], "w", array, base)])
        files[place[0]] = archive.write_segment(place[0], 0, rows, parts)
    asked: list[SegmentId] = []

    def open_segment(segment: SegmentId) -> SegmentFile:
        asked.append(segment)
        return archive.open_segment(files[segment])

    wanted: Slot = ((0, 6), 9)
    assert np.array_equal(decode_slot(wanted, new.nbytes, open_segment), new)
    assert asked == [(0, 6), (0, 5)]
