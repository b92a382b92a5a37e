"""The bytes that one client's loads moved: `Repository.traffic`."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

log = logging.getLogger(__name__)

PATCH = "patch"
"""The key of patches among the transports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that the loads of a client moved since the client connected, returned by `Repository.traffic`."""

    bytes_asked: int
    """Size of the tensors that loads returned, in bytes."""
    bytes_mapped: int
    """Size of the tensors among them that were mapped from the memory of a shard on the same node, in bytes."""
    bytes_moved: Mapping[str, int]
    """Mapping of transports to bytes moved. The key for patches is `"patch"`. Tensors that the client or the caller
    already had were not moved."""
    patches: int
    """Number of tensors that came as patches."""
    whole: int
    """Number of tensors that were moved whole."""
    fallbacks: Mapping[str, int]
    """Mapping of causes to the number of tensors that were moved whole, although the caller had a base."""


class Meter:
    """Counts the traffic of one client; used by several threads."""

    def __init__(self) -> None:
        self._asked = self._mapped = self._patches = self._whole = 0
        self._moved: Counter[str] = Counter()
        self._fallbacks: Counter[str] = Counter()
        self._lock = threading.Lock()

    def asked(self, nbytes: int, mapped: int = 0) -> None:
        """Count tensors that a load returned."""
        with self._lock:
            self._asked += nbytes
            self._mapped += mapped

    def moved(self, transport: str, nbytes: int, tensors: int) -> None:
        """Count tensors that were moved."""
        with self._lock:
            self._moved[transport] += nbytes
            if transport == PATCH:
                self._patches += tensors
            else:
                self._whole += tensors

    def fell_back(self, cause: str, what: str) -> None:
        """Count a tensor that is moved whole for this cause, and log the first one of each cause."""
        with self._lock:
            self._fallbacks[cause] += 1
            first = self._fallbacks[cause] == 1
        if first:
            log.warning("%s: moved whole, not as a patch: %s (logged once for each cause)", what, cause)

    @property
    def traffic(self) -> Traffic:
        """All that was counted."""
        with self._lock:
            return Traffic(
                bytes_asked=self._asked,
                bytes_mapped=self._mapped,
                bytes_moved=dict(self._moved),
                patches=self._patches,
                whole=self._whole,
                fallbacks=dict(self._fallbacks),
            )
