"""The page about the directory: what it shows."""

from __future__ import annotations

import re

from tensorvine.actors.engine.dask.directory.directory import Directory
from tensorvine.actors.engine.dask.directory.page import page
from tensorvine.actors.engine.dask.records import Agent, Plan, Reach


def rows(text: str) -> list[list[str]]:
    """The cells of the lines of all tables, without their heads."""
    found = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", text)]
    return [row for row in found if row]


def test_it_shows_nodes_with_what_is_reserved_and_actors_with_their_lives() -> None:
    directory = Directory()
    directory.join(Agent("node-of-one", "192.0.2.1", "machine", memory=8_000_000_000, cpus=2.0, gpus=("0",)))
    directory.join(Agent("node-of-two", "192.0.2.2", "other", memory=4_000_000_000, cpus=4.0))
    directory.leaves("node-of-two")
    directory.reserve("room", "node-of-one", 1_500_000_000, "client:1")
    directory.spawn(Plan("k1", "models/planner", b"", "client:1", "node-of-one"))
    directory.ready("k1", 0, Reach({}, {}))
    directory.spawn(Plan("k2", "models/shard-0", b"", "client:1", "node-of-one"))
    directory.died("k2", 0, "it crashed", 1.0)
    assert rows(page(directory)) == [
        ["node-of-", "192.0.2.1", "2", "2", "1", "8.0 GB", "1.5 GB", ""],
        ["node-of-", "192.0.2.2", "0", "4", "0", "4.0 GB", "0.0 GB", "leaves"],
        ["models/planner", "node-of-", "192.0.2.1", "running", "0"],
        ["models/shard-0", "node-of-", "192.0.2.1", "restarting", "1"],
    ]


def test_an_actor_without_room_is_on_no_node_and_names_are_no_markup() -> None:
    directory = Directory()
    directory.spawn(Plan("k", "<script>", b"", "client:1"))
    assert rows(page(directory)) == [["&lt;script&gt;", "-", "-", "starting", "0"]]
