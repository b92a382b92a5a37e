"""The kinds of worlds: how large a repository is, what its clients do how often, and what befalls it.

Rules
- Everything is drawn from the seed, in a fixed order: another order is other worlds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SIZES = (4, 40, 200, 400)
"""Elements of 8 bytes: inline, and one to several parts of memory."""
OPERATIONS = ("save", "load", "load version", "some", "retire", "let go", "pause", "check", "flush")
ON_REQUEST = ("query", "load match", "release", "place")
"""Operations of some themes only: others never draw them."""
THEMES = ("any", "any", "handover", "pressure", "drain", "disk", "replica", "starter", "clients", "compact")
BY_NAME = ("cluster", "change", "replicated", "nodes", "queries", "interrupts", "catalog")
"""Themes of worlds that are made only when they are asked for."""
LENGTHS = (0.15, 0.15, 0.15, 0.15, 0.3, 1.0)
"""Parts of a kind's operations: short worlds find as many kinds of errors in the same time, and as few lines of trace
to read."""


@dataclass
class Kind:
    """The kind of a world."""

    theme: str
    shards: int
    nodes: int
    clients: int
    path: bool
    replicas: int
    keep: int | None
    capacity: int
    operations: int
    faults: tuple[str, ...]
    fault_count: int
    names: int
    slowness_s: float

    weights: dict[str, int]
    """How often a client does what."""
    stalls: tuple[float, tuple[float, ...]]
    """The chance that a thread is delayed at a scheduling point, and how long in seconds."""
    copying: float | None = None
    """The chance that a thread is delayed before it copies bytes, if it is not by that of all other points."""
    sizes: tuple[int, ...] = SIZES
    tensors: tuple[int, ...] = (1, 2, 4)
    """How many a new model has."""
    holding: float = 0.4
    """The chance that a client keeps what it loaded."""
    delays: tuple[float, ...] = (0.05, 0.5, 3.0)
    """Seconds at most until the next fault."""
    mutation: float = 0.4
    """The chance that a tensor is another one in the next version."""
    ends: bool = False
    """The whole cluster dies in the middle, and another one starts on its path."""
    cross: float = 0.2
    """The chance that a model may derive from one of another name."""
    interrupts: float = 0.0
    """The chance that a signal comes during a client's operation, whose handler raises."""
    graphs: bool = False
    """Models have graphs."""
    later: float = 0.25
    """The chance that a save does not wait."""
    lost: float = 0.0
    """The chance that an answer is lost, though its call was carried out."""
    piece_bytes: int | None = None
    """Two threads copy what is longer than this; None: than the product's own number, so that one does."""
    follows: bool = False
    """There is one shard on each node, whichever nodes there are; else as many as `shards`."""

    @classmethod
    def drawn(cls, random: Any, wanted: str | None = None) -> Kind:
        """Draw one, of a wanted theme or any: a fifth of them of all sorts, the others with more of what is rare."""
        theme = random.choice(THEMES)
        theme = wanted if wanted is not None else theme
        kind = cls._any(random)
        kind.theme = theme
        if theme == "pressure":
            kind.path, kind.capacity, kind.operations = True, random.choice((16 << 10, 24 << 10)), 40
            kind.replicas, kind.shards, kind.clients = 1, random.choice((1, 1, 2)), random.choice((2, 3))
            kind.slowness_s = random.choice((0.0, 0.01, 0.1))
            kind.faults, kind.fault_count = (), 0
            kind.weights |= {"retire": 4, "load version": 3, "some": 2, "save": 5, "let go": 2, "load": 1}
            kind.weights |= {"flush": 0, "pause": 0, "check": 0}
            kind.stalls = (random.choice((0.02, 0.05)), random.choice(((0.001, 0.05), (0.001, 0.2))))
            kind.sizes, kind.tensors, kind.holding = (40, 200), (3, 4, 5), 0.1
        elif theme == "compact":
            kind.path, kind.capacity, kind.operations, kind.replicas = True, 16 << 10, 40, 1
            kind.shards, kind.clients, kind.names, kind.slowness_s = 1, 3, 3, random.choice((0.0, 0.01))
            kind.faults, kind.fault_count, kind.keep = (), 0, None
            kind.weights = dict.fromkeys(OPERATIONS, 0) | {"save": 6, "retire": 4, "load version": 4, "let go": 1}
            kind.stalls, kind.copying = (0.02, random.choice(((0.02, 0.2), (0.2, 0.5)))), 0.5
            kind.sizes, kind.tensors, kind.holding = (40, 200), (3, 4, 5), 0.05
        elif theme in ("drain", "handover", "change", "replicated"):
            kind.shards, kind.clients, kind.operations, kind.names = random.choice((2, 3)), 3, 40, 6
            kind.faults, kind.fault_count, kind.capacity = ("scale",), 4, 256 << 10
            kind.stalls = (random.choice((0.02, 0.05)), (0.001, 0.05, 0.3))
            kind.sizes, kind.cross, kind.slowness_s = (40, 200), 0.6, 0.0
            if theme == "replicated":
                kind.nodes, kind.replicas, kind.fault_count = 2, 2, random.choice((1, 2, 2))
            if theme in ("change", "replicated"):
                kind.faults = ("scale", "scale and crash", "scale and crash")
                theme = random.choice(("drain", "handover"))
            if theme == "drain":
                kind.weights |= {"load": 4, "load version": 4, "some": 2, "save": 3, "retire": 0, "flush": 0}
            else:
                kind.path = random.random() < 0.3
                kind.weights |= {"save": 6, "retire": 6, "load": 1, "load version": 1, "some": 0, "flush": 0}
        elif theme == "nodes":
            kind.follows, kind.nodes, kind.replicas, kind.path = (
                True,
                random.choice((1, 2, 3)),
                1,
                random.random() < 0.5,
            )
            kind.faults, kind.fault_count = ("node joins", "node joins", "node leaves", "node leaves", "node lost"), 8
            kind.clients, kind.operations, kind.names, kind.capacity = 3, 40, 6, 256 << 10
            kind.stalls = (random.choice((0.02, 0.05)), (0.001, 0.05, 0.3))
            kind.sizes, kind.cross, kind.slowness_s = (40, 200), 0.6, 0.0
            kind.weights |= {"load": 2, "load version": 2, "save": 4, "retire": 2, "pause": 6, "flush": 0}
            kind.delays = (0.3, 1.0, 3.0)
        elif theme == "disk":
            kind.path, kind.faults, kind.fault_count, kind.operations = True, ("disk",), random.choice((1, 2)), 16
            kind.weights |= {"flush": 3, "save": 5, "pause": 3, "retire": 1}
            kind.delays, kind.slowness_s = (1.0, 3.0), random.choice((0.0, 0.01))
        elif theme == "replica":
            kind.path, kind.nodes, kind.shards, kind.replicas = random.random() < 0.7, 2, random.choice((2, 3)), 2
            kind.faults, kind.fault_count, kind.slowness_s = ("crash shard",), 1, random.choice((0.1, 1.0, 3.0))
            kind.weights |= {"save": 6, "retire": 1, "pause": 3}
            kind.operations, kind.names, kind.cross, kind.sizes, kind.delays = 16, 3, 0.5, (40, 200), (1.0, 3.0, 6.0)
        elif theme == "starter":
            kind.path, kind.faults, kind.fault_count = random.random() < 0.7, ("scale", "crash both", "crash both"), 3
            kind.shards = max(kind.shards, 2)
        elif theme == "clients":
            kind.faults, kind.fault_count, kind.capacity = (
                ("kill client", "kill client", "stop"),
                3,
                random.choice((16 << 10, 24 << 10)),
            )
            kind.clients, kind.operations, kind.sizes, kind.tensors = 4, 20, (40, 200), (3, 4, 5)
            kind.weights |= {"let go": 0, "save": 5, "retire": 2}
        elif theme in ("queries", "interrupts"):
            kind.graphs, kind.replicas, kind.keep, kind.sizes = True, 1, None, (4, 40, 200)
            kind.clients, kind.operations, kind.names, kind.slowness_s = random.choice((1, 2, 3)), 24, 3, 0.0
            kind.capacity = random.choice((16 << 10, 48 << 10))
            kind.weights |= {"save": 5, "load": 1, "load version": 2, "some": 1, "retire": 2, "check": 1, "flush": 0}
            kind.weights |= {"query": 5, "load match": 2, "release": 3, "pause": 2}
            kind.later = random.choice((0.25, 0.7))
            faults = ("silent shard", "stop", "crash shard", "scale", "kill client")
            if theme == "queries":
                kind.lost = random.choice((0.0, 0.0, 0.02))
                kind.faults, kind.fault_count = random.sample(faults, 2), random.choice((0, 1, 2))
            else:
                kind.weights |= {"place": 2}
                if random.random() < 0.5:  # memory that was given back is soon another save's
                    kind.later, kind.sizes, kind.mutation, kind.clients = 1.0, (40, 200), 0.9, random.choice((2, 3))
                    kind.weights = {"save": 10, "load version": 2, "retire": 4, "let go": 1}
                kind.interrupts, kind.piece_bytes = random.choice((0.2, 0.5)), 256
                kind.stalls, kind.copying = (random.choice((0.005, 0.02)), (0.001, 0.05, 0.5)), 0.3
                kind.faults, kind.fault_count = random.sample(faults, 1), random.choice((0, 0, 0, 1))
        elif theme == "catalog":
            kind.faults, kind.fault_count = (
                ("crash catalog", "crash catalog", "catalog and shard"),
                random.choice((1, 2, 4)),
            )
            kind.clients, kind.operations, kind.names = random.choice((2, 3)), 24, random.choice((2, 3))
            kind.shards = random.choice((2, 3)) if kind.replicas > 1 else random.choice((1, 2, 3))
            kind.sizes, kind.cross = (4, 40, 200), 0.5
            kind.lost = random.choice((0.0, 0.0, 0.02))
            kind.graphs, kind.keep = random.random() < 0.5, None
            kind.weights |= {"save": 6, "retire": 4, "load": 2, "load version": 2, "pause": 1, "flush": int(kind.path)}
            kind.weights |= {"query": 2, "release": 2} if kind.graphs else {}
            kind.delays, kind.slowness_s = (0.05, 0.5, 2.0), random.choice((0.0, 0.01, 0.1))
        elif theme == "cluster":
            kind.path, kind.replicas, kind.ends, kind.slowness_s = True, 1, True, random.choice((0.0, 0.01, 0.3))
            kind.faults, kind.fault_count = ("crash shard", "scale", "kill client"), random.choice((0, 1, 2))
            kind.weights |= {"save": 6, "retire": 3}
        kind.operations = max(3, round(kind.operations * random.choice(LENGTHS)))
        if theme == "nodes":  # the planner looks once a second
            kind.operations = 40
        return kind

    @classmethod
    def _any(cls, random: Any) -> Kind:
        path = random.random() < 0.6
        nodes = random.choice((1, 1, 2))
        shards = random.choice((1, 2, 2, 3))
        replicas = 2 if nodes == 2 and shards > 1 and random.random() < 0.5 else 1
        possible = [
            "crash shard",
            "crash catalog",
            "crash planner",
            "crash both",
            "scale",
            "stop",
            "kill client",
            "restart",
        ]
        if path:
            possible += ["disk", "disk"]
        chosen = tuple(random.sample(possible, random.choice((0, 1, 1, 2, 3))))
        weights = {what: random.choice((1, 1, 3)) for what in OPERATIONS}
        stalls = random.choice((0.002, 0.01, 0.05)), random.choice(((0.0005,), (0.0005, 0.01), (0.001, 0.05, 1.0)))
        return cls(
            "any",
            shards,
            nodes,
            random.choice((1, 2, 2, 3)),
            path,
            replicas,
            random.choice((None, None, 1)),
            random.choice((16 << 10, 24 << 10, 48 << 10, 256 << 10)),
            random.choice((6, 10, 16)),
            chosen,
            random.choice((1, 1, 2, 3)) if chosen else 0,
            random.choice((1, 2, 3)),
            random.choice((0.0, 0.01, 0.3)),
            weights,
            stalls,
        )
