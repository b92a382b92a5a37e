"""Logs of version numbers of earlier versions: what is read from them, whatever became of their writers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorvine.store.archive import numbers
from tensorvine.store.archive.directory import Directory
from tensorvine.store.archive.numbers import decoded
from tensorvine.store.archive.opening import open_directory
from tensorvine.store.refs import ModelRef

from tests.support.number_logs import encoded

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
    def test_all_logs_are_read(self, directory: Directory) -> None:
        assert numbers.given(directory) == set()
        for writer, refs in (("0-x", [A, B]), ("1-y", [C])):
            for ref in refs:
                assert directory.append(f"{numbers.FOLDER}/{writer}.0.log", encoded([ref]))
        assert numbers.given(directory) == {A, B, C}

    def test_a_damaged_line_is_counted(
        self, directory: Directory, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / numbers.FOLDER).mkdir()
        (tmp_path / numbers.FOLDER / "0-x.0.log").write_bytes(encoded([A]) + b"\n1234" + encoded([B]))
        assert numbers.given(directory) == {A, B}
        assert "1 damaged lines are ignored" in caplog.text
