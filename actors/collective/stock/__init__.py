"""Collective groups as back ends of `ray.util.collective`. `register` adds them to a process."""

from .groups import AutoGroup, GlooGroup, NcclGroup, SharedGroup, register

__all__ = ["AutoGroup", "GlooGroup", "NcclGroup", "SharedGroup", "register"]
