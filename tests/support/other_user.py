"""Another user of this machine, as tests need one: a process that gives up what the tests' user may do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

OTHER = 65534
"""The user and the group `nobody`."""
_BECOME = f"""
import errno, os, pathlib, socket, sys
os.setgroups([int(group) for group in sys.argv[1].split(",") if group])
os.setgid({OTHER})
os.setuid({OTHER})
def tried(what):
    try:
        return what()
    except OSError as exc:
        return errno.errorcode[exc.errno]
arguments = sys.argv[2:]
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_other_user(code: str, *arguments: str, groups: tuple[int, ...] = ()) -> str:
    """Run Python as another user, and give what it prints.

    Args:
        code: may use `errno`, `os`, `pathlib`, `socket`, `sys`, `arguments`, and `tried(f)`, which gives what `f()`
            returns or the name of its error.
        arguments: texts.
        groups: what groups the user is in besides its own.
    """
    command = [sys.executable, "-I", "-S", "-c", _BECOME + code, ",".join(map(str, groups)), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout.strip()
