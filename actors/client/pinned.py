"""A version that a client has pinned by its name."""

from __future__ import annotations

from types import TracebackType

from ...store.errors import ModelNotFoundError
from ...store.holders import Lease
from ...store.refs import ModelRef
from ..rpc.catalog_calls import CatalogCalls
from .session import Session


class Pinned:
    """A pin on a version, until `release`, the end of a `with` block, or soon after this is garbage.

    Args:
        session: the client's.
        ref: the version.

    Raises:
        ModelNotFoundError: there is no such version, or it was freed.
    """

    def __init__(self, session: Session, ref: ModelRef) -> None:
        self.ref = ref
        self._pins = session.pins
        numbered = session.number()
        self._lease = Lease(numbered.request)
        try:
            refused = session.ask(CatalogCalls.pin({self._lease: ref}))
            if refused:
                raise ModelNotFoundError(refused[self._lease])
            self._owned = self._pins.own(self, self._lease)
            self._pins.hold(self._lease, ref, numbered)
        except BaseException:
            session.give_up(numbered)
            raise

    def release(self) -> None:
        """Unpin the version in the background. A second call does nothing."""
        if self._pins.is_owned(self._owned):
            self._pins.unpin_behind([self._lease])
            self._pins.disown(self._owned)

    def __enter__(self) -> Pinned:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
