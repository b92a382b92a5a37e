"""Patches: bytes and speed of updates, compared with the whole tensors, a raw socket and a chain of deltas.

Rules
- Tensors are bfloat16 noise; changed elements get other random bits, so only positions can be compressed.
- One thread encodes and decodes, and knows the content hashes of base and tensor, as a shard does. Numba is compiled
  before. Both sides check the hash of the result.
- Bytes are those of patches or blobs, without messages. The raw socket is a TCP connection within this machine.
- The peer is a chain in slime's format (`core/chains.py`): its reader needs each version between.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
from tensorvine.store.arrays import as_bytes
from tensorvine.store.patches import apply_patch, kernels, make_patch
from tensorvine.store.versions.manifest import digest_of

from .calls import connected
from .core.chains import NAME, Link, bits, replay
from .core.measure import MIB, ONE_COPY, Tensors, alternate, copying, expect, progress, total_bytes
from .core.report import Goal, Report
from .update_latency import receive

DTYPE = ml_dtypes.bfloat16
ROW, RUN = 1024, 64
"""Elements in a row of the embedding, and in a run."""
LAYERS = 10
ENCODE, DECODE = 1e9, 1.5e9
"""Bytes of tensors a second that one core should reach."""
RAW = "the whole over a raw socket"
Patches = dict[str, Any]
Change = Callable[[np.random.Generator, int], np.ndarray[Any, np.dtype[np.bool_]]]
"""Choose the elements that change, of a number of elements."""


def run(report: Report) -> None:
    """Measure patches of one tensor, between versions of a chain, and between siblings."""
    kernels.wait_until_compiled(2, 120.0)
    size, rounds = report.pick(quick=(2 * MIB, 2), normal=(256 * MIB, 7))
    for case, (change, goal) in CASES.items():
        progress(case)
        _one(report, case, change, goal, size, rounds)
    for apart in report.pick(quick=(1, 3), normal=(1, 10, 50)):
        progress(f"{apart} versions apart")
        _apart(report, apart, size // 4, rounds)
    progress("siblings")
    _siblings(report, size, rounds)


def _at_random(share: float) -> Change:
    return lambda rng, count: rng.random(count, np.float32) < share


def _together(share: float, length: int) -> Change:
    return lambda rng, count: np.repeat(rng.random(count // length) < share, length)


def _layer(_: np.random.Generator, count: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.arange(count) < count // LAYERS


CASES: dict[str, tuple[Change, tuple[str, float]]] = {
    "1% at random": (_at_random(0.01), ("share of the bytes", 0.02)),
    "5% at random": (_at_random(0.05), ("share of the bytes", 0.08)),
    f"5% in sorted runs of {RUN}": (_together(0.05, RUN), ("times what changed", 1.1)),
    f"5% of the rows of an embedding of {ROW}": (_together(0.05, ROW), ("times what changed", 1.1)),
    "one layer in ten": (_layer, ("times what changed", 1.1)),
}


def _model(rng: np.random.Generator, size: int, tensors: int = LAYERS) -> Tensors:
    """Make noise of `size` bytes."""
    return {f"layer{n}": as_noise(rng, size // 2 // tensors // ROW * ROW) for n in range(tensors)}


def as_noise(rng: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
    """Return bfloat16 numbers of random bits."""
    return rng.integers(0, 1 << 16, count, np.uint16).view(DTYPE)


def changed(rng: np.random.Generator, tensor: np.ndarray[Any, Any], mask: Any) -> np.ndarray[Any, Any]:
    """Copy a tensor with other bits in the masked elements."""
    found = tensor.copy()
    words = bits(found)
    words[mask] ^= rng.integers(1, 1 << 16, words[mask].shape, np.uint16)
    return found


def _patches(new: Tensors, old: Tensors, hashes: dict[str, tuple[str, str]]) -> Patches:
    """Make patches of the tensors whose content differs."""
    names = (name for name, (before, after) in hashes.items() if before != after)
    return {name: make_patch(new[name], old[name], hashes=hashes[name]) for name in names}


def _hashes(new: Tensors, old: Tensors) -> dict[str, tuple[str, str]]:
    return {name: (digest_of(as_bytes(old[name])), digest_of(as_bytes(new[name]))) for name in new}


def _apply(patches: Patches, old: Tensors, into: Tensors) -> None:
    for name, patch in patches.items():
        apply_patch(patch, old[name], into=as_bytes(into[name]))


def _nbytes(patches: Patches) -> int:
    return sum(len(patch) for patch in patches.values())


def _one(report: Report, case: str, change: Change, goal: tuple[str, float], size: int, rounds: int) -> None:
    rng = np.random.default_rng(7)
    if change is _layer:
        old = _model(rng, size)
        new = {**old, "layer3": changed(rng, old["layer3"], slice(None))}
        touched = old["layer3"].nbytes
    else:
        old = _model(rng, size, 1)
        mask = change(rng, old["layer0"].size)
        new = {"layer0": changed(rng, old["layer0"], mask)}
        touched = 2 * int(np.count_nonzero(mask))
    hashes, nbytes = _hashes(new, old), total_bytes(new)
    patches, link = _patches(new, old, hashes), Link(new, old)
    copy, behind = ({name: each.copy() for name, each in old.items()} for _ in range(2))
    _apply(patches, old, copy)
    expect(all(copy[name].tobytes() == new[name].tobytes() for name in patches), "patches", "the new tensors")
    with _socket(nbytes) as sent:
        found = alternate(
            {
                "encode": lambda: _patches(new, old, hashes),
                "decode": lambda: _apply(patches, old, copy),
                "arrives": lambda: (sent(_nbytes(_patches(new, old, hashes))), _apply(patches, old, copy)),
                "chain encodes": lambda: Link(new, old),
                "chain decodes": lambda: link.apply(behind),
                ONE_COPY: copying(new, copy),
                RAW: lambda: sent(nbytes),
            },
            rounds=rounds,
        )
    ours, theirs = _nbytes(patches), link.nbytes
    value = ours / (nbytes if "share" in goal[0] else touched)
    facts = {"sent_bytes": ours, "peer_sent_bytes": theirs, "changed_bytes": touched}
    peer = f"{NAME}, {theirs / nbytes:.2%}"
    length = Goal(f"{goal[0]}; the chain: {theirs / nbytes * value / (ours / nbytes):.3g}", value, at_most=goal[1])
    for what, least, floor in (("encode", ENCODE, ONE_COPY), ("decode", DECODE, ONE_COPY)):
        rate = nbytes / found[what].median
        speed = Goal("GB of tensors a second by one core", rate / 1e9, at_least=least / 1e9)
        report.add(
            f"{case}, {ours / nbytes:.2%}: {what}",
            found[what],
            nbytes,
            peer=(peer, found[f"chain {what}s"]),
            floor=(floor, found[floor]),
            goals=[length, speed] if what == "encode" else [speed],
            headline=what == "encode" and case == "1% at random",
            **facts,
        )
    report.add(f"{case}: arrives, encoded anew", found["arrives"], nbytes, floor=(RAW, found[RAW]), **facts)


def _apart(report: Report, apart: int, size: int, rounds: int) -> None:
    """Bring a reader up to date that is some versions behind, each of which changed 1%."""
    rng = np.random.default_rng(apart)
    versions = [_model(rng, size, 1)]
    for _ in range(apart):
        mask = rng.random(versions[-1]["layer0"].size, np.float32) < 0.01
        versions.append({"layer0": changed(rng, versions[-1]["layer0"], mask)})
    old, new = versions[0], versions[-1]
    links = [Link(after, before) for before, after in pairwise(versions)]
    del versions[1:-1]
    patches, nbytes = _patches(new, old, _hashes(new, old)), total_bytes(new)
    copy = {name: each.copy() for name, each in old.items()}
    found = alternate(
        {
            "patch": lambda: _apply(patches, old, copy),
            "chain": (lambda: _caught_up(old, links), lambda last: _check(last, new)),
            ONE_COPY: copying(new, copy),
        },
        rounds=rounds,
    )
    sent, chained = _nbytes(patches), sum(link.nbytes for link in links)
    report.add(
        f"{apart} version{'s'[: apart > 1]} apart, one patch of {sent / nbytes:.2%}: decode",
        found["patch"],
        nbytes,
        peer=(f"{NAME} of {apart}, {chained / nbytes:.2%}", found["chain"]),
        floor=(ONE_COPY, found[ONE_COPY]),
        goals=[Goal("times the bytes of the chain, which needs each version between", sent / chained, at_most=1.0)],
        sent_bytes=sent,
        peer_sent_bytes=chained,
    )


def _caught_up(old: Tensors, links: list[Link]) -> Tensors:
    copy = {name: each.copy() for name, each in old.items()}
    replay(links, copy)
    return copy


def _check(found: Tensors, wanted: Tensors) -> None:
    same = all(found[name].tobytes() == each.tobytes() for name, each in wanted.items())
    expect(same, "patches", "the newest version")


def _siblings(report: Report, size: int, rounds: int) -> None:
    """Go from one fine-tuned model to another with the same ancestor; they differ in 10% of the tensors.

    A chain leads back to the ancestor and forth again: a blob of each.
    """
    rng = np.random.default_rng(3)
    root = _model(rng, size, 2 * LAYERS)
    one, other = ({**root, name: changed(rng, root[name], slice(None))} for name in ("layer4", "layer5"))
    touched = root["layer4"].nbytes + root["layer5"].nbytes
    hashes, nbytes = _hashes(other, one), total_bytes(root)
    patches = _patches(other, one, hashes)
    copy = {name: each.copy() for name, each in one.items()}
    link = Link(root, one), Link(other, root)
    found = alternate(
        {
            "patch": lambda: _apply(patches, one, copy),
            "chain": lambda: _caught_up(one, list(link)),
            ONE_COPY: copying(other, copy),
        },
        rounds=rounds,
    )
    sent, chained = _nbytes(patches), sum(each.nbytes for each in link)
    report.add(
        f"siblings, 10% of the tensors differ, {sent / nbytes:.2%}: decode",
        found["patch"],
        nbytes,
        peer=(f"{NAME} by the ancestor, {chained / nbytes:.2%}", found["chain"]),
        floor=(ONE_COPY, found[ONE_COPY]),
        goals=[Goal("times the tensors that differ", sent / touched, at_most=1.001)],
        sent_bytes=sent,
        peer_sent_bytes=chained,
    )


@contextmanager
def _socket(most: int) -> Generator[Callable[[int], None]]:
    """Open a TCP connection within this machine; yield a function that sends bytes and waits for their receipt."""
    ours, theirs = connected()
    memory, target = np.ones(most, np.uint8).data, np.ones(most, np.uint8).data

    def take() -> None:
        while asked := theirs.recv(8, socket.MSG_WAITALL):
            receive(theirs, target[: int.from_bytes(asked, "big")])
            theirs.sendall(b"x")

    def sent(nbytes: int) -> None:
        ours.sendall(nbytes.to_bytes(8, "big"))
        ours.sendall(memory[:nbytes])
        ours.recv(1)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    try:
        yield sent
    finally:
        ours.shutdown(socket.SHUT_RDWR)
        thread.join()
        for end in (ours, theirs):
            end.close()
