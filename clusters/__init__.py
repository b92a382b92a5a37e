"""How a cluster comes up."""

from .local import LocalCluster

__all__ = ["LocalCluster"]
