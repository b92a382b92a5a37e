"""A start on a path where somebody else may write: what is wrong with one entry costs one version, and says so by name.

In one process and without Ray, on a real folder. What would block here blocks the test.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.catalog.finding import Manifests
from tensorvine.actors.rpc.catalog_calls import CatalogCalls
from tensorvine.actors.rpc.catalog_messages import Declared
from tensorvine.store.archive.archive import Archive
from tensorvine.store.archive.manifestfile import Manifest, manifest_name
from tensorvine.store.catalog.state import CatalogState
from tensorvine.store.errors import CorruptDataError, StorageError, TensorVineError
from tensorvine.store.graphs.graph import ModelGraph
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.segment import SegmentId
from tensorvine.store.versions.manifest import Header, TensorEntry
from tensorvine.store.waiting import Deadline

from tests.support.catalog_room import CatalogRoom, catalog_room
from tests.support.disk import segments
from tests.support.disklife import put
from tests.support.hostile import ENTRIES, FORGERIES, forge, place
from tests.support.s3 import S3Server
from tests.support.shard_room import CLIENT, disk_at
from tests.support.waiting import eventually

A, FIRST, BAD, LAST = ModelRef("a", 1), ModelRef("b", 1), ModelRef("b", 2), ModelRef("c", 1)
ARRAYS = [np.full(1000 + n, n, np.uint8) for n in range(4)]
ONE, TWO = (0, 1), (0, 2)
SLOTS: dict[ModelRef, dict[SegmentId, list[int]]] = {
    A: {ONE: [0, 1]},
    FIRST: {ONE: [0, 2]},
    BAD: {ONE: [2], TWO: [0]},
    LAST: {ONE: [1]},
}
CONTENTS: dict[str, bytes] = {
    "an empty file": b"",
    "a text": b"no manifest\n" * 1000,
    "an Arrow file's beginning": b"ARROW1\0\0" + bytes(1000),
    "brackets": b'{"checksum": "' + b"0" * 32 + b'"}' + b"[" * 100_000,
}
GRAPH = ModelGraph(()).to_json()


def note(archive: Archive, ref: ModelRef, places: Sequence[tuple[int, int, int]]) -> None:
    """Write a version's manifest: its tensors' (serial, slot, bytes)."""
    entries = {f"t{s}.{i}": TensorEntry("uint8", (n,), n, None, (0, s), i) for s, i, n in places}
    header = Header(
        ref=ref,
        parent=None,
        quality=None,
        metadata="{}",
        created_ns=ref.version,
        graph_key=b"key",
        bytes_owned=1,
        bytes_total=1,
    )
    archive.write_manifest(Manifest(header, (GRAPH, None), entries, {}), {})


def history(uri: str) -> Archive:
    """Write versions of three names. The second of `b` shares a tensor with each of the others, and has one alone."""
    archive = Archive(uri)
    put(archive, ONE, dict(enumerate(ARRAYS[:3])))
    put(archive, TWO, {0: ARRAYS[3]})
    note(archive, A, [(1, 0, 1000), (1, 1, 1001)])
    note(archive, FIRST, [(1, 0, 1000), (1, 2, 1002)])
    note(archive, BAD, [(1, 2, 1002), (2, 0, 1003)])
    note(archive, LAST, [(1, 1, 1001)])
    return archive


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "repository"
    history(str(path))
    return path


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as started:
        yield started


class Reading:
    """What a catalog that starts takes from the manifests of a path."""

    def __init__(self, path: object) -> None:
        self.state = CatalogState("start", on_path=True)
        self.manifests = Manifests(Archive(str(path)), self.state)
        self.manifests.read((0,))

    def whole(self, ref: ModelRef) -> bool:
        """Tell whether a version is there with all its slots, in files."""
        entry = self.state.live(self.state.resolve(ref.name, ref.version))
        return (
            entry is not None
            and self.state.holds_of(entry) == SLOTS[ref]
            and all(self.state.references.has(segment, slots) for segment, slots in SLOTS[ref].items())
        )

    def again(self) -> int:
        """Read again what could not be read; return how many could be."""
        lock = threading.RLock()
        return sum(self.manifests.read_again(ref, (0,), lock) is None for ref in list(self.state.unread))


def spoil(file: Path, wrong: str) -> None:
    """Have something wrong stand in the place of a manifest."""
    if wrong in FORGERIES:
        forge(file, wrong)
    elif wrong in CONTENTS:
        file.write_bytes(CONTENTS[wrong])
    else:
        place(file, wrong)


def remove(file: Path) -> None:
    if file.is_dir() and not file.is_symlink():
        file.rmdir()
    else:
        file.unlink()


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def calm(room: CatalogRoom) -> None:
    room.ask(CatalogCalls.renew(CLIENT, Declared((), room.number, room.real._context.lease.number)))


def contents(room: CatalogRoom, ref: ModelRef) -> list[bytes]:
    """Read a version's tensors."""
    places = room.locate(ref).places
    return [
        content for segment, slots in SLOTS[ref].items() for content in room.content(segment, slots, places[segment][0])
    ]


def expected(ref: ModelRef) -> list[bytes]:
    return [ARRAYS[slot if segment == ONE else 3].tobytes() for segment, slots in SLOTS[ref].items() for slot in slots]


def until(condition: Callable[[], object], what: str) -> None:
    eventually(condition, what, ignoring=(TensorVineError,))


class TestOneManifest:
    @pytest.mark.parametrize("wrong", [*ENTRIES, *CONTENTS, *FORGERIES])
    def test_it_costs_its_version_only_is_named_and_is_read_again(
        self, path: Path, wrong: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = path / manifest_name(BAD)
        content = file.read_bytes()
        spoil(file, wrong)
        read = Reading(path)
        assert read.state.models() == [A, FIRST, LAST]
        assert all(read.whole(ref) for ref in (A, FIRST, LAST))
        assert list(read.state.unread) == [BAD]
        assert read.state.is_blind, "nothing that it may name is deleted"
        reason = str(read.state.unread[BAD])
        assert reason.startswith(f"{file}: expected ")
        assert [error for error in errors(caplog) if str(BAD) in error and reason in error] == errors(caplog)
        assert len(errors(caplog)) == 1
        with pytest.raises(CorruptDataError, match=f"{BAD}: {file}: expected "):
            read.state.resolve("b", 2)
        assert read.state.resolve("b", None) == FIRST
        assert read.state.next_version("b") == 3, "its number is not used again"
        assert read.again() == 0
        assert list(read.state.unread) == [BAD]

        remove(file)
        file.write_bytes(content)
        assert read.again() == 1
        assert not read.state.is_blind
        assert read.whole(BAD)
        read.state.check()

    @pytest.mark.parametrize("text", ['{"layers": [3]}', "[" * 50_000, "graph"])
    def test_an_architecture_that_is_no_graph(self, path: Path, text: str) -> None:
        archive = Archive(str(path))
        manifest = archive.read_manifest(BAD)
        ref = ModelRef("d", 1)
        header = replace(manifest.header, ref=ref, graph_key=b"another")
        archive.write_manifest(Manifest(header, (text, None), manifest.entries, {}), {})
        read = Reading(path)
        for _ in range(2):
            (reason,) = map(str, read.state.unread.values())
            assert manifest_name(ref) in reason
            assert read.again() == 0
            assert list(read.state.unread) == [ref]
            assert read.state.is_blind
        assert all(read.whole(ref) for ref in SLOTS)
        archive.write_manifest(Manifest(header, (GRAPH, None), manifest.entries, {}), {})
        assert read.again() == 1
        entry = read.state.live(ref)
        assert entry is not None
        assert read.state.holds_of(entry) == SLOTS[BAD]
        read.state.check()

    def test_a_line_with_a_hole_ends_there_and_is_whole_when_it_is_read(self, path: Path) -> None:
        archive = Archive(str(path))
        for version in (2, 3):
            manifest = archive.read_manifest(BAD)
            header = replace(manifest.header, ref=ModelRef("b", version), parent=ModelRef("b", version - 1))
            archive.write_manifest(Manifest(header, (GRAPH, None), manifest.entries, {}), {})
        file = path / manifest_name(BAD)
        content = file.read_bytes()
        spoil(file, "slot -1")
        read, newest = Reading(path), ModelRef("b", 3)
        assert read.state.chain(newest) == [newest, BAD]
        file.write_bytes(content)
        assert read.again() == 1
        assert read.state.chain(newest) == [newest, BAD, FIRST]

    def test_two_that_derive_from_each_other_end_no_start_and_no_question(self, path: Path) -> None:
        archive = Archive(str(path))
        for ref, parent in ((A, FIRST), (FIRST, A)):
            manifest = archive.read_manifest(ref)
            header = replace(manifest.header, parent=parent)
            archive.write_manifest(Manifest(header, (GRAPH, None), manifest.entries, {}), {})
        read = Reading(path)
        assert read.state.chain(A) == [A, FIRST]
        assert read.state.chain(FIRST) == [FIRST, A]
        assert set(read.state.offspring(A)) == {A, FIRST}


class TestRepository:
    """A real catalog and a real shard on such a path."""

    @pytest.mark.parametrize("wrong", ["folder", "dangling link", "a text", "slot -1"])
    def test_nothing_is_lost_by_a_start_and_all_is_there_when_the_manifest_is(
        self, tmp_path: Path, path: Path, wrong: str
    ) -> None:
        file, before = path / manifest_name(BAD), segments(path)
        content = file.read_bytes()
        spoil(file, wrong)
        with catalog_room(tmp_path / "private", 1, disk_at(path)) as room:
            until(lambda: all(contents(room, ref) == expected(ref) for ref in (A, FIRST, LAST)), "the others")
            calm(room)
            for ref in (A, FIRST, LAST):
                room.retire(ref)
            for _ in range(3):
                _placement(room).look_for_orphans()
            room.start_catalog()
            calm(room)
            with pytest.raises(CorruptDataError, match=f"{BAD}: {file}: expected "):
                room.locate(BAD)
            assert room.saved(b"new", name="b") == ModelRef("b", 3)
            assert set(before) <= set(segments(path))
            remove(file)
            file.write_bytes(content)
            until(lambda: contents(room, BAD) == expected(BAD), "the version to be read again")
            until(lambda: not _slots(room, ONE) - {2}, "what is retired to be freed")
            room.ask(CatalogCalls.check())
            assert room.ask(CatalogCalls.models("")) == [BAD, ModelRef("b", 3)]

    def test_a_catalog_that_starts_again_knows_what_the_manifest_said(self, tmp_path: Path, path: Path) -> None:
        with catalog_room(tmp_path / "private", 1, disk_at(path)) as room:
            until(lambda: contents(room, BAD) == expected(BAD), "the version")
            spoil(path / manifest_name(BAD), "a text")
            room.start_catalog()
            until(lambda: contents(room, BAD) == expected(BAD), "the version, from the journal")
            assert room.ask(CatalogCalls.models("")) == sorted(SLOTS)

    @pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry != "folder"])
    def test_a_segment_file_that_is_none_costs_what_it_held(self, tmp_path: Path, path: Path, entry: str) -> None:
        place(path / "segments" / "2.0.arrow", entry)
        with catalog_room(tmp_path / "private", 1, disk_at(path)) as room:
            until(lambda: all(contents(room, ref) == expected(ref) for ref in (A, FIRST, LAST)), "the others")
            assert room.content(ONE, [2], 0) == [ARRAYS[2].tobytes()]
            with pytest.raises(TensorVineError):
                room.content(TWO, [0], 0)

    @pytest.mark.parametrize("entry", ENTRIES)
    def test_a_segment_file_of_a_later_generation_that_is_none_does_not_count(
        self, tmp_path: Path, path: Path, entry: str
    ) -> None:
        before = segments(path)
        place(path / "segments" / "1.99.arrow", entry)
        with catalog_room(tmp_path / "private", 1, disk_at(path)) as room:
            until(lambda: all(contents(room, ref) == expected(ref) for ref in SLOTS), "all versions")
            calm(room)
            for _ in range(2):
                _placement(room).look_for_orphans()
            assert set(before) <= set(segments(path))

    @pytest.mark.parametrize("entry", ENTRIES)
    def test_the_journal_is_written_elsewhere_where_its_file_is_none(
        self, tmp_path: Path, path: Path, entry: str
    ) -> None:
        (path / "catalog").mkdir()
        place(path / "catalog" / "1.1.journal", entry)
        with catalog_room(tmp_path / "private", 1, disk_at(path)) as room:
            until(lambda: all(contents(room, ref) == expected(ref) for ref in SLOTS), "all versions")
            assert not room.real._context.journal.on_path
            journal = room.real._context.journal
            journal._try_path = Deadline.after(0.0)
            journal.renew()
            assert journal.on_path
            place(path / journal.stream.name, entry)
            assert room.saved(b"new", name="b") == ModelRef("b", 3)
            assert not journal.on_path
            room.start_catalog()
            assert room.ask(CatalogCalls.models("")) == [*sorted(SLOTS)[:3], ModelRef("b", 3), LAST]


def _placement(room: CatalogRoom) -> Any:
    from tensorvine.actors.catalog.parts.versions import Versions

    return room.real.parts[Versions]._placement  # type: ignore[attr-defined]


def _slots(room: CatalogRoom, segment: SegmentId) -> set[int]:
    known = room.real._context.state.references.get(segment)
    return set(known.live()) if known is not None else set()


class TestOtherEntries:
    @pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry != "folder"])
    def test_what_stands_where_a_folder_of_manifests_may_have_stood_keeps_what_these_may_name(
        self, path: Path, entry: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        archive, deep = Archive(str(path)), ModelRef("nas/1", 1)
        note(archive, deep, [(2, 0, 1003)])
        remove(path / manifest_name(BAD))
        (path / "manifests" / "nas").rename(path.parent / "apart")
        what = place(path / "manifests" / "nas", entry)
        read = Reading(path)
        reason = f"{path}/manifests/nas: expected a manifest or a folder of manifests; found {what}"
        assert {name: str(why) for name, why in read.state.hidden.items()} == {"manifests/nas": reason}
        assert [error for error in errors(caplog) if reason in error] == errors(caplog)
        assert len(errors(caplog)) == 1
        assert all(read.whole(ref) for ref in (A, FIRST, LAST))
        assert read.state.is_blind
        (path / "manifests" / "nas").unlink()
        (path.parent / "apart").rename(path / "manifests" / "nas")
        read = Reading(path)
        assert not read.state.is_blind
        assert deep in read.state.models()

    def test_a_manifest_under_the_name_of_no_version_is_named_and_what_it_names_is_kept(self, path: Path) -> None:
        (path / manifest_name(BAD)).rename(path / "manifests" / "lost.arrow")
        read = Reading(path)
        assert list(read.state.hidden) == ["manifests/lost.arrow"]
        (reason,) = map(str, read.state.hidden.values())
        assert "expected the manifest of this name; found that of b@2" in reason
        assert read.state.is_blind

    @pytest.mark.parametrize("entry", ENTRIES)
    def test_a_log_of_numbers_that_is_none_is_passed_over(
        self, path: Path, entry: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        (path / "numbers").mkdir()
        place(path / "numbers" / "0-a.0.log", entry)
        read = Reading(path)
        assert all(read.whole(ref) for ref in SLOTS)
        assert "numbers/0-a.0.log: expected a log of version numbers; found a" in caplog.text

    @pytest.mark.parametrize("entry", ENTRIES)
    def test_a_mark_that_is_none_ends_the_start_at_once(self, path: Path, entry: str) -> None:
        place(path / "repository.json", entry)
        with pytest.raises(CorruptDataError, match=r"repository.json: expected a regular file; found a"):
            Archive(str(path))
        for folder in ("manifests", "segments"):
            (path / folder).rename(path.parent / folder)
        with pytest.raises(CorruptDataError, match=r"repository.json: expected a regular file"):
            Archive(str(path))

    def test_folders_that_are_links_end_the_start_at_once(self, path: Path) -> None:
        for folder in ("manifests", "segments"):
            (path / folder).rename(path.parent / "apart")
            (path / folder).symlink_to(path.parent / "apart")
            with pytest.raises(StorageError, match=f"{path}/{folder}: expected to list it; Not a directory"):
                Reading(path)
            (path / folder).unlink()
            (path.parent / "apart").rename(path / folder)
        link = path.parent / "link"
        link.symlink_to(path)
        read = Reading(link)
        assert all(read.whole(ref) for ref in SLOTS)


class TestObjectStores:
    @pytest.mark.parametrize("wrong", ["an empty file", "a text", "other columns"])
    def test_an_object_of_another_content_costs_its_version_only(
        self, server: S3Server, tmp_path: Path, wrong: str
    ) -> None:
        uri: Any = server.uri(f"hostile-{wrong}".replace(" ", "-"))
        archive = history(uri)
        name, local = manifest_name(BAD), tmp_path / "b@2.arrow"
        content = archive.directory.read(name).to_pybytes()
        local.write_bytes(content)
        spoil(local, wrong)
        write(archive, name)(local.read_bytes())
        read = Reading(uri)
        assert all(read.whole(ref) for ref in (A, FIRST, LAST))
        assert list(read.state.unread) == [BAD]
        write(archive, name)(content)
        assert read.again() == 1
        assert read.whole(BAD)


def write(archive: Archive, name: str) -> Callable[[bytes], int]:
    return lambda content: archive.directory.write(name, lambda sink: sink.write(content))
