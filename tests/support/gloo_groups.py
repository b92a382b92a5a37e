"""Groups over Gloo, for tests: all their members are threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any

from tensorvine.actors.collective.gloo.backend import GlooBackend, GlooGroup
from tensorvine.store.errors import TensorVineError

HOST = "127.0.0.1"
_serial = count()


def join(size: int, name: str = "", epoch: int = 0, timeout: float = 20.0, order: list[int] | None = None) -> Any:
    """Join as threads of this process; `order` says which rank comes first, second, ..."""
    backend = GlooBackend(HOST)
    offers = [backend.offer() for _ in range(size)]
    endpoints = [offer.endpoint for offer in offers]
    name = name or f"test-{next(_serial)}"
    with ThreadPoolExecutor(size) as pool:
        joined = [
            pool.submit(
                backend.join,
                offers[rank],
                name,
                epoch=epoch,
                rank=rank,
                size=size,
                endpoints=endpoints,
                timeout=timeout,
            )
            for rank in order or range(size)
        ]
    return sorted((future.result() for future in joined), key=lambda group: group.rank)


@contextmanager
def groups(size: int, **options: Any) -> Iterator[list[GlooGroup]]:
    joined = join(size, **options)
    try:
        yield joined
    finally:
        for group in joined:
            group.close()


def each(members: list[GlooGroup], act: Callable[[GlooGroup], Any]) -> list[Any]:
    """Let all members act at once; an error of ours is its result."""

    def run(group: GlooGroup) -> Any:
        try:
            return act(group)
        except TensorVineError as exc:
            return exc

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(run, members))
