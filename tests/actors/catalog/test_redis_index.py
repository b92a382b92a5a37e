"""What the catalog posts in Redis: on a real server that is killed, wiped, and started again."""

from __future__ import annotations

import json
import logging
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorvine.actors import Repository
from tensorvine.actors.catalog import redis_index
from tensorvine.actors.edge.reader import Newest, RedisReader
from tensorvine.actors.rpc import redis_connection
from tensorvine.actors.rpc.redis_connection import RedisConnection, enter_start, present_start, where_is
from tensorvine.actors.rpc.redis_keys import Address, Keys, manifest_text, read_manifest
from tensorvine.store import ModelRef
from tensorvine.store.errors import (
    CodecUnavailableError,
    CorruptDataError,
    ModelNotFoundError,
    RepositoryNotFoundError,
    StorageError,
)
from tensorvine.store.versions.manifest import TensorEntry, encode_body

from tests.support.redis_posts import BODY, ENTRIES, GRAPHS, PLACES, Posts, all_keys, graph_of, header, newest, posted
from tests.support.redis_server import PASSWORD, RedisServer
from tests.support.waiting import PATIENCE_S, eventually


class TestTexts:
    def test_a_manifest_reads_back_as_it_was_written(self) -> None:
        ref = ModelRef("m", 3)
        found = read_manifest(manifest_text(header(ref), BODY, PLACES), ref)
        own = TensorEntry("float32", (2, 3), 24, ref, (0, (1 << 60) + 7), 0)
        assert found.entries == {**ENTRIES, "w": own}
        assert (found.header, found.places) == (header(ref), PLACES)

    @pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"ref": "m@3", "home": "x", "graph_key": "", "table": {}}'])
    def test_what_is_no_manifest_is_refused_with_its_reference(self, text: bytes) -> None:
        with pytest.raises(CorruptDataError, match="m@3"):
            read_manifest(text, ModelRef("m", 3))

    @pytest.mark.parametrize(
        "entry",
        [
            TensorEntry("float32", (1 << 40, 1 << 40), 24, None, (0, 1), 0),
            TensorEntry("float32", (-2, -3), 24, None, (0, 1), 0),
            TensorEntry("float32", (2, 3), 1 << 62, None, (0, 1), 0),
            TensorEntry("object", (3,), 24, None, (0, 1), 0),
            TensorEntry("float32", (2, 3), 24, None, (0, 1), 1 << 30),
            TensorEntry("float32", (2, 3), 24, None, (0, -1), 0),
        ],
        ids=str,
    )
    def test_a_tensor_that_cannot_be_is_refused(self, entry: TensorEntry) -> None:
        text = manifest_text(header(ModelRef("m", 3)), encode_body({"w": entry}), {})
        with pytest.raises(CorruptDataError, match=r"m@3.*tensor 'w'"):
            read_manifest(text, ModelRef("m", 3))

    @pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b'{"ref": "m@3", "quality": 1e999}'])
    def test_hostile_text_is_refused(self, text: bytes) -> None:
        with pytest.raises(CorruptDataError, match="m@3"):
            read_manifest(text, ModelRef("m", 3))

    def test_another_versions_manifest_is_refused(self) -> None:
        with pytest.raises(CorruptDataError, match="of m@3; found that of m@2"):
            read_manifest(manifest_text(header(ModelRef("m", 2)), BODY, PLACES), ModelRef("m", 3))

    @pytest.mark.parametrize("text", ["", "[]", '{"host": "h", "port": "x", "token": "t"}'])
    def test_what_is_no_address_is_refused(self, text: str) -> None:
        with pytest.raises(CorruptDataError, match="address of a shard"):
            Address.from_json(text)

    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            ("redis://h", "redis://h:6379/0"),
            ("rediss://user:pw@h:1/2", "rediss://h:1/2"),
            ("redis://:pw@[::1]:5", "redis://::1:5/0"),
            ("unix://user:pw@/run/r.sock?db=1", "unix:///run/r.sock"),
        ],
    )
    def test_messages_show_a_server_without_credentials(self, url: str, shown: str) -> None:
        assert where_is(url, "x") == shown

    @pytest.mark.parametrize(
        "url",
        [
            "",
            "localhost:6379",
            "http://user:hidden@h",
            "redis://",
            "redis://h:port",
            "redis://:hid/den@h:1",
            "redis://:hid?den@h:1",
            "redis://h/db",
            "unix://",
            "redis://h:99999",
            6379,
        ],
    )
    def test_what_is_no_url_of_redis_is_refused_without_being_shown(self, url: Any) -> None:
        with pytest.raises(ValueError, match=r"me: redis: expected a URL such as 'redis://host:6379/0'") as caught:
            RedisConnection(url, "me")
        assert "hid" not in str(caught.value)

    @pytest.mark.parametrize("option", ["no_such_option=1", "socket_timeout=soon"])
    def test_an_option_that_there_is_not_is_refused(self, option: str) -> None:
        with pytest.raises(ValueError, match="me: redis: expected options"):
            RedisConnection(f"redis://h?{option}", "me")


class TestPosting:
    def test_a_version_stands_there_with_manifest_architecture_number_and_address(
        self, server: RedisServer, one: Posts
    ) -> None:
        one.index.shard_at(0, ("10.0.0.1", 77, "token"))
        one.announce(header(ModelRef("m", 1)))
        eventually(lambda: newest(server) == {"m": "1"}, "the version's number")
        fields = posted(server, "m")[1]
        assert fields["quality"] == 0.5
        assert json.loads(fields["metadata"]) == {"epoch": 3}
        assert fields["table"]["name"] == ["w", "überbiß"]
        with server.client() as client:
            assert client.get("tensorvine:repo:start") == "s1"
            assert client.hgetall("tensorvine:repo:s1:graphs") == {(b"k" * 16).hex(): graph_of(b"k" * 16)}
            assert json.loads(client.hget("tensorvine:repo:s1:shards", 0)) == {
                "host": "10.0.0.1",
                "port": 77,
                "token": "token",
            }

    def test_a_message_comes_after_what_it_tells_of(self, server: RedisServer, one: Posts) -> None:
        with server.client() as client, client.pubsub(ignore_subscribe_messages=True) as heard:
            heard.subscribe("tensorvine:repo:updates:m")
            heard.get_message(timeout=PATIENCE_S)
            for version in range(1, 50):
                one.announce(header(ModelRef("m", version)))
                message = heard.get_message(timeout=PATIENCE_S)
                while message is None:
                    message = heard.get_message(timeout=PATIENCE_S)
                told = int(message["data"])
                assert told in posted(server, "m")
                assert int(newest(server)["m"]) >= told

    def test_a_retired_version_goes_and_its_architecture_with_the_last_that_has_it(
        self, server: RedisServer, one: Posts
    ) -> None:
        first, second, other = ModelRef("m", 1), ModelRef("m", 2), ModelRef("m", 3)
        one.announce(header(first), header(second), header(other, b"l" * 16))
        one.retired(other)
        eventually(lambda: newest(server) == {"m": "2"}, "the number before")
        with server.client() as client:
            assert set(client.hkeys("tensorvine:repo:s1:graphs")) == {(b"k" * 16).hex()}
        one.retired(first)
        one.retired(second)
        eventually(lambda: all_keys(server) == {"tensorvine:repo:start"}, "nothing is left")

    def test_a_version_that_retires_while_it_is_posted_leaves_nothing(
        self, server: RedisServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        def gone(_: bytes) -> str:
            made.retired(ModelRef("m", 1))
            raise ModelNotFoundError("its last version was retired")

        made = Posts(server, graph=gone)
        made.announce(header(ModelRef("m", 1)))
        eventually(lambda: not made.live and not made.index._pending, "the retirement is seen")
        made.close()
        assert all_keys(server) == {"tensorvine:repo:start"}
        assert caplog.text == ""

    def test_more_versions_than_one_transaction_takes_all_come(self, server: RedisServer, one: Posts) -> None:
        one.announce(*(header(ModelRef("m", version)) for version in range(1, 201)))
        eventually(lambda: newest(server) == {"m": "200"}, "the last number")
        assert set(posted(server, "m")) == set(range(1, 201))

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.lists(
            st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(sorted(GRAPHS)), st.booleans(), st.booleans()),
            max_size=30,
        )
    )
    def test_whatever_is_saved_and_retired_redis_has_what_lives(
        self, server: RedisServer, changes: list[tuple[str, bytes, bool, bool]]
    ) -> None:
        with server.client() as client:
            client.flushall()
        made = Posts(server)
        live: dict[ModelRef, bytes] = {}
        last = {"a": 0, "b": 0}

        def in_line() -> bool:
            found = {ModelRef(name, version) for name in ("a", "b", "end") for version in posted(server, name)}
            with server.client() as client:
                graphs = set(client.hkeys("tensorvine:repo:s1:graphs"))
            tops = {name: str(max(r.version for r in live if r.name == name)) for name in {r.name for r in live}}
            return found == set(live) and newest(server) == tops and graphs == {key.hex() for key in live.values()}

        try:
            for name, key, retires, cut in changes:
                mine = [ref for ref in live if ref.name == name]
                if retires and mine:
                    made.retired(mine[0])
                    del live[mine[0]]
                else:
                    last[name] += 1
                    ref = ModelRef(name, last[name])
                    made.announce(header(ref, key))
                    live[ref] = key
                if cut:
                    with server.client() as client:
                        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            made.announce(header(ModelRef("end", 1)))
            live[ModelRef("end", 1)] = b"k" * 16
            eventually(in_line, f"{live}")
        finally:
            made.close()


class TestTrouble:
    @pytest.mark.parametrize("wipe", [False, True], ids=["with its data", "without its data"])
    def test_what_was_missed_is_posted_when_redis_is_back(
        self, server: RedisServer, one: Posts, caplog: pytest.LogCaptureFixture, wipe: bool
    ) -> None:
        one.index.shard_at(0, ("h", 1, "t"))
        one.announce(*(header(ModelRef(*ref)) for ref in (("m", 1), ("m", 2), ("n", 1))))
        eventually(lambda: newest(server) == {"m": "2", "n": "1"}, "all numbers")
        with caplog.at_level(logging.WARNING):
            server.kill(wipe)
            one.announce(header(ModelRef("m", 3), b"l" * 16))
            one.retired(ModelRef("m", 1))
            one.retired(ModelRef("n", 1))
            eventually(lambda: "get no updates until Redis answers" in caplog.text, "the log says that it is gone")
            server.start()
            eventually(lambda: newest(server) == {"m": "3"}, "the difference")
            eventually(lambda: "answers again" in caplog.text, "the log says that it is back")
        assert set(posted(server, "m")) == {2, 3}
        assert posted(server, "n") == {}
        with server.client() as client:
            assert set(client.hkeys("tensorvine:repo:s1:graphs")) == {key.hex() for key in GRAPHS}
            assert client.hkeys("tensorvine:repo:s1:shards") == ["0"]
        gone, back = caplog.text.count("get no updates until Redis answers"), caplog.text.count("answers again")
        assert gone == back >= 1, caplog.text

    def test_data_that_were_lost_between_two_commits_come_back_by_themselves(
        self, server: RedisServer, one: Posts
    ) -> None:
        one.announce(header(ModelRef("m", 1)))
        eventually(lambda: newest(server) == {"m": "1"}, "the number")
        server.kill(wipe=True)
        server.start()
        eventually(lambda: newest(server) == {"m": "1"}, "the number again, without a commit")

    def test_a_server_that_hangs_is_as_one_that_is_gone(
        self, server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(redis_connection, "TIMEOUT_S", 0.2)
        made = Posts(server)
        made.announce(header(ModelRef("m", 1)))
        eventually(lambda: newest(server) == {"m": "1"}, "the number")
        server.hang()
        made.announce(header(ModelRef("m", 2)))
        eventually(lambda: "get no updates until Redis answers" in caplog.text, "the log says that it is gone")
        server.go_on()
        eventually(lambda: newest(server) == {"m": "2"}, "the number after it")
        eventually(lambda: "answers again" in caplog.text, "the log says that it is back")
        made.close()

    def test_a_connection_that_was_cut_is_no_trouble(
        self, server: RedisServer, one: Posts, caplog: pytest.LogCaptureFixture
    ) -> None:
        for version in range(1, 20):
            one.announce(header(ModelRef("m", version)))
            with server.client() as client:
                client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        eventually(lambda: newest(server) == {"m": "19"}, "the last number")
        assert set(posted(server, "m")) == set(range(1, 20))

    def test_a_catalog_that_starts_again_takes_down_what_is_lost_and_posts_what_was_missed(
        self, server: RedisServer
    ) -> None:
        made = Posts(server)
        made.announce(*(header(ModelRef(name, 1)) for name in ("lost", "kept")))
        eventually(lambda: len(newest(server)) == 2, "all numbers")
        made.close()
        again = Posts(server, versions=(header(ModelRef("kept", 1)), header(ModelRef("missed", 1), b"l" * 16)))
        eventually(lambda: set(newest(server)) == {"kept", "missed"}, "what is live")
        with server.client() as client:
            assert set(client.hkeys("tensorvine:repo:s1:graphs")) == {key.hex() for key in GRAPHS}
        assert posted(server, "lost") == {}
        again.close()

    def test_a_shard_that_has_left_is_asked_no_more(self, server: RedisServer, one: Posts) -> None:
        for shard in (0, 1):
            one.index.shard_at(shard, ("h", 1 + shard, "t"))
        one.announce(header(ModelRef("m", 1)))
        eventually(lambda: newest(server) == {"m": "1"}, "the version")
        with RedisConnection(server.url, "test") as link:
            reader = RedisReader(link, "repo")
            places = reader.posted(ModelRef("m", 1))[1]
            assert (places.holders((0, 5)), places.holders((0, (1 << 60) + 7))) == ([0, 1], [0, 1])
            one.index.shard_at(1, None)
            eventually(lambda: set(reader.posted(ModelRef("m", 1))[1].addresses) == {0}, "its address to go")
            one.index.shard_at(2, ("h", 3, "t"))
            eventually(lambda: reader.posted(ModelRef("m", 1))[1].holders((0, (1 << 60) + 7)) == [2, 0], "the third")

    def test_a_new_start_replaces_what_the_one_before_left(self, server: RedisServer) -> None:
        old = Posts(server, start="s0")
        old.index.shard_at(0, ("h", 1, "t"))
        old.announce(header(ModelRef("m", 7)))
        eventually(lambda: "tensorvine:repo:s0:newest" in all_keys(server), "the old start")
        old.close()
        others = {"tensorvine:repo/a:s0:newest", "tensorvine:repo:s00:newest", "tensorvine:other:start"}
        with server.client() as client:
            client.mset(dict.fromkeys(others, "x"))
            client.hset("tensorvine:repo:s0:graphs", "6b", "{}")
        enter_start(server.url, "repo", "s1")
        assert all_keys(server) == {"tensorvine:repo:start", *others}
        assert present_start(server.url, "repo") == "s1"
        assert present_start(server.url, "none") is None

    def test_a_server_that_refuses_is_named_and_its_password_is_not(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with RedisServer(tmp_path, password=True) as server:
            enter_start(server.url, "repo", "s1")
            with server.client() as client:
                client.config_set("requirepass", "another")
            with pytest.raises(StorageError, match=f"Redis at {server.where}") as caught:
                enter_start(server.url, "repo", "s1")
            made = Posts(server)
            eventually(lambda: "Redis at" in caplog.text, "a line in the log")
            made.close()
        for text in (str(caught.value), caplog.text):
            assert PASSWORD not in text
            assert "cret" not in text


class TestReading:
    def test_a_reader_follows_a_new_start_at_once(self, server: RedisServer) -> None:
        link = RedisConnection(server.url, "test")
        reader = RedisReader(link, "repo")
        with pytest.raises(RepositoryNotFoundError, match="'repo'"):
            reader.newest("m")
        for start, version in (("s0", 5), ("s1", 2)):
            enter_start(server.url, "repo", start)
            made = Posts(server, start=start)
            made.announce(header(ModelRef("m", version)))
            eventually(lambda start=start, version=version: reader.newest("m") == Newest(start, version), start)
            made.close()
        with pytest.raises(ModelNotFoundError, match="m@5"):
            reader.posted(ModelRef("m", 5))
        found, places = reader.posted(ModelRef("m", 2))
        assert (places.addresses, places.segments) == ({}, PLACES)
        assert reader.graph(found) == GRAPHS[b"k" * 16]
        link.close()

    def test_names_of_keys_cannot_meet(self) -> None:
        keys = Keys("a/b").of("s")
        assert len({keys.newest, keys.shards, keys.model("newest"), keys.model("x"), keys.graphs}) == 5


class TestStarting:
    @pytest.mark.parametrize("url", ["http://h", "redis://h:port", "redis://h/none"])
    def test_a_wrong_url_is_refused_at_the_start(self, cluster: object, url: str) -> None:
        with pytest.raises(ValueError, match=r"Repository.start: redis: expected a URL"):
            Repository.start("redis-wrong", shards=1, redis=url)

    def test_a_server_that_does_not_answer_is_refused_at_the_start(self, cluster: object, server: RedisServer) -> None:
        server.kill()
        with pytest.raises(StorageError, match=f"Redis at {server.where}"):
            Repository.start("redis-none", shards=1, preallocate_bytes=0, redis=server.url)

    def test_without_the_package_the_start_says_what_to_install(
        self, cluster: object, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "redis", None)
        with pytest.raises(CodecUnavailableError, match=r"pip install '\.\[redis\]'"):
            Repository.start("redis-missing", shards=1, redis="redis://localhost")

    def test_who_joins_a_repository_must_name_its_redis(self, cluster: object, server: RedisServer) -> None:
        name = f"redis-join-{uuid.uuid4().hex[:6]}"
        with (
            Repository.start(name, shards=1, preallocate_bytes=0),
            pytest.raises(ValueError, match=f"{name!r} is already running, and does not use the Redis server"),
        ):
            Repository.start(name, redis=server.url)
        with (
            Repository.start(name, shards=1, preallocate_bytes=0, redis=server.url),
            Repository.start(name, redis=server.url) as joined,
        ):
            assert joined.models() == []


class TestComparing:
    """Redis has something else than what is live, and no connection ended."""

    @pytest.fixture(autouse=True)
    def _soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(redis_index, "PING_S", 0.02)

    def test_lost_keys_are_posted_again_at_once_after_an_interval_or_when_a_consumer_asks(
        self, server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ref, keys = ModelRef("m", 3), Keys("repo").of("s1")
        index = Posts(server)
        with server.client() as client, RedisConnection(server.url, "test") as connection:
            index.announce(header(ref))
            eventually(lambda: posted(server, "m").keys() == {3}, "it is posted")
            client.flushall()
            eventually(lambda: posted(server, "m").keys() == {3}, "it is posted again")
            client.delete(keys.model("m"))
            RedisReader(connection, "repo").ask()
            eventually(lambda: posted(server, "m").keys() == {3}, "it is posted again when asked")
            monkeypatch.setattr(redis_index, "COMPARE_S", 0.05)
            client.delete(keys.newest)
            eventually(lambda: newest(server) == {"m": "3"}, "it is posted again after a while")
        index.close()

    def test_a_start_that_is_another_one_s_is_left_as_it_is(
        self, server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(redis_index, "COMPARE_S", 0.02)
        index = Posts(server)
        key = Keys("repo").start
        with server.client() as client:
            eventually(lambda: client.get(key) == "s1", "it is entered")
            client.set(key, "another")
            asked = client.info("commandstats")["cmdstat_get"]["calls"]
            eventually(
                lambda: client.info("commandstats")["cmdstat_get"]["calls"] > asked + 20, "it was looked at ten times"
            )
            assert client.get(key) == "another"
        index.close()

    @pytest.mark.parametrize("what", ["name", "version", "graph"])
    def test_foreign_fields_are_named_once_and_all_is_posted_when_they_are_gone(
        self, server: RedisServer, what: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        ref, keys = ModelRef("m", 3), Keys("repo").of("s1")
        key, field = {
            "name": (keys.newest, b"\x1b\nm"),
            "version": (keys.model("m"), b"x\n"),
            "graph": (keys.graphs, b"\xff\n"),
        }[what]
        with server.client() as client:
            client.hset(key, field, "1")
            client.hset(keys.newest, "m", "1")
            index = Posts(server)
            index.announce(header(ref))
            eventually(lambda: key in caplog.text, "it is named")
            client.hdel(key, field)
            eventually(lambda: posted(server, "m").keys() == {3}, "it is posted")
        index.close()
        lines = [line for line in caplog.messages if key in line]
        assert len(lines) == 1
        assert lines[0].isprintable()
