"""An S3-compatible server for tests: moto's, in a thread, with what it sends counted and what it refuses scripted.

Rules
- A URI that it gives has all that a client needs, credentials included: other processes can use it as it is.
- moto keeps its buckets per process, so each server has a bucket of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, Self

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from pyarrow import fs
from werkzeug.serving import WSGIRequestHandler, make_server

KEY, SECRET = "key", "very-secret"

_serial = count(1)


class S3Server:
    """A server that runs between `with` and its end."""

    sent: int
    """Bytes of bodies sent so far."""
    refuses: Callable[[dict[str, Any]], bool]
    """Asked for each request's WSGI environment; a refused one is answered with 403, which clients do not retry."""

    def __init__(self) -> None:
        self.sent = 0
        self.refuses = lambda _: False
        self.bucket = f"bucket-{next(_serial)}"
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> Self:
        self._thread.start()
        self.system().create_dir(self.bucket)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def uri(self, prefix: str) -> str:
        """Return the URI of a prefix in the bucket."""
        host = f"endpoint_override=http://127.0.0.1:{self._server.port}&scheme=http&region=us-east-1"
        return f"s3://{KEY}:{SECRET}@{self.bucket}/{prefix}?{host}"

    def system(self) -> fs.S3FileSystem:
        """Return the file system that may make buckets."""
        return fs.S3FileSystem(
            access_key=KEY,
            secret_key=SECRET,
            endpoint_override=f"http://127.0.0.1:{self._server.port}",
            region="us-east-1",
            allow_bucket_creation=True,
        )

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if self.refuses(environ):
            start("403 Forbidden", [("Content-Length", "0")])
            return []
        return self._counted(self._app(environ, start))

    def _counted(self, body: Iterable[bytes]) -> Iterator[bytes]:
        for part in body:
            self.sent += len(part)
            yield part


class _Quiet(WSGIRequestHandler):
    """One that does not log each request."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing."""
