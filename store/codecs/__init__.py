"""Codecs: quantising, shuffling, differences and compression, composed with `|` (Check-QZP)."""

from .blocks import Encoded
from .codec import Codec
from .compress import Gzip, Zstd
from .delta import Delta
from .quantize import Quantize
from .shuffle import Shuffle

__all__ = ["Codec", "Delta", "Encoded", "Gzip", "Quantize", "Shuffle", "Zstd"]
