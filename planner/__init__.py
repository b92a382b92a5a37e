"""When to update, which way to send, where to place, when to scale. Pure arithmetic."""

from .placement import home_of

__all__ = ["home_of"]
