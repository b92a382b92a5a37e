"""Blocks: arrays that a process keeps for others, for as long as their handle in it lives.

Rules
- A block is a copy that nobody can change. Who has a handle gets it from its owner, by a connection of its own; in the
  owner itself it is there. It ends with its owner.
- A handle that travels is the owner's address and a key, and does not keep the block.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np

from ....store.errors import ModelLostError
from ..sockets.packing import immutable
from .records import Reach

GROUP = "data"
"""In which blocks are asked for."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that has blocks."""

    id: str
    node: str | None
    reach: Reach


@dataclass(frozen=True, slots=True)
class BlockHandle:
    """A block of another process."""

    owner: Owner
    key: str


class Block:
    """A block of this process, which lives as long as this; elsewhere it is a `BlockHandle`."""

    __slots__ = ("__weakref__", "_owner", "array", "key")

    def __init__(self, array: np.ndarray, owner: Callable[[], Owner]) -> None:
        self.array = immutable(array)
        self.key = uuid.uuid4().hex
        self._owner = owner

    def __reduce__(self) -> tuple[type[BlockHandle], tuple[Owner, str]]:
        return BlockHandle, (self._owner(), self.key)


class Blocks:
    """Those of one process.

    Args:
        owner: says who this process is; called when a handle leaves it.

    >>> blocks = Blocks(lambda: None)
    >>> block = blocks.put(np.arange(3))
    >>> blocks.find(block.key).tolist()
    [0, 1, 2]
    """

    def __init__(self, owner: Callable[[], Owner]) -> None:
        self._owner = owner
        self._blocks: WeakValueDictionary[str, Block] = WeakValueDictionary()

    def put(self, array: np.ndarray) -> Block:
        """Keep a copy."""
        block = Block(array, self._owner)
        self._blocks[block.key] = block
        return block

    def find(self, key: str) -> np.ndarray:
        """Return a block.

        Raises:
            ModelLostError: its handle here is no more.
        """
        block = self._blocks.get(key)
        if block is None:
            raise ModelLostError(f"block {key}: expected it in the memory of its owner; it was released there")
        return block.array
