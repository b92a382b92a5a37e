"""The catalogue of the baseline: architectures in Redis, and longest-common-prefix queries over them.

It follows EvoStore, section 5.2 (Redis-Queries): one value per architecture, a list of the published ones, reference
counts, a reader-writer lock over the metadata and a lock per architecture.

Rules
- Where the paper leaves something open, it is done as is fastest for the baseline: a value holds one hash per layer
  with all that it depends on, as the repository has them, so that a query is one message and a set per architecture.
- Locks are taken by Lua scripts, in one message each, and expire: who was killed holding one does not stop all others
  for ever. What it had registered or referred to stays; the baseline has nobody who would know.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tensorvine.store import ModelGraph
from tensorvine.store.errors import OperationTimeoutError

LOCK = "nas:lock"
PUBLISHED, GRAPHS, REFERENCES, MODELS, SERIAL = (
    f"nas:{kind}" for kind in ("published", "graphs", "references", "models", "serial")
)
EXPIRY_S = 20.0
PATIENCE_S = 60.0
RETRY_S = 0.0005

_READ = """
if redis.call('exists', KEYS[1] .. ':writer') == 1 then return 0 end
redis.call('zadd', KEYS[1] .. ':readers', ARGV[2] + ARGV[3], ARGV[1])
return 1
"""
_WRITE = """
redis.call('zremrangebyscore', KEYS[1] .. ':readers', '-inf', ARGV[2])
if redis.call('zcard', KEYS[1] .. ':readers') > 0 then return 0 end
if redis.call('set', KEYS[1] .. ':writer', ARGV[1], 'NX', 'PX', ARGV[3] * 1000) then return 1 end
return 0
"""
_WRITTEN = """
if redis.call('get', KEYS[1] .. ':writer') == ARGV[1] then redis.call('del', KEYS[1] .. ':writer') end
"""


@dataclass(frozen=True, slots=True)
class Found:
    """The best ancestor of a query; it is referred to until `Catalogue.release`."""

    key: str
    """Of the architecture: the fingerprint of its graph, in hexadecimal."""
    name: str
    """Of the model whose weights are stored for it."""
    graph: ModelGraph


class Catalogue:
    """A client of the catalogue.

    Args:
        url: of the Redis server.
    """

    def __init__(self, url: str) -> None:
        import redis

        self._redis: Any = redis.Redis.from_url(url, decode_responses=True)
        self._read, self._write, self._written = map(self._redis.register_script, (_READ, _WRITE, _WRITTEN))

    def close(self) -> None:
        """Disconnect."""
        self._redis.close()

    def register(self, key: str, name: str) -> bool:
        """Add a reference to an architecture for a model.

        Returns:
            Whether it is new: then its weights are to be written, and `publish` called.
        """
        with self._writing():
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.setnx(f"{LOCK}:{key}", name).hincrby(REFERENCES, key, 1).hset(MODELS, name, key)
            return bool(pipeline.execute()[0])

    def publish(self, key: str, name: str, graph: ModelGraph, quality: float) -> None:
        """Let queries find an architecture, as its weights are there."""
        prints = [fingerprint.hex() for fingerprint in graph.fingerprints.values()]
        value = json.dumps([quality, self._redis.incr(SERIAL), prints], separators=(",", ":"))
        with self._writing():
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.hset(PUBLISHED, key, value).hset(GRAPHS, key, json.dumps([name, graph.to_json()])).execute()

    def query(self, graph: ModelGraph) -> Found | None:
        """Find the architecture with the longest common prefix and refer to it; ties: the better, then the newer."""
        wanted = list(graph.fingerprints.values())
        best: tuple[int, float, int, str] | None = None
        with self._reading():
            for key, value in self._redis.hgetall(PUBLISHED).items():
                quality, serial, prints = json.loads(value)
                known = set(prints)
                length = sum(fingerprint.hex() in known for fingerprint in wanted)
                if length and (best is None or (length, quality, serial) > best[:3]):
                    best = (length, quality, serial, key)
            if best is None:
                return None
            key = best[3]
            name, text = json.loads(self._redis.hget(GRAPHS, key))
            self._redis.hincrby(REFERENCES, key, 1)
        return Found(key, name, ModelGraph.from_json(text))

    def release(self, key: str) -> bool:
        """Drop a reference.

        Returns:
            Whether it was the last: the architecture is not found any more, its weights are to be deleted, and then
            `forget` called.
        """
        with self._writing():
            if self._redis.hincrby(REFERENCES, key, -1) > 0:
                return False
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.hdel(REFERENCES, key).hdel(PUBLISHED, key).hdel(GRAPHS, key).execute()
            return True

    def forget(self, key: str) -> None:
        """Let the architecture be registered anew."""
        self._redis.delete(f"{LOCK}:{key}")

    def withdraw(self, name: str) -> str | None:
        """Take a model's name away and give the architecture that it refers to; None: there is no such model."""
        pipeline = self._redis.pipeline()
        key, _ = pipeline.hget(MODELS, name).hdel(MODELS, name).execute()
        return key

    def models(self, prefix: str) -> list[str]:
        """List the names of models that begin with `prefix`."""
        return sorted(name for name in self._redis.hkeys(MODELS) if name.startswith(prefix))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        token = self._take(self._read, "read")
        try:
            yield
        finally:
            self._redis.zrem(f"{LOCK}:readers", token)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        token = self._take(self._write, "write")
        try:
            yield
        finally:
            self._written(keys=[LOCK], args=[token])

    def _take(self, script: Any, what: str) -> str:
        token, deadline = uuid.uuid4().hex, time.monotonic() + PATIENCE_S
        while not script(keys=[LOCK], args=[token, time.time(), EXPIRY_S]):
            if time.monotonic() > deadline:
                raise OperationTimeoutError(
                    f"catalogue: expected the {what} lock within {PATIENCE_S:g} s; found it held"
                )
            threading.Event().wait(RETRY_S)
        return token
