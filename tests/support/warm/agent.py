"""Stands for an agent of a node, and ends with its raylet: that for metrics serves nothing, as Ray's own says where it
lacks packages; that for `runtime_env` becomes Ray's own when it is first asked. Imports nothing that it need not."""

from __future__ import annotations

import os
import select
import socket
import sys

METRICS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
ENVIRONMENTS = "runtime_env_agent_port"
PORT = "--runtime-env-agent-port="


def main(file: str, *arguments: str) -> None:
    """Stand for the agent of this file and these arguments."""
    raylet = os.pidfd_open(os.getppid())
    words = dict(word[2:].split("=", 1) for word in arguments if word.startswith("--") and "=" in word)
    if "runtime_env" not in file.split(os.sep):
        for name in METRICS:
            say(words, name, -1)
        select.select([raylet], [], [])
        return
    with socket.create_server((words["node-ip-address"], int(words[PORT[2:-1]]))) as listener:
        port = listener.getsockname()[1]
        say(words, ENVIRONMENTS, port)
        asked, _, _ = select.select([raylet, listener], [], [])
    if raylet not in asked:  # who asks does so again where nobody answers
        own = [f"{PORT}{port}" if word.startswith(PORT) else word for word in arguments]
        os.execv(sys.executable, [sys.executable, file, *own])  # noqa: S606  this Python


def say(words: dict[str, str], name: str, port: int) -> None:
    """Write a port to where a raylet looks for it; -1: there is none."""
    path = os.path.join(words["session-dir"], f"{name}_{words['node-id']}")
    with open(path + ".tmp", "w") as file:
        file.write(str(port))
    os.replace(path + ".tmp", path)


if __name__ == "__main__":
    main(*sys.argv[1:])
