"""The Keras callback that hands a model over while `model.fit` trains it (Viper, section 4.2)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ..client.repository import Repository
from .fitting import FitCallback
from .publisher import Publisher, PublishReport
from .trigger import ScheduleLike


class CheckpointCallback(FitCallback):
    """A Keras callback that publishes versions of a model during `model.fit`.

    At the end of `fit`, the callback waits for the last update and closes its publisher. To close the publisher even if
    `fit` fails, use the callback in a `with` block. Each call of `fit` has its own plan of updates and its own report.

    The loss of each batch is computed from the values that Keras' loss tracker receives. If a custom `train_step` does
    not update the loss tracker, the "loss" that `train_step` returns is used instead. With `steps_per_execution` above
    1, the loss is the mean over one execution. Updates that are due during an execution are made at the end of the
    execution.

    Args:
        repo: The repository.
        name: Name of the model.
        schedule, warmup, transport, synchronous, keep: As in `Publisher`. You need not call `Publisher.expect`: the
            callback calls `expect` with the numbers of iterations from `fit`.

    Raises:
        ValueError: if an argument is invalid.
        InvalidNameError: if the name is malformed.

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
        """Prepare for a call of `fit`. If the publisher is closed, create a new one with a new plan and report."""
        if self.publisher.is_closed:
            self._steps = self.publisher = self._begin()
        super().on_train_begin(logs)

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Wait until the last update is committed, then close the publisher."""
        super().on_train_end(logs)
        self.close()

    def close(self) -> None:
        """Wait for the last update, then close the publisher. Call `close` if `fit` fails. Further calls do nothing."""
        self.publisher.close()

    def __enter__(self) -> CheckpointCallback:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def report(self) -> PublishReport:
        """Return the report of the updates that were made during the last `fit`."""
        return self.publisher.report()
