"""The logs of numbers that versions were given: what is read back from them, whatever became of their writers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorvine.store.archive import numbers
from tensorvine.store.archive.directory import Directory
from tensorvine.store.archive.numbers import Numbers, decoded, encoded, gather
from tensorvine.store.archive.opening import open_directory
from tensorvine.store.errors import StorageError
from tensorvine.store.refs import ModelRef

refs = st.builds(
    ModelRef,
    st.from_regex(r"[A-Za-z0-9._-]{1,9}(/[a-z]{1,3})?", fullmatch=True).filter(lambda n: ".." not in n.split("/")),
    st.integers(1, 10**18 - 1),
)
A, B, C = ModelRef("a", 1), ModelRef("a", 2), ModelRef("b/c", 7)


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return open_directory(str(tmp_path))


class TestLines:
    @settings(deadline=None)
    @given(st.lists(refs, max_size=6), st.data())
    def test_a_torn_end_costs_its_own_line_only(self, given_refs: list[ModelRef], data: st.DataObject) -> None:
        whole = encoded(given_refs)
        cut = data.draw(st.integers(0, len(whole)))
        more = data.draw(st.lists(refs, max_size=3))
        found, damaged = decoded(whole[:cut] + encoded(more))
        kept = len(found) - len(more)
        assert found == given_refs[:kept] + more
        assert len(encoded(given_refs[:kept])) <= cut
        assert damaged <= 1
        assert kept == len(given_refs) or len(encoded(given_refs[: kept + 1])) > cut

    @settings(deadline=None)
    @given(st.lists(refs, min_size=1, max_size=6), st.data())
    def test_a_byte_that_changed_makes_no_other_version(self, given_refs: list[ModelRef], data: st.DataObject) -> None:
        content = bytearray(encoded(given_refs))
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        found, _ = decoded(bytes(content))
        assert set(found) <= set(given_refs)
        assert len(found) >= len(given_refs) - 2  # a line feed that changed joins two lines


class TestLogs:
    def test_what_has_no_manifest_is_left_in_one_log(self, directory: Directory) -> None:
        first, second = Numbers(directory, "0-x"), Numbers(directory, "1-y")
        for log, ref in ((first, A), (first, B), (second, C)):
            assert log.add(ref)
        for known, left in (([A, None], {B, C}), ([], {B, C}), ([B], {C}), ([C], set[ModelRef]())):
            gather(directory, lambda known=known: known)
            assert numbers.given(directory) == left
            assert len(directory.list(numbers.FOLDER)) == (1 if left else 0)

    def test_one_that_has_grown_is_written_anew(self, directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(numbers, "GROWN_BYTES", 300)
        log, left = Numbers(directory, "0-x"), set[ModelRef]()
        for version in range(1, 200):
            ref = ModelRef("m", version)
            log.add(ref)
            left.add(ref)
            assert left <= numbers.given(directory)
            if version % 50:
                log.done(ref)
                left.discard(ref)
        (nbytes,) = directory.list(numbers.FOLDER).values()
        assert nbytes < 400

    def test_a_start_that_is_killed_while_it_gathers_loses_nothing(
        self, directory: Directory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Numbers(directory, "0-x").add(A)

        def fails(*names: str) -> None:
            raise StorageError("killed")

        with monkeypatch.context() as patch:
            patch.setattr(directory, "delete", fails)
            with pytest.raises(StorageError):
                gather(directory, list)
        assert len(directory.list(numbers.FOLDER)) == 2
        gather(directory, list)
        assert numbers.given(directory) == {A}
        assert len(directory.list(numbers.FOLDER)) == 1

    def test_a_damaged_line_is_counted(
        self, directory: Directory, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        log = Numbers(directory, "0-x")
        log.add(A)
        (file,) = (tmp_path / numbers.FOLDER).iterdir()
        with open(file, "ab") as torn:
            torn.write(b"\n1234")
        log.add(B)
        assert numbers.given(directory) == {A, B}
        assert "1 damaged lines are ignored" in caplog.text
