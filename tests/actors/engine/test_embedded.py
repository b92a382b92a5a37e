"""Which Ray a process finds on its machine."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import ray
from ray._private import services
from tensorvine.actors.engine import embedded
from tensorvine.store.errors import RepositoryNotFoundError


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[str]:
    """The addresses of the Rays that run on this machine, as its processes show them: a test changes them."""
    addresses: set[str] = set()

    def shown(flag: str) -> set[str]:
        assert flag == "--gcs-address"
        return set(addresses)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(services, "_find_address_from_flag", shown)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return addresses


def nobody() -> str:
    """Return an address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_ray_that_has_ended_is_not_found_again(runs: set[str]) -> None:
    ended = nobody()
    runs.add(ended)
    with pytest.raises(RepositoryNotFoundError, match=ended):
        embedded.attach()
    runs.clear()
    with pytest.raises(RepositoryNotFoundError) as refused:
        embedded.attach()
    assert ended not in str(refused.value)


def test_a_ray_that_began_since_the_last_look_is_found(runs: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    runs.add(nobody())
    assert embedded.running() is None  # nothing is written down: that one is embedded in another process
    joined: list[str] = []
    monkeypatch.setattr(ray, "init", lambda address, **_: joined.append(services.find_gcs_addresses()))
    runs.clear()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        runs.add(address)
        embedded.attach()
    assert joined == [{address}]
