"""Content that follows from ids, so that whoever reads a tensor can check it without knowing who wrote it.

Rules
- A number says everything of a tensor: dtype, shape and bytes. Every 8 bytes of it differ from those of other numbers
  and of other places, so that a shifted, stale or foreign byte is seen; the first 8 are the number.
- Each version has one tensor that says which save wrote it and which numbers its other tensors have: its `Card`.
- Nothing here knows a repository or a process.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from tensorvine.store import Layer, ModelGraph

KINDS: tuple[tuple[np.dtype, tuple[int, ...]], ...] = (
    (np.dtype(np.float32), (25,)),
    (np.dtype(np.int16), (3, 500)),
    (np.dtype(np.float32), (50_000,)),
    (np.dtype(np.uint8), (200_001,)),
    (np.dtype(ml_dtypes.bfloat16), (64, 1000)),
    (np.dtype(np.float64), (3, 0, 5)),
    (np.dtype(np.int64), ()),
    (np.dtype(np.float32), (600, 1000)),
)
"""Dtype and shape by number modulo their count: some travel in messages, some lie in shared memory; one is empty."""
LARGE = (np.dtype(np.float32), (1500, 1000))
"""What numbers of `LARGE_FROM` and above have: to fill memory with."""
LARGE_FROM = 1 << 40
BACKBONE = ("base0", "base1", "base2")
"""Layers that versions of a family share."""
WHO = "who"
"""Name of the tensor that holds the card."""
_ODD = np.uint64(0x9E3779B97F4A7C15)
_FAR = 0xD6E8FEB86659FD93
_CHECK = 4
"""Bytes of a checksum."""


def content(number: int) -> np.ndarray:
    """Return the tensor of a number.

    >>> content(8).dtype, content(8).shape, int(content(2).view(np.uint64)[0])
    (dtype('float32'), (25,), 2)
    """
    dtype, shape = LARGE if number >= LARGE_FROM else KINDS[number % len(KINDS)]
    nbytes = math.prod(shape) * dtype.itemsize
    words = np.arange(-(-nbytes // 8), dtype=np.uint64)
    words += np.uint64(number * _FAR % (1 << 64))
    words *= _ODD
    words ^= words >> np.uint64(29)
    if len(words):
        words[0] = number
    return words.view(np.uint8)[:nbytes].view(dtype).reshape(shape)


def difference(found: np.ndarray, number: int) -> str | None:
    """Say how a tensor differs from what its number says; None when it does not."""
    expected = content(number)
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"expected {expected.dtype} {expected.shape}; found {found.dtype} {found.shape}"
    mine, theirs = _bytes(found), _bytes(expected)
    if np.array_equal(mine, theirs):
        return None
    wrong = np.flatnonzero(mine != theirs)
    head = int(mine[:8].view(np.uint64)[0]) if mine.nbytes >= 8 else 0
    whose = f", which begin as number {head} would" if head != number else ""
    return f"expected number {number}; found {len(wrong)} of {mine.nbytes} bytes wrong from {wrong[0]} on{whose}"


@dataclass(frozen=True, slots=True)
class Card:
    """What a version says of itself."""

    save: str
    """Id of the save that wrote it; never used twice."""
    name: str
    """Name under which it was saved."""
    numbers: Mapping[str, int]
    """Tensor -> number, of all others."""

    def tensor(self) -> np.ndarray:
        """Return it as bytes: a checksum, then text."""
        text = json.dumps([self.save, self.name, dict(self.numbers)]).encode()
        return np.frombuffer(zlib.crc32(text).to_bytes(_CHECK, "little") + text, np.uint8)

    @classmethod
    def of(cls, found: np.ndarray) -> Card:
        """Read one.

        Raises:
            ValueError: these bytes are none.
        """
        data = found.tobytes()
        text = data[_CHECK:]
        if found.dtype != np.uint8 or zlib.crc32(text).to_bytes(_CHECK, "little") != data[:_CHECK]:
            raise ValueError(f"expected a card; found {found.dtype} {found.shape} that begins {data[:24]!r}")
        save, name, numbers = json.loads(text)
        return cls(save, name, numbers)

    def arrays(self, given: Iterable[str]) -> dict[str, np.ndarray]:
        """Return tensors to save: these, and the card."""
        return {name: content(self.numbers[name]) for name in given} | {WHO: self.tensor()}

    def wrong(self, found: Mapping[str, np.ndarray]) -> list[str]:
        """Say which of the tensors found are not the version's."""
        problems: list[str] = []
        for name, array in found.items():
            if name == WHO:
                expected, mine = self.tensor(), np.asarray(array)
                if mine.dtype != expected.dtype or not np.array_equal(mine, expected):
                    problems.append(f"{WHO}: expected the card of {self.save}; found other bytes")
            elif name not in self.numbers:
                problems.append(f"{name}: expected one of {sorted(self.numbers)}")
            elif (text := difference(array, self.numbers[name])) is not None:
                problems.append(f"{name}: {text}")
        return problems


def graph_of(family: int, save: str) -> ModelGraph:
    """Return an architecture: the backbone of its family, and a head of its own."""
    layers = [Layer("in", {"class": "Input"})]
    for depth, layer in enumerate(BACKBONE):
        config = {"class": "Dense", "units": 10 * family + depth}
        layers.append(Layer(layer, config, [layers[-1].name], [f"{layer}/w", f"{layer}/b"]))
    layers.append(Layer("head", {"class": "Head", "of": save}, [layers[-1].name], ["head/w", "head/b", WHO]))
    return ModelGraph(layers)


def names_of(layers: Iterable[str]) -> list[str]:
    """Name the tensors of layers of a backbone, or of `head` without the card.

    >>> names_of(["head"])
    ['head/w', 'head/b']
    """
    return [f"{layer}/{part}" for layer in layers for part in "wb"]


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
