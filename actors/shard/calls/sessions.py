"""What clients that come and go ask of a shard."""

from __future__ import annotations

from ...rpc.actor_calls import ActorCalls
from ...rpc.calls import remote
from ...rpc.messages import Hello


class SessionCalls(ActorCalls):
    """Answered by `shard.parts.sessions`."""

    @remote("ctl", by_socket=False, repeatable=True)
    def hello(self, client: str, node: str, pid: int) -> Hello:
        """Introduce a client; one on this node is watched by its process."""
        ...

    @remote("ctl")
    def goodbye(self, client: str) -> None:
        """End a client's session at once."""
        ...

    @remote("ctl", by_socket=False, repeatable=True)
    def end(self) -> None:
        """Answer for no version from now on, and write nothing: the repository is stopped."""
        ...

    @remote("ctl", repeatable=True)
    def renew(self, client: str) -> bool:
        """Keep a client's session alive."""
        ...
