"""The connection to a Redis server.

Rules
- A client that was cut off connects again by itself at its next command. What was written before may be gone then, so
  the connections are counted: whoever writes looks at `connected`.
- Nothing is tried twice here. What goes wrong leaves as `StorageError` and names the server. A value that TensorVine
  did not write is a `CorruptDataError` that names the key.
- A URL may hold a password: messages show the server only.
- The package `redis` is an extra, imported when a connection is made.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from ...store.errors import CodecUnavailableError, CorruptDataError, StorageError, shown
from ...store.lazy import to_install
from .redis_keys import Address, Keys

if TYPE_CHECKING:
    from redis.client import PubSub
    from redis.connection import AbstractConnection

TIMEOUT_S = 5.0
"""How long Redis may take to connect, and for an answer."""
BATCH = 500
"""Keys in one message."""
SCANNED = 2000
"""Keys of the database that are looked at in one message."""

Command = tuple[str | bytes | int, ...]
_START = re.compile(rb"[\w.-]{1,200}", re.ASCII)
"""The id of a start."""


class RedisConnection:
    """A client of one Redis server. It connects when it is first used.

    Args:
        url: `redis://HOST:PORT/DB`, `rediss://...` or `unix:///PATH`, with user and password where they are needed.
        who: what asks, for messages.

    Raises:
        ValueError: `url` is none.
        CodecUnavailableError: the package `redis` is not installed.
    """

    def __init__(self, url: str, who: str) -> None:
        self.where = where_is(url, who)
        """The server, as messages show it."""
        self.connected = 0
        """Connections that were made for `run`."""
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as exc:
            raise CodecUnavailableError(
                f"{who}: redis: expected the package 'redis'; it is not installed: {to_install('redis')}"
            ) from exc
        self._errors = (redis.RedisError, OSError)
        options = {"retry": Retry(NoBackoff(), 0), "socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}
        try:
            self._client: Any = redis.Redis.from_url(url, redis_connect_func=self._greet, **options)
            self._client.connection_pool.connection_class(**self._client.connection_pool.connection_kwargs)
        except (TypeError, ValueError, redis.RedisError):
            raise ValueError(f"{who}: redis: expected options that Redis clients accept; found others") from None

    def run(self, commands: Sequence[Command]) -> list[Any]:
        """Run commands in one transaction and give their answers; others see all of what they write, or nothing.

        Raises:
            StorageError: the server does not answer, or refuses a command.
            CorruptDataError: a key has a value of another type.
        """
        try:
            with self._client.pipeline(transaction=True) as transaction:
                for command in commands:
                    transaction.execute_command(*command)
                return transaction.execute()
        except self._errors as exc:
            reason = str(exc).rpartition(" of pipeline caused error: ")[
                2
            ]  # before it stands the command, with its values
            if reason.startswith("WRONGTYPE"):
                number = re.match(r"Command # (\d+) ", str(exc))
                key = commands[int(number[1]) - 1][1] if number is not None else "one of its keys"
                raise self.corrupt(key, "a value of another type") from None
            raise self.trouble(reason) from None

    def subscribe(self, channel: str) -> Subscription:
        """Hear what is published on a channel; errors as in `run`."""
        return Subscription(self, self._client.pubsub(ignore_subscribe_messages=False), channel, self._errors)

    def trouble(self, reason: object) -> StorageError:
        """Make the error that says what went wrong with the server."""
        return StorageError(f"Redis at {self.where}: expected an answer; {shown(str(reason))}")

    def corrupt(self, key: object, found: str) -> CorruptDataError:
        """Make the error for a value that TensorVine did not write."""
        return CorruptDataError(
            f"Redis at {self.where}: {shown(str(key))}: expected a value of TensorVine; found {found}: delete the key"
        )

    def start_of(self, keys: Keys, found: bytes | None) -> str | None:
        """Return the id of a start that was read, or None if there is none.

        Raises:
            CorruptDataError: it is no id.
        """
        if found is None:
            return None
        if not _START.fullmatch(found):
            raise self.corrupt(keys.start, f"{found!r:.60}")
        return found.decode()

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def __enter__(self) -> RedisConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _greet(self, connection: AbstractConnection) -> None:
        connection.on_connect()
        self.connected += 1


class Subscription:
    """What is published on one channel, from now on. Not for several threads."""

    def __init__(
        self, connection: RedisConnection, pubsub: PubSub, channel: str, errors: tuple[type[Exception], ...]
    ) -> None:
        self._connection = connection
        self._pubsub = pubsub
        self._errors = errors
        try:
            pubsub.subscribe(channel)
        except errors as exc:
            pubsub.close()
            raise connection.trouble(exc) from exc

    def heard(self, timeout: float) -> bool:
        """Wait for something on the channel, the confirmation of the subscription included; False when nothing came.

        Raises:
            StorageError: the connection broke.
        """
        try:
            return self._pubsub.get_message(timeout=timeout) is not None
        except self._errors as exc:
            raise self._connection.trouble(exc) from exc

    def close(self) -> None:
        """Hear no more."""
        self._pubsub.close()


def where_is(url: str, who: str) -> str:
    """Return a Redis URL as messages may show it: without user, password and options.

    One whose password has a `/`, `?` or `#` that is not percent-encoded is refused: it would end elsewhere.

    Raises:
        ValueError: it is none; the message does not show it, for it may hold a password.

    >>> where_is("redis://user:secret@example.org:6380/2?socket_timeout=3", "doc")
    'redis://example.org:6380/2'
    """
    expected = f"{who}: redis: expected a URL such as 'redis://host:6379/0'"
    if not isinstance(url, str):
        raise ValueError(f"{expected}; found {type(url).__name__}")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(f"{expected}; found an unreadable one") from None
    if parts.scheme == "unix" and parts.path and parts.netloc[-1:] in ("", "@"):  # else a secret goes on in the path
        return f"unix://{unquote(parts.path)}"
    database = parts.path.strip("/")
    if parts.scheme not in ("redis", "rediss") or not host or (database and not database.isdigit()):
        raise ValueError(f"{expected}; found another one, of scheme {parts.scheme!r}")
    return f"{parts.scheme}://{host}:{port or 6379}/{database or 0}"


def enter_start(url: str, repository: str, start: str) -> None:
    """Make a start of a repository the present one, and delete what the one before left.

    Raises:
        ValueError, CodecUnavailableError: as of `RedisConnection`.
        StorageError: the server does not answer, or takes nothing.
        CorruptDataError: the id of a start is none; nothing is changed.
    """
    keys = Keys(repository)
    with RedisConnection(url, "Repository.start") as connection:
        connection.start_of(keys, *connection.run([("GET", keys.start)]))  # else nothing is changed
        found, _ = connection.run([("GET", keys.start), ("SET", keys.start, start)])
        before = connection.start_of(keys, found)
        if before is None or before == start:
            return
        left = f"{keys.of(before).prefix}:*"
        cursor = -1
        while cursor:
            ((cursor, doomed),) = connection.run([("SCAN", max(cursor, 0), "MATCH", left, "COUNT", SCANNED)])
            if doomed:
                connection.run([("DEL", *doomed)])


def present_start(url: str, repository: str) -> str | None:
    """Return the id of the start that Redis knows of a repository; errors as of `enter_start`."""
    with RedisConnection(url, "Repository.start") as connection:
        return connection.start_of(Keys(repository), *connection.run([("GET", Keys(repository).start)]))


def posted_shards(url: str, repository: str) -> list[Address]:
    """Return where shards of a repository's present start are, as they posted it; errors as of `enter_start`.

    Raises:
        CorruptDataError: what stands there is no address.
    """
    keys = Keys(repository)
    with RedisConnection(url, "Repository.start") as connection:
        start = connection.start_of(keys, *connection.run([("GET", keys.start)]))
        if start is None:
            return []
        (found,) = connection.run([("HVALS", keys.of(start).shards)])
    return [Address.from_json(text) for text in found]
