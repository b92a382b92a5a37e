"""Stands for an agent of a node: says that it serves nothing, as Ray's own says where it lacks packages, and ends with
its raylet. Imports nothing that it need not."""

from __future__ import annotations

import os
import select
import sys

PORTS = {
    "dashboard": ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"),
    "runtime_env": ("runtime_env_agent_port",),
}
"""Folder of the agent's file, or the one above -> names of what it serves."""
NONE, UNREACHABLE = "-1", "1"
"""What a raylet takes for a port: it asks for one of the environments of workers."""


def main(file: str, *arguments: str) -> None:
    """Write the ports of the agent of this file, and wait."""
    raylet = os.pidfd_open(os.getppid())
    words = dict(word[2:].split("=", 1) for word in arguments if word.startswith("--") and "=" in word)
    (kind,) = PORTS.keys() & set(file.split(os.sep))
    for name in PORTS[kind]:
        path = os.path.join(words["session-dir"], f"{name}_{words['node-id']}")
        with open(path + ".tmp", "w") as port:
            port.write(NONE if kind == "dashboard" else UNREACHABLE)
        os.replace(path + ".tmp", path)
    select.select([raylet], [], [])


if __name__ == "__main__":
    main(*sys.argv[1:])
