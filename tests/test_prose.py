"""scripts/prose finds what its patterns describe, where it is, and nothing in code."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PATTERNS = tomllib.loads((ROOT / "scripts/prose.toml").read_text())["pattern"]
MODULE = '''"""Tell the shards.

>>> tell(whoever)
"""

from .inner import Public

__all__ = ["Public"]
'''
INNER = '''"""Who waits."""


class Base:
    """A base."""

    def inherited(self) -> None:
        """Hear of it."""


class Public(Base):
    """Return `what is` stored."""

    size: int
    """What is left."""

    def method(self, name: str) -> None:
        """Read it; None: nobody
        has it any more."""
        raise ValueError(f"{name}: the lease is over")

    def _private(self) -> None:
        """Let it go."""
'''
PAGE = """# Title
What is `anew` here
```python
tell(whoever)
```
is told
to nobody, and [anew](anew.md).
"""


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("prose", str(ROOT / "scripts/prose"))
    spec = importlib.util.spec_from_loader("prose", loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    sys.modules["prose"] = module  # its named tuples look up their annotations there
    loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for folder in ("store", "planner", "actors", "clusters", "docs/design"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "store/__init__.py").write_text(MODULE)
    (tmp_path / "store/inner.py").write_text(INNER)
    (tmp_path / "README.md").write_text(PAGE)
    (tmp_path / "docs/design/note.md").write_text("| a | b |\n|---|---|\n| " + "x" * 201 + " | anew |\n")
    return tmp_path


def found_in(prose: ModuleType, tree: Path) -> list[tuple[str, str, int, str]]:
    texts = [*prose.pages(tree), *prose.sources(tree)]
    return sorted(
        (match.text.group, match.text.path.name, match.line, match.pattern)
        for match in prose.matches(texts, prose.rules().patterns)
    )


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern["name"])
def test_a_pattern_matches_its_examples_and_not_the_better_words(prose: ModuleType, pattern: dict[str, str]) -> None:
    (one,) = [each for each in prose.rules().patterns if each.name == pattern["name"]]
    assert pattern["found"]
    assert pattern["fine"]
    assert [text for text in pattern["found"] if not one.regex.search(text)] == []
    assert [text for text in pattern["fine"] if one.regex.search(text)] == []


def test_it_finds_each_match_once_and_where_it_is(prose: ModuleType, tree: Path) -> None:
    assert found_in(prose, tree) == [
        ("messages", "inner.py", 20, "is over"),
        ("other docstrings", "inner.py", 1, "who-clause"),
        ("other docstrings", "inner.py", 23, "let go"),
        ("other pages", "note.md", 3, "anew"),
        ("public docstrings", "__init__.py", 1, "tell"),
        ("public docstrings", "inner.py", 8, "hear"),
        ("public docstrings", "inner.py", 15, "what-clause"),
        ("public docstrings", "inner.py", 18, "hidden result"),
        ("public docstrings", "inner.py", 18, "nobody"),
        ("public docstrings", "inner.py", 19, "any more"),
        ("public pages", "README.md", 2, "what-clause"),
        ("public pages", "README.md", 6, "tell"),
        ("public pages", "README.md", 7, "anew"),
        ("public pages", "README.md", 7, "nobody"),
    ]


def test_a_count_may_fall_and_not_rise(prose: ModuleType, tree: Path) -> None:
    held = prose.rules()
    counts = {"public pages": 4, "public docstrings": 6, "messages": 1, "other pages": 1, "other docstrings": 2}
    held = held._replace(counts=counts, exceptions=[])
    assert prose.report(tree, held) == []
    (more,) = prose.report(tree, held._replace(counts={**counts, "messages": 2}))
    assert more == "messages: 2 matches are allowed and 1 left: run scripts/prose --lower"
    wrong = prose.report(tree, held._replace(counts={**counts, "messages": 0}))
    assert wrong[0] == "messages: expected at most 0 matches; found 1"
    assert wrong[1].startswith("    store/inner.py:20: 'is over': ended")


def test_an_exception_covers_its_words_only_and_must_be_used(prose: ModuleType, tree: Path) -> None:
    held = prose.rules()
    exempt = prose.Exempt("store/inner.py", "the lease is over", "a test")
    found, used = prose.without_exceptions(
        prose.matches(prose.sources(tree), held.patterns), [exempt, exempt._replace(words="of life")], tree
    )
    assert len(found) == 8
    assert used == {exempt}


def test_a_long_cell_of_a_public_page_is_named(prose: ModuleType, tree: Path) -> None:
    assert list(prose.long_cells(prose.pages(tree), 200)) == []
    (tree / "docs/page.md").write_text((tree / "docs/design/note.md").read_text())
    assert list(prose.long_cells(prose.pages(tree), 200)) == [(tree / "docs/page.md", 3, 201)]


def test_it_lists_the_matches_of_a_file_and_fails() -> None:
    ran = subprocess.run(
        [sys.executable, "scripts/prose", "tests/test_prose.py", "CHANGELOG.md", "LICENSE"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, "\n")  # tests and history are not looked at
    ran = subprocess.run(
        [sys.executable, "scripts/prose", "docs/design/catalog.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert "docs/design/catalog.md:" in ran.stdout.splitlines()[0]
    assert ran.stdout.splitlines()[0].endswith("[other pages]")
