"""A shard's senders by groups, one for each back end.

Rules
- There is none before somebody asks for one: a back end may load libraries and open devices.
- The shard's lock guards them; call all methods with it held.
"""

from __future__ import annotations

import time

from ....store.errors import ShardUnavailableError
from ...collective.rendezvous import LocalRendezvous
from ...rpc.messages import ShardConfig
from ...transport.pair_sender import PairSender
from .block_server import BlockServer


class Senders:
    """The senders of one shard.

    Args:
        config: the shard's.
        block_server: finds what they send, if the shard has one.
        rendezvous: where readers and the shard meet.
    """

    def __init__(self, config: ShardConfig, block_server: BlockServer | None, rendezvous: LocalRendezvous) -> None:
        self._config = config
        self._block_server = block_server
        self._rendezvous = rendezvous
        self._senders: dict[str, PairSender] = {}

    def by(self, backend: str) -> PairSender:
        """Return the sender of a back end.

        Raises:
            ShardUnavailableError: the shard has no block server.
        """
        sender = self._senders.get(backend)
        if sender is None:
            sender = self._senders[backend] = self._open(backend)
        return sender

    def left(self, client: str) -> None:
        """Learn that a client is gone."""
        for sender in self._senders.values():
            sender.left(client)

    def close_idle(self) -> None:
        """Close the groups that nobody has used for long."""
        for sender in self._senders.values():
            sender.close_idle(time.monotonic())

    def _open(self, backend: str) -> PairSender:
        index = self._config.index
        if self._block_server is None:
            raise ShardUnavailableError(f"shard {index}: expected a TCP server to listen on; found none")
        label = f"{self._config.repository}/shard-{index}/{backend}"
        return PairSender(backend, label, self._block_server.find, self._rendezvous)
