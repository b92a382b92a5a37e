"""Hosts that reach one another through a bridge, and links that are cut in one direction or in both."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import combinations
from typing import Any, Self

PROGRAMS = ("ip", "nsenter", "unshare")
TC = shutil.which("tc", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
"""Limits links; where it is not, none can be limited."""
START_S = 30.0

Link = tuple[int, int]
"""(from, to): hosts, which count from 1."""


def missing() -> str | None:
    """Say what this machine lacks for several hosts; None: nothing."""
    if os.geteuid() != 0:
        return "several hosts on one machine: only root makes network namespaces"
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    if lacking:
        return f"several hosts on one machine: {', '.join(lacking)} (iproute2, util-linux) is not installed"
    tried = subprocess.run(["unshare", "--net", "ip", "link", "add", "type", "veth"], capture_output=True, check=False)  # noqa: S607
    return None if tried.returncode == 0 else f"several hosts on one machine: {tried.stderr.decode().strip()}"


def address(host: int) -> str:
    """Return a host's address."""
    return f"10.77.0.{host}"


def both(a: int, b: int) -> tuple[Link, ...]:
    """Return the links between two hosts."""
    return (a, b), (b, a)


def around(host: int, hosts: int) -> tuple[Link, ...]:
    """Return all links of a host."""
    return tuple(link for other in range(1, hosts + 1) if other != host for link in both(host, other))


def cuts(hosts: int) -> dict[str, tuple[Link, ...]]:
    """Return ways to cut the links of so many hosts, by name: each pair, each direction of one, each host.

    >>> list(cuts(2))
    ['1-2', '1>2', '2>1', '1 alone', '2 alone']
    """
    pairs = list(combinations(range(1, hosts + 1), 2))
    return {
        **{f"{a}-{b}": both(a, b) for a, b in pairs},
        **{f"{a}>{b}": ((a, b),) for pair in pairs for a, b in both(*pair)},
        **{f"{host} alone": around(host, hosts) for host in range(1, hosts + 1)},
    }


class Network(AbstractContextManager["Network"]):
    """So many hosts, all of which reach one another.

    Args:
        hosts: how many.
    """

    def __init__(self, hosts: int) -> None:
        self.hosts = range(1, hosts + 1)
        self._held = ExitStack()
        try:
            self._bridge = self._namespace()
            self._of = {host: self._namespace() for host in self.hosts}
            self._connect()
        except BaseException:
            self._held.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def run(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program on a host."""
        return subprocess.Popen([*_within(self._of[host]), *command], **options)

    def cut(self, links: Iterable[Link]) -> None:
        """Have what goes over these links get lost."""
        self._route(links, "ff")

    def heal(self, links: Iterable[Link]) -> None:
        """Have it arrive again."""
        self._route(links, "00")

    def limit(self, rate: str | None) -> None:
        """Have each host send and receive at a rate such as "1gbit" at most; None: at any.

        The bucket holds what the rate brings in 2 ms, and the queue what it brings in 50: a raw socket gets 0.95 of it.
        """
        of = "qdisc replace dev {} root tbf rate {} burst 256kb latency 50ms" if rate else "qdisc del dev {} root"
        for host, process in self._of.items():
            for where, device in ((process, "eth0"), (self._bridge, f"host{host}")):
                self._ip(where, [of.format(device, rate)], TC or "tc")

    def _route(self, links: Iterable[Link], kind: str) -> None:
        """Send what a host has for another one to a link address: its own (00), or one that nobody has (ff)."""
        for source, target in links:
            line = f"neigh replace {address(target)} lladdr {_mac(target, kind)} dev eth0 nud permanent"
            self._ip(self._of[source], [line])

    def _connect(self) -> None:
        self._ip(self._bridge, ["link add bridge type bridge", "link set bridge up"])
        for host, process in self._of.items():
            end = f"peer name eth0 address {_mac(host, '00')} netns {process.pid}"
            self._ip(self._bridge, [f"link add host{host} type veth {end}", f"link set host{host} master bridge up"])
            lines = [f"addr add {address(host)}/24 dev eth0", "link set eth0 up", "link set lo up"]
            self._ip(process, lines)
            self.heal((host, other) for other in self.hosts if other != host)

    def _namespace(self) -> subprocess.Popen[bytes]:
        """Make a network namespace, held by a process that ends with this one: its standard input is closed then."""
        process = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)  # noqa: S607
        self._held.callback(_end, process)
        deadline = time.monotonic() + START_S
        while _space_of(process.pid) == _space_of(os.getpid()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise OSError(f"unshare: expected a namespace; found exit status {process.poll()}")
            time.sleep(0.005)
        return process

    def _ip(self, process: subprocess.Popen[bytes], lines: Sequence[str], program: str = "ip") -> None:
        command = [*_within(process), program, "-batch", "-"]
        done = subprocess.run(
            command, input="\n".join(lines).encode(), capture_output=True, check=False, timeout=START_S
        )
        if done.returncode:
            raise OSError(f"{program}: {'; '.join(lines)}: {done.stderr.decode().strip()}")


def _within(process: subprocess.Popen[bytes]) -> list[str]:
    return ["nsenter", "-t", str(process.pid), "--net", "--"]


def _mac(host: int, kind: str) -> str:
    return f"02:00:00:00:{kind}:{host:02x}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a namespace, with all that runs there still."""
    own = _space_of(process.pid)
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if pid != process.pid and _space_of(pid) == own:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.kill()
    process.communicate(timeout=START_S)


def _space_of(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:  # it has ended
        return None
