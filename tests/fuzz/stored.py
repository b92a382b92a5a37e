"""Targets: the files of a repository. Damage goes past their checksums: they are computed anew.

Rules
- A reader does what a shard does: of a manifest all that is remembered, of a segment each tensor, decoded.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import xxhash
from tensorvine.store.archive import numbers
from tensorvine.store.archive.archive import Archive
from tensorvine.store.archive.encoding import decode_slot, encode_tensors
from tensorvine.store.archive.manifestfile import Manifest, decode_manifest, encode_manifest
from tensorvine.store.archive.segmentfile import METADATA_KEY, Row, SegmentFile, pack, write_segment
from tensorvine.store.arrays import nbytes_of
from tensorvine.store.catalog.journal import frame, frames, replay, snapshot_of
from tensorvine.store.catalog.records import FileRecord, Placed, Record, Written, encoded
from tensorvine.store.catalog.reports import Staged
from tensorvine.store.catalog.state import CatalogState
from tensorvine.store.codecs.blocks import Encoded
from tensorvine.store.codecs.codec import Codec, decode, from_spec
from tensorvine.store.errors import CorruptDataError, TensorVineError
from tensorvine.store.graphs.graph import Layer, ModelGraph
from tensorvine.store.graphs.index import PrefixQuery
from tensorvine.store.graphs.pattern import PatternIndex
from tensorvine.store.holders import Request
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.segment import SegmentId
from tensorvine.store.versions.architectures import packed
from tensorvine.store.versions.manifest import Header, ModelInfo, TensorEntry, decode_body, digest_of, encode_body
from tensorvine.store.versions.slots import packed_slots, segment_bytes
from tensorvine.store.versions.version import Draft

from tests.fuzz.mutations import BORDERS, evil_number, evil_text, of_bytes, of_json
from tests.fuzz.target import Read, Target
from tests.support import number_logs
from tests.support.crash import tensor_of

EARLIER = Path(__file__).parents[1] / "data"
SEGMENT: SegmentId = (0, 0xAB)
REF = ModelRef("nas/a", 3)
GRAPH = ModelGraph(
    [
        Layer("in", {"class": "Input", "shape": [None, 4]}),
        Layer("a", {"class": "Dense", "units": 8, "rate": 0.5}, ["in"], ["dense/kernel"]),
        Layer("b", {"class": "Add", "of": {"x": [1, [2, {"y": None}]]}}, ["a", "in"]),
    ]
)
LARGE = 1 << 20
"""Bytes that no tensor has here: of what is packed, more than the allowed memory can come."""
_NO_CHECKSUM = b"0" * 32


# ---- manifests ----------------------------------------------------------------------------------------


def entries() -> dict[str, TensorEntry]:
    """Return a table of tensors, of several owners and segments."""
    return {
        "dense/kernel": TensorEntry("float32", (4, 8), 128, None, SEGMENT, 0),
        "dense/größe": TensorEntry("bfloat16", (3,), 6, ModelRef("nas/a", 2), (0, 0xAC), 1),
        "empty": TensorEntry("int8", (0, 3), 0, ModelRef("b", 1), (0, 0xAC), 2),
        "step": TensorEntry("int64", (), 8, None, SEGMENT, 7),
    }


def header(**changes: Any) -> Header:
    """Return a version's header."""
    facts: dict[str, Any] = {
        "ref": REF,
        "parent": ModelRef("nas/a", 2),
        "quality": 0.5,
        "metadata": '{"epoch": 3, "tags": ["x"]}',
        "created_ns": 1_700_000_000_000_000_000,
        "graph_key": bytes(range(16)),
        "bytes_owned": 136,
        "bytes_total": 142,
        "codec": "delta|zstd(3)",
    }
    return Header(**{**facts, **changes})


def _manifests(folder: Path) -> list[bytes]:
    whole = Manifest(header(), (GRAPH.to_json(), '{"recipe": 1}'), entries(), {(SEGMENT, 0): (((0, 0xAC), 1),)})
    root = Manifest(header(parent=None, quality=None, codec=None), (ModelGraph(()).to_json(), None), {}, {})
    retired = Manifest(header(), ("", None), {}, {}, retired=True)
    layers = {"dense/kernel": "a"}
    earlier = sorted(EARLIER.glob("*/manifests/**/*.arrow"))
    return [*(encode_manifest(each, layers) for each in (whole, root, retired)), *(p.read_bytes() for p in earlier)]


@contextmanager
def _manifest_reading(folder: Path) -> Iterator[Read]:
    def read(content: bytes) -> object:
        manifest = decode_manifest(content, "manifest")
        encode_manifest(manifest, {})
        state = CatalogState("start", on_path=True)
        if manifest.retired:
            state.restore_retired([manifest])
            return manifest
        state.restore(manifest)
        bases = {at: base for place, chain in manifest.bases.items() for at, base in pairwise((place, *chain))}
        state.restore_files(dict.fromkeys((SEGMENT, (0, 172)), (0, 9)), bases, [0])
        state.check()
        return ModelGraph.from_json(manifest.architecture[0]), ModelInfo.of(manifest.header)

    yield read


def _damaged_manifest(dice: Random, valid: Sequence[bytes]) -> bytes:
    content, way = dice.choice(valid), dice.random()
    if way < 0.4:
        return sealed(of_bytes(dice, content, valid))
    if way < 0.5:
        return of_bytes(dice, content, valid)
    return sealed(_with_other_values(dice, content))


def sealed(content: bytes) -> bytes:
    """Compute a manifest's checksum anew."""
    start = content.find(b'"checksum": "')
    if start < 0:
        return content
    start += len(b'"checksum": "')
    named = content[start : start + 32]
    plain = content.replace(b'"checksum": "' + named + b'"', b'"checksum": "' + _NO_CHECKSUM + b'"')
    checksum = xxhash.xxh3_128_hexdigest(plain).encode()
    return plain.replace(b'"checksum": "' + _NO_CHECKSUM + b'"', b'"checksum": "' + checksum + b'"')


def _with_other_values(dice: Random, content: bytes) -> bytes:
    """Write a whole Arrow file whose header or rows say something else."""
    batch = pa.ipc.open_file(pa.BufferReader(content)).get_batch(0)
    schema = batch.schema
    if dice.random() < 0.5 or not batch.num_rows:
        facts = of_json(dice, json.loads(schema.metadata[METADATA_KEY]))
        if isinstance(facts, dict):
            facts["checksum"] = _NO_CHECKSUM.decode()
        schema = schema.with_metadata({METADATA_KEY: _text_of(facts)})
    columns = {field.name: batch.column(field.name).to_pylist() for field in schema}
    return arrow_file(schema, {name: _other_values(dice, values) for name, values in columns.items()}, batch)


def _other_values(dice: Random, values: list[Any]) -> list[Any]:
    if not values or dice.random() < 0.8:
        return values
    return [of_json(dice, value) if dice.random() < 0.5 else value for value in values]


def arrow_file(schema: Any, columns: Mapping[str, list[Any]], otherwise: Any) -> bytes:
    """Write columns as an Arrow file; one that its type cannot hold stays as in the batch `otherwise`."""
    arrays = []
    for field in schema:
        try:
            arrays.append(pa.array(columns[field.name], field.type))
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            arrays.append(otherwise.column(field.name))
        if len(arrays[-1]) != otherwise.num_rows:
            arrays[-1] = otherwise.column(field.name)
    sink = pa.BufferOutputStream()
    batch = pa.record_batch(arrays, schema=schema)
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _text_of(facts: object) -> bytes:
    return json.dumps(facts).encode("utf-8", "replace")


# ---- the journal --------------------------------------------------------------------------------------


def _journals(folder: Path) -> list[bytes]:
    """Return streams of a catalog: one is a snapshot alone, the other goes on with decisions of each kind."""
    state = CatalogState("start", on_path=True)
    stream = b"".join(snapshot_of(state.snapshot(b"token")))

    def decide(*records: Record) -> None:
        nonlocal stream
        state.apply_all(records)
        stream += b"".join(frame(encoded(record)) for record in records)

    for version, slots in enumerate(([0, 1], [0, 1, 5]), 1):
        segment = (0, 0xAB + version)
        draft = Draft(
            name="nas/a",
            save=Request("0123456789abcdef", version),
            parent=state.newest("nas/a"),
            quality=0.5,
            metadata="{}",
            graph_key=b"key",
            architecture=packed((GRAPH.to_json(), None)),
            fingerprints=PrefixQuery.of(GRAPH),
            body=encode_body(entries()),
            slots=packed_slots({segment: slots}),
            bytes_owned=4,
            bytes_total=8,
        )
        decide(*state.decide_commit(draft, {segment: Staged(6, (0, 1))}, now_ns=version))
    file = FileRecord(7, 900, ((0, 2),), ((1, segment_bytes((0, 0xAD)), 5),))
    decide(Placed(((segment_bytes((0, 0xAC)), 6, 0, (1,), file),)), Written((("nas/a", 1),)))
    decide(*state.decide_retire(Request("0123456789abcdef", 9), "nas/a", 1))
    decide(Written((("nas/a", 1),)), *state.decide_free())
    state.references.place((0, 0xAD), 6, keeper=0, copies=(), file=None)
    decide(*state.decide_lost([(0, 0xAD)]))
    return [stream, b"".join(snapshot_of(state.snapshot(b"token")))]


@contextmanager
def _journal_reading(folder: Path) -> Iterator[Read]:
    def read(content: bytes) -> object:
        state = CatalogState("start", on_path=True)
        replay(state, content)
        state.restore_files({SEGMENT: (0, 9)}, {}, [0])
        return b"".join(snapshot_of(state.snapshot(b"token")))

    yield read


def _damaged_journal(dice: Random, valid: Sequence[bytes]) -> bytes:
    """Damage records within whole frames, or bytes of the stream; leave records out, repeat and exchange them."""
    stream = dice.choice(valid)
    if dice.random() < 0.2:
        return of_bytes(dice, stream, valid)
    records = [bytes(record) for record, _ in frames(stream)]
    for _ in range(dice.choice((1, 1, 2, 5))):
        at, way = dice.randrange(len(records)), dice.random()
        if way < 0.6:
            records[at] = of_bytes(dice, records[at], records)
        elif way < 0.8:
            records.insert(at, dice.choice(records))
        elif len(records) > 1:
            del records[at]
    return b"".join(map(frame, records))


# ---- segments -----------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def arrays() -> dict[str, np.ndarray]:
    """Return tensors of several dtypes, which several codecs make smaller."""
    dice = np.random.default_rng(1)
    return {
        "dense/kernel": dice.normal(size=(40, 50)).astype(np.float32),
        "half": dice.normal(size=300).astype(ml_dtypes.bfloat16),
        "step": np.array(7, np.int64),
        "mask": np.arange(5000) % 3 == 0,
        "empty": np.zeros((0, 3), np.float16),
        "größe": np.full((10, 10, 10), 3, np.uint8),
        "even": np.arange(3000, dtype=np.float64),
    }


CODECS = ("", "zstd(3)", "shuffle|zstd(3)", "shuffle|gzip(6)", "quantize(8)|zstd(3)", "quantize(4,channel)|zstd(1)")
CODECS += ("quantize(3,64)|gzip(6)", "delta|shuffle|zstd(3)", "delta")


def _encoded(spec: str, base: bool = False) -> tuple[list[Row], list[Encoded]]:
    """Encode the tensors; with bases, the odd slots against the ones before."""
    codec: Codec | None = from_spec(spec) if spec else None
    tensors = []
    for slot, (name, array) in enumerate(arrays().items()):
        tensors.append(tensor_of(2 * slot, name, array))
        if base:
            other = array.copy()
            other.reshape(-1)[::50] = 1
            tensors.append(tensor_of(2 * slot + 1, f"{name}'", other, ((SEGMENT, 2 * slot), array)))
    return encode_tensors(codec, tensors)


def _segments(folder: Path) -> list[bytes]:
    earlier = [path.read_bytes() for path in sorted(EARLIER.glob("*/segments/*.arrow"))]
    written = [_segment(folder, *_encoded(spec, spec.startswith("delta"))) for spec in CODECS]
    return [*written, *earlier]


def _segment(folder: Path, rows: Sequence[Row], encoded: Sequence[Encoded]) -> bytes:
    archive = Archive(str(folder / "made"))
    write_segment(archive.directory, "segments/ab.0.arrow", SEGMENT, rows, pack(encoded))
    return (folder / "made/segments/ab.0.arrow").read_bytes()


class _InMemory:
    """Stands for a directory that takes one file."""

    content = b""

    def write(self, name: str, fill: Any) -> int:
        sink = pa.BufferOutputStream()
        fill(sink)
        self.content = sink.getvalue().to_pybytes()
        return len(self.content)


@contextmanager
def _segment_reading(folder: Path) -> Iterator[Read]:
    archive = Archive(str(folder / "segments"))
    path = folder / "segments/segments/ab.0.arrow"
    path.parent.mkdir(exist_ok=True)

    def read(content: bytes) -> object:
        path.write_bytes(content)
        with closing(SegmentFile(archive.directory, "segments/ab.0.arrow")) as file:
            first: TensorVineError | None = None
            for slot in list(file.rows):
                try:
                    decode_slot((file.segment, slot), _nbytes(file.rows[slot]), lambda segment: file)
                except TensorVineError as exc:
                    first = first or exc
            if first is not None:
                raise first
        return None

    yield read


def _nbytes(row: Row) -> int:
    """Say how long a tensor is, as its manifest would."""
    known = arrays().get(row.name.rstrip("'"))
    return known.nbytes if known is not None else min(row.nbytes, LARGE)


def _damaged_segment(dice: Random, valid: Sequence[bytes]) -> bytes:
    if dice.random() < 0.35:
        return of_bytes(dice, dice.choice(valid), valid)
    spec = dice.choice(CODECS)
    rows, encoded = _cached(spec)
    rows, encoded = list(rows), list(encoded)
    for _ in range(dice.choice((1, 1, 2, 5))):
        at = dice.randrange(len(rows))
        row, part = rows[at], encoded[at]
        if dice.random() < 0.4:
            data = np.frombuffer(of_bytes(dice, part.data.tobytes()), np.uint8)
            encoded[at] = replace(part, data=data)
            rows[at] = replace(row, stored=len(data), checksum=digest_of(data))
        else:
            rows[at] = _other_row(dice, row)
    memory: Any = _InMemory()
    try:
        write_segment(memory, "", SEGMENT, rows, pack(encoded))
    except (pa.ArrowException, OverflowError, TypeError, ValueError, MemoryError):  # no Arrow file can say so
        return of_bytes(dice, dice.choice(valid), valid)
    return memory.content


@lru_cache(maxsize=16)
def _cached(spec: str) -> tuple[list[Row], list[Encoded]]:
    return _encoded(spec, spec.startswith("delta"))


def _other_row(dice: Random, row: Row) -> Row:
    what = dice.choice(("slot", "name", "dtype", "shape", "nbytes", "codec", "checksum", "digest", "base"))
    base = dice.choice((None, (SEGMENT, dice.randrange(16)), (SEGMENT, row.slot), ((0, dice.choice(BORDERS)), 0)))
    shape = list(row.shape) or [1]
    shape[dice.randrange(len(shape))] = evil_number(dice, shape[0])
    values: dict[str, Any] = {
        "slot": dice.randrange(-2, 16),
        "name": evil_text(dice, row.name),
        "dtype": dice.choice(("float32", "int4", "bool", "object", "V8", "complex64", evil_text(dice, row.dtype))),
        "shape": dice.choice((tuple(shape), (), (-1,), row.shape[::-1], row.shape * 20)),
        "nbytes": evil_number(dice, row.nbytes),
        "codec": dice.choice((*CODECS, evil_text(dice, row.codec), "quantize(8,1)", "gzip(6)|zstd(3)|gzip(1)")),
        "checksum": evil_text(dice, row.checksum),
        "digest": dice.choice(("", evil_text(dice, row.digest))),
        "base": base,
    }
    return replace(row, **{what: values[what]})


# ---- what else is stored ------------------------------------------------------------------------------


def _codec_inputs(folder: Path) -> list[bytes]:
    return [_codec_input(spec, part) for spec in CODECS for part in _cached(spec)[1]]


def _codec_input(spec: str, part: Encoded) -> bytes:
    return json.dumps([part.codec, part.dtype, part.shape]).encode() + b"\n" + part.data.tobytes()


@cache
def _compiled() -> None:
    """Have loops compiled that quantise, and that undo it."""
    with _codec_reading(Path()) as read:
        for content in _codec_inputs(Path()):
            read(content)


@contextmanager
def _codec_reading(folder: Path) -> Iterator[Read]:
    def read(content: bytes) -> object:
        codec, dtype, shape = json.loads(content.partition(b"\n")[0])
        data = np.frombuffer(content.partition(b"\n")[2], np.uint8)
        if nbytes_of(dtype, shape) > LARGE:
            raise CorruptDataError("its manifest says another length")
        base = next((a for a in arrays().values() if (a.dtype.name, list(a.shape)) == (dtype, shape)), None)
        return decode(Encoded(codec, dtype, tuple(shape), data), base)

    yield read


def _damaged_codec(dice: Random, valid: Sequence[bytes]) -> bytes:
    text, _, data = dice.choice(valid).partition(b"\n")
    codec, dtype, shape = json.loads(text)
    way = dice.random()
    if way < 0.15:
        shape = [abs(evil_number(dice, length)) for length in shape]
    elif way < 0.25:
        codec = dice.choice((*CODECS, evil_text(dice, codec)))
    elif way < 0.3:
        dtype = dice.choice(("float64", "int8", "complex64", "int4", evil_text(dice, dtype)))
    if way > 0.2:
        data = of_bytes(dice, data)
    return json.dumps([codec, dtype, shape]).encode() + b"\n" + data


def _json_damaged(dice: Random, valid: Sequence[bytes]) -> bytes:
    """Damage a text of JSON: its values, or its bytes."""
    content = dice.choice(valid)
    if dice.random() < 0.4:
        return of_bytes(dice, content, valid)
    return json.dumps(of_json(dice, json.loads(content))).encode()


@contextmanager
def _body_reading(folder: Path) -> Iterator[Read]:
    yield lambda content: encode_body(decode_body(content, REF))


@contextmanager
def _graph_reading(folder: Path) -> Iterator[Read]:
    def read(content: bytes) -> object:
        graph = ModelGraph.from_json(content)
        PrefixQuery.of(graph)
        patterns: PatternIndex[bytes] = PatternIndex()
        patterns.add(b"key", graph)
        return graph.common_prefix(GRAPH), GRAPH.common_prefix(graph), ModelGraph.from_json(graph.to_json())

    yield read


@contextmanager
def _numbers_reading(folder: Path) -> Iterator[Read]:
    yield numbers.decoded


@contextmanager
def _mark_reading(folder: Path) -> Iterator[Read]:
    shutil.rmtree(folder / "mark", ignore_errors=True)  # the last reader's mark is damaged
    Archive(str(folder / "mark"))
    path = folder / "mark/repository.json"

    def read(content: bytes) -> object:
        path.write_bytes(content)
        return Archive(str(folder / "mark"), create=False)

    yield read


STORED = (
    Target("manifest", _manifests, _manifest_reading, _damaged_manifest),
    Target("journal", _journals, _journal_reading, _damaged_journal),
    Target("segment", _segments, _segment_reading, _damaged_segment, compiled=_compiled),
    Target("codec", _codec_inputs, _codec_reading, _damaged_codec, compiled=_compiled),
    Target("body", lambda folder: [encode_body(entries())], _body_reading, _json_damaged),
    Target("graph", lambda folder: [GRAPH.to_json().encode()], _graph_reading, _json_damaged),
    Target("numbers", lambda folder: [number_logs.encoded([REF, ModelRef("b", 1)])], _numbers_reading),
    Target("mark", lambda folder: [b'{"format": 1}'], _mark_reading, _json_damaged),
)
