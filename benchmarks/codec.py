"""Size and speed of codecs on trained weights and on fine-tuned versions, compared with gzip.

Rules
- The weights are trained; only the speed of quantising is measured on larger tensors, which repeat them.
- One thread encodes tensor by tensor, as the repository does. Sizes are those of the tensors.
- A case names the share of the tensors' bytes that is left.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from tensorvine.store import Codec, Delta, Encoded, Gzip, Quantize, Shuffle, Zstd

from .core.measure import MIB, ONE_COPY, Sample, Tensors, alternate, progress, total_bytes
from .core.report import Effort, Goal, Report
from .core.trainings import Task, fine_tuning, trained_weights

MODELS: tuple[Task, ...] = ("resnet", "ptychonn")
FINE_TUNED: tuple[Task, ...] = ("words", "resnet")
LOSSLESS, QUANTISED, CHECK_QZP = Shuffle() | Zstd(), Quantize(8) | Zstd(), Quantize(8) | Gzip()
PLAIN_GZIP, FORMULA = "gzip(6), plain", "NumPy's plain formula"


def run(report: Report) -> None:
    """Measure codecs on two trained networks and on versions of two fine-tunings."""
    small, rounds = report.effort is not Effort.NORMAL, report.pick(quick=1, normal=5)
    for name in MODELS:
        progress(f"{name}: codecs")
        _codecs(report, name, trained_weights(name, quick=small), rounds)
    for name in FINE_TUNED:
        progress(f"{name}: deltas between versions")
        _deltas(report, name, fine_tuning(name, 2 if small else 4, quick=small), rounds)
    floats = _floats(trained_weights("resnet", quick=small))
    source = np.concatenate([value.reshape(-1) for value in floats.values()])
    for size in report.pick(quick=(4 * MIB,), normal=(64 * MIB, 256 * MIB)):
        progress(f"quantising {size // MIB} MiB")
        _quantising(report, np.resize(source, size // 4), 3 * rounds)


def _floats(tensors: Tensors) -> Tensors:
    return {name: value for name, value in tensors.items() if value.dtype == np.float32}


def _in_turn(work: Mapping[str, Callable[[], int]], rounds: int) -> dict[str, tuple[Sample, int]]:
    """Encode in all ways, in turn; return the times and the bytes of each."""
    found = alternate(work, rounds=rounds)
    return {name: (found[name], each()) for name, each in work.items()}


def _codecs(report: Report, name: str, tensors: Tensors, rounds: int) -> None:
    def coded(codec: Codec) -> Callable[[], int]:
        return lambda: sum(codec.encode(value).nbytes for value in tensors.values())

    size = total_bytes(tensors)
    work = {codec.spec: coded(codec) for codec in (LOSSLESS, QUANTISED, CHECK_QZP)}
    work[PLAIN_GZIP] = lambda: sum(len(gzip.compress(value.data, 6)) for value in tensors.values())
    found = _in_turn(work, rounds)
    for codec, peer in ((LOSSLESS, PLAIN_GZIP), (QUANTISED, CHECK_QZP.spec)):
        (ours, stored), (theirs, peer_stored) = found[codec.spec], found[peer]
        faster, smaller = theirs.median / ours.median, stored / peer_stored
        facts: dict[str, Any] = {"stored_bytes": stored, "peer_stored_bytes": peer_stored}
        if codec is LOSSLESS:
            goals = [
                Goal("times as fast as gzip", faster, at_least=10),
                Goal("times the bytes of gzip", smaller, at_most=0.9999),
            ]
        else:
            error = _error_share({key: codec.encode(value) for key, value in _floats(tensors).items()}, tensors)
            facts["error_share_of_bound"] = error
            goals = [
                Goal("share of the bytes of float32", stored / size, at_most=0.25),
                Goal("times as fast as with gzip", faster, at_least=5),
                Goal("times the bytes with gzip", smaller, at_most=1),
                Goal("largest error, as a share of half a step and rounding", error, at_most=1 + 1e-6),
            ]
        report.add(
            f"{name}: {codec.spec} {stored / size:.1%}",
            ours,
            size,
            peer=(f"{peer} {peer_stored / size:.1%}", theirs),
            goals=goals,
            headline=name == "resnet" and codec is QUANTISED,
            **facts,
        )


def _error_share(encoded: Mapping[str, Encoded], tensors: Tensors) -> float:
    """Return the largest error of a tensor as a share of half a step and half a unit in the last place."""
    most = 0.0
    for key, each in encoded.items():
        wide = tensors[key].astype(np.float64)
        bound = float(np.ptp(wide)) / 255 / 2 + float(np.abs(wide).max()) * 2.0**-24
        most = max(most, each.error / bound if bound else 0.0)
    return most


def _deltas(report: Report, name: str, versions: Sequence[Tensors], rounds: int) -> None:
    pairs = [(new[key], old[key]) for old, new in pairwise(versions) for key in new]
    size = sum(new.nbytes for new, _ in pairs)
    changed = sum(np.count_nonzero(new != old) for new, old in pairs) / sum(new.size for new, _ in pairs)
    delta = Delta() | LOSSLESS
    found = _in_turn(
        {
            "delta": lambda: sum(delta.encode(new, old).nbytes for new, old in pairs),
            "dense": lambda: sum(LOSSLESS.encode(new).nbytes for new, _ in pairs),
        },
        rounds,
    )
    (ours, stored), (theirs, peer_stored) = found["delta"], found["dense"]
    what = f"times the dense bytes, {changed:.1%} of the values changed"
    report.add(
        f"{name}, {len(versions)} versions: {delta.spec} {stored / size:.1%}",
        ours,
        size,
        peer=(f"{LOSSLESS.spec} {peer_stored / size:.1%}", theirs),
        goals=[Goal(what, stored / peer_stored, at_most=0.3 if changed <= 0.1 else 1.01)],
        changed_share=changed,
        stored_bytes=stored,
        peer_stored_bytes=peer_stored,
    )


def _quantising(report: Report, values: np.ndarray[Any, np.dtype[np.float32]], rounds: int) -> None:
    buffer = np.zeros_like(values)

    def formula() -> Any:
        """Quantise as equations 1 and 2 of Check-QZP read in NumPy."""
        low, high = values.min(), values.max()
        return np.round((values - low) / ((high - low) / np.float32(255))).astype(np.uint8)

    found = alternate(
        {"ours": lambda: Quantize(8).encode(values), FORMULA: formula, ONE_COPY: lambda: np.copyto(buffer, values)},
        rounds=rounds,
        warmup=2,
    )
    copies = found["ours"].median / found[ONE_COPY].median
    report.add(
        f"quantize(8,tensor), {values.nbytes // MIB} MiB",
        found["ours"],
        values.nbytes,
        peer=(FORMULA, found[FORMULA]),
        floor=(ONE_COPY, found[ONE_COPY]),
        goals=[Goal("memory copies", copies, at_most=3)],
    )
