"""`tensorvine web`: the web page of a repository."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ...store.errors import CodecUnavailableError, OptionError, RepositoryNotFoundError
from ...store.lazy import to_install
from ..client import Address, Name, Scheduler, joined, running_at, say_error

PORT = 8765
TOKEN = "TENSORVINE_WEB_TOKEN"  # noqa: S105  the name of a variable
LOOPBACK = "127.0.0.1"


def web(
    port: Annotated[int, typer.Option(help="Port. 0 chooses a free port.", min=0, max=65535)] = PORT,
    token: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN|@FILE",
            help=f"Token that viewers need: at least 16 characters, or the file that contains it. Use the file or the "
            f"variable {TOKEN}, because other users of the machine can see the arguments. Without it: a random token.",
            show_default=False,
        ),
    ] = None,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Let viewers retire versions and change the number of shards.")
    ] = False,
    host: Annotated[
        str, typer.Option(help="Address to listen at. Others than the default are open to the network.")
    ] = LOOPBACK,
    hostname: Annotated[
        list[str] | None,
        typer.Option(help="Further name under which browsers reach the page, such as that of a proxy. Repeatable."),
    ] = None,
    name: Name = None,
    address: Address = None,
    scheduler: Scheduler = None,
) -> None:
    """Serve a web page that shows a repository until Ctrl-C is pressed, and print its address.

    The page shows shards, training runs, consumers and versions, compares two versions tensor by tensor, and draws the
    lineage. It needs the extra `web`. It survives restarts of the repository.
    """
    try:
        from ..web.access import Access
        from ..web.app import Web
        from ..web.server import listening, serve
        from ..web.source import Source
    except ImportError as exc:
        raise CodecUnavailableError(
            f"web: expected Starlette, uvicorn and sse-starlette; found {exc}: {to_install('web')}"
        ) from exc
    given = _token(token)
    place = running_at(address, scheduler)
    with listening(host, port) as listener, joined(place) as engine:
        port = listener.getsockname()[1]
        access = Access.of(given, [host, *(hostname or ())], port)
        source = Source(engine, name)
        try:
            source.ask(lambda repository: repository.name)
        except RepositoryNotFoundError as exc:
            say_error(f"{exc}; the page waits for it")
        where = f"[{host}]" if ":" in host else host
        shown = f"?token={access.token}" if given is None else ""
        typer.echo(f"http://{where}:{port}/{shown}")
        serve(Web(source, access, allow_changes), listener)


def _token(given: str | None) -> str | None:
    """Return the token of the option, of its file, or of the environment."""
    text = given if given is not None else os.environ.get(TOKEN)
    if text is None or not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text().strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise OptionError(f"--token: expected a file with a token; cannot read {text[1:]}: {exc}") from exc
