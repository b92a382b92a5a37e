"""Which Rays run here, and whose they are: a client presents its token to the Ray that it joins.

Rules
- RAY_ADDRESS, or an address that a caller gives, is the user's own word. What is found on this machine is believed only
  where it belongs to this user or to root; else it is not joined, and one warning says why.
- `ray start` writes an address into the file `ray_current_cluster` of a folder where every user may write. It counts
  where the file itself, not a link, is of this user or root, and not every user may write it.
- A Ray that a program embedded is found by its raylet's command line. It counts where that process is of this user or
  root: another user's process may have any command line.
- An address of this machine is then looked up among the kernel's sockets, each with its user: all who listen there must
  be of this user or root. An address of another machine must be that of a raylet of this user or root on this one.
- Between this look and the connection lies a moment, in which that Ray would have to end and another take its port.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from ray._common.utils import get_ray_address_file, reset_ray_address
from ray._private import services  # the only place that knows what a raylet's process looks like

from ..warned import warn_once
from . import control_service

log = logging.getLogger(__name__)

SOCKETS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""The kernel's tables of the sockets of this network namespace."""
_LISTENS = "0A"
_ADDRESS_BYTES = 1024
_FLAG = "--gcs-address="

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class _Told:
    """What tells of a Ray on this machine."""

    what: str
    """The Ray, in words."""
    address: str
    refused: str | None = None
    """Why what tells of it is not believed."""


def named() -> str | None:
    """Return what RAY_ADDRESS names: HOST:PORT, "local", or None: nothing, so that one may be looked for."""
    address = os.environ.get("RAY_ADDRESS")
    return None if address == "auto" else address or None


def find(*, embedded: bool) -> str | None:
    """Return the address of a Ray that runs on this machine and may be believed; None: nothing tells of one.

    Args:
        embedded: also one that a program embedded, which ends with it.

    Raises:
        ConnectionError: of what tells of a Ray, nothing may be believed; says why.
    """
    refused: list[str] = []
    for told in _all_told(embedded):
        reason = told.refused or _refusal(told.address)
        if reason is None:
            return told.address
        refused.append(f"{told.what} is not joined: {reason}")
        warn_once(log, refused[-1])
    if refused:
        raise ConnectionError("; ".join(refused))
    return None


def forget_ended() -> None:
    """Remove the file of `ray start`, which Ray leaves, if it may be believed and nobody listens where it says."""
    for told in _written():
        if told.refused is None:
            try:
                control_service.connection(told.address).close()
            except ConnectionError:
                reset_ray_address(None)


def doubt(address: str) -> str | None:
    """Say why the Ray at HOST:PORT may be another user's; None: it is this user's or root's.

    Raises:
        ValueError: the address is none.
    """
    host, port = control_service.split(address)
    try:
        rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as exc:
        return f"{host} is not an address ({exc})"
    found = {ipaddress.ip_address(str(row[4][0])) for row in rows}
    here = {ip for ip in found if _is_here(ip)}
    if here != found:
        joined = any(raylet == address and user in _ours() for raylet, user in _raylets())
        return None if joined else f"{host} is another machine, and no raylet here of this user or root belongs to it"
    users = {user for ip in here for user in _listeners(ip, port)}
    strangers = sorted(users - _ours())
    if strangers:
        return f"the listener at {address} belongs to user {strangers[0]}, not to this user ({os.geteuid()}) or root"
    return None if users else f"no process listens at {address}"


def _all_told(embedded: bool) -> Iterator[_Told]:
    """Give what tells of a Ray: the file of `ray start`, raylets of this user and root, and then those of others."""
    yield from _written()
    if not embedded:
        return
    raylets, ours = sorted(set(_raylets())), _ours()
    for address, _ in (raylet for raylet in raylets if raylet[1] in ours):
        yield _Told(f"the Ray at {address}", address)
    for address, user in (raylet for raylet in raylets if raylet[1] not in ours):
        yield _Told(f"the Ray at {address}", address, f"its raylet belongs to user {user}")


def _refusal(address: str) -> str | None:
    try:
        control_service.connection(address).close()
        return doubt(address)
    except (ConnectionError, ValueError) as exc:
        return str(exc)


def _ours() -> set[int]:
    return {os.geteuid(), 0}


def _written() -> Iterator[_Told]:
    """Read the file that `ray start` writes, if there is one."""
    path = get_ray_address_file(None)
    what = f"the Ray that {path} names"
    try:
        with open(path, "rb", opener=_without_following) as file:
            facts = os.fstat(file.fileno())
            address = file.read(_ADDRESS_BYTES) if stat.S_ISREG(facts.st_mode) else b""
    except FileNotFoundError:
        return
    except OSError as exc:
        yield _Told(what, "", f"expected a file that `ray start` wrote; {exc}")
        return
    refused = None
    if not stat.S_ISREG(facts.st_mode):
        refused = "expected a file that `ray start` wrote; it is not a regular file"
    elif facts.st_uid not in _ours():
        refused = f"the file belongs to user {facts.st_uid}, not to this user ({os.geteuid()}) or root"
    elif facts.st_mode & stat.S_IWOTH:
        refused = "every user may write that file"
    yield _Told(what, address.decode(errors="replace").strip(), refused)


def _without_following(path: str, flags: int) -> int:
    """Open what may be anything: a link is refused, and a pipe that nobody writes to is not waited for."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _raylets() -> Iterator[tuple[str, int]]:
    """Give the address that each raylet on this machine was started with, and its user."""
    for process in psutil.process_iter(["cmdline", "uids"]):
        words, users = process.info["cmdline"], process.info["uids"]
        if users is None or not services._is_raylet_process(words):
            continue
        for word in " ".join(words).split():
            if word.startswith(_FLAG) and word != f"{_FLAG}None":
                yield word.removeprefix(_FLAG), users.effective


def _is_here(ip: Ip) -> bool:
    """Whether it is an address of this machine."""
    own = {one.address.partition("%")[0] for card in psutil.net_if_addrs().values() for one in card}
    return ip.is_loopback or str(ip) in own


def _listeners(ip: Ip, port: int) -> Iterator[int]:
    """Give the users of the sockets that listen for connections to this address of this machine."""
    for table in SOCKETS:
        try:
            rows = table.read_text().splitlines()[1:]
        except FileNotFoundError:  # a kernel without IPv6
            continue
        for row in rows:
            _, local, _, state, _, _, _, user, _ = row.split(None, 8)
            words, _, number = local.partition(":")
            if state == _LISTENS and int(number, 16) == port and _serves(_ip(words), ip):
                yield int(user)


def _ip(words: str) -> Ip:
    """Read an address as the kernel prints it: words of 32 bits in this machine's order."""
    raw = b"".join(struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8))
    return ipaddress.ip_address(raw)


def _serves(bound: Ip, ip: Ip) -> bool:
    """Whether a socket that is bound there may get connections to this address."""
    if isinstance(bound, ipaddress.IPv6Address) and bound.ipv4_mapped is not None:
        bound = bound.ipv4_mapped
    return bound == ip or (bound.is_unspecified and bound.version >= ip.version)
