"""Sockets on a machine that may stop for seconds: a late answer is not a failure."""

from __future__ import annotations

import pytest
from tensorvine.actors.engine.sockets import awaited, blocking, entrance

from tests.support.call_targets import WAIT_S


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise timeouts of about a second to that of a test. Tests of such a timeout set it themselves."""
    for module, time in (
        (blocking, "SEND_S"),
        (blocking, "FRESH_S"),
        (awaited, "CONNECT_S"),
        (awaited, "STALE_S"),
        (entrance, "GREETING_S"),
    ):
        monkeypatch.setattr(module, time, WAIT_S)
