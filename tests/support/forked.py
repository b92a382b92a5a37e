"""Work in a forked child of the test's process."""

from __future__ import annotations

import faulthandler
import json
import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any

LIMIT_S = 60
"""After so long the child says where its threads are, and ends."""


def in_child(work: Callable[[], object]) -> Any:
    """Fork, call `work` in the child, and return its result, which JSON can hold."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            faulthandler.enable(file=write)
            faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=write)
            os.write(write, json.dumps([work()]).encode())
        except BaseException:  # noqa: BLE001  reported to the parent
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, encoding="utf-8") as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert text.startswith("["), text or f"the child ended without a result, with {os.waitstatus_to_exitcode(status)}"
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
