"""What the planner of a repository can be asked, declared for those who ask and for the planner."""

from __future__ import annotations

from collections.abc import Mapping

from ...store.counting import Counted
from ..rpc.calls import remote
from .counting import PlannerStats
from .resizing import ScaleReport
from .streams import Advice, Delivered, Observed, TrainingStatus


class PlannerCalls:
    """All calls of a planner."""

    @remote("ctl")
    def reserve(self, places: Mapping[int, str]) -> dict[int, int]:
        """Reserve memory for the shards of the start.

        Args:
            places: the shards, and the node of each.

        Returns:
            Bytes that each may fill.

        Raises:
            StoreFullError: a node has not so much left.
        """
        ...

    @remote("watch")
    def scale(self, shards: int | None, timeout: float) -> ScaleReport:
        """Change the number of shards; see `Repository.scale`."""
        ...

    @remote("watch")
    def rest(self, started_by: str, timeout: float) -> None:
        """Let no change of the shards begin any more, and wait until the one that is under way has ended.

        Another start than `started_by` goes on as it was.

        Raises:
            OperationTimeoutError: the change takes longer.
        """
        ...

    @remote("ctl")
    def observed(self, name: str, told: Observed) -> Advice:
        """Take what a training observed; give the newest plan for it."""
        ...

    @remote("ctl")
    def delivered(self, name: str, told: Delivered) -> str:
        """Take what a consumer measured; give the way that its node should use next."""
        ...

    @remote("ctl", repeatable=True)
    def turn(self, name: str, consumer: str, most: int) -> bool:
        """Begin or renew a consumer's turn to update. False: `most` other consumers of the model have one."""
        ...

    @remote("ctl", repeatable=True)
    def turn_ended(self, name: str, consumer: str) -> None:
        """End a consumer's turn to update."""
        ...

    @remote("ctl")
    def streams(self) -> dict[str, TrainingStatus]:
        """Return what is known of each model that is published: its losses, curve, costs and schedule."""
        ...

    @remote("ctl", repeatable=True)
    def counted(self, client: str, serial: int, counted: Counted, gauges: Mapping[str, float] | None) -> None:
        """Add the counts of a client since its last report; see `ClientCounts.report`."""
        ...

    @remote("ctl", repeatable=True)
    def stats(self) -> PlannerStats:
        """Return the statistics of the planner and of all clients."""
        ...
