"""A file-system load of many random readers and writers: fio, or the same from Python where fio is missing.

Check-QZP's table 3: random reads and writes of 4 KiB in one file of 1 GiB, through the page cache, 64 jobs on
20 hardware threads of a machine with 64 GB. Here as many jobs per core, and a smaller file; `FileLoad.about`
says how many and how large.

Rules
- The load runs when the `with` block begins, and ends with it. Should this process be killed, the jobs end by
  themselves: the kernel kills fio, a Python job sees that it is nobody's child any more.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import psutil

from .measure import MIB, wait_until

log = logging.getLogger(__name__)

BLOCK_BYTES = 4096
JOBS_PER_CORE = 64 / 20
LONGEST_S = 3600


@dataclass
class FileLoad:
    """What runs, and after its end what it did."""

    engine: str
    """`fio` or `python`."""
    jobs: int
    """Readers and writers, each doing both."""
    size_bytes: int
    """Of the file that all share."""
    operations_per_s: float = 0.0
    """Reads and writes together, over the whole run; 0 until it has ended."""

    @property
    def about(self) -> str:
        """Say what the load is, and what the paper's was."""
        return (
            f"{self.engine}: {self.jobs} jobs, random reads and writes of 4 KiB in {self.size_bytes // MIB} MiB "
            "(the paper: 64 jobs, 1 GiB)"
        )


@contextmanager
def file_load(folder: Path, *, jobs: int | None = None, size_bytes: int = 512 * MIB) -> Iterator[FileLoad]:
    """Run the load while the block runs.

    Args:
        folder: on the file system that is to be busy.
        jobs: how many; None: as many per core as the paper had per hardware thread.
        size_bytes: of the file; a multiple of 4096.

    Raises:
        ValueError: if there is no job, or no block in the file.
        OSError: if fio ends before it is told to.
    """
    jobs = round(JOBS_PER_CORE * (os.cpu_count() or 1)) if jobs is None else jobs
    if jobs < 1 or size_bytes < BLOCK_BYTES:
        raise ValueError(f"file_load: expected a job and {BLOCK_BYTES} bytes; found {jobs} jobs, {size_bytes} bytes")
    path = folder / "load"
    _fill(path, size_bytes)
    engine = _fio if shutil.which("fio") and shutil.which("setpriv") else _python
    if engine is _python:
        log.warning("fio (or setpriv) is not installed: Python processes make the load")
    try:
        with engine(path, jobs, size_bytes) as load:
            yield load
    finally:
        path.unlink()


@contextmanager
def _fio(path: Path, jobs: int, size_bytes: int) -> Iterator[FileLoad]:
    options = {
        "name": "load",
        "filename": path,
        "size": size_bytes,
        "rw": "randrw",
        "bs": BLOCK_BYTES,
        "ioengine": "libaio",
        "direct": 0,
        "numjobs": jobs,
        "thread": 1,  # of one process: one signal ends them all
        "time_based": 1,
        "runtime": LONGEST_S,
        "group_reporting": 1,
        "output-format": "json",
        "aux-path": path.parent,
    }
    command = ["setpriv", "--pdeathsig", "KILL", "fio", *(f"--{key}={value}" for key, value in options.items())]
    found = FileLoad("fio", jobs, size_bytes)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=path.parent)  # noqa: S603
    with ExitStack() as stack:
        output: list[bytes] = []
        stack.callback(lambda: output.extend(_ended(process)))
        wait_until(lambda: process.poll() is not None or _busy(process.pid), "fio to write")
        if process.poll() is not None:
            raise OSError(f"fio: expected it to run; it ended with {process.returncode}: {_ended(process)[1]!r}")
        yield found
        if process.poll() is not None:
            raise OSError(f"fio: expected it to run until now; it ended with {process.returncode}")
    text = output[0].decode()
    report: dict[str, Any] = json.loads(text[text.index("{") :])["jobs"][0]
    found.operations_per_s = report["read"]["iops"] + report["write"]["iops"]


def _ended(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Ask fio to end, which lets it report, and make it."""
    process.terminate()
    try:
        return process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


def _busy(pid: int) -> bool:
    """Say whether fio has written: bytes, as asynchronous requests are no calls of `write`."""
    try:
        return psutil.Process(pid).io_counters().write_bytes > 0
    except psutil.NoSuchProcess:
        return False


@contextmanager
def _python(path: Path, jobs: int, size_bytes: int) -> Iterator[FileLoad]:
    spawn = multiprocessing.get_context("spawn")
    counts = [spawn.Value("q", 0, lock=False) for _ in range(jobs)]
    stop = spawn.Event()
    found = FileLoad("python", jobs, size_bytes)
    children = [
        spawn.Process(target=_read_and_write, args=(path, size_bytes, seed, count, stop.is_set), daemon=True)
        for seed, count in enumerate(counts)
    ]
    start = time.perf_counter()
    try:
        for child in children:
            child.start()
        wait_until(lambda: all(count.value for count in counts), "all jobs to read and write")
        start = time.perf_counter()
        before = sum(count.value for count in counts)
        yield found
        found.operations_per_s = (sum(count.value for count in counts) - before) / (time.perf_counter() - start)
    finally:
        stop.set()
        for child in children:
            child.join(10)
            if child.is_alive():
                child.kill()
                child.join()


def _read_and_write(
    path: Path, size_bytes: int, seed: int, count: Synchronized[int], stopped: Callable[[], bool]
) -> None:
    """Be one job, until it is told to stop or its parent has gone."""
    parent = os.getppid()
    rng = random.Random(seed)  # noqa: S311  where to read is no secret
    block = rng.randbytes(BLOCK_BYTES)
    file = os.open(path, os.O_RDWR)
    try:
        while not stopped() and os.getppid() == parent:
            for _ in range(64):
                offset = rng.randrange(size_bytes // BLOCK_BYTES) * BLOCK_BYTES
                if rng.random() < 0.5:
                    os.pread(file, BLOCK_BYTES, offset)
                else:
                    os.pwrite(file, block, offset)
            count.value += 64
    finally:
        os.close(file)


def _fill(path: Path, size_bytes: int) -> None:
    piece = os.urandom(MIB)
    with path.open("wb") as file:
        for start in range(0, size_bytes, MIB):
            file.write(piece[: size_bytes - start])
        file.flush()
        os.fsync(file.fileno())
