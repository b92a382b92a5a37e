"""Numbers that versions were given and that are perhaps nowhere else on the path: small logs beside the manifests.

With them a start after the death of a whole cluster neither gives a number to a second version, nor calls one that was
lost "never saved" (of earlier releases).

Rules
- A line per version: a checksum and the reference. A damaged one, such as the last line of a writer that was killed,
  counts for nothing.
- A log has one writer. It appends a line before the version exists, and does not sync: what a process wrote is there
  when it dies, but the last seconds of a machine that loses its power may be missing.
- What is on disk with a manifest, live or retired, needs no line. A log that has grown is written anew without these;
  a repository that starts gathers what is left of all logs in one.
- Only local and mounted file systems append. Elsewhere there are no logs.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Callable, Collection, Iterable

from ..errors import InvalidNameError, shown
from ..refs import ModelRef
from .directory import Directory

log = logging.getLogger(__name__)

FOLDER = "numbers"
_GATHERED = f"{FOLDER}/lost.log"
_LINE = re.compile(rb"[^\n]+")
_LONGEST = 256
"""Bytes of a line: a checksum, a name of up to 200 characters, a number."""
GROWN_BYTES = 1 << 20
"""A log of more is written anew."""


def encoded(refs: Iterable[ModelRef]) -> bytes:
    r"""Return the lines of versions.

    >>> encoded([ModelRef("m", 7)])
    b'\nf78a6b6b m@7'
    """
    texts = [str(ref).encode() for ref in refs]
    return b"".join(b"\n%08x %b" % (zlib.crc32(text), text) for text in texts)


def decoded(content: bytes) -> tuple[list[ModelRef], int]:
    """Return the versions of a log, and how many lines are damaged.

    >>> decoded(encoded([ModelRef("m", 7), ModelRef("n", 1)])[:-3])
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


def gather(directory: Directory, known: Callable[[], Collection[ModelRef | None]]) -> None:
    """Have one log in the place of all, without versions that have a manifest. Nobody may be writing.

    Args:
        directory: the repository's.
        known: gives the versions with a manifest.

    Raises:
        StorageError: the disk fails; nothing is lost.
    """
    names = list(directory.list(FOLDER))
    if not names:
        return
    lost = sorted(given(directory) - set(known()))
    if lost:
        directory.write(_GATHERED, lambda sink: sink.write(encoded(lost)))
    directory.delete(*(name for name in names if not (lost and name == _GATHERED)))


class Numbers:
    """The log of one writer.

    Args:
        directory: the repository's.
        writer: names it; no other one of this repository, of this incarnation or of another, has this name.

    >>> import tempfile
    >>> from tensorvine.store.archive.opening import open_directory
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     directory = open_directory(folder)
    ...     numbers = Numbers(directory, "0-a")
    ...     numbers.add(ModelRef("m", 1))
    ...     given(directory)
    True
    {ModelRef('m@1')}
    """

    def __init__(self, directory: Directory, writer: str) -> None:
        self._directory = directory
        self._writer = writer
        self._serial = 0
        self._nbytes = 0
        self._left: dict[ModelRef, None] = {}
        """Versions in the log that have no manifest yet."""

    @property
    def _name(self) -> str:
        return f"{FOLDER}/{self._writer}.{self._serial}.log"

    def add(self, ref: ModelRef) -> bool:
        """Add a version; False where the file system cannot append. By one thread at a time.

        Raises:
            StorageError: the disk does not take it.
        """
        line = encoded([ref])
        if not self._directory.append(self._name, line):
            return False
        self._left[ref] = None
        self._nbytes += len(line)
        if self._nbytes > GROWN_BYTES:
            self._write_anew()
        return True

    def done(self, ref: ModelRef) -> None:
        """Know that a version has a manifest. By any thread."""
        self._left.pop(ref, None)

    def _write_anew(self) -> None:
        content, old = encoded(list(self._left)), self._name
        self._serial += 1
        self._directory.write(self._name, lambda sink: sink.write(content))
        self._nbytes = len(content)
        self._directory.delete(old)
