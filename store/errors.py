"""The errors that TensorVine raises.

Every error derives from `TensorVineError` and from a built-in exception. For example, `except TensorVineError` and
`except KeyError` both catch a `ModelNotFoundError`. The message of an error names the failed operation or the invalid
argument, and states the expected value and the actual value.

    TensorVineError
    ├── ModelNotFoundError(KeyError)            the name or version does not exist, or it was retired
    ├── TensorNotFoundError(KeyError)           the model has no such tensor or layer
    ├── GraphError(ValueError)                  a graph, model or recipe is invalid, or a version does not fit a model
    ├── InvalidNameError(ValueError)            a model name or reference is malformed
    ├── TensorMismatchError(ValueError)         a tensor has an unexpected shape or dtype, or cannot be stored
    ├── OptionError(ValueError)                 an option is invalid or conflicts with the running repository
    ├── StoreFullError(MemoryError)             there is not enough memory for a save, a load or a shard
    ├── CorruptDataError(OSError)               stored bytes are damaged
    ├── StorageError(OSError)                   a path, file or disk cannot be used
    ├── CodecError(ValueError)                  a codec is invalid or does not fit its input
    ├── CodecUnavailableError(ImportError)      an optional package is not installed, such as zstandard
    ├── EngineUnavailableError(ImportError)     Ray or Dask is not installed
    ├── ShardUnavailableError(ConnectionError)  a shard or the planner died or does not answer
    │   └── EngineStoppedError                  the engine (Ray or Dask) was shut down in this process
    ├── ModelLostError(LookupError)             the version existed, but its bytes are lost
    ├── VersionNotServedError(LookupError)      a consumer does not serve the requested version; retry
    ├── RepositoryNotFoundError(LookupError)    no repository with this name is running
    ├── ForeignRepositoryError(PermissionError) the repository belongs to another user; pass its name to use it
    ├── PeerLostError(ConnectionError)          a member of a collective group died or left the group
    ├── ForkError(RuntimeError)                 a fork of a training run failed
    ├── ClosedError(RuntimeError)               a client was closed, or is used in a forked process
    ├── MovedError(LookupError)                 the data has moved to another shard; clients retry automatically
    └── OperationTimeoutError(TimeoutError)     an operation did not finish in time

While a program keeps a reference to an error, the local variables in the error's traceback also stay in memory. To
clear these variables, pass the error to `without_frames`.
"""

from __future__ import annotations

import traceback
import typing

from .removed import removed

if not typing.TYPE_CHECKING:
    __getattr__ = removed(
        __name__, {"CollectiveError": "the errors of groups: PeerLostError, OperationTimeoutError, TensorMismatchError"}
    )
_Error = typing.TypeVar("_Error", bound=BaseException)


def shown(text: str) -> str:
    """Return `text` with its non-printable characters escaped, for an error message or a log.

    >>> shown("a name"), shown("a\\nline\\x1b[2J")
    ('a name', 'a\\\\nline\\\\x1b[2J')
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


class TensorVineError(Exception):
    """Base class of all TensorVine errors."""

    def __str__(self) -> str:
        """Return the message without the quotes that KeyError adds."""
        return str(self.args[0]) if len(self.args) == 1 else super().__str__()


class ModelNotFoundError(TensorVineError, KeyError):
    """Raised if a model name or version does not exist, or was retired."""


class TensorNotFoundError(TensorVineError, KeyError):
    """Raised if a model has no tensor or layer with the given name."""


class GraphError(TensorVineError, ValueError):
    """Raised if a graph, model or recipe is invalid (such as a cyclic graph), or a version does not fit a model."""


class InvalidNameError(TensorVineError, ValueError):
    """Raised if a model name or reference is malformed."""


class TensorMismatchError(TensorVineError, ValueError):
    """Raised if a tensor has an unexpected shape or dtype, or if a value is not an array that can be stored."""


class OptionError(TensorVineError, ValueError):
    """Raised if an option is out of range, has the wrong type, or conflicts with the running repository."""


class StoreFullError(MemoryError, TensorVineError):
    """Raised if there is not enough memory for a save, a load or a shard. The message states which memory is full."""

    __str__ = TensorVineError.__str__


class CorruptDataError(TensorVineError, OSError):
    """Raised if stored bytes are damaged."""


class StorageError(TensorVineError, OSError):
    """Raised if a path, file or disk cannot be used.

    Examples are a full or read-only disk, a missing permission, a path that another repository uses or that is not a
    directory, a Redis server that does not answer, and a file operation on a repository without a path.
    """


Unreadable = CorruptDataError | StorageError
"""The errors raised if a file cannot be read: `CorruptDataError` (permanent) and `StorageError` (can be temporary)."""


class CodecError(TensorVineError, ValueError):
    """Raised if a codec spec is invalid, if codecs cannot be combined, or if a codec does not fit its input."""


class CodecUnavailableError(TensorVineError, ImportError):
    """Raised if an optional package is not installed, such as the package of a codec, a file format or Redis."""


class EngineUnavailableError(TensorVineError, ImportError):
    """Raised if the engine (Ray or Dask) is not installed."""


class ShardUnavailableError(TensorVineError, ConnectionError):
    """Raised if a shard or the planner died or does not answer. A requested change may or may not have been made."""


class EngineStoppedError(ShardUnavailableError):
    """Raised if the engine (Ray or Dask) was shut down in this process. Calls are not retried."""


class ModelLostError(TensorVineError, LookupError):
    """Raised if the bytes of a committed version are lost, for example because the only shard that stored them died."""


class VersionNotServedError(TensorVineError, LookupError):
    """Raised if a consumer serves another version than the request asks for with `at_least` or `exactly`.

    The request was not answered. It can be repeated, at the same consumer or at another one.

    Args:
        message: The error message.
        served: The version that the consumer serves, such as "net@3".
    """

    def __init__(self, message: str, served: str = "") -> None:
        super().__init__(message, served)
        self.served = served

    def __str__(self) -> str:
        """Return the message."""
        return str(self.args[0])


class RepositoryNotFoundError(TensorVineError, LookupError):
    """Raised if no repository with the given name is running in the cluster."""


class ForeignRepositoryError(TensorVineError, PermissionError):
    """Raised if no repository name was given, and the running repository belongs to another user.

    The message names the owner. To use the repository, pass its name.
    """


class PeerLostError(TensorVineError, ConnectionError):
    """Raised if a member of a collective group died or left the group. The message names the member."""


class ForkError(TensorVineError, RuntimeError):
    """Raised if a fork of a training run fails. The message states the cause. The original training run continues."""


class ClosedError(TensorVineError, RuntimeError):
    """Raised if a client, such as a `Repository`, is used after `close` or in a forked child process."""


class MovedError(TensorVineError, LookupError):
    """Raised if the requested data has moved to another shard, or if the called shard is draining.

    Clients retry automatically.

    Args:
        message: The error message.
        version: Version number of the latest topology (set of shards) that is known to the process that raises the
            error. 0 means that the number is unknown.
    """

    def __init__(self, message: str, version: int = 0) -> None:
        super().__init__(message, version)
        self.version = version

    def __str__(self) -> str:
        """Return the message."""
        return str(self.args[0])


class OperationTimeoutError(TensorVineError, TimeoutError):
    """Raised if an operation does not finish in time. The message names the operation or the unresponsive process."""


def without_frames(error: _Error) -> _Error:
    """Clear the local variables in the tracebacks of an error and of its causes, and return the error.

    Otherwise, a stored error would keep the local variables alive. Local variables can be views of a shard's memory,
    which stays locked until the views are freed. The traceback still shows where the error was raised.
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
