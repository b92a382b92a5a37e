"""The picture of a lineage: one box per version, one arrow from each parent to its child."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import matplotlib as mpl
import networkx as nx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Rectangle
from report import Version, size
from tensorvine.store import ModelRef

BOX_W, BOX_H = 3.3, 1.02
GAP_X, GAP_Y = 0.75, 0.2
HEAD_H, FOOT_H, MARGIN = 0.75, 0.5, 0.25
"""All in inches: one unit of the axes is one inch, so that text fits whatever the number of versions."""

OWNED, INHERITED, LOST = "#2a7f62", "#a9d6c3", "#b8b8b8"
INK, GREY, PAPER, ROOT_INK = "#1d2b27", "#8a8a8a", "#ffffff", "#5c6f69"


def draw_lineage(versions: Sequence[Version], live: Collection[ModelRef], path: Path) -> Path:
    """Draw versions as boxes, parents left of their children, and write a PNG.

    Args:
        versions: all that were saved, parents before their children.
        live: those that did not retire; the others are grey and dashed.
        path: the file; its directory is made.

    Returns:
        The path of the file.
    """
    tree = _tree(versions)
    places = _places(tree)
    columns = 1 + max(x for x, _ in places.values())
    rows = 1 + max(y for _, y in places.values())
    width = columns * BOX_W + (columns - 1) * GAP_X + 2 * MARGIN
    height = rows * BOX_H + (rows - 1) * GAP_Y + HEAD_H + FOOT_H + MARGIN
    figure = Figure(figsize=(width, height), facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    corners = {
        ref: (MARGIN + x * (BOX_W + GAP_X), HEAD_H + y * (BOX_H + GAP_Y)) for ref, (x, y) in places.items()
    }
    for parent, child in tree.edges:
        _arrow(axes, corners[parent], corners[child], child in live)
    for version in versions:
        _box(axes, corners[version.ref], version, version.ref in live)
    _frame(axes, width, height)
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"font.family": "DejaVu Sans"}):
        figure.savefig(path, dpi=150)
    return path


def _tree(versions: Sequence[Version]) -> nx.DiGraph:
    tree = nx.DiGraph()
    for version in versions:
        tree.add_node(version.ref)
        if version.info.parent is not None:
            tree.add_edge(version.info.parent, version.ref)
    return tree


def _places(tree: nx.DiGraph) -> dict[ModelRef, tuple[float, float]]:
    """Give each version a column, its generation, and a row: leaves one below the other, parents amid theirs."""
    places: dict[ModelRef, tuple[float, float]] = {}
    rows = iter(range(len(tree)))
    for root in [ref for ref, degree in tree.in_degree if degree == 0]:
        depth = nx.single_source_shortest_path_length(tree, root)
        for ref in nx.dfs_postorder_nodes(tree, root):
            children = [places[child][1] for child in tree.successors(ref)]
            row = (children[0] + children[-1]) / 2 if children else next(rows)
            places[ref] = (depth[ref], row)
    return places


def _arrow(axes: Axes, parent: tuple[float, float], child: tuple[float, float], live: bool) -> None:
    axes.add_patch(
        FancyArrowPatch(
            (parent[0] + BOX_W + 0.05, parent[1] + BOX_H / 2),
            (child[0] - 0.05, child[1] + BOX_H / 2),
            connectionstyle="arc3" if parent[1] == child[1] else "angle,angleA=0,angleB=90,rad=8",
            arrowstyle="-|>",
            mutation_scale=11,
            linewidth=1.3,
            linestyle="-" if live else (0, (4, 3)),
            color=ROOT_INK if live else GREY,
        )
    )


def _box(axes: Axes, corner: tuple[float, float], version: Version, live: bool) -> None:
    x, y = corner
    ink = INK if live else GREY
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            BOX_W,
            BOX_H,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor=PAPER if live else "#f5f5f5",
            edgecolor=OWNED if live else GREY,
            linewidth=1.4,
            linestyle="-" if live else (0, (4, 3)),
        )
    )
