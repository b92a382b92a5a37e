"""The lineage report, its tree and its picture, of lineages that a stand-in for a repository answers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console
from tensorvine.clusters import Lineage, draw_lineage, lineage_of, lineage_tree
from tensorvine.clusters.lineage.lineage import MOST_DESCENDANTS, Gap
from tensorvine.clusters.lineage.picture import rows_of
from tensorvine.store import Layer, ModelGraph, ModelInfo, ModelRef
from tensorvine.store.errors import ModelNotFoundError, StorageError

CREATED = datetime(2026, 1, 2, tzinfo=UTC)


class Book:
    """Versions as one writes them down: name -> parent, and who wrote which of its tensors `LAYER/w`."""

    def __init__(self) -> None:
        self.parents: dict[ModelRef, ModelRef | None] = {}
        self.wrote: dict[ModelRef, dict[str, ModelRef]] = {}
        self.quality: dict[ModelRef, float | None] = {}
        self.retired: set[ModelRef] = set()
        self.forgotten: set[ModelRef] = set()
        """Retired versions whose home has died since."""

    def add(
        self, name: str, parent: str | None, *own: str, inherited: bool = True, quality: float | None = 0.5
    ) -> None:
        ref, above = ModelRef(name, 1), ModelRef(parent, 1) if parent else None
        self.parents[ref], self.quality[ref] = above, quality
        self.wrote[ref] = {**(self.wrote[above] if above and inherited else {}), **dict.fromkeys(own, ref)}

    def retire(self, *names: str) -> None:
        self.retired |= {ModelRef(name, 1) for name in names}

    def info(self, model: ModelRef | str) -> ModelInfo:
        ref = self._live(model)
        own = sum(writer == ref for writer in self.wrote[ref].values())
        total = len(self.wrote[ref])
        return ModelInfo(ref, self.parents[ref], self.quality[ref], {}, CREATED, 1000 * own, 1000 * total, None)

    def graph(self, model: ModelRef | str) -> ModelGraph:
        layers = sorted({tensor.split("/")[0] for tensor in self.wrote[self._live(model)]})
        return ModelGraph([Layer(layer, {"class": "Dense"}, (), (f"{layer}/w",)) for layer in layers])

    def owners(self, model: ModelRef | str) -> dict[str, ModelRef]:
        return {f"{layer}/w": writer for layer, writer in self.wrote[self._live(model)].items()}

    def lineage(self, model: ModelRef | str) -> list[ModelRef]:
        chain: list[ModelRef] = []
        ref: ModelRef | None = self._live(model)
        while ref is not None:
            chain.append(ref)
            ref = self.parents[ref]
        return chain

    def descendants(self, model: ModelRef | str) -> list[ModelRef]:
        ref = self._live(model)
        others = [other for other in self.parents if other not in self.retired and other != ref]
        return sorted(other for other in others if ref in self.lineage(other))

    def qualities(self, refs: Iterable[ModelRef]) -> dict[ModelRef, float]:
        known = {ref: self.quality[ref] for ref in refs if ref not in self.forgotten}
        return {ref: quality for ref, quality in known.items() if quality is not None}

    def _live(self, model: ModelRef | str) -> ModelRef:
        ref = model if isinstance(model, ModelRef) else ModelRef(model, 1)
        if ref not in self.parents or ref in self.retired:
            raise ModelNotFoundError(f"no {ref}")
        return ref


@pytest.fixture
def book() -> Book:
    """A search: a root, a line of candidates of which two wrote something, and what came of the last one."""
    book = Book()
    book.add("root", None, "a", "b", quality=0.4)
    book.add("one", "root", "c", quality=0.6)
    for name, parent in (("idle-1", "one"), ("idle-2", "idle-1"), ("idle-3", "idle-2")):
        book.add(name, parent)
    book.add("best", "idle-3", "d", "head", quality=0.9)
    book.add("child", "best", "head")
    book.add("grandchild", "child", "head", quality=0.95)
    book.add("other", "best", "x", inherited=False)
    book.retire("one", "idle-2", "child")
    return book


def text_of(lineage: Lineage) -> str:
    console = Console(width=160)
    with console.capture() as captured:
        console.print(lineage_tree(lineage))
    return captured.get()


class TestReport:
    def test_it_names_who_wrote_which_layers_root_first(self, book: Book) -> None:
        lineage = lineage_of(book, "best")
        assert [(str(one.ref), one.layers, one.tensors) for one in lineage.contributors] == [
            ("root@1", ("a", "b"), 2),
            ("one@1", ("c",), 1),
            ("best@1", ("d", "head"), 2),
        ]
        assert {layer: str(ref) for layer, ref in lineage.writers.items()} == {
            "a": "root@1",
            "b": "root@1",
            "c": "one@1",
            "d": "best@1",
            "head": "best@1",
        }

    def test_retired_ancestors_stay_named_with_their_quality(self, book: Book) -> None:
        book.forgotten.add(ModelRef("idle-2", 1))
        lineage = lineage_of(book, "best")
        assert [(str(one.ref), one.live, one.quality) for one in lineage.ancestors] == [
            ("root@1", True, 0.4),
            ("one@1", False, 0.6),
            ("idle-1@1", True, 0.5),
            ("idle-2@1", False, None),
            ("idle-3@1", True, 0.5),
            ("best@1", True, 0.9),
        ]
        assert "one@1  quality 0.6  wrote 1 of 5 tensors: c  retired" in text_of(lineage)

    def test_descendants_hang_together_through_retired_ones(self, book: Book) -> None:
        lineage = lineage_of(book, "best")
        found = {str(one.ref): (str(one.parent), one.live, one.tensors) for one in lineage.descendants}
        assert found == {
            "child@1": ("best@1", False, 0),
            "grandchild@1": ("child@1", True, 1),
            "other@1": ("best@1", True, 0),
        }

    def test_ancestors_that_wrote_nothing_are_told_as_one(self, book: Book) -> None:
        steps = lineage_of(book, "best").steps()
        assert [step.refs[0].name if isinstance(step, Gap) else step.ref.name for step in steps] == [
            "root",
            "one",
            "idle-1",
            "best",
        ]
        assert isinstance(steps[2], Gap)
        assert len(steps[2].refs) == 3

    def test_the_root_alone_is_a_lineage(self) -> None:
        book = Book()
        book.add("alone", None, "a")
        lineage = lineage_of(book, "alone")
        assert (len(lineage.ancestors), lineage.descendants, lineage.unfollowed) == (1, (), 0)
        assert "alone@1" in text_of(lineage)

    def test_a_version_without_a_graph_is_told_by_its_tensors(self) -> None:
        class Bare(Book):
            def graph(self, model: ModelRef | str) -> ModelGraph:
                return ModelGraph([])

        book = Bare()
        book.add("bare", None, "a", "b")
        assert lineage_of(book, "bare").model.layers == ("a/w", "b/w")

    def test_many_descendants_are_counted_not_followed(self) -> None:
        book = Book()
        book.add("root", None, "a")
        for place in range(MOST_DESCENDANTS + 5):
            book.add(f"child-{place}", "root")
        lineage = lineage_of(book, "root")
        assert (len(lineage.descendants), lineage.unfollowed) == (MOST_DESCENDANTS, 5)
        assert "and 5 more descendants" in text_of(lineage)

    def test_a_missing_version_is_an_error(self, book: Book) -> None:
        with pytest.raises(ModelNotFoundError):
            lineage_of(book, "one")

    def test_it_can_be_written_as_json(self, book: Book) -> None:
        told = lineage_of(book, "best").as_dict()
        assert told["model"] == "best@1"
        assert told["ancestors"][1] == {
            "ref": "one@1",
            "parent": "root@1",
            "live": False,
            "quality": 0.6,
            "created": None,
            "bytes_owned": None,
            "bytes_total": None,
            "layers": ["c"],
            "tensors": 1,
        }


class TestTree:
    def test_it_says_who_wrote_what_and_what_is_retired(self, book: Book) -> None:
        lines = text_of(lineage_of(book, "best")).splitlines()
        assert lines[0] == "root@1  quality 0.4  wrote 2 of 5 tensors: a, b"
        assert "one@1  quality 0.6  wrote 1 of 5 tensors: c  retired" in lines[1]
        assert "3 versions that wrote none of the tensors, idle-1@1 to idle-3@1" in lines[2]
        assert "best@1  quality 0.9  wrote 2 of 5 tensors: d, head" in lines[3]
        assert "other@1  quality 0.5" in lines[4]
        assert "child@1  quality 0.5  retired" in lines[5]
        assert "grandchild@1  quality 0.95  has 1 tensor of best@1" in lines[6]

    def test_brackets_in_names_are_no_markup(self) -> None:
        book = Book()
        book.add("m", None, "[red]layer[/red]")
        assert "[red]layer[/red]" in text_of(lineage_of(book, "m"))


class TestPicture:
    @pytest.fixture(autouse=True)
    def pictures(self) -> None:
        pytest.importorskip("matplotlib")
        pytest.importorskip("networkx")

    def test_rows_follow_the_line_and_branch_to_the_right(self, book: Book) -> None:
        rows = [
            ("gap" if isinstance(row.step, Gap) else row.step.ref.name, row.column, row.above)
            for row in rows_of(lineage_of(book, "best"))
        ]
        assert rows == [
            ("root", 0, None),
            ("one", 0, 0),
            ("gap", 0, 1),
            ("best", 0, 2),
            ("other", 1, 3),
            ("child", 1, 3),
            ("grandchild", 1, 5),
        ]

    def test_it_draws_every_version_and_layer(self, book: Book, tmp_path: Path) -> None:
        drawn = draw_lineage(lineage_of(book, "best"), tmp_path / "best.svg").read_text()
        for text in ("root@1", "one@1", "best@1", "grandchild@1", "retired", "0.95", "head", "has 1 tensor of best@1"):
            assert f"<!-- {text}" in drawn, text

    def test_it_is_the_same_each_time(self, book: Book, tmp_path: Path) -> None:
        first, second = (draw_lineage(lineage_of(book, "best"), tmp_path / f"{place}.svg") for place in range(2))
        assert first.read_bytes() == second.read_bytes()

    def test_a_short_lineage_is_drawn_on_a_small_canvas(self, book: Book, tmp_path: Path) -> None:
        short = Book()
        short.add("m", None, "a", quality=None)
        widths = [
            float(re.findall(r'<svg [^>]*width="([\d.]+)pt"', draw_lineage(lineage, tmp_path / "m.svg").read_text())[0])
            for lineage in (lineage_of(short, "m"), lineage_of(book, "best"))
        ]
        assert widths[0] < 0.8 * widths[1]

    def test_no_labels_overlap(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from matplotlib.figure import Figure

        book = Book()
        book.add("search/a-rather-long-name-of-a-root", None, *(f"a-layer-with-a-long-name-{n}" for n in range(30)))
        parent = "search/a-rather-long-name-of-a-root"
        for place in range(12):
            name = f"search/candidate-with-a-long-name-{place}"
            book.add(name, parent, f"a-layer-with-a-long-name-{place}", quality=0.5 + place / 100)
            parent = name
        for place in range(6):
            book.add(f"search/child-with-a-long-name-{place}", parent, quality=0.6 + place / 1000)
        book.retire("search/candidate-with-a-long-name-3")
        figures: list[Figure] = []
        save = Figure.savefig
        monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))[1])
        draw_lineage(lineage_of(book, parent), tmp_path / "long.png")
        figures[0].draw_without_rendering()
        boxes = [(text.get_text(), text.get_window_extent()) for text in figures[0].axes[0].texts if text.get_text()]
        page = figures[0].bbox
        for place, (text, box) in enumerate(boxes):
            assert page.x0 <= box.x0, text
            assert box.x1 <= page.x1, text
            for other, beside in boxes[place + 1 :]:
                assert not (box.x0 < beside.x1 and beside.x0 < box.x1 and box.y0 < beside.y1 and beside.y0 < box.y1), (
                    f"{text!r} lies over {other!r}"
                )

    def test_a_wrong_file_is_an_error(self, book: Book, tmp_path: Path) -> None:
        lineage = lineage_of(book, "best")
        with pytest.raises(StorageError, match=r"expected a name that ends in \.svg"):
            draw_lineage(lineage, tmp_path / "best.txt")
        with pytest.raises(StorageError, match="does not exist"):
            draw_lineage(lineage, tmp_path / "no" / "best.svg")
