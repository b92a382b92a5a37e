"""What a model is and how it is stored. Pure: no engine, no sockets, no threads of its own."""

from .graph import Layer, ModelGraph
from .manifest import ModelInfo
from .refs import ModelRef

__all__ = ["Layer", "ModelGraph", "ModelInfo", "ModelRef"]
