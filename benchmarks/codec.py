"""Codecs on trained weights: bytes, and speed of encoding and decoding, beside gzip, Zstandard and safetensors.

Rules
- The weights are trained (`trained`); only the speed of quantising is measured on larger tensors, which repeat
  them.
- All is done by one thread, tensor by tensor, as the repository does it. Bytes are those of the tensors: what a
  file adds is not counted, except in safetensors' own.
- A case names what share of the tensors' bytes is left.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from tensorvine.store import Codec, Delta, Encoded, Gzip, Quantize, Shuffle, Zstd
from tensorvine.store.codecs.codec import decode

from .measure import MIB, ONE_COPY, Action, Effort, Goal, Report, Row, Sample, Tensors, alternate, progress, total_bytes
from .trained import fine_tuning, trained_weights
from .training import Task

MODELS: tuple[Task, ...] = ("resnet", "ptychonn")
FINE_TUNED: tuple[Task, ...] = ("words", "resnet", "ptychonn")
ROUNDS = 5
PLAIN_GZIP, PLAIN_ZSTD, SAFETENSORS = "gzip(6), plain", "zstandard(3), plain", "safetensors"
REFERENCE = Quantize(8) | Gzip()
"""What Check-QZP stores."""
PEERS: dict[Codec, str] = {
    Zstd(): PLAIN_ZSTD,
    Shuffle() | Zstd(): PLAIN_GZIP,
    Quantize(8): SAFETENSORS,
    Quantize(8) | Zstd(): REFERENCE.spec,
    Quantize(8, "channel") | Zstd(): REFERENCE.spec,
    Quantize(4, 64) | Zstd(): REFERENCE.spec,
}
"""What is measured, and whom it is held against."""
FLOOR_PARTS = "two reads and a quarter of a write"


@dataclass(frozen=True)
class Way:
    """One way to turn tensors into bytes."""

    sample: Sample
    """Times of encoding all."""
    nbytes: int
    """Length of the result."""


def run(effort: Effort) -> Report:
    """Measure codecs on two trained networks and on versions of three fine-tunings."""
    quick = effort is Effort.QUICK
    report = Report("codec")
    for name in MODELS:
        tensors = trained_weights(name, quick=quick)
        progress(f"{name}: codecs on {total_bytes(tensors) / MIB:.1f} MiB")
        _codecs(report, name, tensors)
    for name in FINE_TUNED:
        progress(f"{name}: deltas between versions")
        _deltas(report, name, fine_tuning(name, 2 if quick else 4, quick=quick))
    source = np.concatenate([value.reshape(-1) for value in _floats(trained_weights("resnet", quick=quick)).values()])
    for size in (64 * MIB,) if quick else (64 * MIB, 256 * MIB):
        progress(f"quantising {size // MIB} MiB")
        _quantising(report, np.resize(source, size // 4))
    return report


def _floats(tensors: Tensors) -> Tensors:
    return {name: value for name, value in tensors.items() if value.dtype == np.float32}


def _codecs(report: Report, name: str, tensors: Tensors) -> None:
    ways = _encode_all(tensors)
    size = total_bytes(tensors)
    for codec in PEERS:
        ours = ways[codec.spec]
        quantised_with = codec.spec.startswith("quantize") and codec != Quantize(8)
        peer = {Zstd(): PLAIN_ZSTD, Quantize(8): SAFETENSORS}.get(
            codec, REFERENCE.spec if quantised_with else PLAIN_GZIP
        )
        other = ways[peer]
        encoded = {key: codec.encode(value) for key, value in tensors.items()}
        facts: dict[str, float | int | str] = {
            "stored_bytes": ours.nbytes,
            "peer_stored_bytes": other.nbytes,
            "encode_gb_per_s": size / ours.sample.median / 1e9,
            "decode_gb_per_s": size / _decoding(encoded).median / 1e9,
            "error_share_of_bound": _error_share(codec, encoded, tensors),
        }
        case = f"{name}: {codec.spec} {ours.nbytes / size:.1%}"
        goals = _goals(codec, ours, other, size, float(facts["error_share_of_bound"]))
        row = Row(case, ours.sample, size, f"{peer} {other.nbytes / size:.1%}", other.sample, goals=goals, facts=facts)
        report.add(row, headline=name == "resnet" and codec == Quantize(8) | Zstd())


def _encode_all(tensors: Tensors) -> dict[str, Way]:
    """Encode with all codecs and peers, in turn."""
    from safetensors.numpy import save
    from zstandard import ZstdCompressor

    def coded(codec: Codec) -> Callable[[], int]:
        return lambda: sum(codec.encode(value).nbytes for value in tensors.values())

    work: dict[str, Callable[[], int]] = {codec.spec: coded(codec) for codec in (*PEERS, REFERENCE)} | {
        PLAIN_GZIP: lambda: sum(len(gzip.compress(value.data, 6)) for value in tensors.values()),
        PLAIN_ZSTD: lambda: sum(len(ZstdCompressor(level=3).compress(value.data)) for value in tensors.values()),
        SAFETENSORS: lambda: len(save(tensors)),
    }
    samples = alternate({key: Action(each) for key, each in work.items()}, rounds=ROUNDS)
    return {key: Way(samples[key], each()) for key, each in work.items()}


def _decoding(encoded: Mapping[str, Encoded], bases: Mapping[str, Any] | None = None) -> Sample:
    def run_all() -> None:
        for key, each in encoded.items():
            decode(each, None if bases is None else bases[key])

    return alternate({"decode": Action(run_all)}, rounds=ROUNDS)["decode"]


def _error_share(codec: Codec, encoded: Mapping[str, Encoded], tensors: Tensors) -> float:
    """Return the largest error of a tensor as a share of its bound; 0 for what is not quantised per tensor.

    The bound is half a step, and half a unit in the last place of the largest float32.
    """
    if not isinstance(codec.stages[0], Quantize) or codec.stages[0].per != "tensor":
        return 0.0
    most = 0.0
    for key, value in _floats(tensors).items():
        wide = value.astype(np.float64)
        bound = float(np.ptp(wide)) / codec.stages[0].levels / 2 + float(np.abs(wide).max()) * 2.0**-24
        most = max(most, encoded[key].error / bound if bound else 0.0)
    return most


def _goals(codec: Codec, ours: Way, other: Way, size: int, error: float) -> tuple[Goal, ...]:
    faster = other.sample.median / ours.sample.median
    smaller = ours.nbytes / other.nbytes
    if codec == Quantize(8) | Zstd():
        return (
            Goal("share of the bytes of float32", ours.nbytes / size, at_most=0.25),
            Goal("times as fast as with gzip", faster, at_least=5),
            Goal("times the bytes with gzip", smaller, at_most=1),
            Goal("largest error, as a share of half a step and rounding", error, at_most=1 + 1e-6),
        )
    if codec == Shuffle() | Zstd():
        return (
            Goal("times as fast as gzip", faster, at_least=10),
            Goal("times the bytes of gzip", smaller, at_most=0.9999),
        )
    return ()


def _deltas(report: Report, name: str, versions: Sequence[Tensors]) -> None:
    pairs = [(new[key], old[key]) for old, new in pairwise(versions) for key in new]
    size = sum(new.nbytes for new, _ in pairs)
    changed = sum(np.count_nonzero(new != old) for new, old in pairs) / sum(new.size for new, _ in pairs)
    for tail in (Shuffle() | Zstd(), Zstd()):
        delta = Delta() | tail
        work = {
            "delta": lambda delta=delta: sum(delta.encode(new, old).nbytes for new, old in pairs),
            "dense": lambda tail=tail: sum(tail.encode(new).nbytes for new, _ in pairs),
        }
        samples = alternate({key: Action(each) for key, each in work.items()}, rounds=ROUNDS)
        mine, dense = work["delta"](), work["dense"]()
        encoded = {str(place): delta.encode(*pair) for place, pair in enumerate(pairs)}
        bases = {str(place): old for place, (_, old) in enumerate(pairs)}
        facts = {
            "changed_share": changed,
            "stored_bytes": mine,
            "peer_stored_bytes": dense,
            "encode_gb_per_s": size / samples["delta"].median / 1e9,
            "decode_gb_per_s": size / _decoding(encoded, bases).median / 1e9,
        }
        most = 0.3 if changed <= 0.1 else 1.01
        goals = (Goal(f"times the dense bytes, {changed:.1%} of the values changed", mine / dense, at_most=most),)
        case = f"{name}, {len(versions)} versions: {delta.spec} {mine / size:.1%}"
        peer = f"{tail.spec} {dense / size:.1%}"
        report.add(Row(case, samples["delta"], size, peer, samples["dense"], goals=goals, facts=facts))


def _quantising(report: Report, values: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    codes, buffer = np.zeros(values.size, np.uint8), np.zeros_like(values)
    quarter = values[: values.size // 4]
    samples = alternate(
        {
            "ours": Action(lambda: Quantize(8).encode(values)),
            "NumPy's plain formula": Action(lambda: _plain_formula(values)),
            ONE_COPY: Action(lambda: np.copyto(buffer, values)),
            "read": Action(lambda: _read(values)),
            "quarter": Action(lambda: np.copyto(codes.view(np.float32), quarter)),
        },
        rounds=3 * ROUNDS,
        warmup=2,
    )
    copy_s = samples[ONE_COPY].median
    floor_s = 2 * samples["read"].median + samples["quarter"].median / 2
    case = f"quantize(8,tensor), {values.nbytes // MIB} MiB"
    goal = Goal("memory copies", samples["ours"].median / copy_s, at_most=3)
    facts: dict[str, float | int | str] = {
        "encode_gb_per_s": values.nbytes / samples["ours"].median / 1e9,
        "floor": FLOOR_PARTS,
        "floor_s": floor_s,
        "copies_of_the_floor": floor_s / copy_s,
        "copies_of_the_plain_formula": samples["NumPy's plain formula"].median / copy_s,
    }
    plain = "NumPy's plain formula"
    report.add(Row(case, samples["ours"], values.nbytes, plain, samples[plain], ONE_COPY, copy_s, (goal,), facts))
    report.add(Row(f"{case}, floor", samples["ours"], values.nbytes, limit=FLOOR_PARTS, limit_s=floor_s))


def _plain_formula(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Quantise as equations 1 and 2 of Check-QZP read in NumPy."""
    low, high = values.min(), values.max()
    return np.round((values - low) / ((high - low) / np.float32(255))).astype(np.uint8)


def _read(values: np.ndarray[Any, np.dtype[np.float32]]) -> int:
    """Read all bytes as fast as NumPy can."""
    return int(np.bitwise_or.reduce(values.view(np.uint64)))
