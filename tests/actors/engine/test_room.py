"""How much memory a Ray may use that is started here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorvine.actors.engine.room import NEEDED_BYTES, STORE_LEAST, STORE_MOST, Room, available, outlast_workers
from tensorvine.store.errors import StoreFullError

from tests.support.control_groups import ENTER, memory_group

MIB = 1 << 20
ROOM = "from tensorvine.actors.engine.room import available; available().check()"


def group(folder: Path, version: int, limit: object, used: int, droppable: int) -> None:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    if version == 2:
        names = ("memory.max", "memory.current", "inactive_file")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"cache 5\n{names[2]} {droppable}\n")


@pytest.mark.parametrize("version", [1, 2])
class TestGroups:
    @pytest.fixture
    def told(self, tmp_path: Path, version: int) -> Path:
        file = tmp_path / "cgroup"
        file.write_text("5:cpu:/\n4:memory:/job/step\n" if version == 1 else "0::/job/step\n")
        return file

    @pytest.fixture
    def root(self, tmp_path: Path, version: int) -> Path:
        return tmp_path / "groups" / ("memory" if version == 1 else "")

    def test_the_narrowest_group_above_counts(self, tmp_path: Path, told: Path, root: Path, version: int) -> None:
        group(root, version, 900 * MIB, 100 * MIB, 0)
        group(root / "job", version, 500 * MIB, 300 * MIB, 60 * MIB)
        group(root / "job/step", version, "max", 300 * MIB, 0)
        found = available(tmp_path / "groups", told)
        assert found.nbytes == 260 * MIB
        assert found.limited_by == f"the limit of 500 MiB in {root / 'job'}"
        with pytest.raises(StoreFullError, match="found 260 MiB, according to the limit of 500 MiB"):
            found.check()

    def test_a_container_that_does_not_see_where_it_is(
        self, tmp_path: Path, told: Path, root: Path, version: int
    ) -> None:
        told.write_text(told.read_text().replace("/job/step", "/../../job"))
        group(root, version, 700 * MIB, 100 * MIB, 0)
        assert available(tmp_path / "groups", told).nbytes == 600 * MIB

    def test_used_up(self, tmp_path: Path, told: Path, root: Path, version: int) -> None:
        group(root, version, 100 * MIB, 120 * MIB, 0)
        assert available(tmp_path / "groups", told).nbytes == 0


def test_no_groups(tmp_path: Path) -> None:
    assert available(tmp_path, tmp_path / "missing").limited_by == "the machine"


def test_sizes() -> None:
    for nbytes in (NEEDED_BYTES, 4 << 30, 1 << 40):
        room = Room(nbytes, 2 * nbytes, "the machine")
        room.check()
        assert STORE_LEAST <= room.store_bytes <= STORE_MOST
        assert room.store_bytes + room.beside(room.store_bytes) == nbytes
    assert Room(100, 200, "the machine").beside(300) == 1


def test_a_real_group_of_512_mib() -> None:
    with memory_group(512 * MIB) as procs:
        asked = subprocess.run(
            ["/bin/sh", "-c", ENTER, "sh", sys.executable, "-c", ROOM],
            env={**os.environ, "PROCS": str(procs)},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert "StoreFullError: starting a Ray: expected at least 768 MiB" in asked.stderr
    assert "the limit of 512 MiB" in asked.stderr


def test_services_are_not_the_first_that_the_kernel_ends(tmp_path: Path) -> None:
    file = tmp_path / "oom_score_adj"
    for before, after in (("1000", "0"), ("0", "0"), ("-500", "-500")):
        file.write_text(before)
        outlast_workers(file)
        assert file.read_text() == after
    outlast_workers(tmp_path / "missing" / "file")  # it is told, and goes on
