"""Ours: a publisher in the training's process, and a consumer in its own.

Rules
- Timed by the wall clock of one machine, across processes.
- All versions of a model go to one consumer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .measure import wait_until
from .networks import Training
from .update_parties import Parts, Party, expect

if TYPE_CHECKING:
    from tensorvine.actors import Consumer, Delivery, Publisher, Repository

TIMEOUT_S = 120.0


class Mapped:
    """A model of no framework, which uses the arrays as they come; it answers with a value of each tensor."""

    def __init__(self) -> None:
        self._tensors: Mapping[str, np.ndarray[Any, Any]] = {}

    def assign(self, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Take a version."""
        self._tensors = tensors

    def __call__(self, place: int) -> dict[str, float]:
        """Return the value at a place of each tensor."""
        return {name: float(array.flat[place % array.size]) for name, array in self._tensors.items()}


class Ours(Party):
    """A publisher in this process, and a consumer in its own.

    Args:
        name: as the tables call it.
        training: what is published.
        repo: the repository.
        publisher: of a model's versions; its last one is the consumer's.
        consumer: follows them.
        maps: the consumer's model is a `Mapped`; else it is the training's network.
    """

    def __init__(
        self, name: str, training: Training, repo: Repository, publisher: Publisher, consumer: Consumer, maps: bool
    ) -> None:
        self.name = name
        self._training = training
        self._repo = repo
        self._publisher = publisher
        self._consumer = consumer
        self._maps = maps

    def update(self) -> Parts:
        """Publish, and wait until the consumer has the version."""
        handed = time.time()
        ref = self._publisher.publish(self._training.model).committed(TIMEOUT_S).ref
        self._consumer.wait_for(ref.version, TIMEOUT_S)
        made = self._publisher.report().updates[-1]
        delivery = delivery_of(self._consumer, ref.version, TIMEOUT_S)
        exists = self._repo.info(ref).created.timestamp()
        return Parts(
            delivery.swapped_at - handed,
            made.stall_s,
            made.commit_s,
            exists - handed,
            delivery.notified_at - exists,
            delivery.fetch_s,
            delivery.swap_s,
        )

    def check(self) -> None:
        """Compare what the consumer answers with what the training's model does."""
        if not self._maps:
            answer = self._consumer.infer(self._training.network.sample(), TIMEOUT_S).outputs
            theirs, ours = (
                found if isinstance(found, list) else [found] for found in (self._training.answer(), answer)
            )
            same = all(np.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(ours, theirs, strict=True))
            expect(same, self.name)
            return
        for place in (0, 7, -1):
            found = self._consumer.infer(place, TIMEOUT_S).outputs
            wanted = {name: float(array.flat[place % array.size]) for name, array in self._training.arrays.items()}
            expect(found == wanted, self.name)


def delivery_of(consumer: Consumer, version: int, timeout: float) -> Delivery:
    """Return a consumer's delivery of a version; its model may answer with it a moment before it is noted."""
    found: list[Delivery] = []

    def noted() -> bool:
        found[:] = [each for each in consumer.status().deliveries if each.ref.version == version]
        return bool(found)

    wait_until(noted, f"a delivery of version {version}", timeout=timeout)
    return found[0]


def _close(found: Any, wanted: Any) -> bool:
    """Compare answers of a model with one output, or several."""
    several = isinstance(wanted, list)
    pairs = zip(found, wanted, strict=True) if several else [(found, wanted)]
    return all(np.allclose(mine, theirs, rtol=1e-4, atol=1e-5) for mine, theirs in pairs)
