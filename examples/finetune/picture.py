"""The picture of a lineage: one box per version, one arrow from each parent to its child."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import matplotlib as mpl
import networkx as nx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Rectangle
from matplotlib.path import Path as Curve
from report import Version, size
from tensorvine.store import ModelRef

BOX_W, BOX_H = 3.0, 1.0
GAP_X, GAP_Y = 0.7, 0.18
PAD, HEAD_H, FOOT_H, MARGIN = 0.14, 0.65, 0.5, 0.25
"""All in inches: one unit of the axes is one inch, so that text fits whatever the number of versions."""

OWNED, INHERITED, RETIRED = "#2a7f62", "#a9d6c3", ("#9a9a9a", "#d6d6d6")
INK, GREY, PAPER = "#1d2b27", "#7a7a7a", "#ffffff"
DASHED = (0, (4, 3))

Corner = tuple[float, float]
"""The upper left one of a box."""


def draw_lineage(versions: Sequence[Version], live: Collection[ModelRef], path: Path, prefix: str = "") -> Path:
    """Draw versions as boxes, parents left of their children, and write a PNG.

    Args:
        versions: all that were saved, parents before their children.
        live: those that did not retire; the others are grey and dashed.
        path: the file; its directory is made.
        prefix: of the names of models; it is not drawn.

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
    corners = {ref: (MARGIN + x * (BOX_W + GAP_X), HEAD_H + y * (BOX_H + GAP_Y)) for ref, (x, y) in places.items()}
    for parent, child in tree.edges:
        _arrow(axes, corners[parent], corners[child], child in live)
    for version in versions:
        _box(axes, corners[version.ref], version, version.ref in live, str(version.ref).removeprefix(prefix))
    _frame(axes, height)
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"font.family": "DejaVu Sans"}):
        figure.savefig(path, dpi=150, pil_kwargs={"optimize": True})
    return path


def _tree(versions: Sequence[Version]) -> nx.DiGraph:
    tree = nx.DiGraph()
    for version in versions:
        tree.add_node(version.ref)
        if version.info.parent in tree:  # and not another run's
            tree.add_edge(version.info.parent, version.ref)
    return tree


def _places(tree: nx.DiGraph) -> dict[ModelRef, tuple[float, float]]:
    """Return a column, its generation, and a row for each version: leaves one below the other, parents amid theirs."""
    places: dict[ModelRef, tuple[float, float]] = {}
    rows = iter(range(len(tree)))
    for root in [ref for ref, degree in tree.in_degree if degree == 0]:
        depth = nx.single_source_shortest_path_length(tree, root)
        for ref in nx.dfs_postorder_nodes(tree, root):
            children = [places[child][1] for child in tree.successors(ref)]
            row = (children[0] + children[-1]) / 2 if children else next(rows)
            places[ref] = (depth[ref], row)
    return places


def _arrow(axes: Axes, parent: Corner, child: Corner, live: bool) -> None:
    start = (parent[0] + BOX_W + 0.04, parent[1] + BOX_H / 2)
    end = (child[0] - 0.04, child[1] + BOX_H / 2)
    middle = (start[0] + end[0]) / 2
    curve = Curve([start, (middle, start[1]), (middle, end[1]), end], [Curve.MOVETO, *[Curve.CURVE4] * 3])
    axes.add_patch(
        FancyArrowPatch(
            path=curve,
            arrowstyle="-|>",
            mutation_scale=12,
            linewidth=1.3,
            linestyle="-" if live else DASHED,
            color=OWNED if live else GREY,
        )
    )


def _box(axes: Axes, corner: Corner, version: Version, live: bool, name: str) -> None:
    x, y = corner
    ink, edge, owned, inherited = (INK, OWNED, OWNED, INHERITED) if live else (GREY, GREY, *RETIRED)
    rounded = "round,pad=0,rounding_size=0.08"
    face = PAPER if live else "#f6f6f6"
    style = {"facecolor": face, "edgecolor": edge, "linewidth": 1.4, "linestyle": "-" if live else DASHED}
    axes.add_patch(FancyBboxPatch((x, y), BOX_W, BOX_H, boxstyle=rounded, **style))

    left, right, inner = x + PAD, x + BOX_W - PAD, BOX_W - 2 * PAD
    info = version.info
    axes.text(left, y + 0.21, name, va="center", fontsize=10.5, weight="bold", color=ink)
    score = f"{version.accuracy:.1%} on {info.metadata['task']}"
    axes.text(right, y + 0.21, score, va="center", ha="right", fontsize=10, color=ink)
    axes.text(left, y + 0.44, f"learned: {info.metadata['learned']}", va="center", fontsize=7.5, color=GREY)
    if not live:
        axes.text(right, y + 0.44, "retired", va="center", ha="right", fontsize=7.5, style="italic", color=GREY)
    share = info.bytes_owned / info.bytes_total
    axes.add_patch(Rectangle((left, y + 0.58), inner, 0.12, color=inherited, linewidth=0))
    axes.add_patch(Rectangle((left, y + 0.58), inner * share, 0.12, color=owned, linewidth=0))
    axes.text(left, y + 0.84, f"wrote {size(info.bytes_owned)}", va="center", fontsize=8, color=ink)
    shared = f"inherits {size(version.bytes_inherited)}" if version.bytes_inherited else "inherits nothing"
    axes.text(right, y + 0.84, shared, va="center", ha="right", fontsize=8, color=ink)


def _frame(axes: Axes, height: float) -> None:
    axes.text(MARGIN, 0.32, "What the fine-tuned versions share", va="center", fontsize=14, weight="bold", color=INK)
    legend = [
        Patch(color=OWNED, label="bytes the version wrote"),
        Patch(color=INHERITED, label="bytes it shares with its ancestors"),
        Patch(facecolor="#f6f6f6", edgecolor=GREY, linestyle="--", label="retired"),
    ]
    place = {"loc": "center left", "bbox_to_anchor": (MARGIN, height - FOOT_H / 2 - 0.05)}
    axes.legend(
        handles=legend,
        ncols=3,
        frameon=False,
        fontsize=9,
        borderpad=0,
        borderaxespad=0,
        bbox_transform=axes.transData,
        labelcolor=INK,
        **place,
    )
