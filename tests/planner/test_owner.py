"""Who a repository belongs to: the kernel's word, on whatever host."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys

import pytest
from tensorvine.planner.owner import Owner, check_own
from tensorvine.planner.topology import Topology
from tensorvine.store.errors import ForeignRepositoryError, TensorVineError

from tests.support.other_user import OTHER, needs_root

ADA = Owner("ada", 1000, "node-7")
OWNERLESS = (
    '{"repository": "default", "shards": [0, 1], "started_by": "starter", "path": null, "replicas": 1, "version": 3,'
    ' "used": 2, "leaving": [1]}'
)
HERE = "import os, sys; from tensorvine.planner.owner import Owner; os.seteuid(int(sys.argv[1])); print(Owner.here())"


def test_this_process_is_of_its_user() -> None:
    uid = os.geteuid()
    assert Owner.here() == Owner(pwd.getpwuid(uid).pw_name, uid, socket.gethostname())


@needs_root
@pytest.mark.parametrize(("uid", "name"), [(OTHER, "nobody"), (64321, "64321")], ids=["named", "nameless"])
def test_the_environment_is_not_asked(uid: int, name: str) -> None:
    environment = os.environ | dict.fromkeys(("USER", "LOGNAME", "USERNAME"), "root")
    command = [sys.executable, "-c", HERE, str(uid)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=100)
    assert done.stdout == f"{name} (user {uid}) on {socket.gethostname()}\n"


@pytest.mark.parametrize("user", [ADA, Owner("ada", 1000, "node-8")])
def test_a_user_is_the_same_on_each_host(user: Owner) -> None:
    check_own("default", ADA, user)


@pytest.mark.parametrize("user", [Owner("bob", 1001, "node-7"), Owner("ada", 1001, "node-7"), Owner("eve", 1000, "x")])
def test_another_user_is_told_whose_it_is_and_how_to_ask(user: Owner) -> None:
    with pytest.raises(ForeignRepositoryError) as caught:
        check_own("default", ADA, user)
    for word in ("ada (user 1000) on node-7", str(user), "Repository.connect('default')", "--name default"):
        assert word in str(caught.value)
    assert isinstance(caught.value, TensorVineError)
    assert isinstance(caught.value, PermissionError)


def test_an_unknown_owner_keeps_nobody_off() -> None:
    check_own("default", None, ADA)


def test_the_owner_stays_through_changes_and_restarts() -> None:
    before = Topology("default", (0, 1), "starter", owner=ADA)
    assert before.grown(1).draining((0,)).left((0,)).owner == ADA
    assert Topology.from_json(before.to_json()) == before


def test_a_topology_without_an_owner_belongs_to_nobody() -> None:
    found = Topology.from_json(OWNERLESS)
    assert (found.owner, found.version, found.leaving) == (None, 3, (1,))
    assert Topology.from_json(found.to_json()) == found
