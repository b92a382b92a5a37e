"""Save, derive, load, retire, evict and start again in any order, against a plain dict, on a real path."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tensorvine.actors import PrefixMatch, Repository
from tensorvine.store import Codec, Delta, KeepLast, ModelRef, Shuffle, Zstd
from tensorvine.store.errors import ModelNotFoundError

from tests.support.disk import MIB, chain, check, same, start, weights

pytestmark = pytest.mark.timeout(600)

NAMES = ["a", "b/c"]
TENSORS = ["l0/w", "l1/w", "l2/w"]
GRAPH = chain(["Dense"] * 3)


@dataclass
class Version:
    """What the plain model knows of a version."""

    tensors: dict[str, np.ndarray]
    owners: dict[str, ModelRef]
    parent: ModelRef | None
    quality: float | None
    live: bool = True


def array(seed: int, size: int) -> np.ndarray:
    """Return a tensor; those of neighbouring seeds differ in one element."""
    made = weights(size, 0)
    made[seed % size] = seed
    return made


class Machine(RuleBasedStateMachine):
    """The repository beside the plain model."""

    codec: Codec | None
    versions = Bundle("versions")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.model: dict[ModelRef, Version] = {}
        self.next: dict[str, int] = {}
        self.held: list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]] = []
        self.matches: list[PrefixMatch] = []
        self.repo: Repository | None = None
        self.starts = 0

    @initialize(shards=st.integers(1, 2), keep=st.booleans())
    def begin(self, shards: int, keep: bool) -> None:
        self.starts += 1
        self.repo = start(
            self.folder.name, shards, store_bytes=16 * MIB, codec=self.codec, keep=KeepLast(1) if keep else None
        )

    @precondition(lambda self: self.starts < 3)
    @rule(shards=st.integers(1, 3), keep=st.booleans(), flush=st.booleans())
    def start_again(self, shards: int, keep: bool, flush: bool) -> None:
        for match in self.matches:
            match.release()
        self.matches.clear()
        if flush:
            self.repo.flush()
        self.repo.close()
        self.begin(shards, keep)
        assert {ref: self.repo.info(ref).quality for ref in self.repo.models()} == {
            ref: v.quality for ref, v in self.model.items() if v.live
        }

    @rule(
        target=versions,
        name=st.sampled_from(NAMES),
        seeds=st.lists(st.integers(0, 3), min_size=3, max_size=3),
        size=st.sampled_from([50, 40_000, 300_000]),
        parent=st.none() | versions,
        auto=st.booleans(),
        durable=st.booleans(),
        quality=st.none() | st.sampled_from([0.1, 0.5]),
    )
    def save(
        self,
        name: str,
        seeds: list[int],
        size: int,
        parent: ModelRef | None,
        auto: bool,
        durable: bool,
        quality: float | None,
    ) -> ModelRef | None:
        given = {tensor: array(seed, size) for tensor, seed in zip(TENSORS, seeds, strict=True)}
        options = {"graph": GRAPH, "quality": quality, "inherit": "auto" if auto else None}
        options |= {"durability": "disk" if durable else "memory"}
        if parent is not None and not self.model[parent].live:
            parent = None
        base = parent
        if base is None:
            base = max((r for r, v in self.model.items() if v.live and r.name == name), default=None)
        ref = self.repo.save(name, given, parent=parent, **options).ref
        assert ref == ModelRef(name, self.next.get(name, 1))
        self.next[name] = ref.version + 1
        old = self.model[base] if base is not None else None
        owners = {
            t: old.owners[t] if auto and old and np.array_equal(old.tensors[t], v) else ref for t, v in given.items()
        }
        self.model[ref] = Version(given, owners, base, quality)
        return ref

    @rule(
        ref=versions, some=st.none() | st.lists(st.sampled_from(TENSORS), min_size=1, unique=True), hold=st.booleans()
    )
    def load(self, ref: ModelRef, some: list[str] | None, hold: bool) -> None:
        version = self.model[ref]
        if not version.live:
            if not any(match.ref == ref for match in self.matches):  # who pinned it still sees it
                with pytest.raises(ModelNotFoundError):
                    self.repo.load(ref)
            return
        wanted = {t: version.tensors[t] for t in some or TENSORS}
        loaded = self.repo.load(ref, tensors=some)
        assert same(loaded, wanted)
        assert self.repo.owners(ref) == version.owners
        if hold and len(self.held) < 2:
            self.held.append((loaded, wanted))

    @rule(ref=versions)
    def lineage(self, ref: ModelRef) -> None:
        if self.model[ref].live:
            line, current = [], ref
            while current is not None:
                line.append(current)
                current = self.model[current].parent
            assert self.repo.lineage(ref) == line

    @rule(ref=versions)
    def retire(self, ref: ModelRef) -> None:
        if self.model[ref].live:
            self.repo.retire(ref)
            self.model[ref].live = False

    @rule()
    def pin(self) -> None:
        match = self.repo.longest_prefix(GRAPH)
        assert (match is not None) == any(v.live for v in self.model.values())
        if match is not None:
            self.matches.append(match)

    @rule()
    def flush_and_verify(self) -> None:
        self.repo.flush()
        assert self.repo.verify() == []

    @invariant()
    def what_lives_is_what_the_model_says(self) -> None:
        if self.repo is not None:
            assert self.repo.models() == sorted(ref for ref, v in self.model.items() if v.live)
            check(self.repo)
        for loaded, expected in self.held:
            assert same(loaded, expected)

    def teardown(self) -> None:
        if self.repo is not None:
            self.repo.close()
        self.folder.cleanup()


@pytest.mark.parametrize("codec", [None, Delta() | Shuffle() | Zstd()], ids=["plain", "lossless"])
def test_any_order_of_calls_matches_the_plain_model(cluster: object, codec: Codec | None) -> None:
    bound = type("Bound", (Machine,), {"codec": codec})
    run_state_machine_as_test(
        bound,
        settings=settings(
            max_examples=2,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
