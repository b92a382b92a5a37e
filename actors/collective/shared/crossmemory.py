"""Reading another process's memory on one machine, in one copy (`process_vm_readv` of Linux).

Rules
- A read is whole, or it is an `UnreadableError`: the process has ended, the memory is gone, or the system does not
  allow it. Whether it does is found out by trying.
- Whoever may be read has a seal, bytes that nobody else has. Each read ends with them, so that what was read is known
  to be of that process, and from before it broke its seal: until then it leaves unchanged what others may read.
- Where Linux lets only debuggers read (Yama), this process allows its user's other processes to.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np

from ....store.arrays import Array
from ....store.errors import PeerLostError

CHUNK = 16 << 20
"""Bytes of a read at most, so that a reader that is to stop does so soon."""
SEAL_BYTES = 16
_BROKEN = bytes(SEAL_BYTES)
_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)


class UnreadableError(Exception):
    """Memory could not be read; what was read of it is of no use."""


class EndedError(UnreadableError):
    """The process is not there any more."""


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_Spans = _Span * 2


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    if not sys.platform.startswith("linux") or not hasattr(library, "process_vm_readv"):
        raise UnreadableError(f"expected Linux with process_vm_readv; found {sys.platform}")
    spans, count = ctypes.POINTER(_Span), ctypes.c_ulong
    library.process_vm_readv.restype = ctypes.c_ssize_t
    library.process_vm_readv.argtypes = (ctypes.c_int, spans, count, spans, count, count)
    return library


class Sealed(TypedDict):
    """Where a process's seal is, and what it is."""

    machine: str
    process: int
    seal_at: int
    seal: str
    """In hexadecimal."""


class Seal:
    """Bytes by which others know that this process's memory is as they were told.

    >>> seal, found = Seal(), np.zeros(5, int)
    >>> source = np.arange(5)
    >>> Memory(seal.endpoint).read(source.ctypes.data, found)
    >>> found.tolist()
    [0, 1, 2, 3, 4]
    """

    def __init__(self) -> None:
        self._bytes = np.frombuffer(bytearray(secrets.token_bytes(SEAL_BYTES)), np.uint8)
        self.endpoint: Sealed = {
            "machine": _machine(),
            "process": os.getpid(),
            "seal_at": self._bytes.ctypes.data,
            "seal": self._bytes.tobytes().hex(),
        }
        """Tells the others where they are, and what they are."""
        if sys.platform.startswith("linux"):
            ctypes.CDLL(None).prctl(_SET_PTRACER, _ANY, 0, 0, 0)  # without Yama an error, and not needed

    def break_(self) -> None:
        """From now on, memory may be other than the others were told."""
        self._bytes[:] = 0


class Memory:
    """The memory of a process, as seen by another one of its machine.

    Args:
        endpoint: of its `Seal`.
    """

    def __init__(self, endpoint: Sealed) -> None:
        self._process, self._seal_at = int(endpoint["process"]), int(endpoint["seal_at"])
        self._seal = bytes.fromhex(endpoint["seal"])

    def read(self, address: int, target: Array) -> None:
        """Copy bytes from there, `CHUNK` at most.

        Args:
            address: of the first byte there.
            target: contiguous memory that is filled.

        Raises:
            UnreadableError: they cannot be read, or the seal is not there any more.
        """
        seal = ctypes.create_string_buffer(SEAL_BYTES)
        base, length = target.ctypes.data, target.nbytes
        done, expected = 0, length + SEAL_BYTES
        while done < expected:  # a read may stop early, in the seal too
            skip, over = min(done, length), max(done - length, 0)
            rest = SEAL_BYTES - over
            here = _Spans((base + skip, length - skip), (ctypes.addressof(seal) + over, rest))
            there = _Spans((address + skip, length - skip), (self._seal_at + over, rest))
            got = _library().process_vm_readv(self._process, here, 2, there, 2, 0)
            if got <= 0:
                code = ctypes.get_errno() if got < 0 else errno.EFAULT
                kind = EndedError if code == errno.ESRCH else UnreadableError
                raise kind(f"process {self._process}: {os.strerror(code)}")
            done += got
        if seal.raw != self._seal:
            reason = (
                "it no longer allows it" if seal.raw == _BROKEN else "the process id now belongs to another process"
            )
            raise UnreadableError(f"process {self._process}: {reason}")


def trouble(label: str, own: Sealed, endpoints: Sequence[Sealed]) -> str | None:
    """Try to read from all members; gives why they do not let this one, or None.

    Args:
        label: the group's name for messages.
        own: this member's endpoint.
        endpoints: all members', by rank.

    Raises:
        PeerLostError: one has died since it told its endpoint.
    """
    for rank, endpoint in enumerate(endpoints):
        if endpoint["machine"] != own["machine"]:
            return f"rank {rank} is on another machine, or in another container"
        try:
            Memory(endpoint).read(int(endpoint["seal_at"]), np.empty(SEAL_BYTES, np.uint8))
        except EndedError as exc:
            raise PeerLostError(f"{label}: expected rank {rank} to join; it died: {exc}") from exc
        except UnreadableError as exc:
            return f"the memory of rank {rank} cannot be read: {exc}"
    return None


def _machine() -> str:
    """Name this machine, its space of process ids and that of its sockets."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("pid", "net")]
    except OSError:  # no Linux: nobody is on the same machine
        return secrets.token_hex(16)
    return "/".join([boot, *map(str, spaces)])
