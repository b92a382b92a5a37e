"""The status of a repository's consumers, for monitoring.

Rules
- Consumers are found by their actors' names. Consumers outside the cluster and in Ray Serve are not found.
- A consumer that does not answer hides none of the others.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...store.errors import TensorVineError, without_frames
from ...store.waiting import Deadline
from ..engine.engine import Engine
from ..rpc.channel import Answer, Channel
from .consumer import Consumer, ConsumerCalls
from .follower import ConsumerStatus

LATEST = 16
"""Deliveries of a status."""


class ConsumerWatch:
    """Asks the consumers of one repository for their status. `close` ends the connections.

    Args:
        engine: runs the consumers.
        repository: name of the repository.
    """

    def __init__(self, engine: Engine, repository: str) -> None:
        self._engine = engine
        self._prefix = f"{repository}/{Consumer.role}-"
        self._channels: dict[str, Channel] = {}

    def statuses(self, actors: Iterable[str], timeout: float) -> dict[str, ConsumerStatus | TensorVineError]:
        """Ask all consumers at once.

        Args:
            actors: names of the running actors of the cluster, as `Engine.actors` returns them.
            timeout: seconds to wait in all.

        Returns:
            A mapping of "MODEL-ID" to the status, with the last 16 deliveries, or to an error that states the reason.
        """
        wanted = [actor for actor in actors if actor.startswith(self._prefix)]
        self._keep(wanted)
        deadline, found = Deadline.after(timeout), dict[str, ConsumerStatus | TensorVineError]()
        asked = {actor: self._ask(actor) for actor in wanted}
        for actor, answer in asked.items():
            try:
                told = answer if isinstance(answer, TensorVineError) else answer.result(deadline.left())
            except TensorVineError as exc:
                told = without_frames(exc)
            found[actor.removeprefix(self._prefix)] = told
        return found

    def close(self) -> None:
        """End the connections."""
        self._keep(())

    def _ask(self, actor: str) -> Answer[ConsumerStatus] | TensorVineError:
        channel = self._channels.get(actor)
        if channel is None:
            channel = self._channels[actor] = Channel(self._engine, actor)
        try:
            return channel.send(ConsumerCalls.status(LATEST))
        except TensorVineError as exc:
            return without_frames(exc)

    def _keep(self, wanted: Iterable[str]) -> None:
        for gone in self._channels.keys() - set(wanted):
            self._channels.pop(gone).close()
