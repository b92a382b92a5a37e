"""What clients that come and go ask of a shard."""

from __future__ import annotations

from collections.abc import Sequence

from ....store.holders import Lease
from ...memory.process import ProcessId
from ...rpc.calls import remote
from ...rpc.messages import Hello


class SessionCalls:
    """Answered by `shard.parts.sessions`."""

    @remote("ctl", repeatable=True)
    def hello(self, client: str, node: str, process: ProcessId) -> Hello:
        """Introduce a client; one on this node is watched by its process."""
        ...

    @remote("ctl")
    def goodbye(self, client: str) -> None:
        """End a client's session at once."""
        ...

    @remote("ctl", repeatable=True)
    def end(self) -> None:
        """Answer for no version from now on, and write nothing: the repository is stopped."""
        ...

    @remote("ctl", repeatable=True)
    def renew(self, client: str, leases: Sequence[Lease]) -> list[Lease] | None:
        """Keep a client's session alive; return which of its pins are here, or None if it has no session here."""
        ...
