"""Manifests as files: what is written is read, and every flipped bit is found."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping

import pyarrow as pa
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorvine.store.archive.manifestfile import Manifest, decode_manifest, encode_manifest, manifest_name
from tensorvine.store.archive.segmentfile import METADATA_KEY, Slot
from tensorvine.store.arrays import nbytes_of
from tensorvine.store.errors import CorruptDataError
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.segment import SegmentId
from tensorvine.store.versions.manifest import Header, TensorEntry

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = st.text("ab./", min_size=1, max_size=6).filter(lambda n: n[0] != "/" and ".." not in n.split("/"))
names |= st.text("az-_AZ09./", min_size=190, max_size=200).map(lambda n: n.strip("/").replace("..", "__") or "a")
refs = st.builds(ModelRef, names, st.integers(1, 10**18 - 1))
sizes = st.integers(0, 1 << 61)
serials = st.integers(0, 1 << 100)
slots = st.integers(0, 5000)
lengths = st.lists(st.integers(0, 1 << 20), max_size=3).map(tuple)


def place(serial: int) -> SegmentId:
    return 0, serial


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    ref = draw(refs)
    older = refs.filter(lambda other: other.name != ref.name or other.version < ref.version)
    header = Header(
        ref=ref,
        parent=draw(st.none() | older),
        quality=draw(st.none() | st.floats(allow_nan=False)),
        metadata=json.dumps(draw(st.dictionaries(texts, texts | st.integers() | st.none(), max_size=3))),
        created_ns=draw(st.integers(0, 1 << 62)),
        graph_key=draw(st.binary(max_size=16)),
        bytes_owned=draw(sizes),
        bytes_total=draw(sizes),
        codec=draw(st.none() | texts),
    )
    owner = st.none() | older
    chosen = draw(st.lists(st.tuples(serials, slots), unique=True, max_size=5))
    entries = {
        name: TensorEntry(dtype, shape, nbytes_of(dtype, shape), draw(owner), *where)
        for serial, slot in chosen
        for name, where in [(draw(texts) + f"/{serial}/{slot}", (place(serial), slot))]
        for dtype, shape in [(draw(st.sampled_from(["bool", "float32", "bfloat16"])), draw(lengths))]
    }
    bases = {
        (entry.segment, entry.slot): tuple((place(serial), slot) for serial, slot in chain)
        for entry in entries.values()
        if (chain := draw(st.lists(st.tuples(serials, slots), max_size=3, unique=True)))
        and (entry.segment[1], entry.slot) not in chain
    }
    return Manifest(header, (draw(texts), draw(st.none() | texts)), entries, bases)


def example(**changes: object) -> Manifest:
    header = Header(
        ref=ModelRef("a/b", 3),
        parent=ModelRef("a", 1),
        quality=0.5,
        metadata='{"k": "v"}',
        created_ns=123,
        graph_key=b"\1\2",
        bytes_owned=10,
        bytes_total=20,
        codec="zstd(3)",
    )
    entries = {
        "own/kernel": TensorEntry("float32", (2, 3), 24, None, (0, 5), 0),
        "inherited": TensorEntry("bfloat16", (), 2, ModelRef("a", 1), (0, 2), 7),
    }
    bases: Mapping[Slot, tuple[Slot, ...]] = {((0, 5), 0): (((0, 2), 7), ((0, 1), 3))}
    return dataclasses.replace(Manifest(header, ('{"layers": []}', None), entries, bases), **changes)


def decoded(content: bytes) -> Manifest:
    return decode_manifest(content, "here")


class TestRoundTrip:
    @given(data=st.data())
    @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def test_every_manifest_comes_back(self, data: st.DataObject) -> None:
        manifest = data.draw(manifests())
        layers = {name: "layer" for name in manifest.entries if len(name) % 2}
        assert decoded(encode_manifest(manifest, layers)) == manifest

    @given(data=st.data())
    @settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def test_a_retired_one_keeps_its_header_only(self, data: st.DataObject) -> None:
        manifest = dataclasses.replace(data.draw(manifests()), retired=True)
        content = encode_manifest(manifest, {})
        assert decoded(content) == Manifest(manifest.header, ("", None), {}, {}, retired=True)
        assert pa.ipc.open_file(content).get_batch(0).num_rows == 0

    @pytest.mark.parametrize("quality", [None, 0.0, -1.5, math.inf, -math.inf, 1e-300, 0.1 + 0.2])
    def test_a_quality_comes_back_as_it_was(self, quality: float | None) -> None:
        header = dataclasses.replace(example().header, quality=quality)
        assert decoded(encode_manifest(example(header=header), {})).header.quality == quality

    def test_a_quality_that_is_no_number_stays_so(self) -> None:
        header = dataclasses.replace(example().header, quality=math.nan)
        found = decoded(encode_manifest(example(header=header), {})).header.quality
        assert found is not None
        assert math.isnan(found)

    @pytest.mark.parametrize("text", ['"checksum": "' + "0" * 32 + '"', '{"checksum": "' + "0" * 32 + '"}', '", "'])
    def test_names_that_look_like_the_checksum_are_names(self, text: str) -> None:
        header = dataclasses.replace(example().header, metadata=json.dumps({text: text}))
        entries = {text: example().entries["inherited"]}
        manifest = Manifest(header, (text, text), entries, {})
        assert decoded(encode_manifest(manifest, {text: text})) == manifest


class TestNames:
    @given(refs, refs)
    @settings(max_examples=100, deadline=None)
    def test_no_two_versions_share_a_file_and_none_leaves_its_folder(self, one: ModelRef, other: ModelRef) -> None:
        found = manifest_name(one)
        assert (found == manifest_name(other)) == (one == other)
        assert os.path.normpath(found) == found
        assert found.startswith("manifests/")
        assert found.endswith(f"@{one.version}.arrow")

    @given(names, names)
    @settings(max_examples=100, deadline=None)
    def test_no_versions_file_is_another_ones_folder(self, one: str, other: str) -> None:
        assert not manifest_name(ModelRef(one, 1)).startswith(manifest_name(ModelRef(other, 1)) + "/")


class TestDamage:
    @pytest.mark.parametrize(("retired", "step"), [(False, 1), (True, 5)])
    def test_every_flipped_bit_is_found(self, retired: bool, step: int) -> None:
        content = encode_manifest(example(retired=retired), {"inherited": "layer"})
        damaged = bytearray(content)
        for position in range(0, len(content), step):
            for bit in range(8):
                damaged[position] ^= 1 << bit
                with pytest.raises(CorruptDataError, match=r"^here: expected"):
                    decoded(bytes(damaged))
                damaged[position] ^= 1 << bit
        assert decoded(bytes(damaged)).retired is retired

    def test_a_file_cut_anywhere_is_refused(self) -> None:
        content = encode_manifest(example(), {})
        for length in range(len(content)):
            with pytest.raises(CorruptDataError, match=r"^here: expected"):
                decoded(content[:length])

    @given(data=st.data())
    @settings(max_examples=200, deadline=None)
    def test_hostile_files_are_refused(self, data: st.DataObject) -> None:
        content = encode_manifest(example(), {})
        damaged = bytearray(content)
        start = data.draw(st.integers(0, len(content) - 1))
        patch = data.draw(st.sampled_from([b"\xff" * 8, b"\x7f" * 4, bytes(8)]) | st.binary(min_size=1, max_size=16))
        damaged[start : start + len(patch)] = patch
        if damaged == content:
            assert decoded(bytes(damaged)) == example()
            return
        with pytest.raises(CorruptDataError, match=r"^here: expected"):
            decoded(bytes(damaged))

    @pytest.mark.parametrize(
        ("fact", "value", "message"),
        [
            ("format", 2, "expected format 1; found 2"),
            ("format", None, "expected format 1; found None"),
            ("kind", "segment", "expected a manifest of a TensorVine repository"),
            ("ref", "no ref", "expected a manifest; found"),
            ("ref", "../a@1", "expected a manifest; found"),
            ("ref", 3, "expected a manifest; found"),
            ("parent", "a@0", "expected a manifest; found"),
            ("graph_key", "xy", "expected a manifest; found"),
            ("architecture", "!", "expected a manifest; found"),
            ("architecture", "AAAA", "expected a manifest; found"),
            ("architecture", None, "expected a manifest; found"),
        ],
    )
    def test_facts_that_make_no_manifest_are_refused_even_with_a_checksum(
        self, fact: str, value: object, message: str
    ) -> None:
        batch = pa.ipc.open_file(encode_manifest(example(), {})).get_batch(0)
        facts = json.loads(batch.schema.metadata[METADATA_KEY])
        facts |= {fact: value, "checksum": "0" * 32}
        sink = pa.BufferOutputStream()
        schema = batch.schema.with_metadata({METADATA_KEY: json.dumps(facts)})
        with pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(pa.record_batch(batch.columns, schema=schema))
        content = sink.getvalue().to_pybytes()
        checksum = xxhash.xxh3_128_hexdigest(content)
        with pytest.raises(CorruptDataError, match=f"^here: {message}"):
            decoded(content.replace(b'"' + b"0" * 32 + b'"', f'"{checksum}"'.encode()))

    def test_a_missing_batch_is_refused(self) -> None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, pa.schema([], metadata={METADATA_KEY: b'{"format": 1, "kind": "manifest"}'})):
            pass
        with pytest.raises(CorruptDataError, match=r"^here: expected a whole Arrow file"):
            decoded(sink.getvalue().to_pybytes())
