"""A clock of the day that is off, for processes that have `clock.c` preloaded. The monotonic clock is as it is."""

from __future__ import annotations

from pathlib import Path

from tests.support.preload import preloaded

SOURCE = Path(__file__).with_name("clock.c")


def clock_off(seconds: int, folder: Path) -> dict[str, str]:
    """Return the environment of processes whose clock is ahead by some seconds, which may be negative.

    Args:
        seconds: they are.
        folder: for the library.
    """
    return preloaded(SOURCE, folder) | {"TENSORVINE_TEST_CLOCK_S": str(seconds)}
