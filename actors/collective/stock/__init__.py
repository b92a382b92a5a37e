"""Groups as back ends of `ray.util.collective`: Ray's adapter, and what its calls ask for besides.

From outside: `register`. Stands on `connect` and the `Group` that it gives.
"""

from .groups import AutoGroup, GlooGroup, NcclGroup, SharedGroup, register

__all__ = ["AutoGroup", "GlooGroup", "NcclGroup", "SharedGroup", "register"]
