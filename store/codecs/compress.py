"""General compressors: Zstandard, and gzip as Check-QZP's reference.

Rules
- A payload is one standard frame, which other tools read, too: `zstd -d`, `gzip -d`, pyarrow.decompress.
- The length of what was compressed is checked by whoever decodes; a frame that expands beyond it is stopped
  at the first block that does not fit.
- What a stage before gives as one part becomes Zstandard blocks of its own, with their own statistics.
- Both release the GIL while they work.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from ..errors import CodecError, CodecUnavailableError, CorruptDataError
from .blocks import CHUNK, Blocks, Bytes
from .codec import ByteStage

if TYPE_CHECKING:
    from zstandard import ZstdCompressor

OWN_LEVELS = 3
"""Up to this level, Zstandard searches as suits numbers."""
IDLE = 4
"""Compressors per level that are kept for the next tensor: for a small one, making one takes longer than its work."""
LEAST_WINDOW = 8 << 20
"""Bytes of a window that RFC 8878 has every decoder support."""
_GZIP = 16 + zlib.MAX_WBITS
"""Tells zlib to use gzip's header."""


@dataclass(frozen=True, slots=True)
class Zstd(ByteStage):
    """Zstandard compression (RFC 8878). Requires the package `zstandard`.

    Levels 1 to 3 use parameters that are tuned for weights. The compressor replaces a repeated byte sequence by a
    reference only if the sequence has at least 7 bytes, because weights contain few repeated sequences, and a reference
    takes more space than a short sequence. The hash table of the compressor has 2^(5 + level) entries. For weights,
    compression with these parameters is faster and produces smaller output than with Zstandard's default parameters.
    Levels 4 and above use the default parameters.

    Args:
        level: Compression level, from 1 (fastest) to 22 (smallest output).

    Raises:
        CodecError: if `level` is not an integer in this range.

    >>> Zstd().encode(np.zeros(100_000)).nbytes < 200
    True
    """

    level: int = 3

    name = "zstd"
    shrinks = True
    expansion = 1 << 15  # four bytes are a block of 128 KiB that repeats one
    skips_even = True

    def __post_init__(self) -> None:
        _check_level(self.name, self.level, 22)

    def pack(self, blocks: Blocks) -> Blocks:
        """Compress blocks of bytes."""
        return Blocks(self._compressed(blocks))

    def _compressed(self, blocks: Blocks) -> Iterator[Bytes]:
        zstandard = _zstandard()
        idle = _idle_compressors(self.level)
        try:
            compressor = idle.pop()
        except IndexError:
            compressor = zstandard.ZstdCompressor(compression_params=_parameters(zstandard, self.level))
        running = compressor.compressobj(size=-1 if blocks.nbytes is None else blocks.nbytes)
        for place, part in enumerate(blocks.parts):
            # Only between parts, so that the last block holds data: without it the end would not be missed.
            if place:
                yield np.frombuffer(running.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK), np.uint8)
            yield np.frombuffer(running.compress(part.data), np.uint8)
        yield np.frombuffer(running.flush(), np.uint8)
        if self.level <= OWN_LEVELS:
            idle.append(compressor)

    def unpack(self, parts: Iterable[Bytes], itemsize: int, where: str) -> Iterator[Bytes]:
        """Decompress bytes that `pack` compressed."""
        zstandard = _zstandard()
        out = np.empty(CHUNK, np.uint8)
        source = _Source(parts)
        # Bytes behind the frame are taken for another frame, so that they do not go unnoticed.
        decompressor = zstandard.ZstdDecompressor(max_window_size=_window_bytes(self.level))
        reader = decompressor.stream_reader(source, read_across_frames=True)
        try:
            while (length := reader.readinto(out)) > 0:
                yield out[:length]
        except zstandard.ZstdError as exc:
            raise CorruptDataError(f"{where}: expected a Zstandard frame; found {exc}") from exc


class _Source:
    """Bytes in parts as a file that can be read."""

    def __init__(self, parts: Iterable[Bytes]) -> None:
        self._parts = iter(parts)
        self._rest = memoryview(b"")

    def read(self, size: int) -> memoryview:
        """Return the next bytes, at most `size`; none at the end."""
        while not self._rest:
            part = next(self._parts, None)
            if part is None:
                break
            self._rest = part.data
        found, self._rest = self._rest[:size], self._rest[size:]
        return found


@dataclass(frozen=True, slots=True)
class Gzip(ByteStage):
    """Gzip compression, as in Check-QZP (section 3.1).

    Args:
        level: Compression level, from 1 (fastest) to 9 (smallest output).

    Raises:
        CodecError: if `level` is not an integer in this range.

    >>> import gzip
    >>> len(gzip.decompress(Gzip().encode(np.zeros(100_000)).data))
    800000
    """

    level: int = 6

    name = "gzip"
    shrinks = True
    expansion = 1032  # two bits are 258 bytes

    def __post_init__(self) -> None:
        _check_level(self.name, self.level, 9)

    def pack(self, blocks: Blocks) -> Blocks:
        """Compress blocks of bytes."""
        return Blocks(self._compressed(blocks.parts))

    def _compressed(self, parts: Iterable[Bytes]) -> Iterator[Bytes]:
        compressor = zlib.compressobj(self.level, wbits=_GZIP)
        for block in parts:
            yield np.frombuffer(compressor.compress(block.data), np.uint8)
        yield np.frombuffer(compressor.flush(), np.uint8)

    def unpack(self, parts: Iterable[Bytes], itemsize: int, where: str) -> Iterator[Bytes]:
        """Decompress bytes that `pack` compressed."""
        source = _Source(parts)
        decompressor = zlib.decompressobj(wbits=_GZIP)
        expected = f"{where}: expected a gzip file"
        try:
            while not decompressor.eof:
                given = decompressor.unconsumed_tail or source.read(CHUNK)
                if not (out := decompressor.decompress(given, CHUNK)) and not given:
                    raise CorruptDataError(f"{expected}; found a truncated one")
                yield np.frombuffer(out, np.uint8)
        except zlib.error as exc:
            raise CorruptDataError(f"{expected}; found {exc}") from exc
        if decompressor.unused_data or source.read(1):
            raise CorruptDataError(f"{expected}; found more bytes after its end")


def _check_level(name: str, level: object, most: int) -> None:
    if type(level) is not int or not 1 <= level <= most:
        raise CodecError(f"codec {name!r}: expected a level from 1 to {most}; found {level!r}")


def _parameters(zstandard: ModuleType, level: int) -> object:
    own = {"strategy": zstandard.STRATEGY_FAST, "min_match": 7, "target_length": 0, "hash_log": 5 + level}
    return zstandard.ZstdCompressionParameters.from_level(level, **(own if level <= OWN_LEVELS else {}))


@lru_cache(maxsize=22)
def _window_bytes(level: int) -> int:
    """Return the memory that frames of a level need to be read; one may claim 128 MiB, whatever it holds."""
    return max(LEAST_WINDOW, 1 << _zstandard().ZstdCompressionParameters.from_level(level).window_log)


@lru_cache(maxsize=OWN_LEVELS)
def _idle_compressors(level: int) -> deque[ZstdCompressor]:
    """Return the compressors of a level that nobody uses now; each holds 3 MB at most. Taking one needs no lock."""
    return deque(maxlen=IDLE)


def _zstandard() -> ModuleType:
    try:
        import zstandard
    except ImportError as exc:
        message = "codec 'zstd': expected the package zstandard; it is not installed"
        raise CodecUnavailableError(message) from exc
    return zstandard
