"""The bytes of one save on their way to one shard.

Rules
- Where the shard's memory is mapped: fill the parts of it that it granted. No message until all are filled. A part is
  locked while any thread here writes into it: an aborted save gives it back, but nobody gets it before that.
- To another node: the shard fetches the arrays from where they lie (`offer`). One that cannot connect to this process
  says so, once per connection to it: then blocks go into the engine's object store, at most `IN_FLIGHT` at a time.
- Either way the arrays are the caller's again when `write` returns.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from ....store.arrays import as_bytes, dtype_name
from ....store.errors import StoreFullError, TensorMismatchError
from ....store.holders import Save
from ....store.segments.arena import Part
from ....store.segments.segment import ALIGNMENT, SegmentId, layout, padded, split
from ....store.sizes import size
from ....store.versions.manifest import TensorEntry
from ....store.waiting import Deadline
from ...memory.copying import copy_all
from ...memory.memory import MemoryView
from ...rpc.channel import Answer
from ...rpc.messages import Filled
from ...shard.calls import ShardCalls
from ...shard.calls.copies import Original
from ...shard.segment_memory import INLINE_BYTES
from ..connections import Connection
from ..session import Session
from .offer import Offer
from .place import Place
from .request import once

log = logging.getLogger(__name__)

IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class _Block:
    """A segment to be."""

    id: SegmentId
    sizes: list[int]
    """Bytes of its tensors."""

    @property
    def length(self) -> int:
        return _length(self.sizes)


class Upload:
    """Brings tensors to a shard.

    Args:
        session: the client's.
        shard: which shard.
        save: holds what arrives until the commit.
        deadline: until when.
        what: names the save in errors.
        helper: runs half of the copying.
        granted: offsets of parts that the shard granted already, for blocks as `announce` gave them.
        granter: process id of the shard that did; what another incarnation of it granted is none.
    """

    def __init__(
        self,
        session: Session,
        shard: int,
        *,
        save: Save,
        deadline: Deadline,
        what: str,
        helper: Executor,
        granted: Sequence[int] = (),
        granter: int = 0,
    ) -> None:
        self.save = save
        self.blocks: list[Filled] = []
        """What the shard must still be told to take: segments, where they lie, and their tensors' sizes."""
        self.at: set[int] = set()
        """Other shards than the home that took some."""
        self.incarnation = 0
        """Process id of the shard whose memory was filled."""
        self.entries: dict[str, TensorEntry] = {}
        """The manifest's rows of what was written."""
        self._session = session
        self.shard = shard
        self._deadline = deadline
        self._what = what
        self._helper = helper
        self._granted = list(granted)
        self._granter = granter
        self._answers: list[Answer[None]] = []

    def write(self, arrays: Mapping[str, np.ndarray], at_home: bool) -> None:
        """Bring all tensors to the shard, or to where it can take them; the caller may change them afterwards.

        Tensors that are the same memory are brought once.

        Raises:
            StoreFullError: the shard has no room for them.
        """
        if not arrays:
            return
        first = once(arrays)
        names = [name for name, of in first.items() if name == of]
        values = [arrays[name] for name in names]
        self._write(names, values, at_home)
        self.entries.update({name: self.entries[of] for name, of in first.items()})

    def _write(self, names: list[str], values: list[np.ndarray], at_home: bool) -> None:
        total = sum(padded(array.nbytes) for array in values)
        if total <= INLINE_BYTES and at_home:
            self._pack_inline(self._block(names, values), values)
            return
        connection = self._connected(total)
        runs = split([array.nbytes for array in values])
        blocks = [self._block([names[i] for i in run], [values[i] for i in run]) for run in runs]
        sources = [[values[i] for i in run] for run in runs]
        self.incarnation = connection.hello.pid
        if self._granter != self.incarnation:
            self._granted = []
        if connection.view is not None:
            self._fill_parts(blocks, sources, connection.view)
        elif connection.unreached or not self._offered(blocks, sources, connection):
            self._put_blocks(blocks, sources)

    def allocate(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Place]:
        """Have memory granted for tensors that other processes bring, by `Place.bring`.

        Args:
            arrays: like the tensors.

        Raises:
            StoreFullError: the shard has no room for them.
        """
        names, values = list(arrays), list(arrays.values())
        self.incarnation = self._connected(sum(padded(array.nbytes) for array in values)).hello.pid
        places: dict[str, Place] = {}
        runs = split([array.nbytes for array in values])
        blocks = [self._block([names[i] for i in run], [values[i] for i in run]) for run in runs]
        offsets: list[int] = []
        for position, (run, block) in enumerate(zip(runs, blocks, strict=True)):
            if not offsets:
                left = self._deadline.left_for(self._what)
                lengths = [block.length for block in blocks[position:]]
                request = ShardCalls.allocate(self._session.client, self.save, lengths, left)
                offsets = self._session.call(self.shard, request, left + 1.0)
            part = Part(offsets.pop(0), block.length)
            self.blocks.append((block.id, part, block.sizes))
            for i, offset in zip(run, layout(block.sizes)[0], strict=True):
                places[names[i]] = Place(self.shard, self.save, part, offset, values[i].shape, values[i].itemsize)
        return places

    def copies(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the arrays as they lie in the shard's memory after `write`, locked in place while they live."""
        view = self._session.connection(self.shard, self._deadline).view
        if view is None:
            return {}
        at = {
            segment: (view.part(part), layout(sizes)[0])
            for segment, part, sizes in self.blocks
            if isinstance(part, Part)
        }
        made: dict[tuple[SegmentId, int], np.ndarray] = {}  # one for all names of a tied tensor
        for name, entry in self.entries.items():
            if entry.segment in at and (entry.segment, entry.slot) not in made:
                block, offsets = at[entry.segment]
                made[entry.segment, entry.slot] = _place(block, offsets[entry.slot], arrays[name])
        return {name: made[e.segment, e.slot] for name, e in self.entries.items() if (e.segment, e.slot) in made}

    def keep(self, names: Collection[str]) -> None:
        """Leave out what was written and turned out to be unchanged."""
        self.entries = {name: entry for name, entry in self.entries.items() if name in names}
        used = {entry.segment for entry in self.entries.values()}
        self.blocks = [block for block in self.blocks if block[0] in used]

    def places(self, where: Callable[[SegmentId], int]) -> dict[int, list[Filled]]:
        """Say which shards must still be told to take what: what lies in no shard's memory goes where it belongs."""
        places: dict[int, list[Filled]] = {}
        for block in self.blocks:
            shard = self.shard if isinstance(block[1], Part) else where(block[0])
            places.setdefault(shard, []).append(block)
        return places

    def taken(self, shard: int, blocks: Collection[Filled]) -> None:
        """Note that a shard has taken blocks."""
        self.at.add(shard)
        self.blocks = [block for block in self.blocks if block not in blocks]

    def finish(self) -> None:
        """Wait until the shard has taken what went through the object store."""
        while self._answers:
            self._wait()

    def _connected(self, nbytes: int) -> Connection:
        """Return the connection to the shard, if that ever has room for so many bytes."""
        connection = self._session.connection(self.shard, self._deadline)
        if nbytes > connection.hello.capacity:
            raise StoreFullError(
                f"expected at most {size(connection.hello.capacity)}, the capacity of shard "
                f"{self.shard}; found {size(nbytes)}"
            )
        return connection

    def _block(self, names: list[str], arrays: list[np.ndarray]) -> _Block:
        serial = self._session.topology.serial(self.shard, uuid.uuid4().int)  # its owner follows from it
        identity = (self.shard, serial)
        for slot, (name, array) in enumerate(zip(names, arrays, strict=True)):
            self.entries[name] = TensorEntry(dtype_name(array.dtype), array.shape, array.nbytes, None, identity, slot)
        return _Block(identity, [array.nbytes for array in arrays])

    def _pack_inline(self, block: _Block, arrays: list[np.ndarray]) -> None:
        self.blocks.append((block.id, self._packed(block, arrays).tobytes(), block.sizes))

    def _packed(self, block: _Block, arrays: list[np.ndarray]) -> np.ndarray:
        packed = np.zeros(layout(block.sizes)[1], np.uint8)
        copy_into(packed, arrays, self._helper)
        return packed

    def _fill_parts(self, blocks: list[_Block], sources: list[list[np.ndarray]], view: MemoryView) -> None:
        granted = self._granted
        for position, (block, arrays) in enumerate(zip(blocks, sources, strict=True)):
            if not granted:
                granted = self._grant([b.length for b in blocks[position:]])
            part = Part(granted.pop(0), block.length)
            if (found := [array.nbytes for array in arrays]) != block.sizes:
                raise TensorMismatchError(
                    f"{self._what}: expected tensors of {block.sizes} bytes, as memory was granted; found {found}"
                )
            copy_into(view.part(part, self._helper), arrays, self._helper)
            self.blocks.append((block.id, part, block.sizes))

    def _grant(self, lengths: list[int]) -> list[int]:
        left = self._deadline.left_for(self._what)
        request = ShardCalls.grant(self._session.client, self.save, lengths, left)
        return self._session.call(self.shard, request, left + 1.0)

    def _offered(self, blocks: list[_Block], sources: list[list[np.ndarray]], connection: Connection) -> bool:
        """Have the shard fetch blocks; False: it cannot connect to this process, and has none of them."""
        arrays = {block.id: some for block, some in zip(blocks, sources, strict=True)}
        try:
            offer = Offer(self._what, arrays, self._session.engine.address())
        except OSError as exc:
            reason: str | None = f"this process cannot listen: {exc}"
        else:
            with closing(offer):
                originals = {block.id: self._original(block, arrays[block.id]) for block in blocks}
                left = self._deadline.left_for(self._what)
                request = ShardCalls.pull(self.save, originals, offer.address, left)
                reason = self._session.call(self.shard, request, left + 1.0)
        if reason is not None:
            connection.unreached = True
            log.warning(
                "shard %d cannot fetch tensors from this process, they are sent with the calls: %s",
                self.shard,
                reason,
            )
        return reason is None

    def _original(self, block: _Block, arrays: list[np.ndarray]) -> Original:
        """Describe a block, with its bytes where they are few."""
        few = self._packed(block, arrays).tobytes() if block.length <= INLINE_BYTES else None
        return Original(tuple(block.sizes), tuple(range(len(block.sizes))), few)

    def _put_blocks(self, blocks: list[_Block], sources: list[list[np.ndarray]]) -> None:
        for block, arrays in zip(blocks, sources, strict=True):
            packed = as_bytes(arrays[0]) if len(arrays) == 1 else np.zeros(block.length, np.uint8)
            if len(arrays) > 1:
                copy_into(packed, arrays, self._helper)
            left = self._deadline.left_for(self._what)
            request = ShardCalls.adopt_block(self.save, block.id, packed, block.sizes, left)
            self._answers.append(self._session.send(self.shard, request))
            if len(self._answers) >= IN_FLIGHT:
                self._wait()

    def _wait(self) -> None:
        left = self._deadline.left_for(self._what)
        self._answers.pop(0).result(left)


def copy_into(block: np.ndarray, arrays: Sequence[np.ndarray], helper: Executor) -> None:
    """Copy arrays into a block, each at its aligned offset; `helper` copies half of many bytes."""
    offsets, _ = layout([array.nbytes for array in arrays])
    copy_all(((_place(block, offset, array), array) for offset, array in zip(offsets, arrays, strict=True)), helper)


def announce(arrays: Mapping[str, np.ndarray]) -> list[int]:
    """Return the lengths of the blocks that `Upload.write` makes of these arrays; none for what travels inline."""
    sizes = [arrays[name].nbytes for name, of in once(arrays).items() if name == of]
    if sum(padded(size) for size in sizes) <= INLINE_BYTES:
        return []
    return [_length([sizes[i] for i in run]) for run in split(sizes)]


def _length(sizes: Sequence[int]) -> int:
    """Return the length of a block of tensors; never 0, which a kernel lock would take for all that follows."""
    return max(layout(sizes)[1], ALIGNMENT)


def _place(block: np.ndarray, offset: int, array: np.ndarray) -> np.ndarray:
    """Return the bytes of a block that are to hold an array, as an array like it."""
    return block[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
