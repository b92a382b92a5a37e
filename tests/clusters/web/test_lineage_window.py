"""The window of the graph of versions: how many nodes it has, what is folded, and that nothing is lost."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.clusters.web.lineage import ALIKE, BRANCHES, MOST, Forest, Node, window
from tensorvine.store import ModelInfo, ModelRef

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def info(ref: ModelRef, parent: ModelRef | None, number: int, quality: float | None = None) -> ModelInfo:
    return ModelInfo(
        ref=ref,
        parent=parent,
        quality=quality,
        metadata={},
        created=BEGAN + timedelta(seconds=number),
        bytes_owned=1,
        bytes_total=10,
        codec=None,
    )


def forest(parents: dict[str, str | None]) -> Forest:
    refs = [(ModelRef.parse(ref), ModelRef.parse(parent) if parent else None) for ref, parent in parents.items()]
    return Forest.of({ref: info(ref, parent, number, number / 10) for number, (ref, parent) in enumerate(refs)})


def kinds(nodes: list[Node]) -> list[tuple[str, str, int]]:
    return [(node.kind, node.first, node.count) for node in nodes]


@st.composite
def parents(draw: st.DrawFn) -> dict[str, str | None]:
    """Up to 60 versions; parents may be retired, which no one else is."""
    found: dict[str, str | None] = {}
    for number in range(draw(st.integers(1, 60))):
        name = draw(st.sampled_from(["a/x", "b", "cand-"])) + str(number)
        over = draw(st.sampled_from([None, *found, "gone@1"]))
        found[f"{name}@1"] = over
    return found


@given(parents(), st.integers(2, 40))
def test_a_window_is_a_tree_of_few_nodes_and_counts_each_version_at_most_once(
    known: dict[str, str | None], most: int
) -> None:
    nodes = window(forest(known), most=most)
    seen: set[str] = set()
    for node in nodes:
        assert node.parent is None or node.parent in seen
        assert node.id not in seen
        seen.add(node.id)
    versions = [node for node in nodes if node.kind == "version"]
    assert len(nodes) <= max(most, 3)
    assert sum(node.count for node in nodes if node.kind in ("version", "fold")) <= len(known) + 1
    assert all(known[node.id] in (None, node.parent) or node.parent for node in versions)


@given(parents())
def test_a_large_window_with_open_folds_shows_every_version(known: dict[str, str | None]) -> None:
    grown, opened = forest(known), set[str]()
    for _ in range(len(known) + 1):
        nodes = window(grown, opened=opened, most=10_000)
        folds = {node.id for node in nodes if node.kind == "fold"}
        if not folds:
            break
        opened |= folds
    assert {node.id for node in nodes if node.kind == "version"} == set(known)
    assert {node.id for node in nodes if node.kind == "retired"} == {p for p in known.values() if p == "gone@1"}


def test_five_like_children_are_one_node_and_four_are_four() -> None:
    five = forest({"root@1": None, **{f"nas/c-{n}@1": "root@1" for n in range(ALIKE)}})
    assert kinds(window(five)) == [("version", "root@1", 1), ("fold", "nas/c-0@1", ALIKE)]
    four = forest({"root@1": None, **{f"nas/c-{n}@1": "root@1" for n in range(ALIKE - 1)}})
    assert [kind for kind, _, _ in kinds(window(four))] == ["version"] * ALIKE


def test_children_with_other_names_are_not_like_them() -> None:
    mixed = {f"{name}-{n}@1": "root@1" for name in ("a", "b") for n in range(3)}
    assert all(node.kind == "version" for node in window(forest({"root@1": None, **mixed})))


def test_a_row_of_versions_of_one_name_is_one_node_between_its_ends() -> None:
    row = forest({"m@1": None, **{f"m@{n}": f"m@{n - 1}" for n in range(2, 21)}, "other@1": "m@20"})
    nodes = window(row)
    assert kinds(nodes) == [
        ("version", "m@1", 1),
        ("fold", "m@2", 18),
        ("version", "m@20", 1),
        ("version", "other@1", 1),
    ]
    assert [node.parent for node in nodes] == [None, "m@1", "row:m@19", "m@20"]
    assert len(window(row, opened={"row:m@19"})) == 21


def test_of_many_families_the_largest_are_shown() -> None:
    families = {f"f-{n}@1": "root@1" for n in range(20)}
    members = {f"f-{n}-{k}-x@1": f"f-{n}@1" for n in range(20) for k in range(n // 5 + 1)}
    nodes = window(forest({"root@1": None, **families, **members}))
    below = [node for node in nodes if node.parent == "root@1"]
    (fold,) = [node for node in below if node.kind == "fold"]
    assert (len(below), fold.count) == (BRANCHES + 1, 20 - BRANCHES)
    assert {node.id for node in below if node.children == 4} == {f"f-{n}@1" for n in range(15, 20)}
    folded = [*range(10), 13, 14]
    assert fold.quality == pytest.approx((max(folded) + 1) / 10)
    assert fold.children == sum(n // 5 + 1 for n in folded)


def test_a_window_of_ten_thousand_is_small() -> None:
    wide = forest({"root@1": None, **{f"name{chr(97 + n % 26)}{n}@1": "root@1" for n in range(10_000)}})
    assert len(window(wide)) <= 28
    deep = forest({"m@1": None} | {f"m@{n}": f"m@{n - 1}" for n in range(2, 10_001)})
    assert [node.count for node in window(deep)] == [1, 9_998, 1]
    letters = "abcdefghij"
    names = [a + b + c + d for a in letters for b in letters for c in letters for d in letters]
    many = window(forest({"root@1": None, **{f"{name}@1": "root@1" for name in names}}))
    assert len(many) == MOST
    assert (many[-1].kind, many[-1].count) == ("more", 10_000 - MOST + 2)


def test_the_focus_is_shown_with_its_line() -> None:
    line = [ModelRef("m", n) for n in range(50, 0, -1)]
    grown = forest({f"m@{n}": f"m@{n - 1}" for n in range(11, 51)})
    nodes = window(grown, line[0], line)
    assert (nodes[0].kind, nodes[0].count) == ("more", 19)
    assert (nodes[1].id, nodes[-1].id) == ("m@20", "m@50")
    retired = window(grown, ModelRef("m", 12), [ModelRef("m", 12), ModelRef("m", 11), ModelRef("m", 10)])
    assert [node.kind for node in retired[:3]] == ["retired", "version", "version"]


def test_the_best_quality_of_a_fold_is_a_number_if_there_is_one() -> None:
    infos = {ModelRef("root", 1): info(ModelRef("root", 1), None, 0)}
    for n, quality in enumerate([None, float("nan"), 0.5, 0.25, None]):
        infos[ModelRef(f"c{n}", 1)] = info(ModelRef(f"c{n}", 1), ModelRef("root", 1), n, quality)
    (fold,) = [node for node in window(Forest.of(infos)) if node.kind == "fold"]
    assert fold.quality == 0.5
