"""Errors of our groups as users of `ray.util.collective` expect them.

Rules
- Ray's own back ends raise `RuntimeError`, and `ValueError` for some wrong arguments. So each error here is a
  `CollectiveError`, which is a `RuntimeError`, besides what it is in the tree of `store/errors.py`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from ....store.errors import CollectiveError, OperationTimeoutError, PeerLostError, TensorMismatchError


class CollectiveArgumentError(CollectiveError, ValueError):
    """A rank or an operation that there is not, or too many or too few tensors."""


class CollectiveMismatchError(TensorMismatchError, CollectiveArgumentError):
    """A tensor has another shape, dtype or memory than expected."""


class CollectivePeerLostError(PeerLostError, CollectiveError):
    """A member died or left; the message names it."""


class CollectiveTimeoutError(OperationTimeoutError, CollectiveError):
    """A member did not take part in time; the message names it."""


_KINDS: tuple[tuple[type[Exception], type[CollectiveError]], ...] = (
    (TensorMismatchError, CollectiveMismatchError),
    (PeerLostError, CollectivePeerLostError),
    (OperationTimeoutError, CollectiveTimeoutError),
    (ValueError, CollectiveArgumentError),
)


@contextmanager
def raised_as_rays() -> Generator[None]:
    """Raise the groups' errors as those of this file.

    >>> with raised_as_rays():
    ...     raise PeerLostError("barrier: rank 1 died")
    Traceback (most recent call last):
    ...
    tensorvine.actors.collective.stock.errors.CollectivePeerLostError: barrier: rank 1 died
    """
    try:
        yield
    except CollectiveError:
        raise
    except tuple(kind for kind, _ in _KINDS) as exc:
        raise next(rays for kind, rays in _KINDS if isinstance(exc, kind))(str(exc)) from exc
