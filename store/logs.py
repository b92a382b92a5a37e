"""Log lines: their fields, and their form in the processes of actors.

Rules
- All loggers are below `tensorvine`. In a user's program, the program's own handlers write them. In the process of an
  actor, one handler writes them to standard error (`to_stderr`): the engine keeps this as the actor's log.
- A record is one line, with its time in UTC and its level. Fields that are known stand before the message: repository,
  actor, call and version. A traceback follows in indented lines.
- Text may hold names from files and from other users: each character that does not print is escaped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Coroutine, Sequence
from contextvars import ContextVar
from typing import TypeVar

from .errors import shown
from .refs import ModelRef

ROOT = "tensorvine"
FIELDS = ("repository", "actor", "call", "version")
_R = TypeVar("_R")
_call: ContextVar[tuple[str, Sequence[object]] | None] = ContextVar("tensorvine-call", default=None)
"""The call that this task or thread carries out: its name and arguments."""


async def calling(name: str, arguments: Sequence[object], work: Coroutine[object, None, _R]) -> _R:
    """Carry out a call. Its log records have the fields `call` and `version`."""
    _call.set((name, arguments))
    return await work


class Fields(logging.Filter):
    """Adds the fields of TensorVine to log records, for handlers of an actor's process.

    Args:
        actor: name of the actor, such as "default/shard-0".

    >>> record = logging.makeLogRecord({"msg": "full"})
    >>> Fields("default/shard-0").filter(record), record.repository, record.actor
    (True, 'default', 'shard-0')
    """

    def __init__(self, actor: str) -> None:
        super().__init__()
        self._repository, _, self._actor = actor.rpartition("/")

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields, and accept the record."""
        name, arguments = _call.get() or ("", ())
        record.repository, record.actor = self._repository, self._actor
        record.call, record.version = name, _version_in(arguments)
        return True


class OneLine(logging.Formatter):
    """Writes a record in one line, and its traceback in lines below it.

    >>> record = {"name": "tensorvine.x", "msg": "a\\nb", "levelname": "ERROR", "created": 0.5}
    >>> OneLine().format(logging.makeLogRecord(record))
    '1970-01-01T00:00:00.500Z ERROR tensorvine.x: a\\\\nb'
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        known = [f"{field}={shown(value)}" for field in FIELDS if (value := getattr(record, field, ""))]
        head = " ".join([f"{when}.{int(record.created % 1 * 1000):03d}Z", record.levelname, *known, record.name])
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        return "\n".join([f"{head}: {shown(record.getMessage())}", *(f"    {shown(it)}" for it in trace.splitlines())])


def to_stderr(actor: str) -> None:
    """Write the records of an actor's process to standard error, unless a handler writes them already.

    Args:
        actor: name of the actor, such as "default/shard-0".
    """
    logger = logging.getLogger(ROOT)
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(OneLine())
    handler.addFilter(Fields(actor))
    logger.addHandler(handler)


def _version_in(arguments: Sequence[object]) -> str:
    """Return the version, or else the name of the model, that a call's arguments name first."""
    for argument in arguments:
        if isinstance(argument, ModelRef):
            return str(argument)
        if isinstance(name := getattr(argument, "name", None), str):
            return name
    return ""
