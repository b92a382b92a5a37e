"""Warnings that a process logs once: of a risk, or of a Ray that is not joined, which the next call meets again."""

from __future__ import annotations

import logging
from functools import lru_cache


@lru_cache(maxsize=256)
def warn_once(log: logging.Logger, message: str) -> None:
    """Log a warning, unless this process has logged the same before."""
    log.warning("%s", message)
