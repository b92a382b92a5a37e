"""The lock files: what they pin has hashes and is within the ranges of pyproject.toml. Nothing here needs a network."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]
LOCKS = {"test": "requirements.lock", "examples": "requirements-examples.lock", None: "requirements-audit.lock"}
EXTRAS = {"test": ("all", "torch"), "examples": ("ray", "redis", "torch", "viz")}
"""Group -> the extras that its lock contains, too."""
NAMES = {"ray", "dask", "torch", "tensorflow", "gpu", "redis", "search", "viz", "files", "web"}
BEFORE = {
    "serve": {"ray"},
    "train": {"ray"},
    "deephyper": {"search"},
    "pictures": {"viz"},
    "codecs": {"files"},
    "interchange": {"files"},
    "examples": {"ray", "redis", "tensorflow", "torch", "viz"},
    "examples-dask": {"dask", "redis", "tensorflow", "torch", "viz"},
    "benchmarks": {"dask", "files", "ray", "redis", "tensorflow", "torch", "viz"},
}
"""Extra of 0.1.0 -> the extras that it installs until 0.2.0."""
NOT_LOCKED = {"torch"}
"""And what only it needs: said in the head of each lock."""
PIN = re.compile(r"([a-z0-9][a-z0-9._-]*)==(\S+)")


def pins(lock: str) -> dict[str, list[str]]:
    """Read a lock: NAME==VERSION -> hashes."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / lock).read_text().splitlines():
        if line.startswith("    --hash="):
            found[next(reversed(found))].append(line.strip(" \\").removeprefix("--hash="))
        elif line and not line.lstrip().startswith("#"):
            found[line.removesuffix(" \\")] = []
    return found


def versions(lock: str) -> dict[str, str]:
    return dict(pin.split("==") for pin in pins(lock))


def needs(*extras: str, group: str | None = None) -> set[Requirement]:
    """Return what the project asks for with extras and a dependency group, those that they include followed."""
    found = {Requirement(text) for text in PROJECT["dependencies"]}
    open_: list[Any] = [f"{PROJECT['name']}[{','.join(extras)}]"] + ([{"include-group": group}] if group else [])
    while open_:
        each = open_.pop()
        if isinstance(each, dict):
            open_ += PYPROJECT["dependency-groups"][each["include-group"]]
        elif (asked := Requirement(each)).name == PROJECT["name"]:
            open_ += [text for name in asked.extras for text in PROJECT["optional-dependencies"][name]]
        else:
            found.add(asked)
    return found


@pytest.mark.parametrize("lock", LOCKS.values())
def test_each_package_is_pinned_and_has_hashes(lock: str) -> None:
    found = pins(lock)
    assert len(found) > 20
    for pin, hashes in found.items():
        assert PIN.fullmatch(pin), pin
        assert hashes, pin
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", one) for one in hashes), pin
    assert not [pin for pin in found if re.match("torch==|triton==|nvidia-|cuda-", pin)]


@pytest.mark.parametrize("group", ["test", "examples"])
def test_the_lock_is_within_the_ranges(group: str) -> None:
    locked = versions(LOCKS[group])
    for asked in needs(*EXTRAS[group], group=group):
        name = canonicalize_name(asked.name)
        if name not in NOT_LOCKED:
            assert asked.specifier.contains(locked[name]), f"{asked}: the lock has {locked.get(name)}"


def test_torch_is_within_its_range() -> None:
    (found,) = re.findall(r"\btorch==(\S+)", (ROOT / "scripts/_venv").read_text())
    assert all(asked.specifier.contains(found) for asked in needs("torch") if asked.name == "torch")


def test_there_are_ten_extras_and_those_of_before() -> None:
    assert PROJECT["optional-dependencies"].keys() == {*NAMES, "all", *BEFORE}
    for name, extras in BEFORE.items():
        assert needs(name) >= needs(*extras), name


def test_all_installs_everything_without_cuda() -> None:
    cuda = {asked.name for asked in needs("gpu", "torch") - needs()}
    assert cuda == {"cupy-cuda12x", "torch"}
    assert needs("all") == {asked for asked in needs(*NAMES) if asked.name not in cuda}


def test_the_demo_has_the_versions_that_were_tested() -> None:
    assert pins(LOCKS["examples"]).items() <= pins(LOCKS["test"]).items()


@pytest.mark.parametrize(("before", "allowed"), [("3.13.1", False), ("3.13.2", True)])
def test_no_keras_whose_safe_mode_can_be_bypassed(before: str, allowed: bool) -> None:
    (asked,) = [asked for asked in needs("tensorflow") if asked.name == "keras"]
    assert asked.specifier.contains(before) == allowed


def test_what_is_installed_is_what_is_locked() -> None:
    stamp = Path(sys.prefix, ".tensorvine-test")
    both = (ROOT / "pyproject.toml").read_bytes() + (ROOT / LOCKS["test"]).read_bytes()
    said = subprocess.run(["/usr/bin/cksum"], input=both, capture_output=True, check=True, timeout=60).stdout
    if not stamp.exists() or stamp.read_text() != said.decode().strip():
        pytest.skip("this environment was not installed by scripts/_venv, or before the lock was changed")
    assert {name: installed(name) for name in versions(LOCKS["test"])} == versions(LOCKS["test"])


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
