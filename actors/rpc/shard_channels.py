"""Channels to the shards of one repository, each made when it is first used."""

from __future__ import annotations

from ...store.errors import ShardUnavailableError, TensorVineError
from ..engine.engine import Engine
from .channel import Channel
from .messages import actor_name


class ShardChannels:
    """One channel per shard, by its number; for the arguments see `Channel`.

    >>> channels = ShardChannels(engine, "default", follows=True)                # doctest: +SKIP
    >>> channels[0].call(ShardCalls.stats(), timeout=30.0)                       # doctest: +SKIP
    """

    def __init__(
        self,
        engine: Engine,
        repository: str,
        *,
        follows: bool = False,
        missing: type[TensorVineError] = ShardUnavailableError,
    ) -> None:
        self._engine = engine
        self._repository = repository
        self._follows = follows
        self._missing = missing
        self._channels: dict[int, Channel] = {}

    def __getitem__(self, shard: int) -> Channel:
        channel = self._channels.get(shard)
        if channel is None:
            name = actor_name(self._repository, shard)
            made = Channel(self._engine, name, follows=self._follows, missing=self._missing)
            channel = self._channels.setdefault(shard, made)  # another thread may have been faster
        return channel

    def forget(self, shard: int) -> None:
        """Close the channel to a shard that was ended: another one may come to have its number."""
        channel = self._channels.pop(shard, None)
        if channel is not None:
            channel.close()
