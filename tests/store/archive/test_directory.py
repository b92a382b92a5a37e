"""The contract of a directory, over local files, fsspec and an S3-compatible server, and what is special about each."""

from __future__ import annotations

import errno
import threading
import traceback
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tensorvine.store.archive.archive import Archive
from tensorvine.store.archive.directory import Directory, GuardedDirectory
from tensorvine.store.archive.encoding import decode_slot, encode_tensors
from tensorvine.store.archive.local import LocalDirectory
from tensorvine.store.archive.opening import open_directory
from tensorvine.store.errors import CorruptDataError, StorageError

from tests.support.crash import tensor_of
from tests.support.directories import content_of, put
from tests.support.s3 import SECRET, S3Server

LARGE = 11 << 20
"""Bytes; on an object store that is more than one part."""
_serial = count()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as started:
        yield started


class Contract:
    """What every directory does."""

    @pytest.fixture
    def uri(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def directory(self, uri: str) -> Directory:
        return open_directory(uri)

    @pytest.mark.parametrize("name", ["a", "folder/a", "a b/c/d.e/é@1.arrow", "%/%2E"])
    @pytest.mark.parametrize("content", [b"", b"abc"])
    def test_what_is_written_is_read(self, directory: Directory, name: str, content: bytes) -> None:
        assert put(directory, name, content) == len(content)
        assert content_of(directory, name) == content
        assert directory.list("") == {name: len(content)}

    def test_a_file_written_in_many_pieces_is_their_sequence(self, directory: Directory) -> None:
        pieces = [b"a", b"", bytearray(b"bc"), memoryview(np.arange(3, dtype=np.int16)), np.zeros(2, np.uint8)]
        assert directory.write("a", lambda sink: [sink.write(piece) for piece in pieces]) == 11
        assert content_of(directory, "a") == b"abc\0\0\1\0\2\0\0\0"

    def test_what_is_appended_is_at_the_end_where_the_file_system_appends(self, directory: Directory) -> None:
        appends = [directory.append("logs/a", data) for data in (b"ab", b"", b"c")]
        assert appends in ([True] * 3, [False] * 3)
        if appends[0]:
            assert content_of(directory, "logs/a") == b"abc"
        else:
            assert directory.list("") == {}

    def test_a_large_file_can_be_read_in_parts(self, directory: Directory) -> None:
        content = np.random.default_rng(0).integers(0, 256, LARGE, np.uint8)
        assert put(directory, "large", content.data) == LARGE
        file = directory.open("large")
        assert file.nbytes == LARGE
        for offset, nbytes in ((0, 0), (0, 1), (LARGE - 1, 1), (LARGE, 0), (5 << 20, 3 << 20), (0, LARGE)):
            part = file.part(offset, nbytes)
            assert np.array_equal(part, content[offset : offset + nbytes])
            assert not part.flags.writeable
        file.close()

    def test_a_part_outlives_its_file(self, directory: Directory) -> None:
        put(directory, "a", b"abc")
        file = directory.open("a")
        part = file.part(1, 2)
        file.close()
        directory.delete("a")
        assert part.tobytes() == b"bc"

    def test_a_part_is_read_into_memory_that_is_given(self, directory: Directory) -> None:
        put(directory, "a", b"abcdef")
        file, memory = directory.open("a"), np.zeros(8, np.uint8)
        part = file.part(2, 3, memory[4:7])
        assert memory.tobytes() == b"\0\0\0\0cde\0"
        assert (part.tobytes(), part.flags.writeable) == (b"cde", False)
        file.close()

    @pytest.mark.parametrize(("offset", "nbytes"), [(0, 4), (3, 1), (4, 0), (-1, 1), (1, -1), (1 << 62, 1 << 62)])
    def test_a_part_outside_is_refused(self, directory: Directory, offset: int, nbytes: int) -> None:
        put(directory, "a", b"abc")
        file = directory.open("a")
        with pytest.raises(StorageError, match="/a: expected"):
            file.part(offset, nbytes)
        file.close()

    def test_an_empty_file_can_be_opened(self, directory: Directory) -> None:
        put(directory, "a", b"")
        file = directory.open("a")
        assert file.nbytes == file.part(0, 0).nbytes == 0
        file.close()

    def test_a_file_is_replaced_whole_and_its_readers_keep_the_old_one_or_fail(self, directory: Directory) -> None:
        put(directory, "a", b"old" * 100)
        before = directory.open("a").part(0, 300)
        put(directory, "a", b"n")
        assert content_of(directory, "a") == b"n"
        assert before.tobytes() == b"old" * 100
        assert directory.list("") == {"a": 1}

    def test_a_folder_is_listed_with_those_below_it(self, directory: Directory) -> None:
        for name in ("a/1", "a/b/2", "ab/3", "4"):
            put(directory, name, name.encode())
        assert directory.list("a") == {"a/1": 3, "a/b/2": 5}
        assert sorted(directory.list("")) == ["4", "a/1", "a/b/2", "ab/3"]
        assert directory.list("none") == directory.list("a/none") == {}

    def test_a_deleted_file_is_gone_and_the_others_are_not(self, directory: Directory) -> None:
        put(directory, "a/1", b"1")
        put(directory, "a/2", b"2")
        directory.delete("a/1")
        directory.delete("a/1")
        directory.delete("none/1")
        assert directory.list("a") == {"a/2": 1}

    def test_a_missing_file_is_named(self, directory: Directory) -> None:
        put(directory, "a/1", b"1")
        for name in ("none", "a/none", "none/1"):
            for read in (directory.read, directory.open):
                with pytest.raises(StorageError, match=f"{name}: expected to"):
                    read(name)
        for read in (directory.read, directory.open):
            with pytest.raises((StorageError, CorruptDataError), match="/a: expected"):
                read("a")

    def test_a_failing_writer_leaves_nothing(self, directory: Directory) -> None:
        def fill(sink: object) -> None:
            sink.write(b"half")  # pyright: ignore[reportAttributeAccessIssue]
            raise KeyError("writer")

        put(directory, "a/1", b"1")
        for name in ("a/1", "a/2"):
            with pytest.raises(KeyError, match="writer"):
                directory.write(name, fill)
        assert directory.list("") == {"a/1": 1}
        assert content_of(directory, "a/1") == b"1"

    def test_one_of_two_writers_wins_whole_and_readers_see_no_mixture(self, directory: Directory) -> None:
        contents = [bytes([i]) * 200_000 for i in range(4)]
        put(directory, "a", contents[0])
        barrier = threading.Barrier(len(contents))
        seen: list[bytes] = []

        def work(content: bytes) -> None:
            barrier.wait()
            for _ in range(5):
                put(directory, "a", content)
                seen.append(content_of(directory, "a"))

        threads = [threading.Thread(target=work, args=[content]) for content in contents]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(seen) == 5 * len(contents)
        assert set(seen) <= set(contents)
        assert content_of(directory, "a") in contents
        assert list(directory.list("")) == ["a"]

    def test_what_dead_writers_left_is_swept(self, directory: Directory) -> None:
        for name in ("a/.0123.tmp", "a/b/.4567.tmp", "a/kept.arrow", "other/.89.tmp"):
            put(directory, name, b"1")
        assert sorted(directory.sweep("a")) == ["a/.0123.tmp", "a/b/.4567.tmp"]
        assert sorted(directory.list("")) == ["a/kept.arrow", "other/.89.tmp"]
        assert directory.sweep("a") == directory.sweep("none") == []

    def test_it_can_be_opened_again(self, directory: Directory, uri: str) -> None:
        put(directory, "a", b"1")
        assert open_directory(uri, create=False).list("") == {"a": 1}

    def test_one_that_is_missing_is_refused_or_made(self, uri: str) -> None:
        with pytest.raises(StorageError, match="new: expected"):
            open_directory(_below(uri, "new"), create=False)
        assert open_directory(_below(uri, "new")).list("") == {}

    def test_a_file_is_no_directory(self, directory: Directory, uri: str) -> None:
        put(directory, "file", b"1")
        for create in (True, False):
            with pytest.raises(StorageError, match=r"file: expected .*irectory"):
                open_directory(_below(uri, "file"), create)


def _below(uri: str, name: str) -> str:
    path, mark, options = uri.partition("?")
    return f"{path}/{name}{mark}{options}"


class TestLocal(Contract):
    @pytest.fixture
    def uri(self, tmp_path: Path) -> str:
        return str(tmp_path / "some folder" / "é%20")

    def test_a_file_uri_means_the_same(self, tmp_path: Path) -> None:
        put(open_directory(tmp_path.as_uri()), "a", b"1")
        assert content_of(open_directory(str(tmp_path)), "a") == b"1"

    @pytest.mark.parametrize("scheme", ["fsspec+file", "fsspec+local"])
    def test_local_files_of_fsspec_are_the_same(self, tmp_path: Path, scheme: str) -> None:
        put(open_directory(f"{scheme}://{tmp_path}"), "a", b"1")
        assert content_of(LocalDirectory(tmp_path), "a") == b"1"
        assert isinstance(open_directory(f"{scheme}://{tmp_path}"), LocalDirectory)

    @pytest.mark.parametrize(
        "uri", ["memory://a", "fsspec+memory://a", "fsspec+memory:///a", "fsspec+simplecache::memory://a"]
    )
    def test_the_memory_of_one_process_is_refused(self, uri: str) -> None:
        with pytest.raises(StorageError, match=r"expected files that all processes .* found the memory of one process"):
            open_directory(uri)

    @pytest.mark.parametrize("uri", ["mock:///a", "fsspec+unknown://a", "fsspec+dir://a", "/a\0b", "file:///a%00b"])
    def test_what_holds_nothing_or_cannot_be_found_is_refused(self, uri: str) -> None:
        with pytest.raises(StorageError, match="expected"):
            open_directory(uri)

    @pytest.mark.parametrize("uri", ["", "relative/path", "unknown://host/path", "s3://b/p?no_such_option=1"])
    def test_what_is_no_path_is_refused(self, uri: str) -> None:
        with pytest.raises(StorageError, match="expected an absolute path or a URI"):
            open_directory(uri)


class TestGuarded(Contract):
    """Of a directory whose files may change."""

    @pytest.fixture
    def uri(self, tmp_path: Path) -> str:
        return str(tmp_path)

    @pytest.fixture
    def directory(self, uri: str) -> Directory:
        return GuardedDirectory(open_directory(uri), lambda: None)

    def test_nothing_changes_while_it_may_not(self, uri: str) -> None:
        def refuse() -> None:
            raise StorageError("not now")

        put(open_directory(uri), "a", b"1")
        directory = GuardedDirectory(open_directory(uri), refuse)
        for change in (
            lambda: put(directory, "a", b"2"),
            lambda: put(directory, "b", b"2"),
            lambda: directory.append("a", b"2"),
            lambda: directory.delete("a"),
        ):
            with pytest.raises(StorageError, match="not now"):
                change()
        assert (directory.list(""), content_of(directory, "a")) == ({"a": 1}, b"1")


class TestFsspec(Contract):
    """A file system that fsspec alone knows: here a folder of this machine, behind a wrapper."""

    @pytest.fixture
    def uri(self, tmp_path: Path) -> str:
        fsspec = pytest.importorskip("fsspec")
        from fsspec.implementations.dirfs import DirFileSystem

        class Far(DirFileSystem):
            """That folder as the root of a file system."""

            protocol = "far"
            cachable = False

            def __init__(self, **options: object) -> None:
                super().__init__(str(tmp_path), fs=fsspec.filesystem("file"), **options)

        fsspec.register_implementation("far", Far, clobber=True)
        return "fsspec+far:///some folder/%C3%A9"

    def test_what_a_file_system_raises_names_the_file(
        self, directory: Directory, uri: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from fsspec.implementations.dirfs import DirFileSystem
        from fsspec.implementations.local import LocalFileOpener

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("https://user:secret@host/a?token=secret")

        put(directory, "a", b"old")
        monkeypatch.setattr(DirFileSystem, "open", fail)
        for call in (lambda: put(directory, "a", b"1"), lambda: directory.read("a"), lambda: directory.open("a")):
            with pytest.raises(StorageError, match=r"/a: expected to .* it; RuntimeError$") as raised:
                call()
            assert "secret" not in "".join(traceback.format_exception(raised.value))
        monkeypatch.undo()
        assert content_of(directory, "a") == b"old"
        archive, array = Archive(f"{uri}/history"), np.arange(3)
        stored = archive.write_segment((0, 1), 0, *encode_tensors(None, [tensor_of(0, "w", array)]))
        assert (
            decode_slot(((0, 1), 0), array.nbytes, lambda _: archive.open_segment(stored)).tobytes() == array.tobytes()
        )
        monkeypatch.setattr(LocalFileOpener, "read", fail, raising=False)
        with pytest.raises(CorruptDataError, match=r"expected to read \d+ bytes at \d+ of it; RuntimeError$") as raised:
            archive.open_segment(stored)
        assert "secret" not in "".join(traceback.format_exception(raised.value))

    def test_a_write_that_fails_leaves_nothing_and_its_own_error(
        self, directory: Directory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from fsspec.implementations.dirfs import DirFileSystem

        def fail(*_: object, **__: object) -> None:
            raise OSError(errno.EDQUOT, "")

        put(directory, "a", b"old")
        put(directory, "folder/b", b"")
        monkeypatch.setattr(fail, "__module__", DirFileSystem.mv.__module__)
        monkeypatch.setattr(DirFileSystem, "mv", fail)
        with pytest.raises(StorageError, match=r"/a: expected to write it; Disk quota exceeded"):
            put(directory, "a", b"new")
        monkeypatch.undo()
        with pytest.raises(StorageError, match=r"/folder: expected to write it; Is a directory"):
            put(directory, "folder", b"new")
        assert directory.list("") == {"a": 3, "folder/b": 0}


class TestFsspecThatRenamesOtherwise:
    """File systems of fsspec that take renaming in their own ways: what was written is there, or there is an error."""

    @pytest.fixture
    def system(self) -> Any:
        memory = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem

        class Own(memory):
            """A file system that is nobody else's."""

            protocol = "own"
            store: ClassVar[dict[str, object]] = {}
            pseudo_dirs: ClassVar[list[str]] = [""]
            cachable = False

        return Own

    def opened(self, system: Any, folder: str) -> Directory:
        pytest.importorskip("fsspec").register_implementation("own", system, clobber=True)
        return open_directory(f"fsspec+own://{folder}")

    @pytest.mark.parametrize("folder", ["run[1]", "run*", "run"])
    def test_names_are_no_patterns(self, system: Any, folder: str) -> None:
        directory = self.opened(system, folder)
        for content in (b"old", b"new"):
            put(directory, "a", content)
            assert content_of(directory, "a") == content
        assert directory.list("") == {"a": 3}

    def test_a_server_that_does_not_replace_by_renaming(self, system: Any) -> None:
        def mv(self: Any, old: str, new: str, **_: object) -> None:
            """Do nothing, as WebHDFS does: what its server answers is ignored."""

        system.mv = mv
        directory = self.opened(system, "run")
        for content in (b"live", b"retired"):
            put(directory, "manifests/m@1.arrow", content)
            assert content_of(directory, "manifests/m@1.arrow") == content

    def test_sftp_renames_by_its_own_call(self, system: Any) -> None:
        renamed: list[str] = []

        def mv(self: Any, old: str, new: str) -> None:
            renamed.append(new)
            self.store[self._strip_protocol(new)] = self.store.pop(self._strip_protocol(old))

        mv.__module__ = "fsspec.implementations.sftp"  # which needs paramiko to be imported
        system.mv = mv
        directory = self.opened(system, "run")
        for content in (b"old", b"new"):
            put(directory, "folder/a", content)
            assert content_of(directory, "folder/a") == content
        assert len(renamed) == 2
        assert directory.list("") == {"folder/a": 3}

    def test_a_folder_that_is_there_is_not_made_again(self, system: Any) -> None:
        def mkdir(self: Any, path: str, **_: object) -> None:
            if self.exists(path):  # as FTP servers do
                raise RuntimeError("550")
            self.pseudo_dirs.append(self._strip_protocol(path))

        system.mkdir = mkdir
        directory = self.opened(system, "run")
        for name in ("folder/a", "folder/b"):
            put(directory, name, b"1")
        assert directory.list("") == {"folder/a": 1, "folder/b": 1}


class TestS3(Contract):
    @pytest.fixture
    def uri(self, server: S3Server) -> str:
        return server.uri(f"prefix-{next(_serial)}/%C3%A9")

    def test_it_has_no_locks(self, directory: Directory) -> None:
        assert directory.claim("lock") is None

    def test_a_missing_bucket_is_named(self, server: S3Server, uri: str) -> None:
        with pytest.raises(StorageError, match="no-such-bucket"):
            put(open_directory(uri.replace(server.bucket, "no-such-bucket")), "a", b"1")

    def test_messages_name_the_file_and_not_the_secret(self, directory: Directory, uri: str) -> None:
        with pytest.raises(StorageError, match="/none: expected") as raised:
            directory.read("none")
        with pytest.raises(StorageError) as refused:
            open_directory(uri + "&no_such_option=1")
        for text in (directory.uri, str(raised.value), str(refused.value)):
            assert SECRET not in text
            assert "s3://" in text

    @pytest.mark.parametrize("refused", ["partNumber=2", "uploads", "uploadId"])
    def test_an_upload_that_breaks_off_leaves_the_old_object(
        self, server: S3Server, directory: Directory, refused: str
    ) -> None:
        put(directory, "a", b"old")
        server.refuses = lambda environ: environ["REQUEST_METHOD"] != "GET" and refused in environ["QUERY_STRING"]
        try:
            for name in ("a", "b"):
                with pytest.raises(StorageError, match=f"/{name}: expected to write it"):
                    put(directory, name, bytes(LARGE))
        finally:
            server.refuses = lambda _: False
        assert directory.list("") == {"a": 3}
        assert content_of(directory, "a") == b"old"
