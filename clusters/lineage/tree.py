"""A lineage as a tree of text: the root on top, one line per version.

Rules
- A line says who it is, its quality, and what of the asked version it wrote; a descendant's line says what it still
  has of the asked version. Retired ones are dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...store.refs import ModelRef
from .. import words
from .lineage import Gap, Lineage, Relative

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

LAYERS_WIDTH = 48
"""Characters for the names of layers in a line."""


def lineage_tree(lineage: Lineage) -> Tree:
    """Convert a lineage to a tree that `rich.print` can print.

    >>> from tensorvine.store import ModelRef
    >>> import rich
    >>> a, b = ModelRef("a", 1), ModelRef("b", 1)
    >>> unknown = dict(created=None, bytes_owned=None, bytes_total=None)
    >>> root = Relative(ref=a, parent=None, live=False, quality=None, layers=("stem",), tensors=2, **unknown)
    >>> child = Relative(ref=b, parent=a, live=True, quality=0.9, layers=("head",), tensors=1, **unknown)
    >>> rich.print(lineage_tree(Lineage(b, (root, child), (), {}, 3)))
    a@1  wrote 2 of 3 tensors: stem  retired
    └── b@1  quality 0.9  wrote 1 of 3 tensors: head
    """
    from rich.text import Text
    from rich.tree import Tree

    first, *others = (_label(step, lineage) for step in lineage.steps())
    top = tip = Tree(first, guide_style="dim")
    for label in others:
        tip = tip.add(label)
    _grow(tip, lineage)
    if lineage.unfollowed:
        tip.add(Text(f"and {words.count(lineage.unfollowed, 'more descendant')}", "dim"))
    return top


def _grow(tree: Tree, lineage: Lineage) -> None:
    """Add the descendants, parents before their children."""
    trees: dict[ModelRef | None, Tree] = {lineage.ref: tree}
    for relative in lineage.descendants:
        trees[relative.ref] = trees[relative.parent].add(_descendant(relative, lineage))


def _label(step: Relative | Gap, lineage: Lineage) -> Text:
    return _gap(step) if isinstance(step, Gap) else _ancestor(step, lineage)


def _ancestor(relative: Relative, lineage: Lineage) -> Text:
    text = _name(relative, bold=relative.ref == lineage.ref)
    if relative.tensors:
        share = f"wrote {relative.tensors} of {words.count(lineage.tensors, 'tensor')}"
        text.append(f"  {share}: {words.listed(relative.layers, LAYERS_WIDTH)}", "green")
    elif lineage.tensors:
        text.append("  wrote none of the tensors", "dim")
    return _retired(text, relative)


def _descendant(relative: Relative, lineage: Lineage) -> Text:
    text = _name(relative)
    if relative.live and relative.tensors:
        text.append(f"  has {words.count(relative.tensors, 'tensor')} of {lineage.ref}", "cyan")
    return _retired(text, relative)


def _name(relative: Relative, bold: bool = False) -> Text:
    from rich.text import Text

    text = Text(str(relative.ref), "bold" if bold else "")
    if relative.quality is not None:
        text.append(f"  quality {words.quality(relative.quality)}")
    return text


def _retired(text: Text, relative: Relative) -> Text:
    if not relative.live:
        text.append("  retired", "dim italic")
    return text


def _gap(gap: Gap) -> Text:
    from rich.text import Text

    return Text(
        f"… {words.count(len(gap.refs), 'version')} that wrote none of the tensors, {gap.refs[0]} to {gap.refs[-1]}",
        "dim",
    )
