"""What a consumer outside the cluster reads in Redis.

Rules
- All of an answer belongs to one start of the repository: its id is read in the same transaction.
- Versions of a repository that was started anew are new, whatever their numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from ...store.errors import CorruptDataError, ModelNotFoundError, RepositoryNotFoundError, StorageError
from ...store.graphs.graph import ModelGraph
from ...store.refs import ModelRef
from ...store.segments.segment import SegmentId
from ..rpc.redis_connection import Command, RedisConnection, Subscription
from ..rpc.redis_keys import Address, Keys, Posted, StartKeys, read_manifest

ASKED_S = 3600
"""How long a question stands in Redis."""
GRAPHS = 16
"""Architectures that are kept."""


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest version of a name."""

    start: str
    """Id of the repository's start that it belongs to."""
    version: int
    """0: there is none."""

    def is_news(self, last: Newest | None) -> bool:
        """Tell whether this is a version that came after `last`.

        >>> Newest("a", 3).is_news(Newest("a", 2)), Newest("b", 1).is_news(Newest("a", 2)), Newest("a", 0).is_news(None)
        (True, True, False)
        """
        return self.version > (last.version if last is not None and last.start == self.start else 0)


@dataclass(frozen=True, slots=True)
class Places:
    """Where the shards of a repository are."""

    addresses: Mapping[int, Address]
    segments: Mapping[SegmentId, int]
    """Segment -> the shard that had it when the version was posted."""

    def holders(self, segment: SegmentId) -> list[int]:
        """Return the shards to ask for a segment, the likely one first: it may have moved since."""
        likely = self.segments.get(segment, -1)
        return sorted(self.addresses, key=lambda shard: (shard != likely, shard))


class RedisReader:
    """Reads what the catalog of one repository posted. Safe between threads.

    Args:
        redis: to the Redis server.
        repository: its name.
    """

    def __init__(self, redis: RedisConnection, repository: str) -> None:
        self._redis = redis
        self._keys = Keys(repository)
        self._start = ""
        self._graphs: dict[str, ModelGraph] = {}

    def newest(self, name: str) -> Newest:
        """Return the newest version of `name`.

        Raises:
            RepositoryNotFoundError: no repository of this name ever started.
            StorageError: Redis does not answer.
        """
        start, (version,) = self._read(lambda keys: [("HGET", keys.newest, name)])
        return Newest(start, _number(version or 0, f"Redis at {self._redis.where}: newest version of {name!r}"))

    def posted(self, ref: ModelRef) -> tuple[Posted, Places]:
        """Return a version's manifest, and where the shards are.

        Raises:
            ModelNotFoundError: there is no such live version.
            RepositoryNotFoundError, StorageError: as in `newest`.
        """
        _, (text, shards) = self._read(
            lambda keys: [("HGET", keys.model(ref.name), ref.version), ("HGETALL", keys.shards)]
        )
        if text is None:
            raise ModelNotFoundError(f"Redis at {self._redis.where}: expected the live version {ref}; found none")
        where = f"Redis at {self._redis.where}: shard"
        addresses = {_number(shard, where): Address.from_json(at) for shard, at in shards.items()}
        posted = read_manifest(text, ref)
        return posted, Places(addresses, posted.places)

    def graph(self, posted: Posted) -> ModelGraph:
        """Return a version's architecture; errors as in `posted`."""
        key = posted.header.graph_key.hex()
        graph = self._graphs.get(key)
        if graph is None:
            _, (text,) = self._read(lambda keys: [("HGET", keys.graphs, key)])
            if text is None:
                ref = posted.header.ref
                raise ModelNotFoundError(f"Redis at {self._redis.where}: expected the graph of {ref}; it was retired")
            if len(self._graphs) >= GRAPHS:
                self._graphs.clear()
            graph = self._graphs[key] = ModelGraph.from_json(text)
        return graph

    @property
    def is_known(self) -> bool:
        """Whether the repository was found at least once."""
        return bool(self._start)

    def ask(self) -> None:
        """Ask the catalog to compare what it posted; for one that may only read, it does nothing."""
        with contextlib.suppress(StorageError):
            self._redis.run([("INCR", self._keys.question), ("EXPIRE", self._keys.question, ASKED_S)])

    def updates(self, name: str) -> Subscription:
        """Hear of new versions of `name`; errors as of `RedisConnection.subscribe`."""
        return self._redis.subscribe(self._keys.updates(name))

    def _read(self, commands: Callable[[StartKeys], list[Command]]) -> tuple[str, list[Any]]:
        """Run commands on the keys of the present start, and give its id and their answers."""
        guess = self._start
        while True:
            found, *answers = self._redis.run([("GET", self._keys.start), *commands(self._keys.of(guess))])
            if found is None:
                raise RepositoryNotFoundError(
                    f"Redis at {self._redis.where}: expected a repository named {self._keys.repository!r}; found none"
                )
            start = cast(str, self._redis.start_of(self._keys, found))
            if start == guess:
                return guess, answers
            self._start = guess = start


def _number(value: object, what: str) -> int:
    try:
        return int(cast(Any, value))
    except ValueError as exc:
        raise CorruptDataError(f"{what}: expected a number; found {value!r}") from exc
