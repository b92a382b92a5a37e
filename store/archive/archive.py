"""A repository on disk: which files it has and in what order they come and go (docs/reference/format.md).

    repository.json                       format version
    lock                                  empty; locked while a repository runs here (local file systems)
    manifests/NAME@VERSION.arrow          one per version, live or retired; written last
    segments/SERIAL.GENERATION.arrow      the tensors, a generation per compaction

Rules
- Whoever may write below the path may put anything there: what is no file under the name of one is named where it is
  read (`local.open_regular`), and segments' files are those that are files.
- The committed manifests are the truth. A segment that no manifest names is garbage: of a save that never ended, or
  of a version that was retired just before a crash.
- A segment's file is never changed. A compaction writes the next generation and then deletes the one before; of two
  that a crash left, the newer one counts.
- Deleting comes after what makes it right is on disk: first the header that says "retired", then the segments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..bounds import jsontext
from ..codecs.blocks import Encoded
from ..errors import CorruptDataError, StorageError, shown
from ..refs import ModelRef
from ..segments.segment import SegmentId
from .directory import FOLDER, TEMPORARY, Directory, GuardedDirectory
from .encoding import block_of
from .manifestfile import Manifest, decode_manifest, encode_manifest, manifest_name, version_of
from .opening import open_directory
from .segmentfile import FORMAT, Row, SegmentFile, segment_of, segment_text, write_segment

if TYPE_CHECKING:
    from typing_extensions import Buffer

LOCK_NAME = "lock"
"""Locked by the repository that runs on the path."""
_MARK = "repository.json"
_SEGMENT_NAME = re.compile(r"segments/([0-9a-f]{1,64})\.(\d{1,18})\.arrow", re.ASCII)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A segment's file."""

    name: str
    generation: int
    nbytes: int
    """Length of the file."""


class Archive:
    """The files of one repository.

    Args:
        uri: see `directory.open_directory`.
        create: make what is missing; else there must be a repository.
        guard: called before each change of a file; what it raises ends that. None: files may always change.

    Raises:
        StorageError: the path cannot be used, or holds files that are no repository's.
        CorruptDataError: a repository of another format version.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     archive = Archive(folder)
    ...     archive.manifests(), archive.segments()
    ([], {})
    """

    def __init__(self, uri: str, create: bool = True, guard: Callable[[], None] | None = None) -> None:
        opened = open_directory(uri, create)
        self.directory: Directory = GuardedDirectory(opened, guard) if guard is not None else opened
        self._check_mark(create)

    # ---- segments ---------------------------------------------------------------------------------------

    def write_segment(
        self, segment: SegmentId, generation: int, rows: Sequence[Row], encoded: Sequence[Encoded]
    ) -> StoredFile:
        """Write a segment's tensors.

        Args:
            segment: its id.
            generation: 0, or one more than that of the file which this one replaces.
            rows: what describes them.
            encoded: their stored forms.
        """
        name = f"segments/{segment_text(segment)}.{generation}.arrow"
        return StoredFile(name, generation, write_segment(self.directory, name, segment, rows, block_of(encoded)))

    def open_segment(self, file: StoredFile) -> SegmentFile:
        """Open a segment's file.

        Raises:
            CorruptDataError: it is damaged, or under another segment's name.
            StorageError: it cannot be read.
        """
        opened = SegmentFile(self.directory, file.name)
        expected, found = file.name.rpartition("/")[2].partition(".")[0], segment_text(opened.segment)
        if found != expected:
            opened.close()
            raise CorruptDataError(f"{opened.where}: expected segment {expected}; found {found}")
        return opened

    def delete_segments(self, names: Iterable[str]) -> None:
        """Delete segments' files."""
        self.directory.delete(*names)

    def segments(self) -> dict[SegmentId, list[StoredFile]]:
        """List the segments' files, the newest generation of each first."""
        found: dict[SegmentId, list[StoredFile]] = {}
        for name, nbytes in self.directory.list("segments").items():
            match = _SEGMENT_NAME.fullmatch(name)
            if match is not None:
                found.setdefault(segment_of(match[1]), []).append(StoredFile(name, int(match[2]), nbytes))
        for files in found.values():
            files.sort(key=lambda file: -file.generation)
        return found

    def check_there(self) -> None:
        """Refuse a path that is not there just now: that a file is missing says nothing then.

        Raises:
            StorageError: it is not there, or cannot be read.
        """
        if not self._has_mark():
            raise StorageError(f"{self.directory.uri}: expected a repository; its {_MARK} is not there")

    # ---- versions ---------------------------------------------------------------------------------------

    def write_manifest(self, manifest: Manifest, layers: Mapping[str, str]) -> None:
        """Make a version exist on disk, or, with `manifest.retired`, cease to."""
        content = encode_manifest(manifest, layers)
        self.directory.write(manifest_name(manifest.header.ref), lambda sink: sink.write(content))

    def manifests(self) -> list[str]:
        """List the manifests' files, live or retired, and what else stands under the name of one."""
        files = [name for name in self.directory.list("manifests") if name.endswith(".arrow")]
        return files + [name for name in self.directory.odd("manifests") if version_of(name) is not None]

    def hidden(self) -> dict[str, str]:
        """Name what stands among the manifests under the name of none, and is neither a file nor a folder: what it is.

        Manifests, or a folder of them, may have stood there.
        """
        odd = self.directory.odd("manifests")
        return {name: what for name, what in odd.items() if version_of(name) is None and what != FOLDER}

    def read_manifest(self, name: str | ModelRef) -> Manifest:
        """Read a manifest.

        Raises:
            CorruptDataError: it is damaged, or under another version's name.
            StorageError: it cannot be read.
        """
        name = manifest_name(name) if isinstance(name, ModelRef) else name
        return self.manifest_of(name, self.directory.read(name))

    def manifest_of(self, name: str, content: Buffer) -> Manifest:
        """Decode a manifest's file that was read already; errors as in `read_manifest`."""
        where = shown(f"{self.directory.uri}/{name}")
        manifest = decode_manifest(content, where)
        if manifest_name(manifest.header.ref) != name:
            raise CorruptDataError(f"{where}: expected the manifest of this name; found that of {manifest.header.ref}")
        return manifest

    # ---- the whole --------------------------------------------------------------------------------------

    def abandoned(self) -> list[str]:
        """Name half-written files that nobody writes, while others may be writing; see `Directory.abandoned`."""
        return self.directory.abandoned()

    def sweep(self) -> list[str]:
        """Remove half-written files, and name them. Nobody may be writing: it is done when a repository starts."""
        return self.directory.sweep("")

    def _check_mark(self, create: bool) -> None:
        where = f"{self.directory.uri}/{_MARK}"
        if not self._has_mark():
            odd = [name for name, what in self.directory.odd("").items() if what != FOLDER]
            others = sorted(name for name in (*self.directory.list(""), *odd) if not _is_left_of_a_start(name))
            if others:
                raise StorageError(
                    f"{self.directory.uri}: expected an empty directory or a repository; found {others[:3]}"
                )
            if not create:
                raise StorageError(f"{self.directory.uri}: expected a repository; found an empty directory")
            self.directory.write(_MARK, lambda sink: sink.write(json.dumps({"format": FORMAT}).encode()))
            return
        version = jsontext.mapping(self.directory.read(_MARK).to_pybytes(), where).get("format")
        if version != FORMAT:
            raise CorruptDataError(f"{where}: expected format {FORMAT}; found {version!r}: a newer TensorVine wrote it")

    def _has_mark(self) -> bool:
        try:
            return self.directory.read(_MARK).size >= 0
        except StorageError as exc:
            if isinstance(exc.__cause__, FileNotFoundError):
                return False
            raise


def _is_left_of_a_start(name: str) -> bool:
    """Tell whether a start that was killed before it wrote the mark may have left this file."""
    return name == LOCK_NAME or ("/" not in name and name.endswith(TEMPORARY))
