"""What the pages show is what their code prints, and what they point to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHOWN = re.compile(r"```python\n(?P<code>(?:(?!```).)*)```\n+(?:It prints\n+)?```\n(?P<prints>.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#\s]*)(?:#(?P<part>[^)\s]+))?\)")
PAGES = sorted(page for folder in (ROOT, ROOT / "docs", ROOT / "docs/design") for page in folder.glob("*.md"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("page", "least"), [("README.md", 1), ("docs/guide.md", 4), ("docs/api.md", 2)])
def test_each_example_prints_what_the_page_says(
    cluster: object, capsys: pytest.CaptureFixture[str], page: str, least: int
) -> None:
    shown = [(found["code"], found["prints"]) for found in SHOWN.finditer((ROOT / page).read_text())]
    assert len(shown) >= least
    for code, prints in shown:
        capsys.readouterr()
        program = compile(code, page, "exec")
        exec(program, {"__name__": "__main__"})  # noqa: S102 - the pages are ours; what `__main__` defines is pickled whole
        assert capsys.readouterr().out.strip() == prints.strip()


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
