"""The store and the planner brought to life: actors, transports and the client."""

from .match import PrefixMatch
from .pending import PendingSave
from .repository import Repository, RepositoryStats
from .saver import Saved
from .verifier import Problem

__all__ = ["PendingSave", "PrefixMatch", "Problem", "Repository", "RepositoryStats", "Saved"]
