"""The connection to a Redis server by a Unix socket, and which servers of this repository have a port."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tensorvine.actors.rpc.redis_connection import (
    RedisConnection,
    enter_start,
    posted_shards,
    present_start,
    where_is,
)
from tensorvine.actors.rpc.redis_keys import Keys
from tensorvine.store.errors import CorruptDataError, StorageError

from benchmarks.core.redis import RedisServer as BenchmarkServer
from examples.edge_consumer.server import Server as ExampleServer
from tests.support.other_user import as_other_user, needs_root
from tests.support.redis_server import PASSWORD, RedisServer

ROOT = Path(__file__).parents[3]
STARTERS = ("benchmarks/core/redis.py", "examples/edge_consumer/server.py", "tests/support/redis_server.py")
"""Every file that starts a Redis with a Unix socket alone."""
ON_PORTS = ("tests/hosts/test_head.py", "tests/hosts/test_neighbours.py")
"""Every file that starts one with a port: in a network of its own, which no other machine reaches."""


@pytest.mark.parametrize(
    "make",
    [
        lambda _: ExampleServer(),
        lambda _: BenchmarkServer(),
        RedisServer,
        lambda folder: RedisServer(folder, password=True),
    ],
    ids=["examples", "benchmarks", "tests", "tests-password"],
)
class TestServers:
    def test_none_listens_on_a_port_and_only_its_user_enters_its_folder(
        self, make: Callable[[Path], AbstractContextManager[Any]], tmp_path: Path
    ) -> None:
        with make(tmp_path) as server:
            process = psutil.Process(server._process.pid)
            assert process.net_connections("inet") == []
            (path,) = {Path(one.laddr) for one in process.net_connections("unix") if one.laddr}
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
            assert path.stat().st_uid == os.geteuid()

    @needs_root
    def test_another_user_does_not_reach_it(
        self, make: Callable[[Path], AbstractContextManager[Any]], tmp_path: Path
    ) -> None:
        with make(tmp_path) as server:
            (path,) = {one.laddr for one in psutil.Process(server._process.pid).net_connections("unix") if one.laddr}
            code = "print(tried(lambda: socket.socket(socket.AF_UNIX).connect(arguments[0])))"
            assert as_other_user(code, str(path)) == "EACCES"


def test_these_are_all_the_servers_that_are_started() -> None:
    folders = ("actors", "benchmarks", "clusters", "examples", "planner", "scripts", "store", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    words = (b"__redis_executable" + b"__", b"redis-" + b"server")
    starters = [path for path in files if path.suffix != ".pyc" and any(word in path.read_bytes() for word in words)]
    assert sorted(path.relative_to(ROOT).as_posix() for path in starters) == sorted(STARTERS + ON_PORTS)


class TestConnection:
    @pytest.mark.parametrize("password", [False, True])
    def test_a_unix_socket_is_a_server_like_others(self, tmp_path: Path, password: bool) -> None:
        with RedisServer(tmp_path, password) as server, RedisConnection(server.url, "test") as connection:
            assert connection.where == f"unix://{server.socket}"
            assert connection.run([("SET", "key", "value"), ("GET", "key")])[1] == b"value"
            heard = connection.subscribe("channel")
            assert heard.heard(60.0)
            connection.run([("PUBLISH", "channel", "")])
            assert heard.heard(60.0)
            heard.close()
            server.kill()
            with pytest.raises(StorageError, match=f"Redis at unix://{server.socket}") as caught:
                connection.run([("GET", "key")])
            assert PASSWORD not in str(caught.value)

    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            ("unix:///run/redis.sock", "unix:///run/redis.sock"),
            ("unix:///run/a%20folder/redis.sock?db=3", "unix:///run/a folder/redis.sock"),
            ("unix://user:hid%2Fden%40%3A@/run/redis.sock", "unix:///run/redis.sock"),
            ("unix://user@/run/redis.sock?password=hidden", "unix:///run/redis.sock"),
        ],
    )
    def test_messages_show_the_socket_only(self, url: str, shown: str) -> None:
        assert where_is(url, "test") == shown

    @pytest.mark.parametrize(
        "url",
        [
            "unix://:hid/den@/run/redis.sock",
            "unix://user:hid/d@en@/run/redis.sock",
            "unix://hid:7/den@/run/redis.sock",
            "unix://user:hid@x/den@/run/redis.sock",
        ],
    )
    def test_a_password_that_is_not_percent_encoded_is_not_shown(self, url: str) -> None:
        with pytest.raises(ValueError, match="test: redis: expected a URL") as caught:
            where_is(url, "test")
        assert "hid" not in str(caught.value)
        assert "den" not in str(caught.value)


class TestForeignValues:
    """What others write under the keys of TensorVine."""

    @pytest.mark.parametrize("value", [b"\xff\xfe", b"", b"*", b"a" * 10_000_000, b"x\r\nFLUSHALL\r\n", b"\x1b[2J"])
    def test_the_id_of_a_start_that_is_none_is_named_and_nothing_is_changed(self, tmp_path: Path, value: bytes) -> None:
        with RedisServer(tmp_path) as server, server.client() as client:
            key = Keys("default").start
            client.set(key, value)
            client.set("tensorvine:default:of-another", "1")
            for call in (
                lambda: present_start(server.url, "default"),
                lambda: enter_start(server.url, "default", "new"),
                lambda: posted_shards(server.url, "default"),
            ):
                with pytest.raises(CorruptDataError, match=f"{server.where}: {key}: expected a value of") as caught:
                    call()
                assert str(caught.value).isprintable()
                assert len(str(caught.value)) < 300
            assert client.strlen(key) == len(value)
            assert client.exists("tensorvine:default:of-another")

    def test_a_value_of_another_type_is_named_by_its_key_alone(self, tmp_path: Path) -> None:
        with RedisServer(tmp_path) as server, server.client() as client:
            key = Keys("default").start
            client.lpush(key, "x")
            for call in (present_start, posted_shards):
                with pytest.raises(CorruptDataError, match=f"{key}: .* found a value of another type: delete the key"):
                    call(server.url, "default")
            with (
                RedisConnection(server.url, "test") as connection,
                pytest.raises(CorruptDataError, match=key) as caught,
            ):
                connection.run([("PING",), ("HSET", key, "0", "a secret token")])
            assert "secret" not in str(caught.value)
            assert caught.value.__suppress_context__
