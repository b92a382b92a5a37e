"""What a model is and how it is stored. Pure: no engine, no sockets, no threads of its own."""

from .codec import Codec, Encoded
from .compress import Gzip, Zstd
from .delta import Delta
from .graph import Layer, ModelGraph
from .manifest import ModelInfo
from .quantize import Quantize
from .refs import ModelRef
from .retention import KeepBest, KeepBytes, KeepEvery, KeepLast, Retention
from .shuffle import Shuffle

__all__ = [
    "Codec",
    "Delta",
    "Encoded",
    "Gzip",
    "KeepBest",
    "KeepBytes",
    "KeepEvery",
    "KeepLast",
    "Layer",
    "ModelGraph",
    "ModelInfo",
    "ModelRef",
    "Quantize",
    "Retention",
    "Shuffle",
    "Zstd",
]
