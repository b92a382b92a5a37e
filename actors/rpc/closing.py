"""Closing several things of which none must stay open because another could not be closed."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


def close_all(what: str, *closes: Callable[[], object]) -> None:
    """Call all of them in order, whatever they raise; the first error is raised at the end, the others are logged.

    Args:
        what: names in the log what is closed.
        closes: each closes one thing.

    >>> close_all("doc", lambda: print("one"), lambda: print("two"))
    one
    two
    """
    first: BaseException | None = None
    for close in closes:
        try:
            close()
        except BaseException as exc:  # noqa: BLE001  raised below
            if first is None:
                first = exc
            else:
                log.error("%s: another part could not be closed either: %s", what, exc)
    if first is not None:
        raise first
