"""`scripts/size`: which lines are code, which room a file belongs to, and what is above a ceiling."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
from pathlib import Path, PurePosixPath
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = '''"""A module's docstring.

# no comment
"""

from __future__ import annotations

import os  # not counted
from a import (
    b,
)

# a comment
LIMIT = 3
"""A docstring of an attribute."""
TEXT = """
# a line of a string

"""


def f(x: int) -> int:  # counted
    """A docstring."""
    return max(
        x,
        # a comment

        os.getpid() + len(f"""{b}
# a line of a string"""),
    )
'''
CODE = ["LIMIT", "TEXT", "#", "", '"""', "def", "return", "x,", "os.getpid", "#", ")"]
"""How each line of code of `SOURCE` begins."""


@pytest.fixture(scope="module")
def size() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("size", str(ROOT / "scripts/size"))
    spec = importlib.util.spec_from_loader("size", loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_lines_of_code_are_those_of_statements_without_imports_and_docstrings(size: ModuleType) -> None:
    assert size.lines_of_code(SOURCE) == len(CODE)
    assert size.lines_of_code("") == 0


def test_of_a_page_all_lines_count_but_comments_and_what_others_wrote(size: ModuleType) -> None:
    assert size.lines_of_page('// a comment\n"use strict";\n\n/* another\n * one */\nlet a = 1; // counted\n') == 2
    counted = ["clusters/web/app.py", "clusters/web/static/now.js", "clusters/web/static/page.css"]
    others = ["clusters/web/static/vendor/dagre.min.js", "tests/data/axe.min.js", "docs/conf.css"]
    assert [path for path in counted + others if size.is_source(PurePosixPath(path))] == counted


@pytest.mark.parametrize(
    ("path", "room"),
    [
        ("store/errors.py", "store"),
        ("store/codecs/delta.py", "store/codecs"),
        ("actors/shard/disk/care.py", "actors/shard"),
        ("tests/store/codecs/test_codec.py", "tests"),
        ("tests/conftest.py", "tests"),
    ],
)
def test_a_room_is_a_folder_of_the_library_with_those_in_it(size: ModuleType, path: str, room: str) -> None:
    assert size.room_of(PurePosixPath(path)) == room


def test_a_room_above_its_ceiling_is_named_with_the_number_of_lines(size: ModuleType) -> None:
    assert size.above({"store": 10, "tests": 4}, {"store": 10, "tests": 9}) == []
    (wrong,) = size.above({"store": 13}, {"store": 10})
    assert wrong.startswith("store: expected at most 10 lines of code; found 13 (3 more): ")
    assert size.above({"store/new": 1}, {}) == ["store/new: expected a ceiling in size.toml; found none"]
    assert size.above({}, {"gone": 1}) == ["gone: size.toml has a ceiling for a room without files"]


def test_ceilings_are_lowered_and_not_raised(size: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "size.toml"
    path.write_text('# why\n[ceilings]\n"store" = 10\n"tests" = 9\n"gone" = 1\n')
    size.lower({"store": 13, "tests": 4}, path)
    assert path.read_text() == '# why\n[ceilings]\n"store" = 10\n"tests" = 4\n'


def test_it_compares_with_a_commit(size: ModuleType, tmp_path: Path) -> None:
    def git(*words: str) -> None:
        person = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        subprocess.run(
            ["/usr/bin/env", "git", "-C", str(tmp_path), *person, *words], check=True, capture_output=True, timeout=60
        )

    (tmp_path / "store").mkdir()
    (tmp_path / "store/a.py").write_text("A = 1\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    (tmp_path / "store/a.py").write_text("# more\nA = 1\nB = 2\n")
    assert size.is_commit("HEAD", tmp_path)
    assert not size.is_commit("origin", tmp_path)
    *_, total = size.table(*size.counted(size.here(tmp_path)), size.counted(size.at("HEAD", tmp_path)))
    assert total.split() == ["all", "2", "3", "+1", "+2"]
