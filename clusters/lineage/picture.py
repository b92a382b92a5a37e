"""A lineage as a picture: one row per version, and who wrote which layer.

Rules
- Everything is measured in inches and each text has a row, or a part of it, for itself: names are cut to their room,
  so labels never overlap, however many versions there are.
- One colour per version that wrote something; whoever is grey wrote nothing. Hollow and dashed: retired.
- Needs matplotlib and networkx (the extra `viz`); they are imported when a picture is drawn.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...store.errors import CodecUnavailableError, StorageError
from ...store.lazy import to_install
from ...store.refs import ModelRef
from ...store.sizes import size
from .. import words
from .lineage import Gap, Lineage, Relative

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW, MARGIN, TITLE, STEP = 0.42, 0.35, 0.95, 0.28
"""Inches: height of a row, the rim, the head, and how far a branch stands to the right of its parent."""
LABEL, WROTE, QUALITY, GUTTER = 2.9, 4.3, 2.6, 0.35
"""Inches: the greatest widths of the columns, and the space between them."""
TITLE_WIDTH = 6.5
"""Inches: the least width of all columns, for the title."""
STRIP, STRIP_HEAD, FOOT = 0.34, 0.62, 0.7
"""Inches: the bar of layers, the room above it, and below it."""
INK, GREY, PALE, PAPER = "#1d2b27", "#8a8f8d", "#d9dedb", "#ffffff"
COLORS = ("#2a7f62", "#d98e04", "#3b6fb6", "#b5442e", "#7b5ea7", "#3fa7a3", "#a0522d", "#c2559d", "#6b8e23", "#4f5d75")
LETTER_IN = 0.0105
"""Width of a letter, in inches per point of its size: the widest that DejaVu Sans takes on average."""
FORMATS = (".svg", ".png", ".pdf")


@dataclass(frozen=True, slots=True)
class Row:
    """What one row shows."""

    step: Relative | Gap
    column: int
    """How many branches to the right."""
    above: int | None
    """The row of its parent."""


@dataclass(frozen=True, slots=True)
class _Columns:
    """Where the columns stand, each as wide as its texts need."""

    branches: float
    """Inches by which the outermost branch stands to the right."""
    label: float
    wrote: float
    quality: float
    """0: no quality is known."""

    @classmethod
    def of(cls, rows: Sequence[Row], lineage: Lineage) -> _Columns:
        known = [row.step for row in rows if isinstance(row.step, Relative)]
        gaps = [_gap(row.step) for row in rows if isinstance(row.step, Gap)]
        labels = max(0.2 + _inches(text, 10.5) for text in [*(str(one.ref) for one in known), *gaps]) + 0.2
        written = max((_inches(text, 8) for one in known for text in _written(one, lineage)), default=0.0)
        wrote = max(min(WROTE, written), _inches(_wrote_head(lineage), 8))
        branches = max(row.column for row in rows) * STEP
        quality = QUALITY if any(one.quality is not None for one in known) else 0.0
        missing = TITLE_WIDTH - branches - min(LABEL, labels) - GUTTER - wrote - quality
        return cls(branches, min(LABEL, labels), wrote + max(0.0, missing), quality)

    @property
    def at_wrote(self) -> float:
        return MARGIN + self.branches + self.label + GUTTER

    @property
    def at_quality(self) -> float:
        return self.at_wrote + self.wrote + GUTTER

    @property
    def width(self) -> float:
        return self.at_wrote + self.wrote + (GUTTER + self.quality if self.quality else 0.0) + MARGIN


def check_picture(path: Path) -> None:
    """See that a picture can be drawn there.

    Raises:
        StorageError: the suffix is none that can be drawn, or there is no such directory.
        CodecUnavailableError: matplotlib or networkx is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise StorageError(f"picture {path}: expected a name that ends in {', '.join(FORMATS)}; found {path.suffix!r}")
    if not path.parent.is_dir():
        raise StorageError(f"picture {path}: expected the directory {path.parent}; it does not exist")
    try:
        import matplotlib as mpl
        import networkx as nx
    except ImportError as exc:
        raise CodecUnavailableError(
            f"picture {path}: expected matplotlib and networkx; found {exc}: {to_install('viz')}"
        ) from exc
    del mpl, nx


def draw_lineage(lineage: Lineage, path: str | os.PathLike[str]) -> Path:
    """Draw a lineage, and write the picture to a file.

    The rows show the versions, with the root at the top. Below the rows, a bar shows the layers of the version whose
    lineage is drawn. The colour of a layer shows which version wrote the layer. This function requires the extra
    `viz`.

    Args:
        lineage: Result of `lineage_of`.
        path: File to write, with the suffix `.svg`, `.png` or `.pdf`. An existing file is replaced.

    Returns:
        The path of the file.

    Raises:
        StorageError: if `path` does not have one of these suffixes, its directory does not exist, or the file cannot be
            written.
        CodecUnavailableError: if matplotlib or networkx is not installed.

    >>> draw_lineage(lineage_of(repo, "best"), "best.svg")     # doctest: +SKIP
    """
    path = Path(path)
    check_picture(path)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    rows = rows_of(lineage)
    columns = _Columns.of(rows, lineage)
    width = columns.width
    height = TITLE + len(rows) * ROW + STRIP_HEAD + STRIP + FOOT
    style: Any = {"font.family": "DejaVu Sans", "svg.hashsalt": "tensorvine", "svg.fonttype": "path"}
    with mpl.rc_context(style):
        figure = Figure(figsize=(width, height), facecolor=PAPER)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        colors = _colors(lineage)
        _head(axes, lineage, columns)
        _rows(axes, rows, lineage, colors, columns)
        _qualities(axes, rows, colors, columns.at_quality)
        _strip(axes, lineage, colors, TITLE + len(rows) * ROW + STRIP_HEAD, width - 2 * MARGIN)
        try:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
        except OSError as exc:
            raise StorageError(f"picture {path}: expected a writable file; found {exc}") from exc
    return path


def rows_of(lineage: Lineage) -> list[Row]:
    """Put ancestors one below the other, and descendants below the version, each branch one step to the right.

    A first child stands below its parent, in its column; its siblings branch off to the right.
    """
    import networkx as nx

    rows = [Row(step, 0, place - 1 if place else None) for place, step in enumerate(lineage.steps())]
    tree: nx.DiGraph[ModelRef] = nx.DiGraph()
    tree.add_node(lineage.ref)
    tree.add_edges_from((one.parent or lineage.ref, one.ref) for one in lineage.descendants)
    relatives = {relative.ref: relative for relative in lineage.descendants}
    places, columns = {lineage.ref: len(rows) - 1}, {lineage.ref: 0}
    for ref in list(nx.dfs_preorder_nodes(tree, lineage.ref))[1:]:
        relative = relatives[ref]
        parent = relative.parent or lineage.ref
        columns[ref] = columns[parent] + (1 if len(lineage.children(parent)) > 1 or parent == lineage.ref else 0)
        places[ref] = len(rows)
        rows.append(Row(relative, columns[ref], places[parent]))
    return rows


def _colors(lineage: Lineage) -> dict[ModelRef, str]:
    writers = [relative.ref for relative in lineage.contributors]
    return {ref: COLORS[place % len(COLORS)] for place, ref in enumerate(writers)}


def _head(axes: Axes, lineage: Lineage, columns: _Columns) -> None:
    model, writers = lineage.model, lineage.contributors
    axes.text(
        MARGIN,
        0.3,
        _cut(f"Lineage of {lineage.ref}", columns.width - 2 * MARGIN, 14),
        va="center",
        fontsize=14,
        weight="bold",
        color=INK,
    )
    facts = f"{words.count(lineage.tensors, 'tensor')} from {words.count(len(writers), 'version')}"
    if model.bytes_total:
        facts += f", {size(model.bytes_total)}, of which {size(model.bytes_owned)} are its own"
    if lineage.unfollowed:
        facts += f"; {words.count(lineage.unfollowed, 'more descendant')} not shown"
    axes.text(MARGIN, 0.55, facts, va="center", fontsize=9, color=GREY)
    axes.text(columns.at_wrote, TITLE - 0.12, _wrote_head(lineage), va="center", fontsize=8, color=GREY)


def _rows(axes: Axes, rows: Sequence[Row], lineage: Lineage, colors: Mapping[ModelRef, str], columns: _Columns) -> None:
    for place, row in enumerate(rows):
        x, y = _spot(place, row)
        if row.above is not None:
            gap = isinstance(row.step, Gap) or isinstance(rows[row.above].step, Gap)
            _line(axes, _spot(row.above, rows[row.above]), (x, y), gap)
    for place, row in enumerate(rows):
        x, y = _spot(place, row)
        room = columns.label + columns.branches - (x - MARGIN) - 0.2
        if isinstance(row.step, Gap):
            axes.plot([x], [y], marker=".", color=GREY, markersize=3)
            axes.text(x + 0.2, y, _cut(_gap(row.step), room, 8), va="center", fontsize=8, color=GREY, style="italic")
            continue
        _version(axes, row.step, lineage, colors, (x, y), room)
        _wrote(axes, row.step, lineage, colors, columns, y)


def _version(
    axes: Axes, one: Relative, lineage: Lineage, colors: Mapping[ModelRef, str], spot: tuple[float, float], room: float
) -> None:
    x, y = spot
    color, asked = colors.get(one.ref, GREY), one.ref == lineage.ref
    face = color if one.live else PAPER
    axes.plot([x], [y], marker="o", markersize=11 if asked else 8, color=color, markerfacecolor=face)
    points = 9.5 if asked else 9
    axes.text(
        x + 0.2,
        y if one.live else y - 0.07,
        _cut(str(one.ref), room, points + asked),
        va="center",
        fontsize=points,
        weight="bold" if asked else "normal",
        color=INK if one.live else GREY,
    )
    if not one.live:
        axes.text(x + 0.2, y + 0.1, "retired", va="center", fontsize=6.5, style="italic", color=GREY)


def _gap(gap: Gap) -> str:
    return f"{words.count(len(gap.refs), 'version')} that wrote none of its tensors"


def _wrote_head(lineage: Lineage) -> str:
    return f"layers written of {lineage.ref.name[-28:]}"


def _written(one: Relative, lineage: Lineage) -> tuple[str, ...]:
    """Return the lines that say what a version wrote: its layers and their number, or what it has of the version."""
    if not one.tensors:
        return ()
    counted = words.count(one.tensors, "tensor")
    if one in lineage.contributors:
        return words.listed(one.layers, int(WROTE / (8 * LETTER_IN))), counted
    return (f"has {counted} of {lineage.ref}",)


def _wrote(
    axes: Axes, one: Relative, lineage: Lineage, colors: Mapping[ModelRef, str], columns: _Columns, y: float
) -> None:
    x, lines = columns.at_wrote, _written(one, lineage)
    if len(lines) == 2:
        axes.text(x, y - 0.08, lines[0], va="center", fontsize=8, color=colors[one.ref])
        axes.text(x, y + 0.1, lines[1], va="center", fontsize=6.5, color=GREY)
    elif lines:
        axes.text(x, y, _cut(lines[0], columns.wrote, 8), va="center", fontsize=8, color=GREY, style="italic")


def _line(axes: Axes, parent: tuple[float, float], child: tuple[float, float], dotted: bool) -> None:
    color, style = (GREY, ":") if dotted else (PALE, "-")
    xs, ys = [parent[0], parent[0], child[0]], [parent[1], child[1], child[1]]
    axes.plot(xs, ys, color=color, linewidth=1.6, linestyle=style, zorder=0)


def _qualities(axes: Axes, rows: Sequence[Row], colors: Mapping[ModelRef, str], left: float) -> None:
    """Draw each version's quality along a common axis, joined from the root to the version; dotted: unknown between."""
    known = {
        place: row.step.quality
        for place, row in enumerate(rows)
        if isinstance(row.step, Relative) and row.step.quality is not None
    }
    if not known:
        return
    low, high = min(known.values()), max(known.values())
    span = (high - low) or 1.0
    room = QUALITY - 0.75
    bottom = TITLE + len(rows) * ROW
    for x in (left, left + room):
        axes.plot([x, x], [TITLE, bottom], color=PALE, linewidth=0.8, zorder=0)
    axes.text(left, TITLE - 0.12, "quality", va="center", fontsize=8, color=GREY)
    spots = {
        place: (left + (value - low) / span * room, _spot(place, rows[place])[1]) for place, value in known.items()
    }
    line = [place for place in spots if rows[place].column == 0]  # from the root to the version
    for older, newer in pairwise(line):
        (x, y), (to_x, to_y) = spots[older], spots[newer]
        known_between = newer == older + 1
        axes.plot([x, to_x], [y, to_y], color=PALE, linewidth=1.4, linestyle="-" if known_between else ":", zorder=1)
    for place, (x, y) in spots.items():
        step = rows[place].step
        color = colors.get(step.ref, GREY) if isinstance(step, Relative) else GREY
        axes.plot([x], [y], marker="o", markersize=5, color=color, zorder=2)
        axes.text(x + 0.1, y, words.quality(known[place]), va="center", fontsize=7.5, color=INK)


def _strip(axes: Axes, lineage: Lineage, colors: Mapping[ModelRef, str], top: float, room: float) -> None:
    """Draw the version's layers from input to output, each in the colour of whoever wrote it."""
    from matplotlib.patches import Rectangle

    if not lineage.writers:
        return
    title = f"{words.count(len(lineage.writers), 'layer')} with tensors, from input to output, coloured by writer"
    axes.text(MARGIN, top - 0.16, title, va="center", fontsize=8, color=GREY)
    width = room / len(lineage.writers)
    for place, (layer, ref) in enumerate(lineage.writers.items()):
        x = MARGIN + place * width
        box = Rectangle(
            (x, top), width, STRIP, facecolor=colors[ref], edgecolor=PAPER, linewidth=1.0 if width > 0.1 else 0
        )
        axes.add_patch(box)
        name = _cut(layer, width - 0.08, 7)
        if len(name) > 3 or name == layer:
            axes.text(x + width / 2, top + STRIP / 2, name, va="center", ha="center", fontsize=7, color=PAPER)
    _legend(axes, lineage, colors, top + STRIP + 0.24, room)


def _legend(axes: Axes, lineage: Lineage, colors: Mapping[ModelRef, str], y: float, room: float) -> None:
    """Name the colours, as many as one line takes."""
    x = MARGIN
    for place, relative in enumerate(lineage.contributors):
        text = _cut(str(relative.ref), 2.2, 8)
        width = 0.3 + len(text) * 8 * LETTER_IN
        if x + width > MARGIN + room - 0.8:
            axes.text(x, y, f"+{len(lineage.contributors) - place}", va="center", fontsize=8, color=GREY)
            return
        axes.plot([x + 0.06], [y], marker="s", markersize=6, color=colors[relative.ref])
        axes.text(x + 0.18, y, text, va="center", fontsize=8, color=INK)
        x += width


def _spot(place: int, row: Row) -> tuple[float, float]:
    return MARGIN + 0.1 + row.column * STEP, _height(place)


def _height(place: int) -> float:
    return TITLE + (place + 0.5) * ROW


def _inches(text: str, points: float) -> float:
    return len(text) * points * LETTER_IN


def _cut(text: str, inches: float, points: float) -> str:
    """Cut a text to what fits; its end is what tells versions apart."""
    most = int(inches / (points * LETTER_IN))
    if len(text) <= most:
        return text
    return f"…{text[len(text) - most + 1 :]}" if most > 1 else ""
