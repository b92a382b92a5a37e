"""Noting on the path what number a version gets, before it exists (`store.archive.numbers`).

Rules
- A commit waits for the disk here, but not for one that hangs or fails: it was not promised to be on disk. That is
  logged once.
- A thread of its own appends: those that read and write tensors may all be busy.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from concurrent.futures import Future

from ....store.archive.directory import Directory
from ....store.archive.numbers import Numbers
from ....store.errors import StorageError
from ....store.refs import ModelRef
from ...memory.workers import Workers

log = logging.getLogger(__name__)

NUMBER_S = 1.0
"""How long a commit waits for a disk that was fast enough before."""


class Numbering:
    """The log of one incarnation of a shard.

    Args:
        index: the shard's number.
        directory: the repository's.
    """

    def __init__(self, index: int, directory: Directory) -> None:
        self._index = index
        self._numbers = Numbers(directory, f"{index}-{uuid.uuid4().hex[:8]}")
        self._workers = Workers(1, thread_name_prefix="tensorvine-numbers")
        self._appends = True
        self._late: Future[bool] | None = None
        """What the disk did not take in time."""
        self._said: set[str] = set()

    async def add(self, ref: ModelRef) -> None:
        """Note a version that is about to exist."""
        if not self._appends:
            return
        hangs = self._late is not None and not self._late.done()
        future = self._workers.submit(self._numbers.add, ref)
        if hangs:
            return
        adding = asyncio.ensure_future(asyncio.wrap_future(future))
        try:
            self._appends = await asyncio.wait_for(asyncio.shield(adding), NUMBER_S)
        except TimeoutError:
            self._late = future
            adding.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._say(f"writing took longer than {NUMBER_S} s")
        except StorageError as exc:
            self._say(str(exc))
        else:
            if not self._appends:
                self._say("the file system cannot append to files")

    def done(self, ref: ModelRef) -> None:
        """Know that a version has a manifest."""
        self._numbers.done(ref)

    def _say(self, why: str) -> None:
        """Log why a number is not on the path, once."""
        if why not in self._said:
            self._said.add(why)
            log.warning(
                "shard %d: if the whole cluster dies, numbers of versions that are not on disk yet may be used again: "
                "%s",
                self._index,
                why,
            )
