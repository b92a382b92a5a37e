"""The page about TensorVine on the dashboard of Dask's scheduler: its nodes and actors, as the directory knows them.

Rules
- It shows and changes nothing. Whoever reaches the dashboard sees names and addresses, as on Dask's own pages.
- It needs neither bokeh nor a script: a browser asks for it anew every few seconds. What others chose is escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape

from .directory import Directory

ANEW_S = 5
_NODES = ("node", "address", "actors", "CPUs", "GPUs", "memory", "reserved", "")
_ACTORS = ("name", "node", "address", "state", "restarts")
_STYLE = (
    "body{font:14px sans-serif;margin:2em}table{border-collapse:collapse;margin-bottom:2em}"
    "td,th,caption{text-align:left;padding:.3em 1em}td,th{border-bottom:1px solid #ddd}caption{font-weight:bold}"
)


def page(directory: Directory) -> str:
    """Write the page, in HTML.

    >>> "Nodes: 0" in page(Directory())
    True
    """
    actors = sorted(directory.actors())
    standings = {name: directory.where(directory.find(name).key) for name in actors}
    carried = Counter(standing.node for standing in standings.values())
    nodes = sorted(directory.nodes(), key=lambda known: (known[1].address, known[0].id))
    addresses = {node.id: agent.address for node, agent in nodes}
    about_nodes = [
        (
            node.id[:8],
            agent.address,
            str(carried[node.id]),
            f"{agent.cpus:g}",
            str(len(agent.gpus)),
            _size(agent.memory),
            _size(agent.memory - node.memory_free),
            "leaves" if node.leaving else "",
        )
        for node, agent in nodes
    ]
    about_actors = [
        (name, (there.node or "-")[:8], addresses.get(there.node or "", "-"), there.state.name.lower(), str(there.life))
        for name, there in standings.items()
    ]
    tables = _table(f"Nodes: {len(nodes)}", _NODES, about_nodes) + _table(
        f"Actors: {len(actors)}", _ACTORS, about_actors
    )
    meta = f'<meta charset="utf-8"><meta http-equiv="refresh" content="{ANEW_S}">'
    head = f"<head>{meta}<title>TensorVine</title><style>{_STYLE}</style></head>"
    return f"<!DOCTYPE html><html>{head}<body><h1>TensorVine</h1>{tables}</body></html>"


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [_row("th", columns), *(_row("td", row) for row in rows)]
    return f"<table><caption>{title}</caption>{''.join(lines)}</table>"


def _row(cell: str, texts: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{cell}>{escape(text)}</{cell}>' for text in texts)}</tr>"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"
