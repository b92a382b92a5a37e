"""The store and the planner brought to life: actors, transports and the client."""

from ..store.manifest import ModelInfo
from .match import PrefixMatch
from .pending import PendingSave
from .repository import Repository, RepositoryStats
from .saver import Saved

__all__ = ["ModelInfo", "PendingSave", "PrefixMatch", "Repository", "RepositoryStats", "Saved"]
