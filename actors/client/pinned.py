"""A version that a client has pinned by its name."""

from __future__ import annotations

from types import TracebackType

from ...store.holders import Lease
from ...store.refs import ModelRef
from ..shard.calls import ShardCalls
from .session import Session


class Pinned:
    """A pin on a version, until `release`, the end of a `with` block, or soon after this is garbage.

    Args:
        session: the client's.
        ref: the version.

    Raises:
        ModelNotFoundError, ModelLostError: there is no such live version.
    """

    def __init__(self, session: Session, ref: ModelRef) -> None:
        self.ref = ref
        self._pins = session.pins
        session.keep_alive()
        query, asked = self._pins.query()
        self._lease = Lease(query, session.home(ref.name))
        try:
            session.at_home(ref.name, ShardCalls.pin(self._lease, ref))
            self._owned = self._pins.own(self, self._lease)
            self._pins.hold(self._lease, ref)
        except BaseException:
            asked.abort()
            raise
        asked.kept()

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
