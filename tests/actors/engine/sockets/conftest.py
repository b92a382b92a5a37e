"""Sockets on a machine that may stand still for seconds: what it sends late is late, and not left to the engine."""

from __future__ import annotations

import pytest
from tensorvine.actors.engine.sockets import awaited, blocking, entrance

from tests.support.call_targets import WAIT_S


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has the time of a second in normal life has that of a test; what is about such a time sets it itself."""
    for module, time in (
        (blocking, "SEND_S"),
        (blocking, "FRESH_S"),
        (awaited, "CONNECT_S"),
        (awaited, "STALE_S"),
        (entrance, "GREETING_S"),
    ):
        monkeypatch.setattr(module, time, WAIT_S)
