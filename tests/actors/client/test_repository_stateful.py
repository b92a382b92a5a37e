"""Save, derive, load, query, pin and retire in any order, against a plain dict (a hypothesis state machine on Ray).

The shards free memory soon after a retirement or a release, which do not wait for that.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from tensorvine.actors import PrefixMatch, Repository
from tensorvine.actors.rpc.catalog_calls import CatalogCalls
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.store import Layer, ModelGraph, ModelRef
from tensorvine.store.errors import ModelNotFoundError

from tests.support.waiting import eventually

NAMES = ["a", "b", "c"]
KINDS = ["Dense", "Conv"]


@dataclass
class Version:
    """What the plain model knows of a version."""

    graph: ModelGraph
    tensors: dict[str, np.ndarray]
    owners: dict[str, ModelRef]
    parent: ModelRef | None
    quality: float | None
    serial: int
    live: bool = True
    pins: int = 0
    planned: bool = False
    """It was loaded after its retirement: until its memory is used again, that may be repeated without a message."""
    blocks: dict[str, tuple[ModelRef, str]] = field(default_factory=dict)
    """Tensor -> (version, tensor) that wrote the bytes it shares."""


def graph_of(kinds: list[str]) -> ModelGraph:
    layers = [Layer("in", {"class": "Input"})]
    for i, kind in enumerate(kinds):
        layers.append(Layer(f"l{i}", {"class": kind}, [layers[-1].name], [f"l{i}/w"]))
    return ModelGraph(layers)


def array(seed: int, big: bool) -> np.ndarray:
    return np.full(20_000 if big else 10, seed, np.float32)


class Machine(RuleBasedStateMachine):
    """The repository beside the plain model. `repo` is set by the test: starting one per example takes too long."""

    repo: Repository
    versions = Bundle("versions")
    pins = Bundle("pins")

    def __init__(self) -> None:
        super().__init__()
        self.root = uuid.uuid4().hex[:8]
        self.model: dict[ModelRef, Version] = {}
        self.next: dict[str, int] = {}
        self.held: list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]] = []
        self.matches: list[PrefixMatch] = []
        self.salt = {"class": "Salt", "salt": self.root}

    # ---- the plain model --------------------------------------------------------------------------------

    def latest(self, name: str) -> ModelRef | None:
        live = [ref for ref, v in self.model.items() if v.live and ref.name == name]
        return max(live, default=None)

    def expected_bytes(self) -> tuple[int, int]:
        blocks = {v.blocks[t]: v.tensors[t].nbytes for v in self.model.values() if v.live or v.pins for t in v.tensors}
        return len(blocks), sum(blocks.values())

    def salted(self, kinds: list[str]) -> ModelGraph:
        graph = graph_of(kinds)
        return ModelGraph([Layer("in", self.salt), *(layer for layer in graph.layers if layer.name != "in")])

    # ---- rules ------------------------------------------------------------------------------------------

    @rule(
        target=versions,
        name=st.sampled_from(NAMES),
        kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
        seeds=st.lists(st.integers(0, 2), min_size=4, max_size=4),
        big=st.booleans(),
        tied=st.booleans(),
        parent=st.none() | versions,
        auto=st.booleans(),
        quality=st.none() | st.sampled_from([0.1, 0.5]),
    )
    def save(
        self,
        name: str,
        kinds: list[str],
        seeds: list[int],
        big: bool,
        tied: bool,
        parent: ModelRef | None,
        auto: bool,
        quality: float | None,
    ) -> ModelRef:
        name = f"{self.root}/{name}"
        graph = self.salted(kinds)
        arrays = {seed: array(seed, big) for seed in seeds}
        tensors = {f"l{i}/w": arrays[seeds[i]] if tied else array(seeds[i], big) for i in range(len(kinds))}
        if parent is not None and not (self.model[parent].live or self.model[parent].pins):
            with pytest.raises(ModelNotFoundError):
                self.repo.save(name, tensors, graph=graph, parent=parent)
            return multiple()
        base = parent if parent is not None else self.latest(name)
        saved = self.repo.save(
            name, tensors, graph=graph, parent=parent, inherit="auto" if auto else None, quality=quality
        )
        ref = ModelRef(name, self.next.get(name, 1))
        self.next[name] = ref.version + 1
        assert saved.ref == ref
        version = Version(graph, tensors, {}, base, quality, len(self.model))
        old = self.model[base] if base is not None and auto else None
        written: dict[int, tuple[ModelRef, str]] = {}
        for tensor, value in tensors.items():
            among = [] if old is None else [tensor] if tensor in old.tensors else sorted(old.tensors)
            same = next((other for other in among if np.array_equal(old.tensors[other], value)), None)
            version.owners[tensor] = old.owners[same] if same is not None else ref
            block = old.blocks[same] if same is not None else written.setdefault(id(value), (ref, tensor))
            version.blocks[tensor] = block
        assert saved.bytes_written == sum(tensors[name].nbytes for _, name in written.values())
        self.model[ref] = version
        return ref

    @rule(ref=versions)
    def load(self, ref: ModelRef) -> None:
        version = self.model[ref]
        gone = not version.live and not version.pins
        try:
            loaded = self.repo.load(ref)
        except ModelNotFoundError:
            assert gone
            return
        assert not gone or version.planned
        version.planned = not version.live
        assert loaded.keys() == version.tensors.keys()
        assert all(np.array_equal(loaded[t], value) for t, value in version.tensors.items())
        assert gone or self.repo.owners(ref) == version.owners
        self.held.append((loaded, version.tensors))

    @rule(ref=versions)
    def lineage(self, ref: ModelRef) -> None:
        if not self.model[ref].live:
            return
        chain, current = [], ref
        while current is not None:
            chain.append(current)
            current = self.model[current].parent
        assert self.repo.lineage(ref) == chain
        below, frontier = set(), {ref}
        while frontier:
            frontier = {r for r, v in self.model.items() if v.parent in frontier}
            below |= frontier
        assert self.repo.descendants(ref) == sorted(r for r in below if self.model[r].live)

    @rule(target=pins, kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    def query(self, kinds: list[str]) -> PrefixMatch:
        graph = self.salted(kinds)
        match = self.repo.longest_prefix(graph)
        live = {ref: v for ref, v in self.model.items() if v.live}
        if not live:
            assert match is None
            return multiple()
        best = max(
            live,
            key=lambda r: (
                len(graph.common_prefix(live[r].graph)),
                live[r].quality if live[r].quality is not None else float("-inf"),
                live[r].serial,
            ),
        )
        assert match is not None
        assert match.ref == best
        assert match.layers == graph.common_prefix(live[best].graph)
        self.model[best].pins += 1
        self.matches.append(match)
        return match

    @rule(match=consumes(pins))
    def release(self, match: PrefixMatch) -> None:
        match.release()
        self.model[match.ref].pins -= 1

    @rule(ref=versions)
    def retire(self, ref: ModelRef) -> None:
        if self.model[ref].live:
            self.repo.retire(ref)
            self.model[ref].live = False
        else:
            with pytest.raises(ModelNotFoundError):
                self.repo.retire(ref)

    # ---- what always holds ------------------------------------------------------------------------------

    @invariant()
    def what_is_stored_is_what_the_model_says(self) -> None:
        assert self.repo.models(self.root) == sorted(ref for ref, v in self.model.items() if v.live)
        expected = self.expected_bytes()
        eventually(lambda: self.stored() == expected, f"{expected} tensors and bytes are stored", pause=0.005)

    def stored(self) -> tuple[int, int]:
        stats = self.repo.stats()
        return stats.tensors, stats.bytes_memory

    def teardown(self) -> None:
        for ref, version in self.model.items():
            if version.live:
                self.repo.retire(ref)
        for match in self.matches:
            match.release()
        eventually(lambda: self.stored() == (0, 0), "nothing is stored", pause=0.005)
        stats = self.repo.stats()
        assert stats.models == 0
        assert [s.bytes_allocated for s in stats.shards] == [0] * len(stats.shards)
        assert stats.catalog.pins == 0
        for loaded, tensors in self.held:
            assert all(np.array_equal(loaded[t], value) for t, value in tensors.items())
        self.repo._session.call_all(ShardCalls.check())
        self.repo._session.ask(CatalogCalls.check())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shards", [1, 2])
def test_any_order_of_calls_matches_the_plain_model(cluster: object, shards: int) -> None:
    with Repository.start(f"state-{shards}", shards=shards, preallocate_bytes=0) as repo:
        bound = type("Bound", (Machine,), {"repo": repo})
        run_state_machine_as_test(
            bound,
            settings=settings(
                max_examples=25,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                print_blob=True,
            ),
        )
