"""URIs of file systems: they may hold secrets, and messages name them.

Rules
- Whatever a message, a log or a traceback says of a URI has gone through `without_credentials`. Where it cannot be told
  what is secret, it shows less rather than more.
- A URI that PyArrow would take apart in the middle of a secret is refused before it does: a bucket or a folder that has
  a part of it in its name would be in every error.
"""

from __future__ import annotations

import re

from .errors import StorageError

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_SCHEMES = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*")
"""In front of a chain of URIs, as fsspec has them."""
_SHOWN = re.compile(r"[^:/]*(:\d+)?(/.*)?", re.DOTALL)
"""A host or bucket, perhaps with a port, and a folder: no secret that lost its `@`."""
_OBJECT_STORES = ("s3", "gs", "gcs", "abfs", "abfss")
"""Schemes whose URIs have credentials in front of the bucket, and no ports behind it."""


def is_uri(text: str) -> bool:
    """Tell a URI from a path of this machine.

    >>> is_uri("s3://bucket/a"), is_uri("file:/a"), is_uri("/a://b"), is_uri("C:a")
    (True, True, False, False)
    """
    return not text.startswith("/") and ("://" in text or text.startswith("file:"))


def place_in(uri: str) -> str:
    """Return what a URI says before its options.

    >>> place_in("s3://bucket/a.arrow?region=us-east-1"), place_in("file:///a")
    ('s3://bucket/a.arrow', 'file:///a')
    """
    return _cut(uri, "?#")[0]


def without_credentials(uri: str) -> str:
    """Return a URI, or a path, as messages may show it: without user, password and options.

    >>> without_credentials("s3://key:secret@bucket/prefix?region=us-east-1")
    's3://bucket/prefix'
    >>> without_credentials("s3://key:se/cr@t@bucket/prefix"), without_credentials("s3://key:secret")
    ('s3://bucket/prefix', 's3://...')
    >>> without_credentials("/scratch/models@work?"), without_credentials("fsspec+simplecache::http://user:secret@host")
    ('/scratch/models@work?', 'fsspec+simplecache::http://...')
    """
    found = _URI.fullmatch(uri)
    if found is None or (found[1].startswith("fsspec+") and "::" in found[2]):
        return _without_links(uri)
    scheme, rest = found.groups()
    place, options = _cut(rest, "?#")
    if scheme.lower() == "file":
        return f"{scheme}://{place}"
    before, _, after = place.rpartition("@")
    shown = after if ":" in before or "/" not in before else place
    if not _SHOWN.fullmatch(shown) or (":" in place and "@" in options):
        return f"{scheme}://..."
    return f"{scheme}://{shown}"


def _without_links(text: str) -> str:
    """Return what may be shown of a chain of URIs, which begin anywhere in it, or of what is no URI."""
    schemes, mark, _ = text.partition("://")
    if not mark or not is_uri(text) or text.startswith("file:"):
        return text
    return f"{schemes}://..." if _SCHEMES.fullmatch(schemes) else "..."


def check_credentials(uri: str) -> None:
    """Refuse a URI of an object store that does not say where its secret ends.

    Raises:
        StorageError: a `/`, `@`, `?` or `#` of the secret, or an `@` behind it, is not percent-encoded.

    >>> check_credentials("s3://key:se%2Fcret@bucket/prefix")
    >>> check_credentials("s3://key:se/cret@bucket/prefix")
    Traceback (most recent call last):
    tensorvine.store.errors.StorageError: s3://bucket/prefix: expected the '/', '@', ...
    """
    found = _URI.fullmatch(uri)
    if found is None or found[1].lower() not in _OBJECT_STORES:
        return
    authority, later = _cut(found[2], "/?#")
    user, _, host = authority.rpartition("@")
    if (":" in authority and "@" in later) or "@" in user or ":" in host:
        raise StorageError(
            f"{without_credentials(uri)}: expected the '/', '@', '?' and '#' in a secret, and each '@' after it, to be "
            "percent-encoded ('/' as '%2F', '@' as '%40'); found a URI in which the end of the secret is ambiguous"
        )


def _cut(text: str, marks: str) -> tuple[str, str]:
    """Cut a text in front of the first of some characters.

    >>> _cut("a/b?c", "?/"), _cut("a", "?")
    (('a', '/b?c'), ('a', ''))
    """
    end = min((at for mark in marks if (at := text.find(mark)) >= 0), default=len(text))
    return text[:end], text[end:]
