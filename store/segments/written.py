"""Which bytes of a part are written, where several processes bring its tensors piece by piece.

Rules
- A piece is a box of a tensor: a start and a stop along each axis. A piece that comes twice is written once.
- A part is complete if the pieces cover each byte of its tensors exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from .segment import layout

Box = tuple[tuple[int, int], ...]
"""Start and stop along each axis, the last of which counts the bytes of an element."""


class Written:
    """The pieces that are written into one part.

    >>> written = Written()
    >>> written.add(0, (4, 8), ((0, 2), (0, 8))), written.add(0, (4, 8), ((0, 2), (0, 8)))
    (True, False)
    >>> written.fault([32])
    'tensor 0: 2 to 4 of axis 0, written by no chunk'
    >>> written.add(0, (4, 8), ((2, 4), (0, 8))), written.fault([32])
    (True, None)
    """

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, tuple[int, ...]], set[Box]] = {}
        """(where a tensor starts in the part, its shape) -> its pieces."""

    def add(self, offset: int, shape: tuple[int, ...], box: Box) -> bool:
        """Record a piece that is about to be written; return False if it was recorded before.

        Args:
            offset: where the tensor starts in the part.
            shape: the tensor's, with the bytes of an element as its last axis.
            box: the piece, which is not empty.
        """
        boxes = self._boxes.setdefault((offset, shape), set())
        before = len(boxes)
        boxes.add(box)
        return len(boxes) > before

    def fault(self, sizes: Sequence[int]) -> str | None:
        """Return which byte is not written exactly once; None if there is none.

        Args:
            sizes: bytes of the part's tensors.
        """
        starts = {offset: slot for slot, offset in enumerate(layout(sizes)[0]) if sizes[slot]}
        for (offset, shape), boxes in self._boxes.items():
            slot = starts.pop(offset, None)
            if slot is None or prod(shape) != sizes[slot]:
                return f"a chunk is written to a tensor of {prod(shape)} bytes at {offset}, where none starts"
            fault = _fault(shape, list(boxes), 0)
            if fault is not None:
                return f"tensor {slot}: {fault}"
        return next((f"tensor {slot} is written by no chunk" for slot in starts.values()), None)


def _fault(shape: Sequence[int], boxes: Sequence[Box], axis: int) -> str | None:
    """Return where the boxes do not cover a tensor exactly once, along `axis` and those after it.

    Cuts the tensor along the axis wherever a box starts or stops, and looks at each slice by itself.
    """
    if axis == len(shape):
        return None if len(boxes) == 1 else f"written by {len(boxes)} different chunks"
    coming = sorted(boxes, key=lambda box: box[axis], reverse=True)
    present: list[Box] = []
    for start, stop in pairwise(sorted({0, shape[axis], *(at for box in boxes for at in box[axis])})):
        present = [box for box in present if box[axis][1] > start]
        while coming and coming[-1][axis][0] == start:
            present.append(coming.pop())
        fault = _fault(shape, present, axis + 1) if present else "written by no chunk"
        if fault is not None:
            return f"{start} to {stop} of axis {axis}, {fault}"
    return None
