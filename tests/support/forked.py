"""Work in a forked child of the test's process."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable, Mapping
from typing import Any

LIMIT_S = 60
"""After so long the system ends the child."""


def in_child(work: Callable[[], object]) -> Any:
    """Fork, call `work` in the child, and return its result, which JSON can hold."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest's own handler is for the parent
            signal.alarm(LIMIT_S)
            os.write(write, json.dumps([work()]).encode())
        except BaseException:  # noqa: BLE001  reported to the parent
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, encoding="utf-8") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    assert text.startswith("["), text or "the child ended without a result"
    return json.loads(text)[0]


def outcomes(calls: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """Make each call; return its name -> the error's type, or "returned"."""
    found: dict[str, str] = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "returned"
        except Exception as exc:  # noqa: BLE001  the test compares its type
            found[name] = type(exc).__name__
    return found
