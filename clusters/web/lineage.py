"""A window of the graph of versions: some hundred nodes around one of them, with like ones folded.

Rules
- Pure: versions in, nodes out. A window never has more than `MOST` nodes, however many versions there are.
- Five or more children of one version that have no children and whose names differ in digits only become one fold.
- Of the children with children, those with the largest families are shown; five or more others become one fold.
- Five or more versions in a row with one child each, and names that differ in digits only, become one fold.
- Where the window is full, a node of kind "more" counts the other children; those of later nodes are counted only.
- Retired parents are nodes, too. Their own ancestors are known only for the version in focus.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...store.refs import ModelRef
from ...store.versions.manifest import ModelInfo

ALIKE = 5
"""So many like versions become one node."""
MOST = 120
"""Nodes of a window."""
BRANCHES = 8
"""Children with children that are shown."""
ANCESTORS = 30
"""Ancestors of the focus that a window shows."""
ROOT = "roots"
"""Parent of the versions without a parent."""
_DIGITS = re.compile(r"[0-9]+")


@dataclass(slots=True)
class Node:
    """One node of a window."""

    id: str
    kind: str
    """"version", "retired", "fold" or "more"."""
    parent: str | None
    """Id of the node from which an edge leads here."""
    first: str = ""
    """The version, or the first one of a fold, by name."""
    last: str = ""
    """The last one of a fold."""
    count: int = 1
    """Number of versions in the node."""
    children: int = 0
    """Number of live children of the version, or of all descendants of a fold."""
    quality: float | None = None
    """The highest one."""
    created: str | None = None
    """The latest one, in UTC."""
    bytes_owned: int = 0
    bytes_total: int = 0


@dataclass(slots=True)
class Forest:
    """All live versions by their parents."""

    infos: Mapping[ModelRef, ModelInfo]
    children: dict[ModelRef | None, list[ModelRef]] = field(default_factory=dict[ModelRef | None, list[ModelRef]])
    families: dict[ModelRef, int] = field(default_factory=dict[ModelRef, int])
    """Version -> number of live descendants."""

    @classmethod
    def of(cls, infos: Mapping[ModelRef, ModelInfo]) -> Forest:
        """Sort versions by their parents; a retired parent is a key, too, and below None."""
        made = cls(infos)
        for ref in sorted(infos):
            parent = infos[ref].parent
            if parent is not None and parent not in infos and parent not in made.children:
                made.children.setdefault(None, []).append(parent)
            made.children.setdefault(parent, []).append(ref)
        made.families.update(_families(made.children))
        return made

    def below(self, ref: ModelRef | None) -> list[ModelRef]:
        """Return the children of a version; of None, the roots."""
        return self.children.get(ref, [])


def window(
    forest: Forest,
    focus: ModelRef | None = None,
    line: Sequence[ModelRef] = (),
    opened: Collection[str] = (),
    most: int = MOST,
) -> list[Node]:
    """Return the nodes around a version, parents first.

    Args:
        forest: all versions.
        focus: the version. None shows the roots.
        line: the version and its ancestors, root last, retired ones included.
        opened: ids of folds that are shown in full, as far as they fit.
        most: nodes.
    """
    nodes: dict[str, Node] = {}
    above: str | None = None
    shown = list(reversed(line[: ANCESTORS + 1])) or ([focus] if focus is not None else [])
    if len(line) > len(shown):
        above = "older"
        nodes[above] = Node(above, "more", None, str(line[-1]), str(line[len(shown)]), len(line) - len(shown))
    for ref in shown:
        above = _add(nodes, forest, ref, above)
    _grow(nodes, forest, focus, opened, most)
    return list(nodes.values())


def _grow(nodes: dict[str, Node], forest: Forest, focus: ModelRef | None, opened: Collection[str], most: int) -> None:
    """Add the descendants of the focus, nearest first, until the window is full."""
    queue = deque([(focus, str(focus) if focus is not None else None)])
    while queue and len(nodes) < most:
        ref, place = queue.popleft()
        ref, place = _past_chain(nodes, forest, ref, place, opened)
        groups = list(_grouped(forest, ref, opened))
        for number, group in enumerate(groups):
            if len(nodes) >= most - 1:
                left = [one for rest in groups[number:] for one in rest]
                key = f"more:{ref or ROOT}"
                nodes[key] = Node(key, "more", place, str(left[0]), str(left[-1]), len(left))
                break
            if len(group) > 1:
                branches = bool(forest.below(group[0]))
                key = f"branches:{ref or ROOT}" if branches else f"alike:{ref or ROOT}:{stem(group[0])}"
                _fold(nodes, forest, key, group, place)
            else:
                queue.append((group[0], _add(nodes, forest, group[0], place)))


def _past_chain(
    nodes: dict[str, Node], forest: Forest, ref: ModelRef | None, place: str | None, opened: Collection[str]
) -> tuple[ModelRef | None, str | None]:
    """Fold a row of versions with one child each that begins below `ref`; return where it ends."""
    if ref is None:
        return ref, place
    row: list[ModelRef] = []
    at = ref
    while len(below := forest.below(at)) == 1 and stem(below[0]) == stem(ref):
        at = below[0]
        row.append(at)
    row = row[:-1]  # its end is shown
    key = f"row:{row[-1]}" if row else ""  # its end stays the same while it is unfolded
    if len(row) < ALIKE or key in opened:
        return ref, place
    _fold(nodes, forest, key, row, place)
    return row[-1], key


def _grouped(forest: Forest, ref: ModelRef | None, opened: Collection[str]) -> Iterator[list[ModelRef]]:
    """Yield the children of a version: those with children, then folds, then the others."""
    leaves: dict[str, list[ModelRef]] = {}
    branches: list[ModelRef] = []
    for child in forest.below(ref):
        if forest.below(child) or child not in forest.infos:
            branches.append(child)
        else:
            leaves.setdefault(stem(child), []).append(child)
    branches.sort(key=lambda child: -forest.families.get(child, 0))
    few = len(branches) < BRANCHES + ALIKE or f"branches:{ref or ROOT}" in opened
    shown = len(branches) if few else BRANCHES
    yield from ([child] for child in branches[:shown])
    if branches[shown:]:
        yield branches[shown:]
    for name, group in sorted(leaves.items(), key=lambda one: -len(one[1])):
        if len(group) >= ALIKE and f"alike:{ref or ROOT}:{name}" not in opened:
            yield group
        else:
            yield from ([one] for one in group)


def _families(children: Mapping[ModelRef | None, Sequence[ModelRef]]) -> dict[ModelRef, int]:
    """Count the descendants of each version, from the leaves up."""
    order: list[ModelRef] = list(children.get(None, ()))
    for ref in order:  # grows while it is read
        order.extend(children.get(ref, ()))
    counts: dict[ModelRef, int] = {}
    for ref in reversed(order):
        counts[ref] = sum(1 + counts[child] for child in children.get(ref, ()))
    return counts


def stem(ref: ModelRef) -> str:
    """Return a name without its numbers.

    >>> stem(ModelRef("nas/candidate-17", 1)) == stem(ModelRef("nas/candidate-4", 2))
    True
    """
    return _DIGITS.sub("#", ref.name)


def _add(nodes: dict[str, Node], forest: Forest, ref: ModelRef, parent: str | None) -> str:
    key, info = str(ref), forest.infos.get(ref)
    if info is None:
        nodes[key] = Node(key, "retired", parent, key, key, children=len(forest.below(ref)))
    else:
        node = _summed(key, "version", parent, [info])
        node.children = len(forest.below(ref))
        nodes[key] = node
    return key


def _fold(nodes: dict[str, Node], forest: Forest, key: str, group: Sequence[ModelRef], parent: str | None) -> None:
    known = [forest.infos[ref] for ref in group if ref in forest.infos]
    if not known:  # all of them are retired
        nodes[key] = Node(key, "more", parent, str(group[0]), str(group[-1]), len(group))
        return
    nodes[key] = _summed(key, "fold", parent, known)
    nodes[key].count = len(group)
    nodes[key].children = sum(forest.families.get(ref, 0) for ref in group)


def _summed(key: str, kind: str, parent: str | None, infos: Sequence[ModelInfo]) -> Node:
    return Node(
        key,
        kind,
        parent,
        str(infos[0].ref),
        str(infos[-1].ref),
        len(infos),
        quality=_best(info.quality for info in infos),
        created=max(info.created for info in infos).isoformat(),
        bytes_owned=sum(info.bytes_owned for info in infos),
        bytes_total=sum(info.bytes_total for info in infos),
    )


def _best(qualities: Iterable[float | None]) -> float | None:
    known = [quality for quality in qualities if quality is not None]
    return max(known, key=lambda quality: (not math.isnan(quality), quality)) if known else None
