"""What the catalog posts in Redis, for tests: its part that does so, versions for it, and what stands there then."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tensorvine.actors.catalog.redis_index import Live, RedisIndex
from tensorvine.store import Layer, ModelGraph, ModelRef
from tensorvine.store.segments.segment import SegmentId
from tensorvine.store.versions.manifest import Header, TensorEntry, encode_body

from tests.support.redis_server import RedisServer

GRAPHS = {
    key: ModelGraph([Layer("in", {"class": "Input", "units": number})])
    for number, key in enumerate((b"k" * 16, b"l" * 16))
}
ENTRIES = {
    "w": TensorEntry("float32", (2, 3), 24, None, (0, (1 << 60) + 7), 0),
    "überbiß": TensorEntry("bfloat16", (), 2, ModelRef("base", 4), (0, 5), 2),
}
BODY = encode_body(ENTRIES)
PLACES: dict[SegmentId, int] = {(0, (1 << 60) + 7): 2, (0, 5): 0}


def header(ref: ModelRef, key: bytes = b"k" * 16) -> Header:
    return Header(
        ref=ref,
        parent=None,
        quality=0.5,
        metadata='{"epoch": 3}',
        created_ns=1234,
        graph_key=key,
        bytes_owned=24,
        bytes_total=26,
    )


def graph_of(key: bytes) -> str:
    return GRAPHS[key].to_json()


class Posts:
    """A catalog's part that posts in Redis, and what is live there.

    Args:
        server: the Redis server.
        start: id of the repository's start.
        graph: gives the text of an architecture.
        versions: what is live when it begins.
    """

    def __init__(
        self,
        server: RedisServer,
        start: str = "s1",
        graph: Callable[[bytes], str] = graph_of,
        versions: tuple[Header, ...] = (),
    ) -> None:
        self.live: dict[ModelRef, Live] = {one.ref: (one, BODY, PLACES) for one in versions}
        self.index = RedisIndex(
            server.url, "repo", start, live=self.live.get, refs=lambda: list(self.live.copy()), graph_of=graph
        )
        self.index.begin()

    def announce(self, *versions: Header) -> None:
        """Have versions exist."""
        self.live |= {one.ref: (one, BODY, PLACES) for one in versions}
        self.index.changed([one.ref for one in versions])

    def retired(self, ref: ModelRef) -> None:
        """Have one exist no more."""
        del self.live[ref]
        self.index.changed([ref])

    def close(self) -> None:
        """End it. What is posted stays."""
        self.index.close()


def posted(server: RedisServer, name: str) -> dict[int, dict[str, Any]]:
    with server.client() as client:
        found = client.hgetall(f"tensorvine:repo:s1:model:{name}")
    return {int(version): json.loads(text) for version, text in found.items()}


def newest(server: RedisServer) -> dict[str, str]:
    with server.client() as client:
        return client.hgetall("tensorvine:repo:s1:newest")


def all_keys(server: RedisServer) -> set[str]:
    with server.client() as client:
        return set(client.keys("*"))
