"""The bytes of one save on their way to one shard.

Rules
- Few bytes travel with the commit, to whatever shard.
- Where the shard's memory is mapped: fill the parts of it that it granted. No message until all are filled. A part is
  locked while any thread here writes into it: an aborted save gives it back, but nobody gets it before that. So whether
  the save was given up is looked at after the part was locked.
- To another node: the shard fetches the arrays from where they lie (`offer`). One that cannot connect to this process
  says so, once per connection to it: then blocks go into the engine's object store, at most `IN_FLIGHT` at a time.
- Either way the arrays are the caller's again when `write` returns.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from ....store.arrays import as_bytes, dtype_name
from ....store.errors import ShardUnavailableError, StoreFullError, TensorMismatchError
from ....store.segments.arena import Part
from ....store.segments.blockheader import HEADER_BYTES, generation_in
from ....store.segments.segment import ALIGNMENT, Block, SegmentId, layout, new_segment, padded, split
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
from ..catalog import Catalog
from ..connections import Connection
from ..requests import Numbered
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
    sizes: tuple[int, ...]
    """Bytes of its tensors."""

    @property
    def length(self) -> int:
        return _length(self.sizes)


class Upload:
    """Brings tensors to a shard.

    Args:
        session: the client's.
        shard: which shard.
        numbered: the save, which holds what arrives until the commit.
        deadline: until when.
        what: names the save in errors.
        helper: runs half of the copying.
        check: raises if the save was given up.
        granted: offsets of parts that the shard granted already, for blocks as `announce` gave them.
        granter: process id of the shard that did; what another incarnation of it granted is none.
    """

    def __init__(
        self,
        session: Session,
        shard: int,
        *,
        numbered: Numbered,
        deadline: Deadline,
        what: str,
        helper: Executor,
        check: Callable[[], None],
        granted: Sequence[int] = (),
        granter: int = 0,
    ) -> None:
        self.numbered = numbered
        self.shard = shard
        self.incarnation = 0
        """Process id of the shard whose memory was filled; 0: none."""
        self._session = session
        self._deadline = deadline
        self._what = what
        self._helper = helper
        self._check = check
        self._granted = list(granted)
        self._granter = granter
        self._blocks: list[Filled] = []
        self._written: dict[str, TensorEntry] = {}
        self._filled: dict[SegmentId, np.ndarray] = {}
        """The parts that were filled here, locked in place until this is dropped."""
        self._answers: list[Answer[None]] = []

    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Bring tensors to the shard, or to where it can take them; the caller may change them afterwards.

        Tensors that are the same memory are brought once.

        Raises:
            StoreFullError: the shard has no room for them.
        """
        if not arrays:
            return
        first = once(arrays)
        names = [name for name, of in first.items() if name == of]
        self._write(names, [arrays[name] for name in names])
        self._written.update({name: self._written[of] for name, of in first.items()})

    def _write(self, names: list[str], values: list[np.ndarray]) -> None:
        total = sum(padded(array.nbytes) for array in values)
        if total <= INLINE_BYTES:
            block = self._block(names, values)
            self._blocks.append(Filled(block.id, self._packed(block, values).tobytes(), block.sizes))
            return
        connection = self._connected(total)
        runs = split([array.nbytes for array in values])
        blocks = [self._block([names[i] for i in run], [values[i] for i in run]) for run in runs]
        sources = [[values[i] for i in run] for run in runs]
        if self._granter != self.incarnation:
            self._granted = []
        if connection.view is not None:
            self._fill_parts(blocks, sources, connection.view)
            return
        if connection.unreached or not self._offered(blocks, sources, connection):
            self._put_blocks(blocks, sources)
        self._blocks += [Filled(block.id, None, block.sizes) for block in blocks]

    def allocate(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Place]:
        """Have memory granted for tensors that other processes bring, by `Place.bring`.

        Args:
            arrays: like the tensors.

        Raises:
            StoreFullError: the shard has no room for them.
        """
        names, values = list(arrays), list(arrays.values())
        self._connected(sum(padded(array.nbytes) for array in values))
        places: dict[str, Place] = {}
        runs = split([array.nbytes for array in values])
        blocks = [self._block([names[i] for i in run], [values[i] for i in run]) for run in runs]
        offsets: list[int] = []
        save = self.numbered.request
        for position, (run, block) in enumerate(zip(runs, blocks, strict=True)):
            if not offsets:
                left = self._deadline.left_for(self._what)
                lengths = [block.length for block in blocks[position:]]
                request = ShardCalls.allocate(self._session.client, save, lengths, left)
                offsets = self._session.call(self.shard, request, left + 1.0)
            part = Part(offsets.pop(0), block.length)
            self._blocks.append(Filled(block.id, part, block.sizes))
            for i, offset in zip(run, layout(block.sizes)[0], strict=True):
                places[names[i]] = Place(self.shard, save, part, offset, values[i].shape, values[i].itemsize)
        return places

    def copies(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the arrays as they lie in the shard's memory after `write`, locked in place while they live."""
        offsets = {block.id: layout(block.sizes)[0] for block in self._blocks}
        made: dict[tuple[SegmentId, int], np.ndarray] = {}  # one for all names of a tied tensor
        found: dict[str, np.ndarray] = {}
        for name, entry in self._written.items():
            if entry.segment in self._filled:
                key = entry.segment, entry.slot
                if key not in made:
                    block = self._filled[entry.segment]
                    made[key] = _place(block, offsets[entry.segment][entry.slot], arrays[name])
                found[name] = made[key]
        return found

    # ---- what was brought -----------------------------------------------------------------------------

    def lacks(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return those of these tensors that were not brought."""
        return {name: array for name, array in arrays.items() if name not in self._written}

    def rows(self, names: Collection[str]) -> dict[str, TensorEntry]:
        """Return the manifest's rows of tensors that were brought."""
        return {name: entry for name, entry in self._written.items() if name in names}

    def blocks(self, rows: Mapping[str, TensorEntry]) -> list[Filled]:
        """Return the segments that have tensors of these rows."""
        used = {entry.segment for entry in rows.values()}
        return [block for block in self._blocks if block.id in used]

    def finish(self) -> None:
        """Wait until the shard has taken what went through the object store."""
        while self._answers:
            self._wait()

    def learn(self, catalog: Catalog, digests: Mapping[str, str]) -> None:
        """Note where the segments lie, now that they are committed, and content hashes that were needed.

        Parts that were filled here are locked still: what stands in front of them is what the shard wrote there.
        """
        connection = self._session.connections.present(self.shard)
        for block in self._blocks:
            offsets = tuple(layout(block.sizes)[0])
            if isinstance(block.place, bytes):
                catalog.put_block(block.id, Block(block.place, offsets, 0, self.shard))
            elif block.id in self._filled and isinstance(block.place, Part) and connection is not None:
                header = connection.view.header(block.place) if connection.view is not None else bytes(HEADER_BYTES)
                generation = generation_in(header, block.id)
                if generation is not None:
                    catalog.put_block(block.id, Block(block.place, offsets, generation, self.shard))
        by_segment: dict[SegmentId, dict[int, str]] = {}
        for name, digest in digests.items():
            if (entry := self._written.get(name)) is not None:
                by_segment.setdefault(entry.segment, {})[entry.slot] = digest
        for segment, known in by_segment.items():
            catalog.put_digests(segment, known)

    # ---- within ---------------------------------------------------------------------------------------

    def _connected(self, nbytes: int) -> Connection:
        """Return the connection to the shard, if that may have room for so many bytes, and was not started again."""
        connection = self._session.connection(self.shard, self._deadline)
        hello = connection.hello
        if nbytes > hello.capacity:
            raise StoreFullError(
                f"expected at most {size(hello.capacity)}, the capacity of shard {self.shard}; found {size(nbytes)}"
            )
        if self.incarnation not in (0, hello.pid):
            raise ShardUnavailableError(f"{self._what}: expected shard {self.shard} to run on; it has restarted")
        self.incarnation = hello.pid
        return connection

    def _block(self, names: list[str], arrays: list[np.ndarray]) -> _Block:
        identity = new_segment(secrets.randbits(64))
        for slot, (name, array) in enumerate(zip(names, arrays, strict=True)):
            self._written[name] = TensorEntry(dtype_name(array.dtype), array.shape, array.nbytes, None, identity, slot)
        return _Block(identity, tuple(array.nbytes for array in arrays))

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
            if (found := tuple(array.nbytes for array in arrays)) != block.sizes:
                raise TensorMismatchError(
                    f"{self._what}: expected tensors of {list(block.sizes)} bytes, as memory was granted; found "
                    f"{list(found)}"
                )
            self._filled[block.id] = target = view.part(part, self._helper)
            self._check()
            copy_into(target, arrays, self._helper)
            self._blocks.append(Filled(block.id, part, block.sizes))

    def _grant(self, lengths: list[int]) -> list[int]:
        left = self._deadline.left_for(self._what)
        request = ShardCalls.grant(self._session.client, self.numbered.request, lengths, left)
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
                request = ShardCalls.pull(self.numbered.request, originals, offer.address, left)
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
        return Original(block.sizes, tuple(range(len(block.sizes))), few)

    def _put_blocks(self, blocks: list[_Block], sources: list[list[np.ndarray]]) -> None:
        for block, arrays in zip(blocks, sources, strict=True):
            packed = as_bytes(arrays[0]) if len(arrays) == 1 else np.zeros(block.length, np.uint8)
            if len(arrays) > 1:
                copy_into(packed, arrays, self._helper)
            left = self._deadline.left_for(self._what)
            request = ShardCalls.adopt_block(self.numbered.request, block.id, packed, block.sizes, left)
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
