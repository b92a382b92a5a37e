"""What clients that connect, stay and leave ask of a shard."""

from __future__ import annotations

from ....store.shard import ShardStats
from ...memory.process import ProcessId
from ...rpc.calls import remote
from ...rpc.catalog_messages import Declared
from ...rpc.messages import Hello


class SessionCalls:
    """Answered by `shard.parts.sessions`."""

    @remote("ctl", repeatable=True)
    def hello(self, client: str, node: str, process: ProcessId) -> Hello:
        """Introduce a client; one on this node is watched by its process."""
        ...

    @remote("ctl", repeatable=True)
    def renew(self, client: str, declared: Declared) -> bool:
        """Keep a client's session, and free what requests that are over have granted or staged.

        Returns:
            False: the shard did not know the session; it does now. Memory of an earlier one is the client's no more,
            unless its process is watched.
        """
        ...

    @remote("ctl", repeatable=True)
    def goodbye(self, client: str) -> None:
        """End a client's session at once."""
        ...

    @remote("ctl", repeatable=True)
    def end(self) -> None:
        """Send no commit and change no file from now on: the repository is stopped."""
        ...

    @remote("ctl", repeatable=True)
    def stats(self) -> ShardStats:
        """Return the shard in figures."""
        ...

    @remote("ctl", repeatable=True)
    def check(self) -> None:
        """Derive all totals anew and compare.

        Raises:
            CorruptDataError: they differ.
        """
        ...
