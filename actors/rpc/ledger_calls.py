"""What the shards of a repository ask of its planner, which has the ledger of all versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...store.refs import ModelRef
from ...store.versions.ledger import Fact, Told
from .calls import remote
from .messages import RecoveryInfo


class LedgerCalls:
    """Calls of shards to their planner."""

    @remote("ctl")
    def note(self, news: Mapping[ModelRef, Fact]) -> None:
        """Take what a shard committed or retired, also while it is not known yet how things stand."""
        ...

    @remote("ctl")
    def merge(self, told: Told) -> None:
        """Take what a shard found on its disk, or with its replicas."""
        ...

    @remote("ctl")
    def arrives(self, shard: int, names: Sequence[str], former: int, restarts: int) -> None:
        """Learn that a shard is about to have names in the change that is under way.

        Args:
            shard: the one that takes them; it answers for them once it has heard that this was noted.
            names: the names.
            former: the shard that handed them over.
            restarts: how often that had started again by then.

        Raises:
            MovedError: it has started again since, and may answer for them.
        """
        ...

    @remote("ctl")
    def recovery_info(self, shard: int) -> RecoveryInfo:
        """Tell a shard that starts again how things stand; what lived there counts as lost from now on."""
        ...
