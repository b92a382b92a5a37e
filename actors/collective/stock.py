"""Deleted: back ends of `ray.util.collective`."""

from ...store.removed import removed

__getattr__ = removed(
    __name__,
    dict.fromkeys(
        ("AutoGroup", "GlooGroup", "NcclGroup", "SharedGroup", "register"),
        "tensorvine.actors.collective.connect, which returns a Group with the same operations",
    ),
)
