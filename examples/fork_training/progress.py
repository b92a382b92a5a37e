"""How far trainings are while they run: one thread asks them a few times a second, and none of them waits for it."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from tensorvine.actors import Trainers
from tensorvine.store.errors import TensorVineError

LOOK_S = 0.2


class Progress:
    """Looks at trainings until the `with` block ends."""

    def __init__(self) -> None:
        self.seen: dict[str, list[tuple[float, int]]] = {}
        """Of each training: (seconds since the first was watched, steps that it had done then)."""
        self._watched: dict[str, Trainers] = {}
        self._begun = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="progress", daemon=True)

    def watch(self, name: str, trainers: Trainers) -> None:
        """Look at one more training."""
        if not self.seen:
            self._begun = time.perf_counter()
        self.seen[name] = []
        self._watched[name] = trainers

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()

    def _look_on(self) -> None:
        while not self._stopping.wait(LOOK_S):
            for name, trainers in list(self._watched.items()):
                try:
                    steps = trainers.describe()[0].steps_done
                except TensorVineError:  # whoever waits for the training hears of it
                    del self._watched[name]
                else:
                    self.seen[name].append((time.perf_counter() - self._begun, steps))
