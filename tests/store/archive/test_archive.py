"""A repository's files after a crash or an error at each system call of a short history, and on wrong paths."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.catalog.finding import Manifests
from tensorvine.store.archive.archive import Archive
from tensorvine.store.archive.encoding import decode_slot
from tensorvine.store.archive.numbers import given
from tensorvine.store.archive.segmentfile import SegmentFile
from tensorvine.store.arrays import dtype_name
from tensorvine.store.catalog.state import CatalogState
from tensorvine.store.errors import CorruptDataError, ModelNotFoundError, StorageError
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.segment import SegmentId

from tests.support import crash
from tests.support.crash import ARRAYS, FIRST, KILL, SECOND, TABLES, THIRD
from tests.support.s3 import S3Server

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES)


def run_history(top: Path, *events: int) -> list[Any]:
    command = [sys.executable, crash.__file__, str(top), *map(str, events)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200)
    return [json.loads(line) for line in done.stdout.splitlines()]


def started(folder: str) -> tuple[Archive, CatalogState]:
    """Start on a path as a repository does, without a journal; what nothing refers to is deleted."""
    archive = Archive(folder)
    archive.sweep()
    state = CatalogState("start", on_path=True)
    Manifests(archive, state).read([0])
    state.check()
    for segment, known in state.references.items():
        assert known.missing() == [], segment
    used = {known.file.file(segment).name for segment, known in state.references.items() if known.file is not None}
    files = [file.name for files in archive.segments().values() for file in files]
    archive.delete_segments([name for name in files if name not in used])
    return archive, state


def check_versions(archive: Archive, state: CatalogState) -> None:
    """Read every live version back, and find no file that nobody needs."""

    def open_segment(segment: SegmentId) -> SegmentFile:
        found = state.references.get(segment)
        assert found is not None
        (file,) = archive.segments()[segment]
        assert found.file is not None
        assert found.file.file(segment).name == file.name
        return archive.open_segment(file)

    for ref in state.models():
        entries = archive.read_manifest(ref).entries
        assert {name: (entry.segment, entry.slot) for name, entry in entries.items()} == TABLES[ref]
        for name, place in TABLES[ref].items():
            array = decode_slot(place, ARRAYS[place].nbytes, open_segment)
            assert np.array_equal(array, ARRAYS[place])
            assert (dtype_name(array.dtype), array.shape) == (entries[name].dtype, entries[name].shape)
    needed = {place[0] for ref in state.models() for place in TABLES[ref].values()}
    needed |= {
        crash.BASES[place][0] for ref in state.models() for place in TABLES[ref].values() if place in crash.BASES
    }
    files = set(archive.directory.list("")) - {"repository.json"}
    assert {name for name in files if not name.startswith("segments/")} == set(archive.manifests())
    assert set(archive.segments()) == needed
    assert len([name for name in files if name.startswith("segments/")]) == len(needed)


def check_said(state: CatalogState, said: set[str]) -> None:
    """Hold what lives against what the history said before it ended."""
    for ref in (FIRST, SECOND):
        lives = ref in state.models()
        if f"saved {ref}" in said and f"retiring {ref}" not in said:
            assert lives
        if f"saving {ref}" not in said or f"retired {ref}" in said:
            assert not lives
        if f"retired {ref}" in said:
            with pytest.raises(ModelNotFoundError, match="was retired"):
                state.resolve(ref.name, ref.version)


def check_goes_on(folder: str) -> None:
    """Save another version, and find it after another start."""
    archive, _ = started(folder)
    crash.write(archive, (0, 4), 0, [0])
    archive.write_manifest(crash.manifest_of(THIRD, TABLES[THIRD]), {})
    archive, state = started(folder)
    assert THIRD in state.models()
    check_versions(archive, state)


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """A folder where syncing costs nothing: the calls are the same."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


class TestFaults:
    def test_a_process_killed_at_any_system_call_loses_nothing_that_was_saved(self, fast_path: Path) -> None:
        runs = run_history(fast_path, KILL)
        assert len(runs) > 60
        outcomes: set[frozenset[ModelRef]] = set()
        for number, (_, calls, said) in enumerate(runs):
            assert (calls == 0) == (number < len(runs) - 1)
            folder = str(fast_path / str(number))
            archive, state = started(folder)
            check_said(state, set(said))
            check_versions(archive, state)
            check_goes_on(folder)
            outcomes.add(frozenset(state.models()))
        assert outcomes == {frozenset(), frozenset({FIRST}), frozenset({FIRST, SECOND}), frozenset({SECOND})}

    def test_an_error_at_any_system_call_names_the_file_and_the_same_works_afterwards(self, fast_path: Path) -> None:
        runs = run_history(fast_path, *ERRORS)
        assert len(runs) > 60
        for number, (_, calls, said) in enumerate(runs):
            assert calls
            folder = str(fast_path / str(number))
            refused = [text for text in said if text.startswith("refused")]
            assert len(refused) == (number < len(runs) - 1)
            assert all(folder in text for text in refused)
            assert not list(Path(folder).rglob("*.tmp"))
            archive, state = started(folder)
            assert state.models() == [SECOND]
            check_said(state, set(said))
            check_versions(archive, state)
        check_goes_on(folder)


class TestPaths:
    def test_what_it_lists_is_what_was_written(self, any_uri: str) -> None:
        archive = Archive(any_uri)
        assert (archive.manifests(), archive.segments()) == ([], {})
        for serial, generation in ((1, 0), (1, 2), (1, 10), (255, 0)):
            archive.write_segment((0, serial), generation, [], [])
        archive.write_manifest(crash.manifest_of(THIRD, TABLES[THIRD]), {})
        found = archive.segments()
        assert {segment: [file.generation for file in files] for segment, files in found.items()} == {
            (0, 1): [10, 2, 0],
            (0, 255): [0],
        }
        assert found[0, 255][0].name == "segments/ff.0.arrow"
        assert archive.manifests() == ["manifests/m@2.arrow"]
        assert Archive(any_uri, create=False).segments() == found
        archive.delete_segments([file.name for files in found.values() for file in files])
        assert archive.segments() == {}

    def test_a_history_is_found_again(self, any_uri: str) -> None:
        crash.history(any_uri, lambda text: None)
        archive, state = started(any_uri)
        assert state.models() == [SECOND]
        check_versions(archive, state)
        check_goes_on(any_uri)

    @pytest.mark.parametrize("name", ["a", "a.b/c-d_e", "a//b", "./a", "a/./b", "a/", "a//", ".", "a.tmp", ".tmp/.tmp"])
    def test_every_legal_name_has_a_file_of_its_own(self, any_uri: str, name: str) -> None:
        archive = Archive(any_uri)
        for ref in (ModelRef(name, 1), ModelRef(name, 12), ModelRef("other", 1)):
            archive.write_manifest(crash.manifest_of(ref, {}), {})
            assert archive.read_manifest(ref).header.ref == ref
        assert archive.sweep() == []
        found = {archive.read_manifest(file).header.ref for file in archive.manifests()}
        assert found == {ModelRef(name, 1), ModelRef(name, 12), ModelRef("other", 1)}

    def test_a_folder_with_other_files_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").touch()
        with pytest.raises(StorageError, match=r"expected an empty directory or a repository; found \['thesis.tex'\]"):
            Archive(str(tmp_path))
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    def test_nothing_is_made_unless_asked_for(self, tmp_path: Path) -> None:
        for folder in (tmp_path, tmp_path / "none"):
            with pytest.raises(StorageError, match=f"{folder}: expected"):
                Archive(str(folder), create=False)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("mark", [b"", b"{", b"[]", b"3", b"{}", b'{"format": 2}', b"\xff", b"[" * 100_000])
    def test_another_format_is_refused_by_name(self, tmp_path: Path, mark: bytes) -> None:
        (tmp_path / "repository.json").write_bytes(mark)
        with pytest.raises(CorruptDataError, match=r"repository.json: expected (format|JSON|a JSON object)"):
            Archive(str(tmp_path))
        assert (tmp_path / "repository.json").read_bytes() == mark

    def test_a_start_that_was_killed_before_its_first_file_is_no_obstacle(self, tmp_path: Path) -> None:
        for name in (".0123456789abcdef.tmp", "lock"):
            (tmp_path / name).touch()
        archive = Archive(str(tmp_path))
        archive.sweep()
        assert sorted(archive.directory.list("")) == ["lock", "repository.json"]

    def test_a_file_under_another_files_name_is_found_out(self, tmp_path: Path) -> None:
        archive = Archive(str(tmp_path))
        for ref in (ModelRef("a", 1), ModelRef("b", 1)):
            archive.write_manifest(crash.manifest_of(ref, {}), {})
        (tmp_path / "manifests/a@1.arrow").rename(tmp_path / "manifests/b@1.arrow")
        with pytest.raises(CorruptDataError, match=r"manifests/b@1.arrow: expected .* found that of a@1"):
            archive.read_manifest(ModelRef("b", 1))
        with pytest.raises(StorageError, match=r"manifests/a@1.arrow: expected to read it; No such file"):
            archive.read_manifest(ModelRef("a", 1))
        first, second = (crash.write(archive, (0, serial), 0, [0]) for serial in (1, 4))
        (tmp_path / first.name).rename(tmp_path / second.name)
        with pytest.raises(CorruptDataError, match=r"segments/4.0.arrow: expected segment 4; found 1"):
            archive.open_segment(second)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as started:
        yield started


@pytest.fixture(params=["local", "s3"])
def any_uri(request: pytest.FixtureRequest, tmp_path: Path, server: S3Server) -> str:
    return str(tmp_path) if request.param == "local" else server.uri(f"{tmp_path.name}/repository")


def test_names_of_files_that_others_chose_are_written_escaped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    archive = Archive(str(tmp_path))
    name = "a\nERROR forged\x1b[2J\udcff.arrow"
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests" / name).write_bytes(b"no manifest")
    (tmp_path / "numbers").mkdir()
    (tmp_path / "numbers" / "\x1b[2J\n.log").write_bytes(b"damaged\n")
    (tmp_path / "numbers" / "\x1b[2J\r.log").symlink_to("nowhere")
    (listed,) = archive.manifests()
    given(archive.directory)
    with pytest.raises(CorruptDataError) as damaged:
        archive.read_manifest(listed)
    (tmp_path / listed).unlink()
    with pytest.raises(StorageError) as missing:
        archive.read_manifest(listed)
    (tmp_path / listed).symlink_to("nowhere")
    with pytest.raises(CorruptDataError) as link:
        archive.read_manifest(listed)
    assert len(caplog.messages) == 2
    for text in (*map(str, (damaged.value, missing.value, link.value)), *caplog.messages):
        assert text.isprintable(), text
    assert "a\\nERROR forged\\x1b[2J\\udcff.arrow" in str(link.value)
