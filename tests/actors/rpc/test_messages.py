"""What logs show of messages: no secret, nor what may hold one."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
from types import ModuleType
from typing import Any

import pytest
from tensorvine.actors.rpc import catalog_messages, messages
from tensorvine.actors.rpc.catalog_messages import CatalogConfig, Page, Term, Welcome
from tensorvine.actors.rpc.messages import Disk, Hello, ShardPlan
from tensorvine.actors.rpc.redis_keys import Address
from tensorvine.actors.shard.calls import ShardCalls, copies, orders
from tensorvine.actors.shard.calls.copies import Original
from tensorvine.planner.topology import Topology
from tensorvine.store.holders import Request
from tensorvine.store.shard import ShardState

URI = "s3://QQQ:QQQ%2F@bucket/prefix?session_token=QQQ"
URL = "rediss://user:QQQ@host/0"
ADDRESS = Address("host", 4321, "QQQ")
DISK = Disk(URI, "zstd(3)", None, None)
PLAN = ShardPlan(1 << 20, 0, 60.0, DISK, URL)
TOPOLOGY = Topology("default", (0, 1), "starter", URI, 2)
MESSAGES = {
    "disk": DISK,
    "plan": PLAN,
    "topology": TOPOLOGY,
    "a later topology": TOPOLOGY.grown(1).draining([0]).left([0]),
    "config": PLAN.config(TOPOLOGY, 1, 1 << 20),
    "catalog": CatalogConfig(topology=TOPOLOGY, session_s=60.0, disk=DISK, redis=URL),
    "welcome": Welcome(1, TOPOLOGY, {0: "node"}, "node", Page(17, 3, (0, 1))),
    "term": Term(3, b"QQQ"),
    "address": ADDRESS,
    "hello": Hello(0, "node", 17, 3, (0, 1), 1 << 20, ADDRESS),
    "report": ShardState(0, 1).report("node", ADDRESS, 1 << 20),
    "request": ShardCalls.pull(Request("client", 7), {(0, 1): Original((8,), (0,), None)}, ADDRESS, 1.0),
}


@pytest.mark.parametrize("what", MESSAGES)
def test_a_message_shows_no_secret(what: str) -> None:
    shown = f"{MESSAGES[what]!r} {MESSAGES[what]}"
    assert "QQQ" not in shown
    assert "bucket" not in shown


def test_what_helps_is_shown() -> None:
    assert repr(ADDRESS) == "Address(host='host', port=4321)"
    assert "host='host', port=4321" in repr(MESSAGES["hello"])
    for word in ("repository='default'", "index=1", "capacity=1048576", "codec='zstd(3)'"):
        assert word in repr(MESSAGES["config"])


@pytest.mark.parametrize(
    "what", ["plan", "topology", "config", "catalog", "welcome", "term", "address", "hello", "report"]
)
def test_the_secrets_are_there(what: str) -> None:
    message: Any = MESSAGES[what]
    again = pickle.loads(pickle.dumps(message))  # noqa: S301  our own
    assert again == message
    assert b"QQQ" in pickle.dumps(again)


def test_an_address_is_a_place_with_a_token_as_before() -> None:
    host, port, token = ADDRESS
    assert (host, port, token) == ADDRESS == ("host", 4321, "QQQ")
    assert Address.from_json(ADDRESS.to_json()) == ADDRESS
    assert json.loads(ADDRESS.to_json()) == {"host": "host", "port": 4321, "token": "QQQ"}


@pytest.mark.parametrize("module", [messages, catalog_messages, copies, orders])
def test_what_is_called_like_a_secret_is_in_no_repr(module: ModuleType) -> None:
    for cls in vars(module).values():
        if dataclasses.is_dataclass(cls):
            shown = [field.name for field in dataclasses.fields(cls) if field.repr]
            assert [name for name in shown if re.search("token|secret|password|url|uri|redis", name)] == []
