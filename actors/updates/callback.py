"""The Keras callback that hands a model over while `model.fit` trains it (Viper, section 4.2)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ..client.repository import Repository
from .fitting import FitCallback
from .publisher import Publisher, PublishReport
from .trigger import ScheduleLike


class CheckpointCallback(FitCallback):
    """Publishes a model's versions during `model.fit`.

    The plan needs the loss of each batch, where Keras reports the mean since the epoch began: the callback sums up the
    losses that Keras' loss tracker receives. With `steps_per_execution` above 1 a loss is the mean over one execution,
    and an update that is due within an execution is made at its end.

    Args:
        repo: the repository.
        name: the model's name.
        schedule: as in `Publisher`; "epoch": at each epoch's end.
        warmup, transport, synchronous, keep: as in `Publisher`.

    >>> model.fit(x, y, epochs=5, callbacks=[CheckpointCallback(repo, "nt3")])     # doctest: +SKIP
    """

    def __init__(
        self,
        repo: Repository,
        name: str,
        schedule: ScheduleLike = None,
        warmup: int | None = None,
        *,
        transport: str = "auto",
        synchronous: bool = False,
        keep: int | None = None,
    ) -> None:
        options = {"warmup": warmup, "transport": transport, "synchronous": synchronous, "keep": keep}
        self._begin = partial(Publisher, repo, name, schedule, **options)
        self.publisher = self._begin()
        super().__init__(self.publisher)

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Pass on how long the training and its epochs are; a second `fit` has a publisher and a plan of its own."""
        if self.publisher.is_closed:
            self._steps = self.publisher = self._begin()
        super().on_train_begin(logs)

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Wait until the last update exists."""
        super().on_train_end(logs)
        self.close()

    def close(self) -> None:
        """End what `fit` began and, having failed, did not end. A second call does nothing."""
        self.publisher.close()

    def __enter__(self) -> CheckpointCallback:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def report(self) -> PublishReport:
        """Tell what was published."""
        return self.publisher.report()
