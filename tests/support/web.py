"""A running server of the web page, for tests that look at it from outside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.types import ASGIApp
from tensorvine.actors import Repository
from tensorvine.clusters.web.access import Access
from tensorvine.clusters.web.app import Web
from tensorvine.clusters.web.server import Server, listening
from tensorvine.clusters.web.source import Source

from tests.support.waiting import eventually

TOKEN = "a-token-of-the-tests"  # noqa: S105
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@dataclass(frozen=True)
class Served:
    """A server."""

    url: str
    port: int


def web_of(repository: Repository, *, allow_changes: bool = False, port: int = 80) -> Web:
    """Return the web page of a repository, which connects by itself."""
    source = Source(repository.engine, repository.name)
    return Web(source, Access.of(TOKEN, ["testserver"], port), allow_changes)


@contextmanager
def served(repository: Repository, *, allow_changes: bool = False, wrap: object = None) -> Iterator[Served]:
    """Serve the web page of a repository in a thread; `wrap` makes another application of it."""
    with listening("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        web = web_of(repository, allow_changes=allow_changes, port=port)
        application: ASGIApp = web.application()
        with serving(Server(wrap(application) if callable(wrap) else application, web.end), listener):
            yield Served(f"http://127.0.0.1:{port}", port)


@contextmanager
def serving(running: Server, listener: object) -> Iterator[None]:
    """Run a server in a thread."""
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, name="web")
    thread.start()
    try:
        eventually(lambda: running.started or not thread.is_alive(), "the server starts")
        yield
    finally:
        running.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
