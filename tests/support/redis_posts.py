"""What a shard posts in Redis, for tests: its part that does so, alone, versions for it, and what stands there then."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tensorvine.actors.rpc.messages import ShardConfig
from tensorvine.actors.shard.serving.redis_index import RedisIndex
from tensorvine.planner.topology import Topology
from tensorvine.store import Layer, ModelGraph, ModelRef
from tensorvine.store.versions.manifest import Header, TensorEntry, encode_body

from tests.support.redis_server import RedisServer

GRAPHS = {
    key: ModelGraph([Layer("in", {"class": "Input", "units": number})])
    for number, key in enumerate((b"k" * 16, b"l" * 16))
}
ENTRIES = {
    "w": TensorEntry("float32", (2, 3), 24, None, (0, (1 << 60) + 7), 0),
    "überbiß": TensorEntry("bfloat16", (), 2, ModelRef("base", 4), (1, 5), 2),
}
BODY = encode_body(ENTRIES)


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


def redis_index(
    server: RedisServer,
    index: int = 0,
    shards: int = 1,
    start: str = "s1",
    topology: Topology | None = None,
    versions: Iterable[tuple[Header, bytes]] = (),
) -> RedisIndex:
    config = ShardConfig(
        repository="repo",
        index=index,
        shards=tuple(range(shards)),
        capacity=0,
        preallocate_bytes=0,
        session_s=60.0,
        start=start,
    )
    return RedisIndex(server.url, config, graph_of, topology, versions)


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
