"""Tables of HTML, for objects that a notebook shows (`_repr_html_`).

Rules
- All text is escaped: names come from files and from other users.
- A table has no style and no script. The notebook's own style applies, in light and dark mode.
- At most `MOST_ROWS` rows are shown; the last line states how many are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice

MOST_ROWS = 100


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], count: int | None = None) -> str:
    """Return a table.

    Args:
        title: the line above the table.
        columns: the names of the columns. Without names, the table has no head.
        rows: the values. None is shown as a dash.
        count: number of all rows. None means the rows that are shown.

    >>> table("a <b>", [], [[1, None]])
    '<table><caption>a &lt;b&gt;</caption><tbody><tr><td>1</td><td>-</td></tr></tbody></table>'
    """
    shown = list(islice(rows, MOST_ROWS))
    head = f"<thead><tr>{_cells('th', columns)}</tr></thead>" if columns else ""
    body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in shown)
    left = (count or len(shown)) - len(shown)
    more = f"<p>{left:,} more</p>" if left > 0 else ""
    return f"<table><caption>{escape(title)}</caption>{head}<tbody>{body}</tbody></table>{more}"


def facts(title: str, values: Iterable[tuple[str, object]]) -> str:
    """Return a table of names and values."""
    return table(title, (), values)


def _cells(tag: str, values: Iterable[object]) -> str:
    return "".join(f"<{tag}>{escape('-' if value is None else str(value))}</{tag}>" for value in values)
