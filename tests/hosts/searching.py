"""A small search: candidates draw layers, load what the longest stored prefix has of them, and store what is theirs.

A layer's tensor says who wrote it: it follows from the version that `Repository.owners` names.
"""

from __future__ import annotations

import zlib
from random import Random

import numpy as np
from tensorvine.actors.client.repository import Repository

from tests.support.disk import chain

KINDS = "abc"
LAYERS = 5
WIDTH = 20_000
"""Floats of a layer: a block of its own."""


def candidate(repo: Repository, name: str, kinds: str, quality: float | None = None) -> str | None:
    """Make a model of layers of these kinds, and store it under a new name; give whom it inherits from.

    Raises:
        ValueError: what was loaded of the ancestor is not what its owners wrote.
    """
    graph = chain(kinds)
    match = repo.longest_prefix(graph)
    if match is None:
        repo.save(name, {t: written(f"{name}@1", t) for t in tensors_of(kinds)}, graph=graph, quality=quality)
        return None
    with match:
        found = repo.load(match.ref, tensors=list(match.tensors.values()))
        owners = repo.owners(match.ref)
        wrong = [t for t, array in found.items() if not np.array_equal(array, written(str(owners[t]), t))]
        if wrong:
            raise ValueError(f"{name}: wrong bytes in {wrong} of {match.ref}")
        own = {t: written(f"{name}@1", t) for t in tensors_of(kinds) if t not in match.tensors}
        repo.save(name, own, graph=graph, parent=match.ref, inherit=match.layers, quality=quality)
        return str(match.ref)


def search(repo: Repository, run: str, candidates: int) -> None:
    """Make candidates whose layers are drawn."""
    random = Random(run)
    for number in range(candidates):
        candidate(repo, f"{run}-{number}", "".join(random.choices(KINDS, k=LAYERS)), random.random())


def verified(repo: Repository, prefix: str) -> dict[str, list[str]]:
    """Load all models of a search, and hold each tensor against its owner; give model -> lineage.

    Raises:
        ValueError: a tensor is not what its owner wrote.
    """
    lineages: dict[str, list[str]] = {}
    for ref in repo.models(prefix):
        owners = repo.owners(ref)
        for tensor, array in repo.load(ref).items():
            if not np.array_equal(array, written(str(owners[tensor]), tensor)):
                raise ValueError(f"{ref}: {tensor} is not what {owners[tensor]} wrote")
        lineages[str(ref)] = [str(each) for each in repo.lineage(ref)]
    return lineages


def tensors_of(kinds: str) -> list[str]:
    """Name the tensors of layers."""
    return [f"l{place}/w" for place in range(len(kinds))]


def written(owner: str, tensor: str) -> np.ndarray:
    """Return what a version wrote of a tensor."""
    return np.random.default_rng(zlib.crc32(f"{owner} {tensor}".encode())).standard_normal(WIDTH, np.float32)
