"""Ray's control service at an address, as it is seen before it is joined: whether it is there, and asks for a token.

Rules
- Ray itself would try to connect for minutes where nobody listens, and for 20 s where it is refused.
- No token is presented here: it may be another user who listens.
- The service is asked whether it is alive in the words of gRPC over HTTP/2 (RFC 9113), as gRPC for Python is no
  dependency of Ray. gRPC's servers answer without Huffman codes, so the status is found in plain text.
"""

from __future__ import annotations

import logging
import re
import socket
import struct

from ....store.waiting import Deadline

log = logging.getLogger(__name__)

REACH_S = 5.0
"""How long a Ray may take to accept a connection, and to answer."""
_STATUS = re.compile(rb"grpc-status(?:\x01(\d)|\x02(\d\d))")
_UNAUTHENTICATED = b"16"
_CALL = b"/ray.rpc.NodeInfoGcsService/CheckAlive"


def split(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT.

    Raises:
        ValueError: the address is none.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > 0xFFFF:
        raise ValueError(f"address of a Ray: expected HOST:PORT; found {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def connection(address: str) -> socket.socket:
    """Connect to HOST:PORT.

    Raises:
        ConnectionError: nobody listens there.
        ValueError: the address is none.
    """
    try:
        return socket.create_connection(split(address), REACH_S)
    except OSError as exc:
        raise ConnectionError(f"no server answers at {address} ({exc})") from exc


def asks_for_token(address: str) -> bool | None:
    """Whether who presents no token to the Ray at HOST:PORT is refused; None: what listens there does not say.

    Raises:
        ConnectionError: nobody listens there.
        ValueError: the address is none.
    """
    deadline, answer = Deadline.after(REACH_S), b""
    with connection(address) as service:
        try:
            service.sendall(_question())
            while (status := _STATUS.search(answer)) is None:
                service.settimeout(deadline.left_for(f"the answer of {address}"))
                more = service.recv(1 << 16)
                if not more:
                    raise ConnectionError("it closed the connection")
                answer += more
        except OSError as exc:
            log.info("%s: cannot find out whether it requires a token: %s", address, exc)
            return None
    return (status[1] or status[2]) == _UNAUTHENTICATED


def _question() -> bytes:
    """Return the beginning of an HTTP/2 connection, and on it one call with an empty message and no token."""
    headers = {b":path": _CALL, b":authority": b"ray", b"te": b"trailers", b"content-type": b"application/grpc"}
    block = b"\x83\x86" + b"".join(b"\x00" + _literal(key) + _literal(value) for key, value in headers.items())
    settings, call, message = _frame(4, 0, 0, b""), _frame(1, 4, 1, block), _frame(0, 1, 1, bytes(5))
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + call + message


def _literal(text: bytes) -> bytes:
    """Return a string of HPACK (RFC 7541), of less than 127 bytes."""
    return bytes([len(text)]) + text


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body
