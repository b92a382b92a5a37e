"""Access rights of viewers: host names, token, cookie, and the origin of changes.

Rules
- The `Host` header must name an accepted host: another site cannot reach the server under a name of its own.
- A viewer sends the token once, in the address or the form, and receives a cookie. Programs send it as `Bearer`.
- A change also needs the same origin. Only the headers that browsers set themselves are trusted.
- Every answer has a Content-Security-Policy that forbids foreign scripts, styles and frames.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...store.errors import OptionError
from . import pages
from .jsontext import dumps

log = logging.getLogger(__name__)

LEAST_TOKEN = 16
"""Characters of a token that a user chooses."""
MOST_FORM = 4096
"""Bytes of a form that is read."""
LOG_S = 60.0
"""Refused tokens are logged no more often."""
COOKIE_DAYS = 7
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; worker-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Access:
    """The token, the hosts under which the server answers, and its port, which names the cookie."""

    token: str
    hosts: frozenset[str]
    port: int

    @classmethod
    def of(cls, token: str | None, hosts: Collection[str], port: int) -> Access:
        """Make the rules of a server.

        Args:
            token: chosen by the user. None draws one.
            hosts: names and addresses, in addition to loopback.
            port: of the server.

        Raises:
            OptionError: if the token is too short.

        >>> Access.of(None, ["gpu-1"], 8765).accepts("GPU-1:8765"), Access.of(None, [], 80).accepts("evil.example")
        (True, False)
        """
        drawn = secrets.token_hex(24) if token is None else token
        if len(drawn) < LEAST_TOKEN or not drawn.isascii() or not drawn.isprintable() or " " in drawn:
            raise OptionError(
                f"token of the web page: expected at least {LEAST_TOKEN} printable ASCII characters without spaces; "
                f"found {len(drawn)} characters"
            )
        return cls(drawn, frozenset({"localhost", *(host.lower() for host in hosts)}), port)

    @property
    def cookie(self) -> str:
        """Name of the cookie: browsers share cookies between the ports of a host."""
        return f"tensorvine-{self.port}"

    @property
    def secret(self) -> str:
        """Value of the cookie. The token cannot be computed from it."""
        return hmac.new(self.token.encode(), b"tensorvine web cookie", hashlib.sha256).hexdigest()

    def accepts(self, host: str) -> bool:
        """Return whether a `Host` header names this server."""
        name = _hostname(host)
        if name in self.hosts or host.lower() in self.hosts:
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False

    def knows(self, request: Request) -> bool:
        """Return whether a request shows the cookie or the token."""
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.is_token(shown.strip())
        return _same(request.cookies.get(self.cookie, ""), self.secret)

    def is_token(self, shown: str) -> bool:
        """Compare with the token, in constant time."""
        return _same(shown, self.token)

    def may_change(self, request: Request) -> bool:
        """Return whether a change comes from a page of this server, or from a program that shows the token."""
        if request.headers.get("authorization"):
            return self.knows(request)
        site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
        if origin is None or site not in (None, "same-origin"):
            return False
        netloc = urlsplit(origin).netloc
        return netloc.lower() in {request.headers.get("host", "").lower(), *(self.hosts - {"localhost"})}


class Gate:
    """Middleware that checks the host and the token of each request and adds the headers that protect the pages.

    Args:
        app: the protected application.
        access: the rules.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access
        self._logged = -LOG_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        request = Request(scope, receive)
        answer = await self._refused(request, path_of(scope))
        await (answer or self._app)(scope, receive, protected)

    async def _refused(self, request: Request, path: str) -> Response | None:
        """Return the answer to a request that goes no further, or None."""
        access = self._access
        if not access.accepts(request.headers.get("host", "")):
            return Response("Unknown host. Start the server with --hostname to accept it.\n", 421)
        if path.startswith("/static/"):
            return None
        if path == "/login" and request.method == "POST":
            return await self._login(request)
        shown = request.query_params.get("token")
        if shown is not None and request.method == "GET":
            return self._swapped(request, path) if access.is_token(shown) else self._unknown(path)
        return None if access.knows(request) else self._unknown(path, wrong=False)

    async def _login(self, request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MOST_FORM:
                return Response("The form is too large.\n", 413)
        shown = parse_qs(body.decode("latin-1")).get("token", [""])[0]
        return self._with_cookie(request, "./") if self._access.is_token(shown) else self._unknown("/")

    def _swapped(self, request: Request, path: str) -> Response:
        """Lead to the same page without the token, by an address that no prefix of a proxy changes."""
        left = [(key, value) for key, value in parse_qsl(request.url.query) if key != "token"]
        place = path.rpartition("/")[2] or "./"
        return self._with_cookie(request, f"{place}?{urlencode(left)}" if left else place)

    def _with_cookie(self, request: Request, place: str) -> Response:
        answer = RedirectResponse(place, 303)
        secure = request.headers.get("x-forwarded-proto", request.url.scheme) == "https"
        answer.set_cookie(
            self._access.cookie,
            self._access.secret,
            max_age=COOKIE_DAYS * 86_400,
            httponly=True,
            samesite="strict",
            secure=secure,
        )
        return answer

    def _unknown(self, path: str, *, wrong: bool = True) -> Response:
        if wrong and time.monotonic() - self._logged >= LOG_S:
            self._logged = time.monotonic()
            log.warning("web page: refused a wrong token")
        if path.startswith(("/api/", "/metrics")):
            error = {"error": "expected the token, as cookie or as `Authorization: Bearer TOKEN`"}
            return Response(dumps(error), 401, {"WWW-Authenticate": "Bearer"}, "application/json")
        return Response(pages.login(wrong), 401, media_type="text/html")


def path_of(scope: Scope) -> str:
    """Return the path below the prefix under which the application is mounted."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) or "/"


def _hostname(netloc: str) -> str:
    try:
        return (urlsplit(f"//{netloc}").hostname or "").lower()
    except ValueError:
        return ""


def _same(shown: str, known: str) -> bool:
    return hmac.compare_digest(shown.encode("utf-8", "surrogatepass"), known.encode())
