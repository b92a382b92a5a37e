"""The tree of errors.

Every error derives from `TensorVineError` and from the builtin that a caller would catch for it, so that
`except KeyError` and `except TensorVineError` both work. A message says what was expected, what was found
and where.

    TensorVineError
    ├── ModelNotFoundError(KeyError)           no such name or version, or it was retired
    ├── TensorNotFoundError(KeyError)          the model has no such tensor or layer
    ├── GraphError(ValueError)                 a cycle, a dangling input, layers that do not match
    ├── InvalidNameError(ValueError)           a malformed model name or reference
    ├── TensorMismatchError(ValueError)        another shape, dtype or kind of array than expected
    ├── OptionError(ValueError)                an option of a call that is out of its range
    ├── StoreFullError(MemoryError)            a save that cannot fit in the store
    ├── CorruptDataError(OSError)              stored bytes that are not what was written
    ├── StorageError(OSError)                  a path, file or disk that cannot be used
    ├── CodecError(ValueError)                 codecs that do not fit together, or not with a tensor
    ├── CodecUnavailableError(ImportError)     a codec whose package is not installed
    ├── EngineUnavailableError(ImportError)    Ray or Dask is not installed
    ├── ShardUnavailableError(ConnectionError) a shard died or does not answer
    │   └── EngineStoppedError             the engine, such as Ray, was shut down in this process
    ├── ModelLostError(LookupError)            was held only by a shard that died
    ├── RepositoryNotFoundError(LookupError)   no repository of that name runs
    ├── ForeignRepositoryError(PermissionError) another user's, and not asked for by name
    ├── PeerLostError(ConnectionError)         a member of a collective group died or left
    ├── ForkError(RuntimeError)                a fork of a training did not come about
    ├── ClosedError(RuntimeError)              a client that was closed, or a forked child's copy of one
    ├── MovedError(LookupError)                it is on another shard now; clients repeat it there by themselves
    ├── OperationTimeoutError(TimeoutError)    a wait ended before what it waited for
    └── CollectiveError(RuntimeError)          a call of `ray.util.collective` failed in one of our groups

An error that is kept for later goes through `without_frames` first.
"""

from __future__ import annotations

import traceback
import typing

_Error = typing.TypeVar("_Error", bound=BaseException)


def shown(text: str) -> str:
    """Return a foreign text for a message or a log, with characters that are not printable escaped.

    >>> shown("a name"), shown("a\\nline\\x1b[2J")
    ('a name', 'a\\\\nline\\\\x1b[2J')
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


class TensorVineError(Exception):
    """Base of all errors that TensorVine raises on purpose."""

    def __str__(self) -> str:
        """Return the plain message; KeyError would put it in quotes."""
        return str(self.args[0]) if len(self.args) == 1 else super().__str__()


class ModelNotFoundError(TensorVineError, KeyError):
    """No such model: the name or the version was never saved, or it was retired."""


class TensorNotFoundError(TensorVineError, KeyError):
    """The model has no such tensor or layer."""


class GraphError(TensorVineError, ValueError):
    """A graph is not one: a cycle, a dangling input, a duplicate name, or layers that do not match."""


class InvalidNameError(TensorVineError, ValueError):
    """A model's name or reference is malformed."""


class TensorMismatchError(TensorVineError, ValueError):
    """A tensor has another shape or dtype than expected, or is no array that can be stored."""


class OptionError(TensorVineError, ValueError):
    """An option of a call is out of its range, or of another kind than it takes."""


class StoreFullError(MemoryError, TensorVineError):
    """A save is larger than what the store can hold."""

    __str__ = TensorVineError.__str__


class CorruptDataError(TensorVineError, OSError):
    """Stored bytes are not what was written."""


class StorageError(TensorVineError, OSError):
    """A path, a file or a disk cannot be used: full, no permission, read-only, in use, not a directory."""


Unreadable = CorruptDataError | StorageError
"""Why a file cannot be read: it never can, or not now."""


class CodecError(TensorVineError, ValueError):
    """Codecs do not fit together, or a codec does not fit what it is given."""


class CodecUnavailableError(TensorVineError, ImportError):
    """A codec needs a package that is not installed."""


class EngineUnavailableError(TensorVineError, ImportError):
    """What runs the actors, Ray or Dask, is not installed."""


class ShardUnavailableError(TensorVineError, ConnectionError):
    """A shard died or does not answer; what it was asked to do may or may not have happened."""


class EngineStoppedError(ShardUnavailableError):
    """The engine, such as Ray, was shut down in this process: no call of it can succeed, and none is repeated."""


class ModelLostError(TensorVineError, LookupError):
    """The model was committed, but only a shard that has died held it."""


class RepositoryNotFoundError(TensorVineError, LookupError):
    """No repository of that name runs in this cluster."""


class ForeignRepositoryError(TensorVineError, PermissionError):
    """The repository is another user's, and was not asked for by name; the message says whose, and how to ask."""


class PeerLostError(TensorVineError, ConnectionError):
    """A member of a collective group died or left; the message names it."""


class ForkError(TensorVineError, RuntimeError):
    """A fork of a training did not come about; the message names who failed. The training goes on."""


class ClosedError(TensorVineError, RuntimeError):
    """A repository or another client was used after its `close`, or in a forked child of the process that made it."""


class MovedError(TensorVineError, LookupError):
    """What was asked for is on another shard now, or on its way there. Clients ask there by themselves.

    Args:
        message: what was asked for, and where.
        version: of the topology by which the shard that refused goes.
    """

    def __init__(self, message: str, version: int = 0) -> None:
        super().__init__(message, version)
        self.version = version

    def __str__(self) -> str:
        """Return the plain message."""
        return str(self.args[0])


class OperationTimeoutError(TensorVineError, TimeoutError):
    """A wait ended before what it waited for; the message names who was waited for."""


class CollectiveError(TensorVineError, RuntimeError):
    """A call of `ray.util.collective` failed in one of our groups, or a group of it could not be joined.

    What has a kind above, such as a member that died, is an error of both kinds.
    """


def without_frames(error: _Error) -> _Error:
    """Have an error, and those that led to it, hold nothing of the calls that raised it, and give it back.

    Who keeps an error keeps the variables of these calls. Some are views of a shard's memory, which stays locked as
    long as they live. The traceback still says where it was raised.
    """
    seen: set[int] = set()
    waiting: list[BaseException] = [error]
    while waiting:
        found = waiting.pop()
        if id(found) not in seen:
            seen.add(id(found))
            traceback.clear_frames(found.__traceback__)
            waiting += [e for e in (found.__cause__, found.__context__) if e is not None]
    return error
