"""Channels to the shards of one repository, each made when it is first used."""

from __future__ import annotations

from collections.abc import Collection

from ...store.errors import ShardUnavailableError, TensorVineError
from ..engine.engine import Engine
from .channel import Channel
from .messages import actor_name


class ShardChannels:
    """One channel per shard, by its number; for the arguments see `Channel`.

    >>> channels = ShardChannels(engine, "default")                              # doctest: +SKIP
    >>> channels[0].call(ShardCalls.stats(), timeout=30.0)                       # doctest: +SKIP
    """

    def __init__(
        self,
        engine: Engine,
        repository: str,
        *,
        missing: type[TensorVineError] = ShardUnavailableError,
    ) -> None:
        self._engine = engine
        self._repository = repository
        self._missing = missing
        self._channels: dict[int, Channel] = {}

    def __getitem__(self, shard: int) -> Channel:
        channel = self._channels.get(shard)
        if channel is None:
            name = actor_name(self._repository, shard)
            made = Channel(self._engine, name, missing=self._missing)
            channel = self._channels.setdefault(shard, made)  # another thread may have been faster
        return channel

    def keep_only(self, shards: Collection[int]) -> None:
        """Close the channels to all other shards: new shards may get their numbers."""
        for shard in [shard for shard in list(self._channels) if shard not in shards]:
            self.forget(shard)

    def forget(self, shard: int) -> None:
        """Close the channel to a shard."""
        channel = self._channels.pop(shard, None)
        if channel is not None:
            channel.close()

    def close(self) -> None:
        """Close all channels."""
        self.keep_only(())
