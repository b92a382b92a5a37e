"""Codecs: what turns a tensor into fewer bytes and back, as a chain of stages written with `|`.

Rules
- An `Encoded` says what was really done to it: a stage that does not fit the tensor (quantising integers) or
  does not pay (compressing noise) is left out of `Encoded.codec`. So the bytes decode without the codec that
  was asked for.
- `Quantize` and `Delta` look at the tensor, so they come first; the others look only at bytes.
- Bytes run through the stages in blocks (`blocks`).
- A codec holds no state, so any number of threads may use one at once.
- Bytes that are not what was written are a CorruptDataError: nothing is read or written out of bounds.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar, Self, cast

from ..arrays import Array, as_bytes, as_numpy, dtype_name, from_bytes
from ..errors import CodecError
from .blocks import (
    BLOCK_ITEMS,
    Blocks,
    Bytes,
    Encoded,
    Packer,
    cut,
    expect_length,
    expect_payload,
    length_of,
    new_array,
    pack,
    unpack_into,
)

_STAGE = re.compile(r"([a-z]+)(?:\(([^()]*)\))?")
MOST_STAGES, MOST_CHARACTERS = 8, 512
"""Of a spec."""
_STAGES: dict[str, type[Stage]] = {}
"""Name -> the stage that a spec calls so. Each enters when it is defined; the package imports them all."""


class Codec(ABC):
    """A codec for tensors: a chain of encoding stages.

    >>> import numpy as np
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
        """The stages of the codec, in encoding order."""

    @property
    def spec(self) -> str:
        """The codec as text, such as "shuffle|zstd(3)". The command-line option `--codec` accepts this text."""
        return "|".join(stage.text for stage in self.stages)

    @property
    def lossless(self) -> bool:
        """Whether every decoded tensor is bitwise equal to the original tensor."""
        return all(stage.exact for stage in self.stages)

    @property
    def needs_base(self) -> bool:
        """Whether a stage of the codec can use a base.

        The base of a tensor is the tensor with the same name in the parent version.
        """
        return any(stage.relative for stage in self.stages)

    def __or__(self, other: Codec) -> Codec:
        """Return a codec that applies this codec and then `other`.

        Raises:
            CodecError: if `other` is not a codec, `Delta` or `Quantize` would not be first, or the chain is too long.
        """
        _expect(other, Codec, f"codec {self.spec!r}: expected a Codec after '|'")
        return chain((*self.stages, *other.stages))

    def encode(self, array: object, base: object = None) -> Encoded:
        """Encode a tensor.

        Args:
            array: Tensor of numbers or booleans, in any shape, from any supported framework, contiguous or not.
            base: The same tensor of the parent version, with equal dtype and shape, or None. Only `Delta` uses `base`.

        Raises:
            CodecError: if the codec contains `Delta`, and `base` and `array` differ in dtype or shape.
            CodecUnavailableError: if a stage needs a package that is not installed.
            TensorMismatchError: if `array` or `base` is not an array of numbers or booleans.
        """
        head, tail = split(self.stages)
        return encode_plain(array, tail) if head is None else head.encode_head(array, base, tail)

    def decode(self, encoded: Encoded, base: object = None) -> Array:
        """Return the decoded tensor as a new array.

        Args:
            encoded: Result of `encode`.
            base: The `base` that was passed to `encode`. Required if `encoded.codec` contains a delta stage.

        Raises:
            CodecError: if `encoded.codec` contains a stage that this codec does not have; if the order of the stages
                differs from the order in this codec; or if a required `base` is missing or differs in dtype or shape
                from the encoded tensor.
            CodecUnavailableError: if a stage needs a package that is not installed.
            CorruptDataError: if `encoded` is damaged.
        """
        _expect(encoded, Encoded, "decode: expected an Encoded, the result of encode")
        mine = iter(self.stages)
        if not all(stage in mine for stage in from_spec(encoded.codec).stages):
            raise CodecError(f"decode: expected stages of {self.spec!r}, in that order; found {encoded.codec!r}")
        return decode(encoded, base)


class Stage(Codec):
    """One step of a codec. A single stage is also a codec.

    Each stage is a dataclass. In a codec spec, it is written as its name and the values of its fields, as in "zstd(3)".
    """

    __slots__ = ()
    name: ClassVar[str]
    """Name of the stage in a codec spec, such as "zstd"."""
    exact: ClassVar[bool] = True
    """Whether the stage is lossless."""
    relative: ClassVar[bool] = False
    """Whether the stage can use a base. The base of a tensor is the tensor with the same name in the parent version."""

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            _STAGES[cls.name] = cls

    @property
    def stages(self) -> tuple[Stage, ...]:
        """A tuple that contains only this stage."""
        return (self,)

    @property
    def text(self) -> str:
        """The stage as text in a codec spec, such as "zstd(3)"."""
        values = ",".join(str(getattr(self, field.name)) for field in fields(cast(Any, self)))
        return f"{self.name}({values})" if values else self.name

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Self:
        """Create a stage from its arguments in a codec spec, such as `["3"]` for "zstd(3)".

        Raises:
            CodecError: if there are too many arguments, or an argument is invalid.
        """
        known = fields(cast(Any, cls))
        if len(arguments) > len(known):
            raise CodecError(f"codec {cls.name!r}: expected at most {len(known)} arguments; found {len(arguments)}")
        return cls(*(int(text) if re.fullmatch(r"\d{1,18}", text) else text for text in arguments))


class ByteStage(Stage, Packer):
    """A codec stage whose input and output are bytes."""

    __slots__ = ()
    skips_even: ClassVar[bool] = False
    """Whether the stage leaves data uncompressed if no byte value makes up more than 1/128 of the data."""


class HeadStage(Stage):
    """A codec stage whose input is a tensor, not bytes. It must be the first stage of a codec."""

    __slots__ = ()

    @abstractmethod
    def encode_head(self, array: object, base: object, tail: tuple[ByteStage, ...]) -> Encoded:
        """Encode a tensor with this stage, and then encode the resulting bytes with the byte stages in `tail`."""

    @abstractmethod
    def decode_head(self, encoded: Encoded, base: object, tail: tuple[ByteStage, ...]) -> Array:
        """Decode the result of `encode_head`. `tail` contains the byte stages in `encoded.codec`."""


@dataclass(frozen=True, slots=True, repr=False)
class Chain(Codec):
    """Stages in sequence, created by `|` and `from_spec`. Without stages, bytes are stored as they are."""

    links: tuple[Stage, ...] = ()
    """The stages."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, in encoding order."""
        return self.links

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.links)) or "Chain()"


def chain(stages: Sequence[Stage]) -> Codec:
    """Join stages into a codec.

    Raises:
        CodecError: they do not fit together, or are too many.

    >>> chain([]).spec
    ''
    """
    if len(stages) > MOST_STAGES:
        raise CodecError(f"codec: expected at most {MOST_STAGES} stages; found {len(stages)}")
    for place, stage in enumerate(stages):
        if isinstance(stage, HeadStage) and place:
            reason = "it encodes the tensor itself"
            if any(
                not earlier.exact or not stage.exact for earlier in stages[:place] if isinstance(earlier, HeadStage)
            ):
                reason = "a delta is the difference of exact bits, which quantising changes"
            found = "|".join(earlier.text for earlier in stages[:place])
            raise CodecError(
                f"codec: expected {stage.text!r} as the first stage, because {reason}; found it after {found!r}"
            )
    return stages[0] if len(stages) == 1 else Chain(tuple(stages))


def from_spec(text: str) -> Codec:
    """Make the codec that a spec names.

    Args:
        text: such as "quantize(8,channel)|zstd(3)", as `Codec.spec` gives it; "" stores bytes as they are.

    Raises:
        CodecError: the text names no codec.

    >>> from_spec("quantize(4,64)|gzip(6)")
    Quantize(bits=4, per=64) | Gzip(level=6)
    """
    _expect(text, str, "codec: expected text such as 'shuffle|zstd(3)'")
    return _read(text)


@lru_cache(maxsize=256)
def _read(text: str) -> Codec:
    stages: list[Stage] = []
    if len(text) > MOST_CHARACTERS or text.count("|") >= MOST_STAGES:
        raise CodecError(f"codec: expected at most {MOST_STAGES} stages; found {text.count('|') + 1}: {text[:100]!r}")
    for part in text.split("|") if text else ():
        match = _STAGE.fullmatch(part)
        kind = _STAGES.get(match[1]) if match else None
        if match is None or kind is None:
            known = ", ".join(sorted(_STAGES))
            raise CodecError(f"codec {text!r}: expected stages of {known}, joined by '|'; found {part!r}")
        stages.append(kind.parse(match[2].split(",") if match[2] else ()))
    return chain(stages)


def _expect(value: object, kind: type, expected: str) -> None:
    if not isinstance(value, kind):
        raise CodecError(f"{expected}; found {value!r:.100}")


def decode(encoded: Encoded, base: object = None, into: Bytes | None = None) -> Array:
    """Decode a tensor into a new, writable, C-contiguous array.

    Args:
        encoded: as a codec gave it, or put together again from its fields.
        base: the tensor that `encode` got as base, if `encoded.codec` names a delta.
        into: memory for the array, as many bytes, which may hold anything after an error; None: new memory.

    Raises:
        CodecError: `encoded.codec` names no codec; or the base is missing, or has another dtype or shape.
        CodecUnavailableError: a stage's package is not installed.
        CorruptDataError: the payload is not what a codec made of a tensor of this dtype and shape.

    >>> import numpy as np
    >>> decode(Encoded("", "int16", (2,), np.array([1, 0, 2, 0], np.uint8))).tolist()
    [1, 2]
    """
    _expect(encoded, Encoded, "decode: expected an Encoded, the result of encode")
    head, tail = split(from_spec(encoded.codec).stages)
    if head is not None:
        found = head.decode_head(encoded, base, tail)
        if into is None:
            return found
        into[:] = as_bytes(found)
        return from_bytes(into, encoded.dtype, encoded.shape)
    expect_payload(encoded, length_of(encoded), tail)
    out = new_array(encoded) if into is None else from_bytes(into, encoded.dtype, encoded.shape)
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
