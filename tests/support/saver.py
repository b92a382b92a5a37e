"""Saves many versions to a path until it is killed, and says which ones it was told are on disk.

    python -m tests.support.saver PATH FIRST

Starts an own embedded Ray and a repository of two shards on PATH, and saves from three clients at
once with `durability="disk"`; some saves go to memory only, which nobody is told about. For each durable save that
returned it prints `REF SEED`: what `tensors_of` gives for SEED is what the version has. FIRST is where seeds start.
"""

from __future__ import annotations

import sys
import threading
from itertools import count

import numpy as np
from tensorvine.actors import Repository
from tensorvine.clusters import LocalCluster
from tensorvine.store import Delta, Shuffle, Zstd

from tests.support.warm import warm_workers

MIB = 1 << 20
SIZES = (100, 3000, 200_000, 3 * MIB)
"""Bytes of a changing tensor: some travel inside messages, some lie in shared memory."""


def tensors_of(seed: int) -> dict[str, np.ndarray]:
    """Return the tensors of a version: a part that all share, a part that four in a row share, and an own part.

    Every 16th is larger than one segment.
    """
    rng = np.random.default_rng(seed)
    given = {
        "shared": np.arange(40_000, dtype=np.float32),
        "slow": np.full(1000, seed // 4, np.int64),
        "own": rng.integers(0, 256, SIZES[seed % 4], np.uint8),
        "seed": np.array(seed),
    }
    if seed % 16 == 5:
        given["large"] = np.full(33 * MIB // 4, seed, np.float32)
    return given


def save(repo: Repository, name: str, seeds: range | count[int], said: threading.Lock) -> None:
    """Save until the process is killed."""
    for seed in seeds:
        if seed % 5 == 4:
            repo.save(f"{name}-memory", {"t": np.array(seed)})
        saved = repo.save(name, tensors_of(seed), metadata={"seed": seed}, durability="disk", timeout=300)
        with said:
            sys.stdout.write(f"{saved.ref} {seed}\n")
            sys.stdout.flush()


def main() -> None:
    """See the top."""
    path, first = sys.argv[1], int(sys.argv[2])
    with warm_workers(), LocalCluster(object_store_bytes=128 * MIB, cpus=2):
        codec = Delta() | Shuffle() | Zstd(1)
        repo = Repository.start("killed", path=path, shards=2, store_bytes=192 * MIB, preallocate_bytes=0, codec=codec)
        said = threading.Lock()
        clients = [repo, Repository.connect("killed"), Repository.connect("killed")]
        threads = [
            threading.Thread(target=save, args=(client, f"model-{n}", count(first + 1000 * n), said), daemon=True)
            for n, client in enumerate(clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
