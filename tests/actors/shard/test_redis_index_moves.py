"""What shards post in Redis while names move from one to another: nothing is lost, and what is past goes."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager

import pytest
from tensorvine.actors.edge.reader import RedisReader
from tensorvine.actors.rpc.messages import RecoveryInfo
from tensorvine.actors.rpc.redis_connection import RedisConnection
from tensorvine.actors.rpc.redis_keys import read_gone, read_successors
from tensorvine.actors.shard.serving import redis_index as redis_index_module
from tensorvine.actors.shard.serving.redis_index import RedisIndex
from tensorvine.actors.shard.shard import open_redis_index
from tensorvine.planner.placement import home_of
from tensorvine.planner.topology import Topology
from tensorvine.store import ModelRef
from tensorvine.store.errors import CorruptDataError
from tensorvine.store.shard import ShardState
from tensorvine.store.versions.ledger import Told
from tensorvine.store.versions.manifest import Header

from tests.support.contexts import context_of
from tests.support.redis_posts import BODY, all_keys, graph_of, header, newest, posted, redis_index
from tests.support.redis_server import RedisServer
from tests.support.waiting import eventually


def let_time_pass(index: RedisIndex) -> None:
    """Nothing comes any more of what another shard was posting."""
    with index._changed:
        index._arrived = dict.fromkeys(index._arrived, 0.0)
        index._sweeping = dict.fromkeys(index._sweeping, 0.0)
        index._lent = dict.fromkeys(index._lent, 0.0)


def cut_off(server: RedisServer) -> None:
    with server.client() as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def names_at(shard: int, count: int) -> list[str]:
    """Return names whose home is `shard`, of two."""
    return [name for i in range(1000) if home_of(name := f"at{shard}-{i}", (0, 1)) == shard][:count]


@contextmanager
def redis_served(server: RedisServer, versions: list[tuple[Header, bytes]]) -> Generator[RedisReader]:
    """Read what one shard has posted."""
    made, link = redis_index(server, versions=versions), RedisConnection(server.url, "test")
    try:
        eventually(lambda: len(newest(server)) == len({head.ref.name for head, _ in versions}), "all names")
        yield RedisReader(link, "repo")
    finally:
        made.close()
        link.close()


class TestMoves:
    """Names come from another shard, and that one drains."""

    @pytest.fixture(autouse=True)
    def _soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(redis_index_module, "PING_S", 0.05)

    def test_names_that_came_are_posted_over_what_the_other_one_posted_even_late(self, server: RedisServer) -> None:
        other, one = redis_index(server, 1, 2), redis_index(server, 0, 2)
        try:
            other.announce([(header(ModelRef("m", v)), BODY) for v in (1, 2)])
            eventually(lambda: newest(server) == {"m": "2"}, "what the other one posts")
            late = {version: json.dumps(fields) for version, fields in posted(server, "m").items()}
            other.moved_away(["m", "n"])
            one.announce([(header(ModelRef("m", 3)), BODY)])
            one.arrived(["m", "n"])
            eventually(lambda: newest(server) == {"m": "3"}, "what came")
            with server.client() as client:  # what the other one was posting just then
                client.hset("tensorvine:repo:s1:model:m", mapping=late)
                client.hset("tensorvine:repo:s1:model:n", "7", late[1])
                client.hset("tensorvine:repo:s1:newest", mapping={"m": "2", "n": "7"})
            let_time_pass(one)
            eventually(lambda: newest(server) == {"m": "3"}, "the numbers")
            assert {version: fields["home"] for version, fields in posted(server, "m").items()} == {3: 0}
            assert posted(server, "n") == {}
        finally:
            one.close()
            other.close()

    def test_a_shard_that_drained_is_told_with_its_successors_and_its_own_goes(self, server: RedisServer) -> None:
        other = redis_index(server, 1, 2)
        other.shard_at("10.0.0.2", 78, "token")
        other.announce([(header(ModelRef("m", 1)), BODY)])
        eventually(lambda: newest(server) == {"m": "1"}, "what the other one posts")
        other.close()
        one = redis_index(server, 0, 2)
        link = RedisConnection(server.url, "test")
        try:
            one.shard_at("10.0.0.1", 77, "token")
            shrunk = Topology("repo", (0, 1), "s1").shrunk([1])
            one.learn(shrunk)
            one.announce([(header(ModelRef("m", 1)), BODY)])
            one.arrived(["m"])
            reader = RedisReader(link, "repo")
            eventually(lambda: reader.posted(ModelRef("m", 1))[1].gone == {1: (0,)}, "the successors")
            let_time_pass(one)
            eventually(lambda: posted(server, "m")[1]["home"] == 0, "it again")
            assert set(reader.posted(ModelRef("m", 1))[1].addresses) == {0, 1}, "names may be there still"
            one.learn(shrunk.settled())
            one.announce([(header(ModelRef("m", 2)), BODY)])
            eventually(lambda: newest(server) == {"m": "2"}, "the next version")
            assert set(reader.posted(ModelRef("m", 1))[1].addresses) == {0, 1}, "it may be asked for a while"
            let_time_pass(one)
            eventually(lambda: set(reader.posted(ModelRef("m", 1))[1].addresses) == {0}, "its address to go")
            found, places = reader.posted(ModelRef("m", 1))
            assert (found.home, places.holder((1, 99))) == (0, 0)
            assert "tensorvine:repo:s1:graphs:1" not in all_keys(server)
            assert reader.graph(found).to_json() == graph_of(b"k" * 16)
        finally:
            one.close()
            link.close()

    def test_a_shard_that_joins_takes_nothing_down_until_all_names_have_arrived(self, server: RedisServer) -> None:
        grown = Topology("repo", (0,), "s1").grown([7])
        name, stale = names_at(1, 2)
        other, joins = redis_index(server), None
        try:
            other.announce([(header(ModelRef(n, 1)), BODY) for n in (name, stale)])
            eventually(lambda: set(newest(server)) == {name, stale}, "what the other one posts")
            joins = redis_index(server, 1, 2, topology=grown)
            other.learn(grown)
            for version in (1, 2):
                joins.announce([(header(ModelRef("new", version)), BODY)])
                eventually(lambda version=version: newest(server).get("new") == f"{version}", "what it has itself")
                assert {name, stale} <= newest(server).keys()
                assert set(posted(server, name)) == {1}
                cut_off(server)
            other.moved_away([name, stale])
            joins.announce([(header(ModelRef(name, 1)), BODY)])
            joins.arrived([name])
            joins.learn(grown.settled())
            eventually(lambda: newest(server) == {name: "1", "new": "2"}, "what nobody has to go")
        finally:
            other.close()
            if joins is not None:
                joins.close()

    @pytest.mark.parametrize("settled", [False, True])
    def test_who_starts_again_after_names_came_posts_them_as_its_own(self, server: RedisServer, settled: bool) -> None:
        shrunk = Topology("repo", (0, 1), "s1").shrunk([1])
        versions = [(header(ModelRef("m", version)), BODY) for version in (1, 2)]
        other = redis_index(server, 1, 2, versions=[*versions, (header(ModelRef("m", 3)), BODY)])
        eventually(lambda: newest(server) == {"m": "3"}, "what the other one posts")
        other.close()
        topology = shrunk.settled() if settled else shrunk
        again = redis_index(server, 0, 2, topology=topology, versions=versions)
        try:
            eventually(
                lambda: {v: fields["home"] for v, fields in posted(server, "m").items()} == {1: 0, 2: 0},
                "this home, and not what it lost",
            )
            eventually(lambda: newest(server) == {"m": "2"}, "the number")
        finally:
            again.close()

    def test_an_architecture_stays_for_a_while_where_its_name_left(self, server: RedisServer, one: RedisIndex) -> None:
        stays, goes = b"k" * 16, b"l" * 16

        def retire(number: int) -> set[str]:
            one.announce([(header(ModelRef("n", number), goes), BODY)])
            eventually(lambda: newest(server).get("n") == f"{number}", "a version")
            one.retired(ModelRef("n", number))
            eventually(lambda: "n" not in newest(server), "it to go")
            with server.client() as client:
                return set(client.hkeys("tensorvine:repo:s1:graphs:0"))

        one.announce([(header(ModelRef("m", 1), stays), BODY)])
        eventually(lambda: newest(server) == {"m": "1"}, "what leaves then")
        one.moved_away(["m"])
        assert retire(1) == {stays.hex()}, "the new home may not have posted it yet"
        let_time_pass(one)
        assert retire(2) == set()

    def test_a_shard_that_drained_says_no_more_where_it_is(self, server: RedisServer) -> None:
        drains = redis_index(server, 1, 2)
        try:
            drains.shard_at("10.0.0.2", 78, "token")
            eventually(lambda: "tensorvine:repo:s1:shards" in all_keys(server), "its address")
            drains.learn(Topology("repo", (0, 1), "s1").shrunk([1]))
            for _ in range(2):
                eventually(lambda: "tensorvine:repo:s1:gone" in all_keys(server), "that it drained")
                with server.client() as client:
                    client.delete("tensorvine:repo:s1:gone", "tensorvine:repo:s1:shards")
                cut_off(server)
            eventually(lambda: "tensorvine:repo:s1:gone" in all_keys(server), "that it drained, again")
            assert "tensorvine:repo:s1:shards" not in all_keys(server)
        finally:
            drains.close()

    def test_a_shard_that_drained_and_starts_again_posts_nothing(self, server: RedisServer) -> None:
        topology = Topology("alone", (0, 1), "s1").shrunk([1])
        for drained in (topology, topology.settled()):
            info = RecoveryInfo(drained, (), Told({}), {})
            assert open_redis_index(context_of(ShardState(1, drained.home), recovery_info=info), server.url) is None

    @pytest.mark.parametrize(
        "text", [b"", b"[]", b"7", b'["0"]', b"[true]", b"[" * 100_000, b"\xff", b"[-1]", b"[4294967296]"]
    )
    def test_what_are_no_successors_is_refused(self, text: bytes) -> None:
        with pytest.raises(CorruptDataError, match="expected the successors of a shard"):
            read_successors(text)

    @pytest.mark.parametrize("shard", [b"", b"x", b"-1", b"4294967296", b"9" * 5000, b"\xff"])
    def test_what_is_no_number_of_a_shard_is_refused(self, shard: bytes) -> None:
        with pytest.raises(CorruptDataError, match="expected the number of a shard"):
            read_gone({shard: b"[0]"})

    @pytest.mark.parametrize("table", [{1: [1]}, {1: [0, 2], 2: [3], 3: [1, 4]}], ids=str)
    def test_successors_in_a_circle_are_refused(self, server: RedisServer, table: dict[int, list[int]]) -> None:
        with (
            redis_served(server, [(header(ModelRef("m", 1)), BODY)]) as reader,
            server.client() as client,
        ):
            client.hset("tensorvine:repo:s1:gone", mapping={s: json.dumps(heirs) for s, heirs in table.items()})
            with pytest.raises(CorruptDataError, match="found a cycle: "):
                reader.posted(ModelRef("m", 1))
