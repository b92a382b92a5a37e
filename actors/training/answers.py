"""Answers of several ranks, waited for at once."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ...store.errors import OperationTimeoutError, PeerLostError, ShardUnavailableError

_R = TypeVar("_R")


def first_failure(waits: Sequence[Callable[[], _R]], grace: float) -> tuple[list[_R], list[tuple[int, BaseException]]]:
    """Wait for all at once, until all have ended, or one failed; then a little longer, as it may not be the cause.

    Args:
        waits: each ends by itself, with an answer or an error.
        grace: seconds.

    Returns:
        The answers, in order, if all ended well; and (place, error) of what failed, in the order in which they did.

    >>> first_failure([lambda: 1, lambda: 2], 1.0)
    ([1, 2], [])
    """
    ended: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()

    def carry_out(place: int, wait: Callable[[], Any]) -> None:
        try:
            ended.put((place, wait(), None))
        except BaseException as exc:  # noqa: BLE001  handed to who waits for all
            ended.put((place, None, exc))

    for place, wait in enumerate(waits):
        threading.Thread(target=carry_out, args=(place, wait), name="tensorvine-answers", daemon=True).start()
    answers: list[Any] = [None] * len(waits)
    failed: list[tuple[int, BaseException]] = []
    deadline = math.inf
    for _ in waits:
        try:
            left = None if deadline == math.inf else max(deadline - time.monotonic(), 0.0)
            place, answers_one, error = ended.get(timeout=left)
        except queue.Empty:
            break
        if error is None:
            answers[place] = answers_one
            continue
        failed.append((place, error))
        if not isinstance(error, (PeerLostError, OperationTimeoutError)):
            break
        deadline = min(deadline, time.monotonic() + grace)
    return answers, failed


def root_cause(failed: Sequence[tuple[int, BaseException]]) -> tuple[int, BaseException]:
    """Choose what tells most: what went wrong by itself, before who died, who noticed it, and who only waited.

    >>> root_cause([(0, PeerLostError("rank 1 left")), (1, KeyError("labels"))])
    (1, KeyError('labels'))
    """

    def weight(item: tuple[int, BaseException]) -> int:
        kinds = (OperationTimeoutError, PeerLostError, ShardUnavailableError)
        return next((place for place, kind in enumerate(kinds) if isinstance(item[1], kind)), len(kinds))

    return max(failed, key=weight)
