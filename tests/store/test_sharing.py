"""Who may use the files of a repository: their owner, and the group of a folder that was shared beforehand."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tensorvine.store.archive import interchange
from tensorvine.store.archive.archive import LOCK_NAME, Archive
from tensorvine.store.archive.directory import Directory
from tensorvine.store.archive.opening import open_directory
from tensorvine.store.catalog.journal import FOLDER, Stream
from tensorvine.store.refs import ModelRef

from tests.support.crash import FIRST, manifest_of, write
from tests.support.other_user import as_other_user, needs_root

GROUP = 64321
"""One that nobody is in here."""


@pytest.fixture(params=[0o022, 0o000, 0o077])
def place(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder that all users can enter, with different umasks of this process."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        before = os.umask(request.param)
        try:
            yield Path(folder)
        finally:
            os.umask(before)


def repository(path: Path) -> set[Path]:
    """Write all kinds of files that a repository has, and return them and their folders."""
    archive = Archive(str(path))
    claim = archive.directory.claim(LOCK_NAME)
    write(archive, (0, 1), 0, [0, 1])
    archive.write_manifest(manifest_of(FIRST, {"a": ((0, 1), 0)}), {})
    archive.write_manifest(manifest_of(ModelRef("deep/er/m", 1), {"a": ((0, 1), 0)}), {})
    assert archive.directory.append(Stream(1, 1).name, b"a stream")
    if claim is not None:
        os.close(claim)
    again = Archive(str(path))
    assert again.directory.append(Stream(1, 1).name, b" goes on")
    assert again.directory.append(Stream(2, 1).name, b"the next")
    found = set(path.rglob("*"))
    names = {entry.relative_to(path).parts[0] for entry in found}
    assert names == {"repository.json", LOCK_NAME, "segments", "manifests", FOLDER}
    return found


def modes(paths: set[Path]) -> tuple[set[int], set[int]]:
    """Return the modes of the folders, and of the files."""
    folders = {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()}
    return folders, {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()}


def half_written(directory: Directory, name: str) -> list[int]:
    """Write a file and return the modes that it has before and after its content."""
    found: list[int] = []

    def fill(sink: object) -> None:
        found.append(stat.S_IMODE(os.fstat(sink._file.fileno()).st_mode))  # type: ignore[attr-defined]
        sink.write(b"content")  # type: ignore[attr-defined]

    directory.write(name, fill)
    return [*found, stat.S_IMODE(Path(directory.uri, name).stat().st_mode)]


class TestPrivate:
    @pytest.mark.parametrize("folder", ["new", "new/one/below", "there"])
    def test_files_and_folders_are_their_owners_alone(self, place: Path, folder: str) -> None:
        (place / "there").mkdir(mode=0o755)
        path = place / folder
        assert modes(repository(path)) == ({0o700}, {0o600})
        if folder != "there":
            assert modes({path, *path.parents} - {place, *place.parents}) == ({0o700}, set())

    def test_a_file_is_private_before_anything_is_in_it(self, place: Path) -> None:
        directory = open_directory(str(place))
        assert half_written(directory, "file") == [0o600, 0o600]

    @needs_root
    def test_another_user_neither_reads_nor_writes_them(self, place: Path) -> None:
        (place / "there").mkdir(mode=0o777)
        (place / "there").chmod(0o1777)  # so that only the files' own rights keep others off
        code = (
            "print({tried(lambda: (os.listdir if os.path.isdir(name) else open)(name)) for name in arguments},"
            " {tried(lambda: os.open(name + '/new' * os.path.isdir(name), os.O_WRONLY | os.O_CREAT))"
            " for name in arguments})"
        )
        assert as_other_user(code, *map(str, repository(place / "there"))) == "{'EACCES'} {'EACCES'}"

    def test_what_is_there_stays_as_it_is(self, place: Path) -> None:
        directory = open_directory(str(place))
        for name in ("folder/log", LOCK_NAME):
            assert directory.append(name, b"line")
            (place / name).chmod(0o640)
        (place / "folder").chmod(0o750)
        assert directory.append("folder/log", b"line")
        claim = directory.claim(LOCK_NAME)
        assert claim is not None
        os.close(claim)
        assert modes(set(place.rglob("*"))) == ({0o750}, {0o640})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder to any group")
class TestShared:
    @pytest.fixture
    def shared(self, place: Path) -> Path:
        folder = place / "shared"
        folder.mkdir()
        os.chown(folder, -1, GROUP)
        folder.chmod(0o2770)
        return folder

    @pytest.mark.parametrize(("given", "folders", "files"), [(0o2770, 0o2770, 0o660), (0o2755, 0o2750, 0o640)])
    def test_a_folder_that_was_shared_beforehand_shares_what_comes_into_it(
        self, shared: Path, given: int, folders: int, files: int
    ) -> None:
        shared.chmod(given)
        found = repository(shared)
        assert modes(found) == ({folders}, {files})
        assert {path.stat().st_gid for path in found} == {GROUP}
        assert half_written(open_directory(str(shared)), "manifests/file") == [files, files]

    def test_so_is_a_repository_in_a_new_folder_there(self, shared: Path) -> None:
        repository(shared / "one" / "repository")
        assert modes(set(shared.rglob("*"))) == ({0o2770}, {0o660})

    def test_its_group_reads_and_writes_and_others_do_not(self, shared: Path) -> None:
        repository(shared)
        code = (
            "name = arguments[0]; found = [tried(lambda: open(name + '/repository.json').read()),"
            " tried(lambda: os.close(os.open(name + '/lock', os.O_RDWR))),"
            " tried(lambda: pathlib.Path(name, 'segments', 'mine').touch())]; print(found)"
        )
        assert as_other_user(code, str(shared), groups=(GROUP,)) == "['{\"format\": 1}', None, None]"
        assert as_other_user(code, str(shared)) == "['EACCES', 'EACCES', 'EACCES']"

    def test_a_file_that_another_one_of_the_group_made_is_used_as_it_is(self, shared: Path) -> None:
        code = "os.umask(0); os.close(os.open(arguments[0] + '/lock', os.O_CREAT, 0o620))"
        as_other_user(code, str(shared), groups=(GROUP,))
        claim = open_directory(str(shared)).claim(LOCK_NAME)
        assert claim is not None
        os.close(claim)
        assert modes({shared / LOCK_NAME}) == (set(), {0o620})


def test_a_file_that_is_exported_has_the_rights_of_any_other(place: Path) -> None:
    interchange.write(place / "m.arrow", {"w": np.zeros(3)})
    (place / "other").touch()
    assert modes({place / "m.arrow"}) == modes({place / "other"})
