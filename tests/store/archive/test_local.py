"""What goes wrong with local files: calls that fail, full disks, what is no file, files that are cut, and locks."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tensorvine.store.archive.archive import Archive
from tensorvine.store.archive.encoding import decode_slot, encode_tensors
from tensorvine.store.archive.opening import open_directory
from tensorvine.store.errors import CorruptDataError, StorageError

from tests.support.crash import CALLS, scripted, tensor_of
from tests.support.directories import content_of, put
from tests.support.hostile import ENTRIES, place


class TestTrouble:
    def test_a_parent_that_is_a_file_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(StorageError, match="file/below: expected"):
            open_directory(str(tmp_path / "file/below"))
        directory = open_directory(str(tmp_path))
        with pytest.raises(StorageError, match="file/below: expected to write it; Not a directory"):
            put(directory, "file/below", b"")
        with pytest.raises(StorageError, match="file: expected to list it; Not a directory"):
            directory.list("file")

    def test_a_folder_is_no_file(self, tmp_path: Path) -> None:
        directory = open_directory(str(tmp_path))
        put(directory, "folder/a", b"")
        for call in (lambda: put(directory, "folder", b""), lambda: directory.delete("folder")):
            with pytest.raises(StorageError, match=r"folder: expected to .* it; Is a directory"):
                call()
        assert directory.list("") == {"folder/a": 0}

    def test_a_name_that_is_too_long_is_refused(self, tmp_path: Path) -> None:
        directory = open_directory(str(tmp_path))
        with pytest.raises(StorageError, match="name too long"):
            put(directory, "a" * 256, b"")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES, errno.EDQUOT])
    @pytest.mark.parametrize("call", CALLS)
    def test_each_system_call_that_fails_is_named_and_leaves_no_part_of_a_file(
        self, tmp_path: Path, call: str, number: int
    ) -> None:
        directory = open_directory(str(tmp_path))
        put(directory, "kept", b"old")
        if call == "unlink":
            with scripted(tmp_path, call, 0, number), pytest.raises(StorageError, match=os.strerror(number)) as raised:
                directory.delete("kept")
            assert str(tmp_path / "kept") in str(raised.value)
            return
        for name in ("kept", "folder/new"):
            if call == "mkdir" and name == "kept":
                continue
            with scripted(tmp_path, call, 0, number), pytest.raises(StorageError, match=os.strerror(number)) as raised:
                put(directory, name, b"new")
            assert str(tmp_path / name) in str(raised.value)
            assert not list(tmp_path.rglob("*.tmp"))
            put(directory, name, b"newer")
            assert content_of(directory, name) == b"newer"

    def test_a_deleted_file_stays_deleted_or_the_caller_hears_that_it_may_not(self, tmp_path: Path) -> None:
        directory = open_directory(str(tmp_path))
        for name in ("a/1", "a/2", "b/3"):
            put(directory, name, b"old")
        with scripted(tmp_path, "fsync folder", 0, errno.EIO), pytest.raises(StorageError, match=r"/a: .*sync it"):
            directory.delete("a/1", "a/2", "b/3")
        with scripted(tmp_path, "fsync folder", 9, errno.EIO) as script:
            directory.delete("a/1", "a/2", "b/3", "never/was")
        assert script.seen == 2
        assert directory.list("") == {}

    def test_a_file_larger_than_the_process_may_write_is_refused(self, tmp_path: Path) -> None:
        directory = open_directory(str(tmp_path))
        put(directory, "a", b"old")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            with pytest.raises(StorageError, match="/a: expected to write it; File too large"):
                put(directory, "a", bytes(2 << 20))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert directory.list("") == {"a": 3}

    def test_a_full_file_system_refuses_and_takes_more_when_there_is_room(self, mounted: Path) -> None:
        directory = open_directory(str(mounted))
        put(directory, "a", bytes(600_000))
        for _ in range(2):
            with pytest.raises(StorageError, match="/b: expected to write it; No space left on device"):
                put(directory, "b", bytes(600_000))
            assert directory.list("") == {"a": 600_000}
        directory.delete("a")
        assert put(directory, "b", bytes(600_000)) == 600_000

    def test_a_read_only_file_system_gives_what_it_has_and_takes_nothing(self, mounted: Path) -> None:
        directory = open_directory(str(mounted))
        put(directory, "a", b"old")
        subprocess.run(["/bin/mount", "-o", "remount,ro", mounted], check=True)
        assert content_of(open_directory(str(mounted)), "a") == b"old"
        for call in (
            lambda: put(directory, "a", b"new"),
            lambda: put(directory, "folder/b", b"new"),
            lambda: directory.delete("a"),
            lambda: directory.claim("lock"),
            lambda: open_directory(str(mounted / "new")),
        ):
            with pytest.raises(StorageError, match=f"{mounted}/.*: expected .*; Read-only file system"):
                call()
        assert content_of(directory, "a") == b"old"

    @pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
    def test_a_folder_without_permission_is_named(self, tmp_path: Path) -> None:
        directory = open_directory(str(tmp_path))
        put(directory, "a", b"old")
        tmp_path.chmod(0o500)
        for call in (lambda: put(directory, "a", b"new"), lambda: directory.delete("a")):
            with pytest.raises(StorageError, match=r"/a: expected .*; Permission denied"):
                call()
        assert content_of(directory, "a") == b"old"

    @pytest.fixture
    def mounted(self, tmp_path: Path) -> Iterator[Path]:
        """A file system of 1 MiB."""
        place = tmp_path / "mounted"
        place.mkdir()
        command = ["/bin/mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place]
        if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("mounting a file system takes root")
        yield place
        subprocess.run(["/bin/umount", "-l", place], check=True)


class TestOtherThanFiles:
    """Whoever may write below the directory may put anything there. Each read of it ends at once, with its name."""

    @pytest.mark.parametrize("entry", ENTRIES)
    def test_it_is_never_read_and_it_is_said_what_it_is(self, tmp_path: Path, entry: str) -> None:
        directory = open_directory(str(tmp_path))
        put(directory, "folder/kept", b"abc")
        found = place(tmp_path / "folder" / "odd", entry)
        for call in (
            lambda: directory.read("folder/odd"),
            lambda: directory.open("folder/odd"),
            lambda: directory.append("folder/odd", b"x"),
            lambda: directory.claim("folder/odd"),
        ):
            with pytest.raises(
                CorruptDataError, match=f"{tmp_path}/folder/odd: expected a regular file; found {found}"
            ):
                call()
        assert directory.odd("") == {"folder": "a folder", "folder/odd": found}

    @pytest.mark.parametrize("entry", ENTRIES)
    def test_lists_have_what_else_there_is_and_do_not_walk_it(self, tmp_path: Path, entry: str) -> None:
        directory = open_directory(str(tmp_path))
        put(directory, "folder/kept", b"abc")
        place(tmp_path / "folder" / ".half.tmp", entry)
        assert directory.list("") == directory.list("folder") == {"folder/kept": 3}
        assert directory.abandoned() == directory.sweep("") == []
        assert content_of(directory, "folder/kept") == b"abc"

    def test_the_directory_itself_may_be_a_link_and_the_folders_in_it_may_not(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        directory = open_directory(str(tmp_path / "link"))
        put(directory, "a/1", b"1")
        assert directory.list("") == {"a/1": 1}
        (tmp_path / "real" / "b").symlink_to("a")
        with pytest.raises(StorageError, match="link/b: expected to list it; Not a directory"):
            directory.list("b")

    @pytest.mark.parametrize("folder", ["link", "a/link"])
    def test_no_call_leaves_the_directory_by_a_folder_that_is_a_link(self, tmp_path: Path, folder: str) -> None:
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside" / "1").write_bytes(b"theirs")
        directory = open_directory(str(tmp_path / "inside"))
        put(directory, "a/1", b"1")
        (tmp_path / "inside" / folder).symlink_to(tmp_path / "outside")
        found = f"Not a directory: {tmp_path}/inside/{folder} is a symbolic link"
        for name in (f"{folder}/1", f"{folder}/2", f"{folder}/new/3"):
            for call in (
                lambda name: put(directory, name, b"ours"),
                lambda name: directory.append(name, b"ours"),
                directory.read,
                directory.open,
                directory.delete,
                directory.claim,
            ):
                with pytest.raises(StorageError, match=f"{name}: expected to .* it; {found}"):
                    call(name)
        assert (tmp_path / "outside" / "1").read_bytes() == b"theirs"
        assert os.listdir(tmp_path / "outside") == ["1"]
        assert directory.list("") == {"a/1": 1}
        assert directory.odd("")[folder] == "a symbolic link"

    def test_a_tree_that_is_deeper_than_any_name_is_walked_as_far_as_names_go(self, tmp_path: Path) -> None:
        directory = open_directory(str(tmp_path))
        put(directory, "folder/kept", b"abc")
        at = os.open(tmp_path / "folder", os.O_RDONLY)
        for _ in range(60):
            os.mkdir("d" * 250, dir_fd=at)
            below = os.open("d" * 250, os.O_RDONLY, dir_fd=at)
            os.close(at)
            at = below
        os.close(at)
        assert directory.list("") == {"folder/kept": 3}
        assert len(directory.odd("")) < 10

    def test_a_file_that_is_longer_than_any_that_is_read_whole_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "sparse").touch()
        os.truncate(tmp_path / "sparse", 1 << 40)
        with pytest.raises(CorruptDataError, match=r"sparse: expected at most \d+ bytes; found 1099511627776"):
            open_directory(str(tmp_path)).read("sparse")


class TestFilesThatAreCut:
    @pytest.mark.parametrize("into", [False, True], ids=["new memory", "given memory"])
    def test_a_read_of_what_is_gone_is_an_error_with_the_place_and_the_process_lives(
        self, tmp_path: Path, into: bool
    ) -> None:
        directory = open_directory(str(tmp_path))
        put(directory, "a", bytes(3 << 20))
        file = directory.open("a")
        before = file.part(1 << 20, 2 << 20)
        os.truncate(tmp_path / "a", (1 << 20) + 5)
        memory = np.ones(2 << 20, np.uint8) if into else None
        with pytest.raises(CorruptDataError, match=r"/a: expected 2097152 bytes at 1048576; found 5: .* truncated"):
            file.part(1 << 20, 2 << 20, memory)
        assert not before.any()
        assert file.part(0, 1 << 20).nbytes == 1 << 20
        file.close()

    def test_a_segment_file_that_is_cut_after_it_was_opened_says_so(self, tmp_path: Path) -> None:
        archive, array = Archive(str(tmp_path)), np.arange(1 << 18)
        stored = archive.write_segment((0, 1), 0, *encode_tensors(None, [tensor_of(0, "w", array)]))
        file, memory = archive.open_segment(stored), np.zeros(array.nbytes, np.uint8)
        os.truncate(tmp_path / stored.name, 1 << 20)
        with pytest.raises(CorruptDataError, match=rf"{stored.name}: expected {array.nbytes} bytes at \d+; found \d+"):
            decode_slot(((0, 1), 0), array.nbytes, lambda _: file, memory)
        os.truncate(tmp_path / stored.name, 0)
        with pytest.raises(CorruptDataError, match=f"{stored.name}: expected"):
            archive.open_segment(stored)

    def test_a_file_is_closed_with_its_last_reference(self, tmp_path: Path) -> None:
        directory = open_directory(str(tmp_path))
        put(directory, "a", b"abc")
        files = [directory.open("a") for _ in range(20)]
        assert times_open(tmp_path / "a") == 20
        part = files[0].part(0, 3)
        files.clear()
        assert times_open(tmp_path / "a") == 0
        assert part.tobytes() == b"abc"


def times_open(path: Path) -> int:
    """Return how often this process has a file open."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found += os.readlink(f"/proc/self/fd/{number}") == str(path)
    return found


class TestClaim:
    HOLDER = """
import sys
from tensorvine.store.archive.opening import open_directory
print(open_directory(sys.argv[1]).claim("lock") is not None, flush=True)
sys.stdin.read()
"""

    def test_another_process_has_it_until_it_is_killed(self, tmp_path: Path) -> None:
        directory = open_directory(str(tmp_path))
        command = [sys.executable, "-c", self.HOLDER, tmp_path]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "True\n"
            with pytest.raises(StorageError, match=f"{tmp_path}: .*another repository runs on it"):
                directory.claim("lock")
            holder.kill()
            holder.wait()
        descriptor = directory.claim("lock")
        assert descriptor is not None
        os.close(descriptor)

    def test_a_second_one_of_the_same_process_is_refused_too(self, tmp_path: Path) -> None:
        directory = open_directory(str(tmp_path))
        descriptor = directory.claim("lock")
        assert descriptor is not None
        with pytest.raises(StorageError, match="another repository"):
            directory.claim("lock")
        os.close(descriptor)
