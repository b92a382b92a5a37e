"""Patches: one tensor as its difference from another one of the same dtype and shape, proved by content hashes.

`docs/reference/format.md` describes the bytes. Unlike a `Delta`, which is a codec of files, a patch states its base and
its result, is made and applied in blocks by several threads, and bridges long gaps.
"""

from .applying import apply_patch
from .format import PatchHeader, header_of
from .making import make_patch

__all__ = ["PatchHeader", "apply_patch", "header_of", "make_patch"]
