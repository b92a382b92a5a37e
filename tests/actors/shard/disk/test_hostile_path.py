"""A start on a path where somebody else may write: what is wrong with one entry costs one version, and says so by name.

In one process and without Ray, on a real folder. Nothing is waited for: what would block here blocks the test.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorvine.store.archive.archive import Archive
from tensorvine.store.archive.manifestfile import Manifest, manifest_name
from tensorvine.store.errors import CorruptDataError, StorageError
from tensorvine.store.refs import ModelRef
from tensorvine.store.shard import UnreadFile
from tensorvine.store.versions.manifest import Header, TensorEntry

from tests.support.disk import segments
from tests.support.disklife import GRAPH, Life, note, put
from tests.support.hostile import ENTRIES, FORGERIES, forge, place
from tests.support.s3 import S3Server

A, FIRST, BAD, LAST = ModelRef("a", 1), ModelRef("b", 1), ModelRef("b", 2), ModelRef("c", 1)
ARRAYS = [np.full(1000 + n, n, np.uint8) for n in range(4)]
CONTENTS: dict[str, bytes] = {
    "an empty file": b"",
    "a text": b"no manifest\n" * 1000,
    "an Arrow file's beginning": b"ARROW1\0\0" + bytes(1000),
    "brackets": b'{"checksum": "' + b"0" * 32 + b'"}' + b"[" * 100_000,
}


def history(uri: str) -> Archive:
    """Write versions of three names. The second of `b` shares a tensor with each of the others, and has one alone."""
    archive = Archive(uri, 1)
    put(archive, (0, 1), dict(enumerate(ARRAYS[:3])))
    put(archive, (0, 2), {0: ARRAYS[3]})
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


def calm() -> bool:
    return True


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


def whole(life: Life, ref: ModelRef) -> bool:
    """Tell whether a version is there with all its bytes."""
    assert life.state.resolve(ref.name, ref.version) == ref
    expected = {A: [0, 1], FIRST: [0, 2], BAD: [2, 3], LAST: [1]}[ref]
    return life.content(ref) == [ARRAYS[n].tobytes() for n in expected]


class TestOneManifest:
    @pytest.mark.parametrize("wrong", [*ENTRIES, *CONTENTS, *FORGERIES])
    @pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
    def test_it_costs_its_version_only_is_named_and_loses_nothing(
        self, path: Path, wrong: str, again: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        file, before = path / manifest_name(BAD), segments(path)
        content = file.read_bytes()
        spoil(file, wrong)
        life = Life(path, again)
        assert life.state.models() == [A, FIRST, LAST]
        assert all(whole(life, ref) for ref in (A, FIRST, LAST))

        (found,) = life.state.unreadable()
        assert (found.file, found.ref) == (manifest_name(BAD), BAD)
        assert found.reason.startswith(f"{file}: expected ")
        assert [error for error in errors(caplog) if str(BAD) in error and found.reason in error] == errors(caplog)
        assert len(errors(caplog)) == 1
        with pytest.raises(CorruptDataError, match=f"{BAD}: {file}: expected "):
            life.state.resolve("b", 2)
        assert life.state.resolve("b", None) == FIRST
        assert life.state._names["b"].next_version == 3, "its number is not used again"

        for ref in (A, FIRST, LAST):
            life.retire(ref)
        for _ in range(3):
            assert life.history.care.read_again() == 0
            life.history.care.look(calm)
        assert segments(path) == before, "nothing that it may name is deleted"
        assert len(errors(caplog)) == 1, "it is said once"

        remove(file)
        file.write_bytes(content)
        assert life.history.care.read_again() == 1
        assert life.state.unreadable() == []
        assert whole(life, BAD)
        life.state.check()

    def test_an_architecture_that_is_no_graph(self, path: Path, caplog: pytest.LogCaptureFixture) -> None:
        archive = Archive(str(path), 1)
        manifest = archive.read_manifest(BAD)
        archive.write_manifest(Manifest(manifest.header, ("{}", None), manifest.entries, {}), {})
        life = Life(path, again=False)
        assert life.state.models() == [A, FIRST, LAST] or b"key" in life.state.graphs
        for text in ('{"layers": [3]}', "[" * 50_000, "graph"):
            header = Header(
                ref=ModelRef("d", 1),
                parent=None,
                quality=None,
                metadata="{}",
                created_ns=1,
                graph_key=b"another",
                bytes_owned=1,
                bytes_total=1,
            )
            entries = {"t": TensorEntry("uint8", (1003,), 1003, None, (0, 2), 0)}
            archive.write_manifest(Manifest(header, (text, None), entries, {}), {})
            life = Life(path, again=False)
            (found,) = life.state.unreadable()
            assert (found.ref, manifest_name(header.ref) in found.reason) == (header.ref, True)
            assert life.history.care.read_again() == 0
            assert life.state.unreadable() == [found]
            assert all(whole(life, ref) for ref in (A, FIRST, LAST))
        archive.write_manifest(Manifest(header, (GRAPH, None), entries, {}), {})
        assert life.history.care.read_again() == 1
        assert life.content(header.ref) == [ARRAYS[3].tobytes()]
        life.state.check()

    def test_a_line_with_a_hole_ends_there_and_is_whole_when_it_is_read(self, path: Path) -> None:
        archive = Archive(str(path), 1)
        for version in (2, 3):
            manifest = archive.read_manifest(BAD)
            header = _of(manifest.header, ModelRef("b", version), ModelRef("b", version - 1))
            archive.write_manifest(Manifest(header, (GRAPH, None), manifest.entries, {}), {})
        file = path / manifest_name(BAD)
        content = file.read_bytes()
        spoil(file, "slot -1")
        life, newest = Life(path, again=False), ModelRef("b", 3)
        assert life.state.lineage.chain(newest) == [newest, BAD]
        assert life.content(newest) == [ARRAYS[2].tobytes(), ARRAYS[3].tobytes()]
        file.write_bytes(content)
        assert life.history.care.read_again() == 1
        assert life.state.lineage.chain(newest) == [newest, BAD, FIRST]

    def test_two_that_derive_from_each_other_end_no_start_and_no_question(self, path: Path) -> None:
        archive = Archive(str(path), 1)
        for ref, parent in ((A, FIRST), (FIRST, A)):
            manifest = archive.read_manifest(ref)
            header = _of(manifest.header, ref, parent)
            archive.write_manifest(Manifest(header, (GRAPH, None), manifest.entries, {}), {})
        life = Life(path, again=False)
        assert life.state.lineage.chain(A) == [A, FIRST]
        assert life.state.lineage.chain(FIRST) == [FIRST, A]
        assert set(life.state.lineage.offspring([A])) == {A, FIRST}
        life.retire(A)
        life.retire(FIRST)
        assert life.state.models() == [BAD, LAST]


def _of(header: Header, ref: ModelRef, parent: ModelRef | None) -> Header:
    return Header(
        ref=ref,
        parent=parent,
        quality=header.quality,
        metadata=header.metadata,
        created_ns=header.created_ns,
        graph_key=header.graph_key,
        bytes_owned=header.bytes_owned,
        bytes_total=header.bytes_total,
    )


class TestOtherEntries:
    @pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry != "folder"])
    def test_what_stands_where_a_folder_of_manifests_may_have_stood_keeps_what_these_may_name(
        self, path: Path, entry: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        archive, deep = Archive(str(path), 1), ModelRef("nas/1", 1)
        note(archive, deep, [(2, 0, 1003)])
        remove(path / manifest_name(BAD))
        before = segments(path)
        (path / "manifests" / "nas").rename(path.parent / "apart")
        what = place(path / "manifests" / "nas", entry)
        life = Life(path, again=False)
        reason = f"{path}/manifests/nas: expected a manifest or a folder of manifests; found {what}"
        assert life.state.unreadable() == [UnreadFile("manifests/nas", None, reason)]
        assert [error for error in errors(caplog) if reason in error] == errors(caplog)
        assert len(errors(caplog)) == 1
        assert all(whole(life, ref) for ref in (A, FIRST, LAST))
        for ref in (A, FIRST, LAST):
            life.retire(ref)
        for _ in range(3):
            life.history.care.look(calm)
        assert segments(path) == before
        (path / "manifests" / "nas").unlink()
        (path.parent / "apart").rename(path / "manifests" / "nas")
        life = Life(path, again=False)
        assert life.state.unreadable() == []
        assert life.content(deep) == [ARRAYS[3].tobytes()]

    def test_a_manifest_under_the_name_of_no_version_is_named_and_what_it_names_is_kept(self, path: Path) -> None:
        (path / manifest_name(BAD)).rename(path / "manifests" / "lost.arrow")
        before = segments(path)
        life = Life(path, again=False)
        (found,) = life.state.unreadable()
        assert (found.file, found.ref) == ("manifests/lost.arrow", None)
        assert "expected the manifest of this name; found that of b@2" in found.reason
        assert segments(path) == before

    @pytest.mark.parametrize("entry", ENTRIES)
    def test_a_segment_file_of_a_later_generation_that_is_none_does_not_count(self, path: Path, entry: str) -> None:
        before = segments(path)
        place(path / "segments" / "1.99.arrow", entry)
        life = Life(path, again=False)
        assert all(whole(life, ref) for ref in (A, FIRST, BAD, LAST))
        for _ in range(2):
            life.history.care.look(calm)
        assert set(before) <= set(segments(path))

    @pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry != "folder"])
    def test_a_segment_file_that_is_none_costs_what_it_held(self, path: Path, entry: str) -> None:
        place(path / "segments" / "2.0.arrow", entry)
        life = Life(path, again=False)
        assert all(whole(life, ref) for ref in (A, FIRST, LAST))
        assert life.content_of((0, 1), [2]) == [ARRAYS[2].tobytes()]
        assert not life.state.knows_segment((0, 2))

    @pytest.mark.parametrize("entry", ENTRIES)
    def test_a_log_of_numbers_that_is_none_is_passed_over(
        self, path: Path, entry: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        (path / "numbers").mkdir()
        place(path / "numbers" / "0-a.0.log", entry)
        Archive(str(path), 1).gather_numbers()
        assert all(whole(Life(path, again=False), ref) for ref in (A, FIRST, BAD, LAST))
        assert "numbers/0-a.0.log: expected a log of version numbers; found a" in caplog.text

    @pytest.mark.parametrize("entry", ENTRIES)
    def test_a_mark_that_is_none_ends_the_start_at_once(self, path: Path, entry: str) -> None:
        place(path / "repository.json", entry)
        with pytest.raises(CorruptDataError, match=r"repository.json: expected a regular file; found a"):
            Archive(str(path), 1)
        for folder in ("manifests", "segments"):
            (path / folder).rename(path.parent / folder)
        with pytest.raises(CorruptDataError, match=r"repository.json: expected a regular file"):
            Archive(str(path), 1)

    def test_folders_that_are_links_end_the_start_at_once(self, path: Path) -> None:
        for folder in ("manifests", "segments"):
            (path / folder).rename(path.parent / "apart")
            (path / folder).symlink_to(path.parent / "apart")
            with pytest.raises(StorageError, match=f"{path}/{folder}: expected to list it; Not a directory"):
                Life(path, again=False)
            (path / folder).unlink()
            (path.parent / "apart").rename(path / folder)
        link = path.parent / "link"
        link.symlink_to(path)
        assert all(whole(Life(link, again=False), ref) for ref in (A, FIRST, BAD, LAST))


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
        life = Life(uri, again=False)
        assert all(whole(life, ref) for ref in (A, FIRST, LAST))
        (found,) = life.state.unreadable()
        assert (found.file, found.ref) == (name, BAD)
        write(archive, name)(content)
        assert life.history.care.read_again() == 1
        assert whole(life, BAD)


def write(archive: Archive, name: str) -> Callable[[bytes], int]:
    return lambda content: archive.directory.write(name, lambda sink: sink.write(content))
