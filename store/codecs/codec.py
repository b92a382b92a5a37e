"""Codecs: what turns a tensor into fewer bytes and back, as a chain of stages written with `|`.

Rules
- An `Encoded` says what was really done to it: a stage that does not fit the tensor (quantising integers) or
  does not pay (compressing noise) is left out of `Encoded.codec`. So the bytes decode without the codec that
  was asked for.
- `Quantize` and `Delta` look at the tensor, so they come first; the others look only at bytes.
- Bytes run through the stages in blocks: beside the tensor and the result no copy of either is made. A block
  is valid until the next one is asked for.
- A codec holds no state, so any number of threads may use one at once.
- Bytes that are not what was written are a CorruptDataError: nothing is read or written out of bounds.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar, Self, cast

import numpy as np

from ..arrays import Array, as_bytes, as_numpy, dtype_name, dtype_of
from ..errors import CodecError, CorruptDataError, TensorMismatchError

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
BLOCK_ITEMS = 1 << 17
"""Elements per block. A byte plane of a block is then exactly one block of Zstandard, with its own statistics."""

EVEN_SHARE = 1 / 128
WORTH_BYTES = 256
"""Fewer bytes are not compressed: what they cost in time is not in proportion to what they may save."""

_STAGE = re.compile(r"([a-z]+)(?:\(([^()]*)\))?")
_STAGES: dict[str, type[Stage]] = {}
"""Name -> the stage that a spec calls so. Each enters when it is defined; the package imports them all."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tensor as a codec stored it: with its base, if `codec` names a delta, all that decoding needs.

    >>> from tensorvine.store.codecs.compress import Zstd
    >>> encoded = Zstd().encode(np.zeros((1000, 10), np.float32))
    >>> encoded.codec, encoded.dtype, encoded.shape, encoded.nbytes < 100
    ('zstd(3)', 'float32', (1000, 10), True)
    """

    codec: str
    """Spec of the stages that were applied; "" means plain bytes."""
    dtype: str
    """Name of the tensor's dtype, as `arrays.dtype_name` gives it."""
    shape: tuple[int, ...]
    """Lengths of the tensor's axes."""
    data: Bytes
    """The payload. Plain bytes may be a view on the tensor that was encoded."""
    error: float = 0.0
    """Largest absolute difference between an element and what it decodes to; 0 if lossless."""

    @property
    def nbytes(self) -> int:
        """Length of the payload in bytes."""
        return len(self.data)

    def __str__(self) -> str:
        return f"{self.dtype} tensor of shape {self.shape}, stored as {self.codec or 'plain bytes'!r}"


class Codec(ABC):
    """A chain of one or more stages.

    >>> from tensorvine.store.codecs.compress import Zstd
    >>> from tensorvine.store.codecs.shuffle import Shuffle
    >>> codec = Shuffle() | Zstd()
    >>> codec, codec.spec, codec.lossless
    (Shuffle() | Zstd(level=3), 'shuffle|zstd(3)', True)
    >>> tensor = np.linspace(0, 1, 5000, dtype=np.float32)
    >>> bool((codec.decode(codec.encode(tensor)) == tensor).all())
    True
    """

    __slots__ = ()

    @property
    @abstractmethod
    def stages(self) -> tuple[Stage, ...]:
        """The stages, in the order in which they encode."""

    @property
    def spec(self) -> str:
        """The codec as text, which `from_spec` reads."""
        return "|".join(stage.text for stage in self.stages)

    @property
    def lossless(self) -> bool:
        """Whether every tensor decodes to the same bits."""
        return all(stage.exact for stage in self.stages)

    @property
    def needs_base(self) -> bool:
        """Whether tensors may be stored as differences from those of an earlier version."""
        return any(stage.relative for stage in self.stages)

    def __or__(self, other: Codec) -> Codec:
        """Chain two codecs; `other` gets what this one made.

        Raises:
            CodecError: `other` has a stage that must come first, or one that needs lossless company.
        """
        return chain((*self.stages, *other.stages))

    def encode(self, array: object, base: object = None) -> Encoded:
        """Encode a tensor.

        Args:
            array: of any framework, dtype and shape, contiguous or not.
            base: the same tensor of the parent version, of the same dtype and shape. Only `Delta` looks at it.

        Raises:
            CodecError: `base` has another dtype or shape.
            CodecUnavailableError: a stage's package is not installed.
            TensorMismatchError: no array of numbers or booleans.
        """
        head, tail = split(self.stages)
        return encode_plain(array, tail) if head is None else head.encode_head(array, base, tail)

    def decode(self, encoded: Encoded, base: object = None) -> Array:
        """Decode what this codec encoded, into a new array.

        Args:
            encoded: as `encode` gave it.
            base: what `encode` got, if `encoded.codec` names a delta.

        Raises:
            CodecError: another codec encoded it; or the base is missing, or has another dtype or shape.
            CodecUnavailableError: a stage's package is not installed.
            CorruptDataError: the payload is not what was encoded.
        """
        mine = iter(self.stages)
        if not all(stage in mine for stage in from_spec(encoded.codec).stages):
            raise CodecError(f"decode: expected stages of {self.spec!r}, in that order; found {encoded.codec!r}")
        return decode(encoded, base)


class Stage(Codec):
    """One step of a codec; by itself a codec, too. Its constructor's arguments are the fields of a dataclass."""

    __slots__ = ()
    name: ClassVar[str]
    """What it is called in a spec."""
    exact: ClassVar[bool] = True
    """Whether it keeps every bit."""
    relative: ClassVar[bool] = False
    """Whether it looks at the tensor of the parent version."""

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            _STAGES[cls.name] = cls

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Itself."""
        return (self,)

    @property
    def text(self) -> str:
        """The stage as it stands in a spec."""
        values = ",".join(str(getattr(self, field.name)) for field in fields(cast(Any, self)))
        return f"{self.name}({values})" if values else self.name

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Self:
        """Make the stage from the arguments in a spec.

        Raises:
            CodecError: too many, or not what the stage takes.
        """
        known = fields(cast(Any, cls))
        if len(arguments) > len(known):
            raise CodecError(f"codec {cls.name!r}: expected at most {len(known)} arguments; found {len(arguments)}")
        return cls(*(int(text) if re.fullmatch(r"\d{1,18}", text) else text for text in arguments))


@dataclass(frozen=True, slots=True)
class Blocks:
    """Bytes on their way from stage to stage."""

    parts: Iterable[Bytes]
    """The bytes, cut anywhere."""
    itemsize: int = 1
    """Length of the elements that the bytes stand for."""
    nbytes: int | None = None
    """How many bytes there are, where that is known ahead."""


class ByteStage(Stage):
    """A stage that looks only at bytes."""

    __slots__ = ()
    shrinks: ClassVar[bool] = False
    """Whether it changes the number of bytes, so that it can pay or not."""
    skips_even: ClassVar[bool] = False
    """Whether it gives up on bytes of which no value has a share above `EVEN_SHARE`."""

    @abstractmethod
    def pack(self, blocks: Blocks) -> Blocks:
        """Encode."""

    @abstractmethod
    def unpack(self, parts: Iterable[Bytes], itemsize: int, where: str) -> Iterator[Bytes]:
        """Decode.

        Args:
            parts: what `pack` made, cut anywhere.
            itemsize: what `pack` was told.
            where: what is decoded, for an error's message.

        Raises:
            CorruptDataError: the bytes are not what `pack` makes.
        """


class HeadStage(Stage):
    """A stage that looks at the tensor, and therefore comes first."""

    __slots__ = ()

    @abstractmethod
    def encode_head(self, array: object, base: object, tail: tuple[ByteStage, ...]) -> Encoded:
        """Encode a tensor, and run what comes of it through the stages that follow."""

    @abstractmethod
    def decode_head(self, encoded: Encoded, base: object, tail: tuple[ByteStage, ...]) -> Array:
        """Undo `encode_head`."""


@dataclass(frozen=True, slots=True, repr=False)
class Chain(Codec):
    """Stages one after another. Made by `|` and `from_spec`; without stages it stores bytes as they are."""

    links: tuple[Stage, ...] = ()
    """The stages."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, in the order in which they encode."""
        return self.links

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.links)) or "Chain()"


def chain(stages: Sequence[Stage]) -> Codec:
    """Join stages into a codec.

    Raises:
        CodecError: they do not fit together.

    >>> chain([]).spec
    ''
    """
    for place, stage in enumerate(stages):
        if isinstance(stage, HeadStage) and place:
            reason = "it looks at the tensor itself"
            if any(
                not earlier.exact or not stage.exact for earlier in stages[:place] if isinstance(earlier, HeadStage)
            ):
                reason = "a delta is the difference of exact bits, and quantised versions differ in all of them"
            found = "|".join(earlier.text for earlier in stages[:place])
            raise CodecError(
                f"codec: expected {stage.text!r} as the first stage, for {reason}; found it after {found!r}"
            )
    return stages[0] if len(stages) == 1 else Chain(tuple(stages))


@lru_cache(maxsize=256)
def from_spec(text: str) -> Codec:
    """Make the codec that a spec names.

    Args:
        text: such as "quantize(8,channel)|zstd(3)", as `Codec.spec` gives it; "" stores bytes as they are.

    Raises:
        CodecError: the text names no codec.

    >>> from_spec("quantize(4,64)|gzip(6)")
    Quantize(bits=4, per=64) | Gzip(level=6)
    """
    stages: list[Stage] = []
    for part in text.split("|") if text else ():
        match = _STAGE.fullmatch(part)
        kind = _STAGES.get(match[1]) if match else None
        if match is None or kind is None:
            known = ", ".join(sorted(_STAGES))
            raise CodecError(f"codec {text!r}: expected stages of {known}, joined by '|'; found {part!r}")
        stages.append(kind.parse(match[2].split(",") if match[2] else ()))
    return chain(stages)


def decode(encoded: Encoded, base: object = None) -> Array:
    """Decode a tensor into a new, writable, C-contiguous array.

    Args:
        encoded: as a codec gave it, or put together again from its fields.
        base: the tensor that `encode` got as base, if `encoded.codec` names a delta.

    Raises:
        CodecError: `encoded.codec` names no codec; or the base is missing, or has another dtype or shape.
        CodecUnavailableError: a stage's package is not installed.
        CorruptDataError: the payload is not what a codec made of a tensor of this dtype and shape.

    >>> decode(Encoded("", "int16", (2,), np.array([1, 0, 2, 0], np.uint8))).tolist()
    [1, 2]
    """
    head, tail = split(from_spec(encoded.codec).stages)
    if head is not None:
        return head.decode_head(encoded, base, tail)
    out = new_array(encoded)
    data, dtype = as_bytes(out), out.dtype
    expect_length(unpack_into(data, encoded, tail, dtype.itemsize), data.nbytes, encoded)
    return out


def split(stages: tuple[Stage, ...]) -> tuple[HeadStage | None, tuple[ByteStage, ...]]:
    """Part the stage that looks at the tensor from those that look at bytes."""
    head = stages[0] if stages and isinstance(stages[0], HeadStage) else None
    return head, tuple(stage for stage in stages if isinstance(stage, ByteStage))


def encode_plain(array: object, tail: tuple[ByteStage, ...]) -> Encoded:
    """Encode a tensor through byte stages only."""
    tensor = as_numpy(array, "tensor to encode")
    return encode_bytes("", as_bytes(tensor), tensor.dtype.itemsize, tail, tensor)


def encode_bytes(
    head: str, data: Bytes, itemsize: int, tail: tuple[ByteStage, ...], tensor: Array, error: float = 0.0
) -> Encoded:
    """Run bytes through the byte stages, or leave those out where they do not pay.

    Args:
        head: spec of the stage that made the bytes; "" for the tensor's own.
        data: the bytes.
        itemsize: of the elements that they stand for.
        tail: the byte stages.
        tensor: whose dtype and shape are noted.
        error: that the head made.
    """
    packed = (
        pack(Blocks(cut(data, BLOCK_ITEMS * itemsize), itemsize, len(data)), tail, len(data))
        if tail and len(data)
        else None
    )
    applied = [stage.text for stage in tail] if packed is not None else []
    spec = "|".join([head, *applied] if head else applied)
    return Encoded(spec, dtype_name(tensor.dtype), tensor.shape, data if packed is None else packed, error)


def shrinks(tail: tuple[ByteStage, ...]) -> bool:
    """Say whether a compressor is among byte stages."""
    return any(stage.shrinks for stage in tail)


def pack(blocks: Blocks, tail: tuple[ByteStage, ...], limit: int) -> Bytes | None:
    """Run blocks through byte stages.

    Args:
        blocks: of the bytes to encode.
        tail: the byte stages.
        limit: length of the bytes as they would be stored otherwise.

    Returns:
        The result; None if there are compressors and it is not shorter than the limit, or that is small.
    """
    if shrinks(tail) and limit < WORTH_BYTES:
        return None
    for stage in tail:
        blocks = stage.pack(blocks)
    out = np.empty(limit, np.uint8)  # its pages cost nothing until they are written
    end = 0
    for part in blocks.parts:
        start, end = end, end + len(part)
        if end > limit:
            return None
        out[start:end] = part
    if shrinks(tail) and end == limit:
        return None
    out.resize(end, refcheck=False)
    return out


def cut(data: Bytes, step: int) -> Iterator[Bytes]:
    """Cut bytes into blocks of `step` bytes; the last one may be shorter.

    >>> [len(block) for block in cut(np.zeros(5, np.uint8), 2)]
    [2, 2, 1]
    """
    return (data[start : start + step] for start in range(0, len(data), step))


def unpack_into(out: Bytes, encoded: Encoded, tail: tuple[ByteStage, ...], itemsize: int) -> int:
    """Undo byte stages.

    Args:
        out: gets the bytes, from its start on.
        encoded: has the payload.
        tail: the byte stages.
        itemsize: of the elements that the bytes stand for.

    Returns:
        How many bytes came out.

    Raises:
        CorruptDataError: the payload is not what the stages make, or more bytes than `out` holds.
    """
    sizes = [itemsize]
    for stage in tail:
        sizes.append(1 if stage.shrinks else sizes[-1])
    parts: Iterable[Bytes] = [encoded.data]
    for stage, size in reversed(list(zip(tail, sizes, strict=False))):
        parts = stage.unpack(parts, size, str(encoded))
    end = 0
    for part in parts:
        start, end = end, end + len(part)
        if end > len(out):
            raise CorruptDataError(f"{encoded}: expected at most {len(out)} bytes; found {end} or more")
        out[start:end] = part
    return end


def expect_length(found: int, expected: int, encoded: Encoded) -> None:
    """Check a number of bytes.

    Raises:
        CorruptDataError: it is another than expected.
    """
    if found != expected:
        raise CorruptDataError(f"{encoded}: expected {expected} bytes; found {found}")


def new_array(encoded: Encoded) -> Array:
    """Allocate the array that an `Encoded` decodes to.

    Raises:
        CorruptDataError: no array has that dtype and shape.
    """
    try:
        dtype = dtype_of(encoded.dtype)
    except TensorMismatchError as exc:
        raise CorruptDataError(f"{encoded}: {exc}") from exc
    if any(length < 0 for length in encoded.shape) or math.prod(encoded.shape) * dtype.itemsize >= 1 << 62:
        raise CorruptDataError(f"{encoded}: expected the shape of an array; found {encoded.shape}")
    return np.empty(encoded.shape, dtype)
