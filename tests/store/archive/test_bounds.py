"""Files that claim to be large: none takes more memory than its bytes allow, and each is refused by name."""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from tensorvine.store.archive.archive import Archive
from tensorvine.store.archive.encoding import decode_slot, encode_tensors
from tensorvine.store.archive.manifestfile import Manifest, SlotLists, decode_manifest, encode_manifest
from tensorvine.store.archive.segmentfile import METADATA_KEY
from tensorvine.store.arrays import nbytes_of
from tensorvine.store.bounds.allowance import SPARE_BYTES
from tensorvine.store.codecs.codec import Codec
from tensorvine.store.codecs.compress import Gzip, Zstd
from tensorvine.store.errors import CorruptDataError
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.segment import SEGMENT_SLOTS
from tensorvine.store.versions.manifest import Header, TensorEntry

from tests.support.crash import tensor_of
from tests.support.memory import check_refused

HEADER = Header(
    ref=ModelRef("m", 1),
    parent=None,
    quality=None,
    metadata="{}",
    created_ns=0,
    graph_key=b"",
    bytes_owned=0,
    bytes_total=0,
    codec=None,
)
EMPTY = Manifest(HEADER, ("{}", None), {}, {})


def entry(slot: int = 0, serial: int = 1, shape: tuple[int, ...] = (2,)) -> TensorEntry:
    return TensorEntry("float32", shape, nbytes_of("float32", shape), None, (0, serial), slot)


def forged(
    batch: pa.RecordBatch, facts: Mapping[str, object] = {}, options: pa.ipc.IpcWriteOptions | None = None
) -> bytes:
    """Write a manifest of these columns, with a checksum that fits."""
    said = {**json.loads(batch.schema.metadata[METADATA_KEY]), **facts, "checksum": "0" * 32}
    schema = batch.schema.with_metadata({METADATA_KEY: json.dumps(said)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=options) as writer:
        writer.write_batch(pa.record_batch(batch.columns, schema=schema))
    content = sink.getvalue().to_pybytes()
    checksum = xxhash.xxh3_128_hexdigest(content)
    return content.replace(b'"checksum": "' + b"0" * 32, f'"checksum": "{checksum}'.encode(), 1)


def batch_of(manifest: Manifest) -> pa.RecordBatch:
    return pa.ipc.open_file(encode_manifest(manifest, {})).get_batch(0)


def read(content: bytes) -> Manifest:
    return decode_manifest(content, "here")


def deflated(nbytes: int, unit: bytes = b" ") -> str:
    """Compress a JSON text that is that long."""
    text = b'["' + unit * (nbytes // len(unit)) + b'", null]'
    return base64.b64encode(zlib.compress(text, 9)).decode()


class TestManifest:
    def test_an_architecture_is_unpacked_no_further_than_its_bytes_allow(self) -> None:
        """2.7 MB became 2.1 GB."""
        content = forged(batch_of(EMPTY), {"architecture": deflated(150 << 20)})
        assert len(content) < 500_000
        check_refused(lambda: read(content), len(content), "here: .*architecture: expected at most .* found more")

    def test_an_architecture_of_many_small_things_is_not_parsed(self) -> None:
        plain = b"[" + b"[]," * 6_000_000 + b"0]"
        content = forged(batch_of(EMPTY), {"architecture": base64.b64encode(zlib.compress(plain, 9)).decode()})
        check_refused(lambda: read(content), len(content), "here: .*architecture: expected JSON that takes at most")

    @pytest.mark.parametrize("text", ['[" "', '["a", 3]', '["a"]', "3", '{"a": 1, "b": 2}', "[" * 100_000])
    def test_an_architecture_that_is_another_text_is_refused(self, text: str) -> None:
        content = forged(batch_of(EMPTY), {"architecture": base64.b64encode(zlib.compress(text.encode())).decode()})
        with pytest.raises(CorruptDataError, match="here: expected a manifest"):
            read(content)

    def test_what_follows_the_architecture_is_refused(self) -> None:
        packed = zlib.compress(b'["{}", null]')
        for wrong in (packed[:-1], packed + b"\0", b""):
            content = forged(batch_of(EMPTY), {"architecture": base64.b64encode(wrong).decode()})
            with pytest.raises(CorruptDataError, match=r"here: .*architecture"):
                read(content)

    @pytest.mark.parametrize(("text"), ["x" * 24_000_000, '{"a": 1}, ' * 104_000], ids=["long", "full"])
    def test_what_is_written_is_read_however_well_it_compresses(self, text: str) -> None:
        manifest = dataclasses.replace(EMPTY, architecture=(text, None))
        assert read(encode_manifest(manifest, {})) == manifest

    def test_a_slot_that_no_segment_has_is_refused(self) -> None:
        for slot in (SEGMENT_SLOTS, (1 << 31) - 1):
            content = encode_manifest(dataclasses.replace(EMPTY, entries={"w": entry(slot)}), {})
            check_refused(
                lambda content=content: read(content), len(content), f"here: .* slot below 524288; found {slot}"
            )
        bases = {((0, 1), 0): (((0, 2), SEGMENT_SLOTS),)}
        content = encode_manifest(dataclasses.replace(EMPTY, entries={"w": entry()}, bases=bases), {})
        with pytest.raises(CorruptDataError, match=r"here: .* slot below 524288"):
            read(content)

    def test_slots_far_apart_in_many_segments_are_refused(self) -> None:
        entries = {f"w{serial}": entry(SEGMENT_SLOTS - 1, serial) for serial in range(9)}
        content = encode_manifest(dataclasses.replace(EMPTY, entries=entries), {})
        check_refused(lambda: read(content), len(content), "here: .*m@1: expected consecutive slots")

    def test_slots_far_apart_in_many_manifests_are_refused_by_the_one_that_goes_too_far(self) -> None:
        lists = SlotLists()
        each = [dataclasses.replace(EMPTY, entries={"w": entry(SEGMENT_SLOTS - 1, serial)}) for serial in range(9)]
        room = SPARE_BYTES // (24 * SEGMENT_SLOTS)
        for manifest in each[:room]:
            lists.add(manifest, 1000)
        lists.add(each[0], 1000)  # the same segment: its list is there
        with pytest.raises(CorruptDataError, match="expected consecutive slots"):
            lists.add(each[room], 1000)
        dense = dataclasses.replace(EMPTY, entries={f"w{slot}": entry(slot, 99) for slot in range(1000)})
        lists.add(dense, len(encode_manifest(dense, {})))

    @pytest.mark.parametrize(
        ("column", "values"),
        [
            ("dtype", ["object"]),
            ("dtype", [None]),
            ("shape", [[1 << 40, 1 << 40]]),
            ("shape", [[-1, -2]]),
            ("shape", [[2] * 100]),
            ("shape", [None]),
            ("shape", [[None]]),
            ("nbytes", [1 << 62]),
            ("nbytes", [-8]),
            ("nbytes", [None]),
            ("slot", [-1]),
            ("slot", [None]),
            ("segment", ["f" * 65]),
            ("segment", [None]),
            ("owner", [None]),
            ("bases", [["ff/9999999999"]]),
        ],
    )
    def test_a_row_that_cannot_be_is_refused(self, column: str, values: list[object]) -> None:
        batch = batch_of(dataclasses.replace(EMPTY, entries={"w": entry()}))
        place = batch.schema.get_field_index(column)
        changed = batch.set_column(place, batch.schema.field(place), pa.array(values, batch.schema.field(place).type))
        content = forged(changed.replace_schema_metadata(batch.schema.metadata))
        with pytest.raises(CorruptDataError, match="here: expected a manifest; found"):
            read(content)

    @pytest.mark.parametrize(
        ("fact", "value"),
        [
            ("metadata", "["),
            ("metadata", "[]"),
            ("metadata", "[" * 5000),
            ("metadata", None),
            ("quality", "good"),
            ("created_ns", -1),
            ("created_ns", 1 << 70),
            ("created_ns", 0.5),
            ("bytes_total", None),
            ("codec", 3),
            ("state", None),
            ("state", "gone"),
            ("parent", "m@1"),
            ("parent", "m@7"),
            ("parent", 3),
            ("graph_key", 3),
        ],
    )
    def test_a_header_that_cannot_be_is_refused(self, fact: str, value: object) -> None:
        content = forged(batch_of(EMPTY), {fact: value})
        with pytest.raises(CorruptDataError, match="here: expected a manifest; found"):
            read(content)


class TestArrow:
    def test_compressed_columns_are_refused_before_they_are_decompressed(self) -> None:
        entries = {f"{'w' * 4000}{i}": entry(i) for i in range(20_000)}
        batch = batch_of(dataclasses.replace(EMPTY, entries=entries))
        content = forged(batch, options=pa.ipc.IpcWriteOptions(compression="zstd"))
        assert len(content) < batch.nbytes // 100
        check_refused(lambda: read(content), len(content), "here: expected a whole Arrow file of one batch")

    def test_more_than_one_batch_is_refused(self) -> None:
        batch = batch_of(EMPTY)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
            writer.write_batch(batch)
        with pytest.raises(CorruptDataError, match="here: expected a whole Arrow file of one batch"):
            read(sink.getvalue().to_pybytes())

    @pytest.mark.parametrize(
        "column",
        [
            pa.nulls(1),
            pa.array(["w"]).dictionary_encode(),
            pa.array(["w"], pa.string_view()),
            pa.array([b"w"]),
            pa.RunEndEncodedArray.from_arrays(pa.array([1 << 40]), pa.array(["w"])).slice(0, 1),
        ],
        ids=["null", "dictionary", "view", "binary", "runs"],
    )
    def test_columns_of_another_kind_are_refused(self, column: pa.Array) -> None:
        batch = batch_of(dataclasses.replace(EMPTY, entries={"w": entry()}))
        changed = batch.set_column(1, "layer", column).replace_schema_metadata(batch.schema.metadata)
        with pytest.raises(CorruptDataError, match="here: expected"):
            read(forged(changed))


class TestSegment:
    @pytest.mark.parametrize("codec", [Zstd(), Gzip()], ids=str)
    def test_a_tensor_longer_than_the_manifest_says_is_not_decoded(self, tmp_path: Path, codec: Codec) -> None:
        """51 kB of Zstandard were decoded to 1.5 GB, and then compared."""
        archive = Archive(str(tmp_path))
        rows, parts = encode_tensors(codec, [tensor_of(0, "w", np.zeros(20 << 20, np.float64))])
        file = archive.write_segment((0, 0), 0, rows, parts)
        check_refused(
            lambda: decode_slot(((0, 0), 0), 4000, lambda _: archive.open_segment(file)),
            file.nbytes,
            r"segments/0.0.arrow: tensor 'w': expected 4000 bytes; found 167772160",
        )

    def test_a_base_longer_than_what_is_encoded_against_it_is_not_decoded(self, tmp_path: Path) -> None:
        archive = Archive(str(tmp_path))
        rows, parts = encode_tensors(Zstd(), [tensor_of(0, "w", np.zeros(20 << 20, np.float64))])
        archive.write_segment((0, 0), 0, rows, parts)
        rows, parts = encode_tensors(None, [tensor_of(0, "v", np.zeros(500))])
        archive.write_segment((0, 1), 0, [dataclasses.replace(rows[0], codec="delta", base=((0, 0), 0))], parts)
        files = archive.segments()
        check_refused(
            lambda: decode_slot(((0, 1), 0), 4000, lambda s: archive.open_segment(files[s][0])),
            sum(file.nbytes for found in files.values() for file in found),
            r"segments/0.0.arrow: tensor 'w': expected 4000 bytes",
        )

    @pytest.mark.parametrize(
        "change",
        [
            {"shape": (1 << 40, 1 << 40)},
            {"shape": (-1, -500)},
            {"shape": (499,)},
            {"nbytes": 1 << 62},
            {"nbytes": -1},
            {"dtype": "object"},
            {"slot": SEGMENT_SLOTS},
            {"slot": -1},
            {"checksum": None},
        ],
        ids=str,
    )
    def test_a_row_that_cannot_be_is_refused(self, tmp_path: Path, change: dict[str, object]) -> None:
        archive = Archive(str(tmp_path))
        rows, parts = encode_tensors(None, [tensor_of(0, "w", np.zeros(500))])
        file = archive.write_segment((0, 0), 0, [dataclasses.replace(rows[0], **change)], parts)
        with pytest.raises(CorruptDataError, match=r"segments/0.0.arrow: expected"):
            archive.open_segment(file)

    def test_a_slot_that_stands_twice_is_refused(self, tmp_path: Path) -> None:
        archive = Archive(str(tmp_path))
        rows, parts = encode_tensors(None, [tensor_of(0, "w", np.zeros(500)), tensor_of(0, "v", np.ones(500))])
        with pytest.raises(CorruptDataError, match=r"segments/0.0.arrow: expected rows"):
            archive.open_segment(archive.write_segment((0, 0), 0, rows, parts))


def test_a_file_with_a_name_that_no_segment_has_is_passed_by(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    (tmp_path / "segments").mkdir()
    (tmp_path / "segments" / ("f" * 100 + ".0.arrow")).write_bytes(b"")
    (tmp_path / "segments" / ("f." + "9" * 100 + ".arrow")).write_bytes(b"")
    assert archive.segments() == {}
