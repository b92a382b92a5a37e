"""A manifest's table travels as text and comes back as it was, or is refused."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.store.errors import CorruptDataError
from tensorvine.store.refs import ModelRef
from tensorvine.store.versions.manifest import (
    Header,
    ModelInfo,
    TensorEntry,
    decode_body,
    digest_of,
    encode_body,
    slots_of,
)

REF = ModelRef("m", 7)
OWNERS = [None, ModelRef("m", 6), ModelRef("root/of-all", 1)]

entries = st.builds(
    TensorEntry,
    st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "bool"]),
    st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple),
    st.integers(0, 1 << 60),
    st.sampled_from(OWNERS),
    st.tuples(st.integers(0, 3), st.integers(0, (1 << 60) - 1)),
    st.integers(0, 9),
)
names = st.text(max_size=8) | st.sampled_from(["a\ud800b", "\0", 'quote"', "層/核:0"])
tables = st.dictionaries(names, entries, max_size=6)


class TestBody:
    @given(tables)
    def test_a_table_reads_back_with_its_order_and_its_own_version_as_owner(
        self, table: dict[str, TensorEntry]
    ) -> None:
        decoded = decode_body(encode_body(table), REF)
        assert list(decoded) == list(table)
        for name, entry in table.items():
            assert decoded[name].owner == (entry.owner or REF)
            assert [getattr(decoded[name], f) for f in TensorEntry.__slots__ if f != "owner"] == [
                getattr(entry, f) for f in TensorEntry.__slots__ if f != "owner"
            ]

    @given(tables, st.data())
    def test_damaged_text_is_refused_or_still_a_table(self, table: dict[str, TensorEntry], data: st.DataObject) -> None:
        body = bytearray(encode_body(table))
        start = data.draw(st.integers(0, len(body)))
        body[start : start + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
        try:
            decoded = decode_body(bytes(body), REF)
        except CorruptDataError:  # the only error that damage may raise
            return
        assert all(isinstance(entry, TensorEntry) for entry in decoded.values())

    @pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{}", b"\xff", b'{"owners":["no version"]}'])
    def test_what_is_no_table_is_refused(self, body: bytes) -> None:
        with pytest.raises(CorruptDataError, match="m@7"):
            decode_body(body, REF)

    @pytest.mark.parametrize("column", ["name", "dtype", "shape", "nbytes", "owner", "segment", "slot"])
    def test_columns_of_unequal_length_are_refused(self, column: str) -> None:
        columns = json.loads(encode_body({"t": TensorEntry("float32", (1,), 4, None, (0, 1), 0)}))
        columns[column] = []
        with pytest.raises(CorruptDataError, match="m@7"):
            decode_body(json.dumps(columns).encode(), REF)

    @pytest.mark.parametrize("column", ["dtype", "owner", "segment"])
    @pytest.mark.parametrize("index", [1, -1])
    def test_an_index_beyond_its_list_is_refused(self, column: str, index: int) -> None:
        columns = json.loads(encode_body({"t": TensorEntry("float32", (1,), 4, None, (0, 1), 0)}))
        columns[column] = [index]
        with pytest.raises(CorruptDataError, match="m@7"):
            decode_body(json.dumps(columns).encode(), REF)


class TestSlots:
    @given(st.lists(entries, max_size=8))
    def test_each_named_slot_stands_once_under_its_segment(self, rows: list[TensorEntry]) -> None:
        grouped = slots_of(rows)
        flat = [(segment, slot) for segment, slots in grouped.items() for slot in slots]
        assert sorted(flat) == sorted({(entry.segment, entry.slot) for entry in rows})


class TestDigest:
    @given(st.binary(max_size=300))
    def test_a_digest_is_xxh3_128_of_the_bytes(self, text: bytes) -> None:
        assert digest_of(np.frombuffer(text, np.uint8)) == xxhash.xxh3_128_hexdigest(text)


class TestInfo:
    def test_info_is_the_header_with_metadata_and_time_read(self) -> None:
        header = Header(
            ref=REF,
            parent=OWNERS[1],
            quality=0.5,
            metadata='{"epoch": 3}',
            created_ns=1_700_000_000_123_456_000,
            graph_key=b"key",
            bytes_owned=40,
            bytes_total=100,
        )
        info = ModelInfo.of(header)
        assert (info.ref, info.parent, info.quality, info.metadata) == (REF, OWNERS[1], 0.5, {"epoch": 3})
        assert (info.bytes_owned, info.bytes_total, info.codec) == (40, 100, None)
        expected = datetime(2023, 11, 14, 22, 13, 20, 123456, tzinfo=UTC)
        assert info.created.tzinfo is UTC
        assert abs(info.created - expected) <= timedelta(microseconds=1)


@pytest.mark.parametrize(
    ("column", "value"), [("dtypes", [["int8"]]), ("segments", [[0, [1]]]), ("segments", [[0.5, 1]])]
)
def test_a_table_whose_dtypes_or_segments_are_none_is_refused(column: str, value: object) -> None:
    entry = TensorEntry("int8", (1,), 1, None, (0, 1), 0)
    columns = json.loads(encode_body({"a": entry})) | {column: value}
    with pytest.raises(CorruptDataError, match=r"manifest of m@1: expected a table of tensors"):
        decode_body(json.dumps(columns).encode(), ModelRef("m", 1))
