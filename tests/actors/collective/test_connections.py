"""Connections of members, within a machine and between machines: who may connect, what is told, who died or left."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from tensorvine.actors.collective import listener as listening
from tensorvine.actors.collective.connections import Connections
from tensorvine.actors.collective.links import OWN, PAYLOAD_BYTES, Frame, Link
from tensorvine.actors.collective.listener import Listener
from tensorvine.actors.collective.timeouts import TIMEOUTS
from tensorvine.store.errors import OperationTimeoutError, PeerLostError
from tensorvine.store.waiting import Deadline

from tests.support.groups import at_once
from tests.support.waiting import eventually

SOON = Deadline.after


@pytest.fixture(params=["one machine", "TCP"])
def host(request: pytest.FixtureRequest) -> str | None:
    return None if request.param == "one machine" else "127.0.0.1"


def met(host: str | None) -> list[dict[int, Link]]:
    listeners = [Listener(host), Listener(host)]
    endpoints = [one.endpoint for one in listeners]
    found = at_once([partial(one.meet, "g", rank, endpoints, SOON(10)) for rank, one in enumerate(listeners)])
    for one in listeners:
        one.close()
    return found


def ignore(*_: object) -> None:
    pass


class Hearer:
    """What one member hears of another."""

    def __init__(self, links: dict[int, Link], told: Callable[[int, Frame], None] = ignore) -> None:
        self.frames: list[Frame] = []
        self.losses: list[str] = []

        def hear(peer: int, frame: Frame) -> None:
            told(peer, frame)
            self.frames.append(frame)

        self.connections = Connections(links, hear, lambda _, loss: self.losses.append(loss))


@pytest.fixture
def pair(host: str | None) -> Iterator[tuple[Connections, Hearer, threading.Event]]:
    """Who speaks; who hears it; what lets the latter go on after the first frame."""
    links, gate = met(host), threading.Event()
    here, there = Connections(links[0], ignore, ignore), Hearer(links[1], lambda *_: gate.wait(10))
    here.start()
    there.connections.start()
    yield here, there, gate
    gate.set()
    there.connections.close()


def test_frames_come_whole_and_in_order_however_slowly_they_are_read(pair: Any) -> None:
    here, there, gate = pair
    sizes = [300_000 if k % 500 == 499 else k % 8 * 1024 for k in range(4000)]
    frames = [Frame(OWN, k, nbytes=k, payload=bytes([k % 256]) * size) for k, size in enumerate(sizes)]
    for frame in frames:  # many more than the socket takes: who posts does not wait
        here.post(1, frame)
    gate.set()
    eventually(lambda: len(there.frames) == len(frames), "all frames", pause=0.001)
    assert there.frames == frames
    here.close()
    eventually(lambda: there.losses == ["left"], "word of the end", pause=0.001)


def test_what_was_posted_last_arrives_before_the_end(pair: Any) -> None:
    here, there, gate = pair
    gate.set()
    for k in range(1000):
        here.post(1, Frame(OWN, k, payload=bytes(PAYLOAD_BYTES) if k == 999 else b""))
    here.close()
    eventually(lambda: bool(there.losses), "word of the end", pause=0.001)
    assert (len(there.frames), there.losses) == (1000, ["left"])


def test_what_comes_before_a_member_listens_is_kept(host: str | None) -> None:
    links = met(host)
    here, there = Connections(links[0], ignore, ignore), Hearer(links[1])
    here.start()
    for k in range(400):
        here.post(1, Frame(OWN, k, payload=bytes(PAYLOAD_BYTES)))  # more than sockets hold
    there.connections.start()
    eventually(lambda: len(there.frames) == 400, "all frames", pause=0.001)
    assert [frame.number for frame in there.frames] == list(range(400))
    there.connections.close()
    here.close()


def test_an_end_without_a_word_is_a_death(host: str | None) -> None:
    links = met(host)
    there = Hearer(links[1])
    there.connections.start()
    links[0][1].send(Frame(OWN, 7))
    links[0][1].close()
    eventually(lambda: there.losses == ["died"], "word of the end", pause=0.001)
    assert [frame.number for frame in there.frames] == [7]
    there.connections.close()


def test_strangers_are_sent_away(host: str | None) -> None:
    listeners = [Listener(host), Listener(host)]
    endpoints: list[Any] = [one.endpoint for one in listeners]
    hellos = [
        b"",
        b"no hello",
        listening.hello_of("g", 1, {"token": "0" * 32}),
        listening.hello_of("another", 1, endpoints[0]),
        listening.hello_of("g", 7, endpoints[0]),
        struct.pack("<I", 1),
    ]
    strangers = [socket.socket(socket.AF_INET if host else socket.AF_UNIX) for _ in hellos]
    for stranger, hello in zip(strangers, hellos, strict=True):
        stranger.connect((host, endpoints[0]["port"]) if host else f"\0{endpoints[0]['socket']}")
        stranger.sendall(hello)
        stranger.shutdown(socket.SHUT_WR)
    found = at_once([partial(one.meet, "g", rank, endpoints, SOON(10)) for rank, one in enumerate(listeners)])
    assert [list(links) for links in found] == [[1], [0]]
    for stranger in strangers:
        stranger.settimeout(5)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        stranger.close()
    for links in found:
        for link in links.values():
            link.close()
    for one in listeners:
        one.close()


@pytest.mark.parametrize(
    ("count", "said"), [(20, b""), (20, b"x" * 67), (3, b"[" * 60_000)], ids=["silent", "slow", "["]
)
def test_strangers_keep_no_member_waiting(
    host: str | None, count: int, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waited for one of them would not meet the others within its time."""
    monkeypatch.setattr(listening, "TIMEOUTS", replace(TIMEOUTS, hello=3600.0))
    listeners = [Listener(host) for _ in range(3)]
    endpoints: list[Any] = [one.endpoint for one in listeners]
    with ExitStack() as stack:
        for endpoint in endpoints[:2]:
            for _ in range(count):
                stranger = stack.enter_context(socket.socket(socket.AF_INET if host else socket.AF_UNIX))
                stranger.connect((host, endpoint["port"]) if host else f"\0{endpoint['socket']}")
                stranger.setblocking(False)
                with suppress(BlockingIOError):  # of what nobody may ever read
                    stranger.send(said)
        found = at_once([partial(one.meet, "g", rank, endpoints, SOON(60)) for rank, one in enumerate(listeners)])
        assert [sorted(links) for links in found] == [[1, 2], [0, 2], [0, 1]]
        for one in [*listeners, *(link for links in found for link in links.values())]:
            one.close()


def test_who_has_come_when_the_time_is_over_is_met(host: str | None) -> None:
    """The member was not given the processor until then."""
    listeners = [Listener(host), Listener(host)]
    endpoints = [one.endpoint for one in listeners]
    links = listeners[1].meet("g", 1, endpoints, SOON(60))
    found = listeners[0].meet("g", 0, endpoints, SOON(0))
    assert list(found) == [1]
    for one in [*listeners, *links.values(), *found.values()]:
        one.close()


def test_who_listens_no_more_is_lost_and_who_does_not_come_is_late(host: str | None) -> None:
    gone, there = Listener(host), Listener(host)
    gone.close()
    with pytest.raises(PeerLostError, match="g: expected rank 0 at "):
        there.meet("g", 1, [gone.endpoint, there.endpoint], SOON(1))
    with pytest.raises(OperationTimeoutError, match="g: expected rank 1 to connect"):
        there.meet("g", 0, [there.endpoint, gone.endpoint], SOON(0.05))
    there.close()
