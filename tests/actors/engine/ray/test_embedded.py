"""Which Ray a process joins, what it presents to it, and what it is told of it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
from ray._private.authentication import authentication_token_setup
from tensorvine.actors.collective import listener
from tensorvine.actors.engine.ray import auth_token, control_service, discovery, embedded
from tensorvine.actors.engine.ray.engine import RayEngine
from tensorvine.actors.engine.warned import warn_once
from tensorvine.store.errors import RepositoryNotFoundError

from tests.support.control_service import control_service as started
from tests.support.control_service import listener_of

OTHER = 65534
"""Another user."""


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, bool]]:
    """The Rays that this process joins, and whether it presents its token; it is in none, and has one."""
    found: list[tuple[str, bool]] = []
    warn_once.cache_clear()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda address, **_: found.append((address, auth_token.presented())))
    monkeypatch.setattr(
        authentication_token_setup, "_enable_token_auth", lambda: os.environ.update(RAY_AUTH_MODE="token")
    )
    monkeypatch.setattr(discovery, "_raylets", lambda: iter(()))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)
    for name in ("RAY_AUTH_MODE", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return found


@pytest.fixture
def closing(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a process of this user that listens, and does not say whether it asks for a token."""
    monkeypatch.setattr(control_service, "REACH_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def nobody() -> str:
    """Return an address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def see(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Have raylets of this user at these addresses."""
    monkeypatch.setattr(discovery, "_raylets", lambda: ((address, os.geteuid()) for address in addresses))


def test_a_ray_that_has_ended_is_not_found_again(joined: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    ended = nobody()
    see(monkeypatch, ended)
    with pytest.raises(RepositoryNotFoundError, match=ended):
        embedded.attach()
    see(monkeypatch)
    with pytest.raises(RepositoryNotFoundError) as refused:
        embedded.attach()
    assert ended not in str(refused.value)


def test_a_ray_that_began_since_the_last_look_is_found(
    joined: list[object], closing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, nobody())
    assert embedded.running() is None  # nothing is written down: that one is embedded in another process
    see(monkeypatch, closing)
    embedded.attach()
    assert joined == [(closing, True)]


def test_threads_that_want_a_ray_at_one_time_initialise_one(
    joined: list[object], closing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, rays = threading.Event(), threading.Event(), list[str]()

    def init(address: str, **_: object) -> None:
        begun.set()
        assert go_on.wait(60.0)
        rays.append(address)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: bool(rays))
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(embedded.attach, closing)
        assert begun.wait(60.0)
        second = threads.submit(embedded.attach_or_start)
        go_on.set()
        first.result(60.0)
        assert not second.result(60.0)
    assert rays == [closing]


def test_groups_meet_at_the_address_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node without a route to everywhere has another address than loopback's all the same."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(RayEngine, "address", lambda _: "10.77.0.2")
    assert listener.address() == "10.77.0.2"


class TestToken:
    def test_it_is_presented_to_this_users_ray(self, joined: list[object], closing: str) -> None:
        embedded.attach(closing)
        assert joined == [(closing, True)]

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
    def test_it_is_not_presented_to_another_users_unless_the_user_says_so(
        self, joined: list[object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with listener_of(OTHER) as theirs:
            embedded.attach(theirs)
            monkeypatch.setenv("RAY_ADDRESS", theirs)
            embedded.attach()
            monkeypatch.setenv("RAY_AUTH_MODE", "token")
            embedded.attach()
        assert joined == [(theirs, False), (theirs, False), (theirs, True)]

    def test_a_ray_that_asks_for_none_is_presented_none_and_warned_of_once_with_its_risk(
        self, joined: list[object], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with started(tmp_path, token=None) as address:
            embedded.attach(address)
            embedded.attach(address)
        assert joined == [(address, False)] * 2
        (warning,) = caplog.messages
        assert f"the Ray at {address} requires no token" in warning
        assert "run code as the user who started it" in warning

    def test_a_ray_that_asks_for_one_refuses_at_once_who_has_none(
        self, joined: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        with started(tmp_path, token="b" * 64) as address:
            embedded.attach(address)
            monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
            with pytest.raises(RepositoryNotFoundError, match=f"{address} requires a token.*RAY_AUTH_MODE=token"):
                embedded.attach(address)
        assert joined == [(address, True)]
        assert caplog.messages == []

    def test_a_ray_that_is_started_here_asks_for_it(
        self, joined: list[object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert embedded.attach_or_start()
        assert joined == [("local", True)]
        monkeypatch.delenv("RAY_AUTH_MODE")
        monkeypatch.setenv("RAY_ADDRESS", "local")
        embedded.attach()
        assert joined == [("local", True)] * 2
