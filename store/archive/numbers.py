"""Reads logs of version numbers, which earlier versions of TensorVine wrote; the catalog's journal replaces them.

A line per version that was given a number: a checksum and the reference. A version without a manifest was lost, and its
number is not given again. A damaged line, such as the last one of a writer that was killed, counts for nothing.
"""

from __future__ import annotations

import logging
import re
import zlib

from ..errors import InvalidNameError, shown
from ..refs import ModelRef
from .directory import Directory

log = logging.getLogger(__name__)

FOLDER = "numbers"
_LINE = re.compile(rb"[^\n]+")
_LONGEST = 256
"""Bytes of a line: a checksum, a name of up to 200 characters, a number."""


def decoded(content: bytes) -> tuple[list[ModelRef], int]:
    r"""Return the versions of a log, and how many lines are damaged.

    >>> decoded(b"\nf78a6b6b m@7\n0badbad0 n@")
    ([ModelRef('m@7')], 1)
    """
    refs: list[ModelRef] = []
    damaged = 0
    for found in _LINE.finditer(content):
        line = found[0]
        if len(line) > _LONGEST:
            damaged += 1
            continue
        checksum, _, text = line.partition(b" ")
        try:
            whole = int(checksum, 16) == zlib.crc32(text)
            if whole:
                refs.append(ModelRef.parse(text.decode()))
        except (ValueError, InvalidNameError):
            whole = False
        damaged += not whole
    return refs, damaged


def given(directory: Directory) -> set[ModelRef]:
    """Read all logs, but what is none under the name of one: that is logged.

    Raises:
        StorageError: one cannot be read.
    """
    found: set[ModelRef] = set()
    for name, what in directory.odd(FOLDER).items():
        log.warning("%s/%s: expected a log of version numbers; found %s", directory.uri, shown(name), what)
    for name in directory.list(FOLDER):
        refs, damaged = decoded(directory.read(name).to_pybytes())
        found.update(refs)
        if damaged:
            log.warning("%s/%s: %d damaged lines are ignored", directory.uri, shown(name), damaged)
    return found
