"""What the pages show is what their code prints, and what they point to is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHOWN = re.compile(r"```python\n(?P<code>(?:(?!```).)*)```\n+(?:It prints\n+)?```\n(?P<prints>.*?)```", re.DOTALL)
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#\s]*)(?:#(?P<part>[^)\s]+))?\)")
PAGES = sorted(page for folder in (ROOT, ROOT / "docs", ROOT / "docs/design") for page in folder.glob("*.md"))
EXAMPLES = {"README.md": 1, "docs/guide.md": 4, "docs/api.md": 2}
"""Pages, and how many examples each has at least."""
MARK = "----- next -----"
RUN = f"""
import sys
from tensorvine.clusters import LocalCluster
from tests.support.warm import warm_workers
with warm_workers(), LocalCluster(object_store_bytes=256 << 20, cpus=2):
    for block in sys.stdin.read().split({MARK!r}):
        exec(compile(block, "page", "exec"), {{"__name__": "__main__"}})
        print({MARK!r}, flush=True)
"""


def shown(page: str) -> list[tuple[str, str]]:
    """Return a page's examples, and what it says that they print."""
    return [(found["code"], found["prints"].strip()) for found in SHOWN.finditer((ROOT / page).read_text())]


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """Run all examples, one after the other in one process: code -> what it printed."""
    codes = [code for page in EXAMPLES for code, _ in shown(page)]
    ended = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=ROOT,
        input=MARK.join(codes),
        env={**os.environ, "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return dict(zip(codes, map(str.strip, ended.stdout.split(f"{MARK}\n")[:-1]), strict=True))


@pytest.mark.own_cluster
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("page", "least"), EXAMPLES.items())
def test_each_example_prints_what_the_page_says(page: str, least: int, printed: dict[str, str]) -> None:
    examples = shown(page)
    assert len(examples) >= least
    assert [printed[code] for code, _ in examples] == [prints for _, prints in examples]


@pytest.mark.own_cluster
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(2))
def test_an_example_on_dask_prints_what_its_page_says(tmp_path: Path, number: int) -> None:
    examples = shown("docs/dask.md")
    assert len(examples) == 2
    code, prints = examples[number]
    (tmp_path / "program.py").write_text(code)  # a file, as its workers import it
    ended = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=270, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.strip() == prints


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_each_python_block_is_python(page: Path) -> None:
    for code in PYTHON.findall(page.read_text()):
        compile(code, page.name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_each_link_leads_somewhere(page: Path) -> None:
    for link in LINK.finditer(page.read_text()):
        target = page.parent / link["path"] if link["path"] else page
        assert target.exists(), f"{page.name}: nothing at {link['path']}"
        if link["part"]:
            assert link["part"] in parts_of(target), f"{page.name}: {link['path']} has no part #{link['part']}"


def test_the_first_page_can_be_read_in_one_sitting() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def parts_of(page: Path) -> set[str]:
    """The anchors of a page's titles, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
