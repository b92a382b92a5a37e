"""What notebooks show: tables, in which no name is taken for HTML."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.actors.client.save.request import Saved
from tensorvine.actors.client.stats import RepositoryStats
from tensorvine.actors.rpc.catalog_messages import CatalogStats
from tensorvine.clusters import Lineage, Relative
from tensorvine.planner import Schedule
from tensorvine.store import Layer, ModelGraph, ModelRef
from tensorvine.store.html import MOST_ROWS, table
from tensorvine.store.shard import ShardStats

HOSTILE = "<script>alert(1)</script><img src=x onerror='alert(2)'>&\""


class Reading(HTMLParser):
    """Notes the tags and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not attrs
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


TAGS = {"table", "caption", "thead", "tbody", "tr", "th", "td", "p"}


@given(st.text(), st.lists(st.tuples(st.text(), st.text())))
def test_no_text_becomes_a_tag(title: str, rows: list[tuple[str, str]]) -> None:
    assert Reading(table(title, ("a", "b"), rows)).tags <= TAGS


def test_many_rows_are_cut_and_counted() -> None:
    text = table("t", ("n",), ([n] for n in range(MOST_ROWS + 50)), MOST_ROWS + 50)
    assert text.count("<tr>") == MOST_ROWS + 1
    assert "<p>50 more</p>" in text


def lineage() -> Lineage:
    nothing = {"created": None, "bytes_owned": None, "bytes_total": None}
    a, b = ModelRef("a", 1), ModelRef("b", 1)
    root = Relative(ref=a, parent=None, live=False, quality=None, layers=(HOSTILE,), tensors=2, **nothing)  # type: ignore[arg-type]
    own = Relative(ref=b, parent=a, live=True, quality=0.9, layers=("head",), tensors=1, **nothing)  # type: ignore[arg-type]
    return Lineage(b, (root, own), (), {}, 3)


CATALOG = CatalogStats(term=1, models=2, pins=0, bytes_metadata=0, capacity=1 << 30)
SHARD = ShardStats(shard=0, tensors=3, bytes_memory=5_000_000, bytes_allocated=0, bytes_disk=0, capacity=1 << 30)


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        (ModelGraph([Layer(HOSTILE, {"class": "Dense"}, (), ("w",))]), ["Dense", "w"]),
        (Schedule((60, 70, 80), 10, 512.0), ["3", "60", "80", "10", "512"]),
        (Schedule((), None, float("nan")), ["0", "-", "nan"]),
        (Saved(ModelRef("m", 3), 1_000, 2_000_000), ["Saved m@3", "1.0 kB", "2.0 MB"]),
        (RepositoryStats.of(CATALOG, [SHARD]), ["2 versions, 3 tensors, 5.0 MB in memory", "1.1 GB"]),
        (lineage(), ["Lineage of b@1, 3 tensors", "ancestor, retired", "itself", "a@1", "head"]),
    ],
    ids=["ModelGraph", "Schedule", "no checkpoints", "Saved", "RepositoryStats", "Lineage"],
)
def test_a_notebook_shows_what_matters_and_runs_nothing(value: object, texts: list[str]) -> None:
    shown: str = value._repr_html_()  # type: ignore[attr-defined]
    page = Reading(shown)
    assert page.tags <= TAGS
    assert set(texts) <= set(page.texts)
