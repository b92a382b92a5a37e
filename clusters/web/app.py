"""The application: pages, their JSON twins, events, metrics and changes.

Rules
- Calls to the repository run in threads, so a slow answer does not block other viewers.
- A `TensorVineError` becomes JSON with the key "error" and a status of `STATUS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from importlib import metadata
from pathlib import Path
from typing import cast

from cachetools import LRUCache
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ...actors.client.repository import Repository
from ...store.errors import (
    InvalidNameError,
    ModelLostError,
    ModelNotFoundError,
    OperationTimeoutError,
    OptionError,
    StorageError,
    TensorVineError,
)
from ...store.refs import ModelRef, check_name
from ..metrics import CONTENT_TYPE, collect
from . import changes, openapi, pages
from .access import Access, Gate
from .compare import compare
from .events import Broadcast
from .jsontext import dumps
from .lineage import Forest, window
from .now import TICK_S, Now
from .source import Source
from .version import version
from .versions import Versions, rows, search

STATIC = Path(__file__).parent / "static"
COMPARED = 16
"""Comparisons that are kept: versions never change."""
MOST_ROWS = 1000
MOST_BODY = 1 << 16
"""Bytes of a change that are read."""
SEND_S = 30.0
"""Seconds after which a viewer that reads nothing is disconnected."""
REST_S = 10.0
"""Seconds between two checks for an idle connection to the repository."""
STATUS: dict[type[TensorVineError], int] = {
    ModelNotFoundError: 404,
    ModelLostError: 410,
    InvalidNameError: 400,
    OptionError: 400,
    StorageError: 409,
    OperationTimeoutError: 504,
}
"""HTTP status of errors. The status of all other errors is 503."""

Handler = Callable[[Request], Awaitable[Response]]


class Web:
    """Answers the requests of all viewers of one repository.

    Args:
        source: the connection to the repository.
        access: the rules of access.
        allow_changes: whether versions can be retired, and the number of shards changed.
    """

    def __init__(self, source: Source, access: Access, allow_changes: bool = False) -> None:
        self._source = source
        self._access = access
        self._changes = allow_changes
        self._versions = Versions()
        self._now = Now(source, self._versions)
        self._events = Broadcast(lambda: dumps(self._now.snapshot()).decode(), TICK_S)
        self._forest: tuple[int, Forest] = (-1, Forest({}))
        self._compared: LRUCache[tuple[ModelRef, ModelRef], dict[str, object]] = LRUCache(COMPARED)
        self._comparing = asyncio.Semaphore(1)

    def end(self) -> None:
        """End the events of all viewers, so that the server can stop."""
        self._events.end()

    def application(self) -> Starlette:
        """Return the ASGI application."""
        answers: dict[str, Handler] = {
            "/api/now": self._asked(lambda _: self._now.snapshot()),
            "/api/events": self._stream,
            "/api/compare": self._compare,
            "/api/version": self._asked(self._version),
            "/api/versions": self._asked(self._search),
            "/api/lineage": self._asked(self._lineage),
            "/api/changes": self._asked(self._changeable),
            "/api/retire": self._change(changes.retire),
            "/api/scale": self._change(changes.scale),
        }
        known = {one.path: one for one in openapi.OPERATIONS}
        routes: list[Route | Mount] = [
            Route(path, answer, methods=[known[path].method]) for path, answer in answers.items()
        ]
        routes.append(
            Route("/api/openapi.json", self._asked(lambda _: openapi.described(metadata.version("tensorvine"))))
        )
        routes += [Route("/" if name == "now" else f"/{name}", self._page(name)) for name in pages.PAGES]
        routes.append(Mount("/static", StaticFiles(directory=STATIC)))
        routes.append(Route("/metrics", self._metrics))
        return Starlette(
            routes=routes,
            middleware=[Middleware(Gate, access=self._access), Middleware(GZipMiddleware, minimum_size=2048)],
            exception_handlers={TensorVineError: _failed},  # pyright: ignore[reportArgumentType]
            lifespan=self._living,
        )

    @contextlib.asynccontextmanager
    async def _living(self, _: Starlette) -> AsyncGenerator[None]:
        resting = asyncio.create_task(self._rest())
        try:
            yield
        finally:
            resting.cancel()
            await self._events.close()
            self._now.close()
            self._source.forget()

    async def _rest(self) -> None:
        while True:
            await asyncio.sleep(REST_S)
            await run_in_threadpool(self._source.rest)

    # ---- pages and events -----------------------------------------------------------------------------

    def _page(self, name: str) -> Handler:
        async def answer(_: Request) -> Response:
            return HTMLResponse(pages.page(name, self._source.name, self._changes))

        return answer

    async def _stream(self, _: Request) -> Response:
        async def events() -> AsyncGenerator[dict[str, str]]:
            async with contextlib.aclosing(self._events.texts()) as texts:
                async for text in texts:
                    yield {"event": "now", "data": text}

        return EventSourceResponse(events(), send_timeout=SEND_S, ping=15)

    async def _metrics(self, _: Request) -> Response:
        return Response(await run_in_threadpool(self._source.ask, collect), headers={"content-type": CONTENT_TYPE})

    # ---- facts ----------------------------------------------------------------------------------------

    def _asked(self, ask: Callable[[Request], object]) -> Handler:
        """Make a handler that answers with JSON, from a thread."""

        async def answer(request: Request) -> Response:
            return _json(await run_in_threadpool(lambda: dumps(ask(request))))

        return answer

    def _version(self, request: Request) -> object:
        facts = self._now.snapshot()
        consumers, trainings = (
            cast("list[dict[str, object]]", facts.get(key, [])) for key in ("consumers", "trainings")
        )
        brief = request.query_params.get("brief") == "1"

        def ask(repo: Repository) -> object:
            forest, _ = self._grown(repo)
            return version(repo, forest, _ref(repo, request, "ref"), consumers, trainings, brief)

        return self._source.ask(ask)

    async def _compare(self, request: Request) -> Response:
        def ask(repo: Repository) -> bytes:
            a, b = _ref(repo, request, "a"), _ref(repo, request, "b")
            if (a, b) not in self._compared:
                self._compared[a, b] = compare(repo, a, b)
            return dumps(self._compared[a, b])

        async with self._comparing:  # one at a time: it reads all bytes of two versions
            return _json(await run_in_threadpool(self._source.ask, ask))

    def _search(self, request: Request) -> object:
        infos = self._source.ask(self._versions.listing).infos.values()
        given = request.query_params
        limit = min(_number(given.get("limit", "50"), "limit"), MOST_ROWS)
        found, count = search(infos, given.get("q", ""), given.get("parent", ""), limit)
        return {"versions": rows(found), "count": count}

    def _lineage(self, request: Request) -> object:
        def ask(repo: Repository) -> object:
            forest, count = self._grown(repo)
            focus = _ref(repo, request, "ref") if request.query_params.get("ref") else None
            line = repo.lineage(focus) if focus is not None else []
            nodes = window(forest, focus, line, frozenset(request.query_params.getlist("open")))
            return {"focus": focus, "count": count, "nodes": nodes}

        return self._source.ask(ask)

    def _grown(self, repository: Repository) -> tuple[Forest, int]:
        """Return all live versions by their parents, and how many there are."""
        listing = self._versions.listing(repository)
        serial, forest = self._forest
        if serial != listing.serial:
            forest = Forest.of(listing.infos)
            self._forest = listing.serial, forest
        return forest, len(listing.infos)

    # ---- changes --------------------------------------------------------------------------------------

    def _changeable(self, request: Request) -> object:
        def ask(repo: Repository) -> object:
            ref = _ref(repo, request, "ref") if request.query_params.get("ref") else None
            going = changes.goes(repo, ref, self._now.consumers()) if ref is not None else None
            return {"allowed": self._changes, "shards": repo.shards, "retire": going}

        return self._source.ask(ask)

    def _change(self, make: Callable[[Repository, dict[str, object]], object]) -> Handler:
        async def answer(request: Request) -> Response:
            if not self._changes:
                return _refused(403, "changes are not allowed: start the server with --allow-changes")
            if not self._access.may_change(request):
                return _refused(403, "expected a request from a page of this server, or with a Bearer token")
            if request.headers.get("content-type", "").partition(";")[0] != "application/json":
                return _refused(415, "expected JSON")
            body = b""
            async for part in request.stream():
                body += part
                if len(body) > MOST_BODY:
                    return _refused(413, f"expected at most {MOST_BODY} bytes")
            try:
                given = json.loads(body)
            except (ValueError, RecursionError):
                return _refused(400, "expected JSON")
            if not isinstance(given, dict):
                return _refused(400, "expected a JSON object")
            asked = cast("dict[str, object]", given)
            return _json(await run_in_threadpool(lambda: dumps(self._source.ask(lambda repo: make(repo, asked)))))

        return answer


def _ref(repository: Repository, request: Request, name: str) -> ModelRef:
    given = request.query_params.get(name, "")
    return ModelRef.parse(given) if "@" in given else repository.info(check_name(given)).ref


def _number(text: str, name: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise OptionError(f"{name}: expected a number of at least 0; found {text!r:.40}")
    return int(text)


def _json(text: bytes, status: int = 200) -> Response:
    return Response(text, status, media_type="application/json")


def _refused(status: int, why: str) -> Response:
    return _json(dumps({"error": why}), status)


async def _failed(_: Request, error: Exception) -> Response:
    status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), 503)
    return _refused(status, " ".join(str(error).split()))
