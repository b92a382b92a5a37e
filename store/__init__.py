"""The data model of TensorVine: model graphs, model references, codecs and retention policies.

This package does not depend on an engine (Ray or Dask).
"""

from .codecs.blocks import Encoded
from .codecs.codec import Codec
from .codecs.compress import Gzip, Zstd
from .codecs.delta import Delta
from .codecs.quantize import Quantize
from .codecs.shuffle import Shuffle
from .graphs.graph import Layer, ModelGraph
from .refs import ModelRef
from .versions.manifest import ModelInfo
from .versions.retention import KeepBest, KeepBytes, KeepEvery, KeepLast, Retention

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
